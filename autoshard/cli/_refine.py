"""`autoshard refine`."""

import argparse
from typing import TYPE_CHECKING, TextIO

from autoshard.cli._input import (
    need_no_accelerator,
    open_program,
    plan_options,
    said_options,
    start_devices,
)
from autoshard.cli._on import connect, ray_of
from autoshard.cli._output import print_json, print_rich, show_progress
from autoshard.errors import UserError


if TYPE_CHECKING:
    from autoshard.base.ray_pool import RayPool


def run_refine(arguments: argparse.Namespace, answer: TextIO) -> int:
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
    from autoshard.exec import refine, refinement_figures
    from autoshard.plan import save_plan
    from autoshard.report import refinement_report

    options = said_options(arguments)
    plan_options(arguments)  # refuses what cannot be before anything is traced
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
