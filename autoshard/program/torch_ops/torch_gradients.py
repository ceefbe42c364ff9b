"""Gradients that torch defines differently from JAX's derivative of the traced ops.

These are gradients under `no_grad`, and of functions with their own `backward`. torchax ignores both, since JAX
differentiates what it computes.
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
    """Raised when code asks torch for gradients, which torch does not track through operations that JAX computes."""


def follows() -> bool:
    """Return True if torch tracks gradients at present."""
    import torch

    return torch.is_grad_enabled()


def has_gradient(array: Any) -> bool:
    """Return True if JAX may differentiate through an array: a tracer of floats or complex numbers."""
    import jax.numpy as jnp
    from jax import core

    return isinstance(array, core.Tracer) and bool(jnp.issubdtype(array.dtype, jnp.inexact))


@contextlib.contextmanager
def sparing(constants: Any) -> Iterator[None]:
    """Count no backward FLOPs, while inside, for the tensors in `constants` and values computed only from them.

    `constants` is a pytree of torchax tensors, which are marked. With None every tensor is assumed to need a gradient,
    and nothing is tracked.
    """
    mark_constant(constants)
    token = _sparing.set(constants is not None)
    try:
        yield
    finally:
        _sparing.reset(token)


def mark_constant(tensors: Any) -> None:
    """Mark the torchax tensors in a pytree as needing no gradient."""
    for each in _leaves(tensors):
        each.__dict__["_constant"] = True


def is_constant(tensors: Any) -> bool:
    """Return True if all torch tensors in a pytree are marked as needing no gradient, also if there are none."""
    return all(each.__dict__.get("_constant", False) for each in _leaves(tensors))


def _leaves(tensors: Any) -> list[Any]:
    """Return the torch tensors in a pytree."""
    import torch
    from torch.utils import _pytree

    return [each for each in _pytree.tree_leaves(tensors) if isinstance(each, torch.Tensor)]


@contextlib.contextmanager
def counted_gradients(given: Any) -> Iterator[list[Any]]:
    """Count the FLOPs that the gradient of an operation on `given`, which runs inside, is spared.

    The caller appends the operation's results to the yielded list. They are marked as constant if all operands are.
    Outside of `sparing`, or with None there, nothing is counted or marked.
    """
    results: list[Any] = []
    if not _sparing.get():
        yield results
        return
    constant = is_constant(given)
    operands = [each for each in _leaves(given) if each.ndim > 1 and each.is_floating_point()]
    # A matmul with one constant operand needs only one of its two backward matmuls.
    pair = sum(map(is_constant, operands)) if len(operands) == 2 else 0
    with model_flops.spared(2 if constant else pair):
        yield results
    for each in _leaves(results):
        each.__dict__["_constant"] = constant


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raise `TorchGradientError`, while inside, where code asks torch for gradients.

    torch tracks a torchax tensor through some operations only, so gradients would lack parts. Transforms of
    `torch.func` wrap tensors, so an operation that loses the wrapper raises its own error there.
    """
    import torch
    from torch.autograd import functional

    def refuse(owner: Any, name: str) -> None:
        """Replace `owner.name` by a function that raises outside of transforms of `torch.func`, until the exit."""
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
    """Return True if `frame` or one of its callers is in the module of torch's transforms (`grad`, `vjp`, ...)."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._functorch.eager_transforms":
            return True
        frame = frame.f_back
    return False


_applied: list[list[str]] = []
"""The list of each `applied_functions` that is entered."""


@contextlib.contextmanager
def applied_functions() -> Iterator[list[str]]:
    """Yield a list that gets the name of each `torch.autograd.Function` that traces apply while inside."""
    _applied.append([])
    try:
        yield _applied[-1]
    finally:
        _applied.pop()


@contextlib.contextmanager
def own_gradients(env: Any) -> Iterator[None]:
    """Differentiate each `torch.autograd.Function` by its own `backward` while inside, in torchax's `env`.

    Functions of torch's own checkpoint are left out: they run without recomputation. An `apply` that code bound before,
    as in `clamp = Clamp.apply`, is torch's own, which calls that of the class above `Function`.

    Raises `TorchGradientError` where code asks torch for other gradients.
    """
    from torch.autograd.function import Function, _SingleLevelFunction
    from torch.utils.checkpoint import CheckpointFunction

    before = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a function with its own `backward`; torch's checkpoint runs the function that it was given."""
        if cls is CheckpointFunction:  # recomputation leaves gradients unchanged
            run, _, *given = args
            return run(*given)
        if cls.__module__ == CheckpointFunction.__module__:  # bookkeeping of torch's checkpoint
            return before.__get__(None, cls)(*args, **kwargs)
        return _apply(env, cls, args, kwargs)

    def bound(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a function for torch's own `apply`, which has joined `kwargs` to `args` if there is a `setup_context`."""
        if cls.__module__ == CheckpointFunction.__module__ and cls is not CheckpointFunction:
            return super(_SingleLevelFunction, cls).apply(*args, **kwargs)
        separate = cls.setup_context is not _SingleLevelFunction.setup_context
        return apply(cls, *args, **({} if separate else kwargs))

    setattr(Function, "apply", classmethod(apply))  # noqa: B010  # torch declares another type
    setattr(_SingleLevelFunction, "apply", classmethod(bound))  # noqa: B010
    try:
        with _refusing():
            yield
    finally:
        setattr(Function, "apply", before)  # noqa: B010
        delattr(_SingleLevelFunction, "apply")  # noqa: B043


class _Context:
    """The `ctx` of a `torch.autograd.Function`, with the values that `forward` saves for `backward`.

    - `needed`: for each positional argument, True if it is a tensor that needs a gradient.
    """

    def __init__(self, needed: tuple[bool, ...]) -> None:
        """Store the flags, which `backward` reads as `needs_input_grad`; nothing is saved yet."""
        self.needs_input_grad = needed
        self.saved_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True
        self.undifferentiated: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Store tensors, which `backward` reads as `saved_tensors`; an earlier call's are replaced."""
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Ignore the tensors: they serve forward-mode derivatives, which are not used here."""

    def set_materialize_grads(self, value: bool) -> None:
        """Store the flag, which is not used: a missing gradient is always None."""
        self.materialize_grads = value

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Store tensors, through which no gradient passes."""
        self.undifferentiated = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        """Ignore the tensors: a write shows in their values."""


def _apply(env: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of an autograd function for torchax tensors, with its own `backward` as the derivative.

    If no positional argument needs a gradient, or under `no_grad`, `forward` alone runs. Gradients are cast to the
    dtypes of the inputs. Writes of `forward` reach the tensors that were given: an input that it returns has the
    function's derivative, and no gradient passes through another.

    - `function`: subclass of `torch.autograd.Function`.

    The derivative raises `UserError` if the `backward` asks torch for gradients.
    """
    import jax
    import torch
    from torch.utils import _pytree

    if _applied:
        _applied[-1].append(function.__name__)
    leaves, tree = _pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    arrays = env.t2j_iso([leaves[i] for i in places])
    needed = tuple(isinstance(each, torch.Tensor) and has_gradient(env.t2j_iso(each)) for each in args)
    record: dict[str, Any] = {}

    def forward(given: Sequence[Any]) -> tuple[_Context, list[Any]]:
        """Run the function's `forward`, and return its context and result tensors."""
        filled = list(leaves)
        for i, tensor in zip(places, env.j2t_iso(list(given)), strict=True):
            if is_constant(leaves[i]):
                mark_constant(tensor)
            filled[i] = tensor
        positional, named = _pytree.tree_unflatten(filled, tree)
        context = _Context(needed)
        # JAX traces a function in a loop's body again when it differentiates the loop.
        again = model_flops.counting() if "result" in record else contextlib.nullcontext()
        with torch.no_grad(), again:
            result = _run(function, context, positional, named)
        outputs, record["result"] = _pytree.tree_flatten(result)
        record["tensors"] = [i for i, each in enumerate(outputs) if isinstance(each, torch.Tensor)]
        record["others"] = [None if isinstance(each, torch.Tensor) else each for each in outputs]
        ends = [env.t2j_iso(outputs[i]) for i in record["tensors"]]
        numbers = {id(each): i for i, each in zip(record["tensors"], ends, strict=True)}
        stopped = {id(env.t2j_iso(each)) for each in context.__dict__.pop("undifferentiated")}
        record["stopped"] = [n for n, each in enumerate(ends) if id(each) in stopped]
        after = [env.t2j_iso(filled[i]) for i in places]
        written = [n for n, (old, new) in enumerate(zip(given, after, strict=True)) if new is not old]
        record["written"] = [(places[n], numbers.get(id(after[n]))) for n in written]
        record["stopped"] += range(len(ends), len(ends) + len(written))
        return context, ends + [after[n] for n in written]

    def plain(*given: Any) -> list[Any]:
        """Return the result tensors as JAX values."""
        return forward(given)[1]

    def ahead(*given: Any) -> tuple[list[Any], list[Any]]:
        """Return the results, and the tensors in the context as JAX values; `record` gets the rest of the context."""
        context, results = forward(given)
        values, record["context"] = _pytree.tree_flatten(context.__dict__)
        record["saved"] = [i for i, each in enumerate(values) if isinstance(each, torch.Tensor)]
        record["held"] = [None if isinstance(each, torch.Tensor) else each for each in values]
        return results, env.t2j_iso([values[i] for i in record["saved"]])

    def back(saved: list[Any], gradients: list[Any]) -> tuple[Any, ...]:
        """Run the function's `backward`, and return the gradients of the input tensors; None for one without."""
        values = list(record["held"])
        # JAX passes a loop's constants as numpy arrays, which torch would multiply in numpy.
        saved = [jax.numpy.asarray(each) for each in saved]
        with env, torch.no_grad(), _refusing():
            for i, tensor in zip(record["saved"], env.j2t_iso(saved), strict=True):
                values[i] = tensor
            context = _Context(needed)
            context.__dict__.update(_pytree.tree_unflatten(values, record["context"]))
            given: list[Any] = [None] * len(record["others"])
            for i, gradient in zip(record["tensors"], gradients, strict=False):
                given[i] = env.j2t_iso(gradient) if has_gradient(gradient) else None
            try:
                grads = function.backward(context, *given)
            except TorchGradientError:
                raise UserError(
                    f"`{function.__name__}.backward` asks torch for gradients (`torch.autograd.grad`), which "
                    "torch does not follow through lowered operations; write the derivative out."
                ) from None
            grads = grads if isinstance(grads, tuple) else (grads,)
            of = {id(each): gradient for each, gradient in zip(args, grads, strict=False) if gradient is not None}
            wanted = [of.get(id(leaves[i])) for i in places]
            return tuple(
                env.t2j_iso(gradient).astype(array.dtype) if gradient is not None and has_gradient(array) else None
                for gradient, array in zip(wanted, arrays, strict=True)
            )

    if any(needed) and follows():
        differentiated = jax.custom_vjp(plain)
        differentiated.defvjp(ahead, back)
        results = differentiated(*arrays)
    else:
        results = plain(*arrays)
    for n in record["stopped"]:
        results[n] = jax.lax.stop_gradient(results[n])
    outputs = list(record["others"])
    tensors = env.j2t_iso(results)
    for i, tensor in zip(record["tensors"], tensors, strict=False):
        outputs[i] = tensor
    for (place, returned), tensor in zip(record["written"], tensors[len(record["tensors"]) :], strict=True):
        leaves[place].copy_(tensor if returned is None else outputs[returned])
        if returned is not None:
            outputs[returned] = leaves[place]
    return _pytree.tree_unflatten(outputs, record["result"])


def _run(function: Any, context: _Context, args: Any, kwargs: Any) -> Any:
    """Return the result of `forward`, in either of the two forms that torch supports: with `context`, or with
    `setup_context`.
    """
    from torch.autograd.function import _SingleLevelFunction

    if function.setup_context is _SingleLevelFunction.setup_context:
        return function.forward(context, *args, **kwargs)
    result = function.forward(*args, **kwargs)
    function.setup_context(context, args, result)
    return result
