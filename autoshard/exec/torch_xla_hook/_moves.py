"""Splitting the inputs of a captured graph as its plan has them: all by the planned run itself, or one by one before.

In a group nothing goes through the host, but until the run ends every device holds the whole inputs beside the step.
"""

import os
from collections.abc import Container
from typing import Any

from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook._capture import Capture
from autoshard.exec.torch_xla_hook._marks import LiveMesh, annotated, held_spec, is_split, mark, unmark
from autoshard.exec.torch_xla_hook._planning import Decision
from autoshard.exec.torch_xla_hook._tensors import handles, hold, pending
from autoshard.exec.torch_xla_hook._xlac import xlac
from autoshard.plan import Spec


GROUP_VARIABLE = "XLA_AUTO_USE_GROUP_SHARDING"

_ANSWERS = {"1": True, "true": True, "0": False, "false": False}


def group_here() -> bool | None:
    """Whether `XLA_AUTO_USE_GROUP_SHARDING` asks for inputs to be split in a group; None if it says nothing.

    Raises `UserError` for what is no answer.
    """
    return answer_here(GROUP_VARIABLE, "to split parameters in a group", "one by one")


def answer_here(variable: str, yes: str, no: str) -> bool | None:
    """What an environment variable answers; None if it says nothing. `yes` and `no` say what 1 and 0 do.

    Raises `UserError` for what is no answer.
    """
    text = os.environ.get(variable, "").strip().lower()
    if text and text not in _ANSWERS:
        raise UserError(f"{variable}={text} is no answer: set 1 {yes}, 0 {no}.")
    return _ANSWERS.get(text)


def fits_whole(taken: Capture, decision: Decision) -> bool:
    """Whether a device has room for the whole inputs that are to be split, beside what the plan needs."""
    whole = sum(
        value.numel() * value.element_size()
        for value, spec in zip(taken.inputs, decision.specs, strict=True)
        if spec is not None
    )
    return whole + decision.plan.prediction.peak_bytes <= decision.plan.memory_limit_bytes


def split_inputs(
    taken: Capture, decision: Decision, mesh: LiveMesh, group: bool, shared: Container[int]
) -> tuple[list[Any], list[Any]]:
    """The graph's inputs, split as decided, and those of the user's tensors that the planned run is to compute.

    The user's tensors hold the split data from here on, but for those that the step gives a new value. What is split
    in another way already is split anew. `shared` are the storages that aliases share.
    """
    inputs: list[Any] = list(taken.inputs)
    stays = _still_held(taken)
    for number, tensor in sorted(stays.items(), key=lambda each: xlac()._xla_get_tensor_id(each[1])):
        # Reading the graph has left the data to a tensor of its own, and only that one can donate it. The user's
        # becomes it here, and gets another number. These come in the order of those before: PyTorch/XLA compiles a
        # step again that finds its tensors in another one.
        (inputs[number],) = xlac()._get_tensors_xla_device_data_node([tensor])[1]
        inputs[number] = _split(inputs[number], decision.specs[number], mesh, group)
        hold(tensor, inputs[number], shared)
    for number, spec in enumerate(decision.specs):
        if number not in stays:
            inputs[number] = _split(inputs[number], spec, mesh, group)
    followed = list(stays.values())
    return inputs, [tensor for tensor, waits in zip(followed, pending(followed), strict=True) if waits]


def _still_held(taken: Capture) -> dict[int, Any]:
    """The user's tensor of each argument whose data it still holds."""
    known = {number: tensor for number, tensor in enumerate(taken.tensors) if tensor is not None}
    waits = pending(list(known.values()))
    stays = [number for number, waiting in zip(known, waits, strict=True) if not waiting]
    held = handles([known[number] for number in stays])
    return {n: known[n] for n, handle in zip(stays, held, strict=True) if handle == taken.handles[n]}


def _split(value: Any, spec: Spec | None, mesh: LiveMesh, group: bool) -> Any:
    """Device data split as a spec says; as it is, if there is none."""
    held = held_spec(value)
    if spec is None or (held and mesh.read(held, value.dim()) == spec):  # the same can be written in several ways
        return value
    if group:
        return annotated(value, [mesh.sharding(spec)])
    if is_split(held):
        unmark(value)
    mark(value, mesh.sharding(spec))
    return value
