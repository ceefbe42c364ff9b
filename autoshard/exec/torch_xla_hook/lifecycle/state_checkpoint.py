"""State that is saved as it is split and loaded as it is split then, in PyTorch/XLA's checkpoint format."""

import dataclasses
import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoshard.base.units import format_bytes
from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.lifecycle.enable import session
from autoshard.planning import Plan, StateReshard, load_plan, predict_reshard


log = logging.getLogger("autoshard.torch_xla")

PLAN_FILE = "autoshard-plan.json"
"""In the folder of a checkpoint, the plan that it was saved under."""


def save_state(state: Mapping[str, Any], folder: str | os.PathLike[str], plan: Plan | None = None) -> None:
    """Save a (nested) state dict of tensors on the XLA devices; every process calls it, and writes its own shards.

    The plan goes with it, so that `load_state` knows what loading under another takes: by default that of the last
    training step that auto-sharding has planned.

    What `torch.distributed.checkpoint.save` does with PyTorch/XLA's planner, whose checkpoints lack each tensor that
    several devices of one process hold the same shard of.
    """
    import torch_xla.runtime as xr
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    # Copying ahead is for streams of one device, and fails on the XLA device where torchax is loaded.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    save(dict(state), storage_writer=writer, planner=_save_planner()())
    plan = plan or _planned()
    if plan is not None and xr.process_index() == 0:
        plan.save(Path(folder, PLAN_FILE))


def load_state(
    state: Mapping[str, Any], folder: str | os.PathLike[str], plan: Plan | None = None
) -> StateReshard | None:
    """Load what `save_state` saved into the tensors of a state dict, each of which stays split as it is.

    The checkpoint may be of another plan or mesh; a process reads no more than its own shards, tensor by tensor. The
    state of an optimizer has to exist. Returns what this takes, as `predict_reshard` says, also in the log before it
    begins; None where the plan of the checkpoint or that of now (`plan`; by default as in `save_state`) is not known.
    Raises `UserError` for a tensor that the checkpoint lacks, or has in another shape.
    """
    import torch_xla
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner

    reader = FileSystemReader(folder)
    try:
        saved = reader.read_metadata().state_dict_metadata
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint in {folder}: save one with save_state first.") from None
    _check(state, saved, folder)
    predicted = _predicted(Path(folder, PLAN_FILE), plan or _planned())
    load(dict(state), storage_reader=reader, planner=SPMDLoadPlanner())
    torch_xla.sync()
    return predicted


def _planned() -> Plan | None:
    """The plan of the last training step that auto-sharding has planned; of anything, if it has planned none."""
    made = session()
    plans = [] if made is None else made.plans
    trained = [plan for plan in plans if "optimizer_state" in plan.roles.values()]
    return next(reversed(trained or plans), None)


def _predicted(file: Path, plan: Plan | None) -> StateReshard | None:
    """What moving the state of a saved plan to this one takes; None if one is not known, or they are of two models."""
    if plan is None or not file.exists():
        return None
    try:
        found = predict_reshard(load_plan(file), plan)
    except UserError as error:
        log.warning("what loading takes is not predicted: %s", error)
        return None
    log.info(
        "loading %s: each device receives at most %s and holds at most %s; a host reads at most %s",
        file.parent,
        *(format_bytes(max(sizes)) for sizes in (found.received_bytes, found.peak_bytes, found.read_bytes)),
    )
    return found


@functools.cache
def _save_planner() -> type[Any]:
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

    class OnceEach(SPMDSavePlanner):
        """Writes a shard that several devices of this process hold once."""

        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            first: dict[Any, Any] = {}
            for item in plan.items:
                first.setdefault(item.index, item)
            return dataclasses.replace(plan, items=list(first.values()))

    return OnceEach


def _check(state: Mapping[str, Any], saved: Mapping[str, Any], folder: Any) -> None:
    from torch_xla.experimental.distributed_checkpoint._helpers import flatten_state_dict

    for name, value in flatten_state_dict(dict(state))[0].items():
        if name not in saved:
            raise UserError(f"the checkpoint in {folder} has no `{name}`: load into the state that was saved.")
        shape, held = getattr(value, "shape", None), getattr(saved[name], "size", None)
        if shape is not None and held is not None and tuple(shape) != tuple(held):
            raise UserError(
                f"`{name}` is of shape {list(shape)}, but the checkpoint in {folder} has it in {list(held)}: load into "
                "the model that was saved."
            )
