"""The segments of a torch module: what it computes from the begin of one of its modules to the begin of the next one.

Between segments a module can be cut into stages. Every op is traced in a scope that says its segment, which its
gradient inherits, so that what the planner finds out of ops can be said of segments.
"""

import contextlib
import contextvars
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from autoshard.errors import UserError


_SCOPE = "segment"
_FOUND = re.compile(rf"\b{_SCOPE}(\d+)\b")


class NotDividedError(UserError):
    """The microbatches do not divide the batch."""


@dataclasses.dataclass(slots=True)
class Segments:
    """What is asked of the torch modules that are opened, and what was found of the last one."""

    microbatches: int
    """Into so many parts of equal size inputs are cut, along their first dim; one of them is traced."""
    names: list[str] = dataclasses.field(default_factory=list)
    """The outermost module that each segment begins with, in the order in which they run."""
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    """How often each module is called."""
    batch: int = 0
    """Examples in the whole batch: the first dim of the first input."""
    module: Any = None
    """The module itself, once it has run."""
    busy: bool = False
    """Whether an op has run since the last module began."""
    inside: bool = False
    """Whether an op is running, of which others are a part."""

    @property
    def may_cut(self) -> list[bool]:
        """Whether a stage may begin with a segment: its module is called once."""
        return [index == 0 or self.calls[name] == 1 for index, name in enumerate(self.names)]


_asked: contextvars.ContextVar[Segments | None] = contextvars.ContextVar("segments", default=None)


@contextlib.contextmanager
def in_segments(microbatches: int) -> Iterator[Segments]:
    """While inside, torch modules are opened with one microbatch, none of their layers scanned, op by op in scopes."""
    asked = Segments(microbatches)
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def asked_segments() -> Segments | None:
    """What is asked where this is called; None if nothing is."""
    return _asked.get()


def one_microbatch(inputs: Any, kwargs: Any, targets: Any) -> tuple[Any, Any, Any]:
    """The part of inputs that is one microbatch, where segments are asked for; else all of it.

    Raises `NotDividedError` if the microbatches do not divide the first dims of all tensors.
    """
    asked = _asked.get()
    if asked is None:
        return inputs, kwargs, targets
    import torch
    from torch.utils import _pytree

    asked.batch = 0
    count = asked.microbatches

    def part(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        asked.batch = asked.batch or value.shape[0]
        if value.shape[0] % count:
            raise NotDividedError(
                f"{count} microbatches do not divide the batch: an input has {value.shape[0]} examples; use "
                f"{_near(count, value.shape[0])} microbatches."
            )
        return value[: value.shape[0] // count]

    return tuple(_pytree.tree_map(part, each) for each in (inputs, kwargs, targets))  # type: ignore[return-value]


def _near(count: int, batch: int) -> int:
    """The divisor of the batch that is nearest."""
    return min((n for n in range(1, batch + 1) if batch % n == 0), key=lambda n: (abs(n - count), n))


@contextlib.contextmanager
def watching(module: Any) -> Iterator[None]:
    """While inside, one run of the module is followed, if segments are asked for."""
    asked = _asked.get()
    if asked is None:
        yield
        return
    asked.module, asked.names, asked.calls, asked.busy = module, [""], Counter(), False

    def begin(name: str) -> Any:
        def hook(*_: Any) -> None:
            asked.calls[name] += 1
            if asked.busy:
                asked.names.append(name)
            asked.names[-1] = asked.names[-1] or name
            asked.busy = False

        return hook

    handles = [
        child.register_forward_pre_hook(begin(name))
        for name, child in module.named_modules(remove_duplicate=True)
        if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def op_scope() -> Iterator[None]:
    """The scope of one torch op; nothing where no segments are asked for, and within another op."""
    asked = _asked.get()
    if asked is None or asked.inside or not asked.names:
        yield
        return
    import jax

    asked.busy = asked.inside = True
    try:
        with jax.named_scope(f"{_SCOPE}{len(asked.names) - 1}"):
            yield
    finally:
        asked.inside = False


def segment_of(name: str) -> int | None:
    """The segment that the name of an op says; None if it is in none."""
    found = _FOUND.search(name)
    return int(found[1]) if found else None
