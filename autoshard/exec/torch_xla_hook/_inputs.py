"""Data on its way to the device: new batches are split as planned when they are sent."""

import functools
from typing import Any

from autoshard.exec.torch_xla_hook._apply_plan import Applied
from autoshard.exec.torch_xla_hook._marks import partition


class PlannedInputs:
    """Stands where PyTorch/XLA's loaders take one `ShardingSpec` for all tensors; here each has its own."""

    minibatch = False

    def __init__(self, applied: Applied) -> None:
        self._applied = applied

    def xla_spec(self, tensor: Any) -> Any:
        """`_XLAC.XlaShardingSpec` of a host tensor; None if the plan does not split such an input."""
        import torch_xla.distributed.spmd as xs

        found = self._applied.batches.get((tuple(tensor.shape), tensor.dtype))
        if found is None:
            return None
        spec, mesh = found
        return xs.ShardingSpec(mesh.mesh, partition(spec)).xla_spec(tensor)

    def can_apply(self, tensor: Any) -> bool:
        return (tuple(tensor.shape), tensor.dtype) in self._applied.batches


def watch_moves(made: Any) -> None:
    """Have `Tensor.to` split what it moves from the host, if the plan knows such an input; await modules that move."""
    import torch

    tensors: Any = torch.Tensor
    modules: Any = torch.nn.Module
    to = tensors.to

    @functools.wraps(to)
    def planned_to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") == "cpu" or (args and str(args[0]) == "cpu"):
            made.on_read(tensor)
        moved = to(tensor, *args, **kwargs)
        if (
            moved is not tensor
            and made.applied.batches
            and tensor.device.type == "cpu"
            and not isinstance(tensor, torch.nn.Parameter)
        ):
            made.applied.mark_input(moved)
        return moved

    tensors.to = planned_to
    module_to = modules.to

    @functools.wraps(module_to)
    def watched_to(module: Any, *args: Any, **kwargs: Any) -> Any:
        moved = module_to(module, *args, **kwargs)
        if any(parameter.device.type == "xla" for parameter in module.parameters()):
            made.arm()
        return moved

    modules.to = watched_to
