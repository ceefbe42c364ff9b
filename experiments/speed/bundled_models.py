"""Every bundled full-size model, planned: wall time, memory of the planner, gaps, and the best baseline.

    python experiments/speed/bundled_models.py [NAME ...]

Each is planned on 64 chips and two axes, and some also on 256 chips and more axes. Names are those of the tables; the
rows of named models are replaced, and the others stay.
"""

import sys
from pathlib import Path

from experiments.quality.plan_vs_baselines import run


OUT = Path(__file__).parents[1] / "results" / "bundled_models.md"

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

HEAD = """# Every bundled model, one training step on v5p:4x4x4 as data=16, model=4

`python experiments/speed/bundled_models.py`; `ratio` is the best fitting baseline's predicted time over ours.

"""
MORE = """
# More axes: one training step on v5p:4x8x8

`data=8, fsdp=8, model=4`; `data=4, fsdp=4, sequence=4, model=4`; `data=16, model=16` with and without refined axes.
`CPU s` is the processor time of the whole command, all threads; wall seconds are of a busy machine.

"""
COLUMNS = ("model", "wall s", "planner GiB", "of it solving s", "step ms", "ratio", "MFU", "peak GiB", "solver gap")
COLUMNS += ("plan gap", "plan")


def row(label: str, name: str, options: tuple[str, ...], topology: str, mesh: str) -> str:
    answer = run(name, ["--train", *options, "--topology", topology, "--mesh", mesh])
    cells = [label, f"{answer['wall']:.1f}", *([f"{answer['cpu']:.1f}"] if label in AXES else [])]
    cells.append(f"{answer['rss'] / 2**30:.2f}")
    if "error" in answer:
        return f"| {' | '.join([*cells, answer['error']])} |"
    fitting = [b["step_time_s"] for b in answer["baselines"].values() if b["fits"]]
    ratio = f"{min(fitting) / answer['step_time_s']:.3f}" if fitting else "none fits"
    cells += [f"{answer['wall_s']['solve']:.1f}", f"{answer['step_time_s'] * 1e3:.1f}", ratio, f"{answer['mfu']:.1%}"]
    cells += [f"{answer['peak_bytes'] / 2**30:.1f}", f"{answer['solver_gap']:.2%}", f"{answer['plan_gap']:.2%}"]
    return f"| {' | '.join([*cells, '; '.join(answer['words'])])} |"


def main() -> None:
    wanted = sys.argv[1:] or [*ROWS, *AXES]
    old = OUT.read_text().splitlines() if OUT.is_file() else []
    lines = {line.split(" | ")[0].strip("| "): line for line in old if line.startswith("| ")}
    for label in wanted:
        name, options, mesh = AXES.get(label) or (label, ROWS[label], "data=16,model=4")
        lines[label] = row(label, name, options, "v5p:4x8x8" if label in AXES else "v5p:4x4x4", mesh)
        print(lines[label], flush=True)
    tables = []
    for labels, columns in ((ROWS, COLUMNS), (AXES, (*COLUMNS[:2], "CPU s", *COLUMNS[2:]))):
        top = f"| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|\n"
        tables.append(top + "\n".join(lines[label] for label in labels if label in lines) + "\n")
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(HEAD + tables[0] + MORE + tables[1])


if __name__ == "__main__":
    main()
