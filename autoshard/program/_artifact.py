"""Programs that are files: StableHLO as text or bytecode, `jax.export` artifacts, HLO protos and dumps."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoshard.errors import UserError
from autoshard.program import _roles
from autoshard.program._program import Program
from autoshard.program._trace import trace


SUFFIXES = (".mlir", ".stablehlo", ".mlirbc", ".bc", ".jax_export", ".jaxexport", ".export", ".pb", ".hlo", ".txt")
"""Endings of files that are read here; what a file holds is told from its content."""

_TYPES = {"i1": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_TYPES |= {f"{mark}i{n}": f"{kind}{n}" for mark, kind in (("", "int"), ("u", "uint")) for n in (8, 16, 32, 64)}


def load_artifact(path: str | Path, *, roles: _roles.Roles | None = None) -> Program:
    """The program in a file: the function `main` of a StableHLO module, a `jax.export` artifact, or an HLO module.

    Arguments keep the names that locations carry, else they are `arg0`, `arg1`, ...; an argument whose buffer the
    module aliases to a result is donated state. `roles` says what arguments are for where their names do not.

    Raises `UserError` if the file is missing, corrupt, optimised, or has dynamic shapes.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"there is no file `{path}`; give the path of a StableHLO module or a jax.export artifact.")
    data = file.read_bytes()
    if not data:
        raise UserError(f"`{path}` is empty; expected a StableHLO module, a jax.export artifact or an HLO module.")
    if data.startswith(b"ML\xefR"):
        return _from_module(data, file, roles)
    text = _text(data)
    if text is not None and text.lstrip().startswith("HloModule"):
        return _from_hlo(_hlo_proto(text, file), file, roles)
    if text is not None and "func.func" in text:
        return _from_module(text, file, roles)
    if text is not None:
        raise UserError(f"`{path}` is text but no module: expected StableHLO (`func.func`) or HLO (`HloModule`).")
    if file.suffix == ".pb":
        return _from_hlo(data, file, roles)
    return _from_export(data, file, roles)


def _module(name: str) -> Any:
    """A module of jax that is no public interface; every use of one in this room goes through here."""
    return importlib.import_module(name)


def _text(data: bytes) -> str | None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return None if "\x00" in text else text


def _hlo_proto(text: str, file: Path) -> bytes:
    if re.search(r"is_scheduled=true|[ =]fusion\(|[ =]bitcast\(", text):
        raise UserError(
            f"`{file}` is an HLO dump taken after optimisation; give the one before it, with `before_optimizations` "
            "in its name."
        )
    try:
        return _module("jaxlib._hlo").hlo_module_from_text(text).as_serialized_hlo_module_proto()
    except Exception as error:  # XLA's parser raises many types
        raise UserError(f"`{file}` is not a readable HLO module: {_first_line(error)}.") from error


def _from_hlo(proto: bytes, file: Path, roles: _roles.Roles | None) -> Program:
    try:
        module = _module("jaxlib._jax").mlir.hlo_to_stablehlo(proto)
    except Exception as error:  # XLA's converter raises many types
        raise UserError(f"`{file}` does not convert from HLO to StableHLO: {_first_line(error)}.") from error
    return _from_module(module, file, roles)


def _from_module(source: bytes | str, file: Path, roles: _roles.Roles | None) -> Program:
    """Wrap a module as a callable by way of `jax.export`'s own record, and trace that."""
    import jax
    from jax import export

    jax_mlir = _module("jax._src.interpreters.mlir")
    array = _module("jax.core").ShapedArray
    with jax_mlir.make_ir_context() as context:
        try:
            if isinstance(source, bytes) and b"StableHLO_v" in source[:64]:
                module = _module("jaxlib._jax").mlir.deserialize_portable_artifact(source, context)
            else:
                module = jax_mlir.ir.Module.parse(source)
        except Exception as error:  # MLIR raises its own types
            raise UserError(f"`{file}` is not a readable StableHLO module: {_first_line(error)}.") from error
        main = _main_of(module, file)
        kinds = main.type
        ins = [_abstract(kind, f"argument {i}", file) for i, kind in enumerate(kinds.inputs)]
        outs = [_abstract(kind, f"result {i}", file) for i, kind in enumerate(kinds.results)]
        names = _argument_names(main, len(ins))
        aliases, dropped = _take_attributes(main, len(ins), jax_mlir.ir)
        aliases.update(_module_aliases(module))
        if "mhlo.fusion" in str(module):
            raise UserError(f"`{file}` holds fusions: it was dumped after optimisation; give the module before it.")
        serialised = _module("jax._src.export._export")._module_to_bytecode(module)
    tree = jax.tree.structure
    exported = export.Exported(
        fun_name=file.stem,
        in_tree=tree((tuple(ins), {})),
        in_avals=tuple(array(leaf.shape, leaf.dtype) for leaf in ins),
        out_tree=tree(tuple(outs)),
        out_avals=tuple(array(leaf.shape, leaf.dtype) for leaf in outs),
        _has_named_shardings=False,
        _in_named_shardings=(None,) * len(ins),
        _out_named_shardings=(None,) * len(outs),
        in_shardings_hlo=(None,) * len(ins),
        out_shardings_hlo=(None,) * len(outs),
        nr_devices=1,
        platforms=("cpu",),
        ordered_effects=(),
        unordered_effects=(),
        disabled_safety_checks=(export.DisabledSafetyCheck.platform(),),
        mlir_module_serialized=serialised,
        calling_convention_version=export.maximum_supported_calling_convention_version,
        module_kept_var_idx=tuple(range(len(ins))),
        uses_global_constants=False,
        _get_vjp=None,
    )
    notes = (f"Shardings on {dropped} arguments of the file were dropped.",) if dropped else ()
    return _program(exported, tuple(ins), names, aliases, file, roles, notes)


def _from_export(data: bytes, file: Path, roles: _roles.Roles | None) -> Program:
    import jax
    from jax import export

    try:
        exported = export.deserialize(bytearray(data))
    except Exception as error:  # the flatbuffer reader raises many types
        raise UserError(
            f"`{file}` is neither a StableHLO module nor a readable jax.export artifact: {_first_line(error)}."
        ) from error
    if any(not isinstance(size, int) for aval in exported.in_avals for size in aval.shape):
        raise UserError(
            f"`{file}` was exported with symbolic shapes; a plan is made for fixed sizes, so export with numbers."
        )
    if exported.nr_devices != 1:
        raise UserError(
            f"`{file}` was exported for {exported.nr_devices} devices; export the program before it is split."
        )
    leaves = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    args, kwargs = jax.tree.unflatten(exported.in_tree, leaves)
    if kwargs:
        raise UserError(f"`{file}` was exported with keyword arguments ({', '.join(kwargs)}); export positional ones.")
    module = exported.mlir_module()
    donated = {
        int(i) for i in re.findall(r"%arg(\d+): [^%]*?\{[^%]*?(?:tf.aliasing_output|jax.buffer_donor)", _head(module))
    }
    positions: list[int] = []
    for position, arg in enumerate(args):
        positions.extend([position] * len(jax.tree.leaves(arg)))
    donate = sorted({positions[leaf] for leaf in donated if leaf < len(positions)})
    names = _position_names(module, args)
    return trace(exported.call, args, name=file.stem, donate_argnums=donate, roles=roles, arg_names=names)


def _program(
    exported: Any,
    args: tuple[Any, ...],
    names: Sequence[str],
    aliases: dict[int, int],
    file: Path,
    roles: _roles.Roles | None,
    notes: Sequence[str],
) -> Program:
    def main(*values: Any) -> Any:
        return exported.call(*values)

    return trace(
        main,
        args,
        name=file.stem,
        donate_argnums=sorted(aliases),
        roles=roles,
        arg_names=names,
        notes=notes,
        ties=aliases,
    )


def _main_of(module: Any, file: Path) -> Any:
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    named = [op for op in functions if op.name.value == "main"]
    if not named:
        there = ", ".join(f"`{op.name.value}`" for op in functions) or "none"
        raise UserError(f"`{file}` has no function `main` (its functions: {there}); rename the entry to `main`.")
    return named[0]


def _abstract(kind: Any, what: str, file: Path) -> Any:
    import jax

    text = str(kind)
    match = re.fullmatch(r"tensor<((?:[\d?]+x)*)([^,<>]+)(?:,.*)?>", text)
    if match is None:
        raise UserError(f"`{file}`: {what} of `main` is of type {text}; expected a tensor.")
    if "?" in match.group(1):
        raise UserError(f"`{file}`: {what} of `main` has the dynamic shape {text}; a plan is made for fixed sizes.")
    shape = tuple(int(size) for size in match.group(1).split("x") if size)
    if match.group(2) not in _TYPES:
        raise UserError(f"`{file}`: {what} of `main` has elements of type {match.group(2)}, which is not supported.")
    dtype = jax.numpy.dtype(_TYPES[match.group(2)])
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise UserError(
            f"`{file}`: {what} of `main` is {text}, and JAX keeps 64-bit values only with JAX_ENABLE_X64=1; set it, or "
            "export the program with 32-bit types."
        )
    return jax.ShapeDtypeStruct(shape, dtype)


def _argument_names(main: Any, count: int) -> list[str]:
    """Names from the locations of the arguments, `arg<i>` where there is none."""
    found: list[str] = []
    for index, argument in enumerate(main.arguments):
        match = re.match(r'loc\("([^":]+)"', str(argument.location))
        found.append(_dotted(match.group(1)) if match else f"arg{index}")
    return found if len(set(found)) == count else [f"arg{i}" for i in range(count)]


def _dotted(text: str) -> str:
    """`params['w'][0].x` -> `params.w.0.x`; HLO text spells it `params__w__.7`."""
    if "__" in text:
        text = re.sub(r"_+$", "", re.sub(r"\.\d+$", "", text)).replace("__", ".")
    return re.sub(
        r"\[(?:'([^']*)'|\"([^\"]*)\"|(\d+))\]", lambda m: "." + next(g for g in m.groups() if g is not None), text
    )


def _take_attributes(main: Any, count: int, ir: Any) -> tuple[dict[int, int], int]:
    """Aliases argument -> result, and how many shardings were dropped; the module keeps neither."""
    if "arg_attrs" not in main.attributes:
        return {}, 0
    aliases: dict[int, int] = {}
    dropped = 0
    kept: list[Any] = []
    for index in range(count):
        attributes = {item.name: item.attr for item in main.arg_attrs[index]}
        if "tf.aliasing_output" in attributes:
            aliases[index] = int(ir.IntegerAttr(attributes.pop("tf.aliasing_output")).value)
        if attributes.pop("mhlo.sharding", None) is not None or attributes.pop("sdy.sharding", None) is not None:
            dropped += 1
        attributes.pop("jax.buffer_donor", None)
        kept.append(ir.DictAttr.get(attributes))
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(kept)
    return aliases, dropped


def _module_aliases(module: Any) -> dict[int, int]:
    """Aliases that a module converted from HLO carries as an attribute; only whole arguments."""
    attributes = module.operation.attributes
    if "mhlo.input_output_alias" not in attributes:
        return {}
    text = str(attributes["mhlo.input_output_alias"])
    pattern = r"parameter_index = array<i64>, parameter_number = (\d+) : i64\}, output_index = array<i64(?:: (\d+))?>"
    return {int(argument): int(result or 0) for argument, result in re.findall(pattern, text)}


def _head(module: str) -> str:
    return next((line for line in module.splitlines() if "func.func public @main" in line), "")


def _position_names(module: str, args: Sequence[Any]) -> list[str]:
    """Names of the positional arguments of an exported function, from the paths that its locations carry."""
    import jax

    paths = re.findall(r'^#loc\d* = loc\("([^"/]+)"\)', module, re.MULTILINE)
    roots = list(dict.fromkeys(re.split(r"[.\[]", path)[0] for path in paths))
    used = [i for i, arg in enumerate(args) if jax.tree.leaves(arg)]
    if len(roots) != len(used):
        return [f"arg{i}" for i in range(len(args))]
    names = dict(zip(used, roots, strict=True))
    return [names.get(i, f"arg{i}") for i in range(len(args))]


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = " ".join(line.strip() for line in lines[:2]) if lines[0].endswith(":") else lines[0]
    return text.rstrip(".:")[:200]
