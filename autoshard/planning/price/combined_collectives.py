"""Collectives that a compiler combines: the small sums of gradients, and the small gathers of weights, of one block."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import OpGraph
from autoshard.planning.price.reshard_paths import PathPrices
from autoshard.planning.space.decision_model import EXPOSED, Channel, Path, Reshard
from autoshard.planning.space.overlap import ALONE, READING, SUMS, Overlap
from autoshard.planning.xla.axis_assignments import PARTIAL, WHOLE, Seconds, local_elements


JOINED = 30 * 2**20 + 7
"""Bytes up to which the GPU compiler combines collectives: the default of its thresholds."""

_Key = tuple[str, int, float]
"""Kind (`sum` or `gather`), block and executions of collectives that may be combined."""


class PartTables:
    """Tables of seconds for parts of reshards, each computed once: repeated layers share their paths and tables."""

    def __init__(self, prices: PathPrices) -> None:
        """Start without tables; `prices` are those of the mesh's paths."""
        self.prices = prices
        self._masked: dict[tuple[object, ...], tuple[Seconds, Seconds]] = {}
        self._priced: dict[tuple[int, Overlap, float], tuple[Path, dict[str, Seconds]]] = {}

    def seconds(self, path: Path, overlap: Overlap, block: int, exposed: float = 0.0) -> dict[Channel, Seconds]:
        """Return the tables of a path in `block` by channel; a share `exposed` of it overlaps with nothing."""
        key = (id(path), overlap, exposed)
        if key not in self._priced:
            tables = self.prices.seconds(path, overlap)
            if exposed:
                whole, none = self.prices.seconds(path, Overlap.NONE), np.zeros(1)
                tables = {
                    what: (1 - exposed) * tables.get(what, none) + exposed * whole.get(what, none)
                    for what in {**tables, **whole}
                }
            # The path is retained, so that no other path gets its `id`.
            self._priced[key] = path, tables
        tables = self._priced[key][1]
        return {EXPOSED if what == EXPOSED[1] else (block, what): table for what, table in tables.items()}

    def at_pairs(self, costs: dict[Channel, Seconds], runs: NDArray[np.bool_]) -> dict[Channel, Seconds]:
        """Return tables with 0 where `runs` is False."""
        masked: dict[Channel, Seconds] = {}
        for channel, table in costs.items():
            key = (id(table), runs.tobytes())
            if key not in self._masked:
                self._masked[key] = table, np.where(runs, table, 0.0)
            masked[channel] = self._masked[key][1]
        return masked


def only_sums(path: Path) -> NDArray[np.bool_]:
    """Return a mask of the pairs of states between which partial results are summed, and slices are cut of them."""
    source, target = path.source[:, None, :], path.target[None, :, :]
    summed = source <= PARTIAL
    unmoved = (summed | (source == WHOLE) | (source == target)).all(axis=2)
    return summed.any(axis=2) & unmoved & (path.source_dims == path.passed_dims).all(axis=1)[:, None]


def _only_gathers(path: Path) -> NDArray[np.bool_]:
    """Return a mask of the pairs of states between which shards are gathered, and nothing else is sent."""
    source, target = path.source[:, None, :], path.target[None, :, :]
    gathered = (source >= 0) & (target == WHOLE)
    early = (path.source_dims != path.passed_dims).any(axis=1)[:, None]
    return ((source == target) | gathered).all(axis=2) & (gathered.any(axis=2) | early)


def _in_steps(path: Path) -> NDArray[np.bool_]:
    """Return a mask of the pairs of states whose sums are scattered over some axes and whole over others."""
    summed, target = path.source[:, None, :] <= PARTIAL, path.target[None, :, :]
    return (summed & (target >= 0)).any(axis=2) & (summed & (target == WHOLE)).any(axis=2)


class _Group:
    """Reshards whose collectives may be combined, one for each of their tensors, in program order."""

    def __init__(self, graph: OpGraph, role: str, members: Sequence[Reshard], eager: bool) -> None:
        """Order the reshards, and find out if other work overlaps with them.

        A compiler for GPUs has one collective in flight at a time. A sum of a trip runs while the operands of the next
        sums are computed, and the largest one runs last. It is hidden only if the trip has a matmul that no sum waits
        for. The first gather of a trip is hidden only if the trip has a matmul that waits for no gather. Evidence:
        docs/compiler_behaviour.md, "Combined sums of a trip".
        """
        self.is_sum = role == "sum"
        self.sends = only_sums if self.is_sum else _only_gathers
        members = sorted(members, key=lambda each: each.op)
        # A light op's tensor is its operand; the path has the factors of the result that is sent.
        self.sizes = [math.prod(each.path.factors) * each.path.itemsize for each in members]
        self.dtypes = [graph.tensors[each.tensor].dtype for each in members]
        self.places = {(each.source, each.tensor): place for place, each in enumerate(members)}
        overlaps = SUMS if self.is_sum else READING
        block, ops = members[0].block, {each.op for each in members if each.overlap in overlaps}
        # PyTorch's FSDP has one collective for a block of any size.
        self.most = math.inf if eager and block >= 0 else JOINED
        self.in_trip = not eager and block >= 0 and bool(ops)
        """True if the collectives run in the trips of a loop, one after the other."""
        if self.in_trip:
            self.waits = not has_matmul_apart(graph, block, ops, after=not self.is_sum)
        else:
            self.waits = not eager and members[-1 if self.is_sum else 0].overlap in ALONE.values()
        """True if no work overlaps with the last sum, or with the first gather."""
        self._packed: dict[float, list[_Pack]] = {}

    def pack(self, each: Reshard, share: float) -> "_Pack":
        """Return the combined collective of a reshard, if results have `share` of the bytes of all tensors."""
        if share not in self._packed:
            packs = self._packs(share)
            sizes = [sum(self.sizes[place] for place in pack) for pack in packs]
            largest = max(sizes) / max(sum(sizes), 1.0)
            at_end = sizes.index(max(sizes)) if self.is_sum else 0
            pack_of = {place: number for number, pack in enumerate(packs) for place in pack}
            self._packed[share] = [
                _Pack(len(packs[pack_of[place]]), self.waits and pack_of[place] == at_end, self.waits * largest)
                for place in range(len(self.sizes))
            ]
        return self._packed[share][self.places[each.source, each.tensor]]

    def _packs(self, share: float) -> list[list[int]]:
        """Return the places of the tensors of each combined collective.

        Collectives of one dtype are combined in program order, as long as their results have at most `most` bytes.
        """
        packs: list[list[int]] = []
        unfilled: dict[str, list[int]] = {}
        filled: dict[str, float] = {}
        for place, (size, dtype) in enumerate(zip(self.sizes, self.dtypes, strict=True)):
            result = size * share
            if dtype in unfilled and filled[dtype] + result <= self.most:
                unfilled[dtype].append(place)
                filled[dtype] += result
                continue
            packs.append([place])
            if result <= self.most:
                unfilled[dtype], filled[dtype] = packs[-1], result
        return packs


class _Pack(NamedTuple):
    """Combined collective of a tensor."""

    count: int
    """Number of tensors in it."""
    waits: bool
    """True if it is the one of its group that no work overlaps with."""
    largest: float
    """Share of the group's bytes in the collective that no work overlaps with, if that is the largest one."""


def has_matmul_apart(graph: OpGraph, block: int, ops: Iterable[int], after: bool) -> bool:
    """Return True if the body of loop `block` has a matmul that computes nothing for `ops`, some ops of the body.

    With `after`, return True if it has one that reads nothing that `ops` compute. Matmuls of loops inside the body do
    not count: no collective is in flight while such a loop runs.
    """
    body = graph.loops[block]
    inner = [each for each in graph.loops if each.id != block and body.start <= each.start and each.stop <= body.stop]
    through: dict[int, set[int]] = defaultdict(set)
    for carry in (carry for each in inner for carry in each.carries):
        for ends in itertools.product((carry.init, carry.update), (carry.body, carry.result)):
            first, second = ends if after else ends[::-1]
            through[first].add(second)
    open_ops, tied = list(ops), set(ops)
    while open_ops:
        op = graph.ops[open_ops.pop()]
        own = op.results if after else op.operands
        tensors = set(own).union(*(through[tensor] for tensor in own if tensor in through))
        if after:
            found = {user.id for tensor in tensors for user in graph.users[tensor]}
        else:
            found = {graph.tensors[tensor].producer for tensor in tensors}
        new = [each for each in found - tied if body.start <= each < body.stop]
        open_ops += new
        tied.update(new)
    return any(op.flops and op.loop == block and op.id not in tied for op in graph.ops[body.start : body.stop])


class CombinedCollectives:
    """Division of reshards into parts by the number of collectives that the compiler makes one of."""

    def __init__(self, graph: OpGraph, axis_sizes: Sequence[int], tables: PartTables, eager: bool = False) -> None:
        """Start for the tensors of a graph and a mesh of `axis_sizes`.

        PyTorch's FSDP (`eager`) gathers and sums the weights of a block at once too, while the next block computes.
        """
        self.graph, self.axes, self.tables, self.eager = graph, axis_sizes, tables, eager
        self._wide: dict[tuple[int, int], tuple[Path, Path]] = {}

    def parts(self, reshards: Sequence[Reshard], role: Callable[[Reshard], str]) -> Iterator[Reshard]:
        """Yield reshards in parts, each with the mask of the pairs of states at which as many collectives are combined.

        A part of combined collectives has the size of all of them and a share of their executions
        (`Reshard.combined`). The other tensors of the block are assumed to be split over as many devices as this one.
        Sums of a trip are exposed where nothing is left to overlap with them.

        - `role`: returns `gather` for a reshard of a weight, `sum` for one of a gradient for its update, else an empty
          string.
        """
        keys = [self._key(each, role(each)) for each in reshards]
        ends: dict[_Key, dict[tuple[int, int], Reshard]] = defaultdict(dict)
        for key, each in zip(keys, reshards, strict=True):
            if key is not None:
                ends[key].setdefault((each.source, each.tensor), each)
        groups = {key: _Group(self.graph, key[0], list(known.values()), self.eager) for key, known in ends.items()}
        for key, each in zip(keys, reshards, strict=True):
            if key is None or len(groups[key].sizes) < 2 and not groups[key].in_trip:
                yield each
            else:
                yield from self._parts(each, groups[key])

    def _key(self, each: Reshard, role: str) -> _Key | None:
        """Return the group of a reshard whose collectives may be combined with others; None for other reshards."""
        if each.op < 0 or each.narrow is not None or each.path.collected:
            return None
        if role == "gather" or role == "sum" and (each.path.source <= PARTIAL).any():
            return role, each.block, each.trips
        return None

    def _parts(self, each: Reshard, group: "_Group") -> Iterator[Reshard]:
        """Yield the parts of one reshard of a group."""
        path, own = each.path, Overlap(each.overlap)
        whole = math.prod(path.factors)
        shares = local_elements(path.target, path.factors, self.axes) / whole if whole else np.ones(len(path.target))
        packs = [group.pack(each, share) for share in shares.tolist()]
        alone = np.ones((len(path.source), len(path.target)), dtype=bool) if each.runs is None else each.runs
        may = group.sends(path) & alone
        summed = group.in_trip and own in SUMS
        later = _in_steps(path) if summed else np.zeros_like(may)
        # Matmuls of one trip are short next to a sum over the network.
        far = self._sums_over_network(path) if summed else np.zeros_like(may)
        waiting = Overlap.NONE if group.in_trip and own in READING else ALONE.get(own, own)
        for pack in sorted(set(packs)):
            at = may & np.array([other == pack for other in packs])[None, :]
            # If the last sum alone counted as exposed, a choice that splits equal tensors differently would expose
            # none. So each counts by the share of the last one in all.
            exposed = pack.largest if summed else 0.0
            hidden = waiting if pack.waits and not summed else own
            near = at & ~far
            for overlap, runs in (
                (hidden, near & ~later),
                (Overlap.GRADIENTS_IN_STEPS, near & later),
                (Overlap.NONE, at & far),
            ):
                if runs.any() and (pack.count, exposed, overlap) != (1, 0.0, own):
                    alone = alone & ~runs
                    wide = self._wider(path, pack.count)
                    tables = self.tables.seconds(wide, overlap, each.block, exposed)
                    yield dataclasses.replace(
                        each, trips=each.trips / pack.count, overlap=overlap, forbidden=None, path=wide, runs=runs,
                        combined=pack.count, exposed=exposed, costs=self.tables.at_pairs(tables, runs),
                    )  # fmt: skip
        if alone is each.runs or each.runs is None and alone.all():
            yield each
        else:
            yield dataclasses.replace(each, costs=self.tables.at_pairs(each.costs, alone), runs=alone)

    def _sums_over_network(self, path: Path) -> NDArray[np.bool_]:
        """Return a mask of the pairs of states whose sums cross the network, [rows, 1]."""
        mesh = self.tables.prices.collectives.mesh
        crossing = [axis for axis, name in enumerate(mesh.names) if "network" in mesh.kinds((name,))]
        return np.any(path.source[:, crossing] <= PARTIAL, axis=1, keepdims=True)

    def _wider(self, path: Path, count: int) -> Path:
        """Return the path of `count` equal tensors in one; repeated layers share it."""
        if count == 1:
            return path
        key = (id(path), count)
        if key not in self._wide:
            sizes = {"itemsize": count * path.itemsize, "reduce_itemsize": count * path.reduce_itemsize}
            self._wide[key] = path, dataclasses.replace(path, **sizes)
        return self._wide[key][1]
