"""Repeated blocks: nodes that are alike, and have alike neighbours, share one decision.

Layers written one after the other are recognised by their contents, not by names. Nodes start in classes of equal
alternatives and prices. Colour refinement (Weisfeiler and Leman, 1968) separates classes by their neighbours' classes.
It runs only a few steps, so only nodes near an end of the pattern stay single.

The solution with shared decisions is a valid choice for the whole model, and the start of its solve. If nodes are
shared that should not be, only time is lost.
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
"""Number of refinement steps: the radius of the neighbourhood that counts."""
WORTHWHILE = 0.7
"""Largest share of nodes left after sharing for which sharing is used."""


@dataclasses.dataclass(frozen=True, slots=True)
class Repeats:
    """Decisions of a model in which repeated nodes share one; `build_problem` accepts it in place of a model."""

    nodes: tuple[Node, ...]
    """One node for each class of the model's nodes, with the summed times and the memory of all of them."""
    reshards: tuple[Reshard, ...]
    """One reshard for each set of alike reshards between the same classes, with the summed trips."""
    fixed_bytes: int
    """Bytes of one device that no choice changes, as in the model."""
    of: NDArray[np.int64]
    """Class of each node of the model, [model nodes]."""
    first: NDArray[np.int64]
    """First node of the model in each class, [classes]."""
    reshard_of: NDArray[np.int64]
    """Member of `reshards` for each reshard of the model, [model reshards]; -1 within a class."""
    closed: Allowed
    """Mask of the alternatives that a class may share: a reshard within the class may forbid some."""

    def whole(self, choices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert shared choices [classes] to choices of the model [model nodes]."""
        return choices[self.of]

    def part(self, choices: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        """Convert choices of the model to shared choices: each class has that of its first node; None for None."""
        return None if choices is None else choices[self.first]

    def allowed(self, allowed: Allowed | None) -> Allowed | None:
        """Convert masks of allowed alternatives from nodes to classes, intersected with `closed`; None, for no masks,
        gives `closed`.

        The result is None if decisions cannot be shared: nodes of a class have different masks, or a class has no
        alternative left. Such a None does not stand for no masks. A node without a mask differs from one with a
        mask.
        """
        masks: dict[int, NDArray[np.bool_]] = dict(self.closed)
        marks = {n: mask.tobytes() for n, mask in (allowed or {}).items()}
        node_marks = [marks.get(n, b"") for n in range(len(self.of))]
        if any(node_marks[n] != node_marks[self.first[c]] for n, c in enumerate(self.of.tolist())):
            return None
        for node, mask in (allowed or {}).items():
            cls = int(self.of[node])
            masks[cls] = masks[cls] & mask if cls in masks else mask
        return masks if all(mask.any() for mask in masks.values()) else None

    def lift(self, model: Model, weights: Weights, messages: Messages | None) -> Messages | None:
        """Convert messages of the shared network to the whole one: reshards in one set have equal parts of a message.

        - `model`: the whole model, from which these repeats were found.
        - `weights`: weights of both networks.
        - `messages`: messages of the shared network; None gives None.

        Messages of reshards within a class are zeros.
        """
        if messages is None:
            return None
        counts = np.bincount(self.reshard_of[self.reshard_of >= 0], minlength=len(self.reshards))
        place = {reshard: number for number, reshard in enumerate(linked_reshards(self, weights))}
        directed = _directed(messages.ends)
        values = {key: value for key, value in zip(directed, messages.values, strict=True)}
        kept = [messages.alternatives[c] for c in self.of.tolist()]
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
        return dataclasses.replace(messages, alternatives=tuple(kept), ends=ends, values=tuple(lifted))


def _directed(ends: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (node, link) of every directed edge, in the order of the messages; links from a node to itself have none.

    `ends` has the two nodes of each link. The order is by node, then by the other end and the link's number.
    """
    around: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, (first, second) in enumerate(ends):
        if first != second:
            around[first].append((second, number))
            around[second].append((first, number))
    return [(node, number) for node in sorted(around) for _, number in sorted(around[node])]


def find_repeats(model: Model, radius: int = RADIUS) -> Repeats | None:
    """Return the model with shared decisions; None if more than the share `WORTHWHILE` of its nodes would be left.

    `radius` is the number of refinement steps.
    """
    alike = _Numbers()
    reshards = [alike(_of_reshard(reshard)) for reshard in model.reshards]
    colours = [alike(_of_node(node)) for node in model.nodes]
    for _ in range(radius):
        colours = _refine_colours(model.reshards, reshards, colours, alike)
    colours = _twins_apart(colours, alike)
    seen: dict[int, int] = {}
    of = np.array([seen.setdefault(colour, len(seen)) for colour in colours], dtype=np.int64)
    if len(seen) > WORTHWHILE * len(model.nodes):
        return None
    return _shared(model, reshards, of)


class _Numbers(dict[Hashable, int]):
    """Numbering of objects in the order of first occurrence; equal objects have one number."""

    def __call__(self, thing: Hashable) -> int:
        """Return the number of an object; a new object has the next free number."""
        return self.setdefault(thing, len(self))


def _of_node(node: Node) -> Hashable:
    """Return a key of a node's alternatives and prices, without its block's number and the lifetimes of its memory.

    Only being in a loop or not counts of the block.
    """
    time = sorted((what, block >= 0, seconds.tobytes()) for (block, what), seconds in node.time.items())
    memory = tuple((term.kind, term.usage.tobytes()) for term in node.memory)
    return node.kind, node.states.shape, node.states.tobytes(), node.has_memory.tobytes(), tuple(time), memory


def _of_reshard(reshard: Reshard) -> Hashable:
    """Return a key of a reshard; equal paths share their tables, so a table's `id` identifies it."""
    costs = sorted((what, block >= 0, id(table)) for (block, what), table in reshard.costs.items())
    forbidden = None if reshard.forbidden is None else reshard.forbidden.tobytes()
    return reshard.rows.tobytes(), reshard.columns.tobytes(), tuple(costs), reshard.trips, reshard.overlap, forbidden


def _refine_colours(
    reshards: Sequence[Reshard], kinds: Sequence[int], colours: Sequence[int], alike: _Numbers
) -> list[int]:
    """Return the colours of nodes refined once, by the kinds and directions of their reshards and neighbours' colours.

    - `reshards`: reshards of the model.
    - `kinds`: number of each reshard; alike reshards have one number.
    - `colours`: colour of each node.
    - `alike`: numbering that gives the new colours.
    """
    around: list[list[tuple[int, bool, int]]] = [[] for _ in colours]
    for reshard, kind in zip(reshards, kinds, strict=True):
        around[reshard.source].append((kind, True, colours[reshard.target]))
        around[reshard.target].append((kind, False, colours[reshard.source]))
    return [alike((colour, *sorted(near))) for colour, near in zip(colours, around, strict=True)]


def _twins_apart(colours: Sequence[int], alike: _Numbers) -> list[int]:
    """Separate nodes of one layer that refinement cannot, such as queries and keys, which need not choose the same.

    Most classes have one node in each layer. A class with more nodes than layers has as many in each layer as their
    rounded ratio, and they alternate in the order of nodes. The number of layers is the most frequent size of
    classes with several nodes, the least on a tie. If no class has several nodes, the colours are unchanged.
    """
    counts = Counter(colours)
    usual = Counter(count for count in counts.values() if count > 1).most_common(1)
    if not usual:
        return list(colours)
    layers = min(count for count, times in Counter(counts.values()).items() if count > 1 and times == usual[0][1])
    turns: dict[int, int] = defaultdict(int)
    separated = []
    for colour in colours:
        twins = max(1, round(counts[colour] / layers))
        separated.append(alike((colour, turns[colour] % twins)))
        turns[colour] += 1
    return separated


def _shared(model: Model, kinds: Sequence[int], of: NDArray[np.int64]) -> Repeats:
    """Build the shared decisions.

    - `kinds`: number of each reshard of the model; alike reshards have one number.
    - `of`: class of each node of the model; classes are numbered from 0 without holes.
    """
    count = int(of.max(initial=-1)) + 1
    members: list[list[int]] = [[] for _ in range(count)]
    for node, cls in enumerate(of.tolist()):
        members[cls].append(node)
    first = np.array([group[0] for group in members], dtype=np.int64)
    within: dict[int, list[Reshard]] = defaultdict(list)
    alike_reshards: dict[tuple[int, int, int, int], list[Reshard]] = {}
    set_number: dict[tuple[int, int, int, int], int] = {}
    reshard_of = np.full(len(model.reshards), -1, dtype=np.int64)
    for place, (reshard, kind) in enumerate(zip(model.reshards, kinds, strict=True)):
        source, target = int(of[reshard.source]), int(of[reshard.target])
        if source == target:
            within[source].append(reshard)
            continue
        key = (source, target, kind, reshard.block)
        reshard_of[place] = set_number.setdefault(key, len(set_number))
        alike_reshards.setdefault(key, []).append(reshard)
    reshards = tuple(
        dataclasses.replace(group[0], source=source, target=target, trips=sum(m.trips for m in group))
        for (source, target, _, _), group in alike_reshards.items()
    )
    nodes = tuple(
        model.nodes[group[0]]
        if len(group) == 1 and cls not in within
        else _merged([model.nodes[n] for n in group], within[cls])
        for cls, group in enumerate(members)
    )
    closed = {cls: mask for cls, group in within.items() if not (mask := _open(group, len(nodes[cls].states))).all()}
    return Repeats(nodes, reshards, model.fixed_bytes, of, first, reshard_of, closed)


def _merged(nodes: Sequence[Node], within: Iterable[Reshard]) -> Node:
    """Merge alike nodes that make the same choice, with the reshards within the class, into one node.

    Times are summed by channel, and memory terms joined; all else is the first node's.
    """
    time: dict[tuple[int, str], Seconds] = {}
    for each in (*(node.time for node in nodes), *map(_diagonal, within)):
        for channel, seconds in each.items():
            time[channel] = time[channel] + seconds if channel in time else seconds
    memory = tuple(term for node in nodes for term in node.memory)
    return dataclasses.replace(nodes[0], time=time, memory=memory)


def _diagonal(reshard: Reshard) -> Mapping[tuple[int, str], Seconds]:
    """Return the seconds in one step of a reshard between two nodes that make the same choice, by channel, [states]."""
    return {channel: reshard.trips * table[reshard.rows, reshard.columns] for channel, table in reshard.costs.items()}


def _open(within: Iterable[Reshard], count: int) -> NDArray[np.bool_]:
    """Return a mask of the alternatives that every reshard within the class allows at both ends."""
    mask = np.ones(count, dtype=bool)
    for reshard in within:
        if reshard.forbidden is not None:
            mask &= ~reshard.forbidden[reshard.rows, reshard.columns]
    return mask
