"""torchax with our lowerings, and module classes whose own code is not canonical."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any


@functools.cache
def environment() -> Any:
    """Our own torchax environment: torch operations become JAX operations, canonical ones where it matters."""
    root, level = logging.getLogger(), logging.getLogger().level
    root.setLevel(logging.ERROR)  # importing torchax logs about absent optional packages
    try:
        from torchax import tensor
        from torchax.ops import ops_registry

        from autoshard.program import _lowerings

        env = tensor.Environment()
    finally:
        root.setLevel(level)
    for operation, lowering in _lowerings.table().items():
        env._ops[operation] = ops_registry.Operator(
            operation, lowering, is_jax_function=True, is_user_defined=True, needs_env=False, is_view_op=False
        )
    return env


@contextlib.contextmanager
def canonical_modules() -> Iterator[None]:
    """While inside, code of transformers that merges dims or inspects data is replaced by equal code that does not."""
    import sys

    replaced: list[tuple[Any, str, Any]] = []
    for (module_name, owner, attribute), replacement in _REPLACED.items():
        module = sys.modules.get(module_name)
        if module is None:
            continue
        target = getattr(module, owner) if owner else module
        replaced.append((target, attribute, target.__dict__[attribute]))
        setattr(target, attribute, replacement)
    try:
        yield
    finally:
        for target, attribute, original in replaced:
            setattr(target, attribute, original)


def _conv1d(self: Any, x: Any) -> Any:
    """GPT-2's linear layer (weight [in, out]) on [..., in] without flattening the leading dims."""
    return x @ self.weight + self.bias


def _not_packed(position_ids: Any) -> None:
    """Positions are those of whole sequences: several sequences packed in one row are not supported."""
    return None


_REPLACED: dict[tuple[str, str, str], Callable[..., Any]] = {
    ("transformers.pytorch_utils", "Conv1D", "forward"): _conv1d,
    ("transformers.masking_utils", "", "find_packed_sequence_indices"): _not_packed,
}
