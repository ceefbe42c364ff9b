"""Reading parts of a tensor, as torch does, where what is asked for is not known yet."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

from autoshard.program._callers import with_callers
from autoshard.program._masked import MaskedRows


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
