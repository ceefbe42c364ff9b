"""`autoshard estimate`: memory and a first step time from a model's dims, without a plan."""

import argparse
from typing import TYPE_CHECKING, TextIO

from autoshard.cli._input import need_no_accelerator
from autoshard.cli._output import print_json, print_rich, show_progress
from autoshard.cli._process import settle_imports
from autoshard.errors import UserError


if TYPE_CHECKING:
    from autoshard.plan import ModelEstimate


def run_estimate(arguments: argparse.Namespace, answer: TextIO) -> int:
    need_no_accelerator()
    from autoshard.cost import find_topologies
    from autoshard.plan import estimate_config, fewest_devices, least_estimate, settled_options
    from autoshard.program import open_source
    from autoshard.report import estimate_figures, estimates_report

    if not arguments.program.startswith("hf:"):
        raise UserError(f"an estimate is of a configuration, hf:CONFIG; found {arguments.program!r}: plan it.")
    places = [place for pattern in arguments.topology for place in find_topologies(pattern)]
    said = {name: getattr(arguments, name) for name in ("train", "serve", "batch", "seq", "cache", "remat")}
    said |= {name: getattr(arguments, name) for name in ("param_dtype", "state_dtype")}
    found: list[ModelEstimate] = []
    failed: list[str] = []
    for place in places:
        try:
            found += estimate_config(arguments.program, place, **said)
        except UserError as error:
            failed.append(str(error))
    if failed and not found:
        raise UserError(failed[0])
    if not found:  # no decoder whose counts are known: its program is traced
        with show_progress(arguments) as progress:
            settle_imports()
            for place in places:
                progress(f"Tracing {arguments.program}, which is no decoder that can be counted")
                options = {**said, "batch": said["batch"] or place.num_devices}
                program = open_source(arguments.program, kept=True, **settled_options(options, place.name))
                found.append(least_estimate(program, place))
    fewest = fewest_devices(arguments.program, found, **said)
    if arguments.json:
        print_json(estimate_figures(found, failed, fewest), answer)
    else:
        print_rich(estimates_report(arguments.program, found, failed, fewest), answer)
    return 0
