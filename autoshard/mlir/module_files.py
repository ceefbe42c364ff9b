"""Contents of files: HLO text and protos, StableHLO text and bytecode; and a module's entry as plain data."""

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.mlir.inline import check_calls
from autoshard.mlir.module import (
    argument_entries,
    collect,
    location_name,
    main_function,
    new_context,
    numbers_of,
    symbol,
    tensor_type,
)


_TYPES = {"bool", "bfloat16", "float16", "float32", "float64"}
"""Dtypes of arguments and results that programs in files may have."""
_TYPES |= {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}

Aval = tuple[tuple[int, ...], str]
"""Shape and numpy name of the dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """The function `main` of a module in a file."""

    arguments: tuple[Aval, ...]
    """Shapes of the arguments, with numpy names of their dtypes."""
    results: tuple[Aval, ...]
    """Shapes of the results, with numpy names of their dtypes."""
    names: tuple[str, ...] | None
    """Names of the arguments from their locations (`params['w']`); None if a name is missing or not unique."""
    aliases: dict[int, int]
    """Number of the result that reuses the buffer, by argument number; donations to no certain result are not
    listed.
    """
    dropped: int
    """Number of arguments whose sharding was removed."""


def _extension(name: str) -> Any:
    """Import a compiled module of jaxlib that is no public interface and has no types."""
    return importlib.import_module(f"jaxlib.{name}")


def hlo_text_to_proto(text: str, what: str) -> bytes:
    """Parse the text of an HLO module from before optimisation into a serialised proto.

    `what` names the file in messages. Raises `UserError` with the parser's complaint.
    """
    try:
        return _extension("_hlo").hlo_module_from_text(text).as_serialized_hlo_module_proto()
    except Exception as error:  # XLA's parser raises many types
        raise UserError(f"`{what}` is not a readable HLO module: {first_line(error)}.") from error


def hlo_to_stablehlo(proto: bytes, what: str) -> bytes:
    """Convert a serialised HLO module to StableHLO bytecode.

    `what` names the file in messages. Raises `UserError` with the converter's complaint.
    """
    try:
        return _extension("_jax").mlir.hlo_to_stablehlo(proto)
    except Exception as error:  # XLA's converter raises many types
        raise UserError(f"`{what}` does not convert from HLO to StableHLO: {first_line(error)}.") from error


def read_file_module(source: bytes | str, what: str) -> Any:
    """Parse the module in a file: MLIR text, bytecode or a portable artifact. `what` names the file in messages.

    Raises `UserError` if it is not StableHLO, has no `main`, is recursive, or was dumped after optimisation.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    context = new_context()
    try:
        if isinstance(source, bytes) and b"StableHLO_v" in source[:64]:
            module = stablehlo.deserialize_portable_artifact(context, source)
        else:
            with context:
                module = ir.Module.parse(source, context)
    except Exception as error:  # MLIR raises its own types
        raise UserError(f"`{what}` is not a readable StableHLO module: {first_line(error)}.") from error
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    if not any(symbol(op) == "main" for op in functions):
        names = ", ".join(f"`{symbol(op)}`" for op in functions) or "none"
        raise UserError(f"`{what}` has no function `main` (its functions: {names}); rename the entry to `main`.")
    check_calls(module, f"`{what}`")
    if collect(module.operation, {"mhlo.fusion"}):
        raise UserError(f"`{what}` holds fusions: it was dumped after optimisation; give the module before it.")
    return module


def take_entry(module: Any, what: str) -> Entry:
    """Describe `main`, and remove aliases, donations and shardings from its arguments (in place).

    `what` names the file in messages. Aliases that the module has as a whole are read, and stay. Raises `UserError` for
    arguments or results that are not tensors of a fixed size and a known type.
    """
    from jaxlib.mlir import ir

    main = main_function(module)
    kind = ir.FunctionType(ir.TypeAttr(main.operation.attributes["function_type"]).value)
    arguments = tuple(_aval(each, f"argument {i}", what) for i, each in enumerate(kind.inputs))
    results = tuple(_aval(each, f"result {i}", what) for i, each in enumerate(kind.results))
    names = argument_names(module)
    aliases: dict[int, int] = {}
    dropped = 0
    with module.context:
        entries = argument_entries(main.operation, "arg_attrs")
        for position, entry in enumerate(entries):
            if "tf.aliasing_output" in entry:
                aliases[position] = ir.IntegerAttr(entry.pop("tf.aliasing_output")).value
            shardings = [entry.pop(key, None) for key in ("mhlo.sharding", "sdy.sharding")]
            dropped += any(sharding is not None for sharding in shardings)
            entry.pop("jax.buffer_donor", None)
        if entries:
            main.operation.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in entries])
    aliases |= _module_aliases(module)
    return Entry(arguments, results, names, aliases, dropped)


@dataclasses.dataclass(frozen=True, slots=True)
class Labels:
    """Facts about `main` that autoshard wrote into a file."""

    names: tuple[str, ...]
    """Names of the arguments."""
    roles: tuple[str, ...]
    """Roles of the arguments."""
    results: tuple[str, ...]
    """Names of the results."""


_NAME, _ROLE = "autoshard.name", "autoshard.role"
"""Attributes of arguments and results."""


def label_main(module: Any, arguments: Sequence[tuple[str, str, int | None]], results: Sequence[str]) -> None:
    """Write names, roles and updated results of all arguments of `main`, and names of results, as attributes (in
    place).

    The last part of an entry of `arguments` is the number of the result that reuses the argument's buffer, or None.
    """
    from jaxlib.mlir import ir

    function = main_function(module).operation
    with module.context:
        number = ir.IntegerType.get_signless(32)
        labelled: list[dict[str, Any]] = [
            {_NAME: ir.StringAttr.get(name), _ROLE: ir.StringAttr.get(role)}
            | ({} if result is None else {"tf.aliasing_output": ir.IntegerAttr.get(number, result)})
            for name, role, result in arguments
        ]
        named: list[dict[str, Any]] = [{_NAME: ir.StringAttr.get(name)} for name in results]
        for key, rows in (("arg_attrs", labelled), ("res_attrs", named)):
            entries = argument_entries(function, key) or [{} for _ in rows]
            merged = [ir.DictAttr.get({**entry, **row}) for entry, row in zip(entries, rows, strict=True)]
            function.attributes[key] = ir.ArrayAttr.get(merged)


def take_labels(module: Any) -> Labels | None:
    """Return what `label_main` wrote, and remove it (in place); None for a module without labels."""
    from jaxlib.mlir import ir

    function = main_function(module).operation
    found: dict[str, list[str]] = {}
    with module.context:
        for key, what in (("arg_attrs", _NAME), ("arg_attrs", _ROLE), ("res_attrs", _NAME)):
            entries = argument_entries(function, key)
            labels = [entry.pop(what, None) for entry in entries]
            if not labels or any(label is None for label in labels):
                return None
            found[key + what] = [ir.StringAttr(label).value for label in labels]
            function.attributes[key] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in entries])
    return Labels(*map(tuple, found.values()))


def argument_names(module: Any) -> tuple[str, ...] | None:
    """Return the names of the arguments of `main` from their locations, up to a colon.

    None if a name is missing or not unique.
    """
    names = []
    for argument in main_function(module).operation.regions[0].blocks[0].arguments:
        names.append(location_name(argument.location).partition(":")[0])
    return tuple(names) if all(names) and len(set(names)) == len(names) else None


def donated(module: Any) -> frozenset[int]:
    """Return the numbers of the arguments of `main` whose buffer is donated, to a certain result or to any."""
    entries = argument_entries(main_function(module).operation, "arg_attrs")
    marks = ("tf.aliasing_output", "jax.buffer_donor")
    return frozenset(i for i, entry in enumerate(entries) if any(mark in entry for mark in marks))


def to_portable(module: Any) -> bytes:
    """Serialise the module as a portable artifact of the installed StableHLO version."""
    from jaxlib.mlir.dialects import stablehlo

    return _extension("_jax").mlir.serialize_portable_artifact(module, stablehlo.get_current_version(), True)


def first_line(error: Exception) -> str:
    """Return the first informative line of a parser's error, at most 200 characters, without its full stop.

    A first line that ends with a colon is joined with the next. An empty message gives the error's type.
    """
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = " ".join(line.strip() for line in lines[:2]) if lines[0].endswith(":") else lines[0]
    return text.rstrip(".:")[:200]


def _aval(kind: Any, role: str, what: str) -> Aval:
    """Return the shape and numpy dtype name of a tensor type. Raises `UserError` for any other type.

    `role` (`argument 3`) and `what` (the file) are for messages.
    """
    from jaxlib.mlir import ir

    if not isinstance(kind, ir.RankedTensorType):
        raise UserError(f"`{what}`: {role} of `main` is of type {kind}; expected a tensor.")
    if not kind.has_static_shape:
        raise UserError(f"`{what}`: {role} of `main` has the dynamic shape {kind}; a plan is made for fixed sizes.")
    shape, dtype, _ = tensor_type(kind)
    if dtype not in _TYPES:
        raise UserError(f"`{what}`: {role} of `main` has elements of type {kind.element_type}, which is not supported.")
    return shape, dtype


def _module_aliases(module: Any) -> dict[int, int]:
    """Return the result number by argument number that a module converted from HLO has as an attribute.

    Aliases of parts of an argument are left out; a result without number is 0.
    """
    from jaxlib.mlir import ir

    attributes = module.operation.attributes
    if "mhlo.input_output_alias" not in attributes:
        return {}
    aliases = {}
    for entry in map(ir.DictAttr, ir.ArrayAttr(attributes["mhlo.input_output_alias"])):
        result, alias = numbers_of(entry["output_index"]), ir.DictAttr(entry["alias"])
        if not numbers_of(alias["parameter_index"]):
            aliases[ir.IntegerAttr(alias["parameter_number"]).value] = result[0] if result else 0
    return aliases
