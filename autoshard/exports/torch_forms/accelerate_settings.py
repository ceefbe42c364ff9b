"""Export of a plan to the configuration file of Hugging Face Accelerate, with FSDP2 over the batch's devices."""

import math

from autoshard.cost import Topology
from autoshard.errors import FormError
from autoshard.exports.export_text import head, unpinned
from autoshard.exports.form_writers import writes
from autoshard.exports.torch_forms.parallel_styles import batch_and_tensor_axes, check_axes
from autoshard.exports.torch_forms.torch_recipe import dtypes, planned_layers, recipe_lacks
from autoshard.planning import Plan, Rest
from autoshard.program import Program


_ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: {classes}
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: {recomputes}
  fsdp_cpu_ram_efficient_loading: false
  fsdp_offload_params: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: '{precision}'
num_machines: {machines}
num_processes: {processes}
machine_rank: 0
"""
"""Template of the file, for `accelerate launch --config_file`."""

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}
"""Accelerate's names of the dtypes in which parameters of float32 are gathered and computed with."""


@writes("accelerate")
def accelerate_text(plan: Plan, sentence: str, program: Program | None) -> str:
    """Return the plan's configuration file for Accelerate: FSDP2, which gathers every block of a `ModuleList`.

    `sentence` is the line on the predicted step. Raises: UserError for a plan that splits no batch, splits modules, or
    is of no torch module.
    """
    check_axes(plan, "accelerate")
    data, tensor = batch_and_tensor_axes(plan)
    if tensor or not data:
        raise FormError(
            "Accelerate's file splits the batch and what FSDP gathers, and "
            + (f"the plan also splits modules over {' and '.join(tensor)}" if tensor else "the plan splits no batch")
            + "; repeat `autoshard plan` with --for accelerate, or choose --to transformers."
        )
    recomputes, unlike = _recomputes(plan)
    compute, stored = dtypes(plan)
    precision = _PRECISIONS.get(compute, "no") if compute != stored else "no"
    lacks = (
        *unpinned(plan, "every process computes its part of the batch", Rest.DTENSOR, local_batch=True),
        "the dims by which the batch's devices split parameters: FSDP splits the first dim of each.",
        "the batch: give each process its part, as Accelerate's data loaders do.",
        *unlike,
        *recipe_lacks(plan, recomputed=True, mixed=precision != "no"),
        "the device order.",
    )
    return head(plan, lacks, sentence) + _ACCELERATE.format(
        classes=",".join(_block_classes(program)),
        recomputes=str(recomputes).lower(),
        precision=precision,
        machines=Topology.parse(plan.topology).slices,
        processes=math.prod(plan.mesh.values()),
    )


def _recomputes(plan: Plan) -> tuple[bool, tuple[str, ...]]:
    """Return True if layers save only their input, and a sentence if the plan recomputes in another way."""
    planned = planned_layers(plan)
    if planned is None or str(planned) == "none":
        return False, ()
    if str(planned) == "full":
        return True, ()
    return True, (f"recomputation by {planned}; Accelerate recomputes whole layers (`full`), which the figures count.",)


def _block_classes(program: Program | None) -> list[str]:
    """Return the classes of the program's blocks. Raises: FormError for a program without a module of blocks."""
    classes = [] if program is None else list(program.block_classes)
    if not classes:
        raise FormError(
            "Accelerate gathers parameters block by block, and the program is no torch module with a ModuleList of "
            "blocks; --to jax or --to flax needs none."
        )
    return classes
