"""The command `autoshard plan`: from parsed arguments to a plan, printed and saved."""

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from autoshard.cli.commands import compile_here
from autoshard.cli.inputs import PROGRAM_OPTIONS, need_no_accelerator, out_files, plan_source
from autoshard.cli.outputs import print_json, print_rich, show_progress
from autoshard.cli.session import start_helpers
from autoshard.errors import FormError, UserError


if TYPE_CHECKING:
    from autoshard.exec import CompileReport
    from autoshard.planning import Plan
    from autoshard.program import Program


def run_plan(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard plan`: print the plan and the next command, and save it and its candidates to `--out`.

    With `--compile` the plan is compiled, and printed and saved with the compiler's figures. Return 1 if the compiled
    program does not fit, else 0.

    Raises `UserError` for options that no program satisfies, if no plan fits, and with `--compile` as `compile_plan`
    does. A plan `--for` a form is refused if it cannot be exported to it. A missing compiler is refused before
    planning. If the compiler fails, the plan is printed first.
    """
    _check_devices(arguments)
    # Planning uses no accelerator. Without this call JAX would search for one and wait for it.
    need_no_accelerator()
    if arguments.compile:
        _check_compilable(arguments)
    compiled: CompileReport | None = None
    failed: UserError | None = None
    with start_helpers() as crew, show_progress(arguments) as progress:
        began = time.perf_counter()
        planned = plan_source(arguments, progress, crew)
        result = planned.result
        from autoshard.planning import keep_program, save_plan

        _check_form(result.plan, planned.last)
        offered = result.candidates if arguments.candidates > 1 else ()
        written = out_files(arguments.out, len(result.candidates))
        for each, path in zip(result.candidates, written, strict=False):
            save_plan(each.plan, path)
            if arguments.cached and planned.last.fingerprint == each.plan.program_fingerprint:
                keep_program(each.plan, planned.last)
        plan, wall_s = result.plan, {"trace": planned.traced_s, **result.wall_s}
        if arguments.compile:
            # The plan's own source has the options that the planner chose.
            as_planned = argparse.Namespace(**{**vars(arguments), **dict.fromkeys(PROGRAM_OPTIONS)})
            try:
                compiled = compile_here(as_planned, progress, result.plan, quick=True)
            except UserError as error:
                failed = error
            else:
                from autoshard.exec import compiled_plan

                wall_s["compile"] = compiled.compile_s
                plan = compiled_plan(plan, compiled)
                for path in written[:1]:
                    save_plan(plan, path)
        total = time.perf_counter() - began
        wall_s |= {"other": total - sum(wall_s.values()), "total": total}
    from autoshard.report import candidate_figures, candidates_report, plan_figures, terminal_report

    if arguments.json:
        more: dict[str, Any] = {"candidates": candidate_figures(offered)} if offered else {}
        if compiled is not None:
            from autoshard.exec import compile_figures

            more["compiled"] = compile_figures(compiled)
        print_json(plan_figures(plan, wall_s) | more, answer)
    else:
        print_rich(terminal_report(plan, wall_s), answer)
        if offered:
            print_rich(candidates_report(offered), answer)
        for number, path in enumerate(written):
            print(f"{f'Candidate {number + 1}' if number else 'Plan'} written to {path}", file=answer)
        print(f"Next: {_next_command(arguments, plan, written)}", file=answer)
    if failed is not None:
        raise failed
    return 1 if plan.compiled is not None and not plan.compiled.fits else 0


def _check_devices(arguments: argparse.Namespace) -> None:
    """Raise `UserError` for an unknown topology, and for a given mesh that it cannot have, before the planner and JAX
    are imported, which takes seconds.
    """
    from autoshard.cost import AUTO, Topology, make_mesh, parse_mesh

    topology = Topology.parse(arguments.topology)
    if arguments.mesh is not None and arguments.mesh != AUTO:
        make_mesh(topology, parse_mesh(arguments.mesh))


def _check_compilable(arguments: argparse.Namespace) -> None:
    """Raise `UserError` for a topology without a compiler here, and for a program for each stage."""
    from autoshard.cost import Topology
    from autoshard.exec import compiler_target
    from autoshard.planning.stages.stage_programs import is_by_stage

    compiler_target(Topology.parse(arguments.topology))
    if is_by_stage({name: getattr(arguments, name) for name in PROGRAM_OPTIONS}, arguments.form):
        raise UserError("--compile is for one program; leave it out with a program for each stage.")


def _check_form(plan: "Plan", program: "Program") -> None:
    """Raise `FormError` if a plan that was made for a form cannot be exported to it.

    - `program`: the program that was planned last; nothing is checked if that is not the plan's.
    """
    from autoshard.exports import export_plan
    from autoshard.planning import FORMS

    form = FORMS.get(plan.origin.form)
    if form is None or plan.by_stage or not form.text or program.fingerprint != plan.program_fingerprint:
        return
    try:
        export_plan(plan, form.name, program)
    except FormError as error:
        raise FormError(
            f"the plan found for {form.name} cannot be exported: {str(error).rstrip('.')}; try another --mesh or form."
        ) from error


def _next_command(arguments: argparse.Namespace, plan: "Plan", written: Sequence[Path]) -> str:
    """Return the command that a user is most likely to need after a plan, ready to paste.

    It is an export for a plan for a form, a call for JAX in stages, or `measure` on a CPU. For a compiled plan it is
    the page, else `compile`. If nothing was written, it is the hint to write the plan.
    """
    from autoshard.cost import Topology

    if not written:
        return "add --out plan.json to compile, run or export the plan"
    file = shlex.quote(str(written[0]))
    if plan.by_stage and not plan.origin.form:
        return f'autoshard.load("{written[0]}").jit(step) in your training script'
    if plan.origin.form:
        return f"autoshard export {file} --to {plan.origin.form}"
    program, traits = _program_words(arguments), Topology.parse(plan.topology).traits
    if traits.judge == "measure":
        return f"autoshard measure {program} --plan {file} --check"
    if arguments.compile:
        return f"autoshard report {file} -o report.html"
    return f"autoshard compile {program} --plan {file}{' --quick' if traits.compiles_ahead else ''}"


def _program_words(arguments: argparse.Namespace) -> str:
    """Return the program and the options, quoted for a shell, that a plan does not store and its program needs."""
    words = [arguments.program]
    if arguments.entry != "program":
        words += ["--entry", arguments.entry]
    if arguments.roles:
        words += ["--roles", ",".join(f"{name}={role}" for name, role in arguments.roles.items())]
    if arguments.rules is not None:
        words += ["--rules", str(arguments.rules)]
    return shlex.join(words)
