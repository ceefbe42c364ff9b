"""`autoshard serve-plan`: how to serve a decoder within limits of latency."""

import argparse
from typing import Any, TextIO

from autoshard.cli._input import need_no_accelerator
from autoshard.cli._output import print_json, print_rich, show_progress
from autoshard.cli._process import settle_imports
from autoshard.errors import UserError


def report_serving(arguments: argparse.Namespace, figures: dict[str, Any], answer: TextIO) -> int:
    """`autoshard report` of what `autoshard serve-plan --json` printed: a page."""
    from autoshard.cost import load_chip
    from autoshard.report import serve_page, write_text

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


def run_serve_plan(arguments: argparse.Namespace, answer: TextIO) -> int:
    need_no_accelerator()
    from autoshard.cost import ServingAsked, ServingLimits
    from autoshard.plan import check_serving, plan_serving
    from autoshard.report import jax_shardings, serving_figures, serving_report, write_text

    if not arguments.program.startswith("hf:"):
        raise UserError(f"serving is planned for a configuration, hf:CONFIG; found {arguments.program!r}.")
    asked = ServingAsked(arguments.input, arguments.output, arguments.weights, arguments.cache_dtype)
    limits = ServingLimits(arguments.ttft, arguments.tpot, arguments.gap)
    plan = plan_serving(arguments.program, arguments.topology, asked, limits)
    checked = []
    if arguments.check:
        with show_progress(arguments) as progress:
            settle_imports()
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
