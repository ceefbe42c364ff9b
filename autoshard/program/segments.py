"""Segments of a program, between which it can be cut into pipeline stages.

A segment of a torch module is the code from the start of one of its modules to the start of the next. JAX code marks
its segments by `segment`. Each op is traced in a scope with the number of its segment, which its gradient inherits. The
planner can therefore assign ops to segments.
"""

import contextlib
import contextvars
import dataclasses
import enum
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from autoshard.errors import UserError


_SCOPE = "segment"
_FOUND = re.compile(rf"\b{_SCOPE}(\d+)\b")


class Part(enum.IntEnum):
    """A part of a step."""

    FORWARD = 0
    """Forward pass of a microbatch."""
    BACKWARD = 1
    """Backward pass of a microbatch, with recomputation."""
    UPDATE = 2
    """Work done once a step for any number of microbatches: sums of gradients over devices, and the optimizer."""


class NotDividedError(UserError):
    """Raised when the microbatches do not divide the batch."""


@dataclasses.dataclass(slots=True)
class Segments:
    """Request for segments of what is traced, and the segments of the last traced torch module or JAX function."""

    microbatches: int
    """Number of equal parts that inputs are cut into along their first dim; one part is traced."""
    names: list[str] = dataclasses.field(default_factory=list)
    """Name of each segment in the order of execution: that of the outermost module that starts it, or of its mark."""
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    """Number of calls of each module, by name."""
    batch: int = 0
    """Examples in the whole batch: the first dim of the first input."""
    module: Any = None
    """The torch module itself, once it has run."""
    busy: bool = False
    """True if an op has run since the last module started."""
    inside: bool = False
    """True if an op is running, which may consist of other ops."""

    @property
    def may_cut(self) -> list[bool]:
        """True for each segment, in order, that a stage may start with: the first one, or one whose module is called
        once.
        """
        return [index == 0 or self.calls[name] <= 1 for index, name in enumerate(self.names)]


_asked: contextvars.ContextVar[Segments | None] = contextvars.ContextVar("segments", default=None)


@contextlib.contextmanager
def in_segments(microbatches: int) -> Iterator[Segments]:
    """Trace torch modules with one microbatch, unscanned layers and a scope for each op, while inside.

    JAX code is traced with a scope for each of its marked segments. Yields the `Segments` that the trace fills.
    """
    asked = Segments(microbatches)
    token = _asked.set(asked)
    try:
        # Traces that JAX remembers from other requests would add no names here.
        with _jax_context()(next(_REQUESTS)):
            yield asked
    finally:
        _asked.reset(token)


@functools.cache
def _jax_context() -> Any:
    """Return a context that is part of JAX's tracing cache key, so that jitted parts are retraced with their scopes."""
    import jax

    return jax.make_user_context(None)


_REQUESTS = itertools.count()


@contextlib.contextmanager
def segment(name: str) -> Iterator[None]:
    """Mark the JAX code inside as a segment of a step, which may begin a pipeline stage.

    ::

        for number, block in enumerate(params["blocks"]):
            with autoshard.segment(f"block {number}"):
                x = layer(block, x)

    Code between segments joins the segment whose values it uses. The mark does nothing unless a program for each stage
    is planned or run (`--schedule 1f1b`). A segment inside of another one is a part of it.

    - `name`: name of the segment, one of its own for each.

    Raises `UserError` for a name that is empty or no text.
    """
    if not isinstance(name, str) or not name:
        raise UserError(f"autoshard.segment takes a name such as `block 0`; found {name!r}.")
    asked = _asked.get()
    if asked is None or asked.inside:
        yield
        return
    import jax

    if name not in asked.names:
        asked.names.append(name)
    asked.inside = True
    try:
        with jax.named_scope(f"{_SCOPE}{asked.names.index(name)}"):
            yield
    finally:
        asked.inside = False


def asked_segments() -> Segments | None:
    """Return the `Segments` of the enclosing `in_segments`, or None outside of it."""
    return _asked.get()


def one_microbatch(inputs: Any, kwargs: Any, targets: Any) -> tuple[Any, Any, Any]:
    """Return the first microbatch of inputs, keyword arguments and targets if segments are requested; else all
    unchanged.

    Tensors of at least one dim are cut along their first dim. The request's `batch` becomes the first dim of the first
    tensor.

    Raises `NotDividedError` if the first dim of a tensor is no multiple of the number of microbatches.
    """
    if (requested := _asked.get()) is None:
        return inputs, kwargs, targets
    import torch
    from torch.utils import _pytree

    asked = requested
    asked.batch = 0
    count = asked.microbatches

    def part(value: Any) -> Any:
        """Return the first part of a tensor with dims, and any other value unchanged."""
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
    """Return the divisor of the batch that is nearest to `count`; of two equally near ones the smaller."""
    return min((n for n in range(1, batch + 1) if batch % n == 0), key=lambda n: (abs(n - count), n))


@contextlib.contextmanager
def watching(module: Any) -> Iterator[None]:
    """Record the segments of one run of the module in the request while inside; do nothing if none are requested.

    Earlier records of the request are reset. A segment starts where a submodule is called after an op has run. It has
    the name of the first named module that is called there.
    """
    if (requested := _asked.get()) is None:
        yield
        return
    asked = requested
    asked.module, asked.names, asked.calls, asked.busy = module, [""], Counter(), False

    def begin(name: str) -> Any:
        """Return the hook that runs before the module `name`."""

        def hook(*_: Any) -> None:
            """Count the call, and start a segment if an op has run since the last one started."""
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
    """Enter the scope of one torch op, named by the present segment's number, while inside.

    It is a no-op inside another op, and if no segments are requested or recorded yet.
    """
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
    """Return the number of the segment in the name of an op, or None if the op is in no segment."""
    match = _FOUND.search(name)
    return int(match[1]) if match else None
