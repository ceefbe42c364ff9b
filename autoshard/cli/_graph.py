"""The command `graph`: from parsed arguments to the file and what is printed, and the exit code."""

import argparse
from typing import TextIO

from autoshard.cli._input import need_no_accelerator, open_program
from autoshard.cli._output import print_json, print_rich, show_progress
from autoshard.errors import UserError


def run_graph(arguments: argparse.Namespace, answer: TextIO) -> int:
    need_no_accelerator()
    from autoshard.plan import load_plan
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
