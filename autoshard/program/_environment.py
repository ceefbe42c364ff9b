"""torchax's environment: where torch tensors and JAX arrays become one another."""

import functools
import logging
from typing import Any

from autoshard.program._segments import op_scope


@functools.cache
def environment() -> Any:
    """The one `torchax.tensor.Environment` of this process, of a class that takes ordinary CPU tensors.

    It has torchax's own lowerings until `lowered_environment` puts ours in.
    """
    root, level = logging.getLogger(), logging.getLogger().level
    root.setLevel(logging.ERROR)  # importing torchax logs about absent optional packages
    try:
        return _environment_type()()
    finally:
        root.setLevel(level)


def _environment_type() -> type:
    """torchax's environment, made to take ordinary CPU tensors that a module creates or holds as constants."""
    import jax.numpy as jnp
    import torch
    from torch.utils import _pytree
    from torchax import tensor
    from torchax.view import View

    class Environment(tensor.Environment):
        def _should_use_torchax_tensor(self, device: Any) -> bool:
            return True if device is None else bool(super()._should_use_torchax_tensor(device))

        def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            with op_scope():
                return super().dispatch(func, types, args, kwargs)

        def t2j_iso(self, torchtensors: Any) -> Any:
            def wrapped(value: Any) -> Any:
                if isinstance(value, (tensor.Tensor, View)) or value.device.type != "cpu":
                    return value
                return tensor.Tensor(jnp.asarray(value.detach().numpy()), self)

            return super().t2j_iso(_pytree.tree_map_only(torch.Tensor, wrapped, torchtensors))

    return Environment
