"""Detection of programs that need 64-bit numbers: a module is traced in 32 bits first, and in 64 if needed.

torch's whole numbers have 64 bits, JAX's 32 by default. Most are ids, positions and counts, which fit into 32 bits.
During a trace in 32 bits, every tensor of whole numbers has a bound for its values. Inputs are bounded by four times
the largest value of the examples, or by `ASSUMED` if these have no values. An op whose bound exceeds 31 bits, and one
in float64, raises `WideNumberError`. The module is then traced again in 64 bits, inside of a program with 32-bit
arguments.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autoshard.program.caller_frames import with_callers
from autoshard.program.torch_ops.views import root_of


ASSUMED = 1 << 16
"""Bound of whole numbers about which nothing else is known."""

LARGEST = (1 << 31) - 1
"""Largest magnitude of a whole number of 32 bits."""

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
    name, is_reversed = _name_of(func)
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
    args, kwargs = given
    factors = {key: abs(value) for key, value in (kwargs or {}).items() if key in _FACTORS and type(value) is int}
    others = {key: value for key, value in (kwargs or {}).items() if key not in _FACTORS}
    operands = [
        _bound(leaf) if isinstance(leaf, torch.Tensor) else abs(leaf)
        for leaf in _pytree.tree_leaves((args, others))
        if isinstance(leaf, torch.Tensor) or type(leaf) is int
    ]
    bound = rule(_Operands(operands[::-1] if is_reversed else operands, bounds, tensors, factors, args))
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


def _name_of(func: Any) -> tuple[str, bool]:
    """Return the plain name of an operation, and True if its operands are in reverse order.

    `aten.mul.Tensor`, `mul_`, `__rmul__` and `__imul__` are `mul`; `__rmul__` and `rsub` have reversed operands.
    """
    text = getattr(func, "__name__", str(func)).partition(".")[0]
    name = text.strip("_")
    if name == "rsub" or text.startswith("__") and name[:1] in ("r", "i") and name[1:] in _RULES:
        return name[1:], name[0] == "r"
    return name, False


@dataclasses.dataclass(frozen=True)
class _Operands:
    """Operands of an operation on whole numbers."""

    operands: Sequence[int]
    """Bounds of tensors and magnitudes of plain numbers, in the order of the formula."""
    bounds: Sequence[int]
    """Bounds of the tensors."""
    tensors: Sequence[Any]
    """Tensors, in the order of the call."""
    factors: Mapping[str, int]
    """Magnitudes of the factors in `_FACTORS` that the call has."""
    args: Sequence[Any]
    """Positional arguments; that of an `einsum` begin with its equation."""


_FACTORS = ("alpha", "beta", "value")
"""Keyword arguments that multiply an operand: `beta` the first one, and the others the added one."""

_Rule = Callable[[_Operands], int]
"""Function from a call to its result's bound."""


def _sum(call: _Operands) -> int:
    """Return the bound of a sum of two operands, the second times `alpha`."""
    first, *second = call.operands
    return first + sum(second) * call.factors.get("alpha", 1)


def _product(call: _Operands) -> int:
    """Return the bound of a product of all operands."""
    return math.prod(call.operands)


def _cross_product(call: _Operands) -> int:
    """Return the bound of a cross product, whose elements are differences of two products."""
    return 2 * math.prod(call.bounds)


def _power(call: _Operands) -> int:
    """Return the bound of a power, at least 1."""
    base, *exponent = call.operands
    # An exponent of 80 already exceeds every bound that matters.
    return max(1, base) ** min([80, *exponent])


def _shifted(call: _Operands) -> int:
    """Return the bound of a left shift."""
    first, *by = call.operands
    return first << min([80, *by])


def _times_elements(call: _Operands) -> int:
    """Return the bound of a sum over all elements of the first tensor."""
    return max(call.bounds) * max(1, call.tensors[0].numel())


def _times_longest(call: _Operands) -> int:
    """Return the bound of a sum along the longest dim of the first tensor."""
    return max(call.bounds) * max(call.tensors[0].shape, default=1)


def _contraction(call: _Operands) -> int:
    """Return the bound of products of operands summed over the longest dim."""
    return math.prod(call.bounds) * max(size for each in call.tensors for size in (*each.shape, 1))


def _contraction_of_dims(call: _Operands) -> int:
    """Return the bound of a contraction over any number of dims that both operands have."""
    # Each term has its own element in either operand.
    return math.prod(call.bounds) * max(1, min(each.numel() for each in call.tensors[:2]))


def _einsum(call: _Operands) -> int:
    """Return the bound of an `einsum`: the product of operands, times the sizes of all labels that it sums over."""
    inputs, arrow, output = call.args[0].replace(" ", "").partition("->")
    sizes: dict[Any, int] = {}
    for term, each in zip(inputs.split(","), call.tensors, strict=False):
        before, _, after = term.partition("...")
        # Dims of an ellipsis are numbered from the last one.
        between = reversed(range(each.ndim - len(before) - len(after)))
        for label, size in zip((*before, *between, *after), each.shape, strict=False):
            sizes[label] = max(size, sizes.get(label, 1))
    # Without an output, only labels that stand once are left, and the ellipsis.
    left = set(output) if arrow else {label for label in inputs if inputs.count(label) == 1}
    dots = "..." in output or not arrow
    summed = [size for label, size in sizes.items() if not (dots if isinstance(label, int) else label in left)]
    return math.prod(call.bounds) * math.prod(summed)


def _plus_product(call: _Operands) -> int:
    """Return the bound of the first tensor times `beta`, plus the product of the others times `alpha` or `value`."""
    first, *others = call.bounds
    factors = call.factors
    return first * factors.get("beta", 1) + math.prod(others) * factors.get("alpha", 1) * factors.get("value", 1)


def _plus_matmul(call: _Operands) -> int:
    """Return the bound of a first tensor plus a matmul of the others, of which each row has as many terms."""
    return _plus_product(call) * max(1, call.tensors[1].shape[-1])


def _plus_matmuls(call: _Operands) -> int:
    """Return the bound of a first tensor plus the sum of a batch of matmuls."""
    return _plus_matmul(call) * max(1, call.tensors[1].shape[0])


def _plus_elements(call: _Operands) -> int:
    """Return the bound of a first tensor plus any elements of the last one times `alpha`; the indexes do not count."""
    return call.bounds[0] + call.bounds[-1] * max(1, call.tensors[-1].numel()) * call.factors.get("alpha", 1)


def _matrix_power(call: _Operands) -> int:
    """Return the bound of a power of a square matrix, at least 1."""
    base, *exponent = call.operands
    return max(1, base * call.tensors[0].shape[-1]) ** min([80, *exponent])


def _to_power_of_elements(call: _Operands) -> int:
    """Return the bound of a product over all elements of the first tensor."""
    return max(1, *call.bounds) ** min(call.tensors[0].numel(), 80)


def _dividend(call: _Operands) -> int:
    """Return the bound of the first operand, as of a quotient."""
    return call.operands[0]


def _divisor(call: _Operands) -> int:
    """Return the bound of the second operand, as of a remainder."""
    return call.operands[:2][-1]


def _bits(call: _Operands) -> int:
    """Return the largest number with as many bits as the largest operand."""
    # Bitwise ops leave no bits above the highest bit of an operand.
    return (1 << max(*call.operands, 0).bit_length()) - 1


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("add", "sub", "subtract"), _sum),
    **dict.fromkeys(("mul", "multiply", "outer", "kron"), _product),
    **dict.fromkeys(("cross", "linalg_cross"), _cross_product),
    **dict.fromkeys(("pow", "float_power"), _power),
    **dict.fromkeys(("matrix_power", "linalg_matrix_power"), _matrix_power),
    **dict.fromkeys(("lshift", "bitwise_left_shift"), _shifted),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "and", "or", "xor", "invert"), _bits),
    **dict.fromkeys(("sum", "nansum"), _times_elements),
    **dict.fromkeys(("cumsum",), _times_longest),
    **dict.fromkeys(("prod", "cumprod"), _to_power_of_elements),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner"), _contraction),
    **dict.fromkeys(("einsum",), _einsum),
    **dict.fromkeys(("tensordot",), _contraction_of_dims),
    **dict.fromkeys(("addcmul", "addr"), _plus_product),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _plus_matmul),
    **dict.fromkeys(("addbmm",), _plus_matmuls),
    **dict.fromkeys(("index_add", "scatter_add"), _plus_elements),
    **dict.fromkeys(("remainder", "fmod", "mod"), _divisor),
    **dict.fromkeys(("floor_divide", "floordiv", "div", "divide", "true_divide", "truediv"), _dividend),
}
_RULES["square"] = lambda call: call.bounds[0] ** 2

_PLACES = {"slice", "narrow", "select", "getitem", "split", "chunk", "view", "reshape", "expand", "index_select", "to"}
"""Operations whose plain numbers are positions and sizes; a huge one may mean the end of a dim."""
