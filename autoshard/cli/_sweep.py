"""`autoshard sweep`."""

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from autoshard.base.process import cores
from autoshard.cli._input import PROGRAM_OPTIONS, check_writable, need_no_accelerator, planning_flags, stand_in_devices
from autoshard.cli._on import WORKER, connect, ray_of
from autoshard.cli._output import print_json, print_rich, show_progress
from autoshard.cli._process import settle_imports
from autoshard.errors import UserError


if TYPE_CHECKING:
    from autoshard.base.ray_pool import RayPool
    from autoshard.plan import SweepRow


def run_sweep(arguments: argparse.Namespace, answer: TextIO) -> int:
    check_place(arguments.out)
    check_writable("--plot", arguments.plot)
    need_no_accelerator()
    with ray_of(arguments) as pool:
        return _swept(arguments, answer, pool)


def _swept(arguments: argparse.Namespace, answer: TextIO, pool: "RayPool | None") -> int:
    settle_imports()
    from autoshard.base.pool import HelperPool
    from autoshard.cost import Topology, load_chip
    from autoshard.plan import sweep
    from autoshard.report import plot_sweep, sweep_figures, sweep_report

    prices = {load_chip(chip).name: price for chip, price in arguments.price.items()}
    names = _topologies(arguments)
    stand_in_devices(arguments.program, max(names, key=lambda text: Topology.parse(text).num_devices))
    batches, remats = ([] if each in (None, "auto") else each for each in (arguments.batch, arguments.remat))
    options = {name: getattr(arguments, name) for name in PROGRAM_OPTIONS}
    options |= {name: "auto" if getattr(arguments, name) == "auto" else None for name in ("batch", "remat")}
    options |= {"entry": arguments.entry, "roles": arguments.roles, "kept": arguments.cached}
    options["rules"] = None if arguments.rules is None else str(arguments.rules)
    with show_progress(arguments) as progress, contextlib.ExitStack() as pools:
        connect(pool, progress)
        tasks = len(names) * max(1, len(batches)) * max(1, len(remats))
        jobs = min(tasks, arguments.jobs or cores())
        executor = pool or (pools.enter_context(HelperPool(jobs, WORKER)) if jobs > 1 else None)
        rows = sweep(
            arguments.program,
            topologies=names,
            batches=batches,
            remats=remats,
            program_options=options,
            executor=executor,
            path=arguments.out,
            progress=progress,
            **planning_flags(arguments),
        )
    if arguments.plot is not None:
        plot_sweep(rows, arguments.plot)
    if arguments.json:
        print_json(sweep_figures(rows, prices, arguments.tokens), answer)
    else:
        print_rich(sweep_report(rows, prices, arguments.tokens), answer)
        if arguments.out is not None:
            print(f"Kept in {arguments.out}", file=answer)
    return 0


def report_sweep(arguments: argparse.Namespace, answer: TextIO) -> int:
    """`autoshard report` of what a sweep kept: its table, or a page."""
    from autoshard.cost import Topology, load_chip
    from autoshard.plan import read_sweep
    from autoshard.report import sweep_figures, sweep_page, sweep_report, write_text

    for flag in ("perfetto", "compiled", "profile", "compare", "measured"):
        if getattr(arguments, flag):
            raise UserError(f"--{flag} is for one plan; {arguments.plan} is a sweep.")
    prices = {load_chip(chip).name: price for chip, price in arguments.price.items()}

    def place(row: "SweepRow") -> tuple[str, int, str, int, str]:
        return row.chip, Topology.parse(row.topology).num_chips, row.topology, row.batch or 0, row.remat or ""

    rows = sorted(read_sweep(arguments.plan).values(), key=place)
    if not rows:
        raise UserError(f"{arguments.plan} has no rows yet; run its sweep first.")
    if arguments.out is not None:
        write_text(arguments.out, sweep_page(rows, prices, arguments.tokens))
    if arguments.json:
        written = [] if arguments.out is None else [str(arguments.out)]
        print_json(sweep_figures(rows, prices, arguments.tokens) | {"written": written}, answer)
    elif arguments.out is not None:
        print(f"Written: {arguments.out}", file=answer)
    else:
        print_rich(sweep_report(rows, prices, arguments.tokens), answer)
    return 0


def _topologies(arguments: argparse.Namespace) -> list[str]:
    """Names of all that the patterns stand for and `--chips` allows. Raises `UserError` if that is none."""
    from autoshard.cost import find_topologies

    found = {each.name: each for pattern in arguments.topology for each in find_topologies(pattern)}
    most = arguments.chips
    names = [name for name, each in found.items() if most is None or each.num_chips <= most]
    if not names:
        least = min(found.values(), key=lambda each: each.num_chips)
        raise UserError(f"--chips {most} leaves no topology: the smallest, {least.name}, has {least.num_chips} chips.")
    return names


def check_place(path: Path | None) -> None:
    """A file that can be written, or a folder that is there or can be made."""
    if path is None or path.suffix and not path.is_dir():
        return check_writable("--out", path)
    if path.is_file():
        raise UserError(f"--out {path} is a file; name one that ends in .json, or a folder.")
    return check_writable("--out", path / "sweep.json" if path.is_dir() else path)
