"""`autoshard serve-plan`: how to serve a decoder within limits of latency."""

import argparse
from typing import TextIO

from autoshard.cli._input import need_no_accelerator
from autoshard.cli._output import print_json, print_rich
from autoshard.errors import UserError


def run_serve_plan(arguments: argparse.Namespace, answer: TextIO) -> int:
    need_no_accelerator()
    from autoshard.cost import ServingAsked
    from autoshard.plan import SERVED_WEIGHTS, plan_serving
    from autoshard.report import serving_figures, serving_report

    if not arguments.program.startswith("hf:"):
        raise UserError(f"serving is planned for a configuration, hf:CONFIG; found {arguments.program!r}.")
    asked = ServingAsked(arguments.input, arguments.output, SERVED_WEIGHTS[arguments.weights])
    plan = plan_serving(arguments.program, arguments.topology, asked, arguments.ttft, arguments.tpot)
    if arguments.json:
        print_json(serving_figures(plan), answer)
    else:
        print_rich(serving_report(plan), answer)
    return 0
