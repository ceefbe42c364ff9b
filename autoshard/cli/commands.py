"""Functions of the main commands; each maps parsed arguments to printed output and an exit code."""

import argparse
import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from autoshard.cli.capacity_commands import report_serving, report_sweep
from autoshard.cli.inputs import (
    check_unread,
    need_no_accelerator,
    open_program,
    plan_source,
    read_compiled,
    read_json,
    stand_in_devices,
    start_devices,
    take_plan_alone,
)
from autoshard.cli.outputs import print_json, print_rich, show_progress
from autoshard.cli.session import connect, ray_of
from autoshard.errors import UserError


if TYPE_CHECKING:
    from autoshard.base.ray_pool import RayPool
    from autoshard.exec import CompileReport
    from autoshard.planning import Plan
    from autoshard.report import ProgressLine


PROFILED_STEPS = 3
"""Number of steps that `measure` runs under the profiler, after the timed ones."""


def run_measure(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard measure`: run the step of `--plan`, or of a plan made for `--topology`, on the devices here.

    Return 1 if a check failed, else 0. Raises `UserError` with both flags or neither, for planning flags next to
    `--plan`, and for missing devices.
    """
    from autoshard.cost import Topology
    from autoshard.exec import measure, measurement_figures
    from autoshard.planning import load_plan

    take_plan_alone(arguments)
    if (arguments.plan is None) == (arguments.topology is None):
        raise UserError("`autoshard measure` takes either --plan PLAN.json, or --topology to plan first.")
    planning = ("mesh", "memory_limit", "save_problem", "pin", "forbid", "axis_only", "replicate", "pin_from")
    planning += ("xla_flags", "ignore_constraints", "time_limit", "seed", "refine_axes", "calibration")
    for name in planning:
        given = getattr(arguments, name)
        if arguments.plan is not None and given is not None and given != []:
            flag = (f"no-{name}" if given is False else name).replace("_", "-")
            raise UserError(f"--{flag} is for planning; {arguments.plan} is a plan already.")
    plan = load_plan(arguments.plan) if arguments.plan else None
    topology = Topology.parse(plan.topology if plan else arguments.topology)
    start_devices(topology)
    with show_progress(arguments) as progress:
        if plan is None:
            planned = plan_source(arguments, progress)
            plan = planned.result.plan
            # A plan by stage was made of one microbatch, and the whole step is measured.
            program = None if plan.by_stage else planned.program(arguments, progress)
        else:
            program = None
        if program is None:
            program = open_program(arguments, progress, topology.name, plan=plan, by_stage=True)
        progress("Running the planned step" + (" and the unplanned one" if arguments.check else ""))
        measuring = {name: getattr(arguments, name) for name in ("steps", "check", "tolerance", "profile")}
        result = measure(program, plan, **measuring, timed_collectives=PROFILED_STEPS)
    from autoshard.report import measurement_report

    figures = measurement_figures(result)
    if arguments.json:
        print_json(figures, answer)
    else:
        print_rich(measurement_report(plan, figures), answer)
    return 1 if result.failed else 0


def run_compile(arguments: argparse.Namespace, answer: TextIO) -> int:
    # The compiler runs in a separate process; JAX only traces in this one.
    """Run `autoshard compile`: compile the plan without devices, and print the report; write the HLO to `--hlo`.

    Return 1 if the program does not fit, else 0. Raises `UserError` as `compile_plan` does.
    """
    need_no_accelerator()
    from autoshard.cost import Topology
    from autoshard.exec import Verdict, compile_figures, compile_lines, compiler_target
    from autoshard.planning import load_plan
    from autoshard.report import write_text

    take_plan_alone(arguments)
    if arguments.plan is None:
        raise UserError("`autoshard compile` takes a PLAN.json, or PROGRAM --plan PLAN.json.")
    plan = load_plan(arguments.plan)
    compiler_target(Topology.parse(plan.topology))  # a plan for other devices is refused before the program is traced
    with show_progress(arguments) as progress:
        result = compile_here(arguments, progress, plan, quick=arguments.quick, time_limit=arguments.time_limit)
    if arguments.hlo is not None:
        write_text(arguments.hlo, result.hlo)
    if arguments.json:
        print_json(compile_figures(result), answer)
    else:
        print("\n".join(compile_lines(result)), file=answer)
    return 1 if result.verdict is Verdict.DOES_NOT_FIT else 0


def compile_here(
    arguments: argparse.Namespace,
    progress: "ProgressLine",
    plan: "Plan",
    *,
    quick: bool,
    time_limit: float = 600.0,
) -> "CompileReport":
    """Open the program of the plan again, compile it without devices, and return the report.

    `quick` and `time_limit` are those of `compile_plan`. Raises `UserError` as `compile_plan` does.
    """
    from autoshard.exec import compile_plan, verify_program

    program = verify_program(open_program(arguments, progress, plan.topology, plan=plan), plan)
    progress(f"Compiling for {plan.topology}" + ("" if quick else " (minutes for a large model)"))
    return compile_plan(program, plan, time_limit=time_limit, quick=quick)


def run_compare(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard compare`: print our plan next to the baselines, compiled or measured if asked; return 0.

    Raises `UserError` for `--on` without `--compile`, and as `_compare` does.
    """
    if arguments.on and not arguments.compile:
        raise UserError("--on is for --compile: what is measured runs on the devices that are here.")
    from autoshard.cost import Topology

    topology = Topology.parse(arguments.topology)
    if arguments.measure:
        start_devices(topology)
    else:
        need_no_accelerator()
    with ray_of(arguments) as pool:
        return _compare(arguments, answer, pool)


def _compare(arguments: argparse.Namespace, answer: TextIO, pool: "RayPool | None") -> int:
    """Plan, compile or measure our plan and the baselines, and print them side by side; return 0.

    A plan that cannot be compiled or measured gets a row with its error. Raises `UserError` if that is every row.
    """
    from autoshard.exec import compile_figures, compile_plans, measure, measurement_figures
    from autoshard.report import ComparisonRow, candidates, comparison_figures, comparison_report

    rows = []
    run = arguments.compile or arguments.measure
    with show_progress(arguments) as progress:
        connect(pool, progress)
        source = plan_source(arguments, progress)
        planned, program = source.result, source.program(arguments, progress) if run else source.last
        offered = list(candidates(planned.plan, planned.baseline_plans, run, planned.candidates))
        plans = {name: plan for name, plan, _ in offered} if arguments.compile else {}
        reports = dict(compile_plans(program, plans, quick=True, executor=pool, progress=progress))
        for name, plan, holds in offered:
            compiled = measured = None
            failed = ""
            try:
                if isinstance(report := reports.get(name), UserError):
                    raise report
                compiled = None if report is None else compile_figures(report)
                if arguments.measure:
                    progress(f"Running {name}")
                    measured = measurement_figures(measure(program, plan, steps=arguments.steps))
            except UserError as error:
                failed = str(error)  # this one is dropped, the others go on
            error = None if plan.time_error is None else plan.time_error.ratio
            rows.append(ComparisonRow(name, plan.prediction if holds else None, compiled, measured, failed, error))
    if all(row.failed for row in rows):
        raise UserError(rows[0].failed)
    if arguments.json:
        print_json(comparison_figures(rows), answer)
    else:
        print_rich(comparison_report(planned.plan, rows), answer, whole=True)
    return 0


def run_diff(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard diff`: print the differences between two plan files, and their costs; return 0."""
    from autoshard.planning import load_plan
    from autoshard.report import difference, difference_figures, difference_report

    changes = difference(load_plan(arguments.first), load_plan(arguments.second))
    if arguments.json:
        print_json(difference_figures(changes), answer)
    else:
        print_rich(difference_report(changes), answer)
    return 0


def run_explain(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard explain`: reopen the plan's program, price the alternatives of one tensor, and print them.

    Return 0. Raises `UserError` as `reopen` and `explain_plan` do.
    """
    need_no_accelerator()
    from autoshard.planning import (
        check_explainable,
        explain_plan,
        explanation_figures,
        kept_program,
        load_plan,
        named,
        reopen,
    )
    from autoshard.report import explanation_report

    plan = load_plan(arguments.plan)
    check_explainable(plan)
    named(plan, arguments.name)  # a wrong name is refused before the program is traced
    with show_progress(arguments) as progress:
        program = kept_program(plan) if arguments.program is None and arguments.entry is None else None
        if program is None:
            stand_in_devices(program_source(arguments, plan, progress), plan.topology)
            program = reopen(plan, arguments.program, arguments.entry, kept=True)
        progress(f"Pricing what else {arguments.name} could be")
        explanation = explain_plan(
            plan,
            arguments.name,
            program,
            solve=arguments.solve,
            kept=True,
            time_limit=arguments.time_limit,
        )
    if arguments.json:
        print_json(explanation_figures(explanation), answer)
    else:
        print_rich(explanation_report(explanation, plan), answer)
    return 0


def program_source(arguments: argparse.Namespace, plan: "Plan", progress: "ProgressLine") -> str:
    """Return the source of the plan's program, from the arguments or the plan; empty if neither names one.

    Print which program is opened, so that a Python file is announced before it runs. Raises `UserError` if an output
    of the command is that file.
    """
    source = arguments.program or (plan.source.program if plan.source is not None else "")
    check_unread(arguments, [source])
    if not source.endswith(".py"):
        progress(f"Opening the program of {arguments.plan} again")
    elif arguments.program:
        progress(f"Running {source} for the program of {arguments.plan}")
    else:
        progress(f"Running {source}, which {arguments.plan} names, for its program")
    return source


def run_export(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard export`: write the plan in the form `--to`, to `--out` or stdout; return 0.

    Raises `UserError` as `make_export` does, and for a form of bytes without `--out`.
    """
    need_no_accelerator()  # the program may be traced again, never run
    from autoshard.exports import make_export
    from autoshard.planning import form_named, load_plan, reopen
    from autoshard.report import write_text

    plan, form = load_plan(arguments.plan), form_named(arguments.to)
    with show_progress(arguments) as progress:
        source = program_source(arguments, plan, progress)
        progress(f"Exporting {arguments.plan}")
        stand_in_devices(source, plan.topology)
        if not form.text:
            return _export_bytes(arguments, plan, answer)
        program = reopen(plan, arguments.program, arguments.entry) if arguments.program else None
        exported = make_export(plan, arguments.to, program, force=arguments.force)
    if arguments.out is not None:
        write_text(arguments.out, exported.text)
    if arguments.json:
        prediction = exported.prediction
        print_json(
            {
                "to": arguments.to,
                "text": exported.text,
                "step_time_s": None if prediction is None else prediction.step_time_s,
                "peak_bytes": None if prediction is None else prediction.peak_bytes,
                "plan_step_time_s": plan.prediction.step_time_s,
                "plan_peak_bytes": plan.prediction.peak_bytes,
            },
            answer,
        )
    elif arguments.out is None:
        answer.write(exported.text)
    else:
        print(f"Written: {arguments.out}\n{exported.sentence}", file=answer)
    return 0


def _export_bytes(arguments: argparse.Namespace, plan: "Plan", answer: TextIO) -> int:
    """Write a plan to `--out` as a serialised `jax.export` artifact, and print its figures; return 0.

    Raises `UserError` without `--out`, or if the program cannot be reopened.
    """
    from autoshard.base.files import write_whole
    from autoshard.exec import jax_export
    from autoshard.planning import reopen

    if arguments.out is None:
        raise UserError(f"{arguments.to} is a file of bytes; name it with --out step.jax_export.")
    data = jax_export(plan, reopen(plan, arguments.program, arguments.entry))
    write_whole(arguments.out, data)
    step, peak = plan.prediction.step_time_s, plan.prediction.peak_bytes
    if arguments.json:
        figures = {"step_time_s": step, "peak_bytes": peak, "plan_step_time_s": step, "plan_peak_bytes": peak}
        print_json({"to": arguments.to, "bytes": len(data), **figures}, answer)
    else:
        print(f"Written: {arguments.out}\nIt holds the plan whole, pins included.", file=answer)
    return 0


def run_report(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard report` on a plan, a sweep, or the output of `autoshard serve-plan`.

    Write a page to `--out` and a trace to `--perfetto`; without either, print the report. Return 0. Raises `UserError`
    for flags that do not apply to that file.
    """
    from autoshard.planning import is_sweep, load_plan
    from autoshard.report import html_report, perfetto_json, plan_figures, read_profile, terminal_report, write_text
    from autoshard.serving import read_serving

    if is_sweep(arguments.plan):
        return report_sweep(arguments, answer)
    if (serving := read_serving(arguments.plan)) is not None:
        return report_serving(arguments, serving, answer)
    for flag, value in (("tokens", arguments.tokens), ("price", arguments.price), ("plans", arguments.plans)):
        if value:
            raise UserError(f"--{flag} is for a sweep; {arguments.plan} was not saved by `autoshard sweep --out`.")
    plan = load_plan(arguments.plan)
    written: dict[str, str] = {}
    if arguments.compiled and arguments.out is None and arguments.perfetto is None:
        raise UserError(
            "--compiled is for the page or the trace; name one with --out report.html or --perfetto trace.json."
        )
    compiled = read_compiled(arguments.compiled) if arguments.compiled else None
    if arguments.perfetto is not None:
        profile = read_profile(arguments.profile) if arguments.profile else None
        written[str(arguments.perfetto)] = perfetto_json(plan, compiled, profile)
    elif arguments.profile:
        raise UserError("--profile is for the trace; name it with --perfetto trace.json.")
    if arguments.out is None:
        for flag in ("compare", "measured"):
            if getattr(arguments, flag):
                raise UserError(f"--{flag} is for the page; name it with --out report.html.")
    else:
        compare = load_plan(arguments.compare) if arguments.compare else None
        measured = read_json(arguments.measured, "measure") if arguments.measured else None
        written[str(arguments.out)] = html_report(plan, compare=compare, compiled=compiled, measured=measured)
    for path, text in written.items():
        write_text(Path(path), text)
    if arguments.json:
        print_json(plan_figures(plan) | {"written": sorted(written)}, answer)
    elif written:
        for path in written:
            print(f"Written: {path}", file=answer)
    else:
        print_rich(terminal_report(plan), answer)
    return 0


def run_solve(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard solve` on a Problem file; return the solver's exit code. `--quiet` drops its stderr."""
    from autoshard.solver.solve_command import run_solve

    with contextlib.redirect_stdout(answer), contextlib.ExitStack() as quiet:
        if arguments.quiet:
            quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
        return run_solve(
            str(arguments.problem),
            time_limit=arguments.time_limit,
            seed=arguments.seed,
            threads=arguments.threads,
            iterations=arguments.iterations,
            out=str(arguments.out) if arguments.out else None,
            as_json=arguments.json,
        )


def run_doctor(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard doctor`: print what is installed and present, and what will work; return 0."""
    from autoshard.report import doctor, doctor_report

    environment = doctor()
    if arguments.json:
        print_json(environment, answer)
    else:
        print_rich(doctor_report(environment), answer)
    return 0
