"""Reads of parts of a tensor, and rows under a mask that is traced."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

from autoshard.program.caller_frames import with_callers
from autoshard.program.torch_ops import indexed_writes


_OF_ROWS = {"linear", "layer_norm", "rms_norm"}
"""Operations on the last dims of their first argument; others are weights."""

_ELEMENTWISE = {"add", "radd", "iadd", "sub", "rsub", "mul", "rmul", "imul", "div", "truediv", "true_divide", "pow"}
_ELEMENTWISE |= {"rsqrt", "sqrt", "exp", "log", "neg", "abs", "silu", "gelu", "relu", "sigmoid", "tanh", "softplus"}
_ELEMENTWISE |= {"clamp", "square", "clone", "contiguous", "dropout", "to", "type", "type_as", "float"}

_REDUCE = {"mean", "sum", "softmax", "var"}
"""Operations over a dim, which is one of a row's."""

_OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "pow", "neg")


class AnyCount:
    """How many elements there are under a mask that nobody knows yet: checks of it hold."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


class MaskedRows:
    """Stands for `x[mask]` of a mask that is traced: models compute something of each row alone, or add as many rows,
    and write them back to such places."""

    def __init__(self, values: Any, mask: Any, error: Exception, counted: bool, flat: bool = False) -> None:
        """`values` [..., *row] are right at the places of `mask` [...], and anything elsewhere; `error` is what was
        raised for the values of the mask; `counted`: their number is only checked; `flat`: rows lie one after another
        in one dim."""
        self.values, self.mask, self.error, self.counted, self.flat = values, mask, error, counted, flat

    @property
    def dtype(self) -> Any:
        """That of the elements."""
        return self.values.dtype

    @property
    def device(self) -> Any:
        """Where the elements are."""
        return self.values.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What an operation makes of rows."""
        return by_row(func, args, kwargs or {})

    def numel(self) -> AnyCount:
        """What any count is equal to, in code that only checks it."""
        if not self.counted:
            raise self.error
        return AnyCount()

    def view(self, *shape: Any) -> "MaskedRows":
        """The rows one after another, or as they are."""
        size = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        row = tuple(self.values.shape[self.mask.ndim :])
        if size not in ((-1,), (-1, *row)):
            raise self.error
        return MaskedRows(self.values, self.mask, self.error, self.counted, size == (-1,) and len(row) > 0)

    reshape = view

    def __getattr__(self, name: str) -> Any:
        """A method of tensors; raises what was raised for the values of the mask if it is none of rows."""
        import torch

        if name not in _ELEMENTWISE | _REDUCE:
            raise self.error
        method = getattr(torch.Tensor, name)
        return lambda *args, **kwargs: by_row(method, (self, *args), kwargs)

    def dense(self) -> Any:
        """[places, *row]: rows in order, and anything after the last of them."""
        import torch

        hit = self.mask.reshape(-1)
        order = torch.argsort((~hit).to(torch.int32), stable=True)
        return self.values.reshape(hit.shape[0], *self.values.shape[self.mask.ndim :])[order]

    def under(self, mask: Any) -> Any:
        """Values [..., *row] that are these rows at the places of another mask, in order."""
        if is_same(mask, self.mask):
            return self.values.reshape(*mask.shape, *self.values.shape[self.mask.ndim :])
        return _spread(self.dense(), mask)


def _operator(name: str) -> Callable[..., Any]:
    def run(self: MaskedRows, *args: Any) -> Any:
        import torch

        return by_row(getattr(torch.Tensor, f"__{name}__"), (self, *args), {})

    return run


for _name in _OPERATORS:
    setattr(MaskedRows, f"__{_name}__", _operator(_name))


def is_same(mask: Any, other: Any) -> bool:
    """Whether two masks are known to hold the same, one after another."""
    return mask is other or mask.numel() == other.numel() and indexed_writes.is_same(mask.jax(), other.jax())


def _spread(rows: Any, mask: Any) -> Any:
    """Rows [N, *row] where the first place of `mask` takes the first row, and so on."""
    import torch

    place = (torch.cumsum(mask.reshape(-1).to(torch.int32), 0) - 1).clamp(0, rows.shape[0] - 1)
    return rows[place.to(torch.int64)].reshape(*mask.shape, *rows.shape[1:])


def by_row(func: Any, args: Any, kwargs: Any) -> Any:
    """What a torch operation makes of rows under a mask; raises what was raised for its values if rows are mixed."""
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
    """`x` with rows in order where `mask` is, which was broadcast along what a row has."""
    import torch

    own = rows.values.ndim - rows.mask.ndim
    while mask.ndim > x.ndim - own and mask.shape[-1] == 1:
        mask = mask.squeeze(-1)
    if mask.ndim != x.ndim - own or x.shape[mask.ndim :] != rows.values.shape[rows.mask.ndim :]:
        raise rows.error
    return torch.where(mask.reshape(*mask.shape, *([1] * own)), rows.under(mask).to(x.dtype), x)


_media: contextvars.ContextVar[bool] = contextvars.ContextVar("media", default=False)

_merging: contextvars.ContextVar[bool] = contextvars.ContextVar("merging", default=False)

_ENCODE = ("get_image_features", "get_video_features")
"""Methods by which models of transformers encode what they are shown."""

_MERGE = (*_ENCODE, "get_audio_features", "get_placeholder_mask")
"""Methods of models that put what they are shown or told into the places of a text."""


def lenient(getitem: Callable[..., Any]) -> Callable[..., Any]:
    """torchax's `tensor[indexes]`, where a slice may be bounded by a tensor of one whole number, and where rows
    under a traced mask are computed with."""
    import torch

    def whole(index: Any) -> Any:
        if not isinstance(index, slice):
            return index
        bounds = (index.start, index.stop, index.step)
        return slice(*(int(each) if isinstance(each, torch.Tensor) else each for each in bounds))

    def run(self: Any, indexes: Any) -> Any:
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
    """While inside, images and videos that `module` encodes hold no zeros, and as many places of a text as there are
    of what it puts there.

    Models look for images that are all zeros, which were added to fill a batch, and leave them out; all are there. They
    count the places in a check.
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
    @functools.wraps(encode)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _media.set(True)
        try:
            return encode(*args, **kwargs)
        finally:
            _media.reset(token)

    return run


def asks_for_padding(func: Any, args: Any) -> bool:
    """Whether an operation compares what is encoded with zero, to find what was only added to fill a batch."""
    name = str(getattr(func, "__name__", func)).partition(".")[0]
    if not _media.get() or name not in ("eq", "__eq__") or len(args) != 2:
        return False
    return isinstance(args[1], float) and args[1] == 0.0 and args[0].is_floating_point() and args[0].ndim > 3
