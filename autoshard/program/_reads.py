"""Reading parts of a tensor, as torch does, where what is asked for is not known yet."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any


_media: contextvars.ContextVar[bool] = contextvars.ContextVar("media", default=False)

_merging: contextvars.ContextVar[bool] = contextvars.ContextVar("merging", default=False)

_ENCODE = ("get_image_features", "get_video_features")
"""Methods by which models of transformers encode what they are shown."""

_MERGE = (*_ENCODE, "get_audio_features", "get_placeholder_mask")
"""Methods of models that put what they are shown or told into the places of a text."""


class AnyCount:
    """How many elements there are under a mask that nobody knows yet: checks of it hold."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


class MaskedElements:
    """Stands for `x[mask]` of a mask that is traced: models count its elements in checks, and do nothing else."""

    def __init__(self, error: Exception) -> None:
        """`error` is what was raised for the values of the mask."""
        self._error = error

    def numel(self) -> AnyCount:
        """What any count is equal to."""
        return AnyCount()

    def __getattr__(self, name: str) -> Any:
        """Raises what was raised for the values of the mask."""
        raise self._error


class MaskedRows:
    """Stands for the rows `x[mask, :]` of a mask that is traced: models add as many rows to them, and write them back
    to the same places."""

    def __init__(self, values: Any, mask: Any) -> None:
        """`values` [..., D] are right at the places of `mask` [...], and anything elsewhere."""
        self.values, self.mask = values, mask

    def __add__(self, rows: Any) -> "MaskedRows":
        """With `rows` [N, D] added, in order."""
        import torch

        place = (torch.cumsum(self.mask.reshape(-1).to(torch.int32), 0) - 1).clamp(0, rows.shape[0] - 1)
        return MaskedRows(self.values + rows[place.to(torch.int64)].reshape(self.values.shape), self.mask)

    def clone(self) -> "MaskedRows":
        """The same, since none of it is ever changed."""
        return self


def lenient(getitem: Callable[..., Any]) -> Callable[..., Any]:
    """torchax's `tensor[indexes]`, where a slice may be bounded by a tensor of one whole number, and where elements
    under a traced mask may be counted, and rows under one added to."""
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
            if type(error).__name__ != "NonConcreteBooleanIndexError" or not _merging.get():
                raise
            mask, *rest = given if isinstance(given, tuple) else (given,)
            if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
                raise
            if not rest and mask.shape == self.shape:
                return MaskedElements(error)
            if rest != [slice(None)] or mask.shape != self.shape[:-1]:
                raise
            return MaskedRows(self.clone(), mask)

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
