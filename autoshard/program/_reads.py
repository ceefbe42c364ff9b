"""Reading parts of a tensor, as torch does, where what is asked for is not known yet."""

from collections.abc import Callable
from typing import Any


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


def lenient(getitem: Callable[..., Any]) -> Callable[..., Any]:
    """torchax's `tensor[indexes]`, where a slice may be bounded by a tensor of one whole number, and where elements
    under a traced mask may be counted."""
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
            mask = isinstance(given, torch.Tensor) and given.dtype == torch.bool and given.shape == self.shape
            if type(error).__name__ != "NonConcreteBooleanIndexError" or not mask:
                raise
            return MaskedElements(error)

    return run
