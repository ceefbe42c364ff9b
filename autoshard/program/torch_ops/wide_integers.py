"""Detection of programs that need 64-bit numbers: a module is traced in 32 bits first, and in 64 if needed.

torch's whole numbers have 64 bits, JAX's 32 by default. Most are ids, positions and counts, which fit into 32 bits.
During a trace in 32 bits, every tensor of whole numbers has a bound for its values. Inputs are bounded by four times
the largest value of the examples, or by `ASSUMED` if these have no values. An op whose bound exceeds 31 bits, and one
in float64, raises `WideNumberError`. The module is then traced again in 64 bits, inside of a program with 32-bit
arguments.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autoshard.program.caller_frames import with_callers
from autoshard.program.torch_ops.views import root_of


ASSUMED = 1 << 16
"""Bound of whole numbers about which nothing else is known."""

LARGEST = (1 << 31) - 1
"""Largest magnitude of a whole number of 32 bits."""
_CAP = 1 << 80
"""Largest bound that is tracked; larger ones are clamped to it."""

_narrow: contextvars.ContextVar[bool] = contextvars.ContextVar("narrow", default=False)


class WideNumberError(Exception):
    """Raised when code computes a number that 32 bits cannot represent; the message names the op or dtype."""


@contextlib.contextmanager
def narrow() -> Iterator[None]:
    """Raise `WideNumberError`, while inside, for operations that need 64 bits."""
    token = _narrow.set(True)
    try:
        yield
    finally:
        _narrow.reset(token)


def in_64_bits(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a JAX function of positional arguments so that it is traced with 64-bit types enabled."""
    import jax

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        with jax.enable_x64(True):
            return fn(*args)

    return run


def wide_reason(values: Any) -> str:
    """Return a clause with the reason why a torch tensor or an array does not fit into 32 bits, such as `is float64`.

    Floats and complex numbers of a 64-bit dtype never fit, also without values. Whole numbers do not fit if their
    largest magnitude exceeds 31 bits, which the clause names. The clause is empty for all others, and for whole numbers
    without values.
    """
    dtype = str(values.dtype).removeprefix("torch.")
    if dtype in ("float64", "complex128"):
        return f"is {dtype}"
    if dtype != "int64" or getattr(getattr(values, "device", None), "type", "cpu") != "cpu":
        return ""
    largest = _largest(values)
    return f"holds {largest}" if largest > LARGEST else ""


def _largest(values: Any) -> int:
    """Return the largest magnitude of whole numbers or booleans on the CPU; 0 if there are none.

    torch lacks `abs` for some of their dtypes.
    """
    import numpy as np

    array = np.asarray(values)
    return max(map(abs, (int(array.max()), int(array.min())))) if array.size else 0


def bound_of_values(tensor: Any) -> int | None:
    """Return the largest magnitude in a torch tensor of whole numbers or booleans; None if it has no values.

    Floats and tensors outside of the CPU give None too.
    """
    if tensor.device.type != "cpu" or tensor.is_floating_point() or tensor.is_complex():
        return None
    return _largest(tensor.detach())


def set_bound(tensor: Any, bound: int) -> None:
    """Record the largest magnitude in a torchax tensor, for the whole root if it is a slice."""
    root_of(tensor).__dict__["_bound"] = bound


def refuse_float64(tensor: Any) -> None:
    """Raise `WideNumberError` for a tensor with dims of 64-bit floats or complex numbers during a trace in 32 bits."""
    import torch

    if _narrow.get() and tensor.dtype in (torch.float64, torch.complex128) and tensor.ndim:
        raise with_callers(WideNumberError(f"a tensor is {str(tensor.dtype).removeprefix('torch.')}"))


@contextlib.contextmanager
def bounded(func: Any, given: Any) -> Iterator[list[Any]]:
    """Check the bound of a torch operation on `given` that runs inside, and record it for its results.

    The caller appends the results to the yielded list. Outside of `narrow` nothing is checked.

    Raises `WideNumberError` if the operation needs 64 bits.
    """
    results: list[Any] = []
    if not _narrow.get():
        yield results
        return
    bound = _bound_of(func, given)
    yield results
    if bound is not None:
        import torch
        from torch.utils import _pytree

        for each in _pytree.tree_leaves(results):
            if isinstance(each, torch.Tensor) and not each.is_floating_point():
                set_bound(each, bound)


def _bound_of(func: Any, given: Any) -> int | None:
    """Return the bound of an operation's result; None if there are no tensors, and so no known whole numbers.

    Constructors such as `arange` and `full` have the largest of their numbers. Operations with floats give `ASSUMED`.
    Operations without a rule give the largest of the operands' bounds, numbers and counts of elements.

    Raises `WideNumberError` if the operation needs 64 bits: a dtype, a number or a bound of more than 32.
    """
    import numpy as np
    import torch
    from torch.utils import _pytree

    leaves = _pytree.tree_leaves(given)
    name = _name_of(func)
    for leaf in leaves:
        wide = leaf in (torch.float64, torch.complex128) if isinstance(leaf, torch.dtype) else False
        if wide or isinstance(leaf, np.ndarray) and leaf.dtype in (np.float64, np.complex128) and leaf.ndim:
            raise with_callers(WideNumberError("a tensor is asked for in float64"))
    if name in ("double", "cdouble"):
        raise with_callers(WideNumberError("a tensor is asked for in float64"))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    numbers = [leaf for leaf in leaves if type(leaf) is int]
    if any(each.is_floating_point() or each.is_complex() for each in tensors) or any(type(x) is float for x in leaves):
        return ASSUMED  # whole numbers that are computed from floats
    if not tensors:
        return max(map(abs, numbers), default=0) if name in ("arange", "full", "tensor", "range") else None
    bounds = [_bound(each) for each in tensors]
    rule = _RULES.get(name)
    if rule is None:
        if name not in _PLACES and any(abs(number) > LARGEST for number in numbers):
            raise with_callers(WideNumberError(f"`{name}` is given {max(numbers, key=abs)}"))
        return max(*bounds, *(min(abs(number), LARGEST) for number in numbers), *(each.numel() for each in tensors))
    bound = min(_CAP, rule(bounds, [abs(number) for number in numbers], tensors))
    if bound > LARGEST:
        raise with_callers(WideNumberError(f"whole numbers may pass 2^31 in `{name}`"))
    return bound


def _bound(tensor: Any) -> int:
    """Return the largest magnitude that a torchax tensor of whole numbers may have.

    It is that of its small dtype, or the recorded one, or that of a constant, or `ASSUMED`.
    """
    import numpy as np
    import torch
    from jax import core

    small = {torch.bool: 1, torch.uint8: 255, torch.int8: 128, torch.int16: 1 << 15}
    if tensor.dtype in small:
        return small[tensor.dtype]
    attributes = root_of(tensor).__dict__
    if "_bound" not in attributes:
        array = attributes.get("_held")
        known = array is not None and not isinstance(array, core.Tracer)
        attributes["_bound"] = int(abs(np.asarray(array).astype(np.int64)).max(initial=0)) if known else ASSUMED
    return attributes["_bound"]


def _name_of(func: Any) -> str:
    """Return the plain name of an operation: `mul` for `aten.mul.Tensor`, `mul_`, `__rmul__` and `__imul__`."""
    text = getattr(func, "__name__", str(func)).partition(".")[0]
    name = text.strip("_")
    return name[1:] if text.startswith("__") and name[:1] in ("r", "i") and name[1:] in _RULES else name


_Rule = Callable[[Sequence[int], Sequence[int], Sequence[Any]], int]
"""Function from bounds of tensors, magnitudes of plain numbers and the tensors to the result's bound."""


def _sum(bounds: Sequence[int], numbers: Sequence[int], tensors: Sequence[Any]) -> int:
    """Return the bound of a sum of all operands; a factor such as `alpha` counts as one more operand."""
    return sum(bounds) + sum(numbers)


def _product(bounds: Sequence[int], numbers: Sequence[int], tensors: Sequence[Any]) -> int:
    """Return the bound of a product of all operands."""
    return math.prod(bounds) * math.prod(numbers)


def _power(bounds: Sequence[int], numbers: Sequence[int], tensors: Sequence[Any]) -> int:
    """Return the bound of a power, at least 1; the first tensor counts as the base, also if it is the exponent."""
    base, exponent = (*bounds, *numbers)[:2]
    base, exponent = (base, exponent) if len(bounds) > 0 else (exponent, base)
    # An exponent of 80 already exceeds every bound that is tracked.
    return max(1, base) ** min(exponent, 80)


def _shifted(bounds: Sequence[int], numbers: Sequence[int], tensors: Sequence[Any]) -> int:
    """Return the bound of a left shift; the first tensor counts as the shifted operand, even if it is the distance."""
    first, by = (*bounds, *numbers)[:2]
    return first << min(by, 80)


def _times_elements(bounds: Sequence[int], numbers: Sequence[int], tensors: Sequence[Any]) -> int:
    """Return the bound of a sum over all elements of the first tensor."""
    return max(bounds) * max(1, tensors[0].numel())


def _times_longest(bounds: Sequence[int], numbers: Sequence[int], tensors: Sequence[Any]) -> int:
    """Return the bound of a sum along the longest dim of the first tensor."""
    return max(bounds) * max(tensors[0].shape, default=1)


def _contraction(bounds: Sequence[int], numbers: Sequence[int], tensors: Sequence[Any]) -> int:
    """Return the bound of products of operands summed over the longest dim."""
    return math.prod(bounds) * max(size for each in tensors for size in (*each.shape, 1))


def _to_power_of_elements(bounds: Sequence[int], numbers: Sequence[int], tensors: Sequence[Any]) -> int:
    """Return the bound of a product over all elements of the first tensor."""
    return max(1, *bounds) ** min(tensors[0].numel(), 80)


def _first(bounds: Sequence[int], numbers: Sequence[int], tensors: Sequence[Any]) -> int:
    """Return the bound of the first tensor, as of a quotient; plain numbers do not count."""
    return bounds[0]


def _last(bounds: Sequence[int], numbers: Sequence[int], tensors: Sequence[Any]) -> int:
    """Return the bound of the last operand, as of a remainder; plain numbers count after tensors."""
    return (*bounds, *numbers)[-1]


def _bits(bounds: Sequence[int], numbers: Sequence[int], tensors: Sequence[Any]) -> int:
    """Return the largest number with as many bits as the largest operand."""
    # Bitwise ops leave no bits above the highest bit of an operand.
    return (1 << max(*bounds, *numbers, 0).bit_length()) - 1


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("add", "sub", "rsub", "subtract"), _sum),
    **dict.fromkeys(("mul", "multiply", "square", "addcmul"), _product),
    **dict.fromkeys(("pow", "float_power"), _power),
    **dict.fromkeys(("lshift", "bitwise_left_shift"), _shifted),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "and", "or", "xor", "invert"), _bits),
    **dict.fromkeys(("sum", "nansum"), _times_elements),
    **dict.fromkeys(("cumsum",), _times_longest),
    **dict.fromkeys(("prod", "cumprod"), _to_power_of_elements),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "inner", "einsum", "tensordot", "outer"), _contraction),
    **dict.fromkeys(("remainder", "fmod", "mod"), _last),
    **dict.fromkeys(("floor_divide", "floordiv", "div", "divide", "true_divide", "truediv"), _first),
}
_RULES["square"] = lambda bounds, numbers, tensors: bounds[0] ** 2

_PLACES = {"slice", "narrow", "select", "getitem", "split", "chunk", "view", "reshape", "expand", "index_select", "to"}
"""Operations whose plain numbers are positions and sizes; a huge one may mean the end of a dim."""
