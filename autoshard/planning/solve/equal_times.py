"""Choice among equal times: the one in which each device holds least."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.planning.solve.problem_builder import Allowed
from autoshard.planning.space.decision_model import Channel, Model, Reshard
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.program import Role


FED = 5e-4
"""Share of a step, and of its memory, that a batch argument's split by rows may cost.

The transfers that it saves have no price: hosts load a small batch while the step before runs.
"""
ROUNDS = 8
"""Most passes over all nodes; a change spreads from one node to the next in each."""
SLACK_S = 1e-13
"""Seconds of a channel that count as rounding."""


def with_least_memory(
    model: Model, choices: NDArray[np.int64], allowed: Allowed | None = None, fed_s: float = 0.0
) -> NDArray[np.int64]:
    """Return choices that take at most as long in every channel, and hold at most as much at every moment.

    Tensors whose slices are free are stored as they are used, for instance: a weight that each matmul takes in parts
    need not be whole. One node changes at a time, together with the copies that follow it, until nothing is gained.

    - `choices`: alternative of every node; left as it is.
    - `allowed`: masks of the alternatives that may be chosen, by node.
    - `fed_s`: seconds that a batch argument may cost in a channel to be split by its rows alone. Each host then loads
      the rows of its own devices.
    """
    search = _Leaner(model, choices.copy(), allowed or {}, fed_s)
    for _ in range(ROUNDS):
        if not any([search.improve(node) for node in search.holders]):
            break
    return search.choices


class _Leaner:
    """Choices under improvement, with the reshards of each node."""

    def __init__(self, model: Model, choices: NDArray[np.int64], allowed: Allowed, fed_s: float) -> None:
        """Index the reshards; `holders` are the nodes with memory, those with most first."""
        self.model, self.choices, self.allowed, self.fed_s = model, choices, allowed, fed_s
        self.reshards: dict[int, list[Reshard]] = defaultdict(list)
        for reshard in model.reshards:
            self.reshards[reshard.source].append(reshard)
            self.reshards[reshard.target].append(reshard)
        self.usages = {
            number: np.stack([t.usage for t in node.memory]) for number, node in enumerate(model.nodes) if node.memory
        }
        batch = {
            model.cluster_node[model.structure.cluster_of[tensor]]: model.structure.dims_of[tensor][0]
            for tensor, argument in zip(model.graph.arguments, model.program.arguments, strict=True)
            if argument.role == Role.BATCH and model.structure.cluster_of[tensor] >= 0
        }
        self.by_rows = {
            number: ((states == WHOLE) | (states == rows)).all(axis=1)
            for number, rows in batch.items()
            if rows >= 0
            for states in [model.nodes[number].states]
        }
        """Masks of the alternatives that split no dim of a batch argument but the first, by node."""
        # Devices that share one machine read one copy of a batch, however it is split. Others are sent their parts.
        if model.mesh.topology.traits.shares_machine:
            self.usages = {number: usage for number, usage in self.usages.items() if number not in batch}
        held = {number: int(usage[:, choices[number]].sum()) for number, usage in self.usages.items()}
        self.holders = sorted(self.usages, key=lambda number: (-held[number], number))

    def improve(self, number: int) -> bool:
        """Change a node to the alternative of equal time that holds least; return True if it changed."""
        usage, now = self.usages[number], int(self.choices[number])
        smaller = (usage <= usage[:, [now]]).all(axis=0) & (usage.sum(axis=0) < usage[:, now].sum())
        if number in self.allowed:
            smaller &= self.allowed[number]
        candidates = np.flatnonzero(smaller)
        if not len(candidates):
            return False
        followers = self._followers(number, candidates)
        rows = self.by_rows.get(number, np.zeros(len(usage[0]), dtype=bool))[candidates]
        for moving in ({}, followers) if followers else ({},):
            later = self._later({number: candidates, **moving})
            equal = candidates[(later <= SLACK_S) | ((later <= self.fed_s) & rows)]
            if len(equal):
                best = int(equal[np.argmin(usage[:, equal].sum(axis=0))])
                place = int(np.flatnonzero(candidates == best)[0])
                for other, alternatives in moving.items():
                    self.choices[other] = alternatives[place]
                self.choices[number] = best
                return True
        return False

    def _followers(self, number: int, candidates: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
        """Return the copies of a node's tensors, each with the alternative that has the state of each candidate.

        Copies that have memory of their own, or lack such a state, are left out.
        """
        following = {}
        for reshard in self.reshards[number]:
            node = self.model.nodes[reshard.target]
            if (
                reshard.source != number
                or node.kind != "copy"
                or node.memory
                and node.has_memory[self.choices[reshard.target]]
            ):
                continue
            free = np.flatnonzero(~node.has_memory) if node.memory else np.arange(len(node.states))
            if reshard.target in self.allowed:
                free = free[self.allowed[reshard.target][free]]
            wanted = reshard.path.source[reshard.rows[candidates]]
            offered = reshard.path.target[reshard.columns[free]]
            same = (wanted[:, None, :] == offered[None, :, :]).all(axis=2)
            if len(free) and same.any(axis=1).all():
                following[reshard.target] = free[same.argmax(axis=1)]
        return following

    def _later(self, changes: Mapping[int, NDArray[np.int64]]) -> NDArray[np.float64]:
        """Return the most seconds that each change adds in a channel; infinity for forbidden pairs.

        `changes` has for each node that changes its alternatives, one for each change.
        """
        count = len(next(iter(changes.values())))
        later: dict[Channel, NDArray[np.float64]] = defaultdict(lambda: np.zeros(count))
        fine = np.ones(count, dtype=bool)
        seen: set[int] = set()
        for number, alternatives in changes.items():
            for channel, seconds in self.model.nodes[number].time.items():
                later[channel] += seconds[alternatives] - seconds[self.choices[number]]
            for reshard in self.reshards[number]:
                if id(reshard) in seen:
                    continue
                seen.add(id(reshard))
                rows, columns = self._ends(reshard, changes, count)
                row, column = reshard.rows[self.choices[reshard.source]], reshard.columns[self.choices[reshard.target]]
                if reshard.forbidden is not None:
                    fine &= ~reshard.forbidden[rows, columns]
                for channel, table in reshard.costs.items():
                    later[channel] += reshard.trips * (table[rows, columns] - table[row, column])
        most = np.max([*later.values(), np.zeros(count)], axis=0)
        return np.where(fine, most, np.inf)

    def _ends(
        self, reshard: Reshard, changes: Mapping[int, Sequence[int] | NDArray[np.int64]], count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows and columns of a reshard's tables for each of `count` changes."""
        sources = changes.get(reshard.source, np.full(count, self.choices[reshard.source]))
        targets = changes.get(reshard.target, np.full(count, self.choices[reshard.target]))
        return reshard.rows[sources], reshard.columns[targets]
