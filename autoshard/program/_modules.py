"""Functions over Equinox and Flax NNX modules as functions over pytrees of arrays."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.program._program import Role


@dataclasses.dataclass(frozen=True, slots=True)
class Functional:
    """A function whose arguments and results hold arrays only."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    roles: dict[int, list[Role | None]]
    """For a positional argument: the roles of its leaves as far as the framework says them."""


def functional(fn: Callable[..., Any], args: Sequence[Any]) -> Functional:
    """`fn` and `args` made functional: NNX objects become their state, static leaves of Equinox modules go.

    What `fn` does to an NNX object in place becomes a leading part of its result: `(states, result)`.
    """
    fn, args, roles = _without_nnx(fn, tuple(args))
    fn, args = _without_static(fn, args)
    return Functional(fn, args, roles)


def _without_static(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Hold the leaves of Equinox modules that are no arrays (activations, rates) fixed; `None` in their place."""
    import jax

    equinox = sys.modules.get("equinox")
    if equinox is None:
        return fn, args

    def is_module(node: Any) -> bool:
        return isinstance(node, equinox.Module)

    def is_none(node: Any) -> bool:
        return node is None

    def is_array(leaf: Any) -> bool:
        return hasattr(leaf, "shape") and hasattr(leaf, "dtype")

    if not any(is_module(node) for node in jax.tree.leaves(args, is_leaf=is_module)):
        return fn, args

    def arrays_of(node: Any) -> Any:
        return jax.tree.map(lambda x: x if is_array(x) else None, node) if is_module(node) else node

    def arrays(tree: Any) -> Any:
        return jax.tree.map(arrays_of, tree, is_leaf=is_module)

    dynamic = arrays(args)
    full, treedef = jax.tree.flatten(args, is_leaf=is_none)

    @functools.wraps(fn)
    def run(*given: Any) -> Any:
        leaves = jax.tree.leaves(given, is_leaf=is_none)
        merged = [old if new is None else new for old, new in zip(full, leaves, strict=True)]
        return arrays(fn(*jax.tree.unflatten(treedef, merged)))

    return run, dynamic


def _without_nnx(
    fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[int, list[Role | None]]]:

    if "flax" not in sys.modules:
        return fn, args, {}
    from flax import nnx

    places = [i for i, arg in enumerate(args) if isinstance(arg, nnx.Pytree) and not isinstance(arg, nnx.State)]
    if not places:
        return fn, args, {}
    graphs, states = nnx.split(tuple(args[i] for i in places))
    # One state for each argument, so that each keeps its name, role and donation.
    per_argument = [states[k] if k in states else nnx.State({}) for k in range(len(places))]
    held = dict(zip(places, per_argument, strict=True))
    roles = {i: [_role(nnx, kind) for kind in _kinds(nnx, state)] for i, state in held.items()}

    def run(*given: Any) -> Any:
        merged = list(given)
        joined = nnx.State({k: given[i] for k, i in enumerate(places) if k in states})
        objects = nnx.merge(graphs, joined)
        for k, i in enumerate(places):
            merged[i] = objects[k]
        result = fn(*merged)
        after = nnx.state(tuple(objects))
        return tuple(after[k] if k in after else nnx.State({}) for k in range(len(places))), result

    new_args = list(args)
    for i, state in held.items():
        new_args[i] = state
    changed = _changed(run, tuple(new_args), len(places))

    @functools.wraps(fn)
    def step(*given: Any) -> Any:
        states_after, result = run(*given)
        kept = tuple(state for state, differs in zip(states_after, changed, strict=True) if differs)
        return (*kept, result) if kept else result

    return step, tuple(new_args), roles


def _changed(run: Callable[..., Any], args: tuple[Any, ...], count: int) -> list[bool]:
    """Which of the first `count` states of the result are not just passed through."""
    import jax

    closed, shape = jax.make_jaxpr(run, return_shape=True)(*args)
    passed = set(closed.jaxpr.invars)
    changed: list[bool] = []
    start = 0
    for state in shape[0]:
        size = len(jax.tree.leaves(state))
        outs = closed.jaxpr.outvars[start : start + size]
        changed.append(any(var not in passed for var in outs if hasattr(var, "aval") and not hasattr(var, "val")))
        start += size
    return changed[:count]


def _kinds(nnx: Any, state: Any) -> list[type]:
    import jax

    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return [type(node) for node in nodes]


def _role(nnx: Any, kind: type) -> Role | None:
    if issubclass(kind, nnx.Param):
        return Role.PARAMETER
    if "opt" in kind.__name__.lower():
        return Role.OPTIMIZER_STATE
    if issubclass(kind, nnx.Variable):
        return Role.OTHER
    return None
