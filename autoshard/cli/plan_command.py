"""The command `autoshard plan`: from parsed arguments to a plan, printed and saved."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from autoshard.cli.inputs import need_no_accelerator, open_program, out_files, plan_options
from autoshard.cli.outputs import print_json, print_rich, show_progress
from autoshard.cli.session import start_helpers
from autoshard.errors import UserError


if TYPE_CHECKING:
    from autoshard.base.workers import WorkerCrew
    from autoshard.planning import Options, Plan, PlanResult
    from autoshard.program import Program
    from autoshard.report import ProgressLine


def run_plan(arguments: argparse.Namespace, answer: TextIO) -> int:
    # Planning uses no accelerator. Without this call JAX would search for one and wait for it.
    """Run `autoshard plan`."""
    need_no_accelerator()
    with start_helpers() as crew, show_progress(arguments) as progress:
        began = time.perf_counter()
        result, traced = _planned(arguments, progress, crew)
        from autoshard.planning import save_plan

        offered = result.candidates if arguments.candidates > 1 else ()
        written = out_files(arguments.out, len(result.candidates))
        for each, path in zip(result.candidates, written, strict=False):
            save_plan(each.plan, path)
    wall_s = {"trace": traced, **result.wall_s, "total": time.perf_counter() - began}
    from autoshard.report import candidate_figures, candidates_report, plan_figures, terminal_report

    if arguments.json:
        more = {"candidates": candidate_figures(offered)} if offered else {}
        print_json(plan_figures(result.plan, wall_s) | more, answer)
    else:
        print_rich(terminal_report(result.plan, wall_s), answer)
        if offered:
            print_rich(candidates_report(offered), answer)
        for number, path in enumerate(written):
            print(f"{f'Candidate {number + 1}' if number else 'Plan'} written to {path}", file=answer)
        print(f"Next: {_next_command(arguments, result.plan, written)}", file=answer)
    return 0


def _next_command(arguments: argparse.Namespace, plan: "Plan", written: Sequence[Path]) -> str:
    """Return the command that a user is most likely to need after a plan, ready to paste."""
    from autoshard.cost import Topology

    if not written:
        return "add --out plan.json to compile, run or export the plan"
    if plan.by_stage:
        return f"autoshard export {written[0]} --to {plan.origin.form}"
    if Topology.parse(plan.topology).traits.judge == "measure":
        return f"autoshard measure {arguments.program} --plan {written[0]} --check"
    return f"autoshard compile {arguments.program} --plan {written[0]}"


def _planned(arguments: argparse.Namespace, progress: "ProgressLine", crew: "WorkerCrew") -> tuple["PlanResult", float]:
    """Return the plan and the seconds of tracing.

    The planner traces the program once for each recipe if options are `auto` or if the program declares choices of its
    own.
    """
    traced = 0.0

    def traced_with(**recipe: Any) -> "Program":
        """Trace the program with one recipe: values of options that are `auto`, and of the program's own choices."""
        nonlocal traced
        began = time.perf_counter()
        for name in open_choices:
            setattr(arguments, name, recipe[name])
        program = open_program(
            arguments,
            progress,
            arguments.topology,
            kept=arguments.cached and arguments.rules is None,
            recipe={name: value for name, value in recipe.items() if name not in open_choices},
        )
        traced += time.perf_counter() - began
        return program

    from autoshard.planning import is_by_stage, make_plan, plan_recipes, source_choices
    from autoshard.program import read_choices

    options = plan_options(arguments)
    if is_by_stage(vars(arguments), options.form):
        return _planned_by_stage(arguments, options, progress, crew)
    open_choices = source_choices(vars(arguments), arguments.topology)
    program_choices = read_choices(arguments.program, arguments.entry)
    keywords = {
        "progress": progress, "crew": crew, "kept": arguments.cached, "save_problem": arguments.save_problem,
    }  # fmt: skip
    if open_choices or program_choices:
        return plan_recipes(
            traced_with, {**open_choices, **program_choices}, options, of_source=not program_choices, **keywords
        )[1], traced
    return make_plan(traced_with(), options, **keywords), traced


def _planned_by_stage(
    arguments: argparse.Namespace, options: "Options", progress: "ProgressLine", crew: "WorkerCrew"
) -> tuple["PlanResult", float]:
    """Return the plan of a pipeline whose stages are programs of their own, and the seconds of tracing."""
    from autoshard.planning import plan_by_stage

    traced = 0.0

    def opened(**more: Any) -> "Program":
        """Trace the program with some arguments replaced, as a program without pipeline options."""
        nonlocal traced
        began = time.perf_counter()
        unstaged = {"stages": None, "microbatches": None, "schedule": None}
        program = open_program(
            argparse.Namespace(**{**vars(arguments), **unstaged, **more}), progress, arguments.topology
        )
        traced += time.perf_counter() - began
        return program

    if arguments.save_problem is not None:
        raise UserError("--save-problem is for one program; leave it out with a program for each stage.")
    return plan_by_stage(opened, vars(arguments), options, progress=progress, crew=crew), traced
