"""Command-line parser of all commands.

It is plain argparse for two reasons. Every refusal must be one sentence of our own with exit code 2. `autoshard --help`
must not wait for imports.
"""

import argparse
import contextlib
import difflib
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from autoshard import __version__
from autoshard.cli import capacity_commands, other_commands, plan_command
from autoshard.cli import commands as runs
from autoshard.cli.option_groups import (
    add_cache,
    add_candidates,
    add_estimated,
    add_flags,
    add_limits,
    add_output,
    add_planning,
    add_program,
    add_reinforcement,
)
from autoshard.cli.option_values import (
    latency,
    option,
    positive,
    prices,
    sampling,
    seconds,
    texts,
    tokens,
    tolerance,
    whole,
)
from autoshard.cli.session import add_on
from autoshard.errors import UserError


_COLUMNS = 79
"""Width of help texts, in characters."""
PLAN_HELP = "written by `autoshard plan --out`; given in place of PROGRAM, it names its program"
PROGRAM_HELP = """\
PROGRAM is a Python file, a file with a module, or hf:CONFIG.

  model.py   defines `program` (see --entry): an autoshard.Program, or a
             function that returns one, or (function, arguments) for JAX, or
             (module, example inputs) for torch; shapes are enough
             (jax.ShapeDtypeStruct, meta tensors), so nothing large is ever
             allocated; --train takes a torch module and the `loss` of the file
  step.mlir  StableHLO as text or portable bytecode, a jax.export artifact, an
             HLO proto or unoptimised dump
  hf:NAME    a bundled Hugging Face configuration, such as hf:llama3-8b or
             hf:gpt2 (`autoshard list models`), or the path of a config.json
"""


class _Parser(argparse.ArgumentParser):
    """Parser that raises `UserError` instead of exiting."""

    last_help: Callable[[], str] | None = None
    """Function that returns the last lines of the help. It is called for the help only, so it may import rooms."""

    def format_help(self) -> str:
        """Return argparse's help, with the lines of `last_help` after it."""
        return super().format_help() + ("" if self.last_help is None else f"\n{self.last_help()}")

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with argparse's message and a pointer to the help."""
        sentence = message if message.endswith("...") else message.removesuffix(".")
        raise UserError(f"{sentence}; see `{self.prog} --help`.")


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line, without the program's name; `run` of the result is the function of the command.

    Raises `UserError` for a wrong one, with the nearest flag as a hint. Without arguments print the help first.
    `--help` and `--version` print and raise `SystemExit`.
    """
    parser = build_parser()
    if not argv:
        parser.print_help(sys.stderr)
        raise UserError("no command given; start with `autoshard plan PROGRAM --topology TOPOLOGY`.")
    if argv[0].startswith("--") and argv[0] not in parser._option_string_actions:
        raise UserError(f"{argv[0]} stands before the command; write `autoshard COMMAND ... {argv[0]}`.")
    words = _joined(argv)
    try:
        arguments, unknown = parser.parse_known_args(words)
    except UserError:
        # A misspelt flag that is required is missing too, and argparse names the missing one alone.
        with contextlib.suppress(KeyError):
            for word in (word for word in words if word.startswith("--")):
                _check_flag(parser_of(parser, argv[0]), word)
        raise
    if unknown:
        command = parser_of(parser, arguments.command)
        _check_flag(command, unknown[0])
        quotes = "put a spec with spaces in quotes, or " if "x" in unknown else ""
        raise UserError(f"`{command.prog}` has no argument {unknown[0]}; {quotes}see `{command.prog} --help`.")
    return arguments


def _check_flag(command: argparse.ArgumentParser, word: str) -> None:
    """Raise `UserError` if a word is written as a flag that the command lacks, with the nearest flag as a hint."""
    flags = [flag for action in command._actions for flag in action.option_strings]
    written = word.split("=")[0]
    if not word.startswith("-") or written in flags:
        return
    near = [flag for flag in flags if len(written) > 3 and flag.startswith(written)]
    near = near or difflib.get_close_matches(written, flags, n=1)
    hint = f"did you mean {near[0]}?" if near else f"see `{command.prog} --help`."
    raise UserError(f"`{command.prog}` has no flag {word}; {hint}")


def _joined(argv: list[str]) -> list[str]:
    """Join `--xla-flags --xla_a=b` into one word, since argparse would read the value as a flag of its own."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] == "--xla-flags" and word.startswith("--xla_"):
            words[-1] = f"--xla-flags={word}"
        else:
            words.append(word)
    return words


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with all commands; each sets `run`, `writes` and `places` of the parsed arguments."""
    parser = _Parser(
        prog="autoshard",
        description="Plan how to split every tensor of a training or inference step over many accelerators.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"autoshard {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    plan = _command(commands, "plan", plan_command.run_plan, "choose a sharding for every tensor", PROGRAM_HELP)
    add_program(plan, auto=True)
    add_planning(plan, required=True)
    add_candidates(plan)
    add_output(plan, "-o", "--out", metavar="PLAN.json", help="write the plan here, and candidates next to it")
    plan.add_argument(
        "--for",
        dest="form",
        metavar="FORM",
        help="only what this form of export can hold: dtensor, flax ...",
    )
    plan.add_argument(
        "--compile",
        action="store_true",
        help="give the plan to the real compiler of its TPUs or GPUs: its memory is the verdict, exit code 1 past it",
    )
    add_cache(plan)

    measure = _command(
        commands,
        "measure",
        runs.run_measure,
        "run a planned program on the devices that are here",
        PROGRAM_HELP,
    )
    add_program(measure)
    measure.add_argument("--plan", metavar="PLAN.json", type=Path, help=PLAN_HELP)
    measure.add_argument(
        "--check",
        action="store_true",
        help="compare a torch source with eager torch, and the plan with the unplanned run; exit code 1 if one differs",
    )
    measure.add_argument(
        "--tolerance",
        type=tolerance,
        metavar="X",
        help="allowed difference, relative to a tensor's maximum (default: 1e-5 for float32)",
    )
    add_output(measure, "--profile", metavar="P.json.gz", help="write a trace of one more step here")
    measure.add_argument("--steps", type=positive, default=10, metavar="N", help="steps to time (default: 10)")
    add_planning(measure, required=False)
    # None unless given: `--plan` refuses the flags of planning, and without it the defaults are `autoshard.plan`'s.
    not_given = ("ignore_constraints", "time_limit", "seed", "refine_axes", "calibration")
    measure.set_defaults(**dict.fromkeys(not_given))

    compile_ = _command(
        commands,
        "compile",
        runs.run_compile,
        "compile a planned program for TPUs or GPUs, without one",
        PROGRAM_HELP,
    )
    add_program(compile_)
    compile_.add_argument("--plan", metavar="PLAN.json", type=Path, help=PLAN_HELP)
    add_output(compile_, "--hlo", metavar="OUT.txt", help="write the compiled program here")
    compile_.add_argument(
        "--quick", action="store_true", help="write no machine code: verdict, memory and schedule in seconds (TPUs)"
    )
    compile_.add_argument("--time-limit", type=seconds, default=600.0, metavar="S", help="in all (default: 600)")

    compare = _command(
        commands, "compare", runs.run_compare, "compare the plan with the plans that people write", PROGRAM_HELP
    )
    add_program(compare)
    add_candidates(compare)
    compare.add_argument("--compile", action="store_true", help="compile each for its TPUs or GPUs, without one")
    add_on(compare, "compile")
    compare.add_argument("--measure", action="store_true", help="run each on the devices that are here")
    compare.add_argument("--steps", type=positive, default=10, metavar="N", help="steps to time (default: 10)")
    add_planning(compare, required=True)
    add_cache(compare)

    sweep = _command(
        commands,
        "sweep",
        capacity_commands.run_sweep,
        "plan for several topologies, batches and remat variants",
        PROGRAM_HELP,
    )
    add_program(sweep, several=True, auto=True)
    sweep.add_argument(
        "--topology", required=True, type=texts, metavar="T,T,...", help="names or patterns: v5p-256, 'v6e:*' ..."
    )
    sweep.add_argument("--chips", type=positive, metavar="N", help="leave out topologies of more than N chips")
    add_limits(sweep)
    add_flags(sweep)
    sweep.add_argument(
        "--tokens", type=tokens, metavar="N", help="tokens of a whole run, for its days and cost: 15T, 300B"
    )
    sweep.add_argument(
        "--price",
        type=prices,
        default={},
        metavar="CHIP=X,...",
        help="price of a chip for one hour, in any currency; or a file PRICES.json with the same",
    )
    sweep.add_argument(
        "--jobs",
        type=positive,
        metavar="N",
        help="processes that plan (default: one for each core), or with --on tasks at a time (default: all)",
    )
    add_on(sweep, "plan")
    add_output(
        sweep,
        "-o",
        "--out",
        metavar="PLACE",
        place=True,
        help="keep rows here: in SWEEP.json, or in a folder with the plan of each; what it has is not made again",
    )
    add_cache(sweep)
    add_output(sweep, "--plot", metavar="SWEEP.png", help="draw step time, MFU and headroom here")

    estimate = _command(
        commands,
        "estimate",
        capacity_commands.run_estimate,
        "guess memory and step time from a model's dims, without a plan",
    )
    add_estimated(estimate)

    serve = _command(
        commands, "serve-plan", capacity_commands.run_serve_plan, "say how to serve a decoder within limits of latency"
    )
    serve.add_argument("program", metavar="PROGRAM", help="hf:CONFIG of a decoder")
    serve.add_argument("--topology", required=True, metavar="CHIP:SHAPE", help="v6e:2x4, h100:8 ...")
    serve.add_argument("--input", required=True, type=positive, metavar="N", help="tokens of a prompt")
    serve.add_argument("--output", required=True, type=positive, metavar="N", help="tokens of an answer")
    serve.add_argument(
        "--ttft", type=latency, default=float("inf"), metavar="T", help="time to first token at most, as 500ms"
    )
    serve.add_argument(
        "--tpot", type=latency, default=float("inf"), metavar="T", help="time per further token at most, as 30ms"
    )
    serve.add_argument(
        "--gap", type=latency, default=float("inf"), metavar="T", help="time between any two tokens at most, as 60ms"
    )
    stored = {"choices": ("bf16", "fp8", "int8"), "default": "bf16"}
    serve.add_argument("--weights", **stored, help="as stored and multiplied (default: bf16)")
    serve.add_argument("--cache-dtype", **stored, help="dtype of keys and values (default: bf16)")
    serve.add_argument(
        "--sample",
        type=sampling,
        default="greedy",
        metavar="S",
        help="selection of tokens, over a split vocabulary: greedy (default) or any of "
        "temperature=0.8,top_k=50,top_p=0.9",
    )
    add_output(serve, "--jax", metavar="FILE.py", help="write the best way as shardings in JAX here")
    serve.add_argument(
        "--check", action="store_true", help="plan steps of traced programs at the best way too, and compare"
    )

    add_reinforcement(
        _command(
            commands,
            "rl-plan",
            capacity_commands.run_rl_plan,
            "say which chips sample and which train in reinforcement learning",
        )
    )

    refine = _command(
        commands,
        "refine",
        other_commands.run_refine,
        "plan, have the best plans judged, learn from it, and plan again until the choice stands",
        PROGRAM_HELP,
    )
    add_program(refine)
    add_planning(refine, required=True, problem=False)
    refine.add_argument(
        "--judge",
        choices=("compile", "measure"),
        help="compilers of TPUs and GPUs, or the devices that are here (default: measure for cpu topologies)",
    )
    refine.add_argument("--plans", type=positive, default=4, metavar="N", help="judged in a round (default: 4)")
    refine.add_argument("--rounds", type=positive, default=3, metavar="N", help="at most (default: 3)")
    refine.add_argument("--steps", type=positive, default=10, metavar="N", help="to time of each plan (default: 10)")
    refine.add_argument(
        "--compile-limit",
        type=seconds,
        default=600.0,
        metavar="S",
        help="for compiling one plan (default: 600)",
    )
    add_on(refine, "compile")
    add_output(refine, "-o", "--out", metavar="PLAN.json", help="write the plan that was judged best here")

    degrees = _command(
        commands,
        "degrees",
        capacity_commands.run_degrees,
        "choose degrees of parallelism for a decoder under a GPU framework",
    )
    degrees.add_argument("program", metavar="PROGRAM", help="hf:CONFIG of a decoder, dense or with experts")
    degrees.add_argument("--topology", required=True, metavar="NAME", help="GPUs, such as h100:8*16 or gb200:72*4")
    degrees.add_argument("--batch", required=True, type=positive, metavar="N", help="sequences of a step, of all GPUs")
    degrees.add_argument("--seq", required=True, type=positive, metavar="N", help="tokens of a sequence")
    degrees.add_argument(
        "--framework", choices=("torchtitan", "megatron-core"), default="torchtitan", help="(default: torchtitan)"
    )
    add_output(
        degrees,
        "-o",
        "--out",
        metavar="FILE",
        help="write the first plan here, as torchtitan's TOML or Megatron's arguments",
    )

    diff = _command(commands, "diff", runs.run_diff, "say what differs between two plans, and what it costs")
    diff.add_argument("first", metavar="A.json", type=Path, help="a plan")
    diff.add_argument("second", metavar="B.json", type=Path, help="another")

    explain = _command(commands, "explain", runs.run_explain, "say why a tensor is split as it is, or not")
    explain.add_argument("plan", metavar="PLAN.json", type=Path, help="written by `autoshard plan --out`")
    explain.add_argument("name", metavar="NAME", help="an argument or result, as reports print it")
    explain.add_argument(
        "--program", metavar="PROGRAM", help="path of the program (default: its path at planning); a Python file is run"
    )
    explain.add_argument("--entry", metavar="NAME", help="name in model.py (default: as it was)")
    explain.add_argument(
        "--solve", action="store_true", help="solve all other decisions again for the eight most promising specs"
    )
    explain.add_argument(
        "--time-limit", type=seconds, default=60.0, metavar="S", help="processor seconds to solve (default: 60)"
    )

    report = _command(commands, "report", runs.run_report, "show a plan, a sweep or ways to serve")
    report.add_argument(
        "plan",
        metavar="PLAN.json",
        type=Path,
        help="from `autoshard plan --out`, `sweep --out`, or `serve-plan --json`",
    )
    add_output(report, "-o", "--out", metavar="REPORT.html", help="write a page here instead")
    add_output(report, "--perfetto", metavar="TRACE.json", help="write a trace for ui.perfetto.dev here")
    report.add_argument("--compiled", metavar="C.json", type=Path, help="output of `autoshard compile --json`")
    report.add_argument("--profile", metavar="P.json.gz", type=Path, help="file of `autoshard measure --profile`")
    report.add_argument("--compare", metavar="OTHER.json", type=Path, help="another plan to compare with this one")
    report.add_argument("--measured", metavar="M.json", type=Path, help="output of `autoshard measure --json`")
    report.add_argument("--tokens", type=tokens, metavar="N", help="for a sweep: tokens of a whole run, as 15T, 300B")
    report.add_argument(
        "--price",
        type=prices,
        default={},
        metavar="CHIP=X,...",
        help="for a sweep: price of a chip's hour, or PRICES.json",
    )
    report.add_argument("--plans", action="store_true", help="for a sweep: write each plan's page too, and link it")

    export = _command(commands, "export", runs.run_export, "write a plan as code or configuration for elsewhere")
    export.add_argument("plan", metavar="PLAN.json", type=Path, help="written by `autoshard plan --out`")
    export.add_argument("--to", required=True, metavar="FORM", help="jax, fsdp2 or another form, see below")
    export.last_help = _forms_help
    export.add_argument(
        "--program", metavar="PROGRAM", help="path of the program (default: its path at planning); a Python file is run"
    )
    export.add_argument("--entry", metavar="NAME", help="name in model.py (default: as it was)")
    add_output(
        export,
        "-o",
        "--out",
        metavar="FILE",
        help="write here instead of to stdout",
        force="write it even if the form cannot hold the plan, and over a file that the command reads",
    )

    graph = _command(
        commands,
        "graph",
        other_commands.run_graph,
        "write a program's ops and tensors as a graph, or draw them",
        PROGRAM_HELP,
    )
    add_program(graph)
    graph.add_argument(
        "--plan", metavar="PLAN.json", type=Path, help="a plan of the program: specs, times, collectives"
    )
    add_output(graph, "-o", "--out", metavar="FILE", help="write g.graphml, g.json (node-link) or g.svg")
    graph.add_argument("--whole", action="store_true", help="in g.svg a box for every op, not for heavy ones only")

    solve = _command(commands, "solve", runs.run_solve, "solve a Problem in the contest's format")
    solve.add_argument("problem", metavar="PROBLEM.json", help="JSON, also gzipped; what --save-problem writes")
    solve.add_argument("--time-limit", type=seconds, default=60.0, metavar="S", help="in all (default: 60)")
    solve.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of randomised searches (default: 0)")
    solve.add_argument("--threads", type=positive, default=2, metavar="N", help="to search with (default: 2)")
    solve.add_argument("--iterations", type=positive, metavar="N", help="stop after so many, to repeat a run exactly")
    add_output(solve, "-o", "--out", metavar="OUT.json", help="write choices, cost and bound here")

    validate = _command(
        commands, "validate", other_commands.run_validate, "check the cost model against worked questions and runs"
    )
    validate.add_argument("--data", metavar="FILE", type=Path, help="other runs or questions, of a shipped file's form")
    validate.add_argument(
        "--pairs",
        metavar="FILE",
        nargs="?",
        const=True,
        help="measured plans of one model instead (default: shipped); ultrascale, vtrain: runs on GPUs",
    )
    validate.add_argument(
        "--only", type=texts, metavar="NAME,...", help="with --pairs: groups whose names contain these"
    )
    validate.add_argument(
        "--assume",
        type=option,
        action="append",
        metavar="KEY=VALUE",
        help="with --pairs: for rows that do not state this key; may be repeated",
    )
    validate.add_argument(
        "--compile", action="store_true", help="with --pairs: by the TPU compiler and its schedule, a minute a row"
    )
    add_output(validate, "--html", metavar="PAIRS.html", help="with --pairs: write one page here")
    add_output(validate, "--plot", metavar="PAIRS.png", help="with --pairs: draw predicted over measured")

    list_ = _command(commands, "list", other_commands.run_list, "say which models, topologies and chips can be named")
    list_.add_argument(
        "what",
        choices=other_commands.LISTS,
        metavar=f"{{{','.join(other_commands.LISTS)}}}",
        help="models are bundled configurations, for hf:NAME",
    )
    list_.add_argument(
        "pattern", nargs="?", metavar="PATTERN", help="pattern of topologies: 'v5e:*', 'v6e:16x16*1-4' ..."
    )

    completion = _command(
        commands,
        "completion",
        other_commands.run_completion,
        "print a shell's completion of this command, to be sourced",
    )
    completion.add_argument("shell", choices=other_commands.SHELLS, help="docs/command.md says where it belongs")
    completion.set_defaults(whole=parser)

    _command(commands, "doctor", runs.run_doctor, "say what is installed, what is here, and what will work")
    return parser


def parser_of(parser: argparse.ArgumentParser, command: str) -> argparse.ArgumentParser:
    """Return the parser of one command; raise `KeyError` for an unknown one."""
    (choices,) = (a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return choices[command]


def _forms_help() -> str:
    """Return the text that lists the forms of an export with one line of help each."""
    from autoshard.planning import FORMS

    width = max(map(len, FORMS))
    return "FORM is one of these:\n\n" + "".join(f"  {name:{width}}  {form.help}\n" for name, form in FORMS.items())


def _command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace, TextIO], int],
    summary: str,
    epilog: str = "",
) -> _Parser:
    """Add a command with the flags that all commands share (`--json`, `--quiet`, `--debug`), and return its parser.

    - `commands`: argparse's subparsers.
    - `name`: the command's name.
    - `run`: function that `parse` stores as `run`; it returns the exit code.
    - `summary`: one clause that the list of commands and the help show.
    - `epilog`: text after the help.
    """
    parser = commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(summary[0].upper() + summary[1:] + ".", _COLUMNS),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, writes={}, places=())
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, nothing else there")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser
