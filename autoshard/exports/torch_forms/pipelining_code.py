"""Export of a plan's pipeline to code for `torch.distributed.pipelining`."""

import math

from autoshard.errors import UserError
from autoshard.exports.export_text import head
from autoshard.exports.form_writers import writes
from autoshard.planning import Plan
from autoshard.report.display import clean


SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
"""Torch's class by name of a schedule."""

_CODE = '''
import torch
import torch.distributed as dist
from torch.distributed.pipelining import {schedule}, SplitPoint, pipeline
from torch.utils import _pytree

STAGES = {stages}
MICROBATCHES = {microbatches}
# The module with which every chunk after the first begins; chunk c is on stage c % STAGES.
SPLITS = {splits}


def one_microbatch(values):
    """The first of `MICROBATCHES` parts of every tensor, along its first dim."""

    def part(value):
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        if value.shape[0] % MICROBATCHES:
            raise ValueError(f"{{MICROBATCHES}} microbatches do not divide {{value.shape[0]}} examples")
        return value[: value.shape[0] // MICROBATCHES]

    return _pytree.tree_map(part, values)


def split(model, args, kwargs=None):
    """The model's chunks, a `Pipe`; `args` and `kwargs` are what it is called with, the whole batch."""
    spec = {{name: SplitPoint.BEGINNING for name in SPLITS}}
    return pipeline(model, one_microbatch(tuple(args)), one_microbatch(dict(kwargs or {{}})), split_spec=spec)


def make_schedule(model, args, kwargs=None, loss=None, device="cpu", group=None):
    """The schedule of this process, and the modules of its chunks: for the optimizer, and to be split on its devices.

    `group` has a process for each stage, in their order (default: all processes). On the first stage call
    `schedule.step(*args, **kwargs)`, on the last `schedule.step(target=targets, losses=[])`, else `schedule.step()`;
    gradients are then the means over microbatches, if `loss(output, target)` is a mean.
    """
    pipe, own = split(model, args, kwargs), dist.get_rank(group)
    if dist.get_world_size(group) != STAGES:
        raise ValueError(f"{{dist.get_world_size(group)}} processes, but there are {{STAGES}} stages")
    stages = [pipe.build_stage(chunk, torch.device(device), group) for chunk in range(own, len(SPLITS) + 1, STAGES)]
    if dist.get_backend(group) == "gloo":
        # Gloo is connected already, and what torch 2.9 sends first to connect neighbours is longer than what it awaits.
        for stage in stages:
            stage._get_init_p2p_neighbors_ops = list
    schedule = {schedule}({argument}, n_microbatches=MICROBATCHES, loss_fn=loss)
    return schedule, [stage.submod for stage in stages]
'''


@writes("torch-pipelining")
def pipelining_text(plan: Plan, sentence: str) -> str:
    """Return the plan's code for `torch.distributed.pipelining`.

    A forward pass becomes `gpipe`, since torch's 1F1B requires a backward pass. The split within a stage is not
    expressed. `sentence` is the line on the predicted step. Raises: UserError for a plan without a program for each
    stage, and for a forward pass with an interleaved schedule.
    """
    pipeline = plan.pipeline
    if pipeline is None or pipeline.together:
        what = "is one program for all stages" if pipeline is not None else "has no stages"
        name = clean(plan.program_name)
        raise UserError(f"the plan of {name} {what}: plan a torch module with --stages 2 --for torch-pipelining.")
    if plan.source is not None and plan.source.program.endswith(".py") and not plan.uses and not plan.origin.form:
        raise UserError(f"the plan of {clean(plan.program_name)} is of a JAX step: run it by `plan.jit(step)`.")
    name = pipeline.schedule.partition(":")[0]
    if not pipeline.trains:
        if pipeline.rounds > 1:
            raise UserError(
                f"schedule `{pipeline.schedule}` is for training in torch.distributed.pipelining; plan a forward pass "
                "with --schedule gpipe."
            )
        name = "gpipe"  # torch's 1F1B requires a backward pass; without one both schedules are equal
    inside = {axis: size for axis, size in plan.mesh.items() if axis != "stage"}
    lacks = ["the optimizer, which runs in every process on the parameters of its own chunks."]
    if math.prod(inside.values()) > 1:
        axes = ", ".join(f"{axis}={size}" for axis, size in inside.items())
        lacks.insert(0, f"the split of modules over the {math.prod(inside.values())} devices of a stage ({axes}).")
    return head(plan, tuple(lacks), sentence) + _CODE.format(
        schedule=SCHEDULES[name],
        stages=pipeline.stages,
        microbatches=pipeline.microbatches,
        splits=repr(tuple(chunk.modules[0] for chunk in pipeline.chunks[1:])),
        argument="stages" if name == "interleaved" else "stages[0]",
    )
