"""A few plans that really differ, for a referee with better information than the prices that chose them.

The search visits many choices: one for each weighting, baselines, other meshes. For a portfolio it also searches under
the two price errors that matter most: no overlap with compute, and less memory. The portfolio contains the fastest
choices that differ in how a step spends its time.
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
from autoshard.planning.solve.weight_search import Candidate, SearchResult, make_candidate, within_memory
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.spec_constraints import mesh_text
from autoshard.planning.space.user_constraints import Required
from autoshard.solver import Solution


DIFFERENCE = 0.02
"""Share of the step time, or of the peak, by which two plans must differ to be two candidates."""
SLOWEST = 2.0
"""Longest predicted step of a candidate, as a multiple of the plan's step."""
MEMORY_TARGETS = (0.92, 0.80)
"""Shares of the memory limit within which further plans are searched."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlanCandidate:
    """One plan of a portfolio."""

    name: str
    """Name of the candidate: `plan`, `weighting 2`, `no overlap`, `memory 80 %`, `fsdp*` (a completed baseline) or
    `data=16` (another mesh).
    """
    why: str
    """Search step that found the candidate, in words."""
    plan: Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """A choice that may become a candidate."""

    name: str
    why: str
    """Search step that found it, in words."""
    choices: NDArray[np.int64]
    """Chosen state of each node."""
    outcome: Outcome
    tight_s: float
    """Expected seconds that nearly full memory adds to its step."""
    model: Callable[[], Model]
    """Function that returns the priced mesh. The call takes a while if the prices have to be computed again."""
    solution: Solution
    """Answer of the Problem whose bound is `bound_s`."""
    bound_s: float
    """Lower bound in seconds of a step on its mesh."""
    weightings: int
    """Number of rounds of the search that found it."""

    @property
    def expected_s(self) -> float:
        """The step in seconds, with the expected cost of nearly full memory."""
        return self.outcome.step_time_s + self.tight_s


def contender(model: Model, found: SearchResult, each: Candidate, name: str, why: str) -> Contender:
    """Return a choice on a searched mesh as a contender, with the prices of the mesh.

    - `model`: the priced mesh.
    - `found`: result of the search, which gives bound, solution and rounds.
    - `each`: the choice.
    - `name`, `why`: name of the contender and the words on its source.
    """
    return Contender(
        name, why, each.choices, each.outcome, each.tight_s, lambda: model, found.solution, found.bound_s, found.rounds
    )


def visited_choices(model: Model, found: SearchResult, required: Required) -> list[Contender]:
    """Return the choices that a search visited, as contenders: first those of the weightings, then baselines.

    They are the fitting choices of every weighting, the best one included. Completed baselines must fit and satisfy the
    constraints; their names end in `*`.
    """
    visited = [contender(model, found, each, each.name, _found_words(each)) for each in found.fitting]
    named = [each for each in found.baselines.values() if each.fits and required.holds(each.choices)]
    return visited + [
        contender(model, found, each, f"{each.name}*", "baseline, completed by the solver") for each in named
    ]


def on_other_mesh(other: MeshBest, price: Callable[[Mesh], Model]) -> Contender:
    """Return the best choice on another mesh, which is priced again if it is chosen."""
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


def alternative_choices(model: Model, found: SearchResult, required: Required, limits: Limits) -> list[Contender]:
    """Return the choices found without overlap, and within each of `MEMORY_TARGETS`, as far as there are any.

    A memory target that the plan already satisfies is skipped; the first target that no choice satisfies ends the
    search. Each search may spend an equal share of the time in `limits`.
    """
    contenders = []
    share_of_limits = limits.share(1 / (1 + len(MEMORY_TARGETS)))
    exposed = _without_overlap(model, found, required, share_of_limits)
    if exposed is not None:
        contenders.append(contender(model, found, exposed, exposed.name, "chosen as if nothing hid behind compute"))
    starts = [*found.fitting, *found.baselines.values()]
    for target in (int(part * limits.memory_bytes) for part in MEMORY_TARGETS):
        if found.best.outcome.peak_bytes > target:
            within = within_memory(
                model, found.weights, required, dataclasses.replace(share_of_limits, memory_bytes=target), starts
            )
            if within is None:
                break
            contenders.append(contender(model, found, within, within.name, f"chosen within {format_bytes(target)}"))
    return contenders


def pick(
    first: Contender, plan: Plan, others: Iterable[Contender], most: int, write: Callable[[Contender], Plan]
) -> tuple[PlanCandidate, ...]:
    """Return the first contender, already written as `plan`, then the fastest others that differ from it and from each
    other.

    - `others`: contenders in any order; those slower than `SLOWEST` times the first are left out.
    - `most`: largest number of candidates, the first included.
    - `write`: writes a contender as a plan; plans that a compiler could not tell apart count once.
    """
    contenders, chosen = [first], [PlanCandidate(first.name, first.why, plan)]
    for each in sorted(others, key=lambda c: (c.expected_s, c.outcome.peak_bytes)):
        if len(chosen) >= most or each.expected_s > SLOWEST * first.expected_s:
            break
        if all(differ(each.outcome, other.outcome) for other in contenders):
            written = write(each)
            if all(_applied(written) != _applied(other.plan) for other in chosen):
                contenders.append(each)
                chosen.append(PlanCandidate(each.name, each.why, written))
    return tuple(chosen)


def differ(first: Outcome, second: Outcome) -> bool:
    """Return True if two choices differ by more than `DIFFERENCE`, in spending of time or in peak memory.

    Differences in seconds of compute and of each kind of collective are summed, as a share of the slower step. Peaks
    are compared as a share of the larger one. Names of axes do not count.
    """
    mine, theirs = _spending(first), _spending(second)
    moved = sum(abs(mine[what] - theirs[what]) for what in {*mine, *theirs})
    peaks = first.peak_bytes, second.peak_bytes
    slower = max(first.step_time_s, second.step_time_s)
    return moved > DIFFERENCE * slower or max(peaks) - min(peaks) > DIFFERENCE * max(peaks)


def _spending(outcome: Outcome) -> dict[str, float]:
    """Return the seconds of compute and of each kind of collective; every other key reads as 0."""
    seconds: dict[str, float] = defaultdict(float, compute=outcome.compute_s)
    for collective in outcome.collectives:
        seconds[collective.kind] += collective.seconds
    return seconds


def _applied(plan: Plan) -> tuple[object, ...]:
    """Return the parts of a plan that a compiler receives: mesh, device order, specs, and ops and calls that run on
    shards.

    Two plans with equal parts run the same step.
    """
    return plan.mesh, plan.device_order, plan.arguments, plan.results, plan.pins, plan.regions, plan.calls


def _found_words(candidate: Candidate) -> str:
    """Return words on the source of a visited choice.

    They are the weights of its slowest block, such as `weights compute 62 %, ici 38 %`, or "the solver's optimum" for a
    single weight. A choice without weights was searched within less memory.
    """
    weights, outcome = candidate.weights, candidate.outcome
    if weights is None:
        return "chosen to leave memory free"
    busiest = max(outcome.channels, key=lambda c: outcome.channels[c] if c in weights else -1.0, default=(0, ""))[0]
    parts = [f"{what} {weight:.0%}" for (block, what), weight in weights.items() if block == busiest]
    return f"weights {', '.join(parts)}" if len(parts) > 1 else "the solver's optimum"


def _without_overlap(model: Model, found: SearchResult, required: Required, limits: Limits) -> Candidate | None:
    """Return the choice that is best if no communication overlaps with compute, priced with overlap. None if it does
    not fit or breaks a constraint.
    """
    weights: Weights = dict.fromkeys(found.weights, 1.0)
    terms = Terms(limits.memory_bytes, limits.seconds, limits.seed, found.best.choices, required.allowed)
    solved = solve_within(model, weights, terms)
    candidate = make_candidate(model, "no overlap", solved, limits.memory_bytes)
    return candidate if candidate and candidate.fits and required.holds(candidate.choices) else None
