"""The table of `reliability.py`: counts, faults, and the faults that were repaired during development."""

import collections
import os
import platform
import time
from typing import Any

from experiments.lib.saved_results import checked_out


ANSWERS = ("optimal", "infeasible", "feasible", "none found")
"""Possible answers to a problem that is not refused."""
WARM = 0.25
"""Share of a long run after which its resources must not grow."""
GROWTH = 0.02
"""Share of its memory by which a process may still grow after that, since allocators do not return all memory."""


def rows_of(rows: dict[str, Any], kind: str) -> dict[str, Any]:
    return {key: row for key, row in rows.items() if key.split()[0] == kind}


def growth(samples: list[dict[str, int]]) -> list[str]:
    """List the resources that grow after the first quarter of a long run."""
    warm = [sample for sample in samples if sample["number"] >= WARM * samples[-1]["number"]]
    first, last = warm[0], warm[-1]
    grown = [
        f"{last[what] - first[what]} {what}"
        for what in ("descriptors", "threads", "files", "children")
        if last[what] > first[what]
    ]
    if last["bytes"] > (1 + GROWTH) * first["bytes"]:
        grown.append(f"{last['bytes'] - first['bytes']} bytes")
    return grown


def wrong(rows: dict[str, Any]) -> list[str]:
    """List every fault in the rows."""
    faults = [f"{key}: {row['wrong']}" for key, row in rows_of(rows, "kill").items() if row["wrong"]]
    faults += [f"{key}: {row}" for key, row in rows_of(rows, "place").items() if row and row != "not here"]
    for key, row in (rows_of(rows, "problems") | rows_of(rows, "programs")).items():
        faults += [f"{key}: {what}" for what in row if what.startswith(("wrong", "differs", "raised"))]
    for key, row in rows_of(rows, "long").items():
        faults += [f"{key}: {what} more" for what in growth(row)]
    return faults


MENDED = (
    (
        "a folder `autoshard/` or a file `json.py` in the working directory was executed by helpers, or broke them",
        "children have no working directory on their path",
    ),
    (
        "a topology or an axis with a newline became code in every export",
        "names are text, a literal or one line of a comment",
    ),
    ("`explain` and `export` ran a plan's program without saying so", "it is said before"),
    (
        "`-o` to a link, a pipe or a device was replaced by a file; modes were widened",
        "links, devices, modes and owners stay",
    ),
    (
        "a closed or full stdout, a closed stderr, a deleted working directory: tracebacks",
        "one sentence, exit code 2",
    ),
    (
        "deep JSON, numbers of 5,000 digits, NaN and negative figures, `schema: true`: tracebacks, or valid plans",
        "damaged, in one sentence",
    ),
    ("a gzip file that unpacks to gigabytes was unpacked", "read up to a bound"),
    (
        "`v5e:4x4*99999999`, `--seq 99999999999`, tensors past 64 bits: hours, gigabytes, or wrong sums",
        "refused at once",
    ),
    (
        "a sweep went on after SIGINT, and its workers after SIGTERM and SIGKILL",
        "all gone within two seconds",
    ),
    (
        "plans for `cpu:N` changed with the cores in use",
        "the machine's cores, or those that `cpu:8@4` says",
    ),
    (
        "nested loops of 2^31 iterations each came to a negative objective: picoseconds wrapped in 64 bits",
        "refused: 11 days of a step can be reckoned exactly",
    ),
    (
        "SIGINT just as a folder for temporary files was made, or was being removed, left it (2 of 200 kills; mended, "
        "and made again)",
        "taken away whenever a signal comes",
    ),
    (
        "a limit on addresses (`ulimit -v`) ended the process in XLA, with hundreds of lines",
        "one sentence before",
    ),
    (
        "an entry of the cache with deep JSON was a traceback",
        "not used, as any that is damaged",
    ),
    (
        "processes that share a cache warned of entries that others had dropped",
        "they do not",
    ),
    (
        "what a killed process was writing stayed in the cache for ever",
        "gone an hour later",
    ),
    (
        "a plan's bytes changed with how its program's file was named, and from where",
        "named as seen from the plan's file",
    ),
    (
        "names of axes and baselines in an edited plan, and the program that it names, were printed as they are: "
        "they could steer the terminal, and hide what is run",
        "what could move the cursor or turn the text around is replaced in all that is printed",
    ),
    (
        "a configuration could have any function of its model's module called, as its class",
        "only classes of models",
    ),
    (
        "branches of a conditional that were pinned to different specs did not compile (seed 71)",
        "they end in one spec",
    ),
    (
        "shards of one window, of a gather whose start is past the end, began elsewhere (seed 180)",
        "such starts are clamped",
    ),
)
"""Faults that were found, each with the behaviour after its repair."""


def table(rows: dict[str, Any]) -> str:
    problems, places = rows_of(rows, "problems"), rows_of(rows, "place")
    kills, long = rows_of(rows, "kill"), rows_of(rows, "long")
    lines = [
        "# Reliability",
        "",
        f"`python experiments/correctness/reliability.py`, {time.strftime('%Y-%m-%d')}, at {checked_out()},",
        f"{os.cpu_count()} cores, Python {platform.python_version()}.",
        "",
        *counts(rows),
        "",
        *_programs_table(rows_of(rows, "programs")),
        *_problems_table(problems),
        *_kills_table(kills),
        *_places_table(places),
        *_long_table(long),
        "| found on the way | now |",
        "| --- | --- |",
        *(f"| {found} | {now} |" for found, now in MENDED),
    ]
    if bad := wrong(rows):
        lines += ["", "Wrong:", "", *(f"- {each}" for each in bad)]
    return "\n".join(lines) + "\n"


def counts(rows: dict[str, Any]) -> list[str]:
    """Return one line for each counted kind."""
    from tests import test_bad_input as bad
    from tests.solver.random_problems import EACH, KINDS

    programs = _summed(rows_of(rows, "programs"))
    problems = _summed(rows_of(rows, "problems"))
    kills = rows_of(rows, "kill")
    runs, wrong_runs = programs.total(), sum(n for what, n in programs.items() if what[:7] in ("differs", "raised:"))
    answers = sum(problems[what] for what in ANSWERS)
    inputs = len(bad.READERS) * len(bad.FILES) + sum(
        len(cases) for cases in (bad.LINES, bad.EDITED, bad.PROBLEMS, bad.CALIBRATIONS, bad.CONFIGS, bad.PROGRAMS)
    )
    inputs += len(bad.CALLS) + len(bad.VARIABLES)
    fine = [row for row in kills.values() if not row["wrong"]]
    places = {key: row for key, row in rows_of(rows, "place").items() if row != "not here"}
    lines = ["| counted | wanted | done | as it should be |", "| --- | --- | --- | --- |"]
    lines += [
        f"| random problems against brute force | 20,000 | {problems.total():,} | {answers:,} answered, "
        f"{problems['refused']:,} refused, {problems.total() - answers - problems['refused']} wrong |",
        f"| of these in `make test` | 2,000 | {EACH * len(KINDS):,} | asserted |",
        f"| runs of random programs | 1,000 | {runs:,} | {runs - wrong_runs} |",
        f"| bad inputs in one table (`tests/test_bad_input.py`) | 300 | {inputs} | asserted |",
        f"| commands ended at random moments | 200 | {len(kills)} | {len(fine)} |",
        f"| places where something is missing | | {len(places)} | {sum(not row for row in places.values())} |",
    ]
    for key, samples in rows_of(rows, "long").items():
        _, kind, count = key.split()
        what = {"plans": "plans in one process", "steps": "steps under the hook"}[kind]
        wanted = {"plans": "300", "steps": "2,000"}[kind]
        lines.append(f"| {what} | {wanted} | {int(count):,} | {', '.join(growth(samples)) or 'nothing grows'} |")
    return lines


def _summed(rows: dict[str, Any]) -> collections.Counter[str]:
    return sum((collections.Counter(row) for row in rows.values()), collections.Counter())


def _programs_table(rows: dict[str, Any]) -> list[str]:
    outcomes = _summed(rows)
    kinds = collections.Counter(outcome.partition(":")[0] for outcome in outcomes.elements())
    said = {"split": "equal, the plan splits something", "whole": "equal, nothing split"}
    said |= {"refused": "refused with a reason", "differs": "differ", "raised": "raised"}
    lines = [f"| {outcomes.total()} runs of random programs on 8 CPU devices | runs |", "| --- | --- |"]
    lines += [f"| {text} | {kinds[kind]} |" for kind, text in said.items()]
    named = [(what, n) for what, n in sorted(outcomes.items()) if ":" in what]
    return [*lines, *(f"| {what.replace('|', '/')} | {n} |" for what, n in named), ""]


def _problems_table(rows: dict[str, Any]) -> list[str]:
    lines = ["| random problems | solved | optimal | infeasible | feasible | none, not proven | refused | wrong |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for key, row in rows.items():
        _, each, kind = key.split(" ", 2)
        known = [row.get(what, 0) for what in (*ANSWERS, "refused")]
        lines.append(f"| {kind} | {each} | {' | '.join(map(str, known))} | {int(each) - sum(known)} |")
    return [*lines, ""]


def _kills_table(rows: dict[str, Any]) -> list[str]:
    names = sorted({row["command"].split()[0] for row in rows.values()})
    signals = ("SIGKILL", "SIGTERM", "SIGINT")
    lines = [f"| {len(rows)} commands ended | {' | '.join(signals)} | by the clock | at a file | as it should be |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name in names:
        own = [row for row in rows.values() if row["command"].split()[0] == name]
        sent = [str(sum(row["signal"] == each for row in own)) for each in signals]
        file = sum("file" in row["moment"] for row in own)
        fine = sum(not row["wrong"] for row in own)
        lines.append(f"| {name} | {' | '.join(sent)} | {len(own) - file} | {file} | {fine} |")
    early, beside = sum(row["early"] for row in rows.values()), sum(row["beside"] for row in rows.values())
    lines += [
        "",
        f"{early} had ended by themselves before. {beside} files under names that begin with `.autoshard-` were",
    ]
    lines[-1] += " left by SIGKILL beside those that were being written."
    return [*lines, ""]


def _places_table(rows: dict[str, Any]) -> list[str]:
    lines = ["| place | what was seen |", "| --- | --- |"]
    from tests.environments import REFUSES

    for key, row in rows.items():
        place = key.partition(" ")[2]
        fine = "one sentence, nothing written" if place in REFUSES else "the same plan"
        lines.append(f"| {place} | {row or fine} |")
    return [*lines, ""]


def _long_table(rows: dict[str, Any]) -> list[str]:
    lines = ["| long run | after | MiB | descriptors | threads | temporary files | children |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for key, samples in rows.items():
        kind = key.split()[1]
        for sample in samples[:: max(1, len(samples) // 4)] + samples[-1:]:
            held = [sample[what] for what in ("descriptors", "threads", "files", "children")]
            mib = sample["bytes"] / 2**20
            lines.append(f"| {kind} | {sample['number']} | {mib:.1f} | {' | '.join(map(str, held))} |")
    return [*lines, ""]
