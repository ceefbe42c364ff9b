"""Placement of data: tensors on their way to the device, inputs split as planned, and the planned run of a graph."""

import functools
import os
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from autoshard import mlir
from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.capture.lazy_graph import Capture
from autoshard.exec.torch_xla_hook.planning.capture_planning import Decision
from autoshard.exec.torch_xla_hook.values.lazy_tensors import handles, hold, pending, xlac
from autoshard.exec.torch_xla_hook.values.live_marks import (
    LiveMesh,
    annotated,
    is_split,
    mark,
    partition,
    sharding_text,
    unmark,
)
from autoshard.planning import Plan, Spec, spec_text


class PlannedInputs:
    """Replacement for the one `ShardingSpec` that PyTorch/XLA's loaders apply to all tensors; each tensor has its own.

    `find` returns the spec and mesh of a host tensor, or None. The loader asks for each tensor, so nested batches work.
    """

    minibatch = False

    def __init__(self, find: Callable[[Any], tuple[Spec, LiveMesh] | None]) -> None:
        self._find = find

    def xla_spec(self, tensor: Any) -> Any:
        """Return the `_XLAC.XlaShardingSpec` of a host tensor; None if it is not split."""
        import torch_xla.distributed.spmd as xs

        planned = self._find(tensor)
        if planned is None:
            return None
        spec, mesh = planned
        return xs.ShardingSpec(mesh.mesh, partition(spec)).xla_spec(tensor)

    def can_apply(self, tensor: Any) -> bool:
        """Return True if the tensor is to be split."""
        return self._find(tensor) is not None


def inputs_by_shape(inputs: Mapping[str, tuple[tuple[int, ...], Spec]], mesh: LiveMesh) -> PlannedInputs:
    """Return placements that find the spec of each tensor of a nested batch by its shape, as loaders pass no names.

    `inputs` are shapes and specs by name. A tensor of another shape is not split. Raises `UserError` if inputs of one
    shape have several specs.
    """
    known: dict[tuple[int, ...], tuple[str, Spec]] = {}
    for name, (shape, spec) in inputs.items():
        other, first = known.setdefault(shape, (name, spec))
        if first != spec:
            raise UserError(
                f"the inputs {other} and {name} are both of shape {list(shape)}, but the plan splits them as "
                f"{spec_text(first, shape)} and {spec_text(spec, shape)}: a loader cannot distinguish them in a nested "
                "batch; give it a flat dict, or pin both to one spec."
            )

    def find(tensor: Any) -> tuple[Spec, LiveMesh] | None:
        """Return the spec of the input with the tensor's shape, and the mesh; None for another shape."""
        named = known.get(tuple(tensor.shape))
        return None if named is None else (named[1], mesh)

    return PlannedInputs(find)


def watch_moves(made: Any) -> None:
    """Replace `Tensor.to` and `Module.to` until the process ends.

    Planned inputs are split when they leave the host, and reads of device tensors are reported to the session `made`.
    Modules that move to the XLA device are awaited; a module on the meta device stays there until its first call.
    """
    import torch

    tensors: Any = torch.Tensor
    modules: Any = torch.nn.Module
    to = tensors.to

    @functools.wraps(to)
    def planned_to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a tensor as `Tensor.to` does; read a split one from its shards, and split a planned input."""
        read = tensor
        if tensor.device.type == "xla" and _goes_to_host(*args, **kwargs):
            made.on_read(tensor)
            (read,) = made.whole([tensor])
        moved = to(read, *args, **kwargs)
        if (
            moved is not tensor
            and made.applied.batches
            and tensor.device.type == "cpu"
            and not isinstance(tensor, torch.nn.Parameter)
        ):
            with made.guard:
                made.applied.mark_input(moved)
        return moved

    tensors.to = planned_to
    module_to = modules.to

    @functools.wraps(module_to)
    def watched_to(module: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a module as `Module.to` does and await it; return a meta module unmoved if it goes to the XLA device."""
        before = [parameter.device.type for parameter in module.parameters()]
        if "meta" in before and not made.guard.failed:
            device, *_ = vars(torch._C)["_nn"]._parse_to(*args, **kwargs)
            if device is not None and device.type == "xla":
                made.promise_module(module)
                return module
        moved = module_to(module, *args, **kwargs)
        after = (parameter.device.type for parameter in module.parameters())
        if any(new == "xla" != old for old, new in zip(before, after, strict=False)):
            made.await_module(module)
        return moved

    modules.to = watched_to


def _goes_to_host(first: Any = None, *_: Any, device: Any = None, other: Any = None, **__: Any) -> bool:
    """Return True if `Tensor.to` with these arguments moves to the host; False if they name no device.

    A tensor argument stands for its device.
    """
    import torch

    target = next((each for each in (first, device, other) if each is not None), None)
    target = target.device if isinstance(target, torch.Tensor) else target
    return isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu"


GROUP_VARIABLE = "XLA_AUTO_USE_GROUP_SHARDING"
"""Environment variable: 1 to split inputs in the planned run, 0 one by one."""

_ANSWERS = {"1": True, "true": True, "0": False, "false": False}
"""Text of a yes-or-no variable -> its answer."""


def group_here() -> bool | None:
    """Return the answer of `XLA_AUTO_USE_GROUP_SHARDING`: True to split inputs in a group, False one by one.

    None if it is empty or not set. Raises `UserError` for a value that is no answer.
    """
    return answer_here(GROUP_VARIABLE, "to split parameters in a group", "one by one")


def answer_here(variable: str, yes: str, no: str) -> bool | None:
    """Read a yes-or-no environment variable: `1` or `true`, `0` or `false`; None if it is empty or not set.

    `yes` and `no` describe 1 and 0 in the error. Raises `UserError` for a value that is no answer.
    """
    text = os.environ.get(variable, "").strip().lower()
    if text and text not in _ANSWERS:
        raise UserError(f"{variable}={text} is no answer: set 1 {yes}, 0 {no}.")
    return _ANSWERS.get(text)


def fits_whole(capture: Capture, decision: Decision) -> bool:
    """Return True if the memory limit has room for the whole inputs that get a spec, in addition to the plan's peak."""
    input_bytes = sum(
        value.numel() * value.element_size()
        for value, spec in zip(capture.inputs, decision.specs, strict=True)
        if spec is not None
    )
    return input_bytes + decision.plan.prediction.peak_bytes <= decision.plan.memory_limit_bytes


def split_inputs(
    capture: Capture, decision: Decision, mesh: LiveMesh, group: bool, shared: Container[int]
) -> tuple[list[Any], list[Any]]:
    """Split the graph's inputs as decided. Return them, and the user's tensors that the planned run must compute.

    - `capture`: the captured graph and its inputs.
    - `decision`: specs by argument; None leaves an input as it is.
    - `mesh`: mesh of the specs.
    - `group`: if True, the run of the graph splits the inputs; else each is split on its own.
    - `shared`: identities of the storages that several tensors share.

    The user's tensors own the split data afterwards, except tensors that the step gives a new value. An input that has
    another split already is split again.
    """
    inputs: list[Any] = list(capture.inputs)
    stays = _still_held(capture)
    for number, tensor in sorted(stays.items(), key=lambda each: xlac()._xla_get_tensor_id(each[1])):
        # Reading the graph moves the data to a new tensor, and only that tensor can donate it. The user's tensor
        # becomes the new tensor here and gets another number. The loop retains the order of the earlier numbers:
        # PyTorch/XLA compiles a step again if its tensors change their order.
        (inputs[number],) = xlac()._get_tensors_xla_device_data_node([tensor])[1]
        inputs[number] = _split(inputs[number], decision.specs[number], mesh, group)
        hold(tensor, inputs[number], shared)
    for number, spec in enumerate(decision.specs):
        if number not in stays:
            inputs[number] = _split(inputs[number], spec, mesh, group)
    followed = list(stays.values())
    return inputs, [tensor for tensor, waits in zip(followed, pending(followed), strict=True) if waits]


def _still_held(capture: Capture) -> dict[int, Any]:
    """Return the user's tensor of each argument if it still has the argument's data, by argument number."""
    known = {number: tensor for number, tensor in enumerate(capture.tensors) if tensor is not None}
    waits = pending(list(known.values()))
    stays = [number for number, waiting in zip(known, waits, strict=True) if not waiting]
    current_handles = handles([known[number] for number in stays])
    return {n: known[n] for n, handle in zip(stays, current_handles, strict=True) if handle == capture.handles[n]}


def _split(value: Any, spec: Spec | None, mesh: LiveMesh, group: bool) -> Any:
    """Split device data by a spec; return the data unchanged if the spec is None or its split already.

    With `group` the result is a pending copy with the sharding; else the data itself is marked, in place of an earlier
    mark.
    """
    text = sharding_text(value)
    if spec is None or (text and mesh.read(text, value.dim()) == spec):  # one spec has several HLO strings
        return value
    if group:
        return annotated(value, [mesh.sharding(spec)])
    if is_split(text):
        unmark(value)
    mark(value, mesh.sharding(spec))
    return value


def planned_proto(capture: Capture, plan: Plan, mesh: LiveMesh) -> bytes:
    """Serialise the captured module as an HLO proto, with the plan's pins as GSPMD custom calls."""
    module = mlir.parse_module(capture.program.module)
    mlir.insert_pins(module, "mesh", plan.mesh, plan.pins)
    mlir.guard_indexing(module)
    mlir.custom_call_pins(module, lambda dims: mesh.write(Spec(tuple(tuple(axes) for axes in dims))))
    return mlir.to_hlo_proto(module)


def replay(proto: bytes, inputs: Sequence[Any]) -> list[Any]:
    """Run an HLO proto on these inputs lazily, as one op; return one pending tensor for each result."""
    import torch_xla.core.xla_builder as xb

    computation = xb.computation_from_module_proto("autoshard_step", proto)
    return xlac()._xla_user_computation("autoshard::step", list(inputs), computation)
