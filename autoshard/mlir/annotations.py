"""Specs, meshes, aliases and pins, as attributes and ops of a module."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from autoshard.errors import UserError
from autoshard.mlir.module import argument_entries, collect, main_block, main_function, maker_of, mesh_ops
from autoshard.mlir.numbering import BRANCHING, DESCEND, number_ops
from autoshard.mlir.stated_shardings import mesh_axes


CONSTRAINT = "sdy.sharding_constraint"
_RESHARD = "sdy.reshard"
"""Op that Shardy's propagation puts in place of a constraint."""


class SpecLike(Protocol):
    """Interface of a spec.

    `dims` has the mesh axes that split each dim, major first; empty for a dim that none splits.
    """

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]: ...


def sharding_attribute(mesh_name: str, dims: Sequence[Sequence[str]]) -> Any:
    """Build `#sdy.sharding<@mesh, [{"a"}, {}]>` with every dim closed to propagation; needs a current context."""
    from jaxlib.mlir.dialects import sdy

    return sdy.TensorShardingAttr.get(
        mesh_name,
        [sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(axis) for axis in axes], is_closed=True) for axes in dims],
    )


def ensure_mesh(module: Any, mesh_name: str, sizes: Mapping[str, int]) -> str:
    """Return the name of the module's mesh with exactly these axes, sizes and the natural device order.

    If there is none, add `sdy.mesh @mesh_name` in place; underscores are appended to a name that is used.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    wanted, used, name = tuple(sizes.items()), mesh_ops(module), mesh_name
    for symbol, op in used.items():
        mesh = sdy.MeshAttr(op.attributes["mesh"])
        if mesh_axes(mesh) == wanted and not list(mesh.device_ids):
            return symbol
    while name in used:
        name += "_"
    with module.context, ir.Location.unknown(module.context), ir.InsertionPoint.at_block_begin(module.body):
        attribute = sdy.MeshAttr.get([sdy.MeshAxisAttr.get(axis, size) for axis, size in wanted])
        sdy.MeshOp(name, attribute)
    return name


def set_shardings(
    module: Any,
    mesh_name: str,
    sizes: Mapping[str, int],
    arguments: Sequence[SpecLike | None],
    results: Sequence[SpecLike | None],
) -> Any:
    """Give `@main`'s arguments and results these specs (in place), and return `module`; None removes a value's
    sharding.

    - `mesh_name`: name for the mesh if the module has none with these axes.
    - `sizes`: mesh axes with their sizes.
    - `arguments`, `results`: one spec or None for each argument and result.

    Dims beyond a spec's last, such as the words of a typed PRNG key, stay whole.
    """
    from jaxlib.mlir import ir

    name = ensure_mesh(module, mesh_name, sizes)
    function = main_function(module).operation
    block = function.regions[0].blocks[0]
    values = {"arg_attrs": list(block.arguments), "res_attrs": list(list(block.operations)[-1].operation.operands)}
    with module.context:
        for key, specs in (("arg_attrs", arguments), ("res_attrs", results)):
            old = argument_entries(function, key) or [{} for _ in values[key]]
            for value, entry, spec in zip(values[key], old, specs, strict=True):
                entry.pop("sdy.sharding", None)
                if spec is not None:
                    rank = len(ir.RankedTensorType(value.type).shape)
                    entry["sdy.sharding"] = sharding_attribute(name, (*spec.dims, *((),) * (rank - len(spec.dims))))
            function.attributes[key] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in old])
    return module


def set_aliases(module: Any, aliases: Mapping[int, int]) -> Any:
    """Mark argument `i` of `@main` as donated to result `aliases[i]` (in place), and return `module`.

    All other donations are dropped.
    """
    from jaxlib.mlir import ir

    function = main_function(module).operation
    count = len(function.regions[0].blocks[0].arguments)
    with module.context:
        entries = argument_entries(function, "arg_attrs") or [{} for _ in range(count)]
        integer = ir.IntegerType.get_signless(32)
        for position, entry in enumerate(entries):
            entry.pop("tf.aliasing_output", None)
            entry.pop("jax.buffer_donor", None)
            if position in aliases:
                entry["tf.aliasing_output"] = ir.IntegerAttr.get(integer, aliases[position])
        function.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in entries])
    return module


def aliases(module: Any) -> dict[int, int]:
    """Return the result number of every donated argument of `@main` that has a result, by argument number."""
    from jaxlib.mlir import ir

    results = {}
    for position, entry in enumerate(argument_entries(main_function(module).operation, "arg_attrs")):
        if "tf.aliasing_output" in entry:
            results[position] = ir.IntegerAttr(entry["tf.aliasing_output"]).value
    return results


def read_shardings(op: Any) -> list[tuple[tuple[str, ...], ...] | None]:
    """Return the mesh axes per dim of each result of an op after `run_propagation`; None where Shardy gave none (not
    split).
    """
    from jaxlib.mlir.dialects import sdy

    attributes = op.attributes
    if "sdy.sharding" in attributes and op.name != CONSTRAINT:
        shardings = list(sdy.TensorShardingPerValueAttr(attributes["sdy.sharding"]).shardings)
    elif "sharding" in attributes and op.name in (CONSTRAINT, _RESHARD):
        shardings = [attributes["sharding"]]
    else:
        return [None] * len(op.results)
    return [axes_of(sdy.TensorShardingAttr(sharding)) for sharding in shardings]


def axes_of(sharding: Any) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes of each dim of an `sdy.sharding`, major first."""
    from jaxlib.mlir.dialects import sdy

    return tuple(
        tuple(sdy.AxisRefAttr(axis).name for axis in sdy.DimensionShardingAttr(dim).axes)
        for dim in sharding.dimension_shardings
    )


def pinned_axes(pin: Any) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes of each dim in the constraint op `pin`."""
    from jaxlib.mlir.dialects import sdy

    return axes_of(sdy.TensorShardingAttr(pin.attributes["sharding"]))


class PinLike(Protocol):
    """Interface of a pin for `insert_pins`; `autoshard.planning.Pin` implements it.

    - `op`: number of the op whose result is pinned; -1 for an argument.
    - `index`: number of the result, region argument or argument.
    - `spec`: spec to pin.
    - `operand`: the (user op, operand number) of a single use to pin; None for all uses.
    """

    @property
    def op(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def spec(self) -> SpecLike: ...
    @property
    def operand(self) -> tuple[int, int] | None: ...


def insert_pins(module: Any, mesh_name: str, sizes: Mapping[str, int], pins: Sequence[PinLike]) -> int:
    """Insert one `sdy.sharding_constraint` for every pin (in place); return the number of constraints.

    - `mesh_name`: name for the mesh if the module has none with these axes.
    - `sizes`: mesh axes with their sizes.

    A pin without `operand` constrains result `index` of op `op` for all its uses. Indices past the op's results count
    the arguments of its last region (a loop's carried values). Op -1 means argument `index` of `@main`. A pin with
    `operand = (user_op, number)` constrains that one use, before the loops that do not change the value. Pins of one
    value chain in the given order. All positions are those of `number_ops` before any insertion. Branches of a
    conditional whose pinned results differ get constraints to one spec as well, which count too. Without pins nothing
    changes.

    Raises `UserError` if the module lacks a pinned value, or if its rank differs.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    if not pins:
        return 0
    name = ensure_mesh(module, mesh_name, sizes)
    ops = number_ops(module)
    latest: dict[tuple[int, int], Any] = {}

    def constrain(value: Any, pin: PinLike, point: Any) -> Any:
        """Insert the constraint of a pin at `point` and return its op; raise `UserError` if the ranks differ."""
        rank = ir.RankedTensorType(value.type).rank
        if len(pin.spec.dims) != rank:
            raise UserError(
                f"the pin on op {pin.op} result {pin.index} has {len(pin.spec.dims)} dims but the value has {rank}: "
                "the plan belongs to another program."
            )
        with point, value.owner.location if isinstance(value.owner, ir.Operation) else ir.Location.unknown():
            return sdy.ShardingConstraintOp(value, sharding_attribute(name, pin.spec.dims)).operation

    with module.context:
        for pin in pins:
            if pin.operand is not None:
                user_number, number = pin.operand
                if user_number >= len(ops) or number >= len(ops[user_number].operands):
                    raise UserError(_no_such_op(pin, len(ops)))
                user = ops[user_number]
                value, before = _before_loops(user.operands[number], user)
                new = constrain(value, pin, ir.InsertionPoint(before))
                user.operands[number] = new.results[0]
                continue
            pinned = (pin.op, pin.index)
            value, point = _pinned_value(module, ops, pin)
            if pinned in latest:
                value = latest[pinned].results[0]
                point = ir.InsertionPoint.after(latest[pinned])
            new = constrain(value, pin, point)
            value.replace_all_uses_except(new.results[0], new)
            latest[pinned] = new
        return len(pins) + _agree_branches(module)


def _before_loops(value: Any, user: Any) -> tuple[Any, Any]:
    """Return the value outside of the loops that leave an operand of `user` unchanged, and the op to pin it before.

    A loop leaves a value unchanged that it captures, or carries and returns as it is. Without such a loop the results
    are the operand and `user`. Compilers that move no collective out of a loop (XLA's for GPUs) would reshard a value
    that is pinned inside in every trip. Evidence: docs/compiler_behaviour.md, "Values that a loop does not change".
    """
    while user.parent is not None and user.parent.name == "stablehlo.while":
        loop = user.parent.operation
        body, maker = loop.regions[1].blocks[0], maker_of(value)
        if maker is None and value.owner == body:
            number = list(body.arguments).index(value)
            if body.operations[len(body.operations) - 1].operands[number] != value:
                break
            value = loop.operands[number]
        elif maker is not None and maker.parent == loop:
            break
        user = loop
    return value, user


def _agree_branches(module: Any) -> int:
    """Pin results of all branches of a conditional to one spec where pins differ (in place).

    Return the number of constraints inserted. XLA compiles no conditional whose branches end in different shardings.
    The chosen spec is that of the conditional's own result, or that of the first pinned branch.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    inserted = 0
    for op in collect(module.operation, BRANCHING):
        ends = [block.operations[len(block.operations) - 1].operation for region in op.regions for block in region]
        for number, result in enumerate(op.results):
            makers = [use.owner.operation for use in result.uses] + [maker_of(end.operands[number]) for end in ends]
            pins = [op for op in makers if op is not None and op.name == CONSTRAINT]
            if len({pinned_axes(pin) for pin in pins}) < 2:
                continue
            sharding = pins[0].attributes["sharding"]
            for end in ends:
                with ir.InsertionPoint(end), end.location:
                    new = sdy.ShardingConstraintOp(end.operands[number], sdy.TensorShardingAttr(sharding))
                end.operands[number] = new.operation.results[0]
            inserted += len(ends)
    return inserted


def _pinned_value(module: Any, ops: list[Any], pin: PinLike) -> tuple[Any, Any]:
    """Return the value that a pin without `operand` constrains, and the insertion point after it.

    Raise `UserError` if the module has no such op, result or region argument.
    """
    from jaxlib.mlir import ir

    if pin.op == -1:
        block = main_block(module)
        return block.arguments[pin.index], ir.InsertionPoint.at_block_begin(block)
    if pin.op >= len(ops):
        raise UserError(_no_such_op(pin, len(ops)))
    op = ops[pin.op]
    if pin.index < len(op.results):
        return op.results[pin.index], ir.InsertionPoint.after(op)
    inner = pin.index - len(op.results)
    if op.name in DESCEND and inner < len(op.regions[len(op.regions) - 1].blocks[0].arguments):
        block = op.regions[len(op.regions) - 1].blocks[0]
        return block.arguments[inner], ir.InsertionPoint.at_block_begin(block)
    raise UserError(_no_such_op(pin, len(ops)))


def _no_such_op(pin: PinLike, count: int) -> str:
    """Return the message for a pin on a place that a module of `count` ops lacks."""
    where = f"operand {pin.operand[1]} of op {pin.operand[0]}" if pin.operand else f"result {pin.index} of op {pin.op}"
    return f"the plan pins {where}, which is not in this program of {count} ops: the plan belongs to another program."


def count_pins(module: Any) -> int:
    """Count the `sdy.sharding_constraint` ops of the module."""
    return len(collect(module.operation, {CONSTRAINT}))
