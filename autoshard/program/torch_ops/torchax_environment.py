"""torchax's environment, which converts between torch tensors and JAX arrays."""

import contextlib
import contextvars
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autoshard.program.segments import op_scope
from autoshard.program.torch_ops import (
    indexed_writes,
    masked_reads,
    torch_gradients,
    torch_layouts,
    torch_refusals,
    wide_integers,
)
from autoshard.program.torch_ops import views as shared_views
from autoshard.program.torch_ops.masked_reads import MaskedRows, by_row
from autoshard.program.torch_ops.torch_imports import importing_torchax
from autoshard.program.torch_ops.views import root_of


_FOLDED_ELEMENTS = 1 << 20
"""Largest number of elements of a result that is folded into a constant of the program."""

_KNOWN_ELEMENTS = 1 << 24
"""Largest number of elements of a result whose values are computed at trace time in addition to the program's ops."""

_folding: contextvars.ContextVar[bool] = contextvars.ContextVar("folding", default=False)


@contextlib.contextmanager
def folding(on: bool) -> Iterator[None]:
    """Compute values that follow from sizes alone at trace time, while inside and if `on`.

    Code may then read these values. They become constants of the program up to `_FOLDED_ELEMENTS` elements.
    """
    token = _folding.set(on)
    try:
        yield
    finally:
        _folding.reset(token)


_Tensors = Mapping[int, Callable[[], None]]
"""Functions without arguments by the `id` of a tensor."""
_elsewhere: contextvars.ContextVar[_Tensors | None] = contextvars.ContextVar("elsewhere", default=None)


@contextlib.contextmanager
def used_elsewhere(tensors: _Tensors) -> Iterator[None]:
    """Report each op that consumes one of some tensors and gives a tensor, while inside.

    - `tensors`: function to call by the `id` of a tensor; it is called at each such op.

    The tensors are a module's own, for which the program has arguments. An op that consumes one would make it a
    constant.
    """
    token = _elsewhere.set(tensors)
    try:
        yield
    finally:
        _elsewhere.reset(token)


@functools.cache
def environment() -> Any:
    """Return the only `torchax.tensor.Environment` of this process, which accepts ordinary CPU tensors.

    It has torchax's own lowerings until `lowered_environment` installs autoshard's.
    """
    root, level = logging.getLogger(), logging.getLogger().level
    root.setLevel(logging.ERROR)  # importing torchax logs about absent optional packages
    try:
        with importing_torchax():
            return _environment_type()()
    finally:
        root.setLevel(level)


def _environment_type() -> type:
    """Return a subclass of torchax's environment that accepts CPU tensors created or stored by a module, as constants.

    Shared elements, gradients, integer bounds and constant folding are tracked in its `dispatch`. The call also
    replaces attributes of torchax's tensors and views for the whole process, such as `_elem`, `data` and `__setitem__`.
    """
    import jax
    import jax.numpy as jnp
    import torch
    from jax import core
    from torch.utils import _pytree
    from torchax import device_module, tensor
    from torchax.ops import mappings
    from torchax.view import View

    def folds(given: Any) -> bool:
        """Return True if no torchax tensor in a pytree has a traced array, also if there is none."""
        tensors = [each for each in _pytree.tree_leaves(given) if isinstance(each, (tensor.Tensor, View))]
        return not any(isinstance(root_of(each)._elem, core.Tracer) for each in tensors)

    def computed(value: Any) -> Any:
        """Return a tensor with the values of a tensor or view at trace time if they are known, else the same object."""
        if isinstance(value, View):
            parent = computed(value.parent)
            with jax.ensure_compile_time_eval():  # the constructor computes the shape
                return value if parent is value.parent else View(parent, value.view_info, value._env)
        known: Any = getattr(value, "_beforehand", None)
        return tensor.Tensor(known[1], value._env) if known is not None and known[0] is value._elem else value

    def large(result: Any) -> bool:
        """Return True if a result has a tensor of over `_FOLDED_ELEMENTS` elements, which is no constant."""
        leaves = [leaf for leaf in _pytree.tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        return any(leaf.numel() > _FOLDED_ELEMENTS for leaf in leaves)

    def note(traced: Any, result: Any) -> Any:
        """Attach the trace-time values of `result` to the tensors of `traced`, and return `traced`.

        Values of more than `_KNOWN_ELEMENTS` elements are dropped. Views read them from their parents.
        """
        for each, known in zip(_pytree.tree_leaves(traced), _pytree.tree_leaves(result), strict=True):
            if isinstance(known, tensor.Tensor) and each.numel() <= _KNOWN_ELEMENTS:
                setattr(each, "_beforehand", (each._elem, known._elem))  # noqa: B010  # no field of its class
        return traced

    copying = {torch.Tensor.to, torch.ops.aten._to_copy, torch.ops.aten._to_copy.default}

    class Environment(tensor.Environment):
        """torchax's environment with constant folding, shared elements, gradients and bounds of integers."""

        is_running = False
        """True while an operation's lowering runs; operations of the lowering are not checked against torch."""

        def _to_copy(self, the_tensor: Any, new_dtype: Any, new_device: Any) -> Any:
            """Return a copy in another dtype or on another device; a traced array stays on its device."""
            given: Any = the_tensor.torch() if isinstance(the_tensor, View) else the_tensor
            traced = isinstance(given, tensor.Tensor) and isinstance(given._elem, core.Tracer)
            return super()._to_copy(given, new_dtype, None if traced else new_device)  # tracers cannot move to the host

        def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            """Run one torch operation, and record bounds, gradients and shared elements of its results.

            Results have torch's dtypes. Under `no_grad` gradients stop at them. Arguments are those of
            `__torch_function__`.

            Raises torch's own error if torch refuses the operation, and `ValueError` for JAX's incompatible shapes.
            """
            if kwargs and (names := torch_layouts.outputs(func, kwargs)):
                run = lambda each, *given: self.dispatch(each, types, *given)  # noqa: E731
                return torch_layouts.written(run, func, args, kwargs, names)
            try:
                with (
                    wide_integers.bounded(func, (args, kwargs)) as bounds,
                    torch_gradients.counted_gradients((args, kwargs)) as results,
                ):
                    answer = self._asked(func, args, kwargs or {})
                    with self._running(func, args, kwargs or {}):
                        result = self._copied(func, args, kwargs or {}, self._folded(func, types, args, kwargs))
                        result = self._as_asked(args, kwargs, result, answer)
                    if func is torch.tensor and isinstance(result, tensor.Tensor):
                        torch_refusals.note_constant(result, *args)
                    bounds.append(result)
                    results.append(result)
                self._share(func, types, args, kwargs or {}, result)
                if not torch_gradients.follows():
                    result = self._stopped(args, kwargs, result)
                if own := _elsewhere.get():
                    callbacks = [own[id(each)] for each in _pytree.tree_leaves((args, kwargs)) if id(each) in own]
                    if callbacks and any(isinstance(each, torch.Tensor) for each in _pytree.tree_leaves(result)):
                        for callback in callbacks:
                            callback()
                return result
            except TypeError as error:  # Python's operators would hide the reason
                if "incompatible shapes" not in str(error):
                    raise
                raise ValueError(str(error)) from error

        @contextlib.contextmanager
        def _running(self, func: Any, args: Any, kwargs: Any) -> Iterator[None]:
            """Run an operation inside; all other operations that run inside are parts of its lowering.

            Raises torch's own error if the lowering fails and torch refuses the operation.
            """
            before, self.is_running = self.is_running, True
            try:
                yield
            except (TypeError, ValueError, IndexError, RuntimeError, AssertionError, ArithmeticError) as error:
                if before or isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
                    raise
                if (refusal := torch_refusals.refusal_of(func, args, kwargs)) is None:
                    raise
                raise refusal from None
            finally:
                self.is_running = before

        def _asked(self, func: Any, args: Any, kwargs: Any) -> Any:
            """Return the shapes and dtypes of torch's results for an operation that has a lowering, or None if they are
            unknown.

            Operations inside a lowering, copies and operations without a torchax tensor are not asked for.

            Raises torch's own error if torch refuses the operation.
            """
            if self.is_running or func in copying or any(isinstance(each, MaskedRows) for each in args):
                return None
            leaves = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            if not any(isinstance(each, (tensor.Tensor, View)) for each in leaves):
                return None
            if isinstance(func, torch._ops.OpOverload) and torch_layouts.depends(func):
                return None  # torch decomposes `reshape` to a view by the strides of torchax's own tensors
            if func is not torch.Tensor.view:
                try:
                    self._get_op_or_decomp(func)
                except tensor.OperatorNotFound:
                    return None
            return torch_refusals.torch_results(func, args, kwargs)

        def _as_asked(self, args: Any, kwargs: Any, result: Any, answer: Any) -> Any:
            """Return `result` with its new tensors cast to the dtypes of `answer`; unchanged without an answer.

            Raises `NotImplementedError` if the lowering gives other shapes.
            """
            leaves, tree = _pytree.tree_flatten(result)
            places = [k for k, each in enumerate(leaves) if isinstance(each, torch.Tensor)]
            if answer is None or len(places) != len(answer):
                return result
            given = {id(each) for each in _pytree.tree_leaves((args, kwargs))}
            for k, (shape, dtype) in zip(places, answer, strict=True):
                each = leaves[k]
                if id(each) in given or not isinstance(each, tensor.Tensor) or "_held" not in each.__dict__:
                    continue
                array = each.__dict__["_held"]
                if array.shape != shape:
                    raise NotImplementedError(f"results of shape {tuple(array.shape)}, where torch gives {shape}")
                wanted = jax.dtypes.canonicalize_dtype(mappings.t2j_dtype(dtype))
                if array.dtype != wanted:
                    leaves[k] = tensor.Tensor(array.astype(wanted), self)
            return _pytree.tree_unflatten(leaves, tree)

        def _copied(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
            """Return a copy of the argument if torch makes one but torchax returned the argument itself;
            else `result`.
            """
            if func not in copying or result is not args[0] or not isinstance(result, tensor.Tensor):
                return result
            layouts = torch_layouts.as_torch(func, args, kwargs, result)
            return tensor.Tensor(result.jax(), self) if layouts and layouts[0][0] is False else result

        def _share(self, func: Any, types: Any, args: Any, kwargs: Any, result: Any) -> None:
            """Record which new results share elements with an argument, and which are not contiguous."""
            leaves = _pytree.tree_leaves((args, kwargs))
            given = [each for each in leaves if isinstance(each, (tensor.Tensor, View))]
            results = _pytree.tree_leaves(result)
            new = {k: each for k, each in enumerate(results) if isinstance(each, tensor.Tensor)}
            new = {k: each for k, each in new.items() if not any(each is other for other in given)}
            parent = torch_layouts.viewed(func, args, kwargs)
            views = isinstance(parent, (tensor.Tensor, View))
            if not new or not given or not (views or torch_layouts.is_told(given)):
                return
            layouts = torch_layouts.as_torch(func, args, kwargs, parent)
            if layouts is not None and len(layouts) != len(results):
                layouts = None
            for k, each in new.items():
                is_view, layout = layouts[k] if layouts else (None, None)
                torch_layouts.note(each, layout)
                if views and is_view is not False:
                    make = functools.partial(self._view, func, types, args, kwargs, parent, k)
                    shared_views.share(each, parent, make, is_view or not torch_layouts.depends(func))

        def _stopped(self, args: Any, kwargs: Any, result: Any) -> Any:
            """Return `result` with JAX's gradients stopped at its tensors; arguments that were only written to stay as
            they are.
            """
            given = {id(each) for each in _pytree.tree_leaves((args, kwargs))}

            def stopped(each: Any) -> Any:
                """Return a result that shares the elements of `each`, without a gradient."""
                if id(each) in given or not isinstance(each, (tensor.Tensor, View)):
                    return each
                array = each.jax()
                if not torch_gradients.has_gradient(array):
                    return each
                constant = tensor.Tensor(jax.lax.stop_gradient(array), self)
                shared_views.share(constant, each, jax.lax.stop_gradient, certain=True)
                if torch_gradients.is_constant(each):
                    torch_gradients.mark_constant(constant)
                known: Any = getattr(each, "_beforehand", None)
                return note(constant, tensor.Tensor(known[1], self)) if known is not None else constant

            return _pytree.tree_map(stopped, result)

        def _view(self, func: Any, types: Any, args: Any, kwargs: Any, parent: Any, k: int, array: Any) -> Any:
            """Return result `k` of an operation, as an array, with `array` in place of the tensor `parent`."""
            standing = tensor.Tensor(array, self)
            given = _pytree.tree_map(lambda each: standing if each is parent else each, (args, kwargs))
            with torch.enable_grad():
                return _pytree.tree_leaves(super().dispatch(func, types, *given))[k].jax()

        def _folded(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            """Run one torch operation, at trace time if folding is on and its operands are known.

            Large results are traced too, with their values attached. A comparison that looks for padding media gives
            False.
            """
            if any(isinstance(each, MaskedRows) for each in args):
                return by_row(func, args, kwargs or {})
            with op_scope():
                given = args, kwargs or {}
                if _folding.get() and masked_reads.asks_for_padding(func, args):
                    with jax.ensure_compile_time_eval():
                        return tensor.Tensor(jnp.zeros(tuple(args[0].shape), bool), self)
                known = _pytree.tree_map_only((tensor.Tensor, View), computed, given) if _folding.get() else given
                if not _folding.get() or not folds(known):
                    return super().dispatch(func, types, args, kwargs)
                in_place = str(getattr(func, "__name__", func)).partition(".")[0].endswith("_")
                if in_place and not folds(given):
                    return super().dispatch(func, types, args, kwargs)
                with jax.ensure_compile_time_eval():
                    result = super().dispatch(func, types, *known)
                if not large(result) or in_place:
                    return result
                return note(super().dispatch(func, types, args, kwargs), result)

        def _get_op_or_decomp(self, func: Any) -> Any:
            """Return torchax's operator; a write in place without one is built from its out-of-place form.

            Raises torchax's `OperatorNotFound` if there is neither.
            """
            name = getattr(getattr(func, "_schema", None), "name", "").removeprefix("aten::")
            writes = name.endswith("_") and not name.startswith("_")
            plain = getattr(torch.ops.aten, name[:-1], None) if writes else None
            try:
                operator: Any = super()._get_op_or_decomp(func)
            except tensor.OperatorNotFound:
                if plain is None:
                    raise
                return indexed_writes.in_place(func, plain)
            if plain is not None and name in indexed_writes.RESHAPED:
                return indexed_writes.reshaping(func, plain)
            # torch's own decompositions receive copies of views, so that their writes would be lost.
            return indexed_writes.in_place(func, plain) if plain is not None and not operator.is_view_op else operator

        def _should_use_torchax_tensor(self, device: Any) -> bool:
            """Return True if new tensors of a device are torchax's; no device counts as theirs."""
            return True if device is None else bool(super()._should_use_torchax_tensor(device))

        def t2j_iso(self, torchtensors: Any) -> Any:
            """Convert the torch tensors in a pytree to JAX arrays; plain CPU tensors become constants.

            Raises `WideNumberError` for a 64-bit float tensor with dims during a trace in 32 bits.
            """

            def wrapped(value: Any) -> Any:
                """Return a plain CPU tensor as a constant torchax tensor, with its bound; other tensors unchanged."""
                if isinstance(value, View) and value.numel() == 1:
                    return value.torch()  # torchax would read the value
                if isinstance(value, (tensor.Tensor, View)) or value.device.type != "cpu":
                    return value
                wide_integers.refuse_float64(value)
                with jax.ensure_compile_time_eval() if _folding.get() else contextlib.nullcontext():
                    made = tensor.Tensor(jnp.asarray(value.detach().numpy()), self)
                if (bound := wide_integers.bound_of_values(value)) is not None:
                    wide_integers.set_bound(made, bound)
                return made

            return super().t2j_iso(_pytree.tree_map_only(torch.Tensor, wrapped, torchtensors))

    def elements_of_view(self: Any) -> Any:
        """Return the array of a view."""
        return self.jax()

    def put(tensor_or_view: Any, key: Any, value: Any) -> Any:
        """Return the array of a tensor or view after `value` is written at `key`; the tensor itself is unchanged.

        The value may be rows under a traced mask.

        Raises torch's own error if torch refuses the write.
        """
        if isinstance(value, MaskedRows):
            under = key[0] if isinstance(key, tuple) else key
            mask, values = tensor_or_view._env.t2j_iso((under, value.under(under)))
            wide = mask.reshape(*mask.shape, *([1] * (values.ndim - mask.ndim)))
            return jnp.where(wide, values.astype(tensor_or_view.jax().dtype), tensor_or_view.jax())
        for func, given in ((torch.Tensor.__setitem__, (key, value)), (torch.Tensor.__getitem__, (key,))):
            torch_refusals.torch_results(func, (tensor_or_view, *given), {})
        given, env = (key, value), tensor_or_view._env
        with (
            jax.ensure_compile_time_eval()
            if _folding.get() and folds((tensor_or_view, *given))
            else contextlib.nullcontext()
        ):
            return indexed_writes.put(tensor_or_view.jax(), *env.t2j_iso(given))

    def known_after(tensor_or_view: Any, key: Any, value: Any) -> Any:
        """Return the trace-time elements of a tensor, or of a view's root, after a write; None if some are unknown."""
        if not _folding.get() or not folds(_pytree.tree_map_only((tensor.Tensor, View), computed, (key, value))):
            return None
        copy = computed(tensor_or_view)
        if root_of(copy) is root_of(tensor_or_view) or not folds(copy):
            return None
        with jax.ensure_compile_time_eval():
            given = _pytree.tree_map_only((tensor.Tensor, View), computed, (key, value))
            written = indexed_writes.put(copy.jax(), *copy._env.t2j_iso(given))
            if isinstance(copy, View):
                copy.update(written)
                return root_of(copy)._elem
            return written

    def set_elements(self: Any, key: Any, value: Any) -> None:
        """Write `value` at `key` of a tensor, and to its values of trace time."""
        known = known_after(self, key, value)
        self._elem = put(self, key, value)
        if known is not None:
            setattr(self, "_beforehand", (self._elem, known))  # noqa: B010  # no field of its class

    def set_elements_of_view(self: Any, key: Any, value: Any) -> None:
        """Write `value` at `key` of a view, and to the root's values of trace time."""
        known, root = known_after(self, key, value), root_of(self)
        self.update(put(self, key, value))
        if known is not None:
            setattr(root, "_beforehand", (root._elem, known))  # noqa: B010  # no field of its class

    def detached(self: Any) -> Any:
        """Return a tensor that shares the elements of `self`, without a gradient."""
        made = tensor.Tensor(jax.lax.stop_gradient(self.jax()), self._env)
        shared_views.share(made, self, jax.lax.stop_gradient, certain=True)
        return made

    def held_elsewhere(self: Any, other: Any) -> None:
        """Set the elements to those of `other`, as an assignment to `data`."""
        self._elem = other.jax()

    def tolist(self: Any) -> Any:
        """Return the elements of a view as nested lists, which requires known values."""
        with jax.ensure_compile_time_eval():
            return self.torch().tolist()

    def flatten(self: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Return the tensor with the dims from `start_dim` to `end_dim` merged; a number becomes [1]."""
        shape = tuple(self.shape) or (1,)
        first, last = start_dim % len(shape), end_dim % len(shape)
        return self.reshape(*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])

    def type_as(self: Any, other: Any) -> Any:
        """Return the tensor in the dtype of `other`."""
        return self.to(other.dtype)

    # `torch.random.fork_rng` of torch 2.13 calls this function of the device that torchax registers, with an index.
    device: Any = device_module
    device.get_rng_state = lambda device=0: []
    tensors: Any = tensor.Tensor
    tensors._elem = property(shared_views.elements, shared_views.write)
    tensors.shape = property(lambda self: torch.Size(self.__dict__["_held"].shape))  # writes change no shape
    tensors.detach = detached
    tensors.data = property(detached, held_elsewhere)
    tensors.__setitem__ = set_elements  # torchax's own method reads the values of a mask
    views: Any = View
    views.__setitem__ = set_elements_of_view  # torchax's own method rejects tensors as indices
    views._elem = property(elements_of_view, lambda self, value: self.update(value))  # some ops expect it
    View.tolist = tolist  # torchax's views have no `tolist`
    setattr(tensor.Tensor, "flatten", flatten)  # noqa: B010  # torchax's own is not dispatched
    tensor.Tensor.type_as = type_as  # torchax's own changes `self`, and fails for views
    return Environment
