"""Conversion of functions over Equinox and Flax NNX modules to functions over pytrees of arrays."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.program.jax.layer_stack import with_active_pipeline
from autoshard.program.program_record import Role


@dataclasses.dataclass(frozen=True, slots=True)
class Arrays:
    """Arguments that contain arrays only, and the parts that were removed from them."""

    args: tuple[Any, ...]
    """The arguments: states in place of NNX objects, None in place of static leaves."""
    key: Any
    """Key that is equal for arguments that differ only in their arrays."""
    objects: dict[int, Any]
    """NNX objects by position; the argument there is the object's state."""
    graphs: Any
    """Structure from which `nnx.merge` rebuilds those objects."""
    full: list[Any] | None
    """All leaves, if some are static leaves of Equinox modules; else None."""
    treedef: Any
    """Structure of the arguments with those leaves; None if `full` is None."""


@dataclasses.dataclass(frozen=True, slots=True)
class Functional:
    """A function whose arguments and results contain arrays only."""

    fn: Callable[..., Any]
    """Function over arrays, without module objects."""
    args: tuple[Any, ...]
    """Its arguments, those of `Arrays`."""
    roles: dict[int, list[Role | None]]
    """Roles of the leaves by positional argument, as far as the framework gives them."""
    changed: tuple[int, ...] = ()
    """Positions of the NNX objects that the function changes; its result begins with their states."""
    static: list[Any] = dataclasses.field(default_factory=list)
    """Static leaves of the result (None in place of arrays) and its structure, once the function has been traced.

    Empty before, and for arguments without static leaves.
    """

    def finish(self, given: Sequence[Any], out: Any) -> Any:
        """Return the result of the original function from `out`, that of `fn`.

        Static leaves are filled in, and NNX objects in `given`, the original arguments, are updated in place.
        """
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
    """Make `fn` and `args` functional: replace NNX objects by their state, and remove static leaves of Equinox modules.

    In-place changes of NNX objects become a leading part of the result: `(states, result)`. Stacks of layers are
    computed by the pipeline that is active now, no matter when the function is traced.
    """
    fn, arrays = with_active_pipeline(fn), arrays_of(args)
    fn, changed, roles = _without_nnx(fn, arrays)
    static: list[Any] = []
    if arrays.full is not None:
        fn = _without_static(fn, arrays.full, arrays.treedef, static)
    return Functional(fn, arrays.args, roles, changed, static)


def arrays_of(args: Sequence[Any]) -> Arrays:
    """Split NNX objects into graph and state, and remove static leaves from Equinox modules.

    Only top-level arguments count as NNX objects. Other arguments are returned as they are.
    """
    import jax

    args, objects, graphs, full, treedef = list(args), {}, None, None, None
    if "flax" in sys.modules:
        from flax import nnx

        objects = {
            i: arg for i, arg in enumerate(args) if isinstance(arg, nnx.Pytree) and not isinstance(arg, nnx.State)
        }
        if objects:
            graphs, states = nnx.split(tuple(objects.values()))
            # One state for each argument, so that its name, role and donation stay its own.
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
    """Return True for an Equinox module; Equinox is not imported for it."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(node, equinox.Module)


def _is_none(node: Any) -> bool:
    return node is None


def _is_array(leaf: Any) -> bool:
    """Return True for anything with a shape and a dtype, a `jax.ShapeDtypeStruct` included."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _arrays(tree: Any) -> Any:
    """Replace by `None` the leaves of Equinox modules that are no arrays (activations, rates)."""
    import jax

    def of(node: Any) -> Any:
        return jax.tree.map(lambda x: x if _is_array(x) else None, node) if _is_module(node) else node

    return jax.tree.map(of, tree, is_leaf=_is_module)


def _without_static(fn: Callable[..., Any], full: list[Any], treedef: Any, static: list[Any]) -> Callable[..., Any]:
    """Return `fn` with the static leaves of its arguments fixed; those of its result are stored in `static`."""
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
    fn: Callable[..., Any], arrays: Arrays
) -> tuple[Callable[..., Any], tuple[int, ...], dict[int, list[Role | None]]]:
    """Return the function over states, the positions of the objects that it changes, and the roles of all objects.

    The result of the function is `(*changed states, result)`, or the plain result if it changes none. `fn` is traced
    once to find them.
    """
    if not arrays.objects:
        return fn, (), {}
    from flax import nnx

    places = list(arrays.objects)
    roles = {i: [_role(nnx, kind) for kind in _kinds(nnx, arrays.args[i])] for i in places}

    def run(*given: Any) -> Any:
        merged = list(given)
        joined = nnx.State({k: given[i] for k, i in enumerate(places) if len(arrays.args[i])})
        objects = nnx.merge(arrays.graphs, joined)
        for k, i in enumerate(places):
            merged[i] = objects[k]
        result = fn(*merged)
        after = nnx.state(tuple(objects))
        return tuple(after[k] if k in after else nnx.State({}) for k in range(len(places))), result

    changed = _changed(run, arrays.args, places)

    @functools.wraps(fn)
    def step(*given: Any) -> Any:
        states_after, result = run(*given)
        changed_states = tuple(state for state, differs in zip(states_after, changed, strict=True) if differs)
        return (*changed_states, result) if changed_states else result

    return step, tuple(i for i, differs in zip(places, changed, strict=True) if differs), roles


def _changed(run: Callable[..., Any], args: tuple[Any, ...], places: Sequence[int]) -> list[bool]:
    """Return for each of the arguments at `places` whether `run` changes it; its first result has their new states.

    A state is unchanged if it has the structure of its argument and each leaf is the same leaf of that argument.
    """
    import jax

    closed, (states, _) = jax.make_jaxpr(run, return_shape=True)(*args)
    # The variables of the jaxpr stand in the places of the arguments' leaves, those of its results likewise.
    before = jax.tree.unflatten(jax.tree.structure(args), closed.jaxpr.invars)
    leaves, structure = jax.tree.flatten(states)
    after = jax.tree.unflatten(structure, closed.jaxpr.outvars[: len(leaves)])
    return [_leaves_by_path(state) != _leaves_by_path(before[i]) for i, state in zip(places, after, strict=True)]


def _leaves_by_path(tree: Any) -> list[Any]:
    """Return (path, leaf) of each leaf, in order."""
    import jax

    return jax.tree_util.tree_leaves_with_path(tree)


def _kinds(nnx: Any, state: Any) -> list[type]:
    """Return the type of the NNX variable of each leaf."""
    import jax

    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return [type(node) for node in nodes]


def _role(nnx: Any, kind: type) -> Role | None:
    """Return the role that the type of an NNX variable gives: parameter, optimizer state (`opt` in its name) or other.

    None is for leaves that are no NNX variables.
    """
    if issubclass(kind, nnx.Param):
        return Role.PARAMETER
    if "opt" in kind.__name__.lower():
        return Role.OPTIMIZER_STATE
    if issubclass(kind, nnx.Variable):
        return Role.OTHER
    return None
