"""Exact minimum without memory limits: eliminate nodes one by one, with a table over each node's neighbours.

The method is bucket elimination (Bertelè and Brioschi, Nonserial Dynamic Programming, 1972; Dechter, AIJ 113, 1999).
Order and shapes are planned once. Many node costs (multipliers on memory) can then be solved on one plan.
"""

import dataclasses
import heapq
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.solver.clocks import Due, never
from autoshard.solver.problem import FORBIDDEN
from autoshard.solver.residual_graph import Graph, Ints


@dataclasses.dataclass(slots=True)
class _Eliminated:
    """One step of the plan: a node, and the neighbours left at its elimination (`scope`).

    Neighbours include those that earlier eliminations joined to it.
    """

    node: int
    scope: tuple[int, ...]
    """Nodes over which the step's message is a table, ascending; empty for the last node of a component."""
    shape: tuple[int, ...]
    """Number of alternatives of each node of `scope`."""
    edges: list[Ints]
    """Edge tables, shaped to broadcast against [node, *scope]."""
    messages: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    """Incoming messages: (number of the step that computes it, order to transpose its axes, shape to broadcast)."""


class Elimination:
    """A plan to minimise over the nodes of a graph; memory terms are ignored."""

    def __init__(self, steps: list[_Eliminated], work: int):
        self._steps = steps
        self.work = work
        """Table entries touched by one `solve`."""

    @staticmethod
    def plan(graph: Graph, largest: int = 20_000_000, work: int = 400_000_000) -> "Elimination | None":
        """Plan a greedy elimination order: next is the node whose table over itself and its neighbours is smallest.

        Returns None when one table exceeds `largest` entries, or all together exceed `work`.
        """
        sizes = {node: len(cost) for node, cost in graph.costs.items()}
        near = {node: set(others) for node, others in graph.edges.items()}

        def weight(node: int) -> int:
            """Return the entries of the table over a node and its present neighbours."""
            return math.prod(sizes[other] for other in near[node]) * sizes[node]

        heap = [(weight(node), node) for node in near]
        current = {node: value for value, node in heap}
        heapq.heapify(heap)
        steps: list[_Eliminated] = []
        made: dict[int, list[int]] = {node: [] for node in near}
        position: dict[int, int] = {}
        total = 0
        while heap:
            value, node = heapq.heappop(heap)
            if current.get(node) != value:
                continue
            del current[node]
            total += value
            if value > largest or total > work:
                return None
            scope = tuple(sorted(near.pop(node)))
            for other in scope:
                near[other].discard(node)
                near[other].update(third for third in scope if third != other)
            axes = (node, *scope)
            edges = []
            for other, table in graph.edges[node].items():
                if other not in position:
                    edges.append(_spread(table, (node, other), axes))
            messages = []
            for step in made.pop(node):
                source = steps[step].scope
                messages.append((step, *_fit(source, axes, sizes)))
            position[node] = len(steps)
            steps.append(_Eliminated(node, scope, tuple(sizes[other] for other in scope), edges, messages))
            if scope:
                # The message goes to the first of its nodes to be eliminated: list it with all of them until then.
                for other in scope:
                    made[other].append(position[node])
                    updated = weight(other)
                    if updated != current[other]:
                        current[other] = updated
                        heapq.heappush(heap, (updated, other))
            for step, *_ in messages:
                for other in steps[step].scope:
                    if other != node:
                        made[other].remove(step)
        return Elimination(steps, total)

    def solve(self, costs: dict[int, Ints], due: Due = never) -> tuple[int, dict[int, int]] | None:
        """Return the least total of `costs` (one non-negative array for each node) plus edges, and choices that reach
        it.

        The graph's own node costs and offset are not added. A total of `FORBIDDEN` or more means that no choices are
        allowed. A node gets the first of equally good alternatives. Returns None when it is `due` before the minimum is
        known.
        """
        total = 0
        made: list[Ints | None] = []
        answers: list[NDArray[Any]] = []
        for step in self._steps:
            if due():
                return None
            unary = costs[step.node]
            inputs = list(step.edges)
            for source, axes, shape in step.messages:
                message = made[source]
                made[source] = None
                assert message is not None
                inputs.append(message.transpose(axes).reshape(shape))
            best, answer = _minimum(unary, inputs, step.shape)
            if not step.scope:
                total += int(best)
            made.append(best)
            answers.append(answer)
        choices: dict[int, int] = {}
        for step, answer in zip(reversed(self._steps), reversed(answers), strict=True):
            choices[step.node] = int(answer[tuple(choices[other] for other in step.scope)])
        return total, choices


def _minimum(unary: Ints, inputs: list[Ints], shape: tuple[int, ...]) -> tuple[Ints, NDArray[Any]]:
    """Return the minimum over a node's alternatives for each entry of its scope, and the first alternative that has it.

    Both have the shape of the scope. Minima are at most `FORBIDDEN`, with alternative 0 where nothing is allowed.

    - `unary`: costs of the alternatives, [alternatives].
    - `inputs`: edge tables and messages, shaped to broadcast against [alternatives, *scope].
    - `shape`: sizes of the scope.
    """
    if math.prod(shape) * len(unary) <= 4096:
        table = np.broadcast_to(unary.reshape((-1,) + (1,) * len(shape)), (len(unary), *shape))
        for values in inputs:
            table = np.minimum(table + values, FORBIDDEN)
        answer = np.argmin(table, axis=0)
        return np.min(table, axis=0), answer
    best = np.full(shape, FORBIDDEN, dtype=np.int64)
    answer: NDArray[Any] = np.zeros(shape, dtype=np.int16 if len(unary) < 2**15 else np.int32)
    for alternative, cost in enumerate(unary.tolist()):
        row = np.full(shape, cost, dtype=np.int64)
        for count, values in enumerate(inputs):
            row += values[alternative if len(values) > 1 else 0]
            if count % 6 == 5:
                np.minimum(row, FORBIDDEN, out=row)
        better = row < best
        np.copyto(best, row, where=better)
        answer[better] = alternative
    return best, answer


def _fit(
    source: tuple[int, ...], axes: tuple[int, ...], sizes: dict[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes order and the broadcast shape of a message over `source` within a table over `axes`.

    `source` and `axes` are nodes, `sizes` their numbers of alternatives. The shape has 1 for axes not in `source`.
    """
    order = tuple(sorted(range(len(source)), key=lambda k: axes.index(source[k])))
    shape = tuple(sizes[axis] if axis in source else 1 for axis in axes)
    return order, shape


def _spread(table: Ints, source: tuple[int, int], axes: tuple[int, ...]) -> Ints:
    """Reshape an edge table over `source` so that it broadcasts against a table over `axes`."""
    return np.ascontiguousarray(table).reshape(
        tuple(table.shape[source.index(axis)] if axis in source else 1 for axis in axes)
    )
