"""A few plans that really differ, for a judge who knows more than the prices that chose them.

The search meets many choices: what each weighting finds, baselines, other meshes. Asked for a portfolio, it also looks
for what it would have found if prices were wrong in the two ways that matter most: if nothing hid behind compute, and
if less memory were there. Of all of them the fastest are taken that differ in what a step spends its time on.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from autoshard.base.units import format_bytes
from autoshard.cost import Mesh
from autoshard.planning.mesh.mesh_attempt import MeshBest
from autoshard.planning.price.evaluate import Outcome
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.solve.mesh_solve import Terms, solve_within
from autoshard.planning.solve.problem_builder import Weights
from autoshard.planning.solve.weight_search import Candidate, Found, make_candidate, within_memory
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.spec_constraints import mesh_text
from autoshard.planning.space.user_constraints import Required
from autoshard.solver import Solution


DIFFERENCE = 0.02
"""Share of the step time, or of the peak, by which two plans must differ to be two."""
SLOWEST = 2.0
"""Predicted step time, in those of the plan, above which no judge is asked."""
MEMORY_TARGETS = (0.92, 0.80)
"""Shares of the memory limit that are tried."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlanCandidate:
    """One plan of a portfolio."""

    name: str
    """`plan`, `weighting 2`, `no overlap`, `memory 80 %`, `fsdp*` (a completed baseline), `data=16` (another mesh)."""
    why: str
    """How it came to be."""
    plan: Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """A choice that may become a candidate."""

    name: str
    why: str
    choices: NDArray[np.int64]
    outcome: Outcome
    tight_s: float
    model: Callable[[], Model]
    """Its mesh priced, which takes a while where it was priced before and not kept."""
    solution: Solution
    """The answer of the Problem whose bound is `bound_s`."""
    bound_s: float
    weightings: int
    """Rounds of the search that found it."""

    @property
    def expected_s(self) -> float:
        """The step, and what nearly full memory is expected to add to it."""
        return self.outcome.step_time_s + self.tight_s


def contender(model: Model, found: Found, each: Candidate, name: str, why: str) -> Contender:
    """A choice on the mesh of a search, found by it or for it."""
    return Contender(
        name, why, each.choices, each.outcome, each.tight_s, lambda: model, found.solution, found.bound_s, found.rounds
    )


def met(model: Model, found: Found, required: Required) -> list[Contender]:
    """What a search met beside its best that fits and keeps what is asked for: of every weighting, and baselines."""
    seen = [contender(model, found, each, each.name, _found_words(each)) for each in found.seen]
    named = [each for each in found.baselines.values() if each.fits and required.holds(each.choices)]
    return seen + [
        contender(model, found, each, f"{each.name}*", "baseline, completed by the solver") for each in named
    ]


def elsewhere(other: MeshBest, price: Callable[[Mesh], Model]) -> Contender:
    """The best on another mesh, which is priced anew if it is taken."""
    return Contender(
        mesh_text(other.mesh),
        "the best found on that mesh",
        other.choices,
        other.outcome,
        other.tight_s,
        lambda: price(other.mesh),
        other.solution,
        other.bound_s,
        other.weightings,
    )


def further(model: Model, found: Found, required: Required, limits: Limits) -> list[Contender]:
    """What is found without overlap, and within less memory; a target that the plan keeps already says nothing new."""
    more = []
    each = limits.share(1 / (1 + len(MEMORY_TARGETS)))
    alone = _without_overlap(model, found, required, each)
    if alone is not None:
        more.append(contender(model, found, alone, alone.name, "chosen as if nothing hid behind compute"))
    known = [*found.seen, *found.baselines.values()]
    for target in (int(part * limits.memory_bytes) for part in MEMORY_TARGETS):
        if found.best.outcome.peak_bytes > target:
            within = within_memory(
                model, found.weights, required, dataclasses.replace(each, memory_bytes=target), known
            )
            if within is None:
                break
            more.append(contender(model, found, within, within.name, f"chosen within {format_bytes(target)}"))
    return more


def pick(
    first: Contender, plan: Plan, others: Iterable[Contender], most: int, write: Callable[[Contender], Plan]
) -> tuple[PlanCandidate, ...]:
    """The first one, written as `plan`, and the fastest others that differ from all before, at most `most` in all."""
    taken, chosen = [first], [PlanCandidate(first.name, first.why, plan)]
    for each in sorted(others, key=lambda c: (c.expected_s, c.outcome.peak_bytes)):
        if len(chosen) >= most or each.expected_s > SLOWEST * first.expected_s:
            break
        if all(differ(each.outcome, other.outcome) for other in taken):
            written = write(each)
            if all(_applied(written) != _applied(other.plan) for other in chosen):
                taken.append(each)
                chosen.append(PlanCandidate(each.name, each.why, written))
    return tuple(chosen)


def differ(first: Outcome, second: Outcome) -> bool:
    """Whether two choices differ in what the step's time goes to, or in memory, whatever the axes are called."""
    mine, theirs = _spending(first), _spending(second)
    moved = sum(abs(mine[what] - theirs[what]) for what in {*mine, *theirs})
    peaks = first.peak_bytes, second.peak_bytes
    slower = max(first.step_time_s, second.step_time_s)
    return moved > DIFFERENCE * slower or max(peaks) - min(peaks) > DIFFERENCE * max(peaks)


def _spending(outcome: Outcome) -> dict[str, float]:
    """Seconds of compute and of every kind of collective."""
    found: dict[str, float] = defaultdict(float, compute=outcome.compute_s)
    for collective in outcome.collectives:
        found[collective.kind] += collective.seconds
    return found


def _applied(plan: Plan) -> tuple[object, ...]:
    """What a compiler is told; two plans with the same are one."""
    return plan.mesh, plan.device_order, plan.arguments, plan.results, plan.pins, plan.regions, plan.calls


def _found_words(candidate: Candidate) -> str:
    """The weights in the block that takes longest: `weights compute 62 %, ici 38 %`."""
    weights, outcome = candidate.weights, candidate.outcome
    if weights is None:
        return "chosen to leave memory free"
    busiest = max(outcome.channels, key=lambda c: outcome.channels[c] if c in weights else -1.0, default=(0, ""))[0]
    parts = [f"{what} {weight:.0%}" for (block, what), weight in weights.items() if block == busiest]
    return f"weights {', '.join(parts)}" if len(parts) > 1 else "the solver's optimum"


def _without_overlap(model: Model, found: Found, required: Required, limits: Limits) -> Candidate | None:
    weights: Weights = dict.fromkeys(found.weights, 1.0)
    terms = Terms(limits.memory_bytes, limits.seconds, limits.seed, found.best.choices, required.allowed)
    solved = solve_within(model, weights, terms)
    candidate = make_candidate(model, "no overlap", solved, limits.memory_bytes)
    return candidate if candidate and candidate.fits and required.holds(candidate.choices) else None
