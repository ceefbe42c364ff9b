"""What may be split in a Pallas kernel, read from its grid.

A grid dim may be split over devices if every operand and result either does not depend on it, or follows it alone in
one dim, block by block or group of steps by group of steps, and the kernel does not ask where in it it stands but to
look that up in a table (a mask's) that is split with it. Then a device that runs its part of the grid on its shards
does what the whole would have done there. That finds batch, heads (grouped ones by the heads of keys that they share)
and queries of attention kernels, forward and backward (`jax.experimental.pallas.ops.tpu.flash_attention`,
`splash_attention`), and rows and columns of matmul kernels.
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
    APART,
    Along,
    GridRange,
    Request,
    Tables,
    follow,
    kernel_asks,
    map_tables,
    reach,
    table_along,
    with_ends,
    with_tables,
)


SCRATCH_RESULTS = ("splash_mha_", "splash_mqa_")
"""Beginnings of names of kernels whose results may be scratch memory that nobody reads (jax's splash attention)."""

SUMS = ("splash_mha_dkv", "splash_mqa_dkv")
"""Beginnings of names of kernels that write sums over the steps between the first and the last of a period."""


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """A grid dim that may be split: whole groups of steps, and then, if `inside`, the steps of each."""

    dim: int
    groups: int
    steps: int
    """Steps of the grid in one group."""
    inside: bool
    summed: bool
    """True if results are sums over the steps of a group."""
    sloping: bool
    """True if the work grows evenly along it, from next to none (a causal mask)."""


@dataclasses.dataclass(frozen=True, slots=True)
class PallasCall:
    """One kernel call and what its grid says."""

    name: str
    params: dict[str, Any]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    along: tuple[dict[int, Along | None], ...]
    """For each operand, then result, how it follows each grid dim."""
    splits: tuple[Split, ...]
    flops: int
    traffic: int
    dtype: str
    """The dtype in which most of its FLOPs multiply; empty if it has no matmul."""
    steps: int
    """Steps of the grid, without those that a mask skips."""

    @classmethod
    def of(cls, operands: Sequence[Any], results: Sequence[Any], params: dict[str, Any]) -> "PallasCall":
        mapping = params["grid_mapping"]
        name = kernel_name(params)
        first = len(operands) - mapping.num_inputs
        tables: Tables = {}
        asked = kernel_asks(params["jaxpr"], _own(mapping), mapping.grid, mapping.num_index_operands, tables)
        for block in mapping.block_mappings:
            map_tables(block.index_map_jaxpr.jaxpr, len(mapping.grid), tables)
        along: list[dict[int, Along | None]] = [{} for _ in range(first)]
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
                found = _split(name, mapping, along, dim, size, asked)
                masked = along[1].get(dim) if share < 1.0 else None
                splits += [dataclasses.replace(found, sloping=masked not in (None, APART))] if found else []
        estimate = params.get("cost_estimate")
        products, some = step_products(params["jaxpr"], [mapping.grid[dim] for dim in _own(mapping)])
        every = sum(products.values())
        runs = sum(some.values()) / every if every else 1.0
        steps = math.prod(size for size in mapping.grid if isinstance(size, int)) * share * runs
        # A kernel's own figure is often that of the whole, as if it left nothing out.
        flops = int(estimate.flops) if estimate is not None and runs == 1.0 else int(every * steps)
        dtype = max(products, key=lambda each: products[each]) if products else ""
        return cls(
            name, params, tuple(operands), tuple(results), tuple(along), tuple(splits), flops, _traffic(mapping), dtype,
            int(steps),
        )  # fmt: skip

    @property
    def rule(self) -> tuple[list[int], list[str], list[Any], list[Any]]:
        """(sizes, kinds, operands, results) of the sharding rule: dims that the grid does not split stay whole."""
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
    def sloping(self) -> dict[int, int]:
        """Factor of the rule along which the work grows evenly -> blocks of it."""
        found, factor = {}, 0
        for split in self.splits:
            for count in (split.groups, split.steps if split.inside else 1):
                if count > 1:
                    found |= {factor: count} if split.sloping else {}
                    factor += 1
        return found

    def on_shards(self, mesh: Any, into: Sequence[Any], out: Sequence[Any]) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """The kernel on the part of the grid that shards with these specs need."""
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

            found = primitive.bind(*values, **params)
            return [jax.lax.psum(each, over) if over else each for each, over in zip(found, sums, strict=True)]

        return functools.partial(primitive.bind, **params) if not any(sums) else fn, into, out

    def _axes(self, dim: int, specs: Sequence[Any]) -> tuple[str, ...]:
        """Mesh axes that split a grid dim: those of whatever follows it most closely."""
        found: tuple[str, ...] = ()
        for along, spec in zip(self.along, specs, strict=True):
            each = along.get(dim)
            if each is not None and 0 <= each.dim < len(spec):
                found = max(found, _axes_of(spec[each.dim]), key=len)
        return found

    def _real(self, result: int) -> bool:
        """False for a result that is scratch memory."""
        return not _is_scratch(self.name, self.params["grid_mapping"], self.along[len(self.operands) + result])

    def _cost(self, parts: dict[int, int]) -> Any:
        """What the compiler, and whoever reads its program, is told of one part: the author's figures, or ours.

        Of parts that do not have the same work that with the most.
        """
        from jax.experimental.pallas import CostEstimate

        given = self.params.get("cost_estimate")
        whole = given or CostEstimate(flops=0, transcendentals=0, bytes_accessed=self.traffic)
        whole = dataclasses.replace(whole, flops=self.flops)
        counts = ("flops", "transcendentals", "bytes_accessed")
        count, most = math.prod(parts.values()), 1.0
        for split in self.splits:
            if split.sloping:
                most *= most_of_slope(parts[split.dim], split.groups * split.steps)
        most = {"flops": most, "transcendentals": most}
        return dataclasses.replace(
            whole, **{key: int(getattr(whole, key) * most.get(key, 1.0)) // count for key in counts}
        )


def most_of_slope(parts: int, blocks: int) -> float:
    """Work of the part with the most over the mean, where block k of n has the work k: all wait for it."""
    return (2.0 - 1.0 / parts + 1.0 / blocks) / (1.0 + 1.0 / blocks)


def masked_share(name: str, operands: Sequence[Any], mapping: Any) -> float:
    """Return the share of the grid's steps that a kernel runs: jax's splash attention skips blocks that are masked.

    Its second operand says which, `[heads, rows, columns]`. The values are known on the device only, but a mask comes
    with positions of its queries or with blocks of its own, and a grid that is not cut to a window's width is then that
    of a causal mask.
    """
    if not name.startswith(SCRATCH_RESULTS) or len(operands) < 2:
        return 1.0
    table, first = operands[1], len(operands) - mapping.num_inputs
    if len(table.shape) != 3 or table.dtype.kind != "i":
        return 1.0
    marks = [operand.dtype.name for operand in operands[first:] if operand.dtype.kind in "iub"]
    if set(marks) <= {"int32"} and len(marks) % 2 == 0:  # none, or ids of segments, of queries and of keys
        return 1.0
    lengths, sides = [], []
    for number, operand in list(enumerate(operands))[first:]:
        if operand.dtype.kind not in "iu" and len(lengths) < 2:  # queries and keys come first of what is no table
            block = mapping.block_mappings[number - first].block_shape
            lengths.append(operand.shape[-2])
            sides.append(_elements(block[-2]))
    if len(sides) < 2 or not all(sides) or [n // b for n, b in zip(lengths, sides, strict=True)] != [*table.shape[1:]]:
        return 1.0
    return computed_share(*lengths, causal=True, window=None, block=(sides[0], sides[1]))


def kernel_name(params: dict[str, Any]) -> str:
    """The kernel's own name: what was given to `pallas_call`, else the kernel function's."""
    return params.get("name") or getattr(params["jaxpr"].debug_info, "func_name", "") or "pallas_call"


def _own(mapping: Any) -> list[int]:
    """Grid dims as the kernel counts them, without those that vmap added."""
    return [dim for dim in range(len(mapping.grid)) if dim not in mapping.vmapped_dims]


def _along(block: Any, grid: Sequence[Any]) -> dict[int, Along | None]:
    """How one operand or result follows each grid dim."""
    jaxpr = block.index_map_jaxpr.jaxpr
    found: dict[int, Along | None] = {dim: APART for dim in range(len(grid))}
    for d, variable in enumerate(jaxpr.outvars):
        size = _elements(block.block_shape[d])
        full = block.array_aval.shape[d]
        blocks = full // size if size and full % size == 0 else None
        for dim, pattern in follow(jaxpr, variable, grid, blocks).items():
            if pattern is None or found[dim] is not APART:
                found[dim] = None
            else:
                period, within = pattern
                found[dim] = Along(d if period > 0 else -1, abs(period), within)
    return found


def _is_scratch(name: str, mapping: Any, along: dict[int, Along | None]) -> bool:
    alike = all(each is APART for dim, each in along.items() if dim not in mapping.vmapped_dims)
    return name.startswith(SCRATCH_RESULTS) and alike


def _split(
    name: str, mapping: Any, along: Sequence[dict[int, Along | None]], dim: int, size: int, asked: Request
) -> Split | None:
    """How a grid dim may be split; None if not at all."""
    each = [found.get(dim, APART) for found in along]
    if dim in asked.steps or any(a is None for a in each):
        return None
    known = [a for a in each if a is not None]
    of_results = [
        a for a, found in zip(known[-mapping.num_outputs :], along[-mapping.num_outputs :], strict=True)
        if not _is_scratch(name, mapping, found)
    ]  # fmt: skip
    periods, ends = asked.periods.get(dim, frozenset()), asked.ends.get(dim, frozenset())
    steps = math.lcm(*(a.period for a in known), *periods, *ends)
    if any(a.dim < 0 for a in of_results):
        steps = size  # written again and again: a sum, or whatever came last
    summed = any(a.inside(steps) is GridRange.SAME for a in of_results)
    inside = steps > 1 and not periods and all(a.inside(steps) is not GridRange.MIXED for a in known)
    inside = inside and ends == ({steps} if summed else set())
    if summed:
        inside = inside and name.startswith(SUMS) and all(a.inside(steps) is GridRange.SAME for a in of_results)
    if steps == size and not inside:
        return None
    return Split(dim, size // steps, steps, inside, summed and inside, False)


def _elements(block: Any) -> int | None:
    if block is None or type(block).__name__ == "Squeezed":
        return 1
    if isinstance(block, int):
        return block
    return block.block_size if type(block).__name__ == "Blocked" else None


def _on_parts(mapping: Any, parts: dict[int, int], shards: Sequence[Any], tables: dict[int, tuple[int, ...]]) -> Any:
    """A grid mapping for one part of the grid, on shards."""
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
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


def _spec_axes(spec: Any) -> tuple[str, ...]:
    return tuple(axis for entry in spec for axis in _axes_of(entry))


def _shard(shape: Sequence[int], spec: Any, mesh: Any) -> tuple[int, ...]:
    """Shape of one device's shard."""
    entries = (*spec, *[None] * (len(shape) - len(spec)))
    return tuple(
        size // math.prod(mesh.shape[axis] for axis in _axes_of(entry))
        for size, entry in zip(shape, entries, strict=True)
    )


def _traffic(mapping: Any) -> int:
    """Bytes that blocks bring and take: one is moved whenever its index changes from one grid step to the next."""
    total = 0
    for block in mapping.block_mappings:
        sizes = [_elements(b) for b in block.block_shape]
        size = math.prod(s if s is not None else full for s, full in zip(sizes, block.array_aval.shape, strict=True))
        jaxpr = block.index_map_jaxpr.jaxpr
        last = max((d for v in jaxpr.outvars for d in reach(jaxpr, v, len(mapping.grid), True)), default=-1)
        steps = math.prod(n for n in mapping.grid[: last + 1] if isinstance(n, int))
        total += size * steps * block.array_aval.dtype.itemsize
    return total
