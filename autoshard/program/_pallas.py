"""What may be split in a Pallas kernel, read from its grid.

A grid dim may be split over devices if every operand and result either does not depend on it, or is indexed by it
alone in one dim, block by block, and the kernel never asks where in it it stands. Then a device that runs its part of
the grid on its shards does what the whole would have done there. That finds batch and heads of attention kernels,
forward and backward (`jax.experimental.pallas.ops.tpu.flash_attention`, `splash_attention`), and rows and columns of
matmul kernels.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any


SCRATCH_RESULTS = ("splash_mha_", "splash_mqa_")
"""Beginnings of names of kernels whose results may be scratch memory that nobody reads (jax's splash attention)."""


@dataclasses.dataclass(frozen=True, slots=True)
class PallasCall:
    """One kernel call and what its grid says."""

    name: str
    params: dict[str, Any]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    where: tuple[dict[int, int], ...]
    """For each operand, then result: grid dim that may be split -> the dim that it indexes."""
    splits: tuple[int, ...]
    """Grid dims that may be split."""
    blocks: dict[int, int]
    """Elements of one block along each of them."""
    flops: int
    traffic: int

    @classmethod
    def of(cls, operands: Sequence[Any], results: Sequence[Any], params: dict[str, Any]) -> "PallasCall":
        mapping = params["grid_mapping"]
        name = kernel_name(params)
        first = len(operands) - mapping.num_inputs
        depends = [_depends(block, len(mapping.grid)) for block in mapping.block_mappings]
        asked = _asked(params["jaxpr"], mapping)
        splits, blocks = [], {}
        for dim, size in enumerate(mapping.grid):
            free = isinstance(size, int) and size > 1 and dim not in asked
            block = _block(mapping, depends, dim, name) if free else None
            if block is not None:
                splits.append(dim)
                blocks[dim] = block
        where: list[dict[int, int]] = [{} for _ in range(first)]
        for each in depends:
            where.append({dim: each[dim][0] for dim in splits if each.get(dim)})
        steps = math.prod(size for size in mapping.grid if isinstance(size, int))
        estimate = params.get("cost_estimate")
        steps *= masked_share(name, operands)
        flops = int(estimate.flops) if estimate is not None else int(_flops(params["jaxpr"]) * steps)
        return cls(
            name, params, tuple(operands), tuple(results), tuple(where), tuple(splits), blocks, flops,
            _traffic(mapping, depends),
        )  # fmt: skip

    @property
    def rule(self) -> tuple[list[int], list[str], list[Any], list[Any]]:
        """(sizes, kinds, operands, results) of the sharding rule: dims that the grid does not split stay whole."""
        grid = self.params["grid_mapping"].grid
        sizes = [grid[dim] for dim in self.splits]
        kinds = ["parallel"] * len(sizes)
        inner = {self.splits.index(dim): -1 for dim in self.splits}
        tensors = []
        for leaf, where in zip((*self.operands, *self.results), self.where, strict=True):
            at = {d: self.splits.index(dim) for dim, d in where.items()}
            dims = []
            for d, size in enumerate(leaf.shape):
                if d not in at:
                    dims.append((len(sizes),))
                    sizes.append(size)
                    kinds.append("need_replication")
                    continue
                factor = at[d]
                block = self.blocks[self.splits[factor]]
                if block > 1 and inner[factor] < 0:
                    inner[factor] = len(sizes)
                    sizes.append(block)
                    kinds.append("need_replication")
                dims.append((factor, inner[factor]) if block > 1 else (factor,))
            tensors.append(dims)
        count = len(self.operands)
        return sizes, kinds, tensors[:count], tensors[count:]

    def on_shards(self, mesh: Any, into: Sequence[Any], out: Sequence[Any]) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """The kernel on the part of the grid that shards with these specs need."""
        parts = dict.fromkeys(self.splits, 1)
        for spec, where in zip((*into, *out), self.where, strict=True):
            for dim, d in where.items():
                entry = spec[d] if d < len(spec) else None
                axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
                parts[dim] = max(parts[dim], math.prod(mesh.shape[axis] for axis in axes))
        mapping = self.params["grid_mapping"]
        grid = tuple(size // parts.get(dim, 1) for dim, size in enumerate(mapping.grid))
        first = len(self.operands) - mapping.num_inputs
        blocks = [
            block.replace(array_aval=_cut(block.array_aval, where, parts))
            for block, where in zip(mapping.block_mappings, self.where[first:], strict=True)
        ]
        outer = self.where[len(self.operands) :]
        shards = tuple(_cut(aval, where, parts) for aval, where in zip(self.params["out_avals"], outer, strict=True))
        params = self.params | {
            "grid_mapping": mapping.replace(grid=grid, block_mappings=tuple(blocks)),
            "out_avals": shards,
            "cost_estimate": self._cost(math.prod(parts.values())),
        }
        primitive = importlib.import_module("jax._src.pallas.pallas_call").pallas_call_p
        return functools.partial(primitive.bind, **params), into, out

    def _cost(self, parts: int) -> Any:
        """What the compiler, and whoever reads its program, is told of one part: the author's figures, or ours."""
        from jax.experimental.pallas import CostEstimate

        given = self.params.get("cost_estimate")
        whole = given or CostEstimate(flops=self.flops, transcendentals=0, bytes_accessed=self.traffic)
        counts = ("flops", "transcendentals", "bytes_accessed")
        return dataclasses.replace(whole, **{key: getattr(whole, key) // parts for key in counts})


def masked_share(name: str, operands: Sequence[Any]) -> float:
    """Share of the grid's steps that a kernel runs: those of jax's splash attention skip blocks that are masked.

    Its second operand says which, `[heads, rows, columns]`. The values are known on the device only, but a grid that
    was not cut to a window's width is that of a causal mask: of n x n blocks the n (n + 1) / 2 up to the diagonal.
    """
    if not name.startswith(SCRATCH_RESULTS) or len(operands) < 2:
        return 1.0
    blocks = operands[1]
    whole = len(blocks.shape) == 3 and blocks.dtype.kind == "i" and blocks.shape[1] == blocks.shape[2]
    return (1.0 + 1.0 / blocks.shape[1]) / 2.0 if whole else 1.0


def kernel_name(params: dict[str, Any]) -> str:
    """The kernel's own name: what was given to `pallas_call`, else the kernel function's."""
    return params.get("name") or getattr(params["jaxpr"].debug_info, "func_name", "") or "pallas_call"


def _depends(block: Any, dims: int) -> dict[int, tuple[int, bool]]:
    """Grid dim -> (the dim of the array that it indexes, whether it does so alone and only there)."""
    jaxpr = block.index_map_jaxpr.jaxpr
    found: dict[int, tuple[int, bool]] = {}
    for d, variable in enumerate(jaxpr.outvars):
        for grid in _reach(jaxpr, variable, dims):
            alone = variable is jaxpr.invars[grid] and grid not in found
            found[grid] = (d, alone)
    return found


def _reach(jaxpr: Any, variable: Any, dims: int) -> set[int]:
    """Which of the first `dims` inputs an output is computed from."""
    made = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
    waiting, seen, found = [variable], set(), set()
    while waiting:
        each = waiting.pop()
        if hasattr(each, "val") or each in seen:
            continue
        seen.add(each)
        if each in jaxpr.invars[:dims]:
            found.add(jaxpr.invars.index(each))
        if each in made:
            waiting.extend(made[each].invars)
    return found


def _asked(jaxpr: Any, mapping: Any) -> set[int]:
    """Grid dims whose place or extent the kernel asks for; it counts without the dims that vmap added."""
    own = [dim for dim in range(len(mapping.grid)) if dim not in mapping.vmapped_dims]
    names = ("program_id", "num_programs")
    return {own[e.params["axis"]] for e in _equations(jaxpr) if e.primitive.name in names}


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for each in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(each, "jaxpr", each)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def _block(mapping: Any, depends: Sequence[dict[int, tuple[int, bool]]], dim: int, name: str) -> int | None:
    """Elements of a block along a grid dim that may be split; None if it may not."""
    sizes = set()
    for number, (block, each) in enumerate(zip(mapping.block_mappings, depends, strict=True)):
        if dim not in each:
            if number >= mapping.num_inputs and not name.startswith(SCRATCH_RESULTS):
                return None  # written again and again: a sum, or whatever came last
            continue
        d, alone = each[dim]
        size = _elements(block.block_shape[d])
        if not alone or size is None or size * mapping.grid[dim] != block.array_aval.shape[d]:
            return None
        sizes.add(size)
    return sizes.pop() if len(sizes) == 1 else None


def _elements(block: Any) -> int | None:
    if block is None or type(block).__name__ == "Squeezed":
        return 1
    if isinstance(block, int):
        return block
    return block.block_size if type(block).__name__ == "Blocked" else None


def _cut(aval: Any, where: dict[int, int], parts: dict[int, int]) -> Any:
    shape = list(aval.shape)
    for dim, d in where.items():
        shape[d] //= parts[dim]
    return aval.update(shape=tuple(shape))


def _flops(jaxpr: Any) -> int:
    """Matrix flops of one step of the grid; every branch counts."""
    total = 0
    for equation in _equations(jaxpr):
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[d] for d in contracted)
    return total


def _traffic(mapping: Any, depends: Sequence[dict[int, tuple[int, bool]]]) -> int:
    """Bytes that blocks bring and take: one is moved whenever its index changes from one grid step to the next."""
    total = 0
    for block, each in zip(mapping.block_mappings, depends, strict=True):
        sizes = [_elements(b) for b in block.block_shape]
        size = math.prod(s if s is not None else full for s, full in zip(sizes, block.array_aval.shape, strict=True))
        last = max(each, default=-1)
        steps = math.prod(n for n in mapping.grid[: last + 1] if isinstance(n, int))
        total += size * steps * block.array_aval.dtype.itemsize
    return total
