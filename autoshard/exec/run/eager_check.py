"""Does a traced torch module compute what it computes in eager torch?

One step runs in eager torch on the host and one in JAX, from the same weights and inputs, and every tensor is
compared: the largest difference over the tensor's own maximum. Two things need care:

- A gradient that is zero in exact arithmetic is rounding noise on both sides. Where a difference exceeds the tolerance,
  eager torch runs once more in float64, and the noise of a tensor is the difference between its two runs: `FACTOR`
  times the noise is allowed, up to `MOST` of the maximum of its family (all gradients, say). Where float64 does not
  run, a tensor whose maximum is below `NOISE` of its family's is compared on the scale of the family.
- Rounding puts an input of a ReLU on the other side of 0 now and then. A difference below `KINK` counts only if other
  inputs show one too.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from autoshard.errors import UserError
from autoshard.program import EagerTwin, Program, named_tensors


TOLERANCE = 1e-5
FACTOR = 8.0
MOST = 1e-3
NOISE = 1e-5
KINK = 5e-2
MOST_PARAMETERS = 200_000_000
MOST_FLOPS = 5e12
"""Model FLOPs of the largest step that runs on the host: about a minute on two cores."""

_Tensors = dict[tuple[str, str], np.ndarray]
"""(kind, name) -> values."""


@dataclasses.dataclass(frozen=True, slots=True)
class EagerDifference:
    """One tensor of the traced step against eager torch's."""

    kind: str
    """`loss`, `output`, `gradient` or `buffer`."""
    name: str
    rel_diff: float
    """Largest difference over the tensor's maximum in eager torch."""
    allowed: float
    """Largest such difference that is rounding."""

    @property
    def within(self) -> bool:
        """True if the difference is rounding."""
        return self.rel_diff <= self.allowed


@dataclasses.dataclass(frozen=True, slots=True)
class EagerCheck:
    """The traced step against eager torch, or the reason why the two were not compared."""

    differences: tuple[EagerDifference, ...] = ()
    form: str = ""
    """The form of the program that was compared (`2 layers of width 256, in float32`); empty for the program itself."""
    skipped: str = ""
    """A sentence: why nothing was compared; else empty."""

    @property
    def agrees(self) -> bool:
        """True if no difference is more than rounding; also where nothing was compared."""
        return all(difference.within for difference in self.differences)

    @property
    def worst(self) -> EagerDifference | None:
        """The largest difference; of those that are more than rounding, if there is any."""
        return max(self.differences, key=lambda each: (not each.within, each.rel_diff), default=None)

    @property
    def compared(self) -> dict[str, int]:
        """Kind -> the number of tensors that were compared."""
        kinds = [difference.kind for difference in self.differences]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def check_eager(program: Program, seed: int = 0) -> EagerCheck:
    """Compare one traced step of a torch module with eager torch, on the host.

    Weights are the module's own, or small random ones. A large `hf:` source is compared in a reduced form. Where eager
    torch cannot run, `skipped` says why.
    """
    try:
        twin = program.eager and program.eager.judged(MOST_PARAMETERS, MOST_FLOPS)
        if twin is None:
            return EagerCheck(
                skipped=f"`{program.name}` is no torch module, so there is no eager torch to compare with."
            )
        module = twin.host_module(seed)
        first = _check(twin, module, seed)
        if first.agrees or max(each.rel_diff for each in first.differences) >= KINK:
            return first
        second = _check(twin, module, seed + 1)
        return first if second.skipped else second
    except UserError as error:
        return EagerCheck(skipped=f"The traced step was not compared with eager torch: {str(error).rstrip('.')}.")


def _check(twin: EagerTwin, module: Any, seed: int) -> EagerCheck:
    """Compare one step with inputs that `seed` draws.

    Raises `UserError` if eager torch gives nothing to compare with.
    """
    batch, wanted = _run_torch(twin, module, seed)
    actual = _of_jax(twin, module, batch)
    differences = _compare(actual, wanted)
    if not all(difference.within for difference in differences):
        exact = _exact(twin, module, batch)
        differences = _compare(actual, wanted, exact)
        if exact and not all(difference.within for difference in differences):
            # In 64 bits no input of a ReLU is on the other side of 0 by rounding.
            traced = _traced_exact(twin, module, batch)
            finer = _compare(traced, exact) if traced else []
            differences = finer if finer and all(each.within for each in finer) else differences
    return EagerCheck(tuple(differences), twin.form)


def _run_torch(twin: EagerTwin, module: Any, seed: int) -> tuple[Mapping[str, Any], _Tensors]:
    """The first of the possible inputs that eager torch takes, and what it computes of them."""
    reason = "random inputs give values that are not finite"
    for batch in twin.inputs(module, seed):
        try:
            wanted = _of_torch(twin, twin.run(module, batch))
        except UserError as error:
            reason = str(error)
            continue
        if all(np.isfinite(value).all() for value in wanted.values() if value.dtype.kind in "fc"):
            return batch, wanted
    raise UserError(reason)


def _of_torch(twin: EagerTwin, eager: tuple[Any, dict[str, Any], dict[str, Any]]) -> _Tensors:
    """Everything that eager torch computes, by name."""
    result, gradients, buffers = eager
    tensors: _Tensors = {}
    if twin.training:
        tensors["loss", "loss"] = _numbers(result)
        tensors |= {("gradient", name): _numbers(value) for name, value in gradients.items()}
    else:
        tensors |= {("output", name): _numbers(leaf) for name, leaf in named_tensors(result)}
    return tensors | {("buffer", name): _numbers(value) for name, value in buffers.items() if twin.keeps_writes}


def _of_jax(twin: EagerTwin, module: Any, batch: Mapping[str, Any]) -> _Tensors:
    """Everything that the traced step computes from the weights of `module`, by the same names.

    A buffer that the step does not give back is unchanged.
    """
    with _on_host():
        result, gradients, buffers = twin.run_traced(module, batch)
        return _of_torch(twin, (result, gradients, buffers))


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    """While inside, JAX computes on the host if it can, and in full precision."""
    import jax

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        stack.enter_context(jax.default_matmul_precision("highest"))
        yield


def _exact(twin: EagerTwin, module: Any, batch: Mapping[str, Any]) -> _Tensors:
    """Everything that eager torch computes in float64; nothing if it does not run so."""
    floats = {key for key, value in batch.items() if np.asarray(value).dtype.kind not in "biuc"}
    wide = {key: np.asarray(value, np.float64) if key in floats else value for key, value in batch.items()}
    try:
        return _of_torch(twin, twin.run(module, wide, double=True))
    except UserError:  # code that names float32 itself meets float64
        return {}


def _traced_exact(twin: EagerTwin, module: Any, batch: Mapping[str, Any]) -> _Tensors:
    """Everything that the traced step computes in float64; nothing if it does not run so."""
    wide = {key: value.astype(np.float64) if value.dtype.kind == "f" else value for key, value in batch.items()}
    try:
        with _on_host():
            return _of_torch(twin, twin.run_traced(module, wide, double=True))
    except Exception:  # code that names float32 itself meets float64, as in eager torch
        return {}


def _compare(actual: _Tensors, wanted: _Tensors, exact: _Tensors | None = None) -> list[EagerDifference]:
    """Compare all tensors; `exact` is eager torch in float64, if the noise of a tensor is asked for."""
    kinds = dict.fromkeys(kind for kind, _ in wanted)
    families = {kind: max(_largest(v) for (own, _), v in wanted.items() if own == kind) for kind in kinds}
    differences = []
    for kind, name in dict.fromkeys((*wanted, *actual)):
        one, other = actual.get((kind, name)), wanted.get((kind, name))
        if one is None or other is None or one.shape != other.shape:
            differences.append(EagerDifference(kind, name, math.inf, TOLERANCE))
            continue
        scale, allowed = _largest(other), TOLERANCE
        true = (exact or {}).get((kind, name))
        if other.dtype.kind not in "fc":
            allowed = 0.0
        elif true is not None and true.shape == other.shape:
            noise = min(FACTOR * _distance(other, true), MOST * families[kind])
            allowed = max(TOLERANCE, _share(noise, scale))
        elif exact is not None and scale < NOISE * families[kind]:
            scale = families[kind]
        differences.append(EagerDifference(kind, name, _share(_distance(one, other), scale), allowed))
    return differences


def _numbers(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return array if array.dtype.kind in "biuc" else array.astype(np.float64)


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    kind = np.complex128 if other.dtype.kind == "c" else np.float64
    a, b = one.astype(kind), other.astype(kind)
    with np.errstate(invalid="ignore"):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(np.nan_to_num(apart, nan=math.inf).max(initial=0.0))


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array[np.isfinite(array)].astype(np.complex128)).max(initial=0.0))


def _share(distance: float, scale: float) -> float:
    if distance == 0.0:
        return 0.0
    return distance / scale if scale > 0 else math.inf


def eager_figures(check: EagerCheck) -> dict[str, Any]:
    """The JSON object of a comparison with eager torch."""
    worst = check.worst
    return {
        "agrees": check.agrees,
        "compared": check.compared,
        "worst": None if worst is None else _figures(worst),
        "form": check.form,
        "skipped": check.skipped,
        "differences": [_figures(each) for each in check.differences],
    }


def _figures(difference: EagerDifference) -> dict[str, Any]:
    return dataclasses.asdict(difference)
