"""Ways to serve by closed form, compared with plans of traced programs that have the same layout.

    python experiments/fidelity/serving_checks.py

Each row runs `autoshard serve-plan ... --check` for the way that serves most within the limit: a step of decoding and
one of prompts. The script writes `results/serving_checks.md`.
"""

import statistics
import sys
from pathlib import Path

from autoshard.planning import Plan
from autoshard.serving import CheckedStep, ServingLimits, ServingRequests, check_serving, plan_serving


TABLE = Path(__file__).parents[1] / "results" / "serving_checks.md"
ROWS = (
    ("llama3-8b", "v6e:2x4", 0.010),
    ("llama3.1-70b", "v6e:4x4", 0.030),
    ("llama3.1-70b", "v5p:2x2x4", 0.030),
    ("gemma2-9b", "v5e:2x4", 0.050),
    ("mixtral-8x7b", "v6e:4x4", 0.015),
    ("llama3-8b", "h100:8", 0.020),
)
"""Model, topology, and the limit of each token in seconds."""
HEAD = """# Serving by closed form, and planned

`python experiments/fidelity/serving_checks.py`: prompts and answers of 1000 tokens, weights and caches of 16 bits.
Closed form: as `autoshard serve-plan` prices the way that serves most within the limit; planned: programs of ours,
traced, with weights, cache and inputs laid out so. Ratios: closed form over planned. Freely: time where the layout is
chosen too.

| model | topology | engines | step | ms | planned ms | ratio | GiB | planned GiB | ratio | freely ms |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def main() -> int:
    lines, times, sizes = [], [], []
    for model, topology, limit in ROWS:
        limits = ServingLimits(token_s=limit)
        plan = plan_serving(f"hf:{model}", topology, ServingRequests(1000, 1000), limits)
        engine = plan.best.engine
        kind = f"tensor {engine.tensor}"
        kind += f", attention {engine.attention}" if engine.attention > 1 else ""
        kind += f", experts {engine.experts}" if engine.experts > 1 else ""
        for step in check_serving(plan):
            cells = [model, topology, f"{kind}, batch {plan.best.batch}", step.kind]
            cells += planned(step, times, sizes)
            lines.append(f"| {' | '.join(cells)} |\n")
    off = [statistics.median(abs(each - 1) for each in ratios) for ratios in (times, sizes)]
    text = HEAD + "".join(lines) + f"\nMedian off: time {off[0]:.1%}, memory {off[1]:.1%}.\n"
    TABLE.write_text(text)
    print(text)
    return 0


def planned(step: CheckedStep, times: list[float], sizes: list[float]) -> list[str]:
    plan: Plan | None = step.laid_out
    own = [1e3 * step.estimate.step_time_s, step.estimate.peak_bytes / 2**30]
    if plan is None:
        return [f"{own[0]:.3g}", "-", "-", f"{own[1]:.2f}", "-", "-", "; ".join(step.failed)]
    theirs = [1e3 * plan.prediction.step_time_s, plan.prediction.peak_bytes / 2**30]
    times.append(own[0] / theirs[0])
    sizes.append(own[1] / theirs[1])
    free = "-" if step.free is None else f"{1e3 * step.free.prediction.step_time_s:.3g}"
    seconds = [f"{own[0]:.3g}", f"{theirs[0]:.3g}", f"{times[-1]:.2f}"]
    return [*seconds, f"{own[1]:.2f}", f"{theirs[1]:.2f}", f"{sizes[-1]:.2f}", free]


if __name__ == "__main__":
    sys.exit(main())
