"""Reads of parts of a tensor, and rows that a traced mask selects."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

from autoshard.program.caller_frames import with_callers
from autoshard.program.torch_ops import indexed_writes


_OF_ROWS = {"linear", "layer_norm", "rms_norm"}
"""Operations on the last dims of their first argument, with weights as the other arguments."""

_ELEMENTWISE = {"add", "radd", "iadd", "sub", "rsub", "mul", "rmul", "imul", "div", "truediv", "true_divide", "pow"}
_ELEMENTWISE |= {"rsqrt", "sqrt", "exp", "log", "neg", "abs", "silu", "gelu", "relu", "sigmoid", "tanh", "softplus"}
_ELEMENTWISE |= {"clamp", "square", "clone", "contiguous", "dropout", "to", "type", "type_as", "float"}

_REDUCE = {"mean", "sum", "softmax", "var"}
"""Operations over one dim, which must belong to the row."""

_OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "pow", "neg")


class AnyCount:
    """The unknown number of elements under a traced mask: it equals every number, so that checks of it pass."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


class MaskedRows:
    """A stand-in for `x[mask]` with a traced mask: rows whose number is unknown during the trace.

    Models compute on each row separately, or add as many other rows, and write the rows back to such places. An
    operation that could need the number of rows raises JAX's error for reading the mask.
    """

    def __init__(self, values: Any, mask: Any, error: Exception, counted: bool, flat: bool = False) -> None:
        """Store the rows densely.

        - `values`: torch tensor [..., *row], right where `mask` is true and arbitrary elsewhere.
        - `mask`: [...] of booleans.
        - `error`: JAX's error for reading the values of the mask, raised where rows cannot be used.
        - `counted`: True if code only checks the number of rows.
        - `flat`: True if the elements of all rows are in one dim.
        """
        self.values, self.mask, self.error, self.counted, self.flat = values, mask, error, counted, flat

    @property
    def dtype(self) -> Any:
        """Dtype of the elements."""
        return self.values.dtype

    @property
    def device(self) -> Any:
        """Device of the elements."""
        return self.values.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply a torch operation to each row, as `by_row` does."""
        return by_row(func, args, kwargs or {})

    def numel(self) -> AnyCount:
        """Return a count that equals every number, for code that only checks the count.

        Raises the mask's error if code may use the count otherwise.
        """
        if not self.counted:
            raise self.error
        return AnyCount()

    def view(self, *shape: Any) -> "MaskedRows":
        """Return the rows unchanged for a shape (-1, *row), or flattened into one dim for (-1,).

        Raises the mask's error for any other shape.
        """
        size = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        row = tuple(self.values.shape[self.mask.ndim :])
        if size not in ((-1,), (-1, *row)):
            raise self.error
        return MaskedRows(self.values, self.mask, self.error, self.counted, size == (-1,) and len(row) > 0)

    reshape = view

    def __getattr__(self, name: str) -> Any:
        """Return the tensor method `name`, applied to each row, if it is elementwise or a reduction.

        Raises the mask's error for every other name.
        """
        import torch

        if name not in _ELEMENTWISE | _REDUCE:
            raise self.error
        method = getattr(torch.Tensor, name)
        return lambda *args, **kwargs: by_row(method, (self, *args), kwargs)

    def dense(self) -> Any:
        """Return [places, *row]: the selected rows in order, followed by arbitrary rows."""
        import torch

        hit = self.mask.reshape(-1)
        order = torch.argsort((~hit).to(torch.int32), stable=True)
        return self.values.reshape(hit.shape[0], *self.values.shape[self.mask.ndim :])[order]

    def under(self, mask: Any) -> Any:
        """Return values [..., *row] that have these rows, in order, where `mask` is true, and arbitrary rows elsewhere.

        Rows are moved unless `mask` is certainly the rows' own.
        """
        if is_same(mask, self.mask):
            return self.values.reshape(*mask.shape, *self.values.shape[self.mask.ndim :])
        return _spread(self.dense(), mask)


def _operator(name: str) -> Callable[..., Any]:
    """Return the method `__{name}__` for a Python operator, which applies to each row."""

    def run(self: MaskedRows, *args: Any) -> Any:
        import torch

        return by_row(getattr(torch.Tensor, f"__{name}__"), (self, *args), {})

    return run


for _name in _OPERATORS:
    setattr(MaskedRows, f"__{_name}__", _operator(_name))


def is_same(mask: Any, other: Any) -> bool:
    """Return True if two torchax masks certainly have the same elements in the same order; False may mean unknown."""
    return mask is other or mask.numel() == other.numel() and indexed_writes.is_same(mask.jax(), other.jax())


def _spread(rows: Any, mask: Any) -> Any:
    """Return an array [..., *row] in which the n-th true place of `mask` [...] has row n of `rows` [N, *row].

    Other places have arbitrary rows, and true places beyond N the last one.
    """
    import torch

    place = (torch.cumsum(mask.reshape(-1).to(torch.int32), 0) - 1).clamp(0, rows.shape[0] - 1)
    return rows[place.to(torch.int64)].reshape(*mask.shape, *rows.shape[1:])


def by_row(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply a torch operation to rows under a mask, and return `MaskedRows` of its result.

    Known are `_OF_ROWS`, `_ELEMENTWISE`, and `_REDUCE` over one negative dim of the row. A tensor [N, *row] among the
    operands gives its rows in order. `masked_scatter` of rows returns a tensor.

    Raises the mask's error for other operations, since they may mix rows, and for flat rows.
    """
    import torch

    name = str(getattr(func, "__name__", func)).partition(".")[0].strip("_")
    first = next(each for each in (*args, *kwargs.values()) if isinstance(each, MaskedRows))
    if name == "masked_scatter" and len(args) == 3 and isinstance(args[2], MaskedRows):
        return _scattered(*args)
    rank = first.values.ndim - first.mask.ndim
    others = args[1:] if name in _OF_ROWS else ()
    known = name in _OF_ROWS | _ELEMENTWISE | _REDUCE and not any(isinstance(each, MaskedRows) for each in others)
    if not known or first.flat or any(isinstance(each, MaskedRows) for each in kwargs.values()):
        raise first.error

    def given(value: Any) -> Any:
        """Return an operand as dense values under the first mask."""
        if isinstance(value, MaskedRows):
            return value.under(first.mask)
        if not isinstance(value, torch.Tensor) or value.ndim <= rank:
            return value
        if value.ndim > rank + 1:
            raise first.error
        return value[0] if value.shape[0] == 1 else _spread(value, first.mask)

    if name in _OF_ROWS:
        args = (given(args[0]), *others)
    elif name in _REDUCE:
        at = kwargs.get("dim", args[1] if len(args) > 1 else None)
        at = at[0] if isinstance(at, (tuple, list)) and len(at) == 1 else at
        if not isinstance(at, int) or not -rank <= at < 0:
            raise first.error
        args = (first.values, *args[1:])
    else:
        args = tuple(given(each) for each in args)
    return MaskedRows(func(*args, **kwargs), first.mask, first.error, first.counted)


def _scattered(x: Any, mask: Any, rows: MaskedRows) -> Any:
    """Return `x` with the rows in order where `mask` is true; the mask may be broadcast along the row's dims.

    Raises the mask's error if mask and rows do not fit the shape of `x`.
    """
    import torch

    own = rows.values.ndim - rows.mask.ndim
    while mask.ndim > x.ndim - own and mask.shape[-1] == 1:
        mask = mask.squeeze(-1)
    if mask.ndim != x.ndim - own or x.shape[mask.ndim :] != rows.values.shape[rows.mask.ndim :]:
        raise rows.error
    return torch.where(mask.reshape(*mask.shape, *([1] * own)), rows.under(mask).to(x.dtype), x)


# True while a model encodes images or videos.
_media: contextvars.ContextVar[bool] = contextvars.ContextVar("media", default=False)

# True while a model with methods of `_MERGE` runs: it only checks counts of rows.
_merging: contextvars.ContextVar[bool] = contextvars.ContextVar("merging", default=False)

_ENCODE = ("get_image_features", "get_video_features")
"""Methods with which models of transformers encode images and videos."""

_MERGE = (*_ENCODE, "get_audio_features", "get_placeholder_mask")
"""Methods of models that insert encoded images, videos or sound at places of a text."""


def lenient(getitem: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torchax's `tensor[indexes]` to accept more indexes.

    A slice may be bounded by a tensor of one whole number. A traced mask over the first dims, with full slices as the
    other indexes, gives `MaskedRows`; JAX's error for other traced masks is raised.
    """
    import torch

    def whole(index: Any) -> Any:
        """Return an index; a slice has plain numbers in place of tensors."""
        if not isinstance(index, slice):
            return index
        bounds = (index.start, index.stop, index.step)
        return slice(*(int(each) if isinstance(each, torch.Tensor) else each for each in bounds))

    def run(self: Any, indexes: Any) -> Any:
        """Return `self[indexes]`, or `MaskedRows` for a traced mask."""
        given = tuple(whole(each) for each in indexes) if isinstance(indexes, tuple) else whole(indexes)
        try:
            return getitem(self, given)
        except Exception as error:
            if type(error).__name__ != "NonConcreteBooleanIndexError":
                raise
            mask, *rest = given if isinstance(given, tuple) else (given,)
            if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape != self.shape[: mask.ndim]:
                raise
            if any(each != slice(None) for each in rest):
                raise
            return MaskedRows(self.clone(), mask, with_callers(error), _merging.get())

    return run


@contextlib.contextmanager
def media_in_place(module: Any) -> Iterator[None]:
    """Treat every image and video as real, and the number of text places as that of the media, while inside.

    Models drop images that are all zeros, which pad a batch; here all images count. Models also check the number of
    places. Encoding methods are wrapped in the modules' `__dict__` and restored on exit; other modules are unchanged.
    """
    changed: list[tuple[Any, str]] = []
    token = _merging.set(any(hasattr(child, name) for child in module.modules() for name in _MERGE))
    for child in module.modules():
        for name in _ENCODE:
            encode = getattr(child, name, None)
            if encode is not None and name not in child.__dict__:
                child.__dict__[name] = _encoding(encode)
                changed.append((child, name))
    try:
        yield
    finally:
        for child, name in changed:
            del child.__dict__[name]
        _merging.reset(token)


def _encoding(encode: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an encoding method so that `_media` is set while it runs."""

    @functools.wraps(encode)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _media.set(True)
        try:
            return encode(*args, **kwargs)
        finally:
            _media.reset(token)

    return run


def asks_for_padding(func: Any, args: Any) -> bool:
    """Return True if `func` compares a floating tensor of over three dims with 0.0 while media are encoded.

    Models do so to find images that only pad a batch.
    """
    name = str(getattr(func, "__name__", func)).partition(".")[0]
    if not _media.get() or name not in ("eq", "__eq__") or len(args) != 2:
        return False
    return isinstance(args[1], float) and args[1] == 0.0 and args[0].is_floating_point() and args[0].ndim > 3
