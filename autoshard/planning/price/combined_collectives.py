"""Collectives that a compiler combines: the small sums of gradients, and the small gathers of weights, of one block."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import OpGraph
from autoshard.planning.price.reshard_paths import PathPrices
from autoshard.planning.space.decision_model import EXPOSED, Channel, Path, Reshard
from autoshard.planning.space.overlap import ALONE, Overlap
from autoshard.planning.xla.axis_assignments import PARTIAL, WHOLE, Seconds, local_elements


JOINED = 30 * 2**20 + 7
"""Bytes up to which the GPU compiler combines collectives: the default of its thresholds."""

_Key = tuple[str, int, float, str]
"""Kind (`sum` or `gather`), block, executions and dtype of collectives that may be combined."""


class PartTables:
    """Tables of seconds for parts of reshards, each computed once: repeated layers share their paths and tables."""

    def __init__(self, prices: PathPrices) -> None:
        """Start without tables; `prices` are those of the mesh's paths."""
        self.prices = prices
        self._masked: dict[tuple[object, ...], tuple[Seconds, Seconds]] = {}
        self._priced: dict[tuple[int, Overlap], tuple[Path, dict[str, Seconds]]] = {}

    def seconds(self, path: Path, overlap: Overlap, block: int) -> dict[Channel, Seconds]:
        """Return the tables of a path in `block` by channel."""
        key = (id(path), overlap)
        if key not in self._priced:
            # The path is retained, so that no other path gets its `id`.
            self._priced[key] = path, self.prices.seconds(path, overlap)
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Reshards whose collectives may be combined."""

    sends: Callable[[Path], NDArray[np.bool_]]
    """Function that returns the mask of the pairs of states whose collectives may be combined."""
    sizes: NDArray[np.float64]
    """Bytes of each tensor, whole."""
    turns: dict[tuple[int, int], int]
    """Place of each source and tensor in the order of exposure: gathers in program order, sums from the last one on."""
    exposed: bool
    """True if no work of other weights overlaps with the first one in that order."""

    @classmethod
    def of(cls, key: _Key, members: Sequence[Reshard], eager: bool) -> "_Group":
        """Return the group of one reshard for each of its tensors."""
        is_sum = key[0] == "sum"
        # A light op's tensor is its operand; the path has the factors of the result that is sent.
        sizes = [math.prod(each.path.factors) * each.path.itemsize for each in members]
        ordered = sorted(members, key=lambda each: -each.op if is_sum else each.op)
        turns = {(each.source, each.tensor): place for place, each in enumerate(ordered)}
        sends = only_sums if is_sum else _only_gathers
        return cls(sends, np.array(sizes, dtype=np.float64), turns, not eager and ordered[0].overlap in ALONE.values())

    def overlap(self, each: Reshard, count: int) -> Overlap:
        """Return the overlap of one of `count` combined collectives: that of the first one if it is among them."""
        own = Overlap(each.overlap)
        waits = self.exposed and self.turns[each.source, each.tensor] < count
        return ALONE.get(own, own) if waits else own


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
        Evidence: docs/compiler_behaviour.md, "Combined sums of a trip".

        - `role`: returns `gather` for a reshard of a weight, `sum` for one of a gradient for its update, else an empty
          string.
        """
        keys = [self._key(each, role(each)) for each in reshards]
        ends: dict[_Key, dict[tuple[int, int], Reshard]] = defaultdict(dict)
        for key, each in zip(keys, reshards, strict=True):
            if key is not None:
                ends[key].setdefault((each.source, each.tensor), each)
        groups = {key: _Group.of(key, list(known.values()), self.eager) for key, known in ends.items()}
        for key, each in zip(keys, reshards, strict=True):
            if key is None or len(groups[key].sizes) < 2:
                yield each
            else:
                yield from self._parts(each, groups[key])

    def _key(self, each: Reshard, role: str) -> _Key | None:
        """Return the group of a reshard whose collectives may be combined with others; None for other reshards."""
        if each.op < 0 or each.narrow is not None or each.path.collected:
            return None
        if role == "gather" or role == "sum" and (each.path.source <= PARTIAL).any():
            return role, each.block, each.trips, self.graph.tensors[each.tensor].dtype
        return None

    def _parts(self, each: Reshard, group: "_Group") -> Iterator[Reshard]:
        """Yield the parts of one reshard of a group."""
        path, sizes = each.path, group.sizes
        results = local_elements(path.target, path.factors, self.axes) * path.itemsize
        whole = math.prod(path.factors) * path.itemsize
        small = [0 < size <= JOINED for size in results.tolist()]
        together = np.array([_together(sizes, r / whole) if s else 1 for r, s in zip(results, small, strict=True)])
        alone = np.ones((len(path.source), len(path.target)), dtype=bool) if each.runs is None else each.runs
        counts = set(together.tolist()) - {1}
        may = group.sends(path) & alone if counts else np.zeros_like(alone)
        if not may.any():
            yield each
            return
        for count in sorted(counts):
            runs = may & (together == count)[None, :]
            if runs.any():
                alone = alone & ~runs
                wide = self._wider(path, count)
                overlap = group.overlap(each, count)
                tables = self.tables.seconds(wide, overlap, each.block)
                yield dataclasses.replace(
                    each, trips=each.trips / count, overlap=overlap, forbidden=None, path=wide, runs=runs,
                    combined=count, costs=self.tables.at_pairs(tables, runs),
                )  # fmt: skip
        yield dataclasses.replace(each, costs=self.tables.at_pairs(each.costs, alone), runs=alone)

    def _wider(self, path: Path, count: int) -> Path:
        """Return the path of `count` equal tensors in one; repeated layers share it."""
        key = (id(path), count)
        if key not in self._wide:
            sizes = {"itemsize": count * path.itemsize, "reduce_itemsize": count * path.reduce_itemsize}
            self._wide[key] = path, dataclasses.replace(path, **sizes)
        return self._wide[key][1]


def _together(sizes: NDArray[np.float64], share: float) -> int:
    """Return the number of collectives in one, if their results have `share` of the `sizes` in bytes, at least 1."""
    small = sizes[sizes * share <= JOINED] * share
    return max(1, len(small) // math.ceil(small.sum() / JOINED)) if len(small) else 1
