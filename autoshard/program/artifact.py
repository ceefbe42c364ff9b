"""Programs in files: StableHLO as text or bytecode, `jax.export` artifacts, HLO protos and dumps."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoshard import mlir
from autoshard.base.files import read_bytes
from autoshard.errors import UserError
from autoshard.program import roles as role_rules
from autoshard.program.jax.trace import trace
from autoshard.program.program_record import Program, Role, step_fingerprint


MOST_MODULE_BYTES = 1 << 31
"""Most bytes of a file with a module, since protos are no larger."""
SUFFIXES = (".mlir", ".stablehlo", ".mlirbc", ".bc", ".jax_export", ".jaxexport", ".export", ".pb", ".hlo", ".txt")
"""Suffixes of the files that are read here; a file's format is detected from its content."""


def load_artifact(path: str | Path, *, roles: role_rules.Roles | None = None) -> Program:
    """Return the program in a file: `main` of a StableHLO module, a `jax.export` artifact, or an HLO module.

    Arguments have the names in the module's locations, else `arg0`, `arg1`, ... An argument whose buffer the module
    aliases to a result is donated state. `roles` gives the roles of arguments whose names do not tell them. The
    name of the program is the file's without its suffix.

    Raises `UserError` if the file is missing, corrupt or optimised, or has dynamic shapes.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"there is no file `{path}`; give the path of a StableHLO module or a jax.export artifact.")
    try:
        data = read_bytes(file, MOST_MODULE_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read `{path}`: {getattr(error, 'strerror', None) or error}.") from None
    if not data:
        raise UserError(f"`{path}` is empty; expected a StableHLO module, a jax.export artifact or an HLO module.")
    if data.startswith(b"ML\xefR"):
        return _from_module(data, file, roles)
    text = _text(data)
    if text is not None and text.lstrip().startswith("HloModule"):
        return _from_hlo(_hlo_proto(text, file), file, roles)
    if text is not None and "func.func" in text:
        return _from_module(text, file, roles)
    if text is not None and '"autoshard-plan"' in text:
        raise UserError(
            f"`{path}` is a plan and no program: name the program that it is of; commands take plans by --plan."
        )
    if text is not None:
        raise UserError(f"`{path}` is text but no module: expected StableHLO (`func.func`) or HLO (`HloModule`).")
    if file.suffix == ".pb":
        return _from_hlo(data, file, roles)
    return _from_export(data, file, roles)


def _text(data: bytes) -> str | None:
    """Return the data as text; None if they are no UTF-8 or contain a NUL."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return None if "\x00" in text else text


def _hlo_proto(text: str, file: Path) -> bytes:
    """Convert HLO text to a proto. Raises `UserError` for a dump that was written after optimisation."""
    if re.search(r"is_scheduled=true|[ =]fusion\(|[ =]bitcast\(", text):
        raise UserError(
            f"`{file}` is an HLO dump after optimisation; give the one before it, with `before_optimizations` "
            "in its name."
        )
    return mlir.hlo_text_to_proto(text, str(file))


def _from_hlo(proto: bytes, file: Path, roles: role_rules.Roles | None) -> Program:
    """Trace an HLO proto as `_from_module` does, after conversion to StableHLO."""
    return _from_module(mlir.hlo_to_stablehlo(proto, str(file)), file, roles)


def _from_module(source: bytes | str, file: Path, roles: role_rules.Roles | None) -> Program:
    """Trace a StableHLO module, text or bytecode, wrapped as a callable by `jax.export`'s own record.

    Shardings of its arguments are dropped, with a note. Raises `UserError` for a module that cannot be read, and for
    64-bit types if JAX has these disabled.
    """
    import jax
    from jax import export
    from jax.core import ShapedArray

    module = mlir.read_file_module(source, str(file))
    labels = mlir.take_labels(module)
    entry = mlir.take_entry(module, str(file))
    ins = [_abstract(aval, f"argument {i}", file) for i, aval in enumerate(entry.arguments)]
    outs = [_abstract(aval, f"result {i}", file) for i, aval in enumerate(entry.results)]
    names = [f"arg{i}" for i in range(len(ins))] if entry.names is None else [_dotted(text) for text in entry.names]
    names = names if labels is None else list(labels.names)
    uses = mlir.argument_uses(module)
    ties = entry.aliases or _updates(module, uses)
    tree = jax.tree.structure
    fields = {field.name for field in dataclasses.fields(export.Exported)}
    until_jax_010 = {"_has_named_shardings": False}
    exported = export.Exported(
        fun_name=file.stem,
        in_tree=tree((tuple(ins), {})),
        in_avals=tuple(ShapedArray(leaf.shape, leaf.dtype) for leaf in ins),
        out_tree=tree(tuple(outs)),
        out_avals=tuple(ShapedArray(leaf.shape, leaf.dtype) for leaf in outs),
        _in_named_shardings=(None,) * len(ins),
        _out_named_shardings=(None,) * len(outs),
        in_shardings_hlo=(None,) * len(ins),
        out_shardings_hlo=(None,) * len(outs),
        nr_devices=1,
        platforms=("cpu",),
        ordered_effects=(),
        unordered_effects=(),
        disabled_safety_checks=(export.DisabledSafetyCheck.platform(),),
        mlir_module_serialized=mlir.to_portable(module),
        calling_convention_version=export.maximum_supported_calling_convention_version,
        module_kept_var_idx=tuple(range(len(ins))),
        uses_global_constants=False,
        _get_vjp=None,
        **{name: value for name, value in until_jax_010.items() if name in fields},
    )

    def main(*values: Any) -> Any:
        """Call the module of the file."""
        return exported.call(*values)

    notes = (f"Shardings on {entry.dropped} arguments of the file were dropped.",) if entry.dropped else ()
    program = trace(
        main,
        tuple(ins),
        name=file.stem,
        donate_argnums=sorted(entry.aliases),
        roles=roles,
        arg_names=names,
        notes=notes,
        ties=ties,
        evidence=_evidence(uses, ties, names, entry.arguments) if labels is None else [*map(Role, labels.roles)],
    )
    if labels is not None:
        named = zip(program.results, labels.results, strict=True)
        program = dataclasses.replace(
            program,
            results=tuple(dataclasses.replace(result, name=name) for result, name in named),
            fingerprint=step_fingerprint(module, program.arguments),
        )
    return dataclasses.replace(program, lowerings=None)  # a file has one module


def _updates(module: Any, uses: Sequence[mlir.Use]) -> dict[int, int]:
    """Return argument -> the result that updates it, both by position, from the ops of a program without donation.

    The map is empty unless a weight is among the updated arguments. Without that condition the output of a residual
    block would count as the updated value of its input.
    """
    updates = {
        argument: result
        for argument, result in mlir.updated_arguments(module).items()
        if uses[argument] is not mlir.Use.DATA
    }
    return updates if any(uses[argument] is mlir.Use.WEIGHT for argument in updates) else {}


def _evidence(
    uses: Sequence[mlir.Use], ties: dict[int, int], names: Sequence[str], avals: Sequence[tuple[tuple[int, ...], str]]
) -> list[Role | None]:
    """Return the roles of the arguments whose names tell nothing, from the ops that use them; None for the others.

    - `uses`: use of each argument.
    - `ties`: argument -> the result that updates it.
    - `names`: name of each argument.
    - `avals`: shape and dtype of each argument.
    """
    return [
        None if role_rules.is_telling(name) else _role(use, index in ties, shape, dtype)
        for index, (use, name, (shape, dtype)) in enumerate(zip(uses, names, avals, strict=True))
    ]


def _role(use: mlir.Use, tied: bool, shape: tuple[int, ...], dtype: str) -> Role:
    """Return the role of an argument from its use.

    Scalars and values that are written in part are `OTHER`. Tied floats are a parameter (a weight) or optimizer state
    (a peer of another tied value), other tied values `OTHER`. Weights that are not tied are parameters, all else is a
    batch.

    - `use`: the first op that combines it with another value.
    - `tied`: True if the program returns it updated.
    """
    floating = dtype.startswith(("float", "bfloat", "complex"))
    if not shape or use is mlir.Use.WRITTEN:
        return Role.OTHER
    if tied:
        if use is mlir.Use.WEIGHT and floating:
            return Role.PARAMETER
        return Role.OPTIMIZER_STATE if use is mlir.Use.PEER and floating else Role.OTHER
    return Role.PARAMETER if use is mlir.Use.WEIGHT and floating else Role.BATCH


def _from_export(data: bytes, file: Path, roles: role_rules.Roles | None) -> Program:
    """Trace a `jax.export` artifact.

    Raises `UserError` for unreadable data, symbolic shapes, several devices and keyword arguments.
    """
    import jax
    from jax import export

    try:
        exported = export.deserialize(bytearray(data))
    except Exception as error:  # the flatbuffer reader raises many types
        raise UserError(
            f"`{file}` is neither a StableHLO module nor a readable jax.export artifact: {mlir.first_line(error)}."
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
    module = mlir.read_file_module(exported.mlir_module_serialized, str(file))
    positions: list[int] = []
    for position, arg in enumerate(args):
        positions.extend([position] * len(jax.tree.leaves(arg)))
    kept_leaves = exported.module_kept_var_idx  # the module lacks arguments that nothing uses
    found = mlir.argument_uses(module)
    extra = len(found) - len(kept_leaves)  # the number of the platform comes first if there are several
    donate = sorted({positions[kept_leaves[leaf - extra]] for leaf in mlir.donated(module)})
    names = _position_names((mlir.argument_names(module) or ())[extra:], kept_leaves, positions, len(args))
    uses = [mlir.Use.NONE] * len(leaves)
    for leaf, use in zip(kept_leaves, found[extra:], strict=True):
        uses[leaf] = use
    # A structure of arguments tells which are returned updated. Without one the ops do.
    updates = _updates(module, found) if len(args) == len(leaves) else {}
    ties = {kept_leaves[argument - extra]: result for argument, result in updates.items()} or None

    def evidence(ties: dict[int, int]) -> list[Role | None]:
        """Return `_evidence` for the leaves of the arguments, under the ties that `trace` finds."""
        avals = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves]
        return _evidence(uses, ties, [names[position] for position in positions], avals)

    return trace(
        exported.call,
        args,
        name=file.stem,
        donate_argnums=donate,
        roles=roles,
        arg_names=names,
        ties=ties,
        evidence=evidence,
    )


def _abstract(aval: tuple[tuple[int, ...], str], what: str, file: Path) -> Any:
    """Return the `jax.ShapeDtypeStruct` of a shape and the name of a dtype.

    Raises `UserError`, with `what` as the name of the value, for 64-bit types if JAX has these disabled.
    """
    import jax

    shape, name = aval
    dtype = jax.numpy.dtype(name)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise UserError(
            f"`{file}`: {what} of `main` is {name}{list(shape)}, and JAX keeps 64-bit values only with "
            "JAX_ENABLE_X64=1; set it, or export the program with 32-bit types."
        )
    return jax.ShapeDtypeStruct(shape, dtype)


def _dotted(text: str) -> str:
    """Rewrite `params['w'][0].x`, which HLO text spells `params__w__.7`, as `params.w.0.x`."""
    if "__" in text:
        text = re.sub(r"_+$", "", re.sub(r"\.\d+$", "", text)).replace("__", ".")
    return re.sub(
        r"\[(?:'([^']*)'|\"([^\"]*)\"|(\d+))\]", lambda m: "." + next(g for g in m.groups() if g is not None), text
    )


def _position_names(
    found: Sequence[str] | None, kept: Sequence[int], positions: Sequence[int], count: int
) -> list[str]:
    """Return the names of an exported function's positional arguments, from the paths of their leaves in the module.

    A name is the root that the paths of all leaves of an argument share, else `arg<i>`. All are `arg<i>` if names
    repeat.

    - `found`: paths of the module's arguments; None if it has no names.
    - `kept`: for each argument of the module, the number of its leaf.
    - `positions`: for each leaf, the position of its argument.
    - `count`: number of positional arguments.
    """
    roots: dict[int, set[str]] = {}
    for leaf, path in zip(kept, found or (), strict=False):
        roots.setdefault(positions[leaf], set()).add(re.split(r"[.\[]", path)[0])
    names = [next(iter(roots[i])) if len(roots.get(i, ())) == 1 else f"arg{i}" for i in range(count)]
    return names if len(set(names)) == count else [f"arg{i}" for i in range(count)]
