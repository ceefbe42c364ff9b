"""Tensors that share elements: what is written to one of them is read from the others, as from torch's views.

torchax's own views are slices. What any other operation makes of a tensor is an array of its own there, so what is
written to it would be lost. Here such a tensor knows what it was made of. A write is noted with the tensor whose
elements are at the root of all; each other tensor takes it in when it is read next, by the inverse of what made the one
and then by what made the other.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autoshard.program.caller_frames import with_callers
from autoshard.program.torch_ops.torch_gradients import follows, has_gradient


Make = Callable[[Any], Any]
"""What makes the array of a view of the array of what it looks at."""


class SharedWriteError(Exception):
    """Code writes to what may share elements with another tensor, in a way that is not known, and reads that then."""


@dataclasses.dataclass(eq=False)
class _Link:
    """Of a tensor: what it was made of, and how. Not `certain`: torch may have made a copy of it."""

    parent: Any
    make: Make
    certain: bool


@dataclasses.dataclass(eq=False)
class _Write:
    """A write to `tensor`, which holds `value` since; None for one to the root itself.

    Not `certain`: nobody knows what it is for others. `error` says where it was.
    """

    tensor: Any
    steps: Sequence[Make]
    value: Any
    certain: bool
    error: SharedWriteError
    read: bool = False


def share(tensor: Any, parent: Any, make: Make, certain: bool) -> None:
    """Note that a new torchax `tensor` shares the elements of `parent`, a tensor or a view of torchax's."""
    root, _, _ = _path(parent)
    log = root.__dict__.setdefault("_log", [])
    root.__dict__.setdefault("_seen", 0)
    if log:
        log[-1].read = True
    tensor.__dict__.update(_link=_Link(parent, make, certain), _seen=len(log))


def elements(tensor: Any) -> Any:
    """The array of a torchax tensor, with all that was written to those that share its elements."""
    held = tensor.__dict__
    if "_link" not in held:
        return _synced(tensor) if held.get("_log") else held["_held"]
    root, steps, certain = _path(tensor)
    log = root.__dict__["_log"]
    if held["_seen"] == len(log):
        return held["_held"]
    for each in log[held["_seen"] :]:
        if not (certain and each.certain):
            raise each.error
    value = _synced(root)
    with _at_once(value):
        for make in steps:
            value = make(value)
    return _kept(tensor, value, len(log))


def write(tensor: Any, value: Any) -> None:
    """Let a torchax tensor hold an array, from now on or first of all."""
    held = tensor.__dict__
    first = "_held" not in held
    if not first and not follows() and (value.shape, value.dtype) == (held["_held"].shape, held["_held"].dtype):
        value = _written_beside(elements(tensor), value)
    held["_held"] = value
    if first or not ("_link" in held or "_log" in held):
        return
    root, steps, certain = _path(tensor)
    log = root.__dict__["_log"]
    if log and log[-1].tensor is tensor and not log[-1].read:
        log[-1].value = value
    else:
        error = with_callers(SharedWriteError())
        known = certain and "_reshaped" not in root.__dict__
        log.append(_Write(None if root is tensor else tensor, steps, value, known, error))
    held["_seen"] = len(log)


def reshape(tensor: Any, value: Any) -> None:
    """Let a torchax tensor hold the same elements in another shape or order."""
    held = tensor.__dict__
    held["_held"] = value
    if "_link" in held:
        held["_link"] = dataclasses.replace(held["_link"], certain=False)
    if "_log" in held:  # something looks at it as it was
        held["_reshaped"] = True


def lose(tensor: Any) -> None:
    """Note that something was written to a torchax tensor or view, and that nobody knows what."""
    root, _, _ = _path(tensor)
    root.__dict__.setdefault("_seen", 0)
    log = root.__dict__.setdefault("_log", [])
    log.append(_Write(None, (), None, certain=False, error=with_callers(SharedWriteError())))


def watched(tensors: Sequence[Any]) -> Callable[[], list[int]]:
    """What tells, when called later, which of some torchax tensors and views have been written to since."""
    roots = [root_of(each) for each in tensors]
    before = [elements(each) for each in roots]

    def written() -> list[int]:
        return [k for k, each in enumerate(roots) if _is_written(each, before[k])]

    return written


def _is_written(tensor: Any, before: Any) -> bool:
    try:
        return elements(tensor) is not before
    except SharedWriteError:
        return True


def root_of(value: Any) -> Any:
    """The tensor that a torchax tensor is, or that a slice looks at."""
    while hasattr(value, "view_info"):
        value = value.parent
    return value


def _path(tensor: Any) -> tuple[Any, list[Make], bool]:
    """The tensor at the root of another, what makes the one of the other in order, and whether all of it is known."""
    steps: list[Make] = []
    certain = True
    while True:
        link = tensor.__dict__.get("_link")
        if hasattr(tensor, "view_info"):
            steps.append(tensor.view_info.transform_tensor)
            tensor = tensor.parent
        elif link is not None:
            steps.append(link.make)
            certain = certain and link.certain
            tensor = link.parent
        else:
            return tensor, steps[::-1], certain


def _synced(root: Any) -> Any:
    """The array of a root, with what was written to others."""
    held = root.__dict__
    log, value = held["_log"], held["_held"]
    if held["_seen"] == len(log):
        return value
    for each in log[held["_seen"] :]:
        each.read = True
        if not each.certain:
            raise each.error
        if each.tensor is not None:
            with _at_once((value, each.value)):
                after = carried(value, each.steps, each.value)
            if after is None:
                raise each.error
            value = after
    return _kept(root, value, len(log))


def _kept(tensor: Any, value: Any, seen: int) -> Any:
    """`value`, which the tensor holds from now on, unless it is of a trace within that of what it held."""
    held = tensor.__dict__
    if getattr(value, "_trace", None) is getattr(held["_held"], "_trace", None):
        held.update(_held=value, _seen=seen)
    return value


@contextlib.contextmanager
def _at_once(values: Any) -> Iterator[None]:
    """While inside, what is computed of arrays that are known is known as well."""
    import jax
    from jax import core

    known = not any(isinstance(each, core.Tracer) for each in jax.tree.leaves(values))
    with jax.ensure_compile_time_eval() if known else contextlib.nullcontext():
        yield


def carried(array: Any, steps: Sequence[Make], value: Any) -> Any:
    """`array` after `value` was written to what `steps` make of it; None where some element is there more than once, or
    where what they do is not known."""
    import jax

    def made(whole: Any) -> Any:
        for make in steps:
            whole = make(whole)
        return whole

    closed = jax.make_jaxpr(made)(jax.ShapeDtypeStruct(array.shape, array.dtype))
    return _carried(closed.jaxpr, closed.consts, [array], 0, value)


def _carried(jaxpr: Any, consts: Sequence[Any], given: Sequence[Any], position: int, value: Any) -> Any:
    """What the argument at `position` of a program is after `value` was written to its one result."""
    from jax.extend.core import Literal

    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *given), strict=True))
    depends = {jaxpr.invars[position]}

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else known[var]

    for equation in jaxpr.eqns:
        operands = [read(each) for each in equation.invars]
        with _at_once(operands):  # what does not depend on the array, as indices
            found = equation.primitive.bind(*operands, **equation.params)
        known.update(zip(equation.outvars, found if equation.primitive.multiple_results else [found], strict=True))
        if any(var in depends for var in equation.invars if not isinstance(var, Literal)):
            depends.update(equation.outvars)
    var = jaxpr.outvars[0]
    for equation in reversed(jaxpr.eqns):
        if var not in equation.outvars:
            continue
        taken = [k for k, each in enumerate(equation.invars) if not isinstance(each, Literal) and each in depends]
        if len(taken) != 1:
            return None
        operands = [read(each) for each in equation.invars]
        results = [known[each] for each in equation.outvars]
        value = _undone(equation, operands, taken[0], results, equation.outvars.index(var), value)
        var = equation.invars[taken[0]]
        if value is None:
            return None
    return value


def _undone(equation: Any, operands: list[Any], position: int, results: list[Any], which: int, value: Any) -> Any:
    """The operand at `position` of an equation after `value` was written to its result `which`."""
    import jax.numpy as jnp
    from jax import lax

    name, params, whole = equation.primitive.name, equation.params, operands[position]
    inner = params.get("jaxpr") or params.get("call_jaxpr")
    if inner is not None and name in ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"):
        return _carried(inner.jaxpr, inner.consts, operands, position, value) if len(results) == 1 else None
    if name in ("reshape", "squeeze", "copy", "broadcast_in_dim") and whole.size == value.size:
        return value.reshape(whole.shape)
    if name == "stop_gradient":
        return _written_beside(whole, value)
    if name == "transpose":
        permutation = params["permutation"]
        return lax.transpose(value, [permutation.index(dim) for dim in range(len(permutation))])
    if name == "slice":
        starts, strides = params["start_indices"], params["strides"] or (1,) * whole.ndim
        if set(strides) == {1}:
            return lax.dynamic_update_slice(whole, value, starts)
        limits = params["limit_indices"]
        return whole.at[tuple(map(slice, starts, limits, strides))].set(value)
    if name == "split":
        return lax.concatenate([*results[:which], value, *results[which + 1 :]], params["axis"])
    if name == "bitcast_convert_type" and whole.shape == value.shape:
        return lax.bitcast_convert_type(value, whole.dtype)
    if name == "gather" and _is_apart(operands[1], params):
        numbers = params["dimension_numbers"]
        places = lax.ScatterDimensionNumbers(
            update_window_dims=numbers.offset_dims,
            inserted_window_dims=numbers.collapsed_slice_dims,
            scatter_dims_to_operand_dims=numbers.start_index_map,
            operand_batching_dims=numbers.operand_batching_dims,
            scatter_indices_batching_dims=numbers.start_indices_batching_dims,
        )
        return lax.scatter(whole, jnp.asarray(operands[1]), value, places, mode="drop")
    return None


def _is_apart(indices: Any, params: Any) -> bool:
    """Whether a gather is known to take no element twice."""
    import numpy as np
    from jax import core

    numbers = params["dimension_numbers"]
    whole = any(params["slice_sizes"][dim] != 1 for dim in numbers.start_index_map)
    if whole or numbers.operand_batching_dims or isinstance(indices, core.Tracer):
        return False
    rows = np.asarray(indices).reshape(-1, indices.shape[-1])
    return len(np.unique(rows, axis=0)) == len(rows)


def _written_beside(before: Any, value: Any) -> Any:
    """`value` in the place of `before`, whose gradient it has: it was written where torch follows no gradients."""
    return _beside()(before, value) if has_gradient(value) or has_gradient(before) else value


@functools.cache
def _beside() -> Callable[[Any, Any], Any]:
    import jax

    @jax.custom_jvp
    def beside(before: Any, value: Any) -> Any:
        return value

    @beside.defjvp
    def of_before(primals: Any, tangents: Any) -> Any:
        return primals[1], tangents[0]

    return beside
