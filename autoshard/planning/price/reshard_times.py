"""What one execution of a reshard takes under a choice: its collectives, and what it lays out anew."""

import dataclasses
import weakref

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives
from autoshard.planning.price.reshard_paths import Relayouts, path_steps, relayouts
from autoshard.planning.price.softmax_credit import unpaid_bytes
from autoshard.planning.space.decision_model import Model, Path, Reshard
from autoshard.planning.space.overlap import AT_NARROW, Overlap


ReshardStep = tuple[str, tuple[str, ...], float, float]
"""(kind, axes, bytes, seconds) of one collective."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReshardTime:
    """What one execution of a reshard takes under a choice."""

    steps: tuple[ReshardStep, ...]
    """(kind, axes, bytes, seconds) of its collectives."""
    relayouts: Relayouts
    """The relayouts that it makes beside its collectives."""
    relays: bool
    """Whether there are any."""


def reshard_overlap(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> Overlap:
    """What a move may hide behind, by what its matmul computes in the chosen state."""
    overlap = Overlap(reshard.overlap)
    if reshard.narrow is None:
        return overlap
    at_source = model.nodes[reshard.source].kind == "op"
    return AT_NARROW[overlap] if reshard.narrow[choices[reshard.source if at_source else reshard.target]] else overlap


def reshard_steps(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> tuple[ReshardStep, ...]:
    """(kind, axes, bytes, seconds) of one execution of a reshard under a choice."""
    return reshard_time(model, reshard, choices).steps


def relayout_seconds(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> float:
    """Seconds in one step for laying out what a reshard brings, and of what a softmax took off a matmul too much."""
    return laid_out_seconds(model, reshard, choices, reshard_time(model, reshard, choices))


def laid_out_seconds(model: Model, reshard: Reshard, choices: NDArray[np.int64], taken: ReshardTime) -> float:
    """The same of a reshard whose time is known."""
    found, owed = 0.0, unpaid_bytes(model, reshard, choices)
    if taken.relays:
        found = float(taken.relayouts.seconds(model.compute))
    return (found + float(model.compute.memory_seconds(owed)) if owed else found) * reshard.trips


def reshard_relayouts(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> Relayouts:
    """What laying out anew takes in one execution of a reshard."""
    return reshard_time(model, reshard, choices).relayouts


@dataclasses.dataclass(slots=True)
class _Known:
    """What is known of one path."""

    path: Path
    """Kept, so that no other one gets its `id`."""
    times: dict[tuple[int, int], ReshardTime] = dataclasses.field(default_factory=dict)
    """A row and a column of the path -> what that move takes."""


_known: "weakref.WeakKeyDictionary[Collectives, dict[int, _Known]]" = weakref.WeakKeyDictionary()
"""Repeated layers take the same steps, on paths that they share; of every priced mesh, by the `id` of the path."""


def reshard_time(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> ReshardTime:
    """Of the path with one state at each end. Raises ValueError for a forbidden pair."""
    row = int(reshard.rows[choices[reshard.source]])
    column = int(reshard.columns[choices[reshard.target]])
    if reshard.forbidden is not None and reshard.forbidden[row, column]:
        raise ValueError(f"nodes {reshard.source} and {reshard.target} take a pair of alternatives that is not allowed")
    path = reshard.path
    paths = _known.get(model.collectives)
    if paths is None:
        paths = _known.setdefault(model.collectives, {})
    known = paths.get(id(path))
    if known is None:
        known = paths[id(path)] = _Known(path)
    found = known.times.get((row, column))
    if found is None:
        ends = (path.held[row], path.kept[row], path.source[row], path.target[column])
        held, kept, source, target = (end[None, :] for end in ends)
        one = dataclasses.replace(path, held=held, kept=kept, source=source, target=target)
        found = known.times[row, column] = _reshard_time_of(one, model.collectives)
    return found


def _reshard_time_of(path: Path, collectives: Collectives) -> ReshardTime:
    found: list[ReshardStep] = []
    gathers, steps = path_steps(path, collectives)
    for step in (*gathers, *steps):
        size = float(step.size[0, 0])
        if size > 0:
            axes = tuple(collectives.mesh.names[a] for a in step.axes)
            found.append((step.kind, axes, size, float(collectives.time(step.kind, axes, size))))
    again = relayouts(path, collectives).at(0, 0)
    return ReshardTime(tuple(found), again, again.any())
