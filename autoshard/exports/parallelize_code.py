"""Exports of a plan to tensor parallelism: transformers' `tp_plan`, and a `parallelize` function like torchtitan's."""

from collections.abc import Mapping

from autoshard.errors import UserError
from autoshard.exports.export_text import head, table, unpinned
from autoshard.exports.form_writers import writes
from autoshard.exports.parallel_styles import COLUMNS_LAST, GATHERED, read_styles, sizes
from autoshard.exports.transformers_styles import read_transformers
from autoshard.planning import Plan


_TRANSFORMERS = '''
{imports}from transformers.distributed import DistributedConfig
{registry}
TP_SIZE = {size}  # processes that split the model between them
{conv1d}{plan}
# A model class has rules of its own, which hold where none is given here.
WHOLE = {whole}
{experts}

def config():
    """For `from_pretrained(folder, distributed_config=config())`; for older releases give `tp_plan=TP_PLAN`."""
    return DistributedConfig(tp_plan=dict.fromkeys(WHOLE, "replicate") | TP_PLAN, tp_size=TP_SIZE{options})
'''
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
from torch.distributed.device_mesh import init_device_mesh
{fsdp_import}{tensor_import}{list_import}
MESH = {mesh!r}


def make_mesh(device_type):
    return init_device_mesh(device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))


def parallelize(model, mesh{options}):
    """Split {what}; where torchtitan is used, from its
    `parallelize_fn`, with `parallel_dims`' meshes of these names."""
{tensor}{fsdp}    return model
'''
_TENSOR_IMPORT = """from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
"""
_TENSOR = """    parallelize_module(
        model,
        mesh["tp"],
        {{
{rows}        }},
    )
"""
_FSDP = """    blocks = [block for each in model.modules() if isinstance(each, ModuleList) for block in each]
    for module in (*reversed(blocks), model):
        fully_shard(module, mesh=mesh["fsdp"], **options)
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
def transformers_text(plan: Plan, sentence: str) -> str:
    """Return the plan's code for transformers. `sentence` is the line on the predicted step.

    Raises: UserError as `read_transformers` does, and if no axis splits modules.
    """
    styles = read_transformers(plan)
    lacks = _lacks(plan, styles.tensor, styles.rules, styles.lacks)
    if styles.data > 1:
        lacks = (
            *lacks,
            f"the batch, which {styles.data} groups of {styles.tensor} processes share; give each its part.",
        )
    own = any(style.startswith(COLUMNS_LAST) for style in styles.rules.values())
    experts = {name: repr(style) for name, style in styles.experts.items()}
    return head(plan, lacks, sentence) + _TRANSFORMERS.format(
        imports=_CONV1D_IMPORTS if own else "",
        registry=_CONV1D_REGISTRY if own else "",
        conv1d=_CONV1D if own else "",
        size=styles.tensor,
        plan=table("TP_PLAN", {name: repr(style) for name, style in styles.rules.items()}),
        whole="(\n" + "".join(f"    {name!r},\n" for name in styles.whole) + ")",
        experts=f"{_EXPERTS}{table('EP_PLAN', experts)}" if experts else "",
        options=", ep_plan=EP_PLAN, ep_size=TP_SIZE" if experts else "",
    )


@writes("torchtitan")
def torchtitan_text(plan: Plan, sentence: str) -> str:
    """Return the plan's code for torchtitan, with FSDP over the batch's devices if there are several.

    `sentence` is the line on the predicted step. Raises: UserError if no axis splits the batch or modules, and as
    `read_styles` does for a plan that splits modules.
    """
    parts, tensor_parts = sizes(plan)
    data, tensor = parts > 1, tensor_parts > 1
    rows = ""
    if tensor or not data:
        styles = read_styles(plan, "torchtitan")
        lacks = _lacks(plan, styles.tensor, styles.styles, styles.lacks)
        rows = "".join(f"            {name!r}: {_CALLS[style]},\n" for name, style in styles.styles.items())
    else:
        lacks = unpinned(plan, "every process computes its part of the batch", local_batch=True)
    if data:
        lacks = (*lacks, "the dims by which the batch's devices split parameters: FSDP splits the first dim of each.")
    what = (["a model's layers over `tp`"] if tensor else []) + (["every block over `fsdp`"] if data else [])
    return head(plan, lacks, sentence) + _TORCHTITAN.format(
        mesh=({"fsdp": parts} if data else {}) | ({"tp": tensor_parts} if tensor else {}),
        tensor=_TENSOR.format(rows=rows) if tensor else "",
        tensor_import=_TENSOR_IMPORT if tensor else "",
        fsdp=_FSDP if data else "",
        fsdp_import="from torch.distributed.fsdp import fully_shard\n" if data else "",
        list_import="from torch.nn import ModuleList\n" if data else "",
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
        raise UserError("tensor parallelism over one device splits nothing: the plan splits only the batch.")
    whole = [f"values that stay split around {', '.join(gathers)}: they are gathered there."] if gathers else []
    return (*unpinned(plan, "each style gathers and sums what it has to"), *own, *whole)
