"""Marks on a module before any of its tensors is on a device, one submodule at a time."""

from collections.abc import Mapping
from typing import Any

from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.values.live_marks import mark


def move_marked(model: Any, shardings: Mapping[str, Any]) -> None:
    """Move a module's parameters and buffers to the XLA device, split from the start (in place).

    - `shardings`: `_XLAC.OpSharding`s of parameters by name; all other tensors are replicated.

    The `reset_parameters` of each submodule materialises its parameters on the meta device. So the host never stores
    more than the own parameters of one submodule. A tensor that several submodules share stays shared, but parameters
    become new objects. Raises `UserError` if a submodule on the meta device has no `reset_parameters`.
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
    """Materialise the own parameters of a submodule on the host by its `reset_parameters`.

    `name` is a parameter's, for the message. Raises `UserError` if the submodule has no such method.
    """
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise UserError(
            f"`{name}` is on the meta device, and {type(module).__name__} has no reset_parameters() to make it: give "
            "the module one, or load the weights before plan.mark(model)."
        )
    module.to_empty(device="cpu", recurse=False)
    reset()
