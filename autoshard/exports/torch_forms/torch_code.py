"""Exports of a plan to PyTorch: PyTorch/XLA marks, and DTensor placements."""

from autoshard.exports.export_text import head, order_text, table, unpinned
from autoshard.exports.form_writers import writes
from autoshard.exports.torch_forms.split_calls import SPLIT_CALLS, SPLIT_IMPORTS, split_sentence, split_source
from autoshard.exports.torch_forms.torch_recipe import recipe_lacks
from autoshard.planning import Plan, Rest, Spec, dims_by_axis, is_stacked, layer_spec, module_pattern, spec_text


def plan_parameters(plan: Plan) -> tuple[dict[str, Spec], tuple[str, ...]]:
    """Return the specs of parameters in a torch module by name, `*` for any layer, and a sentence for each omitted
    split.

    A stacked parameter has its layers as leading dim, which a module with a list of layers lacks: that dim and its
    split are dropped.
    """
    specs = {name: layer_spec(plan, name) for name in plan.arguments if plan.is_weight(name)}
    lost = [name for name in specs if is_stacked(name) and plan.arguments[name].dims[0]]
    sentences = [f"{name} is also split over its layers, which one layer's tensor cannot be." for name in lost]
    return specs, tuple(sentences)


def plan_inputs(plan: Plan) -> dict[str, Spec]:
    """Return the specs of a step's inputs, by name without the prefix `batch.`.

    They are those of role `batch`, else those of role `other`, which a module's buffers have as well.
    """
    role = "batch" if "batch" in plan.roles.values() else "other"
    return {name.removeprefix("batch."): spec for name, spec in plan.arguments.items() if plan.roles[name] == role}


_TORCH_XLA = '''
import re

import numpy as np
import torch_xla.distributed.spmd as xs

{mesh}
{order}

{parameters}
{inputs}

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


def mark_inputs(mesh, **inputs):
    """Mark the inputs of a step, by name; do so with every batch, or give `MpDeviceLoader` their specs."""
    for name, value in inputs.items():
        xs.mark_sharding(value, mesh, INPUTS[name])
'''
"""Template of the code for PyTorch/XLA."""


def _tuple(spec: Spec) -> str:
    """Return a spec as code of the tuple that `mark_sharding` accepts: for each dim an axis, a tuple of axes or
    None.
    """
    return repr(tuple(axes[0] if len(axes) == 1 else axes if axes else None for axes in spec.dims))


@writes("torch-xla")
def torch_xla_text(plan: Plan, sentence: str) -> str:
    """Return the plan's code for PyTorch/XLA: a mesh, and marks for parameters and inputs.

    Its first comment lines contain the predicted step (`sentence`) and the decisions that the code does not express.
    """
    specs, lost = plan_parameters(plan)
    lacks = (*unpinned(plan), *lost, "optimizer state; state made like its parameter is split like it.")
    rows = {module_pattern(plan, name): _tuple(spec) for name, spec in specs.items()}
    return head(plan, lacks, sentence) + _TORCH_XLA.format(
        mesh=f"MESH = {plan.mesh!r}",
        order=f"DEVICE_ORDER = {order_text(plan)}",
        parameters=table("PARAMETERS", rows),
        inputs=table("INPUTS", {name: _tuple(spec) for name, spec in plan_inputs(plan).items()}),
    )


_DTENSOR = '''
import re

{imports}from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Parameter

{mesh}
{parameters}
{inputs}{calls}
def make_mesh(device_type):
    return init_device_mesh(device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))


def distribute(model, mesh):
    """Replace every parameter of a model by a DTensor that is split as planned, and every buffer by a whole one.
    The model is returned."""
    names = {{id(parameter): name for name, parameter in model.named_parameters()}}
    made = {{}}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                name = names[id(parameter)]
                placements = next((p for pattern, p in PARAMETERS.items() if re.match(pattern, name)), None)
                if placements is None:
                    raise KeyError(f"the plan has no parameter {{name}}")
                value = distribute_tensor(parameter.detach(), mesh, placements)
                made[id(parameter)] = Parameter(value, requires_grad=parameter.requires_grad)
            module.register_parameter(key, made[id(parameter)])
        for key, buffer in list(module.named_buffers(recurse=False)):
            whole = distribute_tensor(buffer, mesh, [Replicate()] * mesh.ndim)
            module.register_buffer(key, whole, key not in module._non_persistent_buffers_set)
    place_gradients(model)
    split_calls(model, mesh)
    return model


def distribute_inputs(mesh, **inputs):
    """The inputs of a step, by name, as DTensors that are split as planned; every process gives the whole batch. An
    input may be a dict of tensors."""
    def placed(name, value):
        if isinstance(value, dict):
            return {{key: placed(f"{{name}}.{{key}}", each) for key, each in value.items()}}
        return distribute_tensor(value, mesh, INPUTS[name])

    return {{name: placed(name, value) for name, value in inputs.items()}}
'''
"""Template of the code for DTensor."""


@writes("dtensor")
def dtensor_text(plan: Plan, sentence: str) -> str:
    """Return the plan's code for DTensor: a mesh, and placements of parameters and inputs.

    A tensor with a dim split by axes in another order than the mesh's is replicated. Ranks are laid out row-major
    over the mesh, also if the plan has another device order. The first comment lines contain the predicted step
    (`sentence`) and the decisions that the code does not express.
    """
    specs, lost = plan_parameters(plan)
    unlike: list[str] = []

    def row(name: str, spec: Spec) -> str:
        """Return the code of the placements, one for each mesh axis; record the tensor in `unlike` if none express the
        spec.
        """
        dims = dims_by_axis(spec, plan.mesh)
        if dims is None:
            unlike.append(
                f"{name}: {spec_text(spec)} splits a dim by axes in another order than the mesh; it is replicated here."
            )
            dims = [None] * len(plan.mesh)
        return "[" + ", ".join("Replicate()" if dim is None else f"Shard({dim})" for dim in dims) + "]"

    rows = {module_pattern(plan, name): row(name, spec) for name, spec in specs.items()}
    inputs = {name: row(name, spec) for name, spec in plan_inputs(plan).items()}
    order = plan.device_order != tuple(range(len(plan.device_order)))
    lacks = (
        *unpinned(plan, "DTensor splits each op as its operands are", Rest.DTENSOR),
        *lost,
        *unlike,
        split_sentence("mesh"),
        *recipe_lacks(plan, recomputed=False, mixed=False),
        "optimizer state; state made like its parameter is split like it.",
        *(["the device order; ranks are laid out row-major over the mesh."] if order else []),
    )
    code = _DTENSOR.format(
        imports=SPLIT_IMPORTS,
        mesh=f"MESH = {plan.mesh!r}",
        parameters=table("PARAMETERS", rows),
        inputs=table("INPUTS", inputs),
        calls=SPLIT_CALLS,
    )
    return head(plan, lacks, sentence) + code + split_source()
