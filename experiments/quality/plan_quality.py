"""Our plan against every baseline, judged by the TPU compiler: does it fit, what is sent, how long is a step?

    python experiments/quality/plan_quality.py [--only TEXT ...] [--plans N] [--completed] [--table]

Every program is planned on every topology. Our plan and the baselines are compiled with no TPU, and the scheduled
programs are timed. Baselines are completed by XLA's own propagation (`fsdp`) and by our solver (`fsdp*`). Two plans
whose estimates differ by less than the estimator's error for pairs are undecided.

Results are saved by program and topology in `experiments/results/plan_quality.json`, and compiled programs under
`build/plan_quality`, so that a broken run resumes. `--plans` compiles only the N baselines of least predicted step time
of each row. `--completed` leaves out their propagated forms.
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from autoshard.planning import Plan
    from autoshard.program import Program

from experiments.lib.harness import Experiment, Rows, grid, own_parser, page
from experiments.lib.programs.compile_programs import hf, jax_mlp, jax_recurrent, llama, mixtral
from experiments.lib.saved_results import compiled, is_compiled


FOLDER = "plan_quality"
"""Folder of compiled programs, under `build`."""

TOPOLOGIES: dict[str, dict[str, int]] = {
    "v5e:4x4": {"data": 4, "model": 4},
    "v5p:4x4x4": {"data": 16, "model": 4},
    "v6e:4x4*2": {"slice": 2, "data": 4, "model": 4},
}
"""Topologies, each with the mesh that all plans of a row share."""

SMALL = llama(8, 2048, 5632, 16, 8, 32000)
WIDE = llama(8, 4096, 11008, 32, 8, 32000)
EXPERTS = mixtral(4, 2048, 7168, 16, 8, 8, 32000)

PROGRAMS: dict[str, Callable[[int], "Callable[[], Program]"]] = {
    "decoder 2048": lambda n: hf(SMALL, train=True, remat="full", batch=4 * n, seq=1024),
    "decoder 2048, long": lambda n: hf(SMALL, train=True, remat="full", batch=n // 2, seq=8192),
    "decoder 4096": lambda n: hf(WIDE, train=True, remat="full", batch=n, seq=2048),
    "decoder 4096, long": lambda n: hf(WIDE, train=True, remat="full", batch=n // 4, seq=8192),
    "experts": lambda n: hf(EXPERTS, train=True, remat="full", batch=2 * n, seq=1024),
    "T5 large": lambda n: hf("t5-large", train=True, remat="full", batch=4 * n, seq=512),
    "ViT-L": lambda n: hf("vit-l16", train=True, batch=8 * n),
    "ResNet-50": lambda n: hf("resnet-50", train=True, batch=16 * n),
    "recurrence": lambda n: jax_recurrent(8, 2048, 4096, 2 * n, 2048),
    "MLP": lambda n: jax_mlp(6, 8192, 512 * n),
    "decoder 4096, inference": lambda n: hf(WIDE, infer=True, batch=n // 4, seq=2048),
    "ViT-L, inference": lambda n: hf("vit-l16", infer=True, batch=4 * n),
}
"""Makers of a program for a number of devices, by name."""


def rows() -> list[str]:
    """List the names of all rows."""
    return [f"{program} | {topology}" for program in PROGRAMS for topology in TOPOLOGIES]


def program_of(name: str) -> "Program":
    """Make the program of a row for the devices of its topology."""
    program, topology = name.split(" | ")
    return PROGRAMS[program](math.prod(TOPOLOGIES[topology].values()))()


def judge(name: str, time_limit: float, most: int | None, completed: bool = False) -> dict[str, Any]:
    """Plan, compile and estimate one row."""
    from autoshard.cost import Topology
    from autoshard.planning import Options, make_plan
    from autoshard.report import candidates

    topology = name.split(" | ")[1]
    program = program_of(name)
    made = make_plan(program, Options(topology=topology, mesh=TOPOLOGIES[topology]))
    limit = Topology.parse(topology).usable_bytes
    chosen = sorted(
        made.baseline_plans,
        key=lambda key: (_over(made.baseline_plans[key], limit), made.baseline_plans[key].prediction.step_time_s),
    )[:most]
    wanted = {"plan", *(f"{key}*" for key in chosen), *(() if completed else chosen)}
    plans: dict[str, Any] = {}
    for key, plan, holds in candidates(made.plan, made.baseline_plans, propagated=True):
        if key in wanted or is_compiled(FOLDER, program, plan):
            print(f"{name}: {key}", file=sys.stderr, flush=True)
            plans[key] = figures_of(program, plan, time_limit, holds)
    return {"limit_bytes": limit, "baselines": len(made.baseline_plans), "plans": plans}


def figures_of(program: "Program", plan: "Plan", time_limit: float, holds: bool = True) -> dict[str, Any]:
    """Return the compiler's figures of a plan, and its predictions if they hold for the compiled program (`holds`)."""
    from autoshard import UserError
    from autoshard.exec import compile_figures
    from autoshard.exec.ahead.compile_plans import report

    prediction = plan.prediction
    known: dict[str, Any] = {
        "predicted_s": prediction.step_time_s if holds else None,
        "predicted_bytes": prediction.peak_bytes if holds else None,
    }
    try:
        figures = compile_figures(report(program, plan, compiled(FOLDER, program, plan, time_limit)))
    except UserError as error:
        return known | {"failed": str(error)}
    return known | {
        "verdict": figures["verdict"],
        "peak_bytes": figures["peak_bytes"]["compiled"],
        "wire_bytes": sum(wire["compiled"] for wire in figures["wire_bytes"].values()),
        "estimated_s": figures["step_time_s"]["estimated"],
        "error": figures["step_time_s"]["error"],
        "time": {key: value for key, value in (figures["time"] or {}).items() if key != "spans"},
        "unforeseen": sum(u["share"] for u in figures["unforeseen"]) if holds else None,
        "compile_s": figures["compile_s"],
    }


def _over(plan: "Plan", limit: int) -> bool:
    return plan.prediction.peak_bytes > limit


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Our plan of one row compared with the best baseline, by the compiler."""

    word: str
    ratio: float | None = None
    """The best baseline's time over ours."""
    error: float = 0.0
    best: str | None = None

    @classmethod
    def of(cls, plans: dict[str, Any]) -> "Judgement":
        from autoshard.exec import decided, pair_error

        ours = plans["plan"]
        fitting = {key: plan for key, plan in plans.items() if key != "plan" and fits(plan)}
        best = min(fitting, key=lambda key: fitting[key]["estimated_s"], default=None)
        if best is None:
            return cls("only ours fits" if fits(ours) else "nothing fits")
        if not fits(ours):
            return cls("worse: only a baseline fits", best=best)
        mine, theirs = ours["estimated_s"], fitting[best]["estimated_s"]
        error = pair_error(ours["time"]["by_kind"], fitting[best]["time"]["by_kind"], max(mine, theirs))
        word = ("better" if mine < theirs else "worse") if decided(mine, theirs, error) else "undecided"
        return cls(word, theirs / mine, error, best)

    @property
    def cells(self) -> tuple[str, str, str]:
        return f"{self.ratio:.3f}" if self.ratio else "-", f"{self.error:.1%}", self.word


def table(known: Rows) -> str:
    """Return the results as a page of Markdown."""
    from autoshard.exec.hlo.schedule_estimate import estimator_error

    judged: list[Judgement] = []
    lines = []
    for name, row in known.items():
        others = {key: plan for key, plan in row["plans"].items() if key != "plan"}
        if not others:
            continue  # nothing to compare yet
        ours = row["plans"]["plan"]
        against = Judgement.of(row["plans"])
        judged.append(against)
        cells = [name, ms(ours.get("estimated_s")), ms(ours["predicted_s"])]
        cells += [f"{(ours.get('peak_bytes') or 0) / 2**30:.2f}", ours.get("verdict", "failed"), against.best or "-"]
        cells += [ms(others[against.best]["estimated_s"] if against.best else None), *against.cells]
        cells += [f"{sum(map(fits, others.values()))} of {len(others)}", f"{len(others)} of {2 * row['baselines']}"]
        lines.append([*cells, row.get("code", "-")])
    failed = [
        f"- {name}: {key}: {plan['failed']}"
        for name, row in known.items()
        for key, plan in row["plans"].items()
        if "failed" in plan
    ]
    return page(
        "# Our plan against every baseline, judged by the TPU compiler",
        f"""
Two estimates are undecided if they differ by less than {estimator_error().pairs:.1%} of the longer (nine of
ten ratios of two measured plans of one model are less wrong, `pair_estimates.md`), and on top of it by less
than how much they differ in what took next to no time in published runs.
""",
        """
`python experiments/quality/plan_quality.py`; libtpu, no TPU. Times are estimates from the compiler's schedules.
`fsdp` is completed by XLA's propagation, `fsdp*` by our solver. `ratio`: the best baseline's time over ours.
`fit`: compiled baselines that fit; `compiled`: how many were compiled of how many there are, those of the
least predicted time first; `code`: the commit that planned the row.
""",
        grid(
            "program | topology | ours ms | predicted ms | peak GiB | verdict | best baseline | its ms | ratio | error "
            "| judged | fit | compiled | code",
            lines,
        ),
        summary(judged),
        failed,
    )


def summary(judged: "list[Judgement]") -> str:
    ratios = [judgement.ratio for judgement in judged if judgement.ratio]
    if not ratios:
        return ""
    words = {
        word: sum(judgement.word == word for judgement in judged) for word in dict.fromkeys(f.word for f in judged)
    }
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    counts = ", ".join(f"{word} {count}" for word, count in sorted(words.items()))
    return (
        f"{len(judged)} rows: {counts}. Geometric mean of the ratio: {mean:.3f}, from {min(ratios):.3f} to "
        f"{max(ratios):.3f}. Error aside, ours takes less time in {sum(r > 1 for r in ratios)} of {len(ratios)}."
    )


def fits(plan: dict[str, Any]) -> bool:
    return plan.get("verdict", "").startswith("fits") and plan.get("estimated_s") is not None


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def main() -> int:
    parser = own_parser(time_limit=900.0)
    parser.add_argument("--plans", type=int, help="baselines to compile of each row (default: all)")
    parser.add_argument("--completed", action="store_true", help="compile baselines as our solver completes them only")
    given = parser.parse_args()
    return Experiment(
        script=__file__,
        names=rows(),
        work=lambda name: judge(name, given.time_limit, given.plans, given.completed),
        table=table,
        apart=True,
    ).run(given)


if __name__ == "__main__":
    sys.exit(main())
