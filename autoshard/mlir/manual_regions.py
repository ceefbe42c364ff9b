"""Windowed ops as manual regions: shards exchange halos of dims that are split in space, then each computes alone.

The partitioner can do this itself, but it computes wrong values on some meshes, by summing over too many axes.
Evidence: docs/compiler_behaviour.md, "Windowed ops and idle mesh axes".
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from autoshard.errors import UserError
from autoshard.mlir.annotations import SpecLike, ensure_mesh, sharding_attribute
from autoshard.mlir.canonical_ops import identity_of_selection
from autoshard.mlir.module import collect, numbers_of, pairs_of
from autoshard.mlir.numbering import number_ops
from autoshard.mlir.op_windows import WindowedDim, convolution_dims, windowed_dims


class RegionLike(Protocol):
    """Interface of a region for `insert_regions`; `autoshard.planning.Region` implements it.

    - `op`: number of the op.
    - `operands`, `results`: specs of the op's operands and results.
    - `summed`: mesh axes along which each device has a partial result; empty for none.
    """

    @property
    def op(self) -> int: ...
    @property
    def operands(self) -> Sequence[SpecLike]: ...
    @property
    def results(self) -> Sequence[SpecLike]: ...
    @property
    def summed(self) -> tuple[str, ...]: ...


def regions_of(module: Any, regions: Sequence[RegionLike]) -> list[tuple[Any, RegionLike]]:
    """Return (op, region) for each region, in order; call it before anything is inserted, since regions name ops by
    number.

    Raises `UserError` if the module has no such op, or if it has another number of operands.
    """
    if not regions:
        return []
    ops = number_ops(module)
    for region in regions:
        kind = ops[region.op].name.rpartition(".")[2] if region.op < len(ops) else "nothing"
        if kind == "nothing" or len(ops[region.op].operands) != len(region.operands):
            raise UserError(
                f"the plan runs op {region.op} shard by shard, which is {kind} here: the plan belongs to another "
                "program."
            )
    return [(ops[region.op], region) for region in regions]


def insert_regions(
    module: Any, mesh_name: str, sizes: Mapping[str, int], found: Sequence[tuple[Any, RegionLike]]
) -> int:
    """Replace every op of `regions_of` by a manual region over all mesh axes (in place); return the number of ops.

    - `mesh_name`: name for the mesh if the module has none with these axes.
    - `sizes`: mesh axes with their sizes.
    - `found`: the ops with their regions.

    Collectives inside get channel numbers that the module does not use.
    """
    if not found:
        return 0
    name = ensure_mesh(module, mesh_name, sizes)
    channels = itertools.count(1 + _last_channel(module))
    with module.context:
        for op, region in found:
            _Splitter(op, region, name, sizes, channels).replace()
    return len(found)


def _last_channel(module: Any) -> int:
    """Return the largest channel number of the module's collectives; 0 if there is none."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    names = ("all_gather", "all_reduce", "all_to_all", "collective_broadcast", "collective_permute", "reduce_scatter")
    used = [0]
    for op in collect(module.operation, {f"stablehlo.{name}" for name in names}):
        if "channel_handle" in op.attributes:
            used.append(stablehlo.ChannelHandle(ir.Attribute(op.attributes["channel_handle"])).handle)
    return max(used)


@dataclasses.dataclass(slots=True)
class _Splitter:
    """One op, its region, and the mesh and channel numbers that the manual region is built with."""

    op: Any
    """Op that is replaced."""
    region: RegionLike
    """Specs of its operands and results."""
    mesh_name: str
    """Name of the mesh in the module."""
    sizes: Mapping[str, int]
    """Mesh axes with their sizes."""
    channels: Any
    """Iterator of channel numbers that the module does not use."""

    def replace(self) -> None:
        """Replace the op by a manual region (in place).

        Partial results are stacked in a new leading dim, split over the summed axes, and summed outside of the region.
        """
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import sdy, stablehlo

        operands, specs = list(self.op.operands), [spec.dims for spec in self.region.operands]
        results, out = [r.type for r in self.op.results], [spec.dims for spec in self.region.results]
        parts = self.count(self.region.summed)
        stacked = results
        if self.region.summed:
            out = [(self.region.summed, *dims) for dims in out]
            with self.op.location:
                stacked = [ir.RankedTensorType.get([parts, *_shape(t)], _element(t)) for t in results]
        dims = [d for d in self.dims() if self.count(specs[0][d.source]) > 1]
        with self.op.location, ir.InsertionPoint(self.op):
            # The position of a shard among its neighbours is an operand, split like the dim.
            places = {}
            for dim in dims:
                if (dim.before or dim.after) and self.filled():
                    axes = specs[0][dim.source]
                    places[dim.source] = len(operands)
                    kind = ir.RankedTensorType.get([self.count(axes)], ir.IntegerType.get_signless(32))
                    operands.append(stablehlo.iota(kind, 0))
                    specs.append((axes,))
            manual = sdy.ManualComputationOp(
                stacked,
                operands,
                sdy.TensorShardingPerValueAttr.get([sharding_attribute(self.mesh_name, s) for s in specs]),
                sdy.TensorShardingPerValueAttr.get([sharding_attribute(self.mesh_name, s) for s in out]),
                sdy.ManualAxesAttr.get([ir.StringAttr.get(axis) for axis in self.sizes]),
            )
            local = [self.local_type(v.type, s) for v, s in zip(operands, specs, strict=True)]
            block = manual.regions[0].blocks.append(*local)
            with ir.InsertionPoint(block):
                values = self.body(list(block.arguments), dims, places, [s.dims for s in self.region.results])
                if self.region.summed:
                    values = [
                        stablehlo.reshape(self.local_type(t, s), v)
                        for v, t, s in zip(values, stacked, out, strict=True)
                    ]
                sdy.ReturnOp(values)
            new = list(manual.results)
            if self.region.summed:
                new = [_sum_of_parts(value, kind) for value, kind in zip(new, results, strict=True)]
        for old, value in zip(list(self.op.results), new, strict=True):
            old.replace_all_uses_with(value)
        self.op.erase()

    def dims(self) -> list[WindowedDim]:
        """Return the dims of the op that can be split in space, split or not."""
        kind = self.op.name.rpartition(".")[2]
        shapes = [_shape(v.type) for v in self.op.operands]
        return windowed_dims(kind, self.op.attributes, shapes, _shape(self.op.results[0].type))

    def filled(self) -> bool:
        """Return True if elements beyond the edges may differ from the zeros that a permute leaves there: for all but
        convolutions.
        """
        return self.op.name != "stablehlo.convolution"

    def count(self, axes: Sequence[str]) -> int:
        """Return the number of shards along some axes: the product of their sizes, 1 for none."""
        return math.prod(self.sizes[axis] for axis in axes)

    def local_type(self, kind: Any, dims: Sequence[Sequence[str]]) -> Any:
        """Return the type of a shard of a tensor of type `kind` whose dims are split by the axes `dims`."""
        from jaxlib.mlir import ir

        shape = [size // self.count(axes) for size, axes in zip(_shape(kind), dims, strict=True)]
        return ir.RankedTensorType.get(shape, _element(kind))

    def body(self, values: list[Any], dims: list[WindowedDim], places: dict[int, int], out: list[Any]) -> list[Any]:
        """Emit the op on one shard, and return its results without halos.

        - `values`: the shards of the op's operands, then the positions in `places`.
        - `dims`: the dims that are split in space. Halos are exchanged dim after dim, so that corners are included.
        - `places`: index in `values` of the shard's position along a dim.
        - `out`: axes of each dim of each result.
        """
        specs = self.region.operands
        windowed = len(self.op.results) if self.op.name == "stablehlo.reduce_window" else 1
        fills = self.fills(values)
        inputs = values[: len(self.op.operands)]
        for dim in dims:
            for k in range(windowed):
                place = values[places[dim.source]] if dim.source in places else None
                inputs[k] = self.extended(inputs[k], dim, specs[0].dims[dim.source], fills[k], place)
        new = self.op.clone()
        for k, value in enumerate(inputs):
            new.operands[k] = value
        self.set_window(new, dims)
        scatter = self.op.name == "stablehlo.select_and_scatter"
        for result, old, spec in zip(new.results, self.op.results, out, strict=True):
            result.set_type(inputs[0].type if scatter else self.local_type(old.type, spec))
        if not scatter:
            return list(new.results)
        result = new.results[0]
        for dim in reversed(dims):
            result = self.returned(result, dim, specs[0].dims[dim.source])
        return [result]

    def fills(self, values: list[Any]) -> list[Any]:
        """Return the scalar beyond the edges of each windowed operand; [None] if the zeros of a permute are right."""
        kind = self.op.name
        if kind == "stablehlo.reduce_window":
            return values[len(self.op.results) : len(self.op.operands)]
        if kind == "stablehlo.pad":
            return values[1:2]
        if kind == "stablehlo.select_and_scatter":
            return [identity_of_selection(self.op)]
        return [None]

    def extended(self, value: Any, dim: WindowedDim, axes: Sequence[str], fill: Any, place: Any) -> Any:
        """Return a shard extended by its halo along one dim.

        - `value`: the shard.
        - `dim`: the dim, which has the widths of the halo.
        - `axes`: mesh axes that split the dim.
        - `fill`: scalar beyond the edges, or None.
        - `place`: the shard's position along the dim, or None.
        """
        from jaxlib.mlir.dialects import stablehlo

        size, pieces = _shape(value.type)[dim.source], [value]
        if dim.before:
            halo = self.shifted(_cut(value, dim.source, size - dim.before, size), axes, 1)
            pieces.insert(0, self.at_edge(halo, fill, place, 0))
        if dim.after:
            halo = self.shifted(_cut(value, dim.source, 0, dim.after), axes, -1)
            pieces.append(self.at_edge(halo, fill, place, self.count(axes) - 1))
        return stablehlo.concatenate(pieces, dim.source) if len(pieces) > 1 else value

    def returned(self, value: Any, dim: WindowedDim, axes: Sequence[str]) -> Any:
        """Return a shard of a select_and_scatter's result without its halos, plus what the neighbours scattered into
        theirs.

        - `value`: the shard with its halos.
        - `dim`, `axes`: the dim, and the mesh axes that split it.
        """
        from jaxlib.mlir.dialects import stablehlo

        own = _shape(value.type)[dim.source] - dim.before - dim.after
        total = _cut(value, dim.source, dim.before, dim.before + own)
        if dim.before:
            part = self.shifted(_cut(value, dim.source, 0, dim.before), axes, -1)
            total = stablehlo.add(total, _padded(part, dim.source, own - dim.before, 0))
        if dim.after:
            part = self.shifted(_cut(value, dim.source, own + dim.before, own + dim.before + dim.after), axes, 1)
            total = stablehlo.add(total, _padded(part, dim.source, 0, own - dim.after))
        return total

    def at_edge(self, halo: Any, fill: Any, place: Any, edge: int) -> Any:
        """Return the halo, replaced by the scalar `fill` on the shard at position `edge`, which has no neighbour there.

        Without `fill` or `place` (the shard's position) the halo is returned unchanged.
        """
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import stablehlo

        if fill is None or place is None:
            return halo
        shape = _shape(halo.type)
        number = stablehlo.constant(ir.DenseElementsAttr.get(_int32([edge])))
        here = stablehlo.compare(place, number, stablehlo.ComparisonDirectionAttr.get("EQ"))
        here = stablehlo.reshape(ir.RankedTensorType.get([], _element(here.type)), here)
        everywhere = ir.RankedTensorType.get(shape, _element(here.type))
        mask = stablehlo.broadcast_in_dim(everywhere, here, [])
        return stablehlo.select(mask, stablehlo.broadcast_in_dim(halo.type, fill, []), halo)

    def shifted(self, value: Any, axes: Sequence[str], step: int) -> Any:
        """Emit a permute that fetches `value` from the shard `step` places before along mesh axes (major first).

        Shards without such a neighbour receive zeros; a negative step fetches from behind.
        """
        from jaxlib.mlir.dialects import stablehlo

        channel = stablehlo.ChannelHandle.get(next(self.channels), 1)
        pairs = shift_pairs(self.sizes, axes, step)
        return stablehlo.collective_permute(value, _int64(pairs), channel_handle=channel)

    def set_window(self, new: Any, dims: list[WindowedDim]) -> None:
        """Set the window attributes of the op `new` on one shard, and the groups of a convolution; `dims` are split in
        space.
        """
        from jaxlib.mlir import ir

        kind = self.op.name.rpartition(".")[2]
        shards = {d.source: self.count(self.region.operands[0].dims[d.source]) for d in dims}
        local = {d.source: d.local(shards[d.source]) for d in dims}
        if kind == "fft":
            return
        if kind == "slice":
            self.set_slice(new, local)
        elif kind == "pad":
            for side in ("low", "high"):
                key = f"edge_padding_{side}"
                edges = numbers_of(self.op.attributes[key])
                for dim, window in local.items():
                    edges[dim] = window.low if side == "low" else window.high
                new.attributes[key] = ir.DenseI64ArrayAttr.get(edges)
        else:
            order = list(range(len(_shape(new.operands[0].type))))
            if kind == "convolution":
                order, _, _ = convolution_dims(self.op.attributes)
            pads = [[0, 0] for _ in order]
            if "padding" in self.op.attributes:
                pads = pairs_of(self.op.attributes["padding"])
            for dim, window in local.items():
                pads[order.index(dim)] = [window.low, window.high]
            new.attributes["padding"] = ir.DenseIntElementsAttr.get(_int64(pads))
        if kind == "convolution":
            self.set_groups(new)

    def set_slice(self, new: Any, local: dict[int, Any]) -> None:
        """Set starts and limits of a slice on one shard; `local` has the window of each dim that is split in space.

        A dim that is split otherwise is read whole.
        """
        from jaxlib.mlir import ir

        starts, limits, strides = (
            numbers_of(self.op.attributes[key]) for key in ("start_indices", "limit_indices", "strides")
        )
        shape, out = _shape(new.operands[0].type), self.region.results[0].dims
        for dim, size in enumerate(_shape(self.op.results[0].type)):
            if dim in local:
                starts[dim] = -local[dim].low
                limits[dim] = starts[dim] + (size // self.count(out[dim]) - 1) * strides[dim] + 1
            elif out[dim]:
                limits[dim] = shape[dim]
        new.attributes["start_indices"] = ir.DenseI64ArrayAttr.get(starts)
        new.attributes["limit_indices"] = ir.DenseI64ArrayAttr.get(limits)

    def set_groups(self, new: Any) -> None:
        """Divide the groups of a convolution by the shards of its features, or of its batch; a count of 1 stays."""
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import stablehlo

        numbers = stablehlo.ConvDimensionNumbers(self.op.attributes["dimension_numbers"])
        for key, dim in (
            ("feature_group_count", numbers.input_feature_dimension),
            ("batch_group_count", numbers.input_batch_dimension),
        ):
            groups = ir.IntegerAttr(self.op.attributes[key])
            shards = self.count(self.region.operands[0].dims[dim])
            if groups.value > 1:
                new.attributes[key] = ir.IntegerAttr.get(groups.type, groups.value // shards)


def shift_pairs(sizes: Mapping[str, int], axes: Sequence[str], step: int) -> list[tuple[int, int]]:
    """Return (source, target) devices, by position in the mesh, of a shift by `step` places along `axes` (major first).

    `sizes` are the mesh axes with their sizes. Shards do not wrap around: devices at the end are no sources. A negative
    step shifts backwards. The pairs are sorted.
    """
    names = list(sizes)
    strides = {name: math.prod(list(sizes.values())[k + 1 :]) for k, name in enumerate(names)}
    others = [name for name in names if name not in axes]
    pairs = []
    for rest in itertools.product(*(range(sizes[name]) for name in others)):
        base = sum(strides[name] * n for name, n in zip(others, rest, strict=True))
        line = [
            base + sum(strides[axis] * n for axis, n in zip(axes, where, strict=True))
            for where in itertools.product(*(range(sizes[axis]) for axis in axes))
        ]
        pairs += zip(line, line[step:], strict=False) if step > 0 else zip(line[-step:], line, strict=False)
    return sorted(pairs)


def _sum_of_parts(value: Any, kind: Any) -> Any:
    """Emit the sum of `value` over its first dim, of type `kind`; the partitioner lowers this reduction like
    any other.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    scalar = ir.RankedTensorType.get([], _element(kind))
    reduce = stablehlo.ReduceOp([kind], [value], [_zero(scalar)], [0])
    block = reduce.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        stablehlo.return_([stablehlo.add(*block.arguments)])
    return reduce.results[0]


def _cut(value: Any, dim: int, start: int, stop: int) -> Any:
    """Emit a slice of one dim from `start` to `stop`, excluded."""
    from jaxlib.mlir.dialects import stablehlo

    shape = _shape(value.type)
    starts, stops = [0] * len(shape), list(shape)
    starts[dim], stops[dim] = start, stop
    return stablehlo.slice(value, starts, stops, [1] * len(shape))


def _padded(value: Any, dim: int, low: int, high: int) -> Any:
    """Emit a pad of one dim by `low` and `high` zeros."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    rank = len(_shape(value.type))
    below, above = [0] * rank, [0] * rank
    below[dim], above[dim] = low, high
    zero = _zero(ir.RankedTensorType.get([], _element(value.type)))
    return stablehlo.pad(value, zero, below, above, [0] * rank)


def _zero(kind: Any) -> Any:
    """Emit a constant of zeros of the type `kind`, of integers or floats."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    element = _element(kind)
    if isinstance(element, ir.IntegerType):
        number = ir.IntegerAttr.get(element, 0)
    else:
        number = ir.FloatAttr.get(element, 0.0, loc=ir.Location.unknown(element.context))
    return stablehlo.constant(ir.DenseElementsAttr.get_splat(kind, number))


def _shape(kind: Any) -> list[int]:
    """Return the shape of a tensor type."""
    from jaxlib.mlir import ir

    return list(ir.RankedTensorType(kind).shape)


def _element(kind: Any) -> Any:
    """Return the element type of a tensor type."""
    from jaxlib.mlir import ir

    return ir.RankedTensorType(kind).element_type


def _int64(values: Any) -> Any:
    """Convert numbers to a numpy array of int64."""
    import numpy as np

    return np.asarray(values, dtype=np.int64)


def _int32(values: Any) -> Any:
    """Convert numbers to a numpy array of int32."""
    import numpy as np

    return np.asarray(values, dtype=np.int32)
