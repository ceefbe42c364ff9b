"""Export of a plan to PyTorch's FSDP2: `fully_shard` over the devices that share the batch, DTensor over the others."""

import math

from autoshard.errors import FormError
from autoshard.exports.export_text import head, table, unpinned
from autoshard.exports.form_writers import writes
from autoshard.exports.torch_forms.parallel_styles import (
    batch_and_tensor_axes,
    check_axes,
    gathering_axes,
    split_by,
    split_together,
)
from autoshard.exports.torch_forms.split_calls import SPLIT_CALLS, SPLIT_IMPORTS, split_sentence, split_source
from autoshard.exports.torch_forms.torch_code import plan_inputs, plan_parameters
from autoshard.exports.torch_forms.torch_recipe import LAYER_LISTS, LIST_TYPES, mixed_code, recipe_lacks, recompute_code
from autoshard.planning import Plan, Rest, module_pattern


_FSDP2 = '''
{functools}import re
from collections import Counter

{imports}from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import {mixed_import}fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import {list_types}, Parameter

MESH = {mesh!r}
{parameters}
{inputs}{calls}
def make_mesh(device_type):
    return init_device_mesh(device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))


def _dims(name):
    """The dim that FSDP splits and gathers before use, and the one that `tensor` splits; None for none."""
    for pattern, dims in PARAMETERS.items():
        if re.match(pattern, name.removeprefix("base_model.model.")):  # PEFT's model around the planned one
            return dims
    raise KeyError(f"the plan has no parameter {{name}}")


{lists}{recompute}def shard(model, mesh, **options):
    """Split a model's parameters as planned: every block of a list of layers is gathered for itself, what else there is
    with the model. `options` are those of `fully_shard`, such as `mp_policy`."""
{mixed}    names = {{}}
    made = {{}}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        if id(parameter) not in made:
            made[id(parameter)] = parameter, parameter
            if "tensor" in MESH:
                dim = _dims(name)[1]
                placements = [Replicate() if dim is None else Shard(dim)]
                value = distribute_tensor(parameter.detach(), mesh["tensor"], placements)
                made[id(parameter)] = parameter, Parameter(value, requires_grad=parameter.requires_grad)
        module.register_parameter(key, made[id(parameter)][1])
        names.setdefault(id(made[id(parameter)][1]), name)
    if "tensor" in MESH:
        for module in model.modules():
            for key, buffer in list(module.named_buffers(recurse=False)):
                whole = distribute_tensor(buffer, mesh["tensor"], [Replicate()])
                module.register_buffer(key, whole, key not in module._non_persistent_buffers_set)

    def place(parameter):
        dim = _dims(names[id(parameter)])[0]
        return None if dim is None else Shard(dim)

{recomputes}    blocks = [block for each in layer_lists(model).values() for block in each.children()]
    for module in (*reversed(blocks), model):
        fully_shard(module, mesh=mesh[{group}], shard_placement_fn=place, **options)
{whole}    return model


def local_inputs(mesh, **inputs):
    """This process's part of the inputs of a step, by name; every process gives the whole batch. An input may be a dict
    of tensors."""
    parts, own = 1, 0
    for axis in ({group},):
        parts, own = parts * MESH[axis], own * MESH[axis] + mesh[axis].get_local_rank()

    def part(name, value):
        if isinstance(value, dict):
            return {{key: part(f"{{name}}.{{key}}", each) for key, each in value.items()}}
        dim = INPUTS[name]
        if dim is not None:
            if value.shape[dim] % parts:
                # A process with fewer rows would weigh as much as the others in the mean of gradients.
                raise ValueError(f"`{{name}}` has {{value.shape[dim]}} rows, which {{parts}} processes do not divide")
            value = value.chunk(parts, dim)[own].contiguous()
        return DTensor.from_local(value, mesh["tensor"], [Replicate()]) if "tensor" in MESH else value

    return {{name: part(name, value) for name, value in inputs.items()}}
'''
"""Template of the exported code."""


def _input_dims(plan: Plan, data: list[str]) -> dict[str, int | None]:
    """Return the dim of each input of which each process receives a part, None for none.

    It is the dim that the plan splits over the batch's axes. If it splits no input, it is the first dim of all.

    Raises: UserError if the processes do not divide it.
    """
    inputs = plan_inputs(plan)
    dims = {name: split_by(spec, data) for name, spec in inputs.items()}
    if not plan.batch_axes or any(dim is not None for dim in dims.values()):
        return dims
    parts = math.prod(plan.mesh[axis] for axis in data)
    for name in dims:
        shape = plan.shapes.get(f"batch.{name}", plan.shapes.get(name, ()))
        if shape and plan.roles.get(f"batch.{name}") == "batch":
            if shape[0] % parts:
                raise FormError(
                    f"FSDP2 gives each of {parts} processes a part of {name}, whose {shape[0]} rows do not divide."
                )
            dims[name] = 0
    return dims


@writes("fsdp2")
def fsdp2_text(plan: Plan, sentence: str) -> str:
    """Return the plan's code for FSDP2, with a mesh of `data` (all axes that split the batch) and `tensor` (those of
    the parameters). If some axes of the batch split no parameter, `data` has these and `shard` the others.

    A parameter that is split by some of the axes, by several dims or unevenly has the nearest split that FSDP2 can
    express. The head names such parameters. `sentence` is the line on the predicted step. Raises: UserError for a plan
    that splits no batch, and for mesh axes that split neither batch nor parameters.
    """
    specs, lost = plan_parameters(plan)
    inputs = plan_inputs(plan)
    data, tensor = batch_and_tensor_axes(plan)
    if not data:
        raise FormError("FSDP2 splits parameters over the devices that share a batch, and the plan splits no batch.")
    check_axes(plan, "fsdp2")
    sharing = gathering_axes(plan)
    sizes = [math.prod(plan.mesh[axis] for axis in axes) for axes in (sharing, tensor)]
    rows, unlike, whole = {}, [], []
    for name, spec in specs.items():
        shape = plan.shapes[name][len(plan.shapes[name]) - len(spec.dims) :]
        dims = gathered, tensor_dim = split_by(spec, sharing), split_by(spec, tensor)
        if tensor_dim is not None and not split_together(spec, tensor_dim, tensor):
            dims = gathered, tensor_dim = gathered, None
        if gathered and shape[gathered] % math.prod(sizes if gathered == tensor_dim else sizes[:1]):
            dims = None, tensor_dim  # FSDP2 splits only the first dim unevenly
        if not dims[0] and tensor_dim == 0 and shape[0] % math.prod(sizes):
            # Torch gathers uneven parts of parts wrongly: a checkpoint of whole tensors would have other rows.
            other = next((dim for dim in range(1, len(shape)) if not shape[dim] % sizes[0]), None)
            dims = other, tensor_dim if other is not None else None
        if gathered is None:
            whole.append(name)
        if any(axis in spec.axes for axis in sharing) and not (
            dims[0] is not None and split_together(spec, dims[0], sharing)
        ):
            unlike.append(name)
        elif any(axis in spec.axes for axis in tensor) and dims[1] is None:
            unlike.append(name)
        rows[module_pattern(plan, name)] = repr(dims)
    batch = _input_dims(plan, data)
    some = whole if len(whole) < len(specs) else []
    # The second of two axes splits parameters, and gradients are summed over both. FSDP stores parameters whole
    # over a group of one device.
    copies = math.prod(plan.mesh[axis] for axis in data) // sizes[0]
    alone = copies == 1 and bool(whole) and not some
    groups = {"data": sizes[0], "shard": 1} if alone else {"data": copies, "shard": sizes[0]}
    mesh = (groups if alone or copies > 1 else {"data": sizes[0]}) | ({"tensor": sizes[1]} if tensor else {})
    elsewhere = sorted({name for name, spec in inputs.items() for axis in spec.axes if axis not in data})
    lacks = (
        *(
            unpinned(plan, "DTensor splits each op as its operands are", Rest.DTENSOR)
            if tensor
            else unpinned(plan, "every process computes its part of the batch", Rest.DTENSOR, local_batch=True)
        ),
        *lost,
        *([f"{', '.join(unlike)}: split by some of the axes, by several dims or unevenly."] if unlike else []),
        *([f"{', '.join(whole)}: whole over the batch's devices; FSDP splits them as well."] if some else []),
        *(
            [f"{', '.join(elsewhere)}: split by axes that do not split the batch; they are whole there."]
            if elsewhere
            else []
        ),
        *([split_sentence('mesh["tensor"]')] if tensor else []),
        *recipe_lacks(plan, recomputed=True, mixed=True),
        "optimizer state; state made like its parameter is split like it.",
        "the device order; ranks are laid out row-major over the mesh.",
    )
    recompute, mixed = recompute_code(plan), mixed_code(plan)
    imports = SPLIT_IMPORTS if tensor else "import torch\n" if mixed else ""
    code = _FSDP2.format(
        functools="import functools\n" if recompute else "",
        lists=LAYER_LISTS,
        list_types=", ".join(LIST_TYPES),
        recompute=recompute,
        recomputes="    recompute(model)\n" if recompute else "",
        mixed=mixed,
        mixed_import="MixedPrecisionPolicy, " if mixed else "",
        imports=imports,
        calls=SPLIT_CALLS if tensor else "\n",
        whole='    split_calls(model, mesh["tensor"])\n' if tensor else "",
        mesh=mesh,
        group='"data", "shard"' if "shard" in mesh else '"data"',
        parameters=table("PARAMETERS", rows),
        inputs=table("INPUTS", {name: repr(dim) for name, dim in batch.items()}),
    )
    return head(plan, lacks, sentence) + code + (split_source() if tensor else "")
