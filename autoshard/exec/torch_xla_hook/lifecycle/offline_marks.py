"""Marking a module before anything of it is on a device, one module at a time."""

from collections.abc import Mapping
from typing import Any

from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.values.live_marks import mark


def move_marked(model: Any, shardings: Mapping[str, Any]) -> None:
    """Put a module's parameters and buffers on the XLA device, split from the start (in place).

    Parameters on the meta device are made by the `reset_parameters` of their module, so that the host never holds
    more than the own parameters of one module. `shardings` are `_XLAC.OpSharding`s by name; others are replicated.
    """
    import torch

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    moved: dict[int, Any] = {}
    for module in model.modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if not own:
            continue
        origin = {key: id(tensor) for key, tensor in own}
        if any(tensor.is_meta and id(tensor) not in moved for _, tensor in own):
            _materialise(module, names.get(origin[own[0][0]], own[0][0]))
        for key, before in origin.items():
            tensor = getattr(module, key)
            if before not in moved:
                value = tensor.detach().to("xla")
                sharding = shardings.get(names.get(before, ""))
                if sharding is not None:
                    mark(value, sharding)
                if isinstance(tensor, torch.nn.Parameter):
                    value = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
                moved[before] = value
            if key in module._parameters:
                module._parameters[key] = moved[before]
            else:
                module._buffers[key] = moved[before]


def _materialise(module: Any, name: str) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise UserError(
            f"`{name}` is on the meta device, and {type(module).__name__} has no reset_parameters() to make it: give "
            "the module one, or load the weights before plan.mark(model)."
        )
    module.to_empty(device="cpu", recurse=False)
    reset()
