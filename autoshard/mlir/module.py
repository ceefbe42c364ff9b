"""Modules: contexts, parsing, the function `@main`, and names and source lines of locations."""

import functools
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from autoshard.errors import UserError


def new_context() -> Any:
    """Make an `ir.Context` that knows StableHLO, CHLO, MHLO and Shardy."""
    from jax.interpreters import mlir

    return mlir.make_ir_context()


def parse_module(source: bytes | str, context: Any = None) -> Any:
    """Parse MLIR text, bytecode or a StableHLO portable artifact into an `ir.Module`, in `context` or a new one.

    Raises `UserError` with the parser's first complaint if the source is none of these.
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
    """Serialise the module as MLIR bytecode, with locations."""
    import io

    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def main_function(module: Any) -> Any:
    """Return the function op `@main`. Raises `UserError` if there is none."""
    for op in module.body.operations:
        if op.operation.name == "func.func" and symbol(op) == "main":
            return op
    raise UserError("the module has no function named main: give a StableHLO module with a public @main.")


def make_public(module: Any) -> None:
    """Give `@main` public visibility (in place), which modules of other sources state."""
    from jaxlib.mlir import ir

    with module.context:
        main_function(module).operation.attributes["sym_visibility"] = ir.StringAttr.get("public")


def has_dynamic_shapes(module: Any) -> bool:
    """Return True if an op of `@main` has a result whose shape is not static, such as one with bounds."""
    from jaxlib.mlir import ir

    results = (result for view in main_block(module).operations for result in view.operation.results)
    ranked = (result.type for result in results if isinstance(result.type, ir.RankedTensorType))
    return any(not ir.RankedTensorType(kind).has_static_shape for kind in ranked)


def main_block(module: Any) -> Any:
    """Return the block of `@main`. Raises `UserError` if there is none."""
    return main_function(module).operation.regions[0].blocks[0]


def main_types(module: Any) -> tuple[list[tuple[tuple[int, ...], str]], list[tuple[tuple[int, ...], str]]]:
    """Return shapes and numpy dtype names of `@main`'s arguments and results.

    Raises `UserError` if numpy has no such dtype. Tokens, tuples and dynamic shapes raise it too.
    """
    from jaxlib.mlir import ir

    kind = ir.FunctionType(ir.TypeAttr(main_function(module).operation.attributes["function_type"]).value)
    return [_array_type(value) for value in kind.inputs], [_array_type(value) for value in kind.results]


def _array_type(kind: Any) -> tuple[tuple[int, ...], str]:
    """Return the shape and numpy dtype name of a tensor type. Raises `UserError` if numpy has no such dtype."""
    shape, dtype, _ = tensor_type(kind)
    if not dtype.startswith(_NUMPY):
        raise UserError(f"the module has a value of type {kind}, whose elements are of a kind that is not known.")
    return shape, dtype


_NUMPY = ("bool", "int", "uint", "float", "bfloat", "complex")
"""Beginnings of numpy's names of dtypes."""


def tensor_type(kind: Any) -> tuple[tuple[int, ...], str, int]:
    """Return shape, dtype name and bytes per element of a type.

    Types other than tensors of static shape, such as tokens and tuples, give `((), "token", 0)`. The dtype is named as
    in numpy. Elements that numpy lacks have MLIR's name and count as one byte.
    """
    from jaxlib.mlir import ir

    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        return (), "token", 0
    dtype, size = _element(kind.element_type)
    return tuple(kind.shape), dtype, size


def _element(kind: Any) -> tuple[str, int]:
    """Return the numpy name of an element type and its bytes, rounded up; `i1` is `bool`, other types have MLIR's name
    and 1.
    """
    from jaxlib.mlir import ir

    text = str(kind)
    if isinstance(kind, ir.ComplexType):
        _, size = _element(kind.element_type)
        return f"complex{16 * size}", 2 * size
    if isinstance(kind, ir.IntegerType):
        sign = "u" if kind.is_unsigned else ""
        return ("bool" if text == "i1" else f"{sign}int{kind.width}"), (kind.width + 7) // 8
    if text.startswith("f8"):
        return f"float8_{text[2:].lower()}", 1
    names = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
    return (names[text], kind.width // 8) if text in names else (text, 1)


def location_name(location: Any) -> str:
    """Return the outermost name of a location (JAX's name stack), or an empty string if the location has no name."""
    from jaxlib.mlir import ir

    return ir.NameLoc(location).name_str.rstrip(":") if isinstance(location, ir.NameLoc) else ""


def text_of(module: Any) -> str:
    """Return the text of a module without locations."""
    return module.operation.get_asm(enable_debug_info=False)


def maker_of(value: Any) -> Any | None:
    """Return the op that computes a value; None for an argument of a block."""
    from jaxlib.mlir import ir

    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def collect(root: Any, names: Iterable[str]) -> list[Any]:
    """Return all ops below `root`, and `root`, with one of these names, in pre-order."""
    from jaxlib.mlir import ir

    ops: list[Any] = []

    def visit(op: Any) -> Any:
        if op.name in names:
            ops.append(op)
        return ir.WalkResult.ADVANCE

    root.walk(visit, ir.WalkOrder.PRE_ORDER)
    return ops


def replace_by_block(op: Any, block: Any) -> None:
    """Replace an op by the ops of a function's block with the same operands and results (in place).

    Only the block's terminator remains in it.
    """
    for argument, operand in zip(list(block.arguments), list(op.operands), strict=True):
        argument.replace_all_uses_with(operand)
    inner = list(block.operations)
    for each in inner[:-1]:
        each.operation.move_before(op)
    for result, value in zip(list(op.results), list(inner[-1].operation.operands), strict=True):
        result.replace_all_uses_with(value)
    op.erase()


def symbol(function: Any) -> str:
    """Return the symbol name of a function or mesh."""
    from jaxlib.mlir import ir

    return ir.StringAttr(function.operation.attributes["sym_name"]).value


def target_name(call: Any) -> str:
    """Return the name of a custom call's target, as the module has it."""
    from jaxlib.mlir import ir

    return ir.StringAttr(call.attributes["call_target_name"]).value


def mesh_ops(module: Any) -> dict[str, Any]:
    """Return the module's ops that define meshes, by symbol."""
    return {symbol(op): op.operation for op in module.body.operations if op.operation.name == "sdy.mesh"}


def argument_entries(function: Any, key: str) -> list[dict[str, Any]]:
    """Return the attribute dictionaries of a function's arguments or results, as `key` says (`arg_attrs` or
    `res_attrs`).

    Empty if the function has none.
    """
    from jaxlib.mlir import ir

    if key not in function.attributes:
        return []
    dictionaries = map(ir.DictAttr, ir.ArrayAttr(function.attributes[key]))
    return [{entry[i].name: entry[i].attr for i in range(len(entry))} for entry in dictionaries]


def numbers_of(attribute: Any) -> list[int]:
    """Return the numbers of an array, of a dense tensor in row-major order, or of one integer; booleans are 0 or 1."""
    from jaxlib.mlir import ir

    return [attribute.value] if isinstance(attribute, ir.IntegerAttr) else [int(number) for number in attribute]


def scalar_of(attribute: Any) -> int:
    """Return the only number of a dense tensor of integers, of any width; the tensor must repeat one number."""
    from jaxlib.mlir import ir

    return ir.IntegerAttr(ir.DenseElementsAttr(attribute).get_splat_value()).value


def integer_of(attribute: Any) -> int:
    """Return the number of an integer attribute."""
    from jaxlib.mlir import ir

    return ir.IntegerAttr(attribute).value


def pairs_of(attribute: Any) -> list[list[int]]:
    """Return the numbers of a dense tensor of two columns, such as the padding of each dim, as rows."""
    flat = numbers_of(attribute)
    return [flat[i : i + 2] for i in range(0, len(flat), 2)]


def compared(op: Any) -> str:
    """Return the direction of a comparison: `EQ`, `NE`, `LT`, `LE`, `GT` or `GE`."""
    from jaxlib.mlir.dialects import stablehlo

    return stablehlo.ComparisonDirectionAttr(op.attributes["comparison_direction"]).value


_COMBINED = frozenset(f"stablehlo.{name}" for name in ("add", "multiply", "maximum", "minimum"))
"""Ops by which an all-reduce can combine partial results."""
_COMBINED_FLAGS = frozenset({"stablehlo.and", "stablehlo.or"})


def is_combined_by_collectives(op: Any) -> bool:
    """Return True for a reduction whose partial results an all-reduce combines, or XLA gathers.

    XLA combines sums, products, maxima, minima, and the logical and, and or, of booleans. It gathers the partial
    results of reductions of several values. Other reductions, and those of several ops, give False.
    """
    if len(op.results) > 1:
        return True
    first = op.regions[0].blocks[0].operations[0].operation
    flags = tensor_type(op.results[0].type)[1] == "bool"
    simple = len(list(op.regions[0].blocks[0].operations)) == 2
    return simple and first.name in (_COMBINED | _COMBINED_FLAGS if flags else _COMBINED)


def code_line(op: Any) -> str:
    """Return the innermost line of the user's code in an op's location, as `shown_line` does."""
    return shown_line(_frames(op.location))


def shown_line(frames: Iterable[tuple[str, int]]) -> str:
    """Return the innermost line of the user's code, or of a known model, such as `model.py:12`; or an empty string.

    Frames of frameworks and of this package are skipped. A file of an installed package is shown with its path in the
    package. The lowering, which calls the program's functions, ends the search: the frames outside of it only asked for
    the program.

    - `frames`: (file with its path, line) of each frame, innermost first.
    """
    for file, line in frames:
        if file == _LOWERING:
            return ""
        if shown := _shown(file):
            return f"{shown}:{line}"
    return ""


def _frames(location: Any) -> Iterator[tuple[str, int]]:
    """Yield files and lines of a location, innermost first; only the first location of a fused one."""
    from jaxlib.mlir import ir

    todo = [location]
    while todo:
        location = todo.pop()
        if isinstance(location, ir.CallSiteLoc):
            todo += [location.caller, location.callee]
        elif isinstance(location, ir.NameLoc):
            todo.append(location.child_loc)
        elif isinstance(location, ir.FusedLoc):
            todo += location.locations[:1]
        elif isinstance(location, ir.FileLineColLoc):
            yield location.filename, location.start_line


_PACKAGE = str(pathlib.Path(__file__).parent.parent)
_LOWERING = f"{_PACKAGE}/program/lowering.py"
"""The module that calls the functions of programs; frames outside of it belong to its callers."""
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_FRAMEWORK = re.compile(
    r"(jax|jaxlib|optax|flax|equinox|numpy|torch|torchax|torch_xla|autoshard)/|transformers/(?!models/)"
)
"""Pattern of paths of installed frameworks, whose lines no user wrote; transformers' models are excepted."""
_STANDARD = re.compile(r"/lib/python3\.\d+/")
"""Pattern of paths in Python's standard library."""


@functools.lru_cache(maxsize=4096)
def _shown(file: str) -> str:
    """Return the displayed name of a file; empty for a file that no user wrote.

    A file of an installed package has its path in the package, any other its last part; a module without locations
    `line`.
    """
    if file in ("-", ""):
        return "line"  # a module file without locations: lines of the text itself
    *_, inside = _INSTALLED.split(file)
    if inside != file:
        return "" if _FRAMEWORK.match(inside) else inside
    own = file.startswith(f"{_PACKAGE}/") or _STANDARD.search(file) or file.startswith("<")
    return "" if own else file.rpartition("/")[2]
