"""Refusals of eager torch, in torch's own words: each operation runs in torch, on zeros or less, before its lowering.

An operation first runs on the meta device, which has shapes, dtypes and strides. It then runs on a few zeros, since
kernels of the CPU refuse more dtypes. If indices are constants, it also reads zeros at these indices. Outcomes are
cached, so that repeated layers run once.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from autoshard.program.torch_ops import torch_layouts
from autoshard.program.torch_ops.views import root_of


_OUTCOMES = 1 << 14
"""Largest number of cached outcomes."""

_PROBED = 1 << 16
"""Largest product of the whole numbers in an operation's arguments for which the operation runs on the CPU."""

_READ = 1 << 20
"""Largest number of elements that are read from zeros to check constant indices."""

_COMPUTED = 1 << 24
"""Largest number of elements of an operation's tensors for which a refusal is confirmed on the CPU."""

_INDICES = 1 << 12
"""Largest number of constant indices that are checked."""

_mixed: contextvars.ContextVar[bool] = contextvars.ContextVar("mixed", default=False)

_META_ALONE = (
    *("meta", "Meta", "to Scalar", "data-dependent", "Boolean value"),
    "correction argument should be non-negative",
)
"""Parts of sentences with which torch refuses an operation on the meta device alone."""

_OF_DTYPES = ("dtype", "scalar type", "not implemented for", "result type", "must be long", "Long", "complex", "Bool")
"""Parts of sentences with which torch refuses a dtype."""

_CPU_ALONE = ("'Half'", "'BFloat16'", "'Float8", "backend")
"""Parts of sentences with which torch refuses an operation on the CPU alone."""

_ALIGNED = {"_grouped_mm"}
"""Operations whose kernels require an alignment that their lowerings do not."""

_READS = {"__getitem__", "index_select", "gather", "take_along_dim", "embedding"}
"""Operations that read a tensor at indices."""


@contextlib.contextmanager
def mixed_floats(on: bool) -> Iterator[None]:
    """Allow operands of several floating dtypes, while inside and if `on`, as weights have a compute dtype.

    Without `on`, torch's refusals of these apply.
    """
    token = _mixed.set(on)
    try:
        yield
    finally:
        _mixed.reset(token)


@dataclasses.dataclass(frozen=True, slots=True)
class _Operand:
    """Description of a tensor that an operation gets."""

    shape: tuple[int, ...]
    dtype: Any
    """Torch dtype that corresponds to the JAX array."""
    strides: tuple[int, ...]
    """Strides in torch, in elements."""
    narrow: bool
    """True if JAX has 32 bits for whole numbers that may have 64 bits in torch."""
    values: bytes | None
    """Constant indices as bytes of 64-bit whole numbers, or None."""

    @property
    def overlaps(self) -> bool:
        """True if several elements share their memory."""
        return any(stride == 0 and size > 1 for size, stride in zip(self.shape, self.strides, strict=True))

    def on_meta(self, dtype: Any) -> Any:
        """Return a tensor of this shape and these strides on the meta device, without elements."""
        import torch

        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device="meta")

    def alone(self, dtype: Any) -> Any:
        """Return one zero on the CPU, with as many dims as the operand."""
        import torch

        return torch.zeros((1,) * len(self.shape), dtype=dtype)

    def zeros(self, dtype: Any) -> Any:
        """Return the constant indices, or else zeros of this shape, on the CPU.

        Above `_READ` elements, the zeros share the memory of one.
        """
        import numpy as np
        import torch

        if self.values is None:
            if math.prod(self.shape) > _READ:
                return torch.zeros((), dtype=dtype).expand(self.shape)
            return torch.empty_strided(self.shape, self.strides, dtype=dtype).zero_()
        return torch.tensor(np.frombuffer(self.values, np.int64).reshape(self.shape)).to(dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    """Answer of torch to an operation: results, or an error, or neither if unknown."""

    results: tuple[tuple[tuple[int, ...], Any], ...] | None = None
    """Shape and torch dtype of each result; None if they are unknown."""
    error: BaseException | None = None
    """Torch's error if it refuses the operation, else None."""


_known: dict[Any, _Outcome] = {}
"""Cached outcomes by operation, `mixed_floats` and description of the arguments; cleared at `_OUTCOMES` entries."""


class _UnknownError(Exception):
    """Raised for an argument that has no counterpart without elements."""


def torch_results(func: Any, args: Any, kwargs: Any) -> tuple[tuple[tuple[int, ...], Any], ...] | None:
    """Return shape and dtype of each result of an operation in torch; None if they are unknown.

    Outcomes are cached. They are unknown for arguments without a counterpart, and for mixed floating dtypes.

    Raises torch's own error if torch refuses the operation.
    """
    try:
        given, operands = _described(func, args, kwargs)
    except _UnknownError:
        return None
    key = (func, _mixed.get(), given)
    found = _known.get(key)
    if found is None:
        if len(_known) >= _OUTCOMES:
            _known.clear()
        found = _known[key] = _outcome(func, given, operands)
    if found.error is not None:
        raise found.error.with_traceback(None)  # a cached error would retain the frames of every raise
    return found.results


def refusal_of(func: Any, args: Any, kwargs: Any) -> BaseException | None:
    """Return torch's error for an operation whose lowering failed; None if torch computes it, or if that is unknown.

    The operation runs on zeros on the CPU, with up to `_COMPUTED` elements; a missing kernel of the CPU is no error.
    """
    import torch

    try:
        given, operands = _described(func, args, kwargs)
    except _UnknownError:
        return None
    if _elements(operands) > _COMPUTED:
        return None
    with torch_layouts.torch_alone(), torch.random.fork_rng(devices=()):
        try:
            _run(func, given, lambda each, k: each.zeros(torch.int64 if each.narrow else each.dtype), "cpu")
        except Exception as error:
            return None if _is_of_cpu(error) else error
    return None


def _described(func: Any, args: Any, kwargs: Any) -> tuple[Any, list[_Operand]]:
    """Return a hashable description of arguments, and the operands of the tensors in it, in order.

    Raises `_UnknownError` for an argument that has no counterpart without elements, inside transforms of `torch.func`,
    and for operations in `_ALIGNED`.
    """
    import torch

    functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009  # torch declares no such module
    if functorch.peek_interpreter_stack() is not None:
        raise _UnknownError
    if _name(func) in _ALIGNED:
        raise _UnknownError
    reads, as_they_lie = _name(func) in _READS, torch_layouts.depends(func)
    operands: list[_Operand] = []

    def described(value: Any) -> Any:
        """Return the description of one value, and collect its operands."""
        kind = type(value)
        if kind in (tuple, list, torch.Size):
            return (kind, *map(described, value))
        if kind is dict:
            return (dict, *((name, described(each)) for name, each in value.items()))
        if kind is slice:
            return (slice, described(value.start), described(value.stop), described(value.step))
        if kind in (float, complex):
            return (kind, repr(value))
        if kind in (int, bool, str, type(None), type(Ellipsis), torch.dtype, torch.memory_format, torch.layout):
            return (None, kind, value)
        if kind is torch.device:
            return (torch.device,)
        if not isinstance(value, torch.Tensor):
            raise _UnknownError
        operands.append(_operand(value, reads, as_they_lie))
        return operands[-1]

    return described((args, kwargs)), operands


def _run(func: Any, given: Any, make: Callable[[_Operand, int], Any], device: str) -> list[Any]:
    """Run an operation on described arguments with tensors from `make`; return the tensors among its results.

    - `given`: description of arguments.
    - `make`: function of an operand and its number.
    - `device`: device that replaces any device among the arguments.
    """
    import torch
    from torch.utils import _pytree

    order = itertools.count()
    args, kwargs = _filled(given, lambda each: make(each, next(order)), device)
    return [each for each in _pytree.tree_leaves(func(*args, **kwargs)) if isinstance(each, torch.Tensor)]


def _name(func: Any) -> str:
    """Return the name of an operation without its overload."""
    return str(getattr(func, "__name__", func)).partition(".")[0]


def _operand(tensor: Any, reads: bool, as_they_lie: bool) -> _Operand:
    """Return the description of a tensor, with its constant indices if the operation `reads`.

    - `as_they_lie`: True if the operation gives views or copies by the tensor's strides.

    Raises `_UnknownError` for a tensor of another class, and if strides matter and are unknown.
    """
    import jax
    import torch
    from torchax.ops import mappings

    if not hasattr(tensor, "_env"):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise _UnknownError
        values = _indices(tensor, tensor.dtype) if reads and tensor.device.type == "cpu" else None
        return _Operand(tuple(tensor.shape), tensor.dtype, tensor.stride(), False, values)
    sliced, attrs = hasattr(tensor, "view_info"), root_of(tensor).__dict__
    if "_held" not in attrs:
        raise _UnknownError
    array = attrs["_held"]
    dtype = mappings.j2t_dtype(array.dtype)
    if sliced or "_layout" in attrs:
        layout = torch_layouts.layout_of(tensor)
        if layout is None and (sliced or as_they_lie):
            raise _UnknownError
    else:
        layout = None
    shape = tuple(array.shape) if layout is None else tuple(layout.shape)
    strides = _contiguous(shape) if layout is None else layout.stride()
    narrow = dtype == torch.int32 and jax.dtypes.canonicalize_dtype("int64") == "int32"
    values = None
    if reads and not sliced and not attrs.keys() & {"_link", "_log"}:
        made, known = attrs.get("_constant_indices", (None, None))
        values = _indices(known if made is array else array, dtype)
    return _Operand(shape, dtype, strides, narrow, values)


def note_constant(tensor: Any, data: Any) -> None:
    """Record the whole numbers `data` that a torchax tensor is made of; its array may be a tracer.

    Booleans, floats, tensors and more than `_INDICES` numbers are ignored.
    """
    import numpy as np

    if not isinstance(data, (int, list, tuple)) or isinstance(data, bool):
        return
    values = np.asarray(data)
    if values.dtype == np.int64 and values.size <= _INDICES and values.shape == tensor.__dict__["_held"].shape:
        tensor.__dict__["_constant_indices"] = tensor.__dict__["_held"], values


def _indices(array: Any, dtype: Any) -> bytes | None:
    """Return the elements of at most `_INDICES` constant whole numbers as bytes in 64 bits, or None for
    other tensors.
    """
    import numpy as np
    import torch
    from jax import core

    if dtype not in (torch.int32, torch.int64) or isinstance(array, core.Tracer) or math.prod(array.shape) > _INDICES:
        return None
    return np.asarray(array).astype(np.int64).tobytes()


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of a shape."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def _filled(given: Any, make: Callable[[_Operand], Any], device: str) -> Any:
    """Return arguments from their description, with tensors from `make`, called in the order of the operands.

    Any `device` becomes the given one.
    """
    import torch

    if isinstance(given, _Operand):
        return make(given)
    kind, *parts = given
    if kind is None:
        return parts[1]
    if kind in (float, complex):
        return kind(parts[0])
    if kind is torch.device:
        return device
    if kind is dict:
        named = {name: _filled(each, make, device) for name, each in parts}
        return named | {"device": device} if named.get("device") is not None else named
    values = [_filled(each, make, device) for each in parts]
    return slice(*values) if kind is slice else kind(values)


def _numbers(given: Any) -> Iterator[int]:
    """Yield the whole numbers in the description of arguments, and 1 for each other plain value."""
    if isinstance(given, tuple):
        if given[0] is None:
            yield given[2] if given[1] is int else 1
        else:
            for each in given[1:]:
                yield from _numbers(each)


def _outcome(func: Any, given: Any, operands: list[_Operand]) -> _Outcome:
    """Return the answer of torch for the first dtypes of the operands that torch accepts, or else its first refusal.

    Narrow operands first have 64 bits, then 32, then one of them has 32 at a time; at most eight ways are tried.
    """
    narrow = [k for k, each in enumerate(operands) if each.narrow]
    # Whole numbers of 32 bits have 64 in torch, unless torch refuses that.
    apart = [(), tuple(narrow), *itertools.combinations(narrow, 1)][: 8 if narrow else 1]
    outcomes = (_with_dtypes(func, given, operands, set(each)) for each in apart)
    first = next(outcomes)
    return first if first.error is None else next((each for each in outcomes if each.error is None), first)


def _with_dtypes(func: Any, given: Any, operands: list[_Operand], apart: set[int]) -> _Outcome:
    """Return the answer of torch where narrow operands have 64 bits, except those numbered in `apart`.

    A refusal on the meta device is confirmed on the CPU if the operands are small. Dtypes, constant indices and writes
    to overlapping elements are also tried on the CPU. Results are unknown for mixed floating dtypes.
    """
    import torch

    mixed = _mixed.get() and len({each.dtype for each in operands if each.dtype.is_floating_point}) > 1

    def run(make: Callable[[_Operand, Any], Any], device: str) -> list[Any]:
        """Run the operation on a device with tensors from `make`, a function of an operand and its dtype."""

        def made(each: _Operand, k: int) -> Any:
            """Return the tensor of an operand; mixed floating dtypes become float32."""
            dtype = torch.int64 if each.narrow and k not in apart else each.dtype
            return make(each, torch.float32 if mixed and dtype.is_floating_point else dtype)

        return _run(func, given, made, device)

    def refusal(make: Callable[[_Operand, Any], Any]) -> BaseException | None:
        """Return the error of the operation on the CPU, or None; a missing kernel of the CPU is no error."""
        try:
            run(make, "cpu")
        except Exception as error:
            return None if _is_of_cpu(error) else error
        return None

    with torch_layouts.torch_alone(), torch.random.fork_rng(devices=()):
        results: list[Any] | None = None
        try:
            results = run(_Operand.on_meta, "meta")
        except Exception as error:  # a refusal, or an operation without a meta kernel
            said = any(part in str(error) for part in _META_ALONE)
            refused = not said and not isinstance(error, AttributeError)
            large = _elements(operands) > _COMPUTED
            if refused and large and not isinstance(error, NotImplementedError):
                return _Outcome(error=error)
            if refused and not large and (confirmed := refusal(_Operand.zeros)) is not None:
                return _Outcome(error=confirmed)
        dtypes = {each.dtype for each in operands}
        plain = len(dtypes) == 1 and next(iter(dtypes)).is_floating_point
        if not plain and math.prod(max(abs(each), 1) for each in _numbers(given)) <= _PROBED:
            small = _elements(operands) <= _INDICES
            error = refusal(_Operand.zeros if small else _Operand.alone)
            if error is not None and any(part in str(error) for part in _OF_DTYPES):
                return _Outcome(error=error)
        indexed = any(each.values is not None for each in operands) or _name(func) in _READS and _has_list(given)
        if indexed and (results is None or sum(each.numel() for each in results) <= _READ):
            error = refusal(_Operand.zeros)
            if isinstance(error, IndexError) or "out of" in str(error):
                return _Outcome(error=error)
        if _name(func).endswith("_") and operands and operands[0].overlaps and (error := refusal(_Operand.zeros)):
            return _Outcome(error=error)
    if results is None or mixed:
        return _Outcome()
    return _Outcome(tuple((tuple(each.shape), each.dtype) for each in results))


def _elements(operands: list[_Operand]) -> int:
    """Return the number of elements of some tensors."""
    return sum(math.prod(each.shape) for each in operands)


def _is_of_cpu(error: BaseException) -> bool:
    """Return True if the CPU lacks a kernel that accelerators may have."""
    return any(part in str(error) for part in _CPU_ALONE)


def _has_list(given: Any) -> bool:
    """Return True if the description of arguments has a list, at any depth."""
    return isinstance(given, tuple) and (given[0] is list or any(map(_has_list, given[1:])))
