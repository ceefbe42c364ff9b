"""Functions over Equinox and Flax NNX modules as functions over pytrees of arrays."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.program.jax.layer_stack import as_asked
from autoshard.program.program_record import Role


@dataclasses.dataclass(frozen=True, slots=True)
class Arrays:
    """Arguments with nothing but arrays in them, and what was taken out."""

    args: tuple[Any, ...]
    key: Any
    """Equal for arguments that differ in nothing but their arrays."""
    objects: dict[int, Any]
    """NNX objects by their position; the state of each is in its place."""
    graphs: Any
    """What `nnx.merge` makes those objects of again."""
    full: list[Any] | None
    """All leaves, where some of them are static leaves of Equinox modules."""
    treedef: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Functional:
    """A function whose arguments and results hold arrays only."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    roles: dict[int, list[Role | None]]
    """For a positional argument: the roles of its leaves as far as the framework says them."""
    changed: tuple[int, ...] = ()
    """Positions of the NNX objects that the function changes; their states come first in its result."""
    static: list[Any] = dataclasses.field(default_factory=list)
    """Once the function has been traced: the static leaves of its result and its structure."""

    def finish(self, given: Sequence[Any], out: Any) -> Any:
        """What the original function would return, of what `fn` returned; NNX objects in `given` are updated."""
        import jax

        if self.static:
            leaves, treedef = self.static
            new = jax.tree.leaves(out, is_leaf=_is_none)
            out = treedef.unflatten([old if leaf is None else leaf for old, leaf in zip(leaves, new, strict=True)])
        if not self.changed:
            return out
        from flax import nnx

        *states, result = out
        for position, state in zip(self.changed, states, strict=True):
            nnx.update(given[position], state)
        return result


def functional(fn: Callable[..., Any], args: Sequence[Any]) -> Functional:
    """`fn` and `args` made functional: NNX objects become their state, static leaves of Equinox modules go.

    What `fn` does to an NNX object in place becomes a leading part of its result: `(states, result)`. Its stacks are
    computed as is asked of them now, whenever it is traced.
    """
    fn, taken = as_asked(fn), arrays_of(args)
    fn, changed, roles = _without_nnx(fn, taken)
    static: list[Any] = []
    if taken.full is not None:
        fn = _without_static(fn, taken.full, taken.treedef, static)
    return Functional(fn, taken.args, roles, changed, static)


def arrays_of(args: Sequence[Any]) -> Arrays:
    """Take NNX objects apart and static leaves out of Equinox modules."""
    import jax

    args, objects, graphs, full, treedef = list(args), {}, None, None, None
    if "flax" in sys.modules:
        from flax import nnx

        objects = {
            i: arg for i, arg in enumerate(args) if isinstance(arg, nnx.Pytree) and not isinstance(arg, nnx.State)
        }
        if objects:
            graphs, states = nnx.split(tuple(objects.values()))
            # One state for each argument, so that each keeps its name, role and donation.
            for k, i in enumerate(objects):
                args[i] = states[k] if k in states else nnx.State({})
    if any(_is_module(node) for node in jax.tree.leaves(args, is_leaf=_is_module)):
        leaves, structure = jax.tree.flatten(tuple(args), is_leaf=_is_none)
        args = _arrays(args)
        if jax.tree.structure(tuple(args)) != jax.tree.structure(structure.unflatten(leaves)):
            full, treedef = leaves, structure
    static = [(type(leaf), leaf) for leaf in full or () if not _is_array(leaf)]
    known = tuple((kind, leaf if kind.__hash__ else id(leaf)) for kind, leaf in static)
    return Arrays(tuple(args), (graphs, treedef, known), objects, graphs, full, treedef)


def _is_module(node: Any) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(node, equinox.Module)


def _is_none(node: Any) -> bool:
    return node is None


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _arrays(tree: Any) -> Any:
    """`None` in place of the leaves of Equinox modules that are no arrays (activations, rates)."""
    import jax

    def of(node: Any) -> Any:
        return jax.tree.map(lambda x: x if _is_array(x) else None, node) if _is_module(node) else node

    return jax.tree.map(of, tree, is_leaf=_is_module)


def _without_static(fn: Callable[..., Any], full: list[Any], treedef: Any, static: list[Any]) -> Callable[..., Any]:
    """Hold the static leaves of the arguments fixed, and note those of the result."""
    import jax

    @functools.wraps(fn)
    def run(*given: Any) -> Any:
        leaves = jax.tree.leaves(given, is_leaf=_is_none)
        merged = [old if new is None else new for old, new in zip(full, leaves, strict=True)]
        result = fn(*jax.tree.unflatten(treedef, merged))
        ends, structure = jax.tree.flatten(result, is_leaf=_is_none)
        static[:] = [[None if _is_array(leaf) else leaf for leaf in ends], structure]
        return _arrays(result)

    return run


def _without_nnx(
    fn: Callable[..., Any], taken: Arrays
) -> tuple[Callable[..., Any], tuple[int, ...], dict[int, list[Role | None]]]:
    """The function over states, the objects that it changes, and the roles of their leaves."""
    if not taken.objects:
        return fn, (), {}
    from flax import nnx

    places = list(taken.objects)
    roles = {i: [_role(nnx, kind) for kind in _kinds(nnx, taken.args[i])] for i in places}

    def run(*given: Any) -> Any:
        merged = list(given)
        joined = nnx.State({k: given[i] for k, i in enumerate(places) if len(taken.args[i])})
        objects = nnx.merge(taken.graphs, joined)
        for k, i in enumerate(places):
            merged[i] = objects[k]
        result = fn(*merged)
        after = nnx.state(tuple(objects))
        return tuple(after[k] if k in after else nnx.State({}) for k in range(len(places))), result

    changed = _changed(run, taken.args, len(places))

    @functools.wraps(fn)
    def step(*given: Any) -> Any:
        states_after, result = run(*given)
        kept = tuple(state for state, differs in zip(states_after, changed, strict=True) if differs)
        return (*kept, result) if kept else result

    return step, tuple(i for i, differs in zip(places, changed, strict=True) if differs), roles


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
