"""Data on its way to the device, inputs split as planned, and the planned run of a captured graph."""

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
    held_spec,
    is_split,
    mark,
    partition,
    unmark,
)
from autoshard.planning import Plan, Spec, spec_text


class PlannedInputs:
    """Stands where PyTorch/XLA's loaders take one `ShardingSpec` for all tensors; here each has its own.

    `find` says how a tensor of the host is split, None if it is not. Nested batches work, since it is asked of each.
    """

    minibatch = False

    def __init__(self, find: Callable[[Any], tuple[Spec, LiveMesh] | None]) -> None:
        self._find = find

    def xla_spec(self, tensor: Any) -> Any:
        """`_XLAC.XlaShardingSpec` of a host tensor; None if it is not split."""
        import torch_xla.distributed.spmd as xs

        found = self._find(tensor)
        if found is None:
            return None
        spec, mesh = found
        return xs.ShardingSpec(mesh.mesh, partition(spec)).xla_spec(tensor)

    def can_apply(self, tensor: Any) -> bool:
        return self._find(tensor) is not None


def inputs_by_shape(inputs: Mapping[str, tuple[tuple[int, ...], Spec]], mesh: LiveMesh) -> PlannedInputs:
    """The sharding of a nested batch, whose tensors a loader hands over without their names.

    `inputs` are shapes and specs by name. Raises `UserError` for inputs of one shape that are split in several ways.
    """
    known: dict[tuple[int, ...], tuple[str, Spec]] = {}
    for name, (shape, spec) in inputs.items():
        other, held = known.setdefault(shape, (name, spec))
        if held != spec:
            raise UserError(
                f"the inputs {other} and {name} are both of shape {list(shape)}, but the plan splits one as "
                f"{spec_text(held, shape)} and the other as {spec_text(spec, shape)}: a loader cannot tell them apart "
                "in a nested batch; give it a flat dict, or pin both to one spec."
            )

    def find(tensor: Any) -> tuple[Spec, LiveMesh] | None:
        found = known.get(tuple(tensor.shape))
        return None if found is None else (found[1], mesh)

    return PlannedInputs(find)


def watch_moves(made: Any) -> None:
    """Have `Tensor.to` split what it moves from the host, if the plan knows such an input; await modules that move."""
    import torch

    tensors: Any = torch.Tensor
    modules: Any = torch.nn.Module
    to = tensors.to

    @functools.wraps(to)
    def planned_to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        read = tensor
        if tensor.device.type == "xla" and _goes_to_host(*args, **kwargs):
            made.on_read(tensor)
            read = made.whole(tensor)
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
    """Return whether `Tensor.to` with these arguments moves to the host. A tensor gives its device, unread."""
    import torch

    target = next((each for each in (first, device, other) if each is not None), None)
    target = target.device if isinstance(target, torch.Tensor) else target
    return isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu"


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


def planned_proto(capture: Capture, plan: Plan, mesh: LiveMesh) -> bytes:
    """The captured module as a serialised HLO module, the plan's pins in it as GSPMD reads them."""
    module = mlir.parse_module(capture.program.module)
    mlir.insert_pins(module, "mesh", plan.mesh, plan.pins)
    mlir.guard_indexing(module)
    mlir.custom_call_pins(module, lambda dims: mesh.write(Spec(tuple(tuple(axes) for axes in dims))))
    return mlir.to_hlo_proto(module)


def replay(proto: bytes, inputs: Sequence[Any]) -> list[Any]:
    """Pending tensors, one for each result, that the computation yields on these inputs."""
    import torch_xla.core.xla_builder as xb

    computation = xb.computation_from_module_proto("autoshard_step", proto)
    return xlac()._xla_user_computation("autoshard::step", list(inputs), computation)
