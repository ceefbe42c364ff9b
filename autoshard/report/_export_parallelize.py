"""A plan in the words of tensor parallelism: transformers' `tp_plan`, and `parallelize` as torchtitan has it."""

from autoshard.errors import UserError
from autoshard.plan import Plan
from autoshard.report._export_parts import head, table, unpinned
from autoshard.report._styles import GATHERED, Styles, read_styles


_TRANSFORMERS = '''
from transformers.distributed import DistributedConfig

TP_SIZE = {size}  # processes that split the model between them
{plan}

def config():
    """For `from_pretrained(folder, distributed_config=config())`; for older releases give `tp_plan=TP_PLAN`."""
    return DistributedConfig(tp_plan=TP_PLAN, tp_size=TP_SIZE)
'''

_TORCHTITAN = '''
from torch.distributed.device_mesh import init_device_mesh
{fsdp_import}from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
{list_import}
MESH = {mesh!r}


def make_mesh(device_type):
    return init_device_mesh(device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))


def parallelize(model, mesh{options}):
    """Split a model's layers over `tp`{also}; where torchtitan is used, from its
    `parallelize_fn`, with `parallel_dims`' meshes of these names."""
    parallelize_module(
        model,
        mesh["tp"],
        {{
{rows}        }},
    )
{fsdp}    return model
'''
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


def transformers_text(plan: Plan, sentence: str) -> str:
    """The code. Raises `UserError` as `read_styles` does."""
    found = read_styles(plan, "transformers")
    lacks = _lacks(plan, found)
    if found.data > 1:
        lacks = (*lacks, f"the batch, which {found.data} groups of {found.tensor} processes share; give each its part.")
    rows = {name: repr(style) for name, style in found.styles.items()}
    return head(plan, lacks, sentence) + _TRANSFORMERS.format(size=found.tensor, plan=table("TP_PLAN", rows))


def torchtitan_text(plan: Plan, sentence: str) -> str:
    """The code. Raises `UserError` as `read_styles` does."""
    found = read_styles(plan, "torchtitan")
    data = found.data > 1
    lacks = _lacks(plan, found)
    if data:
        lacks = (*lacks, "what of a parameter each device of the batch holds: FSDP splits every one by its first dim.")
    return head(plan, lacks, sentence) + _TORCHTITAN.format(
        mesh=({"fsdp": found.data} if data else {}) | {"tp": found.tensor},
        rows="".join(f"            {name!r}: {_CALLS[style]},\n" for name, style in found.styles.items()),
        fsdp=_FSDP if data else "",
        fsdp_import="from torch.distributed.fsdp import fully_shard\n" if data else "",
        list_import="from torch.nn import ModuleList\n" if data else "",
        options=", **options" if data else "",
        also=" and every block over `fsdp`; `options` are `fully_shard`'s" if data else "",
    )


def _lacks(plan: Plan, found: Styles) -> tuple[str, ...]:
    gathers = sorted(name for name, style in found.styles.items() if style in GATHERED.values())
    if found.tensor == 1:
        raise UserError("tensor parallelism over one device splits nothing: the plan splits only the batch.")
    whole = [f"that values stay split around {', '.join(gathers)}: they are gathered there."] if gathers else []
    return (*unpinned(plan, "each style gathers and sums what it has to"), *found.lacks, *whole)
