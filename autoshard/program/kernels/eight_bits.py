"""Matmuls of 8 bits in training: operands are rounded with a scale for each row, in the forward and backward pass."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from autoshard.errors import UserError


FORMS = {"int8": ("int8", "int8"), "fp8": ("float8_e4m3fn", "float8_e5m2")}
"""Name of a form -> dtypes of the operands and of the gradients of results.

Gradients of 8-bit floats have more range and fewer digits (Micikevicius et al. 2022, section 3).
"""


@dataclasses.dataclass(frozen=True, slots=True)
class EightBits:
    """The form of matmuls of 8 bits."""

    form: str
    """The name of the dtype of 8 bits: a key of `FORMS`."""
    parts: int = 1
    """Parts of the first dim, each with scales of its own in the gradients of weights.

    Slices of a machine with a part each exchange no maxima (AQT calls that local).
    """


def parse_eight_bits(text: str | None) -> EightBits | None:
    """Return the form that `text` names; None for None and `none`. Raises `UserError` for another text."""
    if text is None or text == "none":
        return None
    if text not in FORMS:
        raise UserError(f"--quantize `{text}` is not known; use {', '.join(FORMS)} or none.")
    return EightBits(text)


@dataclasses.dataclass(slots=True)
class Rounding:
    """The form of the matmuls that are traced, with the operand that was rounded last."""

    how: EightBits
    operand: Any = None
    trace: Any = None
    """Trace in which the operand was rounded; its values cannot be used in others."""
    rounded: Any = None


_rounding: contextvars.ContextVar[Rounding | None] = contextvars.ContextVar("8-bit matmuls", default=None)


@contextlib.contextmanager
def in_eight_bits(how: EightBits | Rounding | None) -> Iterator[None]:
    """Compute the matmuls of `dot` in a form while inside; None leaves the surrounding one in effect.

    Several contexts with one `Rounding` share the operand that was rounded last.
    """
    if how is None:
        yield
        return
    token = _rounding.set(how if isinstance(how, Rounding) else Rounding(how))
    try:
        yield
    finally:
        _rounding.reset(token)


def rounds() -> bool:
    """Return True inside of `in_eight_bits`."""
    return _rounding.get() is not None


def dot(x: Any, weight: Any, inner: tuple[int, ...]) -> Any:
    """Return `x` times `weight`, summed over the last dims of `x` and the dims `inner` of the weight, in order.

    The result has the other dims of `x`, then those of the weight. Inside of `in_eight_bits` operands have 8 bits, and
    results the dtype of `x`.
    """
    import jax
    from jax.extend.core import get_opaque_trace_state

    outer = x.ndim - len(inner)
    state = _rounding.get()
    if state is None:
        return jax.lax.dot_general(x, weight, ((tuple(range(outer, x.ndim)), inner), ((), ())))
    # Several layers may share one input, which is rounded and saved once.
    trace = get_opaque_trace_state(convention="flax")
    dtype = FORMS[state.how.form][0]
    if state.operand is not x or state.trace != trace:
        state.operand, state.trace = x, trace
        state.rounded = _rounded(x, tuple(range(outer, x.ndim)), dtype)
    return _product(inner, state.how)(x, weight, *state.rounded, *_rounded(weight, inner, dtype))


def _rounded(x: Any, along: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
    """Return `x` rounded to 8 bits, and fp32 scales from its maxima over the dims `along`, which have size 1."""
    import jax
    import jax.numpy as jnp

    x = jax.lax.stop_gradient(x)
    whole = jnp.issubdtype(dtype, jnp.integer)
    limits = jnp.iinfo(dtype) if whole else jnp.finfo(dtype)
    # The largest whole number stands for all that round to it.
    largest = float(limits.max) + 0.5 * whole
    highest = jnp.max(jnp.abs(x), axis=along, keepdims=True).astype(jnp.float32)
    # A row of zeros may have any scale.
    highest = jnp.where(highest > 0, highest, 1.0)
    # bfloat16 has the range of fp32, and more digits than floats of 8 bits.
    wide = x.dtype if x.dtype == jnp.bfloat16 and not whole else jnp.float32
    shares = x.astype(wide) * (largest / highest).astype(wide)
    # Conversions of floats beyond the range give NaN. The largest of a row is on the limit, where a last digit decides.
    shares = jnp.clip(jnp.round(shares) if whole else shares, -float(limits.max), float(limits.max))
    return shares.astype(dtype), highest / largest


@functools.cache
def _product(inner: tuple[int, ...], how: EightBits) -> Callable[..., Any]:
    """Return the product of rounded operands, as a function of both operands and their rounded forms.

    Its backward pass has two more products of 8 bits. The scales of the saved operand are multiplied into the gradient,
    which then is rounded along the dims that the product sums over.
    """
    import jax
    import jax.numpy as jnp

    narrow, parts = FORMS[how.form][1], how.parts

    def multiply(x: Any, y: Any, dims: tuple[tuple[int, ...], tuple[int, ...]], dtype: Any) -> Any:
        """Return the sums of products over `dims` as fp32."""
        # Devices exchange partial sums in this dtype; int32 would be twice the bytes. Sums overflow float16.
        wide = jnp.float32 if dtype == jnp.float16 else dtype
        return jax.lax.dot_general(x, y, (dims, ((), ())), preferred_element_type=wide).astype(jnp.float32)

    def of_weights(gradient: Any, codes: Any, outer: int, dtype: Any) -> Any:
        """Return the gradient of a weight of `dtype`, from that of the result and from the rounded operand."""
        rows = tuple(range(outer))
        part, factor = _rounded(gradient, rows, narrow)
        if inner[0]:
            sums, ones = multiply(part, codes, (rows, rows), dtype), (*factor.shape[outer:], *[1] * len(inner))
        else:
            sums, ones = multiply(codes, part, (rows, rows), dtype), (*[1] * len(inner), *factor.shape[outer:])
        return (sums * factor.reshape(ones)).astype(dtype)

    def forward(x: Any, weight: Any, codes: Any, scale: Any, weights: Any, scales: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the product in the dtype of `x`; the rounded operands are saved."""
        outer = x.ndim - len(inner)
        sums = multiply(codes, weights, (tuple(range(outer, x.ndim)), inner), x.dtype)
        own = scale.reshape(*scale.shape[:outer], *[1] * (sums.ndim - outer))
        result = sums * own * jnp.squeeze(scales, inner)
        empty = tuple(jnp.zeros((), each.dtype) for each in (x, weight))
        return result.astype(x.dtype), (codes, scale, weights, scales, *empty)

    def backward(saved: tuple[Any, ...], gradient: Any) -> tuple[Any, ...]:
        """Return the gradients of both operands; their rounded forms have none."""
        codes, scale, weights, scales, x, weight = saved
        outer = codes.ndim - len(inner)
        columns = tuple(range(outer, gradient.ndim))
        free = tuple(dim for dim in range(weights.ndim) if dim not in inner)
        wide = gradient.astype(jnp.float32)

        part, factor = _rounded(wide * jnp.squeeze(scales, inner), columns, narrow)
        sums = multiply(part, weights, (columns, free), x.dtype)
        onward = (sums * factor.reshape(*factor.shape[:outer], *[1] * len(inner))).astype(x.dtype)

        own = scale.reshape(*scale.shape[:outer], *[1] * len(columns))
        if parts == 1:
            mine = of_weights(wide * own, codes, outer, weight.dtype)
        else:
            split = (each.reshape(parts, -1, *each.shape[1:]) for each in (wide * own, codes))
            each = jax.vmap(lambda part, own: of_weights(part, own, outer, weight.dtype))(*split)
            mine = jax.lax.reduce(each, jnp.zeros((), each.dtype), jax.lax.add, (0,))
        return onward, mine, None, None, None, None

    product = jax.custom_vjp(lambda *given: forward(*given)[0])
    product.defvjp(forward, backward)
    return product
