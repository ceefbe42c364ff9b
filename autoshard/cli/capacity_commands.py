"""Commands that compare machines and sizes: `degrees`, `estimate`, `rl-plan`, `serve-plan` and `sweep`."""

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from autoshard.base.processes import cores
from autoshard.cli.inputs import PROGRAM_OPTIONS, check_unread, need_no_accelerator, planning_flags, stand_in_devices
from autoshard.cli.outputs import print_json, print_rich, show_progress
from autoshard.cli.session import WORKER, configure_imports, connect, ray_of
from autoshard.errors import UserError


if TYPE_CHECKING:
    from autoshard.base.ray_pool import RayPool
    from autoshard.planning import SweepRow
    from autoshard.serving import ModelEstimate


def run_degrees(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard degrees`: print the priced plans and write the first one's configuration to `--out`; return 0.

    Raises `UserError` as `gpu_decoder` and `choose_degrees` do.
    """
    need_no_accelerator()  # nothing is traced or run
    from autoshard.base.files import write_whole
    from autoshard.degrees import (
        DEGREE_FORMS,
        choose_degrees,
        degree_figures,
        degree_report,
        format_degrees,
        gpu_decoder,
    )

    choices = choose_degrees(
        gpu_decoder(arguments.program), arguments.topology, arguments.framework, arguments.batch, arguments.seq
    )
    if arguments.out:
        write_whole(arguments.out, DEGREE_FORMS[arguments.framework](choices[0]).encode())
    if arguments.json:
        print_json(degree_figures(choices), answer)
    else:
        print_rich(degree_report(choices), answer)
        if arguments.out:
            print(f"Written: {arguments.out}, of the first plan, {format_degrees(choices[0].run)}", file=answer)
    return 0


def run_estimate(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard estimate`: print memory and step time on every topology from closed formulas; return 0.

    A model that the formulas do not cover is traced instead. Topologies that fail are listed next to the others. Raises
    `UserError` if the program is no configuration or every topology fails.
    """
    need_no_accelerator()
    from autoshard.cost import find_topologies
    from autoshard.planning import settled_options
    from autoshard.program import open_source
    from autoshard.serving import estimate_config, estimate_figures, estimates_report, fewest_devices, least_estimate

    if not arguments.program.startswith("hf:"):
        raise UserError(f"an estimate is of a configuration, hf:CONFIG; found {arguments.program!r}: plan it.")
    places = [place for pattern in arguments.topology for place in find_topologies(pattern)]
    options_given = {name: getattr(arguments, name) for name in ("train", "serve", "batch", "seq", "cache", "remat")}
    options_given |= {name: getattr(arguments, name) for name in ("param_dtype", "state_dtype")}
    estimates: list[ModelEstimate] = []
    failed: list[str] = []
    for place in places:
        try:
            estimates += estimate_config(arguments.program, place, **options_given)
        except UserError as error:
            failed.append(str(error))
    if failed and not estimates:
        raise UserError(failed[0])
    if not estimates:  # the model is no decoder that formulas cover, so its program is traced
        with show_progress(arguments) as progress:
            configure_imports()
            for place in places:
                progress(f"Tracing {arguments.program}, which is no decoder that can be counted")
                options = {**options_given, "batch": options_given["batch"] or place.num_devices}
                program = open_source(arguments.program, kept=True, **settled_options(options, place.name))
                estimates.append(least_estimate(program, place))
    fewest = fewest_devices(arguments.program, estimates, **options_given)
    if arguments.json:
        print_json(estimate_figures(estimates, failed, fewest), answer)
    else:
        print_rich(estimates_report(arguments.program, estimates, failed, fewest), answer)
    return 0


def report_serving(arguments: argparse.Namespace, figures: dict[str, Any], answer: TextIO) -> int:
    """Write the page of `autoshard report` for the output of `autoshard serve-plan --json`.

    Return 0. Raises `UserError` for flags that do not apply, or without `--out`.

    - `figures`: the parsed JSON of that output.
    """
    from autoshard.cost import load_chip
    from autoshard.report import write_text
    from autoshard.serving import serve_page

    for flag in ("perfetto", "compiled", "profile", "compare", "measured", "tokens", "plans"):
        if getattr(arguments, flag):
            raise UserError(f"--{flag} is not for ways to serve, which {arguments.plan} holds.")
    if arguments.out is None:
        raise UserError(f"{arguments.plan} holds ways to serve: name the page with --out serve.html.")
    prices = {load_chip(chip).name: price for chip, price in arguments.price.items()}
    write_text(arguments.out, serve_page(figures, prices))
    if arguments.json:
        print_json(figures | {"written": [str(arguments.out)]}, answer)
    else:
        print(f"Written: {arguments.out}", file=answer)
    return 0


def run_rl_plan(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard rl-plan`: print the ways to use chips for reinforcement learning, the fastest first; return 0.

    Raises `UserError` as `plan_rl` does.
    """
    need_no_accelerator()
    from autoshard.reinforcement import RlWorkload, plan_rl, rl_figures, rl_report

    numbers = ("sequences", "prompt", "answer", "answers", "updates", "staleness", "weights", "framework")
    work = RlWorkload(
        **{name: getattr(arguments, name) for name in numbers},
        longest=arguments.longest or arguments.answer,
        scores=arguments.scores + arguments.reference,
        references=int(arguments.reference),
        cache=arguments.cache_dtype,
    )
    with show_progress(arguments) as progress:
        plan = plan_rl(arguments.program, arguments.topology, work, progress)
    if arguments.json:
        print_json(rl_figures(plan), answer)
    else:
        print_rich(rl_report(plan), answer)
    return 0


def run_serve_plan(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard serve-plan`: print the ways to serve within the limits of latency; return 0.

    `--check` also plans traced steps of the best way, and `--jax` writes its shardings. Raises `UserError` for a
    program that is no configuration.
    """
    need_no_accelerator()
    from autoshard.report import write_text
    from autoshard.serving import (
        ServingLimits,
        ServingRequests,
        check_serving,
        jax_shardings,
        plan_serving,
        serving_figures,
        serving_report,
    )

    if not arguments.program.startswith("hf:"):
        raise UserError(f"serving is planned for a configuration, hf:CONFIG; found {arguments.program!r}.")
    stored = (arguments.weights, arguments.cache_dtype)
    serving = ServingRequests(arguments.input, arguments.output, *stored, arguments.sample)
    limits = ServingLimits(arguments.ttft, arguments.tpot, arguments.gap)
    plan = plan_serving(arguments.program, arguments.topology, serving, limits)
    checked = []
    if arguments.check:
        with show_progress(arguments) as progress:
            configure_imports()
            checked = check_serving(plan, progress=progress)
    if arguments.jax is not None:
        write_text(arguments.jax, jax_shardings(plan))
    if arguments.json:
        print_json(serving_figures(plan, checked), answer)
    else:
        print_rich(serving_report(plan, checked), answer)
        if arguments.jax is not None:
            print(f"Written: {arguments.jax}", file=answer)
    return 0


def run_sweep(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Run `autoshard sweep`, here or on the Ray cluster of `--on`; return 0. Raises `UserError` as `_swept` does."""
    need_no_accelerator()
    with ray_of(arguments) as pool:
        return _swept(arguments, answer, pool)


def _swept(arguments: argparse.Namespace, answer: TextIO, pool: "RayPool | None") -> int:
    """Plan every topology, batch and remat variant, print the rows, and draw `--plot`; return 0.

    Plans are made in `pool`, else in `--jobs` processes (default: one a core), in this one if that is a single one.
    Raises `UserError` if no topology is left, and after printing if no row has a plan.
    """
    configure_imports()
    from autoshard.base.worker_pool import HelperPool
    from autoshard.cost import Topology, load_chip
    from autoshard.planning import Assumptions, keep_assumptions, sweep
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
    if arguments.out is not None:
        assumed = Assumptions()
        if arguments.tokens is not None:
            assumed["tokens"] = arguments.tokens
        if prices:
            assumed["prices"] = prices
        keep_assumptions(arguments.out, assumed)
    if arguments.plot is not None:
        plot_sweep(rows, arguments.plot)
    if arguments.json:
        print_json(sweep_figures(rows, prices, arguments.tokens), answer)
    else:
        print_rich(sweep_report(rows, prices, arguments.tokens), answer, whole=True)
        if arguments.out is not None:
            print(f"Kept in {arguments.out}", file=answer)
    if all(row.failed for row in rows):
        answer.flush()
        raise UserError(f"no row of the sweep has a plan: {rows[0].failed}")
    return 0


def report_sweep(arguments: argparse.Namespace, answer: TextIO) -> int:
    """Print the table of a saved sweep, or write its page to `--out`; return 0.

    Tokens and prices are those of the flags, else those with which the sweep was run. With `--plans` also write the
    page of each plan, into the folder of `_folder_of`. Raises `UserError` for flags that do not apply, or for a sweep
    without rows.
    """
    from autoshard.cost import Topology, load_chip
    from autoshard.planning import read_assumptions, read_sweep
    from autoshard.report import sweep_figures, sweep_page, sweep_report, write_text

    for flag in ("perfetto", "compiled", "profile", "compare", "measured"):
        if getattr(arguments, flag):
            raise UserError(f"--{flag} is for one plan; {arguments.plan} is a sweep.")
    assumed = read_assumptions(arguments.plan)
    tokens = assumed.get("tokens") if arguments.tokens is None else arguments.tokens
    prices = assumed.get("prices", {}) | {load_chip(chip).name: price for chip, price in arguments.price.items()}

    def place(row: "SweepRow") -> tuple[str, int, str, int, str]:
        """Return the sort key of a row: chip, chips, topology, batch and remat variant."""
        return row.chip, Topology.parse(row.topology).num_chips, row.topology, row.batch or 0, row.remat or ""

    rows = sorted(read_sweep(arguments.plan).values(), key=place)
    if not rows:
        raise UserError(f"{arguments.plan} has no rows yet; run its sweep first.")
    pages = _plan_pages(arguments, rows) if arguments.plans else {}
    written: list[str] = []
    if arguments.out is not None:
        links = {plan: file.relative_to(arguments.out.parent).as_posix() for plan, (file, _) in pages.items()}
        if pages:
            _make_folder(_folder_of(arguments.out))
        texts = [*pages.values(), (arguments.out, sweep_page(rows, prices, tokens, links))]
        for file, text in texts:
            write_text(file, text)
        written = sorted(str(file) for file, _ in texts)
    if arguments.json:
        print_json(sweep_figures(rows, prices, tokens) | {"written": written}, answer)
    elif arguments.out is not None:
        more = f", and {len(pages)} pages of plans in {_folder_of(arguments.out)}" if pages else ""
        print(f"Written: {arguments.out}{more}", file=answer)
    else:
        print_rich(sweep_report(rows, prices, tokens), answer, whole=True)
    return 0


def _folder_of(page: Path) -> Path:
    """Return the folder for the pages of plans, next to the page of their sweep: `sweep-plans` for `sweep.html`."""
    return page.with_name(f"{page.stem}-plans")


def _make_folder(folder: Path) -> None:
    """Create a folder unless it exists; raise `UserError` if that fails, also if its parent does not exist."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}.") from error


def _plan_pages(arguments: argparse.Namespace, rows: "Sequence[SweepRow]") -> dict[str, tuple[Path, str]]:
    """Return the file and text of the page of each row's plan, by the name of the plan file; rows may lack one.

    Raises `UserError` without `--out`, for a sweep without plans, a file outside its folder, or a page over a plan.
    """
    from autoshard.planning import load_plan
    from autoshard.report import html_report

    if arguments.out is None:
        raise UserError("--plans writes pages next to the page of the sweep; name that with --out sweep.html.")
    folder: Path = arguments.plan if arguments.plan.is_dir() else arguments.plan.parent
    names = [row.plan for row in rows if row.plan]
    if not names:
        raise UserError(f"{arguments.plan} keeps no plans: sweep with --out FOLDER to have them.")
    for name in names:
        if name != Path(name).name:
            raise UserError(f"{arguments.plan} is damaged: {name!r} is no file in the folder of the sweep.")
    check_unread(arguments, [folder / name for name in names])
    place = _folder_of(arguments.out)
    return {
        name: (place / f"{name.removesuffix('.json')}.html", html_report(load_plan(folder / name))) for name in names
    }


def _topologies(arguments: argparse.Namespace) -> list[str]:
    """Return the names of topologies that match a pattern and have at most `--chips` chips, without duplicates.

    Raises `UserError` if there are none.
    """
    from autoshard.cost import find_topologies

    matches = {each.name: each for pattern in arguments.topology for each in find_topologies(pattern)}
    most = arguments.chips
    names = [name for name, each in matches.items() if most is None or each.num_chips <= most]
    if not names:
        least = min(matches.values(), key=lambda each: each.num_chips)
        raise UserError(f"--chips {most} leaves no topology: the smallest, {least.name}, has {least.num_chips} chips.")
    return names
