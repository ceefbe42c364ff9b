"""Random torch modules, traced and compared with eager torch, counted by feature.

    python experiments/correctness/random_modules.py [--modules 300]

Each module of `tests/random_modules.py` becomes a training step. Loss, buffers and the gradient of every parameter must
equal those of eager torch. Afterwards the module must have its original tensors, attributes, hooks and modes, and
compute the same. Otherwise the table names the fewest features with which the module fails.

A refused module is counted separately, never as equal. Every tenth module is also planned for 8 CPU devices, and its
step compared with the unplanned one. Then every feature is tried alone, in four layers.

Rows are saved in `results/random_modules.json` as they are computed, and are not run again. The script writes
`results/random_modules.md`; the exit code is 1 if anything was wrong.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.lib.saved_results import Results


ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).parents[1] / "results" / "random_modules.md"
AT_ONCE = 20
"""Modules that one process runs, since compiled programs stay in its memory."""
PLANNED = 10
"""Interval of planned modules: one in so many is planned and run."""
if TYPE_CHECKING:
    from tests.random_modules import Recipe


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=300, metavar="N", help="random modules (default: 300)")
    parser.add_argument("--worker", nargs=3, metavar=("KIND", "FIRST", "END"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        kind, first, end = options.worker
        work(kind, int(first), int(end))
        return 0
    results = Results(TABLE.with_suffix(".json"))
    for kind, count in (("random", options.modules), ("alone", len(list(alone())))):
        for first in range(0, count, AT_ONCE):
            end = min(count, first + AT_ONCE)
            if any(f"{kind} {number}" not in results.rows for number in range(first, end)):
                run_some(kind, first, end, results)
    # Rows of a generator with other features stay out of this table.
    known = {f"{kind} {n}" for kind, count in (("random", 10**6), ("alone", len(list(alone())))) for n in range(count)}
    rows = {key: row for key, row in results.rows.items() if key in known}
    TABLE.write_text(table(rows))
    print(TABLE.read_text())
    return 1 if any(row["kind"] not in ("equal", "refused") or _fails(row) for row in rows.values()) else 0


def alone() -> "Iterator[Recipe]":
    """Yield recipes of one feature each; an attribute once for each way in which layers differ in it."""
    from tests.random_modules import WORDS, Recipe, allowed

    for name, words in WORDS.items():
        for word in dict.fromkeys(words[1:]):
            if name == "attribute":
                for settings in dict.fromkeys(WORDS["settings"]):
                    yield Recipe(1, layers=4, attribute=word, settings=settings)
            elif name != "settings":
                changed: dict[str, Any] = {"layers": 4, name: word}
                yield allowed(Recipe(1, **changed))


def work(kind: str, first: int, end: int) -> None:
    """Run some modules in this process, and print each row as a line of JSON."""
    import warnings

    from tests.random_module_runs import cut_down, run, run_planned
    from tests.random_modules import random_recipe

    warnings.simplefilter("ignore")
    recipes = [random_recipe(number) for number in range(end)] if kind == "random" else list(alone())
    for number in range(first, end):
        recipe = recipes[number]
        outcome = run(recipe)
        row: dict[str, Any] = {"words": recipe.words}
        if outcome.kind == "equal" and kind == "random" and number % PLANNED == 0:
            row["planned"] = run_planned(recipe)
        if outcome.kind not in ("equal", "refused") and kind == "random":
            recipe, outcome = cut_down(recipe, outcome)
        row |= {"kind": outcome.kind, "text": outcome.text, "least": recipe.words}
        print(json.dumps([f"{kind} {number}", row]), flush=True)


def run_some(kind: str, first: int, end: int, results: Results) -> None:
    """Run some modules in a process of their own, and save their rows."""
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "AUTOSHARD_CACHE_DIR": ""}
    environment |= {"AUTOSHARD_DATA_DIR": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--worker", kind, str(first), str(end)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    outcomes = dict(map(json.loads, done.stdout.splitlines()))
    for number in range(first, end):
        ended = {"words": {}, "kind": "raised", "text": f"the process ended with {done.returncode}", "least": {}}
        results.keep(f"{kind} {number}", outcomes.get(f"{kind} {number}", ended))
    print(kind, first, end, dict(collections.Counter(row["kind"] for row in outcomes.values())), flush=True)


def _fails(row: dict[str, Any]) -> bool:
    return row.get("planned", "split").startswith("differs")


def table(rows: dict[str, Any]) -> str:
    """Return counts by feature, and every module that is not equal."""
    random = {key: row for key, row in rows.items() if key.startswith("random")}
    single = [row for key, row in rows.items() if key.startswith("alone")]
    kinds = collections.Counter(row["kind"] for row in random.values())
    planned = collections.Counter(row["planned"].partition(":")[0] for row in random.values() if "planned" in row)
    lines = ["# Random torch modules beside eager torch", ""]
    lines += [f"{len(random)} random modules: " + _counts(kinds) + "."]
    lines += [f"Of these {planned.total()} were planned for 8 CPU devices: " + _counts(planned) + "."]
    lines += [f"{len(single)} features alone: " + _counts(collections.Counter(row["kind"] for row in single)) + "."]
    lines += ["", "| feature | modules | equal | refused | wrong |", "| --- | --- | --- | --- | --- |"]
    for name in dict.fromkeys(key for row in random.values() for key in row["words"]):
        having = [row["kind"] for row in random.values() if name in row["words"]]
        equal, refused = having.count("equal"), having.count("refused")
        lines.append(f"| {name} | {len(having)} | {equal} | {refused} | {len(having) - equal - refused} |")
    others = [(key, row) for key, row in rows.items() if row["kind"] != "equal" or _fails(row)]
    if others:
        lines += ["", "| module | fewest features | outcome |", "| --- | --- | --- |"]
    for key, row in others:
        words = ", ".join(f"{name} {word}" for name, word in row["least"].items()) or "none"
        text = row["planned"] if _fails(row) else f"{row['kind']}: {row['text']}"
        lines.append(f"| {key} | {words} | {text.replace('|', '/')[:160]} |")
    return "\n".join(lines) + "\n"


def _counts(kinds: collections.Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "none"


if __name__ == "__main__":
    sys.exit(main())
