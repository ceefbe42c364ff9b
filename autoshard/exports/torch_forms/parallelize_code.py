"""Exports of a plan to tensor parallelism: transformers' `tp_plan`, and a `parallelize` function like torchtitan's."""

import math
from collections.abc import Mapping

from autoshard.errors import FormError
from autoshard.exports.export_text import head, table, unpinned
from autoshard.exports.form_writers import writes
from autoshard.exports.torch_forms.parallel_styles import (
    COLUMNS_LAST,
    GATHERED,
    check_axes,
    gathering_axes,
    read_styles,
    sizes,
)
from autoshard.exports.torch_forms.torch_recipe import (
    LAYER_LISTS,
    LIST_TYPES,
    dtypes,
    mixed_code,
    recipe_lacks,
    recompute_code,
)
from autoshard.exports.torch_forms.transformers_styles import read_transformers
from autoshard.planning import Plan, Rest
from autoshard.program import Program


_TRANSFORMERS = '''
{imports}from transformers.distributed import DistributedConfig
{registry}
TP_SIZE = {size}  # processes that split the model between them
{groups}{conv1d}{plan}
# A model class has rules of its own, which hold where none is given here.
WHOLE = {whole}
{experts}

def config():
    """For `from_pretrained(folder, distributed_config=config())`; for older releases give `tp_plan=TP_PLAN`."""
{check}    tp_plan = dict.fromkeys(WHOLE, "replicate") | TP_PLAN
    return DistributedConfig(tp_plan=tp_plan, tp_size=TP_SIZE{options}{group_options})
'''
_GROUPS = "{name} = {size}  # groups of these processes, each with its part of the batch\n"
"""Line on the groups that share the batch."""
_CHECK_TORCH = """    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13):
        raise RuntimeError("with FSDP and tensor parallelism, transformers loads other weights before torch 2.13")
"""
"""Check of torch's version: transformers 5.24 loads weights that both split rightly with 2.13, wrongly with 2.9."""
_EXPERTS = "\n# Every process holds some of the experts, which tokens are sent to.\n"
"""Comment above the experts' rules."""
_CONV1D_IMPORTS = """import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
"""
_CONV1D_REGISTRY = """from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer
"""
_CONV1D = '''

class Conv1DParallel(TensorParallelLayer):
    """A layer whose weight is [in, out] is split by a dim of its weight; values beside it are whole or split."""

    def __init__(self, dim, taken, given):
        super().__init__()
        self.dim, self.taken, self.given = dim, taken, given

    def shard_param(self, module, param, mesh):
        value = module._parameters[param]
        place = Shard(self.dim) if value.ndim == 2 else Shard(0) if self.dim == 1 else Replicate()
        split = distribute_tensor(value, mesh, [place], src_data_rank=None)
        module._parameters[param] = torch.nn.Parameter(split, requires_grad=value.requires_grad)

    def transform_inputs_pre_forward(self, module, args, kwargs, mesh):
        taken = DTensor.from_local(args[0], mesh, [self.taken], run_check=False)
        return (taken.redistribute(placements=[Replicate() if self.dim == 1 else Shard(-1)]), *args[1:]), kwargs

    def transform_output_post_forward(self, module, output, mesh):
        return output.redistribute(placements=[self.given]).to_local()


for style, options in {{
    "conv1d_colwise": (1, Replicate(), Shard(-1)),
    "conv1d_colwise_gather_output": (1, Replicate(), Replicate()),
    "conv1d_rowwise": (0, Shard(-1), Replicate()),
    "conv1d_rowwise_split_input": (0, Replicate(), Replicate()),
}}.items():
    ALL_PARALLEL_STYLES.register(style, Conv1DParallel(*options))

'''.replace("{{", "{").replace("}}", "}")
"""Code of the styles of layers with their columns last."""

_TORCHTITAN = '''
{functools}{counter}{torch}from torch.distributed.device_mesh import init_device_mesh
{fsdp_import}{tensor_import}{nn_import}
MESH = {mesh!r}


def make_mesh(device_type):
    return init_device_mesh(device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))

{hold_whole}
{recompute}def parallelize(model, mesh{options}):
    """Split {what}; where torchtitan is used, from its
    `parallelize_fn`, with `parallel_dims`' meshes of these names."""
{mixed}{recomputes}{tensor}{fsdp}    return model
'''
_TENSOR_IMPORT = """from torch.distributed.tensor import DTensor, Replicate{shard}
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
"""
_HOLD_WHOLE = """
def hold_whole(model, mesh):
    \"\"\"Make every other parameter a DTensor that is whole on each device, which its module reads as a plain tensor:
    a norm of all gradients needs parameters of one kind.\"\"\"
    made = {}
    for module in list(model.modules()):
        keys = [key for key, each in module._parameters.items() if each is not None and not isinstance(each, DTensor)]
        for key in keys:
            own = module._parameters[key]
            whole = DTensor.from_local(own.detach(), mesh, [Replicate()], run_check=False)
            made.setdefault(id(own), (own, Parameter(whole, requires_grad=own.requires_grad)))
            module.register_parameter(key, made[id(own)][1])
        if keys:
            local = {key: property(lambda self, key=key: _local(self._parameters[key])) for key in keys}
            module.__class__ = type(type(module).__name__, (type(module),), local)


def _local(value):
    if isinstance(value, DTensor) and value.device_mesh.ndim == 1:  # else as FSDP holds it between its uses
        return value.to_local(grad_placements=[Replicate()])
    return value

"""
_TENSOR = """    names = {{}}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shared = [group for group in names.values() if len(group) > 1]
    styles = {{
{rows}    }}
{tied}    parallelize_module(model, mesh["tp"], styles)
    for first, *others in shared:
        for name in others:
            path, _, key = name.rpartition(".")
            model.get_submodule(path).register_parameter(key, model.get_parameter(first))
    hold_whole(model, mesh["tp"])
"""
_TIED = """    tied = {{{rows}}}
    for first, *others in shared:  # a layer that shares an embedding's weight is split like it
        style = tied.get(first.removesuffix(".weight"))
        styles |= {{name.removesuffix(".weight"): style for name in others if style}}
"""
_FSDP = """    blocks = [block for each in layer_lists(model).values() for block in each.children()]
    for module in (*reversed(blocks), model):
        fully_shard(module, mesh=mesh[{group}], {place}**options)
"""
_PLACE = """
    def place(parameter):
        # Torch gathers uneven parts of parts wrongly, so another dim is split there.
        uneven = parameter.placements[0].is_shard(0) and parameter.shape[0] % (MESH["fsdp"] * MESH["tp"])
        return Shard(1) if uneven else None

"""
_CALLS = {
    "colwise": "ColwiseParallel()",
    "rowwise": "RowwiseParallel()",
    GATHERED["colwise"]: "ColwiseParallel(output_layouts=Replicate())",
    GATHERED["rowwise"]: "RowwiseParallel(input_layouts=Replicate())",
    "embedding_rowwise": "RowwiseParallel(input_layouts=Replicate())",
    "embedding_colwise": "ColwiseParallel(output_layouts=Replicate())",
}
"""Code of torch's style by name of ours."""


@writes("transformers")
def transformers_text(plan: Plan, sentence: str, program: Program | None) -> str:
    """Return the plan's code for transformers. `sentence` is the line on the predicted step.

    Raises: UserError as `read_transformers` does, and if no axis splits modules.
    """
    styles = read_transformers(plan, program)
    check_axes(plan, "transformers")
    if styles.gathers and styles.tensor == 1:
        lacks = unpinned(plan, "every process computes its part of the batch", Rest.DTENSOR, local_batch=True)
    else:
        lacks = _lacks(plan, styles.tensor, styles.rules, styles.lacks)
    # FSDP of transformers gathers in bfloat16 if it is asked to, and sums gradients in float32.
    mixed = styles.gathers and styles.data > 1 and dtypes(plan) == ("bfloat16", "float32")
    lacks = (*lacks, *recipe_lacks(plan, recomputed=False, mixed=mixed))
    groups = group_options = ""
    if styles.data > 1:
        lacks = (
            *lacks,
            f"the batch, which {styles.data} groups of {styles.tensor} processes share; give each its part.",
        )
        if styles.tensor > 1:
            clips = "transformers' Trainer clips mesh by mesh."
            lacks = (*lacks, f"`clip_grad_norm_` of torch, which takes gradients on one mesh; {clips}")
        kind = "fsdp" if styles.gathers else "dp_replicate"
        groups = _GROUPS.format(name=f"{kind}_size".upper(), size=styles.data)
        group_options = f", {kind}_size={kind.upper()}_SIZE" + ", fsdp_mixed_precision=True" * mixed
    own = any(style.startswith(COLUMNS_LAST) for style in styles.rules.values())
    both = styles.gathers and styles.tensor > 1
    experts = {name: repr(style) for name, style in styles.experts.items()}
    return head(plan, lacks, sentence) + _TRANSFORMERS.format(
        imports=_CONV1D_IMPORTS if own else "import torch\n" if both else "",
        check=_CHECK_TORCH if both else "",
        registry=_CONV1D_REGISTRY if own else "",
        conv1d=_CONV1D if own else "",
        size=styles.tensor,
        plan=table("TP_PLAN", {name: repr(style) for name, style in styles.rules.items()}),
        whole="(\n" + "".join(f"    {name!r},\n" for name in styles.whole) + ")",
        experts=f"{_EXPERTS}{table('EP_PLAN', experts)}" if experts else "",
        groups=groups,
        group_options=group_options,
        options=", ep_plan=EP_PLAN, ep_size=TP_SIZE" if experts else "",
    )


@writes("torchtitan")
def torchtitan_text(plan: Plan, sentence: str, program: Program | None) -> str:
    """Return the plan's code for torchtitan, with FSDP over the batch's devices if there are several.

    `sentence` is the line on the predicted step. Raises: UserError if no axis splits the batch or modules, and as
    `read_styles` does for a plan that splits modules.
    """
    parts, tensor_parts = sizes(plan)
    data, tensor = parts > 1, tensor_parts > 1
    shards = math.prod(plan.mesh[axis] for axis in gathering_axes(plan))
    groups = ({"dp_replicate": parts // shards} if shards < parts else {}) | {"fsdp": shards}
    rows, tied = "", ""
    if tensor or not data:
        styles = read_styles(plan, "torchtitan", program)
        lacks = _lacks(plan, styles.tensor, styles.styles, styles.lacks)
        rows = "".join(f"        {name!r}: {_CALLS[style]},\n" for name, style in styles.styles.items())
        if styles.tied:
            tied = _TIED.format(rows=", ".join(f"{name!r}: {_CALLS[style]}" for name, style in styles.tied.items()))
    else:
        lacks = unpinned(plan, "every process computes its part of the batch", Rest.DTENSOR, local_batch=True)
    if data:
        lacks = (*lacks, "the dims by which the batch's devices split parameters: FSDP splits the first dim of each.")
    check_axes(plan, "torchtitan")
    recompute, mixed = recompute_code(plan), mixed_code(plan) if data else ""
    lacks = (*lacks, *recipe_lacks(plan, recomputed=True, mixed=data))
    lists = data or bool(recompute)
    nn = ", ".join([*(LIST_TYPES if lists else ()), *["Parameter"] * tensor])
    what = (["a model's layers over `tp`"] if tensor else []) + (["every block over `fsdp`"] if data else [])
    return head(plan, lacks, sentence) + _TORCHTITAN.format(
        mesh=(groups if data else {}) | ({"tp": tensor_parts} if tensor else {}),
        tensor=_TENSOR.format(rows=rows, tied=tied) if tensor else "",
        tensor_import=_TENSOR_IMPORT.format(shard=", Shard" if data else "") if tensor else "",
        hold_whole=_HOLD_WHOLE if tensor else "",
        fsdp=(_PLACE if tensor else "")
        + _FSDP.format(
            place="shard_placement_fn=place, " if tensor else "", group=", ".join(f'"{name}"' for name in groups)
        )
        if data
        else "",
        fsdp_import=f"from torch.distributed.fsdp import {'MixedPrecisionPolicy, ' if mixed else ''}fully_shard\n"
        if data
        else "",
        functools="import functools\n" if recompute else "",
        counter="from collections import Counter\n\n" if lists else "",
        torch="import torch\n" if mixed else "",
        recompute=(LAYER_LISTS if lists else "") + recompute,
        recomputes="    recompute(model)\n" if recompute else "",
        mixed=mixed,
        nn_import=f"from torch.nn import {nn}\n",
        options=", **options" if data else "",
        what=" and ".join(what) + ("; `options` are `fully_shard`'s" if data else ""),
    )


def _lacks(plan: Plan, tensor: int, styles: Mapping[str, str], own: tuple[str, ...]) -> tuple[str, ...]:
    """Return sentences on the omitted parts of the plan: its own decisions, `own`, and values that styles gather.

    - `tensor`: number of devices that split modules.
    - `styles`: style by name.

    Raises: UserError if `tensor` is 1.
    """
    gathers = sorted(name for name, style in styles.items() if style.removeprefix(COLUMNS_LAST) in GATHERED.values())
    if tensor == 1:
        raise FormError("tensor parallelism over one device splits nothing: the plan splits only the batch.")
    whole = [f"values that stay split around {', '.join(gathers)}: they are gathered there."] if gathers else []
    return (*unpinned(plan, "each style gathers and sums what it has to", Rest.DTENSOR), *own, *whole)
