"""Random scripts in three modes: with the hook, in SPMD mode without it, and in eager torch on the CPU.

    python experiments/torch_xla/torch_xla_random.py [--only TEXT ...] [--again] [--table]

A seed draws a script of four steps (`tests/exec/torch_xla_hook/torch_xla_random_scripts.py`). It draws modules with
buffers and writes in place, lasting aliases, shared storage, hooks, optimizers, averages and teachers. It draws
short batches, sums of gradients, clipping, evaluations, state that is saved and loaded, and reads at any place. All
tensors that the script can reach are compared with eager torch. At the end each tensor gets a number of its own added
in place, which all tensors of its storage must show. Ten scripts run in one process, so that they share compiled
programs and the planned specs of batches. A difference is a part of the largest value of its tensor, or of 0.01 if
that is larger.

Rows are saved in `experiments/results/torch_xla_random.json`; the table is `torch_xla_random.md` there.
"""

import sys
from typing import Any

from experiments.lib.harness import Experiment, Rows, grid, page
from tests.exec.torch_xla_hook import torch_xla_modes as modes
from tests.exec.torch_xla_hook.torch_xla_random_scripts import CASES, LEAST


MODULE = "torch_xla_random_scripts"
COUNT, TOGETHER = 200, 10
ALLOWED = 1e-5
MODES = {"auto": "hooked", "spmd": "unhooked"}


def row_of(name: str) -> dict[str, Any]:
    """Run the scripts of one row in all modes; return differences and counts by script."""
    first = int(name.split()[1])
    scripts = list(CASES)[first : first + TOGETHER]
    found = {mode: modes.run_mode(mode, MODULE, *scripts, AUTOSHARD_CACHE_DIR="") for mode in MODES}
    rows: dict[str, Any] = {}
    for script in scripts:
        expected = modes.eager(MODULE, script)
        rows[script] = {}
        for mode, way in MODES.items():
            row = found[mode][script]
            off, where = modes.worst(row.pop("numbers"), expected, LEAST)
            rows[script][way] = row | {"off": off, "where": where}
    return {"scripts": rows, "differ": [script for script in scripts if _is_wrong(rows[script])]}


def _is_wrong(row: dict[str, Any]) -> bool:
    """Return True if a script differs from eager torch with the hook."""
    return row["hooked"]["off"] > ALLOWED


def table(rows: Rows) -> str:
    scripts = {script: row for each in rows.values() for script, row in each["scripts"].items()}
    lines = []
    for script, row in scripts.items():
        hooked, unhooked = row["hooked"], row["unhooked"]
        cells = [
            " ".join([f"{each['off']:.1e}", each["where"] * (each["off"] > ALLOWED)]) for each in (hooked, unhooked)
        ]
        cells += [f"{hooked[key]}, {unhooked[key]}" for key in ("compiles", "executions", "reads")]
        lines.append([script, *cells, hooked["plans"], len(hooked["warned"])])
    within = {
        key: sum(row["hooked"][key] <= row["unhooked"][key] for row in scripts.values())
        for key in ("executions", "reads")
    }
    more = [
        row["hooked"]["compiles"] - row["unhooked"]["compiles"] - row["hooked"]["plans"] for row in scripts.values()
    ]
    few = sum(count <= 0 for count in more)
    alone = sum(row["unhooked"]["off"] > ALLOWED for row in scripts.values())
    summary = (
        f"Of {len(scripts)} scripts {sum(map(_is_wrong, scripts.values()))} differ from eager torch by more than "
        f"{ALLOWED:g} with the hook, and {alone} without it. With the hook {within['executions']} execute no more "
        f"programs, {within['reads']} read no more tensors, and {few} compile at most one program more for each plan."
    )
    columns = (
        "script | hooked, off: | unhooked, off: | compiled, unhooked: | executed, unhooked: | read, unhooked: | "
        "plans: | warnings:"
    )
    return page("# Random scripts, hooked and unhooked", *str(__doc__).split("\n\n")[2:], summary, grid(columns, lines))


def main() -> int:
    names = [f"seeds {first} to {first + TOGETHER - 1}" for first in range(0, COUNT, TOGETHER)]
    experiment = Experiment(
        script=__file__, names=names, work=row_of, table=table, is_wrong=lambda row: bool(row["differ"])
    )
    return experiment.run()


if __name__ == "__main__":
    sys.exit(main())
