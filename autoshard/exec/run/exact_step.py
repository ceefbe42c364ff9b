"""Rounding of an unplanned step, by the same step in float64 on the host."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autoshard.program import Program


MOST = 1e-3
"""Largest rounding that is believed, as a share of the maximum of all results of a role: more may be another branch."""


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Run JAX on its CPU device, if it has one, and with float32 products in full precision, within the `with`
    block.
    """
    import jax

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        stack.enter_context(jax.default_matmul_precision("highest"))
        yield


def exact_floor(
    program: Program, arguments: Any, unplanned: Sequence[Any], noise: Sequence[float], narrow: bool
) -> list[float]:
    """Return the noise, raised to the distance of each float result from that of the step in float64.

    - `arguments`: arguments of the step.
    - `unplanned`: flat results of the unplanned step for them.
    - `noise`: noise of each result so far, which is not modified.
    - `narrow`: True if the step multiplies floats below 32 bits, whose rounding is no step of float64's.

    The noise is returned as it is for a narrow step, and for one that does not run in float64. The same holds if a
    result that is no updated state changes by more than `MOST` of its maximum.
    """
    exact = None if narrow else _exact(program, arguments)
    if exact is None or len(exact) != len(unplanned):
        return list(noise)
    distances, sizes, roles = [], dict[Any, float](), []
    for result, true, value in zip(program.results, exact, unplanned, strict=True):
        one, other = np.asarray(true), np.asarray(value)
        if one.shape != other.shape or other.dtype.kind != "f":
            distances.append(0.0)
        else:
            apart = np.abs(one.astype(np.float64) - other.astype(np.float64))
            distances.append(float(apart[np.isfinite(apart)].max(initial=0.0)))
        floats = other.astype(np.float64) if other.dtype.kind == "f" else np.zeros(1)
        largest = float(np.abs(floats[np.isfinite(floats)]).max(initial=0.0))
        if result.argument is None and distances[-1] > MOST * largest:
            return list(noise)
        # Moments of first and second order differ in size, as parameters and their moments do.
        name = program.arguments[result.argument].name if result.argument is not None else result.name
        family = (result.argument is None or program.arguments[result.argument].role, ".".join(name.split(".")[:2]))
        roles.append(family)
        sizes[family] = max(sizes.get(family, 0.0), largest)
    return [max(n, min(d, MOST * sizes[role])) for n, d, role in zip(noise, distances, roles, strict=True)]


def _exact(program: Program, arguments: Any) -> list[Any] | None:
    """Return the flat results of the step with its floats widened to float64; None if it does not run so.

    A mixture that drops tokens would keep them in float64, and is left out.
    """
    import jax

    function = program.eager.function if program.eager is not None else None
    if program.fn is None or function is not None and function.drops_tokens:
        return None

    def wide(leaf: Any) -> Any:
        """Return a host copy of an argument, in float64 if it has float32."""
        array = np.asarray(leaf)
        return array.astype(np.float64) if array.dtype == np.float32 else array

    try:
        with on_host(), jax.enable_x64(True), function.as_eager(True) if function else contextlib.nullcontext():
            results = jax.jit(lambda *given: program.fn(*given))(*jax.tree.map(wide, arguments))
            return [np.array(value) for value in jax.tree.leaves(results)]
    except Exception:  # the step fixes float32 somewhere and fails on float64
        return None
