"""Gradients where torch's differ from those of what is computed: under `no_grad`, and of functions with their own.

torchax knows nothing of either: what it computes is differentiated by JAX.
"""

import contextlib
import contextvars
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from autoshard.errors import UserError
from autoshard.program import model_flops


_sparing: contextvars.ContextVar[bool] = contextvars.ContextVar("sparing", default=False)


class TorchGradientError(Exception):
    """Code asks torch for gradients, which torch does not follow through operations that JAX computes."""


def follows() -> bool:
    """Whether torch follows gradients through what is computed now."""
    import torch

    return torch.is_grad_enabled()


def has_gradient(array: Any) -> bool:
    """Whether JAX may follow gradients through an array."""
    import jax.numpy as jnp
    from jax import core

    return isinstance(array, core.Tracer) and bool(jnp.issubdtype(array.dtype, jnp.inexact))


@contextlib.contextmanager
def sparing(constants: Any) -> Iterator[None]:
    """While inside, count no backward FLOPs for the tensors in `constants` and for what is computed of such alone.

    None: every tensor is taken to need a gradient, and nothing is followed.
    """
    mark_constant(constants)
    token = _sparing.set(constants is not None)
    try:
        yield
    finally:
        _sparing.reset(token)


def mark_constant(tensors: Any) -> None:
    """Note that torchax tensors in a pytree need no gradient."""
    for each in _leaves(tensors):
        each.__dict__["_constant"] = True


def is_constant(tensors: Any) -> bool:
    """Return True if no torchax tensor in a pytree is known to need a gradient."""
    return all(each.__dict__.get("_constant", False) for each in _leaves(tensors))


def _leaves(tensors: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree

    return [each for each in _pytree.tree_leaves(tensors) if isinstance(each, torch.Tensor)]


@contextlib.contextmanager
def counted_gradients(given: Any) -> Iterator[list[Any]]:
    """Run an operation on `given`; results that are added to the yielded list need a gradient if an operand does."""
    results: list[Any] = []
    if not _sparing.get():
        yield results
        return
    constant = is_constant(given)
    operands = [each for each in _leaves(given) if each.ndim > 1 and each.is_floating_point()]
    pair = sum(map(is_constant, operands)) if len(operands) == 2 else 0
    with model_flops.spared(2 if constant else pair):
        yield results
    for each in _leaves(results):
        each.__dict__["_constant"] = constant


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """While inside, raise `TorchGradientError` where code asks torch for gradients.

    torch follows a torchax tensor through some operations and loses it in others: gradients would lack parts.
    Transforms of `torch.func` wrap tensors, so that operations that lose these raise an error of their own.
    """
    import torch
    from torch.autograd import functional

    def refuse(owner: Any, name: str) -> None:
        before = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not _in_transform(sys._getframe(1)):
                raise TorchGradientError
            return before(*args, **kwargs)

        setattr(owner, name, run)
        stack.callback(setattr, owner, name, before)

    with contextlib.ExitStack() as stack:
        refuse(torch.autograd, "_engine_run_backward")
        refuse(functional, "_grad_preprocess")
        yield


def _in_transform(frame: FrameType | None) -> bool:
    """Return True if a frame is called by a transform of `torch.func`."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._functorch.eager_transforms":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def own_gradients(env: Any) -> Iterator[None]:
    """While inside, a `torch.autograd.Function` is differentiated by its own `backward`, in torchax's `env`.

    Raises `TorchGradientError` where code asks torch for other gradients.
    """
    from torch.autograd.function import Function
    from torch.utils.checkpoint import CheckpointFunction

    before = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:  # what computes again what it is given has the same gradients
            run, _, *given = args
            return run(*given)
        if cls.__module__ == CheckpointFunction.__module__:  # what only tells torch of it
            return before.__get__(None, cls)(*args, **kwargs)
        return _apply(env, cls, args, kwargs)

    setattr(Function, "apply", classmethod(apply))  # noqa: B010  # torch declares another type
    try:
        with _refusing():
            yield
    finally:
        setattr(Function, "apply", before)  # noqa: B010


class _Context:
    """What a `torch.autograd.Function` is given as `ctx`; it holds what `forward` keeps for `backward`."""

    def __init__(self, needed: tuple[bool, ...]) -> None:
        self.needs_input_grad = needed
        self.saved_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """For derivatives forward, of which there are none here."""

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """`backward` gives no gradient of them anyway."""

    def mark_dirty(self, *tensors: Any) -> None:
        raise NotImplementedError("an autograd.Function that writes in place (`mark_dirty`)")


def _apply(env: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function computes of torchax tensors, differentiated by its own `backward`."""
    import jax
    import torch
    from torch.utils import _pytree

    leaves, tree = _pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    arrays = env.t2j_iso([leaves[i] for i in places])
    needed = tuple(isinstance(each, torch.Tensor) and has_gradient(env.t2j_iso(each)) for each in args)
    kept: dict[str, Any] = {}

    def forward(given: Sequence[Any]) -> tuple[_Context, list[Any]]:
        filled = list(leaves)
        for i, tensor in zip(places, env.j2t_iso(list(given)), strict=True):
            filled[i] = tensor
        positional, named = _pytree.tree_unflatten(filled, tree)
        context = _Context(needed)
        with torch.no_grad():
            result = _run(function, context, positional, named)
        found, kept["result"] = _pytree.tree_flatten(result)
        kept["tensors"] = [i for i, each in enumerate(found) if isinstance(each, torch.Tensor)]
        kept["others"] = [None if isinstance(each, torch.Tensor) else each for each in found]
        return context, env.t2j_iso([found[i] for i in kept["tensors"]])

    def plain(*given: Any) -> list[Any]:
        return forward(given)[1]

    def ahead(*given: Any) -> tuple[list[Any], list[Any]]:
        context, results = forward(given)
        held, kept["context"] = _pytree.tree_flatten(context.__dict__)
        kept["saved"] = [i for i, each in enumerate(held) if isinstance(each, torch.Tensor)]
        kept["held"] = [None if isinstance(each, torch.Tensor) else each for each in held]
        return results, env.t2j_iso([held[i] for i in kept["saved"]])

    def back(saved: list[Any], gradients: list[Any]) -> tuple[Any, ...]:
        held = list(kept["held"])
        # JAX hands over what is constant in a loop as an array of numpy, which torch would multiply in numpy.
        saved = [jax.numpy.asarray(each) for each in saved]
        with env, torch.no_grad(), _refusing():
            for i, tensor in zip(kept["saved"], env.j2t_iso(saved), strict=True):
                held[i] = tensor
            context = _Context(needed)
            context.__dict__.update(_pytree.tree_unflatten(held, kept["context"]))
            given: list[Any] = [None] * len(kept["others"])
            for i, gradient in zip(kept["tensors"], gradients, strict=True):
                given[i] = env.j2t_iso(gradient) if has_gradient(gradient) else None
            try:
                found = function.backward(context, *given)
            except TorchGradientError:
                raise UserError(
                    f"`{function.__name__}.backward` asks torch for gradients (`torch.autograd.grad`), which "
                    "torch does not follow through lowered operations; write the derivative out."
                ) from None
            found = found if isinstance(found, tuple) else (found,)
            of = {id(each): gradient for each, gradient in zip(args, found, strict=False) if gradient is not None}
            taken = [of.get(id(leaves[i])) for i in places]
            return tuple(
                env.t2j_iso(gradient).astype(array.dtype) if gradient is not None and has_gradient(array) else None
                for gradient, array in zip(taken, arrays, strict=True)
            )

    if any(needed) and follows():
        differentiated = jax.custom_vjp(plain)
        differentiated.defvjp(ahead, back)
        results = differentiated(*arrays)
    else:
        results = plain(*arrays)
    found = list(kept["others"])
    for i, tensor in zip(kept["tensors"], env.j2t_iso(results), strict=True):
        found[i] = tensor
    return _pytree.tree_unflatten(found, kept["result"])


def _run(function: Any, context: _Context, args: Any, kwargs: Any) -> Any:
    """`forward` in either of the two forms that torch knows."""
    from torch.autograd.function import _SingleLevelFunction

    if function.setup_context is _SingleLevelFunction.setup_context:
        return function.forward(context, *args, **kwargs)
    result = function.forward(*args, **kwargs)
    function.setup_context(context, args, result)
    return result
