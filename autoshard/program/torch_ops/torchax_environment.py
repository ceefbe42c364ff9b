"""torchax's environment: where torch tensors and JAX arrays become one another."""

import contextlib
import contextvars
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autoshard.program.torch_ops import indexed_writes, masked_reads, torch_gradients, torch_layouts, wide_integers
from autoshard.program.torch_ops import views as shared_views
from autoshard.program.torch_ops.masked_reads import MaskedRows, by_row
from autoshard.program.torch_ops.module_segments import op_scope
from autoshard.program.torch_ops.torch_imports import importing_torchax
from autoshard.program.torch_ops.views import root_of


_FOLDED_ELEMENTS = 1 << 20
"""Largest result that is computed beforehand and becomes a constant of the program."""

_KNOWN_ELEMENTS = 1 << 24
"""Largest result whose values are known beforehand, though the program computes it."""

_folding: contextvars.ContextVar[bool] = contextvars.ContextVar("folding", default=False)


@contextlib.contextmanager
def folding(on: bool) -> Iterator[None]:
    """While inside and `on`, what follows from sizes alone is computed at once, so that code may ask for its values."""
    token = _folding.set(on)
    try:
        yield
    finally:
        _folding.reset(token)


_Tensors = Mapping[int, Callable[[], None]]
_elsewhere: contextvars.ContextVar[_Tensors | None] = contextvars.ContextVar("elsewhere", default=None)


@contextlib.contextmanager
def used_elsewhere(tensors: _Tensors) -> Iterator[None]:
    """While inside, what is computed of one of these tensors, by their `id`, calls what stands there.

    They are a module's own, in whose place the program has arguments: computed with, they would be constants of it.
    """
    token = _elsewhere.set(tensors)
    try:
        yield
    finally:
        _elsewhere.reset(token)


@functools.cache
def environment() -> Any:
    """The one `torchax.tensor.Environment` of this process, of a class that takes ordinary CPU tensors.

    It has torchax's own lowerings until `lowered_environment` puts ours in.
    """
    root, level = logging.getLogger(), logging.getLogger().level
    root.setLevel(logging.ERROR)  # importing torchax logs about absent optional packages
    try:
        with importing_torchax():
            return _environment_type()()
    finally:
        root.setLevel(level)


def _environment_type() -> type:
    """torchax's environment, made to take ordinary CPU tensors that a module creates or holds as constants."""
    import jax
    import jax.numpy as jnp
    import torch
    from jax import core
    from torch.utils import _pytree
    from torchax import device_module, tensor
    from torchax.view import View

    def folds(given: Any) -> bool:
        tensors = [each for each in _pytree.tree_leaves(given) if isinstance(each, (tensor.Tensor, View))]
        return not any(isinstance(root_of(each)._elem, core.Tracer) for each in tensors)

    def computed(value: Any) -> Any:
        """The same tensor with the values that were computed beforehand, where the program does not hold them."""
        if isinstance(value, View):
            parent = computed(value.parent)
            with jax.ensure_compile_time_eval():  # it computes its shape by being made
                return value if parent is value.parent else View(parent, value.view_info, value._env)
        held: Any = getattr(value, "_beforehand", None)
        return tensor.Tensor(held[1], value._env) if held is not None and held[0] is value._elem else value

    def large(result: Any) -> bool:
        leaves = [leaf for leaf in _pytree.tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        return any(leaf.numel() > _FOLDED_ELEMENTS for leaf in leaves)

    def note(traced: Any, result: Any) -> Any:
        """Results as the program computes them, knowing their values; views know them from what they look at."""
        for each, known in zip(_pytree.tree_leaves(traced), _pytree.tree_leaves(result), strict=True):
            if isinstance(known, tensor.Tensor) and each.numel() <= _KNOWN_ELEMENTS:
                setattr(each, "_beforehand", (each._elem, known._elem))  # noqa: B010  # no field of its class
        return traced

    copying = {torch.Tensor.to, torch.ops.aten._to_copy, torch.ops.aten._to_copy.default}

    class Environment(tensor.Environment):
        def _to_copy(self, the_tensor: Any, new_dtype: Any, new_device: Any) -> Any:
            given: Any = the_tensor.torch() if isinstance(the_tensor, View) else the_tensor
            traced = isinstance(given, tensor.Tensor) and isinstance(given._elem, core.Tracer)
            return super()._to_copy(given, new_dtype, None if traced else new_device)  # there is no host to bring it to

        def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            try:
                with (
                    wide_integers.bounded(func, (args, kwargs)) as whole,
                    torch_gradients.counted_gradients((args, kwargs)) as results,
                ):
                    result = self._copied(func, args, kwargs or {}, self._folded(func, types, args, kwargs))
                    whole.append(result)
                    results.append(result)
                self._share(func, types, args, kwargs or {}, result)
                if not torch_gradients.follows():
                    result = self._stopped(args, kwargs, result)
                if own := _elsewhere.get():
                    taken = [own[id(each)] for each in _pytree.tree_leaves((args, kwargs)) if id(each) in own]
                    if taken and any(isinstance(each, torch.Tensor) for each in _pytree.tree_leaves(result)):
                        for note in taken:
                            note()
                return result
            except TypeError as error:  # of which Python's operators make "unsupported operand" without its reason
                if "incompatible shapes" not in str(error):
                    raise
                raise ValueError(str(error)) from error

        def _copied(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
            """A copy of what was given, where torch makes one and torchax gives it back."""
            if func not in copying or result is not args[0] or not isinstance(result, tensor.Tensor):
                return result
            told = torch_layouts.as_torch(func, args, kwargs, result)
            return tensor.Tensor(result.jax(), self) if told and told[0][0] is False else result

        def _share(self, func: Any, types: Any, args: Any, kwargs: Any, result: Any) -> None:
            """Note which results share elements of which tensor, and which do not lie in order."""
            leaves = _pytree.tree_leaves((args, kwargs))
            given = [each for each in leaves if isinstance(each, (tensor.Tensor, View))]
            made = _pytree.tree_leaves(result)
            new = {k: each for k, each in enumerate(made) if isinstance(each, tensor.Tensor)}
            new = {k: each for k, each in new.items() if not any(each is other for other in given)}
            parent = torch_layouts.viewed(func, args, kwargs)
            views = isinstance(parent, (tensor.Tensor, View))
            if not new or not given or not (views or torch_layouts.is_told(given)):
                return
            told = torch_layouts.as_torch(func, args, kwargs, parent)
            if told is not None and len(told) != len(made):
                told = None
            for k, each in new.items():
                is_view, layout = told[k] if told else (None, None)
                torch_layouts.note(each, layout)
                if views and is_view is not False:
                    make = functools.partial(self._view, func, types, args, kwargs, parent, k)
                    shared_views.share(each, parent, make, is_view or not torch_layouts.depends(func))

        def _stopped(self, args: Any, kwargs: Any, result: Any) -> Any:
            """Results through which JAX follows no gradients; what was only written to is what it was."""
            given = {id(each) for each in _pytree.tree_leaves((args, kwargs))}

            def stopped(each: Any) -> Any:
                if id(each) in given or not isinstance(each, (tensor.Tensor, View)):
                    return each
                array = each.jax()
                if not torch_gradients.has_gradient(array):
                    return each
                made = tensor.Tensor(jax.lax.stop_gradient(array), self)
                shared_views.share(made, each, jax.lax.stop_gradient, certain=True)
                known: Any = getattr(each, "_beforehand", None)
                return note(made, tensor.Tensor(known[1], self)) if known is not None else made

            return _pytree.tree_map(stopped, result)

        def _view(self, func: Any, types: Any, args: Any, kwargs: Any, parent: Any, k: int, array: Any) -> Any:
            """What a view of another array is: result `k` of an operation, with the array in the place of `parent`."""
            standing = tensor.Tensor(array, self)
            given = _pytree.tree_map(lambda each: standing if each is parent else each, (args, kwargs))
            with torch.enable_grad():
                return _pytree.tree_leaves(super().dispatch(func, types, *given))[k].jax()

        def _folded(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
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
            name = getattr(getattr(func, "_schema", None), "name", "").removeprefix("aten::")
            writes = name.endswith("_") and not name.startswith("_")
            plain = getattr(torch.ops.aten, name[:-1], None) if writes else None
            try:
                found: Any = super()._get_op_or_decomp(func)
            except tensor.OperatorNotFound:
                if plain is None:
                    raise
                return indexed_writes.in_place(func, plain)
            if plain is not None and name in indexed_writes.RESHAPED:
                return indexed_writes.reshaping(func, plain)
            # torch's own decompositions are given copies of views, to which what they write is lost.
            return indexed_writes.in_place(func, plain) if plain is not None and not found.is_view_op else found

        def _should_use_torchax_tensor(self, device: Any) -> bool:
            return True if device is None else bool(super()._should_use_torchax_tensor(device))

        def t2j_iso(self, torchtensors: Any) -> Any:
            def wrapped(value: Any) -> Any:
                if isinstance(value, View) and value.numel() == 1:
                    return value.torch()  # torchax would ask for its value
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
        return self.jax()

    def put(tensor_or_view: Any, key: Any, value: Any) -> Any:
        if isinstance(value, MaskedRows):
            under = key[0] if isinstance(key, tuple) else key
            mask, values = tensor_or_view._env.t2j_iso((under, value.under(under)))
            wide = mask.reshape(*mask.shape, *([1] * (values.ndim - mask.ndim)))
            return jnp.where(wide, values.astype(tensor_or_view.jax().dtype), tensor_or_view.jax())
        given, env = (key, value), tensor_or_view._env
        with (
            jax.ensure_compile_time_eval()
            if _folding.get() and folds((tensor_or_view, *given))
            else contextlib.nullcontext()
        ):
            return indexed_writes.put(tensor_or_view.jax(), *env.t2j_iso(given))

    def known_after(tensor_or_view: Any, key: Any, value: Any) -> Any:
        """The elements of what is written into, where they and what is written are known beforehand; else None."""
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
        known = known_after(self, key, value)
        self._elem = put(self, key, value)
        if known is not None:
            setattr(self, "_beforehand", (self._elem, known))  # noqa: B010  # no field of its class

    def set_elements_of_view(self: Any, key: Any, value: Any) -> None:
        known, root = known_after(self, key, value), root_of(self)
        self.update(put(self, key, value))
        if known is not None:
            setattr(root, "_beforehand", (root._elem, known))  # noqa: B010  # no field of its class

    def detached(self: Any) -> Any:
        made = tensor.Tensor(jax.lax.stop_gradient(self.jax()), self._env)
        shared_views.share(made, self, jax.lax.stop_gradient, certain=True)
        return made

    def held_elsewhere(self: Any, other: Any) -> None:
        self._elem = other.jax()

    def tolist(self: Any) -> Any:
        with jax.ensure_compile_time_eval():
            return self.torch().tolist()

    def flatten(self: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
        shape = tuple(self.shape) or (1,)
        first, last = start_dim % len(shape), end_dim % len(shape)
        return self.reshape(*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])

    def type_as(self: Any, other: Any) -> Any:
        return self.to(other.dtype)

    # `torch.random.fork_rng` of torch 2.13 asks the device that torchax registers, and names it.
    replaced: Any = device_module
    replaced.get_rng_state = lambda device=0: []
    replaced = tensor.Tensor
    replaced._elem = property(shared_views.elements, shared_views.write)
    replaced.shape = property(lambda self: torch.Size(self.__dict__["_held"].shape))  # no reason to take writes in
    replaced.detach = detached
    replaced.data = property(detached, held_elsewhere)
    replaced.__setitem__ = set_elements  # torchax's own asks for the values of a mask
    replaced = View
    replaced.__setitem__ = set_elements_of_view  # and takes no tensors as indices of a view
    replaced._elem = property(elements_of_view, lambda self, value: self.update(value))  # which some operations expect
    View.tolist = tolist  # a view of torchax's has none
    setattr(tensor.Tensor, "flatten", flatten)  # noqa: B010  # torchax's own is no operation that is seen here
    tensor.Tensor.type_as = type_as  # torchax's own changes the tensor that it is asked of, and knows no views
    return Environment
