"""First estimates of `autoshard estimate`, compared with plans of the same steps.

    python experiments/fidelity/first_estimates.py [--only TEXT ...] [--again] [--table]

Rows are saved in `results/first_estimates.json`; the table is `results/first_estimates.md`.
"""

import statistics
import sys
import time
from typing import Any

from autoshard.cost import Topology
from autoshard.planning import Options, Running, make_plan, settled_options
from autoshard.program import open_source
from autoshard.serving import estimate_config
from experiments.lib.harness import Experiment, grid, page


ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    # Columns: configuration, options, topology.
    "llama3-8b v5p-128 full": ("llama3-8b", {"train": True, "batch": 64, "seq": 8192, "remat": "full"}, "v5p:4x4x4"),
    "llama3-8b v5p-128 none": ("llama3-8b", {"train": True, "batch": 64, "seq": 4096, "remat": "none"}, "v5p:4x4x4"),
    "llama3-8b v5e-16 full": ("llama3-8b", {"train": True, "batch": 16, "seq": 2048, "remat": "full"}, "v5e:4x4"),
    "llama3-8b v6e-64 full": ("llama3-8b", {"train": True, "batch": 128, "seq": 4096, "remat": "full"}, "v6e:8x8"),
    "gemma2-9b v6e-64 full": ("gemma2-9b", {"train": True, "batch": 128, "seq": 4096, "remat": "full"}, "v6e:8x8"),
    "gpt2-xl v5e-16 full": ("gpt2-xl", {"train": True, "batch": 128, "seq": 1024, "remat": "full"}, "v5e:4x4"),
    "gpt2-xl v5e-16 dots": ("gpt2-xl", {"train": True, "batch": 64, "seq": 1024, "remat": "dots"}, "v5e:4x4"),
    "llama3-8b h100-8 full": ("llama3-8b", {"train": True, "batch": 16, "seq": 8192, "remat": "full"}, "h100:8"),
    "llama3-70b h100-64 full": ("llama3-70b", {"train": True, "batch": 64, "seq": 8192, "remat": "full"}, "h100:8*8"),
    "llama3-8b decode v6e-8": ("llama3-8b", {"serve": "decode", "batch": 64, "seq": 4096}, "v6e:2x4"),
    "llama3-8b prefill v6e-8": ("llama3-8b", {"serve": "prefill", "batch": 8, "seq": 4096}, "v6e:2x4"),
}


def made(name: str) -> dict:
    config, options, topology = ROWS[name]
    began = time.process_time()
    (guess,) = estimate_config(f"hf:{config}", Topology.parse(topology), **options)
    cpu = time.process_time() - began
    program = open_source(f"hf:{config}", kept=True, **settled_options(options, topology))
    plan = make_plan(program, Options(topology=topology), Running(kept=True)).plan
    return {
        "guessed_s": guess.estimate.step_time_s,
        "planned_s": plan.prediction.step_time_s,
        "guessed_bytes": guess.estimate.peak_bytes,
        "planned_bytes": plan.prediction.peak_bytes,
        "layout": dict(guess.estimate.layout),
        "mesh": dict(plan.mesh),
        "cpu_s": cpu,
    }


def table(found: dict) -> str:
    lines = []
    for name, row in found.items():
        sizes = [row[key] / 2**30 for key in ("guessed_bytes", "planned_bytes")]
        times = [row[key] for key in ("guessed_s", "planned_s")]
        cells = [name, *(f"{1e3 * each:.4g} ms" for each in times), f"{times[0] / times[1]:.2f}"]
        cells += [*(f"{each:.2f} GiB" for each in sizes), f"{sizes[0] / sizes[1]:.2f}"]
        cells += ["x".join(map(str, row["layout"].values())), ",".join(f"{k}={v}" for k, v in row["mesh"].items())]
        lines.append([*cells, f"{row['cpu_s']:.2f}"])
    time_off, memory_off = (
        statistics.median(abs(row[f"guessed_{key}"] / row[f"planned_{key}"] - 1) for row in found.values())
        for key in ("s", "bytes")
    )
    return page(
        "# First estimates beside plans",
        """
`python experiments/fidelity/first_estimates.py`. What `autoshard estimate` guesses from a model's dims by closed \
form, and what
`autoshard plan` predicts of the same step with a searched mesh. Nothing in the formulas was fitted to these rows.
""",
        grid(
            "row | step guessed | planned | ratio | memory guessed | planned | ratio | layout | mesh | "
            "CPU s of the guess",
            lines,
        ),
        f"Median off: time {time_off:.1%}, memory {memory_off:.1%}.",
    )


if __name__ == "__main__":
    sys.exit(Experiment(script=__file__, names=ROWS, work=made, table=table).run())
