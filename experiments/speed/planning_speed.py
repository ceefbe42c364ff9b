"""Planning time end to end, from a cold start: wall, CPU, peak memory and phases of every row.

    python experiments/speed/planning_speed.py [--only TEXT ...] [--again] [--table] [--out FOLDER]

Rows are saved in results/planning_speed.json. Wall seconds depend on the load of the machine. CPU seconds are
those of all threads.
"""

import subprocess
import sys
import time

from autoshard.base.processes import cores
from experiments.lib.harness import Experiment, Rows, grid, page
from experiments.lib.plan_command import run


LONG = ("--batch", "64", "--seq", "8192", "--remat", "full")
WIDE = ("--batch", "1024", "--seq", "4096", "--remat", "full")
TEXT = ("--batch", "256", "--seq", "1024", "--remat", "full")
LEFT = ("--batch", "256", "--seq", "8192", "--remat", "auto")
FREE = ("--batch", "64", "--seq", "8192", "--remat", "auto", "--microbatches", "auto", "--host", "auto")
SPENT = ("--batch", "256", "--seq", "4096", "--remat", "auto", "--experts", "auto")
PEER = "102 s, 4.2 GB"
ROWS = {
    # Columns: program, options, topology, mesh, target in seconds, target in GB, the peer's figures.
    "llama3-8b 32x8": ("llama3-8b", LONG, "v5p:4x8x8", "data=32,model=8", 12, 2, PEER),
    "llama3-8b searched": ("llama3-8b", LONG, "v5p:4x8x8", None, 30, 3, "no search"),
    "llama3-8b 8x8x4": ("llama3-8b", LONG, "v5p:4x8x8", "data=8,fsdp=8,model=4", 20, 2, "not done after 240 s"),
    "llama3-8b recipe": ("llama3-8b", FREE, "v5p:4x8x8", None, 40, 3, ""),
    "llama3.1-405b searched": ("llama3.1-405b", WIDE, "v5p:8x16x16", None, 60, 6, ""),
    "llama3.1-405b recipe": ("llama3.1-405b", LEFT, "v5p:8x16x16", None, 90, 6, ""),
    "llama3.1-405b pipeline": ("llama3.1-405b", (*LEFT, "--stages", "auto"), "v5p:8x16x16*4", None, 120, 6, ""),
    "maxtext-1024b pipeline": (
        "experiments/data/maxtext_1024b.json",
        ("--batch", "4096", "--seq", "2048", "--remat", "auto", "--stages", "auto"),
        "v5p:8x8x16*2",
        None,
        120,
        6,
        "",
    ),
    "mixtral-8x7b searched": ("mixtral-8x7b", WIDE, "v5p:8x8x16", None, 60, 6, ""),
    "deepseek-v3 searched": ("deepseek-v3", WIDE, "v5p:8x8x16", None, 60, 6, ""),
    "deepseek-v3 recipe": ("deepseek-v3", SPENT, "v5p:8x16x16", None, 150, 6, ""),
    "gpt2-xl searched": ("gpt2-xl", TEXT, "v5p:4x4x4", None, 20, 2, ""),
    "vit-l16 searched": ("vit-l16", ("--batch", "1024"), "v5p:4x4x4", None, 20, 2, ""),
    "t5-large searched": (
        "t5-large",
        ("--batch", "256", "--seq", "512", "--remat", "full"),
        "v5p:4x4x4",
        None,
        20,
        2,
        "",
    ),
    "resnet-50 searched": ("resnet-50", ("--batch", "1024"), "v5p:4x4x4", None, 20, 2, ""),
    "whisper-large searched": ("whisper-large", ("--batch", "256"), "v5p:4x4x4", None, 20, 2, ""),
}
PHASES = ("trace", "extract", "meshes", "price", "solve", "write")

COMMANDS = {"import autoshard": ["-c", "import autoshard"], "autoshard --help": ["-m", "autoshard", "--help"]}
"""Commands that must not wait for heavy imports."""


def line(label: str, found: dict) -> list[str]:
    _, _, _, _, seconds, size, peer = ROWS[label]
    cells = [label, f"{found['wall']:.1f}", f"{found['cpu']:.1f}"]
    cells.append(f"{found['rss'] / 1e9:.2f}" + (f" ({found['pss'] / 1e9:.2f})" if "pss" in found else ""))
    cells += [f"{seconds} s, {size} GB", peer]
    if "error" in found:
        return [*cells, found["error"]]
    cells += [f"{found['wall_s'].get(phase, 0.0):.1f}" for phase in PHASES]
    cells.append(",".join(f"{axis}={n}" for axis, n in found["mesh"].items()))
    cells += [f"{found['step_time_s'] * 1e3:.1f}", f"{found['plan_gap']:.2%}"]
    return [*cells, f"{found['loop_s']:.2f}" if "loop_s" in found else "-"]


def loop() -> float:
    """Return the seconds of twenty million additions, which show the present speed of a shared machine."""
    began = time.process_time()
    total = 0
    for number in range(20_000_000):
        total += number
    return time.process_time() - began


def started(command: list[str]) -> float:
    """Return the wall seconds of a command; the best of five."""
    times = []
    for _ in range(5):
        began = time.monotonic()
        subprocess.run([sys.executable, *command], capture_output=True, check=True)
        times.append(time.monotonic() - began)
    return min(times)


def work(label: str) -> dict:
    """Plan one step from a cold start, or start one command."""
    if label in COMMANDS:
        return {"wall": started(COMMANDS[label])}
    program, options, topology, mesh, *_ = ROWS[label]
    slow = loop()
    where = ["--topology", topology, "--mesh", mesh or "auto"]
    answer = run(f"hf:{program}", ["--train", "--no-cache", *options, *where])
    wanted = ("wall", "cpu", "rss", "pss", "error", "wall_s", "mesh", "step_time_s", "plan_gap", "meshes")
    return {key: answer[key] for key in wanted if key in answer} | {"loop_s": slow}


def table(rows: Rows) -> str:
    starts = [f"`{name}` {row['wall']:.2f} s" for name, row in rows.items() if name in COMMANDS]
    return page(
        "# How long planning takes",
        f"""
`python experiments/speed/planning_speed.py`. One training step each, in a process of its own, nothing cached; the \
peer is
meta-pytorch/autoparallel on two cores (trace, build and solve of Llama-3-8B on (3{cores()}, 8), batch 64 x 8192). \
`loop`: what
twenty million additions in Python took just before, which says how fast a shared machine is. `planner GB`: the most
that all processes of a plan held at once, with pages that they share counted for each (in brackets once).
The machine has 2 cores.
"""
        """
""",
        grid(
            f"row | wall s | CPU s | planner GB | aim | peer | {' s | '.join(PHASES)} s | mesh | step ms | plan gap | "
            "loop s",
            (line(label, row) for label, row in rows.items() if label in ROWS),
        ),
        f"{', '.join(starts)}.".replace("` ", "` takes ", 1) if starts else "",
    )


if __name__ == "__main__":
    sys.exit(Experiment(script=__file__, names=[*ROWS, *COMMANDS], work=work, table=table).run())
