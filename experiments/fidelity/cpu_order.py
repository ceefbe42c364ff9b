"""Predicted against measured order of our plan and every baseline, run on 8 CPU devices.

    python experiments/fidelity/cpu_order.py [--only TEXT ...] [--again] [--seconds S] [--hold CMD] [--table]

Every program is planned for `cpu:8`. Our plan and the baselines are compiled. Baselines are completed by our solver
(`fsdp*`) and by XLA's own propagation (`fsdp`). Plans with the same compiled program count as one. Then the steps of
all plans run in turn, for many rounds, in one process, so that their medians and quartiles cover the same minutes.

Kendall's tau of a row is (concordant - discordant) / (decided pairs) over its plans with a prediction. A pair is
decided if the quartile ranges of the two measured times do not overlap. The other pairs are ties within the measured
spread, and count as neither. A decided pair with equal predictions is neither concordant nor discordant, and stays in
the denominator. The pooled tau counts the pairs of all rows together, each pair within its row.

Results are saved by row in `experiments/results/cpu_order.json`, so that a broken run resumes. `--hold` names a command
that prevents other work on the machine while steps are timed. The command starts before the steps. Once the machine is
quiet, the command must copy a line from its input to its output. It must end when its input ends. (`cat` satisfies both
and prevents nothing.)
"""

import itertools as it
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.lib.harness import Experiment, grid, own_parser, page
from experiments.lib.quiet_machine import held
from experiments.lib.saved_results import BUILD, Results


if TYPE_CHECKING:
    from autoshard.planning import Plan
    from autoshard.program import Program

BILLS = BUILD / "cpu_order" / "bills.json"
"""Bills of the steps of every plan with a prediction, for `cpu_refine.py`."""

TOPOLOGY = "cpu:8"
MESHES = {"4x2": {"data": 4, "model": 2}, "8": {"data": 8}}
ROWS = [
    *(f"{name} | 4x2" for name in (
        "decoder, train", "decoder, wide, train", "decoder, infer", "jax decoder, train", "experts, train",
        "T5, train", "ViT, train", "ViT, infer", "ResNet, train", "recurrence, train", "MLP, train", "deep MLP, infer",
    )),
    *(f"{name} | 8" for name in ("decoder, wide, train", "deep MLP, train", "experts, infer")),
]  # fmt: skip
ROUNDS, WARMUP = 60, 2
MARK_TAU, MARK_RATIO = 0.8, 1.05

Times = tuple[float, float, float]
"""Lower quartile, median and upper quartile, in seconds."""


def tied(a: Times, b: Times) -> bool:
    """Return True if the quartile ranges of two measured times overlap."""
    return a[0] <= b[2] and b[0] <= a[2]


def count_pairs(plans: Sequence[tuple[float, Times]]) -> tuple[int, int, int]:
    """Count the concordant, the discordant and the decided pairs of (predicted seconds, measured times)."""
    concordant = discordant = decided = 0
    for (p, a), (q, b) in it.combinations(plans, 2):
        if tied(a, b):
            continue
        decided += 1
        agree = (p - q) * (a[1] - b[1])
        concordant += agree > 0
        discordant += agree < 0
    return concordant, discordant, decided


def kendall(plans: Sequence[tuple[float, Times]]) -> float | None:
    """Return Kendall's tau of predicted and measured order, as the module defines it; None if no pair is decided."""
    concordant, discordant, decided = count_pairs(plans)
    return (concordant - discordant) / decided if decided else None


def judge(key: str, seconds: float, hold: str | None) -> dict[str, Any]:
    """Plan, compile and run one row; save the bills of its plans."""
    from autoshard.exec import ensure_devices

    ensure_devices(8)
    import jax

    from experiments.lib.programs.cpu_programs import PROGRAMS

    jax.config.update("jax_compilation_cache_dir", str(BUILD / "cpu_order"))
    name, mesh = key.split(" | ")
    row, bills = row_of(PROGRAMS[name][1](), MESHES[mesh], seconds=seconds, hold=hold)
    Results(BILLS).keep(key, bills)
    return row


def row_of(
    program: "Program",
    mesh: dict[str, int],
    *,
    wanted: Collection[str] | None = None,
    rounds: int = ROUNDS,
    seconds: float = math.inf,
    hold: str | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return predicted and measured times of our plan and the baselines, and the bills of their steps.

    - `wanted`: names of the plans to run; None for all.
    - `rounds`, `seconds`: most rounds of steps, and most seconds for all of them.
    - `hold`: command that prevents other work on the machine.
    """
    import jax

    from autoshard.exec.run.planned_steps import PlannedStep, first_arguments, quartiles, run_in_turn
    from autoshard.planning import Options, make_plan
    from autoshard.planning.price.analysed_program import plan_bills
    from autoshard.report import candidates

    made = make_plan(program, Options(topology=TOPOLOGY, mesh=mesh))
    arguments = first_arguments(program, 0)
    steps: dict[str, PlannedStep] = {}
    plans: dict[str, dict[str, Any]] = {}
    priced: dict[str, Plan] = {}
    seen: dict[str, str] = {}
    for label, plan, holds in candidates(made.plan, made.baseline_plans, propagated=True):
        if wanted is not None and label not in wanted:
            continue
        print(f"{program.name}: {label}", file=sys.stderr, flush=True)
        try:
            step = PlannedStep(program, plan, arguments)
        except jax.errors.JaxRuntimeError as error:
            plans[label] = {"failed": " ".join(str(error).split())[:200]}
            continue
        text = bare(step.compiled.as_text())
        if text in seen:
            plans[seen[text]]["also"].append(label)
            continue
        seen[text], steps[label] = label, step
        plans[label] = {"predicted_s": plan.prediction.step_time_s if holds else None, "also": []}
        priced |= {label: plan} if holds else {}
    with held(hold):
        times = run_in_turn(steps, rounds=rounds, warmup=WARMUP, seconds=seconds)
    for label, each in times.items():
        plans[label] |= {"measured_s": quartiles(each), "rounds": len(each)}
    cores, date = len(os.sched_getaffinity(0)), time.strftime("%Y-%m-%d")
    bills = zip(priced, plan_bills(program, list(priced.values())), strict=True)
    return (
        {"plans": plans, "cores": cores, "date": date, "jax": jax.__version__},
        {label: bill.to_json() for label, bill in bills},
    )


def bare(text: str) -> str:
    """Return a compiled module without its name and without the sources of its ops."""
    text = re.sub(r", metadata=\{[^}]*\}", "", text.partition("\n")[2])
    return re.sub(r"(?ms)^(FileNames|FunctionNames|FileLocations|StackFrames)$.*?^$", "", text)


def predicted(row: Mapping[str, Any]) -> list[tuple[float, Times]]:
    """Return (predicted, measured) of the plans of a row that have both."""
    plans = (plan for plan in row["plans"].values() if plan.get("predicted_s") and "measured_s" in plan)
    return [(plan["predicted_s"], tuple(plan["measured_s"])) for plan in plans]


def table(known: Mapping[str, Any]) -> str:
    """Return the results as a page of Markdown."""
    pooled, errors, ratios, taus, lines = [0, 0, 0], [], [], [], []
    for key, row in known.items():
        plans = predicted(row)
        measured = {name: plan["measured_s"] for name, plan in row["plans"].items() if "measured_s" in plan}
        best = min(measured, key=lambda name: measured[name][1])
        ratios.append(measured["plan"][1] / measured[best][1])
        counts, tau = count_pairs(plans), kendall(plans)
        pooled = [a + b for a, b in zip(pooled, counts, strict=True)]
        taus += [tau] if tau is not None else []
        mine = [abs(p / times[1] - 1.0) for p, times in plans]
        errors += mine
        cells = [key, len(plans), _ms(measured["plan"][1]), _ms(row["plans"]["plan"]["predicted_s"]), best]
        cells += [_ms(measured[best][1]), f"{ratios[-1]:.3f}", "-" if tau is None else f"{tau:.2f}"]
        lines.append([*cells, f"{counts[2]} of {math.comb(len(plans), 2)}", f"{statistics.median(mine):.0%}"])
    good = sum(tau >= MARK_TAU for tau in taus)
    near = sum(ratio <= MARK_RATIO for ratio in ratios)
    return page(
        "# Predicted and measured order on 8 CPU devices",
        [
            "`python experiments/fidelity/cpu_order.py`; every plan really run, a step of each in turn. "
            + "; ".join(sorted({f"{row['cores']} cores, jax {row['jax']}, {row['date']}" for row in known.values()})),
            "`tau`: Kendall's tau of predicted and measured order over the pairs whose quartile ranges do not overlap",
            "(`pairs`: those of all pairs). `ours / best`: our plan's median over the least median of any plan, "
            "propagated",
            "baselines (`fsdp`) included. `error`: median error of the predicted step times of the row.",
        ],
        grid("program | mesh | plans | ours ms | predicted | best | its ms | ours / best | tau | pairs | error", lines),
        f"{len(known)} rows. Pooled tau {(pooled[0] - pooled[1]) / max(1, pooled[2]):.2f} over {pooled[2]} decided "
        f"pairs; median of the rows {statistics.median(taus or [0.0]):.2f}, {good} of {len(taus)} at least "
        f"{MARK_TAU}. Ours within {MARK_RATIO - 1:.0%} of the best measured in {near} of {len(ratios)} rows, at "
        f"most {max(ratios):.3f} of it. Median error of predicted step times {statistics.median(errors):.0%}.",
        *(block for key, row in known.items() for block in (f"## {key.replace(' | ', ', ')}", _plans(row))),
    )


def _plans(row: Mapping[str, Any]) -> str:
    """Tabulate the plans of one row, fastest first."""
    lines = []
    plans = {name: plan for name, plan in row["plans"].items() if "measured_s" in plan}
    for name, plan in sorted(plans.items(), key=lambda item: item[1]["measured_s"][1]):
        low, middle, high = plan["measured_s"]
        names = " = ".join([name, *plan["also"]])
        lines.append([names, _ms(plan["predicted_s"]), _ms(middle), f"{_ms(low)} to {_ms(high)}"])
    failed = {name: plan["failed"] for name, plan in row["plans"].items() if "failed" in plan}
    lines += [[name, f"failed: {error}", "-", "-"] for name, error in failed.items()]
    return grid("plan | predicted ms | measured ms | quartiles", lines)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def main() -> int:
    parser = own_parser()
    parser.add_argument("--seconds", type=float, default=60.0, help="of timed steps for each row")
    parser.add_argument("--hold", metavar="CMD", help="a command that keeps the machine quiet while steps are timed")
    given = parser.parse_args()
    # Each row has its process, since compiled programs and their state are freed with it.
    return Experiment(
        script=__file__,
        names=ROWS,
        work=lambda key: judge(key, given.seconds, given.hold),
        table=table,
        apart=True,
    ).run(given)


if __name__ == "__main__":
    sys.exit(main())
