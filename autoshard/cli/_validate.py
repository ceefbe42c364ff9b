"""The command `validate`: from parsed arguments to what is printed, and the exit code."""

import argparse
from typing import TextIO

from autoshard.cli._input import need_no_accelerator
from autoshard.cli._output import print_json, print_rich, show_progress
from autoshard.errors import UserError


def run_validate(arguments: argparse.Namespace, answer: TextIO) -> int:
    need_no_accelerator()  # models are rebuilt, never run
    if arguments.pairs:
        return _validate_pairs(arguments, answer)
    for flag in ("compile", "only"):
        if getattr(arguments, flag):
            raise UserError(f"--{flag} is for measured pairs: write `validate --pairs --{flag} ...`.")
    for flag in ("html", "plot"):
        if getattr(arguments, flag):
            raise UserError(
                f"--{flag} is for measured pairs: write `validate --pairs --{flag} {getattr(arguments, flag)}`."
            )
    from autoshard.report import passes, validate, validation_figures, validation_report

    with show_progress(arguments) as progress:
        found = validate(arguments.data, progress)
    if arguments.json:
        print_json(validation_figures(found), answer)
    else:
        print_rich(validation_report(found), answer)
    return 0 if passes(found) else 1


def _validate_pairs(arguments: argparse.Namespace, answer: TextIO) -> int:
    if arguments.data:
        raise UserError(f"--data {arguments.data} and --pairs are two questions: leave one of them out.")
    from autoshard.exec import compile_pairs
    from autoshard.plan import names_gpu_rows, validate_pairs
    from autoshard.report import pair_figures, pair_report, plot_pairs, write_pair_page

    if arguments.pairs is not True and names_gpu_rows(arguments.pairs):
        return _validate_gpu_pairs(arguments, answer)
    with show_progress(arguments) as progress:
        path = None if arguments.pairs is True else arguments.pairs
        judge = compile_pairs if arguments.compile else validate_pairs
        groups = judge(path, progress, only=arguments.only or ())
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
    for flag in ("compile", "html", "plot"):
        if getattr(arguments, flag):
            raise UserError(f"--{flag} is for measured plans of TPUs; {arguments.pairs} has runs on GPUs.")
    from autoshard.plan import validate_gpu_pairs
    from autoshard.report import gpu_pair_figures, gpu_pair_report

    with show_progress(arguments) as progress:
        found = validate_gpu_pairs(arguments.pairs, progress, arguments.only or ())
    if arguments.json:
        print_json(gpu_pair_figures(found), answer)
    else:
        print_rich(gpu_pair_report(found), answer)
    return 0
