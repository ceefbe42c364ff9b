"""Values that torch's own kernels save for the backward pass, saved by the layers of a scan too.

JAX saves every intermediate value of a lowering that its derivative reads. Torch's kernels save their input and, for
norms, statistics; the backward pass computes the rest from these. The compiler cannot change which values pass from the
forward loop of a scan to the backward loop, so the lowerings choose them.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any


_STATISTICS = "statistics of a norm"
"""Name of the marked values."""

POINTWISE = ("gelu", "silu", "softplus", "log_sigmoid")
"""Operations of `torch.ops.aten` that save their input alone."""

_on: contextvars.ContextVar[bool] = contextvars.ContextVar("values are saved as by torch", default=False)


@contextlib.contextmanager
def saving_as_torch(on: bool) -> Iterator[None]:
    """Save inputs and marked values alone in the functions of `from_inputs`, while inside and if `on`."""
    token = _on.set(on)
    try:
        yield
    finally:
        _on.reset(token)


def from_inputs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` so that its backward pass recomputes all but the arguments and the values of `marked`.

    Nothing changes outside of `saving_as_torch`. The first argument is an array; others are saved where they are.
    """

    @functools.wraps(function)
    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `function`."""
        if not _on.get():
            return function(x, *args, **kwargs)
        import jax

        policy = jax.checkpoint_policies.save_only_these_names(_STATISTICS)
        return jax.checkpoint(lambda value: function(value, *args, **kwargs), prevent_cse=False, policy=policy)(x)

    return run


def marked(value: Any) -> Any:
    """Return a JAX value that functions of `from_inputs` save."""
    if not _on.get():
        return value
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(value, _STATISTICS)
