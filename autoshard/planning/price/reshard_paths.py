"""Prices of reshard paths: the collectives and relayouts between all pairs of states at two ends, in seconds."""

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import KINDS, LANES, TILE_ROWS, Collectives, Compute, Kind, Mesh, hidden_seconds, hiding_shares
from autoshard.planning.space.decision_model import EXPOSED, Path
from autoshard.planning.space.overlap import Overlap, hiding_figures
from autoshard.planning.xla.axis_assignments import (
    PARTIAL,
    WHOLE,
    Emitted,
    Seconds,
    States,
    Step,
    Wave,
    distinct,
    emitted,
    emitted_gather,
    extents,
    is_stack,
    local_elements,
    members,
    scatter_scratch,
    split,
    waves,
)


if TYPE_CHECKING:
    from autoshard.planning.xla.transition_kernels import Ends, Rules


_KERNELS = "autoshard.planning.xla.transition_kernels"
"""Module of the compiled kernels."""

_CHUNK = 65_536
"""Number of state pairs priced at a time, which keeps the intermediate arrays small."""
_COMPILED = 10_000
"""Number of state pairs from which on the compiled kernels are loaded; once loaded they price all paths."""


class PathPrices:
    """Prices of paths on one mesh; `link_of` maps a mesh axis to the name of its link. Prices are of one execution, in
    seconds.
    """

    def __init__(self, collectives: Collectives, link_of: Mapping[str, str]) -> None:
        """Prepare the groups of mesh axes, as bits, and the links that each of them uses."""
        self.collectives = collectives
        names = collectives.mesh.names
        self._every = [tuple(name for a, name in enumerate(names) if bits >> a & 1) for bits in range(1 << len(names))]
        # Link -> its mesh axes as bits; -1 for the exposed channel.
        self._links = {
            link: sum(1 << names.index(a) for a in link_of if link_of[a] == link) for link in link_of.values()
        }
        self._links[EXPOSED[1]] = -1
        self._shares: dict[tuple[Overlap, Kind], Seconds] = {}

    def seconds(self, path: Path, overlap: Overlap) -> dict[str, Seconds]:
        """Return tables [rows, columns] of a path's seconds by channel: exposed, hidden by link, and compute.

        Channels without seconds are missing. Compiled kernels price many pairs, and all pairs once they are loaded.
        """
        large = len(path.source) * len(path.target) >= _COMPILED or _KERNELS in sys.modules
        return self.compiled(path, overlap) if large else self.plain(path, overlap)

    def plain(self, path: Path, overlap: Overlap) -> dict[str, Seconds]:
        """Return the tables of `seconds` computed with numpy, `_CHUNK` pairs at a time."""
        shape = (len(path.source), len(path.target))
        tables: dict[str, Seconds] = {}
        height = _height(path)
        for start in range(0, shape[0], height):
            part = slice(start, start + height)
            row_path = dataclasses.replace(
                path,
                source_dims=path.source_dims[part],
                passed_dims=path.passed_dims[part],
                source=path.source[part],
                target=path.target,
            )
            before, after = path_waves(row_path, self.collectives)
            for wave in (*map(_of_rows, before), *after):
                groups, used = wave.groups, np.nonzero(wave.groups)
                seconds = self.collectives.time_of_groups(wave.kind, groups[used], wave.size[used])
                least = self.collectives.time_of_groups(wave.kind, groups[used], np.zeros_like(seconds))
                whole, pipelined = self._hidden(overlap, wave.kind)[:, groups[used]]
                hidden = hidden_seconds((whole, pipelined), seconds, least)
                for what, bits in self._links.items():
                    mine = seconds - hidden if bits < 0 else np.where(groups[used] & bits, hidden, 0.0)
                    if not mine.any():
                        continue
                    table = tables.setdefault(what, np.zeros(shape))[part]
                    if groups.shape[1] == shape[1]:
                        table[used] += mine
                    else:  # an early gather depends on the row only
                        table[used[0]] += mine[:, None]
        return self._laid_out(tables, relayouts(path, self.collectives))

    def compiled(self, path: Path, overlap: Overlap) -> dict[str, Seconds]:
        """Return the tables of `seconds` from the compiled kernels, which price each distinct pair of states once."""
        from autoshard.planning.xla.transition_kernels import AS_SUM, Sizes, charge_pairs

        height = _height(path)
        first_row, rows = distinct(np.concatenate([path.source_dims, path.passed_dims, path.source], axis=1))
        first_column, columns = distinct(path.target)
        path = dataclasses.replace(
            path,
            source_dims=path.source_dims[first_row],
            passed_dims=path.passed_dims[first_row],
            source=path.source[first_row],
            target=path.target[first_column],
        )
        tables = np.zeros((len(self._links), len(path.source), len(path.target)))
        first = np.full(len(tables), np.iinfo(np.int64).max)
        same = bool((path.source_dims == path.passed_dims).all())
        early = self._ends(path.source_dims[:0] if same else path.source_dims, path.passed_dims, path.shape)
        ends = self._ends(path.source, path.target, path.factors)
        links = np.array([bits for bits in self._links.values() if bits >= 0], dtype=np.int64)
        sizes = Sizes(path.itemsize, path.reduce_itemsize, path.collected, is_stack(path.factors, path.stacked))
        shares = np.stack([self._hidden(overlap, kind) for kind in KINDS], axis=1)
        rules = self._rules
        if path.whole_sums:
            replaced = np.isin(rules.scattering, [list(Emitted).index(form) for form in path.whole_sums])
            rules = rules._replace(scattering=np.where(replaced, AS_SUM, rules.scattering))
        charge_pairs(rules, shares, links, early, ends, sizes, first_row // height, tables, first)
        names, order = list(self._links), np.argsort(first).tolist()
        priced = {names[k]: tables[k] for k in order if first[k] < np.iinfo(np.int64).max}
        priced = self._laid_out(priced, relayouts(path, self.collectives, compiled=True))
        return {what: table[rows[:, None], columns] for what, table in priced.items()}

    def _laid_out(self, found: dict[str, Seconds], again: "Relayouts") -> dict[str, Seconds]:
        """Add the seconds of relayouts to the tables, as compute (in place), if there are any; return the tables."""
        if again.any():
            found["compute"] = again.seconds(Compute(self.collectives.mesh.topology, self.collectives.calibration))
        return found

    def _hidden(self, overlap: Overlap, kind: Kind) -> Seconds:
        """Return the hidden shares of a collective, [2, groups of mesh axes]: of its whole time, and of its time per
        byte only.
        """
        if (overlap, kind) not in self._shares:
            figures = [hiding_figures(self.collectives, overlap, kind, axes) for axes in self._every]
            every = zip(figures, self._every, strict=True)
            shares = [hiding_shares(self.collectives, hides, kind, axes) for hides, axes in every]
            self._shares[overlap, kind] = np.array(shares).T
        return self._shares[overlap, kind]

    def _ends(self, source: States, target: States, sizes: Sequence[int]) -> "Ends":
        """Convert states to the record that the compiled kernels use; `sizes` are those of the dims or factors that the
        states refer to.
        """
        from autoshard.planning.xla.transition_kernels import Ends

        axes = self.collectives.mesh.sizes
        local, minor = local_elements(source, sizes, axes), extents(source, sizes, axes)
        return Ends(np.ascontiguousarray(source), np.ascontiguousarray(target), local, minor, len(sizes))

    @functools.cached_property
    def _rules(self) -> "Rules":
        """Emission and prices of collectives, as arrays over groups of mesh axes."""
        from autoshard.planning.xla.transition_kernels import Rules

        prices = self.collectives
        sizes = prices.mesh.sizes
        groups = [members(bits) for bits in range(1 << len(sizes))]
        parts = np.array([math.prod(sizes[a] for a in axes) for axes in groups], dtype=np.float64)
        order = list(Emitted)
        scattering = np.array([order.index(emitted(prices, axes)) for axes in groups])
        gathers = [emitted_gather(prices, axes) for axes in groups]
        tables = [prices.rates_of_groups(kind) for kind in KINDS]
        depth = max(len(rates) for _, rates in tables)
        rates = np.zeros((2, len(KINDS), depth, len(groups)))
        for kind, (_, levels) in enumerate(tables):
            for level, both in enumerate(levels):
                rates[:, kind, level] = both
        return Rules(
            parts=parts,
            scattering=scattering,
            gathering=np.array([order.index(form) for form, _ in gathers]),
            small=np.array([most for _, most in gathers]),
            tpu=prices.mesh.topology.traits.joins_sums,
            tile=(float(TILE_ROWS), float(LANES)),
            scratch=scatter_scratch(prices.mesh.topology.chip.name),
            launch=np.array([launch for launch, _ in tables]),
            latency=rates[0],
            per_byte=rates[1],
            phases=np.array([prices.phases(kind) for kind in KINDS], dtype=np.float64),
            curves=np.stack([prices.curves_of_groups(kind) for kind in KINDS]),
        )


def _height(path: Path) -> int:
    """Return the number of a path's rows that are priced at a time: at least 1, at most `_CHUNK` pairs."""
    return max(1, _CHUNK // max(1, len(path.target)))


@dataclasses.dataclass(frozen=True, slots=True)
class Relayouts:
    """Relayouts in one execution of a path: single figures, or arrays [rows, columns]."""

    ops: NDArray[np.int64]
    """Number of relayouts that are fusions of their own."""
    size: NDArray[np.float64]
    """Bytes written in another order of dims."""

    def any(self) -> bool:
        """Return True if any pair of states has a relayout."""
        return bool(self.ops.any() or self.size.any())

    def at(self, row: int, column: int) -> "Relayouts":
        """Return the figures of one pair of states."""
        return Relayouts(self.ops[row, column], self.size[row, column])

    def seconds(self, compute: Compute) -> NDArray[np.float64]:
        """Return the seconds of the relayouts: the overhead of each op, and the transfer of the bytes."""
        return self.ops * compute.calibration.op_overhead_s + compute.relayout_seconds(self.size)


def relayouts(path: Path, collectives: Collectives, compiled: bool = False) -> Relayouts:
    """Return the relayouts around a path's collectives for every pair of states; `compiled` selects the kernel for many
    pairs.

    TPU compilers gather and scatter along the outermost dim in memory. A fusion of its own puts shards of the last dim,
    or of several dims at once, in place.

    Between CPU devices a gather joins whole shards. Along an inner dim the shards are first copied so that this dim is
    outermost, and the result is copied back.

    Other backends have none, nor have tensors of one dim.

    Evidence: docs/compiler_behaviour.md, "Relayouts around gathers".
    """
    pairs = (len(path.source), len(path.target))
    ops, size = np.zeros(pairs, dtype=np.int64), np.zeros(pairs)
    if collectives.mesh.topology.traits.concatenates_shards:
        size = _copied(path, collectives.mesh.sizes)
    elif collectives.mesh.topology.traits.fuses_relayouts and len(path.factors) > 1:
        ops = _compiled_fusions(path) if compiled else _moved_fusions(path)
    return Relayouts(ops, size)


def _copied(path: Path, axis_sizes: Sequence[int]) -> NDArray[np.float64]:
    """Return the bytes of the shards and of the gathered result, [rows, columns], summed over gathers of inner dims.

    A dim is inner if a dim before it has more than one local element.
    """
    source, target = path.source[:, None, :], path.target[None, :, :]
    gathered = np.where((source >= 0) & (target == WHOLE), source, WHOLE)
    parts = np.array(axis_sizes)
    local = [
        size / np.where(path.source == dim, parts, 1).prod(axis=1)[:, None] for dim, size in enumerate(path.factors)
    ]
    copied = np.zeros(gathered.shape[:2])
    for dim in range(len(path.factors) - 1, 0, -1):  # the last dim first
        joined = np.where(gathered == dim, parts, 1).prod(axis=2)
        before = math.prod(local, start=np.float64(path.itemsize))
        inner = (joined > 1) & (math.prod(local[:dim]) > 1)
        copied += np.where(inner, before * (1 + joined), 0.0)
        local[dim] = local[dim] * joined
    return copied


def _moved_fusions(path: Path) -> NDArray[np.int64]:
    """Return the number of fusions that put shards of the last dim, or of several dims, in place, [rows, columns].

    A gather and a scatter count at most one each.
    """
    last = len(path.factors) - 1
    source, target = path.source[:, None, :], path.target[None, :, :]
    gathered = np.where((source >= 0) & (target == WHOLE), source, WHOLE)
    scattered = np.where((source <= PARTIAL) & (target >= 0), target, WHOLE)
    fusions = np.zeros(gathered.shape[:2], dtype=np.int64)
    for dims in (gathered, scattered):
        first = dims.max(axis=2)
        several = ((dims >= 0) & (dims != first[..., None])).any(axis=2)
        fusions += several | (first == last)
    return fusions


def _compiled_fusions(path: Path) -> NDArray[np.int64]:
    """Return the counts of `_moved_fusions` from the compiled kernel."""
    from autoshard.planning.xla.transition_kernels import count_fusions

    fusions = np.zeros((len(path.source), len(path.target)), dtype=np.int64)
    count_fusions(np.ascontiguousarray(path.source), np.ascontiguousarray(path.target), len(path.factors) - 1, fusions)
    return fusions


def _of_rows(wave: Wave) -> Wave:
    """Select the pairs of equal index of a wave, as arrays [rows, 1]."""
    return dataclasses.replace(wave, groups=np.diagonal(wave.groups)[:, None], size=np.diagonal(wave.size)[:, None])


def path_waves(path: Path, collectives: Collectives) -> tuple[list[Wave], list[Wave]]:
    """Return the collectives of a path: early gathers (for pairs of equal index), then those of every pair.

    There are no early gathers if the op between passes on all axes. Sums of collected partial results are gathers.
    """
    sizes = (path.itemsize, path.reduce_itemsize)
    gathers: list[Wave] = []
    if (path.source_dims != path.passed_dims).any():
        gathers = waves(path.source_dims, path.passed_dims, path.shape, *sizes, collectives)
    steps = waves(path.source, path.target, path.factors, *sizes, collectives, path.stacked, path.whole_sums)
    if path.collected:
        steps = [_collected(wave, collectives) for wave in steps]
    return gathers, steps


def path_steps(path: Path, collectives: Collectives) -> tuple[list[Step], list[Step]]:
    """Return the collectives of `path_waves` with one entry for every kind and group."""
    gathers, steps = path_waves(path, collectives)
    return [s for wave in gathers for s in split(wave)], [s for wave in steps for s in split(wave)]


def _collected(wave: Wave, collectives: Collectives) -> Wave:
    """Replace a sum by the gather of its partial results, which every device then combines; other waves stay."""
    if wave.kind not in ("all-reduce", "reduce-scatter"):
        return wave
    sizes = collectives.mesh.sizes
    parts = np.array([math.prod(sizes[a] for a in members(bits)) for bits in range(1 << len(sizes))])
    return dataclasses.replace(wave, kind="all-gather", size=wave.size * parts[wave.groups])


class PathTables:
    """Cache of path tables by mesh, for programs that are priced one after the other with the same calibration.

    Recipes of one program share most of their paths. If the cache is too large, `trim` drops the oldest meshes. A
    pickled copy is empty.
    """

    def __init__(self, most_bytes: int) -> None:
        """Create an empty cache; `trim` limits it to `most_bytes` bytes."""
        self.most_bytes = most_bytes
        self._of: dict[Mesh, dict[tuple[object, ...], dict[str, Seconds]]] = {}

    def __reduce__(self) -> tuple[type["PathTables"], tuple[int]]:
        return PathTables, (self.most_bytes,)

    def of(self, mesh: Mesh) -> dict[tuple[object, ...], dict[str, Seconds]]:
        """Return the tables of one mesh by path, new and empty if there are none, and mark the mesh as the newest."""
        self._of[mesh] = self._of.pop(mesh, {})
        return self._of[mesh]

    def trim(self) -> None:
        """Drop the oldest meshes until the tables occupy at most `most_bytes`."""
        sizes = {
            mesh: sum(table.nbytes for tables in own.values() for table in tables.values())
            for mesh, own in self._of.items()
        }
        total = sum(sizes.values())
        for mesh, size in sizes.items():
            if total <= self.most_bytes:
                return
            del self._of[mesh]
            total -= size
