"""Sharding rules of Pallas kernels, derived from their grids.

A grid dim may be split over devices under two conditions. Every operand or result that depends on the grid dim follows
it alone in one dim, by blocks or by groups of steps. The kernel uses its place in the grid dim only to look it up in a
table (a mask's) that is split with it.

A device that runs its part of the grid on its shards then computes its part of the whole result. Such dims are batch,
heads (grouped ones by their shared key heads) and queries of attention kernels, forward and backward
(`jax.experimental.pallas.ops.tpu.flash_attention`, `splash_attention`). Rows and columns of matmul kernels are others.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any

from autoshard.program.kernels.attention_masks import computed_share
from autoshard.program.kernels.grid_runs import step_products
from autoshard.program.kernels.pallas_grid import (
    INDEPENDENT,
    BlockPattern,
    GridRange,
    PlaceUse,
    Tables,
    follow,
    map_tables,
    place_use,
    reach,
    table_along,
    with_ends,
    with_tables,
)


SCRATCH_RESULTS = ("splash_mha_", "splash_mqa_")
"""Name prefixes of kernels whose results may be scratch memory that nobody reads (jax's splash attention)."""

SUMS = ("splash_mha_dkv", "splash_mqa_dkv")
"""Name prefixes of kernels that write sums over the steps of a period."""


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """A grid dim that may be split: into whole groups of steps, and then, if `inside`, into the steps of each."""

    dim: int
    """The grid dim."""
    groups: int
    """Number of groups of steps."""
    steps: int
    """Number of grid steps in one group."""
    inside: bool
    """True if the steps of a group may be split too."""
    summed: bool
    """True if results are sums over the steps of a group."""
    triangular: bool
    """True if the work grows evenly along the dim, from almost none (a causal mask)."""


@dataclasses.dataclass(frozen=True, slots=True)
class PallasCall:
    """One kernel call with the facts that its grid implies."""

    name: str
    params: dict[str, Any]
    """Parameters of the equation."""
    operands: tuple[Any, ...]
    """Shapes and dtypes of the operands, tables included."""
    results: tuple[Any, ...]
    """Shapes and dtypes of the results."""
    along: tuple[dict[int, BlockPattern | None], ...]
    """Pattern along each grid dim, for each operand and then each result."""
    splits: tuple[Split, ...]
    """Grid dims that may be split, in order."""
    flops: int
    """FLOPs of the whole grid: the author's estimate if no step skips a matmul, else those of the matmuls that run."""
    traffic: int
    """Bytes that blocks move to and from main memory, of the whole grid."""
    dtype: str
    """Operand dtype of most of the FLOPs; empty if the kernel has no matmul."""
    steps: int
    """Number of grid steps, without those that a mask skips."""

    @classmethod
    def of(cls, operands: Sequence[Any], results: Sequence[Any], params: dict[str, Any]) -> "PallasCall":
        """Return the call of a `pallas_call` equation with these operands and results (shapes) and parameters."""
        mapping = params["grid_mapping"]
        name = kernel_name(params)
        first = len(operands) - mapping.num_inputs
        tables: Tables = {}
        asked = place_use(params["jaxpr"], _own(mapping), mapping.grid, mapping.num_index_operands, tables)
        for block in mapping.block_mappings:
            map_tables(block.index_map_jaxpr.jaxpr, len(mapping.grid), tables)
        along: list[dict[int, BlockPattern | None]] = [{} for _ in range(first)]
        for number, lookups in tables.items():
            at = first - mapping.num_index_operands + number
            along[at] = {
                dim: table_along(lookups, dim, operands[at].shape, size) for dim, size in enumerate(mapping.grid)
            }
        along += [_along(block, mapping.grid) for block in mapping.block_mappings]
        share = masked_share(name, operands, mapping)
        splits = []
        for dim, size in enumerate(mapping.grid):
            if isinstance(size, int) and size > 1:
                split = _split(name, mapping, along, dim, size, asked)
                masked = along[1].get(dim) if share < 1.0 else None
                splits += [dataclasses.replace(split, triangular=masked not in (None, INDEPENDENT))] if split else []
        estimate = params.get("cost_estimate")
        products, some = step_products(params["jaxpr"], [mapping.grid[dim] for dim in _own(mapping)])
        every = sum(products.values())
        runs = sum(some.values()) / every if every else 1.0
        steps = math.prod(size for size in mapping.grid if isinstance(size, int)) * share * runs
        # The author's figure often counts the steps that the kernel skips.
        flops = int(estimate.flops) if estimate is not None and runs == 1.0 else int(every * steps)
        dtype = max(products, key=lambda each: products[each]) if products else ""
        return cls(
            name, params, tuple(operands), tuple(results), tuple(along), tuple(splits), flops, _traffic(mapping), dtype,
            int(steps),
        )  # fmt: skip

    @property
    def rule(self) -> tuple[list[int], list[str], list[Any], list[Any]]:
        """Sizes and kinds of the sharding rule's factors, and factors of each dim of operands and results.

        Each split has a factor for its groups and one for the steps inside; unsplit dims need replication.
        """
        sizes, kinds, of = [], [], {}
        for split in self.splits:
            for count, kind in (
                (split.groups, "parallel"),
                (split.steps if split.inside else 1, "reduction" if split.summed else "parallel"),
            ):
                if count > 1:
                    of.setdefault(split.dim, []).append(len(sizes))
                    sizes.append(count)
                    kinds.append(kind)
        shared: dict[tuple[int, int], int] = {}

        def whole(key: tuple[int, int] | None, size: int) -> int:
            if key is None or key not in shared:
                sizes.append(size)
                kinds.append("need_replication")
                if key is None:
                    return len(sizes) - 1
                shared[key] = len(sizes) - 1
            return shared[key]

        tensors = []
        for leaf, along in zip((*self.operands, *self.results), self.along, strict=True):
            at = {a.dim: s for s in self.splits if (a := along.get(s.dim)) is not None and a.dim >= 0}
            dims = []
            for d, size in enumerate(leaf.shape):
                split = at.get(d)
                if split is None:
                    dims.append((whole(None, size),))
                    continue
                each = along[split.dim].inside(split.steps) is GridRange.EACH  # type: ignore[union-attr]
                factors = of[split.dim] if each else of[split.dim][: int(split.groups > 1)]
                block = size // math.prod(sizes[f] for f in factors)
                dims.append((*factors, whole((split.dim, block), block)) if block > 1 or not factors else (*factors,))
            tensors.append(dims)
        count = len(self.operands)
        return sizes, kinds, tensors[:count], tensors[count:]

    @property
    def triangular(self) -> dict[int, int]:
        """Factor of the rule along which the work grows evenly -> number of its blocks."""
        slopes, factor = {}, 0
        for split in self.splits:
            for count in (split.groups, split.steps if split.inside else 1):
                if count > 1:
                    slopes |= {factor: count} if split.triangular else {}
                    factor += 1
        return slopes

    def on_shards(self, mesh: Any, into: Sequence[Any], out: Sequence[Any]) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """Return the kernel on the part of the grid that belongs to shards with these specs, and the specs, unchanged.

        Results that are sums over a split grid dim are all-reduced over its axes.
        """
        mapping = self.params["grid_mapping"]
        leaves, specs = (*self.operands, *self.results), (*into, *out)
        axes = {split.dim: self._axes(split.dim, specs) for split in self.splits}
        parts = {dim: math.prod(mesh.shape[axis] for axis in each) for dim, each in axes.items()}
        first = len(self.operands) - mapping.num_inputs
        avals = [block.array_aval for block in mapping.block_mappings[: mapping.num_inputs]]
        shards = [
            aval.update(shape=_shard(aval.shape, spec, mesh))
            for aval, spec in zip((*avals, *self.params["out_avals"]), specs[first:], strict=True)
        ]
        begin = first - mapping.num_index_operands
        tables = {
            number: _shard(leaves[begin + number].shape, specs[begin + number], mesh)
            for number in range(mapping.num_index_operands)
            if any(_axes_of(entry) for entry in specs[begin + number])
        }
        ends, sums = {}, [() for _ in self.results]
        for split in self.splits:
            within = parts[split.dim] // math.gcd(parts[split.dim], split.groups)
            if split.summed and within > 1:
                ends[split.dim] = (split.steps, split.steps // within)
                sums = [
                    (*each, *(a for a in axes[split.dim] if a not in _spec_axes(spec))) if self._real(number) else each
                    for number, (each, spec) in enumerate(zip(sums, out, strict=True))
                ]
        params = self.params | {
            "jaxpr": with_tables(with_ends(self.params["jaxpr"], _own(mapping), ends), 0, tables),
            "grid_mapping": _on_parts(mapping, parts, shards, tables),
            "out_avals": tuple(shards[mapping.num_inputs :]),
            "cost_estimate": self._cost(parts),
        }
        primitive = importlib.import_module("jax._src.pallas.pallas_call").pallas_call_p

        def fn(*values: Any) -> Any:
            import jax

            results = primitive.bind(*values, **params)
            return [jax.lax.psum(each, over) if over else each for each, over in zip(results, sums, strict=True)]

        return functools.partial(primitive.bind, **params) if not any(sums) else fn, into, out

    def _axes(self, dim: int, specs: Sequence[Any]) -> tuple[str, ...]:
        """Return the mesh axes that split a grid dim: the most axes that split any tensor along it; empty if none."""
        widest: tuple[str, ...] = ()
        for along, spec in zip(self.along, specs, strict=True):
            each = along.get(dim)
            if each is not None and 0 <= each.dim < len(spec):
                widest = max(widest, _axes_of(spec[each.dim]), key=len)
        return widest

    def _real(self, result: int) -> bool:
        """Return False for a result that is scratch memory."""
        return not _is_scratch(self.name, self.params["grid_mapping"], self.along[len(self.operands) + result])

    def _cost(self, parts: dict[int, int]) -> Any:
        """Return the cost estimate of one part, which the compiler and readers of the program see.

        If parts differ in work, the estimate is that of the part with most.
        """
        from jax.experimental.pallas import CostEstimate

        given = self.params.get("cost_estimate")
        total = given or CostEstimate(flops=0, transcendentals=0, bytes_accessed=self.traffic)
        total = dataclasses.replace(total, flops=self.flops)
        counts = ("flops", "transcendentals", "bytes_accessed")
        count, most = math.prod(parts.values()), 1.0
        for split in self.splits:
            if split.triangular:
                most *= most_of_slope(parts[split.dim], split.groups * split.steps)
        most = {"flops": most, "transcendentals": most}
        return dataclasses.replace(
            total, **{key: int(getattr(total, key) * most.get(key, 1.0)) // count for key in counts}
        )


def most_of_slope(parts: int, blocks: int) -> float:
    """Return the work of the busiest of `parts` parts over the mean, where block k of n has work k.

    All devices wait for the busiest one.
    """
    # With n blocks and p parts, the last part has the mean work `n - (n / p - 1) / 2`. All blocks have `(n + 1) / 2`.
    return (2.0 - 1.0 / parts + 1.0 / blocks) / (1.0 + 1.0 / blocks)


def masked_share(name: str, operands: Sequence[Any], mapping: Any) -> float:
    """Return the share of the grid's steps that a kernel runs: jax's splash attention skips masked blocks.

    It is 1 for other kernels, and for one without a mask or with a grid reduced to a window.

    The kernel's second operand is the table of its blocks, `[heads, rows, columns]`. Its values are known on the device
    only. But a mask has an operand of query positions or of partial blocks. If the grid is not reduced to a window's
    width, the mask is assumed to be causal.
    """
    if not name.startswith(SCRATCH_RESULTS) or len(operands) < 2:
        return 1.0
    table, first = operands[1], len(operands) - mapping.num_inputs
    if len(table.shape) != 3 or table.dtype.kind != "i":
        return 1.0
    marks = [operand.dtype.name for operand in operands[first:] if operand.dtype.kind in "iub"]
    if set(marks) <= {"int32"} and len(marks) % 2 == 0:  # none, or segment ids of queries and keys
        return 1.0
    lengths, sides = [], []
    for number, operand in list(enumerate(operands))[first:]:
        if operand.dtype.kind not in "iu" and len(lengths) < 2:  # queries and keys precede all but tables
            block = mapping.block_mappings[number - first].block_shape
            lengths.append(operand.shape[-2])
            sides.append(_elements(block[-2]))
    if len(sides) < 2 or not all(sides) or [n // b for n, b in zip(lengths, sides, strict=True)] != [*table.shape[1:]]:
        return 1.0
    return computed_share(*lengths, causal=True, window=None, block=(sides[0], sides[1]))


def kernel_name(params: dict[str, Any]) -> str:
    """Return the kernel's name: the one given to `pallas_call`, else that of the kernel function."""
    return params.get("name") or getattr(params["jaxpr"].debug_info, "func_name", "") or "pallas_call"


def _own(mapping: Any) -> list[int]:
    """Return the grid dims in the kernel's own numbering, without those that vmap added."""
    return [dim for dim in range(len(mapping.grid)) if dim not in mapping.vmapped_dims]


def _along(block: Any, grid: Sequence[Any]) -> dict[int, BlockPattern | None]:
    """Return the pattern of one operand or result along each grid dim; None if unknown or if several dims follow it."""
    jaxpr = block.index_map_jaxpr.jaxpr
    patterns: dict[int, BlockPattern | None] = {dim: INDEPENDENT for dim in range(len(grid))}
    for d, variable in enumerate(jaxpr.outvars):
        size = _elements(block.block_shape[d])
        full = block.array_aval.shape[d]
        blocks = full // size if size and full % size == 0 else None
        for dim, pattern in follow(jaxpr, variable, grid, blocks).items():
            if pattern is None or patterns[dim] is not INDEPENDENT:
                patterns[dim] = None
            else:
                period, within = pattern
                patterns[dim] = BlockPattern(d if period > 0 else -1, abs(period), within)
    return patterns


def _is_scratch(name: str, mapping: Any, along: dict[int, BlockPattern | None]) -> bool:
    """Return True for a result of jax's splash attention that does not depend on the kernel's own grid."""
    alike = all(each is INDEPENDENT for dim, each in along.items() if dim not in mapping.vmapped_dims)
    return name.startswith(SCRATCH_RESULTS) and alike


def _split(
    name: str, mapping: Any, along: Sequence[dict[int, BlockPattern | None]], dim: int, size: int, asked: PlaceUse
) -> Split | None:
    """Return the ways to split a grid dim, or None if it cannot be split.

    A group has as many steps as the least common multiple of all periods, or all steps if a result is written
    repeatedly. None is the result if the kernel uses its place in an unknown way or a pattern is unknown. It is also if
    the only group cannot be split inside.

    - `along`: pattern of each operand and result along each grid dim.
    - `dim`, `size`: the grid dim and its extent.
    - `asked`: the kernel's use of its place in the grid.
    """
    each = [pattern.get(dim, INDEPENDENT) for pattern in along]
    if dim in asked.steps or any(a is None for a in each):
        return None
    known = [a for a in each if a is not None]
    of_results = [
        a for a, pattern in zip(known[-mapping.num_outputs :], along[-mapping.num_outputs :], strict=True)
        if not _is_scratch(name, mapping, pattern)
    ]  # fmt: skip
    periods, ends = asked.periods.get(dim, frozenset()), asked.ends.get(dim, frozenset())
    steps = math.lcm(*(a.period for a in known), *periods, *ends)
    if any(a.dim < 0 for a in of_results):
        steps = size  # written repeatedly: a sum, or the last value
    summed = any(a.inside(steps) is GridRange.SAME for a in of_results)
    inside = steps > 1 and not periods and all(a.inside(steps) is not GridRange.MIXED for a in known)
    inside = inside and ends == ({steps} if summed else set())
    if summed:
        inside = inside and name.startswith(SUMS) and all(a.inside(steps) is GridRange.SAME for a in of_results)
    if steps == size and not inside:
        return None
    return Split(dim, size // steps, steps, inside, summed and inside, False)


def _elements(block: Any) -> int | None:
    """Return the number of elements of a block along one dim: 1 if squeezed, None if the block has no fixed size."""
    if block is None or type(block).__name__ == "Squeezed":
        return 1
    if isinstance(block, int):
        return block
    return block.block_size if type(block).__name__ == "Blocked" else None


def _on_parts(mapping: Any, parts: dict[int, int], shards: Sequence[Any], tables: dict[int, tuple[int, ...]]) -> Any:
    """Return the grid mapping for one part of the grid, on shards.

    - `parts`: grid dim -> number of its parts.
    - `shards`: abstract values of the operands and results of one device.
    - `tables`: number of a table -> its shape on one device.
    """
    grid = tuple(size // parts.get(dim, 1) for dim, size in enumerate(mapping.grid))
    first = len(grid)
    blocks = [
        block.replace(
            array_aval=shard,
            index_map_jaxpr=block.index_map_jaxpr.replace(
                jaxpr=with_tables(block.index_map_jaxpr.jaxpr, first, tables)
            ),
        )
        for block, shard in zip(mapping.block_mappings, shards, strict=True)
    ]
    avals = list(mapping.index_map_avals)
    for number, shape in tables.items():
        old = avals[first + number]
        avals[first + number] = old.update(inner_aval=old.inner_aval.update(shape=shape))
    return mapping.replace(grid=grid, block_mappings=tuple(blocks), index_map_avals=tuple(avals))


def _axes_of(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes of one entry of a spec, a name, a tuple or None."""
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


def _spec_axes(spec: Any) -> tuple[str, ...]:
    """Return all mesh axes of a spec."""
    return tuple(axis for entry in spec for axis in _axes_of(entry))


def _shard(shape: Sequence[int], spec: Any, mesh: Any) -> tuple[int, ...]:
    """Return the shape of one device's shard."""
    entries = (*spec, *[None] * (len(shape) - len(spec)))
    return tuple(
        size // math.prod(mesh.shape[axis] for axis in _axes_of(entry))
        for size, entry in zip(shape, entries, strict=True)
    )


def _traffic(mapping: Any) -> int:
    """Return the bytes that blocks move: a block moves whenever its index changes from one grid step to the next.

    The index changes with each step of the last grid dim that it depends on, and of all earlier ones. Steps that a mask
    skips count too.
    """
    total = 0
    for block in mapping.block_mappings:
        sizes = [_elements(b) for b in block.block_shape]
        size = math.prod(s if s is not None else full for s, full in zip(sizes, block.array_aval.shape, strict=True))
        jaxpr = block.index_map_jaxpr.jaxpr
        last = max((d for v in jaxpr.outvars for d in reach(jaxpr, v, len(mapping.grid), True)), default=-1)
        steps = math.prod(n for n in mapping.grid[: last + 1] if isinstance(n, int))
        total += size * steps * block.array_aval.dtype.itemsize
    return total
