"""The `autoshard` command: parse, call one function, print.

argparse, not a framework on top of it: every refusal must be one sentence in our own words with exit code 2,
and `autoshard --help` must not wait for imports.
"""

import argparse
import contextlib
import difflib
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from autoshard import __version__
from autoshard.errors import UserError


if TYPE_CHECKING:
    from autoshard.program import Program
    from autoshard.report import Progress

GIB = 2**30

PROGRAM_HELP = """\
PROGRAM is a Python file or hf:CONFIG.

  model.py      defines `program` (see --entry): an autoshard.Program, or a function that returns one, or
                (function, arguments) for JAX, or (module, example inputs) for torch; shapes are enough
                (jax.ShapeDtypeStruct, meta tensors), so nothing large is ever allocated
  hf:NAME       a bundled Hugging Face configuration, such as hf:llama3-8b or hf:gpt2, or the path of a config.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 past a tolerance, 2 for bad input."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    try:
        arguments = _parse(argv)
        with _stdout_kept_for_the_answer() as answer:
            return arguments.run(arguments, answer)
    except UserError as error:
        if debug:
            raise
        print(f"autoshard: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has seen enough (`| head`); without this, Python complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        print("autoshard: interrupted", file=sys.stderr)
        return 130


# Commands


def _plan(arguments: argparse.Namespace, answer: TextIO) -> int:
    for flag, path in (("--out", arguments.out), ("--save-problem", arguments.save_problem)):
        _check_writable(flag, path)
    # Planning never touches an accelerator: without this JAX would look for one, and wait for it.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with _progress(arguments) as progress:
        began = time.perf_counter()
        program = _open(arguments, progress)
        traced = time.perf_counter() - began
        from autoshard.plan import make_plan, save_plan

        result = make_plan(program, **_plan_options(arguments), progress=progress)
        if arguments.out:
            save_plan(result.plan, arguments.out)
    wall_s = {"trace": traced, **result.wall_s, "total": time.perf_counter() - began}
    from autoshard.report import plan_figures, terminal_report

    if arguments.json:
        _print_json(plan_figures(result.plan, wall_s), answer)
    else:
        _print_rich(terminal_report(result.plan, wall_s), answer)
        if arguments.out:
            print(f"Plan written to {arguments.out}", file=answer)
    return 0


def _measure(arguments: argparse.Namespace, answer: TextIO) -> int:
    from autoshard.cost import Topology
    from autoshard.exec import ensure_devices, measure, measurement_figures
    from autoshard.plan import load_plan, make_plan

    _check_writable("--save-problem", arguments.save_problem)
    if (arguments.plan is None) == (arguments.topology is None):
        raise UserError("`autoshard measure` takes either --plan PLAN.json, or --topology to plan first.")
    for flag in ("mesh", "memory_limit", "save_problem"):
        if arguments.plan is not None and getattr(arguments, flag) is not None:
            raise UserError(f"--{flag.replace('_', '-')} is for planning; {arguments.plan} is a plan already.")
    plan = load_plan(arguments.plan) if arguments.plan else None
    topology = Topology.parse(plan.topology if plan else arguments.topology)
    if topology.backend == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        ensure_devices(topology.num_devices)
    else:
        import jax

        if jax.default_backend() == "cpu":
            raise UserError(
                f"the plan is for {topology.name}, but only CPU devices are here; "
                f"plan for cpu:{topology.num_devices} to rehearse it."
            )
    with _progress(arguments) as progress:
        program = _open(arguments, progress)
        if plan is None:
            plan = make_plan(program, **_plan_options(arguments), progress=progress).plan
        progress("Running the planned step" + (" and the unplanned one" if arguments.check else ""))
        result = measure(program, plan, steps=arguments.steps, check=arguments.check, tolerance=arguments.tolerance)
    from autoshard.report import measurement_report

    figures = measurement_figures(result)
    if arguments.json:
        _print_json(figures, answer)
    else:
        _print_rich(measurement_report(plan, figures), answer)
    return 0 if result.check is None or result.check.passed else 1


def _report(arguments: argparse.Namespace, answer: TextIO) -> int:
    _check_writable("--out", arguments.out)
    _check_writable("--perfetto", arguments.perfetto)
    from autoshard.plan import load_plan
    from autoshard.report import html_report, perfetto_json, plan_figures, terminal_report, write_text

    plan = load_plan(arguments.plan)
    written: dict[str, str] = {}
    if arguments.perfetto is not None:
        written[str(arguments.perfetto)] = perfetto_json(plan)
    if arguments.out is None:
        for flag in ("compare", "measured"):
            if getattr(arguments, flag):
                raise UserError(f"--{flag} is for the page; name it with --out report.html.")
    else:
        compare = load_plan(arguments.compare) if arguments.compare else None
        measured = _read_json(arguments.measured) if arguments.measured else None
        written[str(arguments.out)] = html_report(plan, compare=compare, measured=measured)
    for path, text in written.items():
        write_text(Path(path), text)
    if arguments.json:
        _print_json(plan_figures(plan) | {"written": sorted(written)}, answer)
    elif written:
        for path in written:
            print(f"Written: {path}", file=answer)
    else:
        _print_rich(terminal_report(plan), answer)
    return 0


def _solve(arguments: argparse.Namespace, answer: TextIO) -> int:
    _check_writable("--out", arguments.out)
    from autoshard.solver._command import run_solve

    with contextlib.redirect_stdout(answer), contextlib.ExitStack() as quiet:
        if arguments.quiet:
            quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
        return run_solve(
            str(arguments.problem),
            time_limit=arguments.time_limit,
            seed=arguments.seed,
            threads=arguments.threads,
            out=str(arguments.out) if arguments.out else None,
        )


def _doctor(arguments: argparse.Namespace, answer: TextIO) -> int:
    from autoshard.report import doctor, doctor_report

    found = doctor()
    if arguments.json:
        _print_json(found, answer)
    else:
        _print_rich(doctor_report(found), answer)
    return 0


# Parsing


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`.")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = build_parser()
    if not argv:
        parser.print_help(sys.stderr)
        raise UserError("no command given; start with `autoshard plan PROGRAM --topology TOPOLOGY`.")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        command = parser_of(parser, arguments.command)
        flags = [flag for action in command._actions for flag in action.option_strings]
        given = unknown[0].split("=")[0]
        near = [flag for flag in flags if len(given) > 3 and flag.startswith(given)]
        near = near or difflib.get_close_matches(given, flags, n=1)
        hint = f"did you mean {near[0]}?" if near else f"see `{command.prog} --help`."
        kind = "flag" if unknown[0].startswith("-") else "argument"
        raise UserError(f"`autoshard {arguments.command}` has no {kind} {unknown[0]}; {hint}")
    return arguments


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="autoshard",
        description="Plan how to split every tensor of a training or inference step over many accelerators.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"autoshard {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    plan = _command(commands, "plan", _plan, "choose a sharding for every tensor", PROGRAM_HELP)
    _add_program(plan)
    _add_planning(plan, required=True)
    plan.add_argument("--out", metavar="PLAN.json", type=Path, help="write the plan here")

    measure = _command(
        commands, "measure", _measure, "run a planned program on the devices that are here", PROGRAM_HELP
    )
    _add_program(measure)
    measure.add_argument("--plan", metavar="PLAN.json", type=Path, help="written by `autoshard plan --out`")
    measure.add_argument(
        "--check", action="store_true", help="compare with the unplanned run; exit code 1 if it differs"
    )
    measure.add_argument(
        "--tolerance", type=_tolerance, metavar="X", help="of a tensor's own maximum (default: 1e-5 for float32)"
    )
    measure.add_argument("--steps", type=_positive, default=10, metavar="N", help="steps to time (default: 10)")
    _add_planning(measure, required=False)

    report = _command(commands, "report", _report, "show a plan that was saved")
    report.add_argument("plan", metavar="PLAN.json", type=Path, help="written by `autoshard plan --out`")
    report.add_argument("-o", "--out", metavar="REPORT.html", type=Path, help="write a page here instead")
    report.add_argument("--perfetto", metavar="TRACE.json", type=Path, help="write a trace for ui.perfetto.dev here")
    report.add_argument("--compare", metavar="OTHER.json", type=Path, help="another plan to set beside this one")
    report.add_argument("--measured", metavar="M.json", type=Path, help="what `autoshard measure --json` printed")

    solve = _command(commands, "solve", _solve, "solve a Problem in the contest's format", json_flag=False)
    solve.add_argument("problem", metavar="PROBLEM.json", help="JSON, also gzipped; what --save-problem writes")
    solve.add_argument("--time-limit", type=_seconds, default=60.0, metavar="S", help="in all (default: 60)")
    solve.add_argument("--seed", type=int, default=0, metavar="N", help="of searches that draw lots (default: 0)")
    solve.add_argument("--threads", type=_positive, default=2, metavar="N", help="to search with (default: 2)")
    solve.add_argument("--out", type=Path, metavar="OUT.json", help="write choices, cost and bound here")

    _command(commands, "doctor", _doctor, "say what is installed, what is here, and what will work")
    return parser


def parser_of(parser: argparse.ArgumentParser, command: str) -> argparse.ArgumentParser:
    """The parser of one sub-command."""
    (choices,) = (a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return choices[command]


def _command(
    commands: Any, name: str, run: Any, summary: str, epilog: str = "", json_flag: bool = True
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    if json_flag:
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, nothing else there")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_program(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", metavar="PROGRAM", help="model.py or hf:CONFIG, see below")
    parser.add_argument("--entry", default="program", metavar="NAME", help="name in model.py (default: program)")
    group = parser.add_argument_group("for hf:CONFIG")
    mode = group.add_mutually_exclusive_group()
    mode.add_argument("--train", action="store_true", default=None, help="a training step: loss, backward, optimizer")
    mode.add_argument("--infer", action="store_false", dest="train", default=None, help="a forward pass")
    group.add_argument("--batch", type=_positive, metavar="N", help="sequences in one step, over all devices")
    group.add_argument("--seq", type=_positive, metavar="N", help="tokens of one sequence")
    group.add_argument("--dtype", metavar="DTYPE", help="of parameters and activations: bfloat16, float32")
    group.add_argument("--state-dtype", metavar="DTYPE", help="of the optimizer's state")
    group.add_argument("--remat", choices=("none", "dots", "full"), help="what the backward pass computes again")
    group.add_argument("--optimizer", metavar="NAME", help="adamw, sgd")


def _add_planning(parser: argparse.ArgumentParser, required: bool) -> None:
    group = parser.add_argument_group("planning")
    group.add_argument("--topology", required=required, metavar="CHIP:SHAPE", help="v5p:4x8x8, v6e:16x16*2, cpu:8 ...")
    group.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="axes and sizes, major first (default: XLA_AUTO_SPMD_MESH, else data=<all devices>)",
    )
    group.add_argument("--memory-limit", type=_gib, metavar="GiB", help="of one device (default: what the chip has)")
    group.add_argument("--time-limit", type=_seconds, default=60.0, metavar="S", help="for the solver (default: 60)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of searches that draw lots (default: 0)")
    group.add_argument(
        "--save-problem", type=Path, metavar="P.json.gz", help="write the Problem, in the contest's format"
    )


def _positive(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (value := int(text)) > 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")


def _tolerance(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")


def _gib(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return int(value * GIB)
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of GiB")


# Shared by the commands


def _progress(arguments: argparse.Namespace) -> "Progress":
    from autoshard.report import Progress

    return Progress(quiet=arguments.quiet)


def _open(arguments: argparse.Namespace, progress: "Progress") -> "Program":
    progress(f"Tracing {arguments.program}")
    from autoshard.program import open_source

    names = ("train", "batch", "seq", "dtype", "state_dtype", "remat", "optimizer")
    options = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return open_source(arguments.program, entry=arguments.entry, **options)


def _plan_options(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("topology", "mesh", "memory_limit", "time_limit", "seed", "save_problem")
    return {name: getattr(arguments, name) for name in names}


def _check_writable(flag: str, path: Path | None) -> None:
    """Before minutes of work, not after."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{flag} {path} is a directory; name a file.")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{flag} {path}: the directory {path.absolute().parent} does not exist; create it first.")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError(f"{flag} {path} cannot be written: permission denied.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); give what `autoshard measure --json` printed.") from error
    if not isinstance(value, dict) or "step_time_s" not in value:
        raise UserError(f"{path} has no `step_time_s`; give what `autoshard measure --json` printed.")
    return value


@contextlib.contextmanager
def _stdout_kept_for_the_answer() -> Iterator[TextIO]:
    """Whatever libraries or the user's own file print goes to stderr; yields the true stdout."""
    answer = sys.stdout
    answer.flush()
    try:
        descriptor = answer.fileno()
    except OSError:  # a stream in memory, as under pytest
        with contextlib.redirect_stdout(sys.stderr):
            yield answer
        return
    kept = os.dup(descriptor)
    os.dup2(sys.stderr.fileno(), descriptor)
    try:
        with contextlib.redirect_stdout(sys.stderr), _open_answer(kept, answer) as stream:
            yield stream
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


def _open_answer(descriptor: int, like: TextIO) -> TextIO:
    # A terminal that cannot show a character gets `?` rather than a traceback.
    return open(descriptor, "w", encoding=like.encoding, errors="replace", closefd=False)


def _print_json(value: dict[str, Any], answer: TextIO) -> None:
    json.dump(value, answer, indent=2, allow_nan=False)
    answer.write("\n")


def _print_rich(renderable: Any, answer: TextIO) -> None:
    from rich.console import Console

    Console(file=answer).print(renderable)
