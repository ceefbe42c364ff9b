"""Tensors that share elements: a write to one is visible through the others, as with torch's views.

torchax's own views are slices. Every other view operation gives a separate array there, so that writes to it would be
lost. Here each such tensor has a link to the tensor that it views. A write is logged with the root tensor, which owns
the elements. Every other tensor applies the logged writes at its next read. The inverse of the ops from the root to the
written tensor updates the root's array. The ops from the root to the other tensor then compute that tensor's array.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autoshard.program.caller_frames import with_callers
from autoshard.program.torch_ops.torch_gradients import follows, has_gradient


Make = Callable[[Any], Any]
"""Function from the array of a tensor to the array of its view."""


class SharedWriteError(Exception):
    """Raised when code reads a tensor after a write to another one that may share its elements in an unknown way."""


@dataclasses.dataclass(eq=False)
class _Link:
    """The tensor that a view is of, and the function from its array to the view's.

    The link is not `certain` if torch may have made a copy.
    """

    parent: Any
    make: Make
    certain: bool


@dataclasses.dataclass(eq=False)
class _Write:
    """A write to `tensor`, whose new array is `value`; `tensor` is None for a write to the root.

    The effect on other tensors is unknown if it is not `certain`. `error` has the traceback of the write.
    """

    tensor: Any
    steps: Sequence[Make]
    """Functions from the root's array to that of `tensor`, in order."""
    value: Any
    certain: bool
    error: SharedWriteError
    read: bool = False
    """True once another tensor has read or shares the written elements; until then a further write replaces
    this one.
    """


def share(tensor: Any, parent: Any, make: Make, certain: bool) -> None:
    """Record that a new torchax `tensor` shares the elements of `parent`, a tensor or a view of torchax.

    - `make`: function from the parent's array to that of `tensor`.
    - `certain`: False if torch may have made a copy instead; reads after a write to the other one then raise.
    """
    root, _, _ = _path(parent)
    log = root.__dict__.setdefault("_log", [])
    root.__dict__.setdefault("_seen", 0)
    if log:
        log[-1].read = True
    tensor.__dict__.update(_link=_Link(parent, make, certain), _seen=len(log))


def elements(tensor: Any) -> Any:
    """Return the array of a torchax tensor after all writes to tensors that share its elements.

    The array is stored with the tensor, unless it belongs to an inner trace.

    Raises `SharedWriteError` if the effect of a write is unknown.
    """
    attrs = tensor.__dict__
    if "_link" not in attrs:
        return _synced(tensor) if attrs.get("_log") else attrs["_held"]
    root, steps, certain = _path(tensor)
    log = root.__dict__["_log"]
    if attrs["_seen"] == len(log):
        return attrs["_held"]
    for each in log[attrs["_seen"] :]:
        if not (certain and each.certain):
            raise each.error
    value = _synced(root)
    with _at_once(value):
        for make in steps:
            value = make(value)
    return _kept(tensor, value, len(log))


def write(tensor: Any, value: Any) -> None:
    """Set the array of a torchax tensor to `value`, and log the write if others share its elements.

    The first array of a tensor is no write. Under `no_grad`, an array of the same shape and dtype keeps the tensor's
    own gradient.
    """
    attrs = tensor.__dict__
    first = "_held" not in attrs
    if not first and not follows() and (value.shape, value.dtype) == (attrs["_held"].shape, attrs["_held"].dtype):
        value = _written_beside(elements(tensor), value)
    attrs["_held"] = value
    if first or not ("_link" in attrs or "_log" in attrs):
        return
    root, steps, certain = _path(tensor)
    log = root.__dict__["_log"]
    if log and log[-1].tensor is tensor and not log[-1].read:
        log[-1].value = value
    else:
        error = with_callers(SharedWriteError())
        known = certain and "_reshaped" not in root.__dict__
        log.append(_Write(None if root is tensor else tensor, steps, value, known, error))
    attrs["_seen"] = len(log)


def reshape(tensor: Any, value: Any) -> None:
    """Set the array of a torchax tensor to the same elements in another shape or order; this is no write.

    Later writes have an unknown effect on tensors that share its elements.
    """
    attrs = tensor.__dict__
    attrs["_held"] = value
    if "_link" in attrs:
        attrs["_link"] = dataclasses.replace(attrs["_link"], certain=False)
    if "_log" in attrs:  # a view of the old shape exists
        attrs["_reshaped"] = True


def lose(tensor: Any) -> None:
    """Record a write of unknown content to a torchax tensor or view; the next read of its elements raises."""
    root, _, _ = _path(tensor)
    root.__dict__.setdefault("_seen", 0)
    log = root.__dict__.setdefault("_log", [])
    log.append(_Write(None, (), None, certain=False, error=with_callers(SharedWriteError())))


def watched(tensors: Sequence[Any]) -> Callable[[], list[int]]:
    """Return a function that lists which of some torchax tensors and views, by number, were written to since.

    A slice counts as written if any element of its root was. A write of unknown content counts too.
    """
    roots = [root_of(each) for each in tensors]
    before = [elements(each) for each in roots]

    def written() -> list[int]:
        """Return the numbers of the tensors that were written to."""
        return [k for k, each in enumerate(roots) if _is_written(each, before[k])]

    return written


def _is_written(tensor: Any, before: Any) -> bool:
    """Return True if a tensor's array is no longer the object `before`, or unknown."""
    try:
        return elements(tensor) is not before
    except SharedWriteError:
        return True


def root_of(value: Any) -> Any:
    """Return the torchax tensor that a slice is of, over all levels of slices, or the torchax tensor itself."""
    while hasattr(value, "view_info"):
        value = value.parent
    return value


def _path(tensor: Any) -> tuple[Any, list[Make], bool]:
    """Return the root of a tensor or slice, the functions from the root's array to its own in order, and their
    certainty.

    The last is True if all links on the way are certain.
    """
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
    """Return the array of a root after all logged writes, and store it.

    Raises the error of a write whose effect is unknown.
    """
    attrs = root.__dict__
    log, value = attrs["_log"], attrs["_held"]
    if attrs["_seen"] == len(log):
        return value
    for each in log[attrs["_seen"] :]:
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
    """Return `value`, and store it as the tensor's array after `seen` writes of the log.

    It is not stored if it belongs to another trace than the present array.
    """
    attrs = tensor.__dict__
    if getattr(value, "_trace", None) is getattr(attrs["_held"], "_trace", None):
        attrs.update(_held=value, _seen=seen)
    return value


@contextlib.contextmanager
def _at_once(values: Any) -> Iterator[None]:
    """Compute at trace time, while inside, if no array in `values` is a tracer."""
    import jax
    from jax import core

    known = not any(isinstance(each, core.Tracer) for each in jax.tree.leaves(values))
    with jax.ensure_compile_time_eval() if known else contextlib.nullcontext():
        yield


def carried(array: Any, steps: Sequence[Make], value: Any) -> Any:
    """Return `array` after a write of `value` to the view that `steps` make of it, in order.

    Returns None if the view has an element more than once, or if the inverse of a step is unknown.
    """
    import jax

    def made(whole: Any) -> Any:
        """Return the view of an array."""
        for make in steps:
            whole = make(whole)
        return whole

    closed = jax.make_jaxpr(made)(jax.ShapeDtypeStruct(array.shape, array.dtype))
    return _carried(closed.jaxpr, closed.consts, [array], 0, value)


def _carried(jaxpr: Any, consts: Sequence[Any], given: Sequence[Any], position: int, value: Any) -> Any:
    """Return the argument at `position` of a program after `value` was written to the program's only result.

    Other arguments stay as given.

    - `jaxpr`, `consts`: the program and its constants.
    - `given`: present arguments of the program.

    Returns None if the inverse of an equation is unknown.
    """
    from jax.extend.core import Literal

    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *given), strict=True))
    depends = {jaxpr.invars[position]}

    def read(var: Any) -> Any:
        """Return the present value of a variable or literal."""
        return var.val if isinstance(var, Literal) else known[var]

    for equation in jaxpr.eqns:
        operands = [read(each) for each in equation.invars]
        with _at_once(operands):  # values that do not depend on the array, such as indices
            outputs = equation.primitive.bind(*operands, **equation.params)
        known.update(zip(equation.outvars, outputs if equation.primitive.multiple_results else [outputs], strict=True))
        if any(var in depends for var in equation.invars if not isinstance(var, Literal)):
            depends.update(equation.outvars)
    var = jaxpr.outvars[0]
    for equation in reversed(jaxpr.eqns):
        if var not in equation.outvars:
            continue
        dependent = [k for k, each in enumerate(equation.invars) if not isinstance(each, Literal) and each in depends]
        if len(dependent) != 1:
            return None
        operands = [read(each) for each in equation.invars]
        results = [known[each] for each in equation.outvars]
        value = _undone(equation, operands, dependent[0], results, equation.outvars.index(var), value)
        var = equation.invars[dependent[0]]
        if value is None:
            return None
    return value


def _undone(equation: Any, operands: list[Any], position: int, results: list[Any], which: int, value: Any) -> Any:
    """Return the operand at `position` of an equation after `value` was written to its result `which`.

    Inverses are known of reshapes, transposes, slices, splits, gathers without repetition, bit casts of one size and
    calls. Elements that the result lacks stay as they are.

    - `operands`, `results`: present values of the equation.

    The result is None if the inverse of the equation is unknown.
    """
    import jax.numpy as jnp
    from jax import lax

    name, params, operand = equation.primitive.name, equation.params, operands[position]
    inner = params.get("jaxpr") or params.get("call_jaxpr")
    if inner is not None and name in ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"):
        return _carried(inner.jaxpr, inner.consts, operands, position, value) if len(results) == 1 else None
    if name in ("reshape", "squeeze", "copy", "broadcast_in_dim") and operand.size == value.size:
        return value.reshape(operand.shape)
    if name == "stop_gradient":
        return _written_beside(operand, value)
    if name == "transpose":
        permutation = params["permutation"]
        return lax.transpose(value, [permutation.index(dim) for dim in range(len(permutation))])
    if name == "slice":
        starts, strides = params["start_indices"], params["strides"] or (1,) * operand.ndim
        if set(strides) == {1}:
            return lax.dynamic_update_slice(operand, value, starts)
        limits = params["limit_indices"]
        return operand.at[tuple(map(slice, starts, limits, strides))].set(value)
    if name == "split":
        return lax.concatenate([*results[:which], value, *results[which + 1 :]], params["axis"])
    if name == "bitcast_convert_type" and operand.shape == value.shape:
        return lax.bitcast_convert_type(value, operand.dtype)
    if name == "gather" and _is_apart(operands[1], params):
        numbers = params["dimension_numbers"]
        places = lax.ScatterDimensionNumbers(
            update_window_dims=numbers.offset_dims,
            inserted_window_dims=numbers.collapsed_slice_dims,
            scatter_dims_to_operand_dims=numbers.start_index_map,
            operand_batching_dims=numbers.operand_batching_dims,
            scatter_indices_batching_dims=numbers.start_indices_batching_dims,
        )
        return lax.scatter(operand, jnp.asarray(operands[1]), value, places, mode="drop")
    return None


def _is_apart(indices: Any, params: Any) -> bool:
    """Return True if a gather of single elements certainly reads none twice: its indices are constant and distinct."""
    import numpy as np
    from jax import core

    numbers = params["dimension_numbers"]
    is_wide = any(params["slice_sizes"][dim] != 1 for dim in numbers.start_index_map)
    if is_wide or numbers.operand_batching_dims or isinstance(indices, core.Tracer):
        return False
    rows = np.asarray(indices).reshape(-1, indices.shape[-1])
    return len(np.unique(rows, axis=0)) == len(rows)


def _written_beside(before: Any, value: Any) -> Any:
    """Return `value` with the gradient of `before`, since torch tracked no gradient of the write."""
    return _beside()(before, value) if has_gradient(value) or has_gradient(before) else value


@functools.cache
def _beside() -> Callable[[Any, Any], Any]:
    """Return a function of (before, value) that returns `value` and has the tangent of `before`."""
    import jax

    @jax.custom_jvp
    def beside(before: Any, value: Any) -> Any:
        return value

    @beside.defjvp
    def of_before(primals: Any, tangents: Any) -> Any:
        return primals[1], tangents[0]

    return beside
