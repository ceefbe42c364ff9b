"""Comparison of a traced torch module with eager torch.

One step runs in eager torch on the host and one in JAX, from the same weights and inputs. Each tensor's difference is
its largest element-wise difference over the tensor's own maximum. Two cases require care:

- A gradient that is zero in exact arithmetic is rounding noise on both sides. If a difference exceeds the tolerance,
  eager torch runs again in float64. The noise of a tensor is the difference between its two runs. A difference of
  `FACTOR` times the noise is allowed. It may not exceed `MOST` times the maximum of the tensor's family (all gradients,
  say). If float64 does not run, a tensor whose maximum is below `NOISE` of its family's is compared on the family's
  scale.
- Rounding occasionally puts an input of a ReLU on the other side of 0. A difference below `KINK` counts only if other
  inputs show one too.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from autoshard.errors import UserError
from autoshard.exec.run.exact_step import on_host
from autoshard.program import EagerTwin, Program, named_tensors


TOLERANCE = 1e-5
"""Largest relative difference that always counts as rounding."""
FACTOR = 8.0
"""Allowed difference, in multiples of a tensor's noise."""
MOST = 1e-3
"""Largest difference allowed as noise, as a share of the maximum of the tensor's family."""
ZERO = 0.5
"""Distance from float64 at which a tensor in float32 is zero but for rounding, as a share of its maximum."""
NOISE = 1e-5
"""Share of the family's maximum below which a whole tensor is noise, if float64 does not run."""
KINK = 5e-2
"""Largest relative difference that one input of a ReLU on the other side of 0 may explain."""
MOST_PARAMETERS = 200_000_000
"""Parameters of the largest model that runs on the host."""
MOST_FLOPS = 5e12
"""Model FLOPs of the largest step that runs on the host: about a minute on two cores."""

_Tensors = dict[tuple[str, str], np.ndarray]
"""(kind, name) of a tensor -> its values."""


@dataclasses.dataclass(frozen=True, slots=True)
class EagerDifference:
    """Comparison of one tensor of the traced step with eager torch."""

    kind: str
    """Kind of the tensor: `loss`, `output`, `gradient` or `buffer`."""
    name: str
    """Name of the parameter, buffer or output; `loss` for the loss."""
    rel_diff: float
    """Largest difference over the tensor's maximum in eager torch; infinite for a missing tensor or another shape."""
    allowed: float
    """Largest such difference that counts as rounding."""
    is_zero: bool = False
    """True if the tensor is zero but for rounding: float64 gives other values."""

    @property
    def within(self) -> bool:
        """True if the difference counts as rounding."""
        return self.rel_diff <= self.allowed


@dataclasses.dataclass(frozen=True, slots=True)
class EagerCheck:
    """Comparison of the traced step with eager torch, or the reason why there is none."""

    differences: tuple[EagerDifference, ...] = ()
    """Comparisons of all tensors of the step."""
    form: str = ""
    """Reduced form that was compared (`2 layers of width 256, in float32`); empty for the program itself."""
    skipped: str = ""
    """Sentence with the reason why nothing was compared; else empty."""

    @property
    def agrees(self) -> bool:
        """True if every difference counts as rounding, or if nothing was compared."""
        return all(difference.within for difference in self.differences)

    @property
    def worst(self) -> EagerDifference | None:
        """The largest difference that exceeds its limit, else the largest one of a tensor that is not zero; None if
        nothing was compared.
        """
        return max(self.differences, key=lambda each: (not each.within, not each.is_zero, each.rel_diff), default=None)

    @property
    def zeros(self) -> tuple[str, ...]:
        """Names of the tensors within their limits that are zero but for rounding."""
        return tuple(each.name for each in self.differences if each.is_zero and each.within)

    @property
    def compared(self) -> dict[str, int]:
        """Kind -> number of tensors that were compared."""
        kinds = [difference.kind for difference in self.differences]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def check_eager(program: Program, seed: int = 0) -> EagerCheck:
    """Compare one traced step of a torch module with eager torch, on the host.

    Weights are the module's own, or small random ones. A large `hf:` source is compared in a reduced form. A difference
    below `KINK` is compared again with the inputs of `seed` + 1. If the program is no torch module or eager torch
    cannot run, `skipped` has the reason; nothing is raised for that.
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
        # A small difference may be a ReLU's input on the other side of 0: it counts only if other inputs show one too.
        second = _check(twin, module, seed + 1)
        return first if second.skipped else second
    except UserError as error:
        return EagerCheck(skipped=f"The traced step was not compared with eager torch: {str(error).rstrip('.')}.")


def _check(twin: EagerTwin, module: Any, seed: int) -> EagerCheck:
    """Compare one step with inputs that `seed` draws.

    If float32 differs, noise and then both steps in float64 decide (file docstring). Raises `UserError` if eager torch
    gives nothing to compare with.
    """
    batch, eager = _run_torch(twin, module, seed)
    actual = _of_jax(twin, module, batch)
    differences = _compare(actual, eager)
    if not all(difference.within for difference in differences):
        exact = _exact(twin, module, batch)
        differences = _compare(actual, eager, exact)
        if exact and not all(difference.within for difference in differences):
            # In float64, rounding puts no input of a ReLU on the other side of 0.
            traced = _traced_exact(twin, module, batch)
            finer = _compare(traced, exact) if traced else []
            differences = finer if finer and all(each.within for each in finer) else differences
    return EagerCheck(tuple(differences), twin.form)


def _run_torch(twin: EagerTwin, module: Any, seed: int) -> tuple[Mapping[str, Any], _Tensors]:
    """Return the first candidate inputs that eager torch accepts and that give finite values, and the values.

    Raises `UserError` with the last candidate's error if there are none.
    """
    reason = "random inputs give values that are not finite"
    for batch in twin.inputs(module, seed):
        try:
            eager = _of_torch(twin, twin.run(module, batch))
        except UserError as error:
            reason = str(error)
            continue
        if all(np.isfinite(value).all() for value in eager.values() if value.dtype.kind in "fc"):
            return batch, eager
    raise UserError(reason)


def _of_torch(twin: EagerTwin, eager: tuple[Any, dict[str, Any], dict[str, Any]]) -> _Tensors:
    """Return every tensor that a step computes, by kind and name.

    - `eager`: result, gradients and buffers of the step.

    Training steps have the loss and gradients, others the outputs. Buffers count only if the program returns writes to
    them.
    """
    result, gradients, buffers = eager
    tensors: _Tensors = {}
    if twin.training:
        tensors["loss", "loss"] = _numbers(result)
        tensors |= {("gradient", name): _numbers(value) for name, value in gradients.items()}
    else:
        tensors |= {("output", name): _numbers(leaf) for name, leaf in named_tensors(result)}
    return tensors | {("buffer", name): _numbers(value) for name, value in buffers.items() if twin.keeps_writes}


def _of_jax(twin: EagerTwin, module: Any, batch: Mapping[str, Any]) -> _Tensors:
    """Return every tensor that the traced step computes from the weights of `module`, by the same names.

    A buffer that the step does not return is unchanged.
    """
    with on_host():
        result, gradients, buffers = twin.run_traced(module, batch)
        return _of_torch(twin, (result, gradients, buffers))


def _exact(twin: EagerTwin, module: Any, batch: Mapping[str, Any]) -> _Tensors:
    """Return every tensor that eager torch computes with float inputs widened to float64.

    Empty if the module does not run in float64.
    """
    floats = {key for key, value in batch.items() if np.asarray(value).dtype.kind not in "biuc"}
    wide = {key: np.asarray(value, np.float64) if key in floats else value for key, value in batch.items()}
    try:
        return _of_torch(twin, twin.run(module, wide, double=True))
    except UserError:  # the module fixes float32 somewhere and fails on float64
        return {}


def _traced_exact(twin: EagerTwin, module: Any, batch: Mapping[str, Any]) -> _Tensors:
    """Return every tensor that the traced step computes in float64; empty if that raises any error."""
    wide = {key: value.astype(np.float64) if value.dtype.kind == "f" else value for key, value in batch.items()}
    try:
        with on_host():
            return _of_torch(twin, twin.run_traced(module, wide, double=True))
    except Exception:  # the step fixes float32 somewhere and fails on float64
        return {}


def _compare(actual: _Tensors, wanted: _Tensors, exact: _Tensors | None = None) -> list[EagerDifference]:
    """Compare all tensors of either step, in the order of `wanted`; a missing one or another shape differs infinitely.

    - `actual`, `wanted`: tensors of the traced step and of eager torch.
    - `exact`: tensors of eager torch in float64, empty if it failed; None to allow only the plain tolerance.

    Whole numbers and booleans must be equal. The file docstring has the rules for floats.
    """
    kinds = dict.fromkeys(kind for kind, _ in wanted)
    families = {kind: max(_largest(v) for (own, _), v in wanted.items() if own == kind) for kind in kinds}
    differences = []
    for kind, name in dict.fromkeys((*wanted, *actual)):
        one, other = actual.get((kind, name)), wanted.get((kind, name))
        if one is None or other is None or one.shape != other.shape:
            differences.append(EagerDifference(kind, name, math.inf, TOLERANCE))
            continue
        scale, allowed, is_zero = _largest(other), TOLERANCE, False
        true = (exact or {}).get((kind, name))
        if other.dtype.kind not in "fc":
            allowed = 0.0
        elif true is not None and true.shape == other.shape:
            noise = min(FACTOR * _distance(other, true), MOST * families[kind])
            allowed = max(TOLERANCE, _share(noise, scale))
            is_zero = _distance(other, true) >= ZERO * scale > 0
        elif exact is not None and scale < NOISE * families[kind]:
            scale = families[kind]
        differences.append(EagerDifference(kind, name, _share(_distance(one, other), scale), allowed, is_zero))
    return differences


def _numbers(value: Any) -> np.ndarray:
    """Convert a value to a numpy array, of float64 unless it is boolean, whole or complex."""
    array = np.asarray(value)
    return array if array.dtype.kind in "biuc" else array.astype(np.float64)


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest element-wise difference; NaN equals NaN, and any other NaN counts as infinite."""
    kind = np.complex128 if other.dtype.kind == "c" else np.float64
    a, b = one.astype(kind), other.astype(kind)
    with np.errstate(invalid="ignore"):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(np.nan_to_num(apart, nan=math.inf).max(initial=0.0))


def _largest(array: np.ndarray) -> float:
    """Return the largest finite magnitude in an array; 0 if there is none."""
    return float(np.abs(array[np.isfinite(array)].astype(np.complex128)).max(initial=0.0))


def _share(distance: float, scale: float) -> float:
    """Return a difference over a scale; infinite for a nonzero difference on scale 0."""
    if distance == 0.0:
        return 0.0
    return distance / scale if scale > 0 else math.inf


def eager_figures(check: EagerCheck) -> dict[str, Any]:
    """Return the JSON object of a comparison with eager torch; `worst` is None if nothing was compared."""
    worst = check.worst
    return {
        "agrees": check.agrees,
        "compared": check.compared,
        "worst": None if worst is None else _figures(worst),
        "zeros": list(check.zeros),
        "form": check.form,
        "skipped": check.skipped,
        "differences": [_figures(each) for each in check.differences],
    }


def _figures(difference: EagerDifference) -> dict[str, Any]:
    """Convert a difference to a JSON object of its fields."""
    return dataclasses.asdict(difference)
