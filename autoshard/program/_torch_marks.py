"""Marks on the values of torch layers: hooks that mark results of modules while a layer is traced."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from autoshard.program._environment import environment
from autoshard.program._marks import mark, mark_of, naming


@contextlib.contextmanager
def marking(layer: Any, names: Sequence[str], found: dict[str, None]) -> Iterator[None]:
    """While inside, values of the torch module `layer` that `names` mean are marked; `found` notes all there are."""
    hooks = [
        child.register_forward_hook(_hook(path)) for path, child in layer.named_modules() if path and multiplies(child)
    ]
    try:
        with naming(names, found):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def multiplies(module: Any) -> bool:
    """Whether a torch module is a linear layer: a matrix and at most a bias, and no table of rows."""
    import torch

    weight = module._parameters.get("weight")
    own = [value for value in module._parameters.values() if value is not None]
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return weight is not None and weight.ndim == 2 and len(own) <= 2 and not isinstance(module, tables)


def _hook(path: str) -> Any:
    def after(module: Any, args: Any, out: Any) -> Any:
        return mark_torch(out, path)

    return after


def mark_torch(value: Any, path: str) -> Any:
    """`mark` for a torch tensor that holds a JAX value; anything else as it is."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    parts = getattr(value, "_parts", None)
    if parts is not None:  # several results side by side, held apart
        value._parts = mark(parts, path)  # type: ignore[attr-defined]
        return value
    env = environment()
    return value if mark_of(path) is None else env.j2t_iso(mark(env.t2j_iso(value), path))


@contextlib.contextmanager
def hooks_outside(layer: Any) -> Iterator[None]:
    """While inside, a call of the layer runs no hooks of its own: the call that its forward stands in for runs them.

    Hooks that collect outputs (transformers' `output_hidden_states`) would have each twice, and once from a trace that
    is over.
    """
    kept = layer._forward_pre_hooks, layer._forward_hooks
    layer._forward_pre_hooks, layer._forward_hooks = type(kept[0])(), type(kept[1])()
    try:
        yield
    finally:
        layer._forward_pre_hooks, layer._forward_hooks = kept
