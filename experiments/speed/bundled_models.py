"""Every bundled full-size model, planned: wall time, memory of the planner, gaps, and the best baseline.

    python experiments/speed/bundled_models.py [--only TEXT ...] [--again] [--table]

Each is planned on 64 chips and two axes, and some also on 256 chips and more axes.
"""

import sys
from typing import Any

from experiments.lib.harness import Experiment, Rows, grid, page
from experiments.lib.plan_command import run


TEXT = ("--batch", "64", "--seq", "4096", "--remat", "full")
SHORT = ("--batch", "256", "--seq", "512", "--remat", "full")
IMAGES = ("--batch", "1024")
ROWS = {
    "gpt2": ("--batch", "256", "--seq", "1024", "--remat", "full"),
    "gpt2-xl": ("--batch", "256", "--seq", "1024", "--remat", "full"),
    "gpt2-16b": ("--batch", "256", "--seq", "1024", "--remat", "full"),
    "llama3-8b": TEXT,
    "llama3-70b": TEXT,
    "llama3.1-405b": TEXT,
    "gemma2-9b": TEXT,
    "mixtral-8x7b": TEXT,
    "deepseek-v3": TEXT,
    "bert-large": SHORT,
    "t5-large": SHORT,
    "whisper-large": ("--batch", "256"),
    "vit-l16": IMAGES,
    "resnet-50": IMAGES,
}


LONG = ("--batch", "64", "--seq", "8192", "--remat", "full")
AXES = {
    "llama3-8b, 3 axes": ("llama3-8b", LONG, "data=8,fsdp=8,model=4"),
    "mixtral-8x7b, 3 axes": ("mixtral-8x7b", TEXT, "data=8,fsdp=8,model=4"),
    "llama3-8b, 4 axes": ("llama3-8b", LONG, "data=4,fsdp=4,sequence=4,model=4"),
    "llama3-8b, 16 x 16": ("llama3-8b", LONG, "data=16,model=16"),
    "llama3-8b, 16 x 16, axes whole": ("llama3-8b", (*LONG, "--no-refine-axes"), "data=16,model=16"),
}


def work(label: str) -> dict[str, Any]:
    """Plan one model, and return the cells of its row."""
    name, options, mesh = AXES.get(label) or (label, ROWS[label], "data=16,model=4")
    topology = "v5p:4x8x8" if label in AXES else "v5p:4x4x4"
    answer = run(name, ["--train", *options, "--topology", topology, "--mesh", mesh])
    cells = [f"{answer['wall']:.1f}", *([f"{answer['cpu']:.1f}"] if label in AXES else [])]
    cells.append(f"{answer['rss'] / 2**30:.2f}")
    if "error" in answer:
        return {"cells": [*cells, answer["error"]]}
    fitting = [b["step_time_s"] for b in answer["baselines"].values() if b["fits"]]
    ratio = f"{min(fitting) / answer['step_time_s']:.3f}" if fitting else "none fits"
    cells += [f"{answer['wall_s']['solve']:.1f}", f"{answer['step_time_s'] * 1e3:.1f}", ratio, f"{answer['mfu']:.1%}"]
    cells += [f"{answer['peak_bytes'] / 2**30:.1f}", f"{answer['solver_gap']:.2%}", f"{answer['plan_gap']:.2%}"]
    return {"cells": [*cells, "; ".join(answer["words"])]}


def table(rows: Rows) -> str:
    lines = [[[name, *row["cells"]] for name, row in rows.items() if name in labels] for labels in (ROWS, AXES)]
    more = "planner GiB | of it solving s | step ms | ratio | MFU | peak GiB | solver gap | plan gap | plan"
    return page(
        "# Every bundled model, one training step on v5p:4x4x4 as data=16, model=4",
        "`python experiments/speed/bundled_models.py`; `ratio` is the best fitting baseline's predicted time over "
        "ours.",
        grid(f"model | wall s | {more}", lines[0]),
        "# More axes: one training step on v5p:4x8x8",
        """
`data=8, fsdp=8, model=4`; `data=4, fsdp=4, sequence=4, model=4`; `data=16, model=16` with and without refined axes.
`CPU s` is the processor time of the whole command, all threads; wall seconds are of a busy machine.
""",
        grid(f"model | wall s | CPU s | {more}", lines[1]),
    )


if __name__ == "__main__":
    sys.exit(Experiment(script=__file__, names=[*ROWS, *AXES], work=work, table=table).run())
