"""Names of the tensors that a torch module is called with: `input_ids`, `past.0.key`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def input_names(module: Any, count: int) -> list[str]:
    """What a module's `forward` calls its first `count` positional arguments, `input<i>` where it does not say."""
    parameters = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (names + [f"input{i}" for i in range(len(names), count)])[:count]


def leaf_name(path: Sequence[Any]) -> str:
    """The name of a leaf of the arguments by name, of its path as torch's pytrees give it."""
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)


def map_inputs(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[str, Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with `change(name, leaf)` in place of every leaf."""
    from torch.utils import _pytree

    names = input_names(module, len(args))
    tree = dict(zip(names, args, strict=True)) | dict(kwargs)
    changed = _pytree.tree_map_with_path(lambda path, leaf: change(leaf_name(path), leaf), tree)
    return tuple(changed[name] for name in names), {key: changed[key] for key in kwargs}
