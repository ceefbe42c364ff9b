"""Random torch modules, traced and compared with eager torch, counted by feature.

    python experiments/random_modules.py [--modules 300]

Each module of `tests/random_modules.py` becomes a training step. Loss, the gradient of every parameter, and buffers are
those of eager torch, and afterwards the module has the tensors, attributes, hooks and modes that it had and computes
the same; or else the table names the fewest features with which it fails. A module that is refused is counted apart,
never as equal.

Rows are kept in `results/random_modules.json` as they are made, and are not made again. Writes
`results/random_modules.md`; exit code 1 if anything was wrong.
"""

import argparse
import collections
import os
import sys
from pathlib import Path
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from kept import Results, checked_out  # noqa: E402


RESULTS = Path(__file__).parent / "results"
DATA, TABLE = RESULTS / "random_modules.json", RESULTS / "random_modules.md"


def work(seed: int) -> dict[str, Any]:
    """Trace the module of a seed and compare it; of a failure, name the fewest features that show it."""
    import jax

    from tests.random_module_runs import cut_down, run
    from tests.random_modules import random_recipe

    recipe = random_recipe(seed)
    outcome = run(recipe)
    words = dict(recipe.words) if isinstance(recipe.words, dict) else list(recipe.words)
    row = {"recipe": str(recipe), "words": words, "result": outcome.kind, "text": outcome.text}
    if outcome.kind not in ("equal", "refused"):
        smaller, why = cut_down(recipe, outcome)
        row |= {"text": f"{smaller}: {why.text}"}
    jax.clear_caches()
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Write the counts, and each module that is not equal, as Markdown."""
    counts = collections.Counter(row["result"] for row in rows)
    said = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    lines = ["# Random torch modules against eager torch", "", f"{len(rows)} modules: {said}.", ""]
    lines += ["| module | result | reason |", "| --- | --- | --- |"]
    for row in rows:
        if row["result"] != "equal":
            cells = (row["recipe"], row["result"], row["text"])
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the modules that are missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=300, help="number of modules, from seed 0 on")
    asked = parser.parse_args()
    kept = Results(DATA)
    names = [str(seed) for seed in range(asked.modules)]
    for name in names:
        if name not in kept.rows:
            kept.keep(name, work(int(name)) | {"commit": checked_out()})
            print(name, kept.rows[name]["result"], kept.rows[name]["text"][:200], flush=True)
    rows = [kept.rows[name] for name in names]
    TABLE.write_text(table(rows))
    sys.exit(any(row["result"] not in ("equal", "refused") for row in rows))


if __name__ == "__main__":
    main()
