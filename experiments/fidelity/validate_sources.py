"""Error of predictions for each source of published runs, with the calibration fitted to all other sources.

    python experiments/fidelity/validate_sources.py [--data FILE] [--out FILE.md] [--write [FIGURE ...]]

The shipped constants are fitted to all sources (`--write`, or only those of the named figures). This script measures
their error for an unseen source. It also checks if models of one table are predicted in the right order.
"""

import argparse
import itertools
import pathlib
import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.lib.calibrate import (
    CONSTANTS,
    Case,
    Line,
    errors,
    fit,
    groups,
    linear,
    load_cases,
    shipped,
    write,
    write_left_out,
)


ORDER_GAP = 0.08
"""Difference of published rates above which two models of one table must be predicted in that order."""


def left_out(cases: Sequence[Case], line: Line) -> Iterator[tuple[str, list[int], list[float], list[float]]]:
    """Yield for each source its cases, the constants fitted without it, and its log errors with these constants."""
    for source, members in groups(cases, "source").items():
        others = [i for i in range(len(cases)) if i not in members]
        values = fit(line, others)
        yield source, members, values, errors([cases[i] for i in members], values).tolist()


def ordered(cases: Sequence[Case], final: Sequence[float]) -> tuple[int, list[tuple[str, str, float, float]]]:
    """Count pairs of complete runs of one source that differ by more than `ORDER_GAP` in time per model FLOP.

    Also returns the pairs in the wrong order: their names, the published log ratio and ours.
    """
    total, wrong = 0, []
    for members in groups(cases, "source").values():
        for a, b in itertools.combinations(members, 2):
            work = cases[a].work, cases[b].work
            if work[0] is None or work[1] is None or not (cases[a].complete and cases[b].complete):
                continue
            theirs = np.log(cases[a].theirs / work[0]) - np.log(cases[b].theirs / work[1])
            if abs(theirs) > np.log1p(ORDER_GAP):
                total += 1
                ours = theirs + final[a] - final[b]
                if ours * theirs <= 0:
                    wrong.append((cases[a].id, cases[b].id, float(theirs), float(ours)))
    return total, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="another file of published runs")
    parser.add_argument("--out", type=pathlib.Path, help="write the tables here as Markdown")
    parser.add_argument(
        "--write", nargs="*", metavar="FIGURE", help="store the fit to all sources in the shipped calibration"
    )
    arguments = parser.parse_args()
    cases = load_cases(arguments.data)
    line = linear(cases)
    values = fit(line, range(len(cases)))
    if arguments.write is not None:
        write(values, arguments.write)
    held = list(left_out(cases, line))
    if arguments.data is None:
        write_left_out(
            {source: {cases[i].chip: constants for i in members} for source, members, constants, _ in held},
        )
    final = errors(cases).tolist()
    lines = ["# Step times of published runs", "", "Made by `python experiments/fidelity/validate_sources.py`.", ""]
    lines += ["| constant | prior | width | fit to all | shipped |", "| --- | --- | --- | --- | --- |"]
    for constant, value in zip(CONSTANTS, values, strict=True):
        known = f"{constant.prior:.3f} | {constant.width:.3f}"
        lines.append(f"| {constant.name} | {known} | {value:.3f} | {shipped(constant):.3f} |")
    lines += [
        "",
        "Where the last two columns differ, the shipped constant is of an earlier fit. The estimator's own error",
        "was measured with earlier constants.",
    ]
    whole = [delta for case, delta in zip(cases, final, strict=True) if case.complete]
    lines += ["", "Errors of step times in percent, as shipped:", ""]
    lines += ["| | runs | median | 90th | worst |", "| --- | --- | --- | --- | --- |", _row("all complete", whole)]
    lines += [_row(chip, [final[i] for i in members]) for chip, members in groups(cases, "chip").items()]
    lines += ["", "Each source with itself left out of the fit (*: rows of which something had to be assumed):", ""]
    lines += ["| source | runs | median | 90th | worst |", "| --- | --- | --- | --- | --- |"]
    for source, members, _, deltas in held:
        mark = "" if all(cases[i].complete for i in members) else " *"
        lines.append(_row(source + mark, deltas))
    total, wrong = ordered(cases, final)
    lines += [
        "",
        f"Order of models within a source, where the published gap exceeds 8 %: {total - len(wrong)} of {total} pairs.",
        *(
            f"- {a} over {b}, time per model FLOP: {np.exp(theirs):.2f} as published, {np.exp(ours):.2f} ours"
            for a, b, theirs, ours in wrong
        ),
        "",
    ]
    lines += ["| run | ours, s | theirs, s | delta |", "| --- | --- | --- | --- |"]
    for case, delta in zip(cases, final, strict=True):
        mark = "" if case.complete else " *"
        ours, percent = case.theirs * np.exp(delta), 100 * np.expm1(delta)
        lines.append(f"| {case.id}{mark} | {ours:.4g} | {case.theirs:.4g} | {percent:+.1f} % |")
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def _row(name: str, deltas: Sequence[float]) -> str:
    sizes = [abs(100 * float(np.expm1(delta))) for delta in deltas]
    high = float(np.percentile(sizes, 90))
    return f"| {name} | {len(sizes)} | {statistics.median(sizes):.1f} | {high:.1f} | {max(sizes):.1f} |"


if __name__ == "__main__":
    main()
