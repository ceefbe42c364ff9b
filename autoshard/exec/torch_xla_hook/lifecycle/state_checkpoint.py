"""State saved and loaded in its shards, in PyTorch/XLA's checkpoint format."""

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
"""File in a checkpoint's folder: the plan that the state was saved under."""


def save_state(state: Mapping[str, Any], folder: str | os.PathLike[str], plan: Plan | None = None) -> None:
    """Save a (nested) state dict of tensors on the XLA devices; every process calls it, and writes its own shards.

    - `folder`: checkpoint's folder, made if it is missing.
    - `plan`: plan that is saved too, so that `load_state` can predict the cost of loading under another plan. None is
      the plan of the last training step that auto-sharding planned; without one no plan is saved.

    This does the same as `torch.distributed.checkpoint.save` with PyTorch/XLA's planner. A checkpoint of that planner
    alone lacks each tensor of which several devices of one process have the same shard.
    """
    import torch_xla.runtime as xr
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    # Copying ahead is for streams of one device, and fails on the XLA device if torchax is loaded.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    save(dict(state), storage_writer=writer, planner=_save_planner()())
    plan = plan or _planned()
    if plan is not None and xr.process_index() == 0:
        plan.save(Path(folder, PLAN_FILE))


def load_state(
    state: Mapping[str, Any], folder: str | os.PathLike[str], plan: Plan | None = None
) -> StateReshard | None:
    """Load a checkpoint of `save_state` into the tensors of a state dict; each tensor keeps its current split.

    The checkpoint may be of another plan or mesh. A process reads no more than its own shards, tensor by tensor. The
    state of an optimizer has to exist.

    Returns the prediction of `predict_reshard`, which is also logged before loading begins. Returns None if the
    checkpoint's plan or the current one (`plan`; the default is that of `save_state`) is not known or of another model.
    Raises `UserError` if there is no checkpoint, and for a tensor that it lacks or has in another shape.
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
    """Return the plan of the last training step that auto-sharding planned; else the last plan of any step; None
    without any.
    """
    made = session()
    plans = [] if made is None else made.plans
    trained = [plan for plan in plans if "optimizer_state" in plan.roles.values()]
    return next(reversed(trained or plans), None)


def _predicted(file: Path, plan: Plan | None) -> StateReshard | None:
    """Estimate the cost of moving the state of the plan in `file` to this plan, and log it.

    Returns None, with a warning in the log if need be, if a plan is unknown or of another model.
    """
    if plan is None or not file.exists():
        return None
    try:
        reshard = predict_reshard(load_plan(file), plan)
    except UserError as error:
        log.warning("memory and bytes of loading are not predicted: %s", error)
        return None
    log.info(
        "loading %s: each device receives at most %s and holds at most %s; a host reads at most %s",
        file.parent,
        *(format_bytes(max(sizes)) for sizes in (reshard.received_bytes, reshard.peak_bytes, reshard.read_bytes)),
    )
    return reshard


@functools.cache
def _save_planner() -> type[Any]:
    """Return the class of the planner that writes each shard once; the import is deferred, since it needs torch_xla."""
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

    class OnceEach(SPMDSavePlanner):
        """Planner that writes a shard once if several devices of this process have it."""

        def create_local_plan(self) -> Any:
            """Return PyTorch/XLA's plan of this process with only the first item of each shard."""
            plan = super().create_local_plan()
            first: dict[Any, Any] = {}
            for item in plan.items:
                first.setdefault(item.index, item)
            return dataclasses.replace(plan, items=list(first.values()))

    return OnceEach


def _check(state: Mapping[str, Any], saved: Mapping[str, Any], folder: Any) -> None:
    """Raise `UserError` for a tensor that the checkpoint lacks, or has in another shape.

    - `state`: state dict, perhaps nested.
    - `saved`: metadata of the checkpoint by flat name.
    - `folder`: its place, for the message.
    """
    from torch_xla.experimental.distributed_checkpoint._helpers import flatten_state_dict

    for name, value in flatten_state_dict(dict(state))[0].items():
        if name not in saved:
            raise UserError(f"the checkpoint in {folder} has no `{name}`: load into the state that was saved.")
        shape, size = getattr(value, "shape", None), getattr(saved[name], "size", None)
        if shape is not None and size is not None and tuple(shape) != tuple(size):
            raise UserError(
                f"`{name}` is of shape {list(shape)}, but the checkpoint in {folder} has it in {list(size)}: load into "
                "the model that was saved."
            )
