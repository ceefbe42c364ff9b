"""`autoshard sweep`."""

import argparse
import contextlib
from typing import TextIO

from autoshard.base.process import cores
from autoshard.cli._input import PROGRAM_OPTIONS, check_writable, need_no_accelerator, planning_flags, stand_in_devices
from autoshard.cli._output import print_json, print_rich, show_progress
from autoshard.cli._process import settle_imports


def run_sweep(arguments: argparse.Namespace, answer: TextIO) -> int:
    check_writable("--out", arguments.out)
    check_writable("--plot", arguments.plot)
    need_no_accelerator()
    settle_imports()
    from autoshard.base.pool import HelperPool
    from autoshard.cost import Topology, load_chip
    from autoshard.plan import sweep
    from autoshard.report import plot_sweep, sweep_figures, sweep_report

    prices = {load_chip(chip).name: price for chip, price in arguments.price.items()}
    largest = max(arguments.topology, key=lambda text: Topology.parse(text).num_devices)
    stand_in_devices(arguments.program, largest)
    options = {name: getattr(arguments, name) for name in PROGRAM_OPTIONS if name not in ("batch", "remat")}
    options |= {"entry": arguments.entry, "roles": arguments.roles, "kept": arguments.cached}
    options["rules"] = None if arguments.rules is None else str(arguments.rules)
    with show_progress(arguments) as progress, contextlib.ExitStack() as pools:
        tasks = len(arguments.batch or (0,)) * len(arguments.remat or (0,))
        jobs = min(tasks, arguments.jobs or cores())
        executor = pools.enter_context(HelperPool(jobs, "autoshard.cli._process:settle_worker")) if jobs > 1 else None
        rows = sweep(
            arguments.program,
            topologies=arguments.topology,
            batches=arguments.batch or (),
            remats=arguments.remat or (),
            program_options=options,
            executor=executor,
            path=arguments.out,
            progress=progress,
            **planning_flags(arguments),
        )
    if arguments.plot is not None:
        plot_sweep(rows, arguments.plot)
    if arguments.json:
        print_json(sweep_figures(rows, prices), answer)
    else:
        print_rich(sweep_report(rows, prices), answer)
    return 0
