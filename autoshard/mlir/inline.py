"""Inlining: calls, composites and tuples are replaced by their bodies and elements."""

import graphlib
from collections.abc import Mapping
from typing import Any

from autoshard.errors import UserError
from autoshard.mlir.canonical_ops import expand_norms, fold_pooling
from autoshard.mlir.module import (
    collect,
    location_name,
    main_function,
    parse_module,
    replace_by_block,
    symbol,
    target_name,
)
from autoshard.mlir.sharding_constraints import drop_idle_constraints


_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}
"""Attribute that names the called function, by kind of call."""


def inline_calls(module: Any) -> Any:
    """Replace every call and composite by a clone of its body, in every region, so that only `@main` remains (in
    place); return `module`.

    Functions that a custom call names remain too. The location of an inlined op is `<name of the call>/<name of the
    op>`. Max pooling, which platforms lower differently, gets one form (`fold_pooling`), so that positions of ops
    agree. Batch norms, which the partitioner cannot split, are expanded (`expand_norms`). Tuples are folded, and idle
    constraints are dropped. Raises `UserError` if a function calls itself.
    """
    functions = {symbol(op): op for op in module.body.operations if op.operation.name == "func.func"}
    done: set[str] = set()

    def flatten(root: str) -> None:
        """Inline all calls in `root` and in the functions that it calls."""
        for name in _callees_first(functions, root):
            if name not in done:
                done.add(name)
                for call in collect(functions[name].operation, _CALLS):
                    _inline_one(call, functions[_callee(call)])

    with module.context:
        flatten(symbol(main_function(module)))
        named = _named_by_custom_calls(main_function(module).operation)
        for name in named:
            flatten(name)
        for name, function in functions.items():
            if name != "main" and name not in named:
                function.operation.erase()
        fold_tuples(main_function(module).operation)
        drop_idle_constraints(module)
        fold_pooling(main_function(module).operation)
        expand_norms(module)
    return module


def check_calls(module: Any, what: str) -> None:
    """Raise `UserError` if a function that `@main` reaches calls itself, directly or through others.

    `what` names the program in the message.
    """
    functions = {symbol(op): op for op in module.body.operations if op.operation.name == "func.func"}
    with module.context:
        _callees_first(functions, symbol(main_function(module)), what)


def _callees_first(functions: Mapping[str, Any], root: str, what: str = "the program") -> list[str]:
    """Return the functions that `root` calls, directly or through others, and `root` last; callees before callers.

    `functions` are all functions by name, and `what` names the program in the message. Raise `UserError` for recursion.
    """
    sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    waiting, seen = [root], {root}
    while waiting:
        name = waiting.pop()
        callees = {_callee(call) for call in collect(functions[name].operation, _CALLS)}
        sorter.add(name, *sorted(callees))
        waiting += sorted(callees - seen)
        seen |= callees
    try:
        return list(sorter.static_order())
    except graphlib.CycleError as error:
        chain = " calls ".join(f"`{name}`" for name in reversed(error.args[1]))
        raise UserError(
            f"{what}: {chain}, and recursion has no fixed number of ops; write it as a loop (stablehlo.while)."
        ) from None


def _inline_one(call: Any, function: Any) -> None:
    """Replace a call by a clone of the function's body (in place); the names of its ops begin with the call's."""
    clone = function.operation.clone(ip=False)
    _prefix_locations(clone, call.location)
    replace_by_block(call, clone.regions[0].blocks[0])
    clone.erase()


def _prefix_locations(function: Any, location: Any) -> None:
    """Prepend the name of the call to the names of a function's ops; ops without a name, and calls without one, change
    nothing.
    """
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


def _callee(call: Any) -> str:
    """Return the name of the function that a call calls."""
    from jaxlib.mlir import ir

    return ir.FlatSymbolRefAttr(call.attributes[_CALLS[call.name]]).value


def _named_by_custom_calls(function: Any) -> set[str]:
    """Return the names of functions that custom calls refer to."""
    from jaxlib.mlir import ir

    names = set()
    for op in collect(function, {"stablehlo.custom_call"}):
        if "called_computations" in op.attributes:
            names |= {ir.FlatSymbolRefAttr(ref).value for ref in op.attributes["called_computations"]}
    return names


def replace_body(module: Any, donor: bytes | str) -> Any:
    """Replace the body of `@main` by that of another module's `@main` of the same type (in place), and return `module`.

    Attributes of arguments and results stay those of `module`. Thus every platform compiles the ops of one program,
    numbered once. Both modules are inlined. Raises `UserError` if the types differ.
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
            if op.operation.name == "func.func" and symbol(op) != "main":
                op.operation.move_before(old)
        new.move_before(old)
        old.erase()
    return module


def untuple_calls(module: Any) -> list[str]:
    """Give custom calls whose result is a tuple, such as factorisations, one result for each element (in place).

    Returns the targets of the calls that stay as they are, sorted. The whole tuple of such a call is used, or an
    element is itself a tuple.
    """
    from jaxlib.mlir import ir

    stay = set()
    for op in collect(module.operation, {"stablehlo.custom_call"}):
        kind = op.results[0].type if len(op.results) == 1 else None
        if kind is None or not isinstance(kind, ir.TupleType):
            continue
        tuple_type = ir.TupleType(kind)
        types = [tuple_type.get_type(number) for number in range(tuple_type.num_types)]
        readers = [use.owner for use in op.results[0].uses]
        nested = any(isinstance(each, ir.TupleType) for each in types)
        if nested or any(reader.name != "stablehlo.get_tuple_element" for reader in readers):
            stay.add(target_name(op))
            continue
        with module.context, op.location:
            # `xla_shape` is the tuple's shape.
            attributes = {name: value for name, value in _attributes(op).items() if name != "xla_shape"}
            new = ir.Operation.create(op.name, types, list(op.operands), attributes, ip=ir.InsertionPoint(op))
        for reader in readers:
            number = ir.IntegerAttr(reader.attributes["index"]).value
            reader.results[0].replace_all_uses_with(new.results[number])
            reader.erase()
        op.erase()
    return sorted(stay)


def _attributes(op: Any) -> dict[str, Any]:
    """Return the attributes of an op by name."""
    return {named.name: named.attr for named in (op.attributes[number] for number in range(len(op.attributes)))}


def fold_tuples(root: Any) -> None:
    """Replace every element that is read from a tuple by the operand of the tuple; drop unused tuples (in place).

    Elements of a tuple that no `stablehlo.tuple` makes, such as a call's result, stay.
    """
    from jaxlib.mlir import ir

    for op in collect(root, {"stablehlo.get_tuple_element"}):
        maker = op.operands[0].owner
        if isinstance(maker, ir.Block) or maker.name != "stablehlo.tuple":
            continue
        number = ir.IntegerAttr(op.attributes["index"]).value
        op.results[0].replace_all_uses_with(maker.operands[number])
        op.erase()
    for op in reversed(collect(root, {"stablehlo.tuple"})):
        if not any(True for _ in op.results[0].uses):
            op.erase()
