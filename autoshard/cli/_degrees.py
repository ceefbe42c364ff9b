"""`autoshard degrees`."""

import argparse
from typing import TextIO

from autoshard.cli._input import need_no_accelerator
from autoshard.cli._output import print_json, print_rich


def run_degrees(arguments: argparse.Namespace, answer: TextIO) -> int:
    need_no_accelerator()  # nothing is traced or run
    from autoshard.base.files import write_whole
    from autoshard.plan import choose_degrees, gpu_decoder
    from autoshard.report import DEGREE_FORMS, degree_figures, degree_report

    choices = choose_degrees(
        gpu_decoder(arguments.program), arguments.topology, arguments.framework, arguments.batch, arguments.seq
    )
    if arguments.out:
        write_whole(arguments.out, DEGREE_FORMS[arguments.framework](choices[0]).encode())
    if arguments.json:
        print_json(degree_figures(choices), answer)
    else:
        print_rich(degree_report(choices), answer)
    return 0
