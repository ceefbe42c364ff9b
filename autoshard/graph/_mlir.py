"""The only file that touches jaxlib's MLIR bindings: parsing, inlining, numbering, pinning, propagating.

Nothing here knows costs or strategies. Positions of ops are those of `number_ops`; they are equal for the
sharded and the unsharded lowering of one program, which `structure_hash` proves.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from autoshard.errors import UserError


_DESCEND = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if"})
_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}
_CHLO_WHOLE_DIM = frozenset({"chlo.top_k"})
_CONSTRAINT = "sdy.sharding_constraint"


class SpecLike(Protocol):
    @property
    def dims(self) -> tuple[tuple[str, ...], ...]: ...


class PinLike(Protocol):
    """What `insert_pins` reads of a pin; `autoshard.plan.Pin` is one."""

    @property
    def op(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def spec(self) -> SpecLike: ...
    @property
    def operand(self) -> tuple[int, int] | None: ...


def new_context() -> Any:
    """A fresh `ir.Context` that knows StableHLO, CHLO, MHLO and Shardy."""
    from jax.interpreters import mlir

    return mlir.make_ir_context()


def parse_module(source: bytes | str, context: Any = None) -> Any:
    """Parse MLIR text, bytecode or a StableHLO portable artifact into an `ir.Module`.

    Raises `UserError` with the parser's first complaint when it is none of these.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    context = new_context() if context is None else context
    try:
        if isinstance(source, bytes) and b"StableHLO_v" in source[:32]:
            return stablehlo.deserialize_portable_artifact(context, source)
        with context:
            return ir.Module.parse(source, context)
    except ir.MLIRError as error:
        first = " ".join(str(error).split())[:200]
        raise UserError(f"the module is not StableHLO that can be read: {first}.") from error


def to_bytes(module: Any) -> bytes:
    """The module as MLIR bytecode, locations included."""
    import io

    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def main_function(module: Any) -> Any:
    """The public `func.func @main`."""
    for op in module.body.operations:
        if op.operation.name == "func.func" and _symbol(op) == "main":
            return op
    raise UserError("the module has no function named main: give a StableHLO module with a public @main.")


def main_block(module: Any) -> Any:
    return main_function(module).operation.regions[0].blocks[0]


def main_types(module: Any) -> tuple[list[tuple[tuple[int, ...], str]], list[tuple[tuple[int, ...], str]]]:
    """Shapes and numpy dtype names of `@main`'s arguments and results."""
    from jaxlib.mlir import ir

    kind = ir.FunctionType(ir.TypeAttr(main_function(module).operation.attributes["function_type"]).value)
    return [_array_type(value) for value in kind.inputs], [_array_type(value) for value in kind.results]


_FLOATS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


def _array_type(value: Any) -> tuple[tuple[int, ...], str]:
    from jaxlib.mlir import ir

    tensor = ir.RankedTensorType(value)
    element = str(tensor.element_type)
    complex_bits = {"complex<f32>": "complex64", "complex<f64>": "complex128"}
    if element in _FLOATS or element in complex_bits:
        dtype = _FLOATS.get(element) or complex_bits[element]
    elif element == "i1":
        dtype = "bool"
    elif element.startswith("ui"):
        dtype = "uint" + element[2:]
    elif element.startswith("i"):
        dtype = "int" + element[1:]
    elif element.startswith("f8"):
        dtype = "float8_" + element[2:].lower()
    else:
        raise UserError(f"the module has a value of type {value}, whose elements are of a kind that is not known.")
    return tuple(tensor.shape), dtype


# Inlining


def inline_calls(module: Any) -> Any:
    """Replace every call and composite by a clone of its body, in every region; leaves `@main` alone (in place).

    Functions that a custom call names stay. An inlined op's location is `<name of the call>/<name of the op>`.
    """
    functions = {_symbol(op): op for op in module.body.operations if op.operation.name == "func.func"}
    done: set[str] = set()

    def flatten(name: str) -> None:
        if name in done:
            return
        done.add(name)
        for call in _collect(functions[name].operation, _CALLS):
            callee = _callee(call)
            flatten(callee)
            _inline_one(call, functions[callee])

    with module.context:
        flatten(_symbol(main_function(module)))
        kept = _named_by_custom_calls(main_function(module).operation)
        for name in kept:
            flatten(name)
        for name, function in functions.items():
            if name != "main" and name not in kept:
                function.operation.erase()
    return module


def _inline_one(call: Any, function: Any) -> None:
    clone = function.operation.clone(ip=False)
    block = clone.regions[0].blocks[0]
    _prefix_locations(clone, call.location)
    for argument, operand in zip(list(block.arguments), list(call.operands), strict=True):
        argument.replace_all_uses_with(operand)
    body = list(block.operations)
    for op in body[:-1]:
        op.operation.move_before(call)
    for result, value in zip(list(call.results), list(body[-1].operation.operands), strict=True):
        result.replace_all_uses_with(value)
    call.erase()
    clone.erase()


def _prefix_locations(function: Any, location: Any) -> None:
    from jaxlib.mlir import ir

    prefix = location_name(location)
    if not prefix:
        return
    cache: dict[Any, Any] = {}

    def visit(op: Any) -> Any:
        old = op.location
        new = cache.get(old)
        if new is None:
            own = location_name(old)
            new = ir.Location.name(f"{prefix}/{own}", ir.NameLoc(old).child_loc) if own else old
            cache[old] = new
        op.location = new
        return ir.WalkResult.ADVANCE

    for op in function.regions[0].blocks[0].operations:
        op.operation.walk(visit, ir.WalkOrder.PRE_ORDER)


def location_name(location: Any) -> str:
    """The outermost name of a location (JAX's name stack), or an empty string."""
    from jaxlib.mlir import ir

    return ir.NameLoc(location).name_str.rstrip(":") if isinstance(location, ir.NameLoc) else ""


def source_line(op: Any) -> str:
    """`file:line` of the innermost frame of an op's location, or an empty string."""
    from jaxlib.mlir import ir

    location = op.location
    while True:
        if isinstance(location, ir.NameLoc):
            location = location.child_loc
        elif isinstance(location, ir.CallSiteLoc):
            location = location.callee
        elif isinstance(location, ir.FusedLoc) and location.locations:
            location = location.locations[0]
        elif isinstance(location, ir.FileLineColLoc):
            return f"{location.filename}:{location.start_line}"
        else:
            return ""


def _collect(root: Any, names: Iterable[str]) -> list[Any]:
    from jaxlib.mlir import ir

    found: list[Any] = []

    def visit(op: Any) -> Any:
        if op.name in names:
            found.append(op)
        return ir.WalkResult.ADVANCE

    root.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found


def _callee(call: Any) -> str:
    from jaxlib.mlir import ir

    return ir.FlatSymbolRefAttr(call.attributes[_CALLS[call.name]]).value


def _named_by_custom_calls(function: Any) -> set[str]:
    from jaxlib.mlir import ir

    names = set()
    for op in _collect(function, {"stablehlo.custom_call"}):
        if "called_computations" in op.attributes:
            names |= {ir.FlatSymbolRefAttr(ref).value for ref in op.attributes["called_computations"]}
    return names


def _symbol(function: Any) -> str:
    from jaxlib.mlir import ir

    return ir.StringAttr(function.operation.attributes["sym_name"]).value


# Numbering


def number_ops(module: Any) -> list[Any]:
    """Ops of `@main` in pre-order, terminators included; position in the list is the op's number.

    Descends into the regions of while, case and if; the little regions of reduce, sort, scatter and the like
    are part of their op. Call `inline_calls` first.
    """
    ops: list[Any] = []

    def visit(block: Any) -> None:
        for view in block.operations:
            op = view.operation
            ops.append(op)
            if op.name in _DESCEND:
                for region in op.regions:
                    for inner in region.blocks:
                        visit(inner)

    visit(main_block(module))
    return ops


def structure_hash(module: Any) -> str:
    """sha256 (hex) of the inlined module without meshes, shardings, argument attributes, names and locations.

    Equal for the sharded and the unsharded lowering of one program; any difference in ops, shapes or constants
    changes it. Leaves `module` as it is.
    """
    return hashlib.sha256(canonical_text(module).encode()).hexdigest()


def canonical_text(module: Any) -> str:
    """Text of the stripped module, without locations; see `structure_hash`."""
    from jaxlib.mlir import ir

    with module.context:
        copy = ir.Module.parse(to_bytes(module), module.context)
        strip(copy)
        return str(copy.operation.get_asm(enable_debug_info=False))


def strip(module: Any) -> Any:
    """Remove meshes, shardings on arguments, results and ops, aliasing, and the module's name (in place)."""
    from jaxlib.mlir import ir

    with module.context:
        attributes = module.operation.attributes
        for attribute in [attributes[i].name for i in range(len(attributes))]:
            del module.operation.attributes[attribute]
        for op in list(module.body.operations):
            if op.operation.name == "sdy.mesh":
                op.operation.erase()
        for op in module.body.operations:
            if op.operation.name == "func.func":
                for attribute in ("arg_attrs", "res_attrs"):
                    if attribute in op.operation.attributes:
                        del op.operation.attributes[attribute]

        def visit(op: Any) -> Any:
            for attribute in ("sdy.sharding", "sdy.sharding_per_value", "sdy.sharding_rule", "mhlo.sharding"):
                if attribute in op.attributes:
                    del op.attributes[attribute]
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return module


# Shardings


def populate_rules(module: Any) -> Any:
    """Write `sdy.sharding_rule` on every op that has one (in place).

    CHLO ops, which Shardy does not know, get one here: element by element for ops whose operands and results
    have one shape, and for `chlo.top_k` with its last dim needing replication.
    """
    from jaxlib.mlir import ir, passmanager

    with module.context:
        passmanager.PassManager.parse("builtin.module(func.func(sdy-populate-op-sharding-rules))").run(module.operation)
        for function in module.body.operations:
            if function.operation.name != "func.func":
                continue

            def visit(op: Any) -> Any:
                if op.name.startswith("chlo.") and "sdy.sharding_rule" not in op.attributes:
                    rule = _chlo_rule(op)
                    if rule is not None:
                        op.attributes["sdy.sharding_rule"] = rule
                return ir.WalkResult.ADVANCE

            function.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return module


def _chlo_rule(op: Any) -> Any | None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    shapes = [ir.RankedTensorType(value.type).shape for value in (*op.operands, *op.results)]
    first = shapes[0]
    whole = op.name in _CHLO_WHOLE_DIM
    if whole:
        if any(shape[:-1] != first[:-1] for shape in shapes):
            return None
    elif any(shape != first for shape in shapes):
        return None
    mapping = sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get([dim]) for dim in range(len(first))])
    return sdy.OpShardingRuleAttr.get(
        list(first),
        [mapping] * len(op.operands),
        [mapping] * len(op.results),
        need_replication_factors=[len(first) - 1] if whole else [],
    )


def sharding_attribute(mesh_name: str, dims: Sequence[Sequence[str]]) -> Any:
    """`#sdy.sharding<@mesh, [{"a"}, {}]>`, every dim closed; needs a current context."""
    from jaxlib.mlir.dialects import sdy

    return sdy.TensorShardingAttr.get(
        mesh_name,
        [sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(axis) for axis in axes], is_closed=True) for axes in dims],
    )


def ensure_mesh(module: Any, mesh_name: str, sizes: Mapping[str, int]) -> str:
    """Name of the module's mesh with these axes; adds `sdy.mesh @mesh_name` if there is none."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    wanted = list(sizes.items())
    taken = set()
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            mesh = sdy.MeshAttr(op.operation.attributes["mesh"])
            axes = [(axis.name, axis.size) for axis in map(sdy.MeshAxisAttr, mesh.axes)]
            if axes == wanted and not list(mesh.device_ids):
                return _symbol(op)
            taken.add(_symbol(op))
    name = mesh_name
    while name in taken:
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
    """Give `@main`'s arguments and results these specs (in place); None leaves one open."""
    from jaxlib.mlir import ir

    name = ensure_mesh(module, mesh_name, sizes)
    function = main_function(module).operation
    block = function.regions[0].blocks[0]
    counts = {"arg_attrs": len(block.arguments), "res_attrs": len(list(block.operations)[-1].operation.operands)}
    with module.context:
        for key, specs in (("arg_attrs", arguments), ("res_attrs", results)):
            old = _entries(function, key) or [{} for _ in range(counts[key])]
            for entry, spec in zip(old, specs, strict=True):
                entry.pop("sdy.sharding", None)
                if spec is not None:
                    entry["sdy.sharding"] = sharding_attribute(name, spec.dims)
            function.attributes[key] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in old])
    return module


def _entries(function: Any, key: str) -> list[dict[str, Any]]:
    from jaxlib.mlir import ir

    if key not in function.attributes:
        return []
    dictionaries = map(ir.DictAttr, ir.ArrayAttr(function.attributes[key]))
    return [{entry[i].name: entry[i].attr for i in range(len(entry))} for entry in dictionaries]


def set_aliases(module: Any, aliases: Mapping[int, int]) -> Any:
    """Donate argument `i` of `@main` to result `aliases[i]` (in place); other donations are dropped."""
    from jaxlib.mlir import ir

    function = main_function(module).operation
    count = len(function.regions[0].blocks[0].arguments)
    with module.context:
        entries = _entries(function, "arg_attrs") or [{} for _ in range(count)]
        integer = ir.IntegerType.get_signless(32)
        for position, entry in enumerate(entries):
            entry.pop("tf.aliasing_output", None)
            entry.pop("jax.buffer_donor", None)
            if position in aliases:
                entry["tf.aliasing_output"] = ir.IntegerAttr.get(integer, aliases[position])
        function.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in entries])
    return module


def aliases(module: Any) -> dict[int, int]:
    """Argument number -> result number of every donated argument of `@main` that has a result."""
    from jaxlib.mlir import ir

    found = {}
    for position, entry in enumerate(_entries(main_function(module).operation, "arg_attrs")):
        if "tf.aliasing_output" in entry:
            found[position] = ir.IntegerAttr(entry["tf.aliasing_output"]).value
    return found


def insert_pins(module: Any, mesh_name: str, sizes: Mapping[str, int], pins: Sequence[PinLike]) -> int:
    """Insert one `sdy.sharding_constraint` for every pin (in place); returns how many.

    A pin without `operand` constrains result `index` of op `op` for all its uses; an index past the op's
    results counts on into the arguments of its last region (a loop's carried values), and op -1 means
    argument `index` of `@main`. A pin with `operand = (user_op, number)` constrains that one use. Pins of one
    value chain in the order given. All positions are those of `number_ops` before any insertion.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    if not pins:
        return 0
    name = ensure_mesh(module, mesh_name, sizes)
    ops = number_ops(module)
    latest: dict[tuple[int, int], Any] = {}

    def constrain(value: Any, pin: PinLike, point: Any) -> Any:
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
                new = constrain(user.operands[number], pin, ir.InsertionPoint(user))
                user.operands[number] = new.results[0]
                continue
            key = (pin.op, pin.index)
            value, point = _pinned_value(module, ops, pin)
            if key in latest:
                value = latest[key].results[0]
                point = ir.InsertionPoint.after(latest[key])
            new = constrain(value, pin, point)
            value.replace_all_uses_except(new.results[0], new)
            latest[key] = new
    return len(pins)


def _pinned_value(module: Any, ops: list[Any], pin: PinLike) -> tuple[Any, Any]:
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
    if op.name in _DESCEND and inner < len(op.regions[len(op.regions) - 1].blocks[0].arguments):
        block = op.regions[len(op.regions) - 1].blocks[0]
        return block.arguments[inner], ir.InsertionPoint.at_block_begin(block)
    raise UserError(_no_such_op(pin, len(ops)))


def _no_such_op(pin: PinLike, count: int) -> str:
    where = f"operand {pin.operand[1]} of op {pin.operand[0]}" if pin.operand else f"result {pin.index} of op {pin.op}"
    return f"the plan pins {where}, which is not in this program of {count} ops: the plan belongs to another program."


def count_pins(module: Any) -> int:
    """How many `sdy.sharding_constraint` ops the module has."""
    return len(_collect(module.operation, {_CONSTRAINT}))


def replace_body(module: Any, donor: bytes | str) -> Any:
    """Give `@main` the body of another module's `@main` of the same type (in place), argument attributes kept.

    So that one program's ops, numbered once, are what every platform compiles. Both end up inlined.
    """
    from jaxlib.mlir import ir

    other = inline_calls(parse_module(donor, module.context))
    old, new = main_function(module).operation, main_function(other).operation
    types = [ir.TypeAttr(function.attributes["function_type"]).value for function in (old, new)]
    if types[0] != types[1]:
        raise UserError(
            f"the program that was planned has the type {types[1]}, the one given {types[0]}: plan it again."
        )
    with module.context:
        inline_calls(module)
        for key in ("arg_attrs", "res_attrs"):
            if key in old.attributes:
                new.attributes[key] = old.attributes[key]
            elif key in new.attributes:
                del new.attributes[key]
        for op in list(other.body.operations):
            if op.operation.name == "func.func" and _symbol(op) != "main":
                op.operation.move_before(old)
        new.move_before(old)
        old.erase()
    return module


def run_propagation(module: Any) -> Any:
    """Run Shardy's whole propagation pipeline over the module (in place): every op gets `sdy.sharding`."""
    from jaxlib.mlir import passmanager

    with module.context:
        passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(module.operation)
    return module


def read_shardings(op: Any) -> list[tuple[tuple[str, ...], ...] | None]:
    """The spec of each result of an op after `run_propagation`; None where Shardy gave none (not split)."""
    from jaxlib.mlir.dialects import sdy

    attributes = op.attributes
    if "sdy.sharding" in attributes and op.name != _CONSTRAINT:
        shardings = list(sdy.TensorShardingPerValueAttr(attributes["sdy.sharding"]).shardings)
    elif "sharding" in attributes and op.name == _CONSTRAINT:
        shardings = [attributes["sharding"]]
    else:
        return [None] * len(op.results)
    return [_axes(sdy.TensorShardingAttr(sharding)) for sharding in shardings]


def _axes(sharding: Any) -> tuple[tuple[str, ...], ...]:
    from jaxlib.mlir.dialects import sdy

    return tuple(
        tuple(sdy.AxisRefAttr(axis).name for axis in sdy.DimensionShardingAttr(dim).axes)
        for dim in sharding.dimension_shardings
    )


def explicit_reshards(module: Any) -> list[dict[str, Any]]:
    """Where Shardy must change a spec in an inlined module with shardings and pins: one record for each place.

    Runs propagation and inserts reshards (in place). A record has `names` (JAX name stacks of the ops that make and
    take the value), `line` (file:line of one of them), `shape`, and the specs `before` and `after`.
    """
    from jaxlib.mlir import ir, passmanager

    run_propagation(module)
    with module.context:
        # Without the option the pass leaves all but a few kinds of ops to the partitioner.
        passmanager.PassManager.parse(
            "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))"
        ).run(module.operation)
    arguments = _argument_specs(module)
    found = []
    for op in number_ops(module):
        if op.name not in ("sdy.reshard", _CONSTRAINT):
            continue
        value = op.operands[0]
        before, after = _spec_of(value, arguments), _reshard_spec(op)
        rank = len(after)
        if before is None:
            before = ((),) * rank
        if before == after:
            continue
        users = [use.owner for use in op.results[0].uses]
        named = [op, *users, *([value.owner] if isinstance(value.owner, ir.Operation) else [])]
        names = [location_name(each.location) for each in named]
        lines = [source_line(each) for each in named]
        found.append(
            {
                "names": sorted({name for name in names if name}),
                "line": next((line for line in lines if line), ""),
                "shape": tuple(ir.RankedTensorType(value.type).shape),
                "before": before,
                "after": after,
            }
        )
    return found


def _reshard_spec(op: Any) -> tuple[tuple[str, ...], ...]:
    from jaxlib.mlir.dialects import sdy

    return _axes(sdy.TensorShardingAttr(op.attributes["sharding"]))


def _argument_specs(module: Any) -> list[tuple[tuple[str, ...], ...] | None]:
    from jaxlib.mlir.dialects import sdy

    entries = _entries(main_function(module).operation, "arg_attrs")
    return [
        _axes(sdy.TensorShardingAttr(entry["sdy.sharding"])) if "sdy.sharding" in entry else None for entry in entries
    ]


def _spec_of(value: Any, arguments: list[Any]) -> tuple[tuple[str, ...], ...] | None:
    """The spec of any value after propagation; None if it is whole."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    owner = value.owner
    if isinstance(owner, ir.Block):
        number = ir.BlockArgument(value).arg_number
        parent = owner.owner.operation
        if parent.name == "func.func":
            return arguments[number] if number < len(arguments) else None
        shardings = read_shardings(parent)
        return shardings[number] if number < len(shardings) else None
    operation = owner.operation
    if operation.name in ("sdy.reshard", _CONSTRAINT):
        return _reshard_spec(operation)
    if "out_sharding" in operation.attributes:  # Shardy's own collectives
        return _axes(sdy.TensorShardingAttr(operation.attributes["out_sharding"]))
    return read_shardings(operation)[ir.OpResult(value).result_number]
