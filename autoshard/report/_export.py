"""A plan as code or configuration for the places where people already work.

Every form says in its first lines what of the plan it cannot express.
"""

import re
from collections.abc import Callable, Mapping

from autoshard.errors import UserError
from autoshard.plan import Plan, Spec, axis_words, hlo_sharding, is_stacked, layer_pattern, mesh_words
from autoshard.report._names import clean


def export_plan(plan: Plan, form: str) -> str:
    """The plan as text in one of `EXPORT_FORMS`; `UserError` for another."""
    if form not in EXPORT_FORMS:
        raise UserError(f"there is no export to {form!r}; choose from {', '.join(EXPORT_FORMS)}.")
    return EXPORT_FORMS[form](plan)


def _head(plan: Plan, lacks: tuple[str, ...], mark: str = "#") -> str:
    """Comment lines: what this is, and what it leaves out."""
    mesh = mesh_words(plan.mesh)
    lines = [f"Shardings of {clean(plan.program_name, 80)} on {plan.topology}, mesh {mesh}; made by autoshard."]
    refined = [axis for axis in plan.original_mesh if axis not in plan.mesh]
    lines += [f"The mesh is refined: {', '.join(_parts(plan, axis))} are the parts of {axis}." for axis in refined]
    lines += [f"Not expressed here: {lack}" for lack in lacks]
    return "\n".join(f"{mark} {line}" for line in lines) + "\n"


def _parts(plan: Plan, axis: str) -> list[str]:
    """Axes of the mesh that are parts of a refined one, outer first."""
    return [own for own in plan.mesh if own not in plan.original_mesh and own.startswith(f"{axis}(")]


def _pins(plan: Plan) -> tuple[str, ...]:
    lacks = []
    if plan.pins:
        lacks.append(f"the {len(plan.pins)} intermediates that the plan pins; XLA's propagation chooses them instead.")
    if plan.regions:
        lacks.append(
            f"the {len(plan.regions)} ops that the plan splits in space with halos; XLA splits them its own way."
        )
    return tuple(lacks)


def _table(name: str, rows: Mapping[str, str]) -> str:
    body = "".join(f"    {key!r}: {value},\n" for key, value in rows.items())
    return f"{name} = {{\n{body}}}\n"


def _partition(spec: Spec) -> str:
    entries = [repr(axes[0]) if len(axes) == 1 else repr(axes) if axes else "None" for axes in spec.dims]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


_JAX = '''
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

{mesh}
{order}

def make_mesh(devices=None):
    """The plan's mesh. TPUs are numbered by slice, coordinates and core; other devices by process and id."""

    def place(device):
        where = (getattr(device, "slice_index", 0) or 0, *getattr(device, "coords", ()))
        return (*where, getattr(device, "core_on_chip", 0), device.process_index, device.id)

    ordered = sorted(jax.devices() if devices is None else devices, key=place)
    grid = np.array([ordered[number] for number in DEVICE_ORDER], dtype=object)
    return Mesh(grid.reshape(tuple(MESH.values())), tuple(MESH))


def shardings(specs, mesh):
    """One NamedSharding for each name, in the order of the step's flat arguments (or results)."""
    return {{name: NamedSharding(mesh, spec) for name, spec in specs.items()}}


def jit(fn, args, mesh=None, **options):
    """`jax.jit(fn)` with the plan's shardings; `args` are its arguments, or their shapes, as they were planned."""
    mesh = make_mesh() if mesh is None else mesh
    ins, outs = jax.tree.structure(tuple(args)), jax.tree.structure(jax.eval_shape(fn, *args))
    return jax.jit(
        fn,
        in_shardings=ins.unflatten(shardings(ARGUMENTS, mesh).values()),
        out_shardings=outs.unflatten(shardings(RESULTS, mesh).values()),
        **options,
    )


{arguments}

{results}'''


def _jax(plan: Plan) -> str:
    return _head(plan, _pins(plan)) + _JAX.format(
        mesh=f"MESH = {plan.mesh!r}",
        order=f"DEVICE_ORDER = {_order(plan)}",
        arguments=_table("ARGUMENTS", {name: _partition(spec) for name, spec in plan.arguments.items()}),
        results=_table("RESULTS", {name: _partition(spec) for name, spec in plan.results.items()}),
    )


def _order(plan: Plan) -> str:
    if plan.device_order == tuple(range(len(plan.device_order))):
        return f"range({len(plan.device_order)})"
    return repr(plan.device_order)


def _hlo(plan: Plan) -> str:
    order = ",".join(map(str, plan.device_order))
    lines = [_head(plan, _pins(plan)), f"# device assignment (numbers in the topology's order): {order}\n"]
    lines += [f"argument {clean(name)} {hlo_sharding(spec, plan.mesh)}\n" for name, spec in plan.arguments.items()]
    lines += [f"result {clean(name)} {hlo_sharding(spec, plan.mesh)}\n" for name, spec in plan.results.items()]
    return "".join(lines)


def _torch_parameters(plan: Plan) -> tuple[dict[str, Spec], tuple[str, ...]]:
    """Parameters by the name that a torch module gives them, `*` for any layer; and sentences on what is left out.

    A stacked parameter has its layers as leading dim, which a module with a list of layers does not have.
    """
    specs, lost = {}, []
    for name, spec in plan.arguments.items():
        if plan.roles[name] != "parameter":
            continue
        stacked = is_stacked(name)
        if stacked and spec.dims[0]:
            lost.append(name)
        specs[name] = Spec(spec.dims[1:]) if stacked else spec
    sentences = [f"{name} is also split over its layers, which one layer's tensor cannot be." for name in lost]
    return specs, tuple(sentences)


def _pattern(plan: Plan, name: str) -> str:
    return layer_pattern(name, (plan.shapes[name] or (0,))[0])


_TORCH_XLA = '''
import re

import numpy as np
import torch_xla.distributed.spmd as xs

{mesh}
{order}

{parameters}

def make_mesh():
    return xs.Mesh(np.array(DEVICE_ORDER), tuple(MESH.values()), tuple(MESH))


def mark(model, mesh):
    """Mark every parameter of a model on the XLA device; call `xr.use_spmd()` before the model is moved there."""
    for name, parameter in model.named_parameters():
        for pattern, spec in PARAMETERS.items():
            if re.match(pattern, name):
                xs.mark_sharding(parameter, mesh, spec)
                break
        else:
            raise KeyError(f"the plan has no parameter {{name}}")
'''


def _tuple(spec: Spec) -> str:
    return repr(tuple(axes[0] if len(axes) == 1 else axes if axes else None for axes in spec.dims))


def _torch_xla(plan: Plan) -> str:
    specs, lost = _torch_parameters(plan)
    lacks = (*_pins(plan), *lost, "optimizer state and batch; state made like its parameter is split like it.")
    rows = {_pattern(plan, name): _tuple(spec) for name, spec in specs.items()}
    return _head(plan, lacks) + _TORCH_XLA.format(
        mesh=f"MESH = {plan.mesh!r}", order=f"DEVICE_ORDER = {_order(plan)}", parameters=_table("PARAMETERS", rows)
    )


_DTENSOR = '''
import re

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Parameter

{mesh}
{parameters}

def make_mesh(device_type):
    return init_device_mesh(device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))


def distribute(model, mesh):
    """Replace every parameter of a model by a DTensor that is split as planned."""
    for module_name, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = f"{{module_name}}.{{key}}" if module_name else key
            for pattern, placements in PARAMETERS.items():
                if re.match(pattern, name):
                    value = distribute_tensor(parameter.detach(), mesh, placements)
                    module.register_parameter(key, Parameter(value, requires_grad=parameter.requires_grad))
                    break
            else:
                raise KeyError(f"the plan has no parameter {{name}}")
'''


def placements(spec: Spec, mesh: Mapping[str, int]) -> list[tuple[str, int] | None] | None:
    """For each mesh axis the dim that it splits, or None; None at all if DTensor cannot express the spec.

    DTensor splits a dim by several axes in the order of the mesh, major first.
    """
    axes = list(mesh)
    for dim in spec.dims:
        if [axes.index(axis) for axis in dim] != sorted(axes.index(axis) for axis in dim):
            return None
    where = {axis: dim for dim, names in enumerate(spec.dims) for axis in names}
    return [("Shard", where[axis]) if axis in where else None for axis in axes]


def _dtensor(plan: Plan) -> str:
    specs, lost = _torch_parameters(plan)
    rows, unlike = {}, []
    for name, spec in specs.items():
        found = placements(spec, plan.mesh)
        if found is None:
            unlike.append(f"{name}: {spec} splits a dim by axes in another order than the mesh; it is replicated here.")
            found = [None] * len(plan.mesh)
        rows[_pattern(plan, name)] = "[" + ", ".join(f"Shard({p[1]})" if p else "Replicate()" for p in found) + "]"
    order = plan.device_order != tuple(range(len(plan.device_order)))
    lacks = (
        *_pins(plan),
        *lost,
        *unlike,
        "optimizer state and batch; state made like its parameter is split like it.",
        *(["the device order; ranks are laid out row-major over the mesh."] if order else []),
    )
    return _head(plan, lacks) + _DTENSOR.format(mesh=f"MESH = {plan.mesh!r}", parameters=_table("PARAMETERS", rows))


_FLAX = '''
from flax.linen import logical_to_mesh_axes

{mesh}
{rules}
{parameters}

def partition_specs():
    """The `PartitionSpec` of each parameter, as Flax makes it of names and rules."""
    return {{name: logical_to_mesh_axes(axes, RULES) for name, axes in LOGICAL_AXES.items()}}
'''


def _flax(plan: Plan) -> str:
    """A logical axis for each way in which a dim is split, since one name may have one rule only."""
    rules: dict[tuple[str, ...], str] = {}
    rows = {}
    for name, spec in plan.arguments.items():
        if plan.roles[name] == "parameter":
            words = [(axes, "_".join(axis_words(axes))) for axes in spec.dims]
            rows[name] = repr(tuple(rules.setdefault(axes, f"over_{word}") if axes else None for axes, word in words))
    listed = "".join(f"    ({name!r}, {(axes[0] if len(axes) == 1 else axes)!r}),\n" for axes, name in rules.items())
    lacks = (*_pins(plan), "optimizer state and batch.", "the device order.")
    return _head(plan, lacks) + _FLAX.format(
        mesh=f"MESH = {plan.mesh!r}\n",
        rules=f"# For flax.linen.logical_axis_rules, or nnx.logical_axis_rules.\nRULES = (\n{listed})\n",
        parameters="# Names for nn.with_logical_partitioning, or nnx.with_partitioning, of each parameter.\n"
        + _table("LOGICAL_AXES", rows),
    )


def _maxtext(plan: Plan) -> str:
    """The parallelism settings of MaxText's base.yml that come nearest; an axis's use is read off the plan."""
    from autoshard.cost import Topology

    slices = Topology.parse(plan.topology).slices
    settings: dict[str, int] = {}
    notes = []
    dcn = slices
    for axis, size in plan.mesh.items():
        use = _use(plan, axis)
        notes.append(f"{axis}={size} is used as {use} parallelism.")
        outer = size if dcn % size == 0 and dcn >= size else dcn if size % dcn == 0 else 1
        dcn //= outer
        for prefix, part in (("dcn", outer), ("ici", size // outer)):
            if part > 1:
                key = f"{prefix}_{use}_parallelism"
                settings[key] = settings.get(key, 1) * part
    lacks = (
        *_pins(plan),
        "single tensors that are split in another way than the rest; MaxText's own rules split by kind of dim.",
        "the device order.",
    )
    body = "".join(f"{key}: {value}\n" for key, value in settings.items())
    return _head(plan, lacks) + "".join(f"# {note}\n" for note in notes) + body


def _use(plan: Plan, axis: str) -> str:
    """What an axis does, in MaxText's words: expert, data, fsdp, tensor or context."""
    batch = [spec for name, spec in plan.arguments.items() if plan.roles[name] == "batch" and spec.dims]
    stored = [
        name for name in plan.arguments
        if plan.roles[name] in ("parameter", "optimizer_state") and axis in plan.arguments[name].axes
    ]  # fmt: skip
    groups = _groups_over(plan, axis)
    if "experts" in groups:
        return "expert"
    if "batch" in groups or any(axis in spec.dims[0] for spec in batch):
        return "fsdp" if stored else "data"
    if groups & {"heads", "kv heads", "ffn"}:
        return "tensor"
    if "sequence" in groups or any(axis in dim for spec in batch for dim in spec.dims[1:]):
        return "context"
    return "tensor"


def _groups_over(plan: Plan, axis: str) -> set[str]:
    """The dim groups that an axis splits, by the plan's words: `ffn and heads over model`."""
    found: set[str] = set()
    for line in plan.words:
        groups, _, axes = line.rpartition(" over ")
        if axis in re.split(", | and ", axes):
            found |= set(re.split(", | and ", groups))
    return found


EXPORT_FORMS: dict[str, Callable[[Plan], str]] = {
    "jax": _jax,
    "flax": _flax,
    "maxtext": _maxtext,
    "torch-xla": _torch_xla,
    "dtensor": _dtensor,
    "hlo": _hlo,
}
