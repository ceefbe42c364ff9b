"""Functions of the commands `list`, `completion`, `graph`, `refine` and `validate`."""

import argparse
from typing import TYPE_CHECKING, TextIO

from autoshard.cli.inputs import flag_options, need_no_accelerator, open_program, plan_options, start_devices
from autoshard.cli.outputs import print_json, print_rich, show_progress
from autoshard.cli.session import connect, ray_of
from autoshard.errors import UserError


if TYPE_CHECKING:
    from autoshard.base.ray_pool import RayPool


LISTS = ("models", "topologies", "chips")
"""Kinds of names that `autoshard list` prints."""
SHELLS = ("bash", "zsh", "tcsh")
"""Shells for which completions can be written."""


def run_list(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard list`: print the models, chips or topologies that can be named; return 0.

    Raises `UserError` for a pattern with names other than topologies, and for a pattern that matches none.
    """
    if arguments.pattern is not None and arguments.what != "topologies":
        raise UserError(f"a pattern is for topologies: write `autoshard list topologies '{arguments.pattern}'`.")
    from autoshard.cli.listing import chip_rows, listing_report, model_rows, topology_rows

    rows = {
        "models": model_rows,
        "chips": chip_rows,
        "topologies": lambda: topology_rows(arguments.pattern),
    }[arguments.what]()
    if arguments.json:
        print_json({arguments.what: rows}, answer)
    else:
        print_rich(listing_report(rows), answer)
    return 0


def run_completion(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard completion`: print the script that completes the command in a shell; return 0."""
    import shtab

    text = shtab.complete(arguments.whole, arguments.shell)
    if arguments.json:
        print_json({"shell": arguments.shell, "text": text}, answer)
    else:
        print(text, file=answer)
    return 0


def run_graph(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard graph`: print the counts of a program's graph, and write the graph to `--out`; return 0.

    With `--plan` ops and tensors have specs, times and collectives. Raises `UserError` for `--whole` without a picture.
    """
    need_no_accelerator()
    from autoshard.planning import load_plan
    from autoshard.report import graph_figures, graph_form, graph_report, write_graph

    form = graph_form(arguments.out) if arguments.out is not None else ""
    if arguments.whole and form != ".svg":
        raise UserError("--whole is for the picture; name it with --out graph.svg.")
    plan = load_plan(arguments.plan) if arguments.plan is not None else None
    with show_progress(arguments) as progress:
        program = open_program(arguments, progress, plan.topology if plan is not None else None, plan=plan)
        progress("Reading its ops" if plan is None else f"Pricing {arguments.plan} op by op")
        graph = program.graph(plan)
        figures = graph_figures(graph)
        if arguments.out is not None:
            progress(f"Writing {arguments.out}")
            write_graph(graph, arguments.out, whole=arguments.whole)
    written = None if arguments.out is None else str(arguments.out)
    if arguments.json:
        print_json(figures | {"written": written}, answer)
    else:
        print_rich(graph_report(figures), answer)
        if written:
            print(f"Written: {written}", file=answer)
    return 0


def run_refine(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard refine` with the judge `--judge`, else that of the topology's backend; return 0.

    Raises `UserError` for `--on` with measurements, and if devices to measure on are missing.
    """
    from autoshard.cost import Topology

    topology = Topology.parse(arguments.topology)
    if (arguments.judge or topology.traits.judge) == "measure":
        if arguments.on:
            raise UserError("--on is for --judge compile: what is measured runs on the devices that are here.")
        start_devices(topology)
    else:
        need_no_accelerator()
    with ray_of(arguments) as pool:
        return _refine(arguments, answer, pool)


def _refine(arguments: argparse.Namespace, answer: TextIO, pool: "RayPool | None") -> int:
    """Plan, judge and plan again, print the result, and save the plan that was judged best to `--out`; return 0."""
    from autoshard.exec import refine, refinement_figures
    from autoshard.planning import save_plan
    from autoshard.report import refinement_report

    options = flag_options(arguments)
    plan_options(arguments)  # raises for impossible options before tracing
    judging = {name: getattr(arguments, name) for name in ("judge", "plans", "rounds", "steps", "compile_limit")}
    with show_progress(arguments) as progress:
        connect(pool, progress)
        program = open_program(arguments, progress, arguments.topology)
        result = refine(program, topology=arguments.topology, **options, **judging, executor=pool, progress=progress)
        if arguments.out is not None:
            save_plan(result.plan, arguments.out)
    if arguments.json:
        print_json(refinement_figures(result), answer)
    else:
        print_rich(refinement_report(result), answer)
        if arguments.out is not None:
            print(f"Plan written to {arguments.out}", file=answer)
    return 0


def run_validate(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard validate`: compare predictions with published runs and worked questions, or with `--pairs`.

    Return 1 if a figure is past its tolerance, else 0; pairs have no tolerance. Raises `UserError` for flags that apply
    to `--pairs` only.
    """
    need_no_accelerator()  # models are rebuilt, never run
    if arguments.pairs:
        return _validate_pairs(arguments, answer)
    for flag in ("compile", "only", "assume"):
        if getattr(arguments, flag):
            raise UserError(f"--{flag} is for measured pairs: write `validate --pairs --{flag} ...`.")
    for flag in ("html", "plot"):
        if getattr(arguments, flag):
            raise UserError(
                f"--{flag} is for measured pairs: write `validate --pairs --{flag} {getattr(arguments, flag)}`."
            )
    from autoshard.validation import passes, validate, validation_figures, validation_report

    with show_progress(arguments) as progress:
        validation = validate(arguments.data, progress)
    if arguments.json:
        print_json(validation_figures(validation), answer)
    else:
        print_rich(validation_report(validation), answer)
    return 0 if passes(validation) else 1


def _validate_pairs(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Compare predictions with measured plans of one model, print them and write `--html` and `--plot`; return 0.

    Files of runs on GPUs are passed on to `_validate_gpu_pairs`. Raises `UserError` for `--data` next to `--pairs`.
    """
    if arguments.data:
        raise UserError(f"--data {arguments.data} and --pairs are two questions: leave one of them out.")
    from autoshard.validation import (
        compile_pairs,
        names_gpu_rows,
        pair_figures,
        pair_report,
        plot_pairs,
        validate_pairs,
        write_pair_page,
    )

    if arguments.pairs is not True and names_gpu_rows(arguments.pairs):
        return _validate_gpu_pairs(arguments, answer)
    with show_progress(arguments) as progress:
        path = None if arguments.pairs is True else arguments.pairs
        judge = compile_pairs if arguments.compile else validate_pairs
        groups = judge(path, progress, only=arguments.only or (), assume=dict(arguments.assume or ()))
    if arguments.html:
        write_pair_page(groups, arguments.html)
    if arguments.plot:
        plot_pairs(groups, arguments.plot)
    if arguments.json:
        print_json(pair_figures(groups), answer)
    else:
        print_rich(pair_report(groups), answer)
    return 0


def _validate_gpu_pairs(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Compare predictions with measured runs on GPUs, and print them; return 0.

    Raises `UserError` for the flags `--compile`, `--html`, `--plot` and `--assume`.
    """
    for flag in ("compile", "html", "plot", "assume"):
        if getattr(arguments, flag):
            raise UserError(f"--{flag} is for measured plans of TPUs; {arguments.pairs} has runs on GPUs.")
    from autoshard.validation import gpu_pair_figures, gpu_pair_report, validate_gpu_pairs

    with show_progress(arguments) as progress:
        groups = validate_gpu_pairs(arguments.pairs, progress, arguments.only or ())
    if arguments.json:
        print_json(gpu_pair_figures(groups), answer)
    else:
        print_rich(gpu_pair_report(groups), answer)
    return 0
