"""Ways to serve by closed form, compared with plans of traced programs that have the same layout.

    python experiments/fidelity/serving_checks.py [--only TEXT ...] [--again] [--table]

Each row runs `autoshard serve-plan ... --check` for the way that serves most within the limit: a step of decoding and
one of prompts. The script writes `results/serving_checks.md`.
"""

import statistics
import sys
from typing import Any

from autoshard.serving import CheckedStep, ServingLimits, ServingRequests, check_serving, plan_serving
from experiments.lib.harness import Experiment, Rows, grid, page


LIMITS = {
    "llama3-8b | v6e:2x4": 0.010,
    "llama3.1-70b | v6e:4x4": 0.030,
    "llama3.1-70b | v5p:2x2x4": 0.030,
    "gemma2-9b | v5e:2x4": 0.050,
    "mixtral-8x7b | v6e:4x4": 0.015,
    "llama3-8b | h100:8": 0.020,
}
"""Limit of each token in seconds, by model and topology."""


def work(name: str) -> dict[str, Any]:
    """Plan one way to serve, and its two steps."""
    model, topology = name.split(" | ")
    plan = plan_serving(f"hf:{model}", topology, ServingRequests(1000, 1000), ServingLimits(token_s=LIMITS[name]))
    engine = plan.best.engine
    kind = f"tensor {engine.tensor}"
    kind += f", attention {engine.attention}" if engine.attention > 1 else ""
    kind += f", experts {engine.experts}" if engine.experts > 1 else ""
    return {"engines": f"{kind}, batch {plan.best.batch}", "steps": [*map(figures, check_serving(plan))]}


def figures(step: CheckedStep) -> dict[str, Any]:
    """Return seconds and bytes of a step: by closed form, of the plan in the same layout, and of the free plan."""
    own = {"step": step.kind, "own_s": step.estimate.step_time_s, "own_bytes": step.estimate.peak_bytes}
    if step.laid_out is None:
        return own | {"failed": "; ".join(step.failed)}
    theirs = step.laid_out.prediction
    free = None if step.free is None else step.free.prediction.step_time_s
    return own | {"planned_s": theirs.step_time_s, "planned_bytes": theirs.peak_bytes, "free_s": free}


def table(rows: Rows) -> str:
    lines, times, sizes = [], [], []
    for name, row in rows.items():
        for step in row["steps"]:
            ms, size = f"{1e3 * step['own_s']:.3g}", f"{step['own_bytes'] / 2**30:.2f}"
            cells = [name, row["engines"], step["step"]]
            if "failed" in step:
                lines.append([*cells, ms, "-", "-", size, "-", "-", step["failed"]])
                continue
            times.append(step["own_s"] / step["planned_s"])
            sizes.append(step["own_bytes"] / step["planned_bytes"])
            cells += [ms, f"{1e3 * step['planned_s']:.3g}", f"{times[-1]:.2f}"]
            cells += [size, f"{step['planned_bytes'] / 2**30:.2f}", f"{sizes[-1]:.2f}"]
            lines.append([*cells, "-" if step["free_s"] is None else f"{1e3 * step['free_s']:.3g}"])
    off = [statistics.median(abs(each - 1) for each in ratios) for ratios in (times, sizes)]
    return page(
        "# Serving by closed form, and planned",
        """
`python experiments/fidelity/serving_checks.py`: prompts and answers of 1000 tokens, weights and caches of 16 bits. \
Closed form:
as `autoshard serve-plan` prices the way that serves most within the limit; planned: programs of ours, traced, with
weights, cache and inputs laid out so. Ratios: closed form over planned. Freely: time where the layout is chosen too.
""",
        grid(
            "model | topology | engines | step | ms | planned ms | ratio | GiB | planned GiB | ratio | freely ms", lines
        ),
        f"Median off: time {off[0]:.1%}, memory {off[1]:.1%}.",
    )


if __name__ == "__main__":
    sys.exit(Experiment(script=__file__, names=LIMITS, work=work, table=table).run())
