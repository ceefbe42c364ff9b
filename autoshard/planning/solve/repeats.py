"""Blocks that repeat: nodes that are alike, and stand alike among their neighbours, share one decision.

Layers written one after the other are found by what they are, not by names: nodes begin in classes of equal
alternatives and prices, and classes are told apart by their neighbours' (colour refinement, Weisfeiler and Leman,
1968) a few steps deep, so that only nodes near an end of the pattern stand alone. What the shared decisions come to is
one choice among those of the whole, and where solving the whole begins: it loses nothing but time if they do not
belong together.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.planning.solve.problem_builder import Allowed, Weights, linked_reshards
from autoshard.planning.space.decision_model import Model, Node, Reshard
from autoshard.planning.xla.axis_assignments import Seconds
from autoshard.solver import Messages


RADIUS = 3
"""How far a node's surroundings count."""
WORTHWHILE = 0.7
"""Part of all nodes that sharing may leave at most to be used."""


@dataclasses.dataclass(frozen=True, slots=True)
class Repeats:
    """The decisions of a model with those that repeat made once: `build_problem` takes it as it takes the model."""

    nodes: tuple[Node, ...]
    """A class of the model's nodes each, with the times and memory of all of them."""
    reshards: tuple[Reshard, ...]
    """A set of the model's alike reshards between the same classes each, with the trips of all of them."""
    fixed_bytes: int
    of: NDArray[np.int64]
    """[nodes of the model] which of `nodes` it is."""
    first: NDArray[np.int64]
    """[nodes] the first of the model's that it is."""
    reshard_of: NDArray[np.int64]
    """[moves of the model] which of `moves` it is; -1 within a class."""
    closed: Allowed
    """Alternatives that a class cannot share: a move within it forbids them."""

    def whole(self, choices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Choices of the model from shared ones."""
        return choices[self.of]

    def part(self, choices: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        """Shared choices from those of the model: each class as its first node has it."""
        return None if choices is None else choices[self.first]

    def allowed(self, allowed: Allowed | None) -> Allowed | None:
        """What may be chosen for a class; None if its nodes differ in that, or are left without any."""
        found: dict[int, NDArray[np.bool_]] = dict(self.closed)
        marks = {n: mask.tobytes() for n, mask in (allowed or {}).items()}
        own = [marks.get(n, b"") for n in range(len(self.of))]
        if any(own[n] != own[self.first[c]] for n, c in enumerate(self.of.tolist())):
            return None
        for node, mask in (allowed or {}).items():
            cls = int(self.of[node])
            found[cls] = found[cls] & mask if cls in found else mask
        return found if all(mask.any() for mask in found.values()) else None

    def lift(self, model: Model, weights: Weights, messages: Messages | None) -> Messages | None:
        """Messages on the whole network from those on the shared one: each move has its part of them."""
        if messages is None:
            return None
        counts = np.bincount(self.reshard_of[self.reshard_of >= 0], minlength=len(self.reshards))
        place = {reshard: number for number, reshard in enumerate(linked_reshards(self, weights))}
        directed = _directed(messages.ends)
        values = {key: value for key, value in zip(directed, messages.values, strict=True)}
        kept = [messages.kept[c] for c in self.of.tolist()]
        linked = linked_reshards(model, weights)
        ends = tuple((model.reshards[m].source, model.reshards[m].target) for m in linked)
        lifted = []
        for node, number in _directed(ends):
            reshard = int(self.reshard_of[linked[number]])
            other = ends[number][0] if ends[number][1] == node else ends[number][1]
            if reshard < 0:
                lifted.append(np.zeros(len(kept[other])))
            else:
                lifted.append(values[int(self.of[node]), place[reshard]] / counts[reshard])
        return dataclasses.replace(messages, kept=tuple(kept), ends=ends, values=tuple(lifted))


def _directed(ends: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(node, link) of every directed edge in the order in which messages are listed."""
    around: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, (first, second) in enumerate(ends):
        if first != second:
            around[first].append((second, number))
            around[second].append((first, number))
    return [(node, number) for node in sorted(around) for _, number in sorted(around[node])]


def find_repeats(model: Model, radius: int = RADIUS) -> Repeats | None:
    """The model with what repeats shared; None if too little does."""
    alike = _Numbers()
    reshards = [alike(_of_reshard(reshard)) for reshard in model.reshards]
    colours = [alike(_of_node(node)) for node in model.nodes]
    for _ in range(radius):
        colours = _told(model.reshards, reshards, colours, alike)
    colours = _twins_apart(colours, alike)
    seen: dict[int, int] = {}
    of = np.array([seen.setdefault(colour, len(seen)) for colour in colours], dtype=np.int64)
    if len(seen) > WORTHWHILE * len(model.nodes):
        return None
    return _shared(model, reshards, of)


class _Numbers(dict[Hashable, int]):
    """Numbers things in the order in which they are first seen; equal ones have one number."""

    def __call__(self, thing: Hashable) -> int:
        return self.setdefault(thing, len(self))


def _of_node(node: Node) -> Hashable:
    """What a node is by itself; not which block it is in, nor when its memory is held."""
    time = sorted((what, block >= 0, seconds.tobytes()) for (block, what), seconds in node.time.items())
    memory = tuple((term.kind, term.usage.tobytes()) for term in node.memory)
    return node.kind, node.states.shape, node.states.tobytes(), node.held.tobytes(), tuple(time), memory


def _of_reshard(reshard: Reshard) -> Hashable:
    """What a move is by itself; equal paths share their tables, so that one is known by its place."""
    costs = sorted((what, block >= 0, id(table)) for (block, what), table in reshard.costs.items())
    forbidden = None if reshard.forbidden is None else reshard.forbidden.tobytes()
    return reshard.rows.tobytes(), reshard.columns.tobytes(), tuple(costs), reshard.trips, reshard.overlap, forbidden


def _told(reshards: Sequence[Reshard], kinds: Sequence[int], colours: Sequence[int], alike: _Numbers) -> list[int]:
    around: list[list[tuple[int, bool, int]]] = [[] for _ in colours]
    for reshard, kind in zip(reshards, kinds, strict=True):
        around[reshard.source].append((kind, True, colours[reshard.target]))
        around[reshard.target].append((kind, False, colours[reshard.source]))
    return [alike((colour, *sorted(near))) for colour, near in zip(colours, around, strict=True)]


def _twins_apart(colours: Sequence[int], alike: _Numbers) -> list[int]:
    """Tells nodes of one layer apart that nothing else does, as queries and keys, which need not choose the same.

    Most classes have one node in each layer: one with several times as many has several, and they come in turns.
    """
    counts = Counter(colours)
    usual = Counter(count for count in counts.values() if count > 1).most_common(1)
    if not usual:
        return list(colours)
    layers = min(count for count, times in Counter(counts.values()).items() if count > 1 and times == usual[0][1])
    turns: dict[int, int] = defaultdict(int)
    found = []
    for colour in colours:
        twins = max(1, round(counts[colour] / layers))
        found.append(alike((colour, turns[colour] % twins)))
        turns[colour] += 1
    return found


def _shared(model: Model, kinds: Sequence[int], of: NDArray[np.int64]) -> Repeats:
    count = int(of.max(initial=-1)) + 1
    members: list[list[int]] = [[] for _ in range(count)]
    for node, cls in enumerate(of.tolist()):
        members[cls].append(node)
    first = np.array([mine[0] for mine in members], dtype=np.int64)
    within: dict[int, list[Reshard]] = defaultdict(list)
    sets: dict[tuple[int, int, int, int], list[Reshard]] = {}
    number: dict[tuple[int, int, int, int], int] = {}
    reshard_of = np.full(len(model.reshards), -1, dtype=np.int64)
    for place, (reshard, kind) in enumerate(zip(model.reshards, kinds, strict=True)):
        source, target = int(of[reshard.source]), int(of[reshard.target])
        if source == target:
            within[source].append(reshard)
            continue
        key = (source, target, kind, reshard.block)
        reshard_of[place] = number.setdefault(key, len(number))
        sets.setdefault(key, []).append(reshard)
    reshards = tuple(
        dataclasses.replace(mine[0], source=source, target=target, trips=sum(m.trips for m in mine))
        for (source, target, _, _), mine in sets.items()
    )
    nodes = tuple(
        model.nodes[mine[0]]
        if len(mine) == 1 and cls not in within
        else _merged([model.nodes[n] for n in mine], within[cls])
        for cls, mine in enumerate(members)
    )
    closed = {cls: mask for cls, mine in within.items() if not (mask := _open(mine, len(nodes[cls].states))).all()}
    return Repeats(nodes, reshards, model.fixed_bytes, of, first, reshard_of, closed)


def _merged(nodes: Sequence[Node], within: Iterable[Reshard]) -> Node:
    """One node in the place of alike ones that choose the same; so do both ends of a reshard within."""
    time: dict[tuple[int, str], Seconds] = {}
    for each in (*(node.time for node in nodes), *map(_diagonal, within)):
        for channel, seconds in each.items():
            time[channel] = time[channel] + seconds if channel in time else seconds
    memory = tuple(term for node in nodes for term in node.memory)
    return dataclasses.replace(nodes[0], time=time, memory=memory)


def _diagonal(reshard: Reshard) -> Mapping[tuple[int, str], Seconds]:
    """Seconds of a reshard between two nodes with one choice."""
    return {channel: reshard.trips * table[reshard.rows, reshard.columns] for channel, table in reshard.costs.items()}


def _open(within: Iterable[Reshard], count: int) -> NDArray[np.bool_]:
    """Alternatives that no move within forbids both ends to have."""
    mask = np.ones(count, dtype=bool)
    for reshard in within:
        if reshard.forbidden is not None:
            mask &= ~reshard.forbidden[reshard.rows, reshard.columns]
    return mask
