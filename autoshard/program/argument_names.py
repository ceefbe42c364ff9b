"""Readable, unique names for leaves of pytrees and for a torch module's inputs."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from autoshard.errors import UserError


# Last keys of a leaf's path that only wrap an array, as in `nnx.Variable`.
_WRAPPER_KEYS = {"value", "raw_value"}
_OPTIMIZER_FIELDS = set(
    "count mu nu trace ema inner_state hyperparams v v_row v_col acc_grads mini_step gradient_step".split()
)
"""Fields of optax states, which stand in tuples whose positions carry no meaning."""


def key_text(key: Any) -> str:
    """Return the text of one pytree key of JAX: attribute name, dict key, or index; else `str(key)`."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def is_index(key: Any) -> bool:
    """Return True if the key is a position in a sequence, or an integer key of a dict."""
    return hasattr(key, "idx") or isinstance(getattr(key, "key", None), int)


def named_dims(tree: Any) -> list[tuple[str, ...] | None]:
    """Return for every leaf of a pytree the names of its dims if it belongs to a Haliax `NamedArray`, else None."""
    import jax

    dims: list[tuple[str, ...] | None] = []
    for node in jax.tree_util.tree_leaves(tree, is_leaf=_is_named):
        names = tuple(node.axis_names) if _is_named(node) else None
        dims.extend([names] * len(jax.tree_util.tree_leaves(node)))
    return dims


def _is_named(node: Any) -> bool:
    """Return True if a node is a Haliax `NamedArray`."""
    return type(node).__name__ == "NamedArray" and type(node).__module__.split(".")[0] == "haliax"


def positions_of(option: str, value: Any, count: int, label: str) -> tuple[int, ...]:
    """Return the positions among `count` arguments of `label` that an option of `jax.jit` names, once each.

    `value` is one position or several; negative ones count from the end. Raises `UserError` for anything else.
    """
    numbers = [value] if isinstance(value, Integral) else value
    if numbers is None:
        return ()
    if isinstance(numbers, str | bytes) or not isinstance(numbers, Iterable):
        raise UserError(f"{option} is {value!r}; expected the number of a positional argument, or several.")
    positions: list[int] = []
    for number in numbers:
        if not isinstance(number, Integral) or isinstance(number, bool) or not -count <= int(number) < count:
            raise UserError(f"{option}: {number!r} is not one of the {count} positional arguments of `{label}`.")
        positions.append(int(number) % count)
    return tuple(dict.fromkeys(positions))


def positional_names(fn: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Return the names of the first `count` positional parameters of `fn`; `arg<i>` for one without a name."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for position in range(count):
        if position < len(parameters) and parameters[position].kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            names.append(parameters[position].name)
        else:
            names.append(f"arg{position}")
    return tuple(names)


def leaf_names(prefix: str, paths: Sequence[tuple[Any, ...]], dims: Sequence[tuple[str, ...] | None]) -> list[str]:
    """Return `prefix.key.key` for every path, without the keys that only wrap another one.

    Keys are joined by dots; an empty path without a prefix is `value`. `dims` has the result of `named_dims`.

    If the names stay unique, an index into a tuple of optimizer states (an optax chain) is omitted. So are the label of
    a part of `optax.partition` and the trailing `value` of a variable. The 0 of an array whose dims have names
    (`named_dims`) is always omitted.
    """
    paths = [path if names is None else path[:-1] for path, names in zip(paths, dims, strict=True)]
    full = [_join(prefix, path) for path in paths]
    short = [_join(prefix, _without_wrappers(path)) for path in paths]
    return short if len(set(short)) == len(short) else full


def unique(names: Sequence[str], taken: set[str]) -> list[str]:
    """Return `names` with `_2`, `_3`, ... appended to any that repeats or is in `taken`; add the results to `taken`."""
    result: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in taken:
            number += 1
            candidate = f"{name}_{number}"
        taken.add(candidate)
        result.append(candidate)
    return result


def _is_field(key: Any) -> bool:
    """Return True if the key is a field of an optax state."""
    return key_text(key) in _OPTIMIZER_FIELDS


def _join(prefix: str, path: Sequence[Any]) -> str:
    """Return the prefix and the texts of the path's keys with dots between, empty ones left out; `value` if all are."""
    parts = [prefix, *(key_text(key) for key in path)]
    return ".".join(part for part in parts if part) or "value"


def _without_wrappers(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the path without indices and parts of optimizer states and without a trailing wrapper key."""
    texts = [key_text(key) for key in path]
    for i, text in enumerate(texts):
        # `optax.partition` has its parts by label, in states of their own.
        if text == "inner_states" and texts[i + 2 : i + 3] == ["inner_state"]:
            path = path[:i] + path[i + 3 :]
            break
    keys = [key for key, after in zip(path, path[1:], strict=False) if not (is_index(key) and _is_field(after))]
    keys.extend(path[-1:])
    if len(keys) > 1 and key_text(keys[-1]) in _WRAPPER_KEYS:
        keys.pop()
    return tuple(keys)


def input_names(module: Any, count: int) -> list[str]:
    """Return the names of the first `count` positional arguments of a module's `forward`; `input<i>` beyond these."""
    parameters = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (names + [f"input{i}" for i in range(len(names), count)])[:count]


def leaf_name(path: Sequence[Any]) -> str:
    """Return the dotted name of a leaf of the named arguments, from its path in torch's pytrees, keys and indices."""
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)


def map_inputs(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[str, Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a call with `change(name, leaf)` in place of every leaf.

    - `module`: torch module whose `forward` names positional arguments.
    - `args`, `kwargs`: arguments of the call, pytrees.
    - `change`: function of the leaf's dotted name (`leaf_name`) and the leaf.
    """
    from torch.utils import _pytree

    names = input_names(module, len(args))
    tree = dict(zip(names, args, strict=True)) | dict(kwargs)
    changed = _pytree.tree_map_with_path(lambda path, leaf: change(leaf_name(path), leaf), tree)
    return tuple(changed[name] for name in names), {key: changed[key] for key in kwargs}
