"""Data on its way to the device: new batches are split as planned when they are sent."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook._marks import LiveMesh, partition
from autoshard.plan import Spec, spec_text


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
