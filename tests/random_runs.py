"""A random program planned for a mesh and run on this machine's CPU devices, against the unplanned one."""

import random
from typing import Any

import numpy as np

import autoshard
from autoshard.errors import UserError
from autoshard.exec.apply.jax_application import compile_lowered
from autoshard.exec.run.check_inputs import drops_nan
from tests.random_programs import TOLERANCE, RandomProgram


MESHES: tuple[dict[str, int], ...] = ({"a": 8}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2})


def expected(program: RandomProgram) -> list[list[Any]]:
    """Return the program's results without a plan, from ordinary arguments and from ones with NaN."""
    import jax

    step = jax.jit(program.function())
    return [[np.asarray(each) for each in step(*program.arguments(nan))] for nan in (False, True)]


def run(program: RandomProgram, mesh: dict[str, int], wanted: list[list[Any]]) -> str:
    """Return `split` or `whole` if the planned program computes the same, `refused: ...`, or `differs: ...`.

    Such a small program is fastest on one device. Some arguments are pinned, so that tensors are split. NaN is not
    compared where XLA's CPU collectives drop it, which they do in plain JAX as well.
    """
    import jax

    traced = autoshard.trace(program.function(), tuple(program.arguments()), donate_argnums=program.donated)
    pins = _pins(program, mesh)
    plan, reason = None, ""
    while plan is None:
        try:
            plan = autoshard.plan(traced, topology="cpu:8", mesh=mesh, pins=pins, time_limit=10.0)
        except UserError as error:
            reason = reason or str(error)
            if not pins:
                return f"refused: {reason}"
            pins.popitem()
    lowered = plan.lower(program.function(), *program.arguments(), donate_argnums=program.donated)
    step = compile_lowered(lowered)
    for nan in (False, True):
        if nan and drops_nan(step.as_text(), "cpu"):
            continue
        placed = (jax.device_put(*each) for each in zip(program.arguments(nan), plan.in_shardings, strict=True))
        found = [np.asarray(each) for each in step(*placed)]
        difference = _differences(found, wanted[nan])
        if difference and _differences(found, _op_by_op(program, nan)):
            return f"differs: {'with NaN, ' * nan}{difference}"
    specs = (*plan.arguments.values(), *plan.results.values(), *(pin.spec for pin in plan.pins))
    return "split" if any(spec.axes for spec in specs) else "whole"


def _op_by_op(program: RandomProgram, nan: bool) -> list[Any]:
    """Return the results of the program's ops, run one after another.

    XLA's simplifier adds the starts of two slices, although the second may be clamped (see `limits.md`). So a step that
    is compiled as a whole may differ from these results on one device.
    """
    return [np.asarray(each) for each in program.function()(*program.arguments(nan))]


def _pins(program: RandomProgram, mesh: dict[str, int]) -> dict[str, str]:
    """Return a spec for some arguments that divides their dims, drawn by the program's seed."""
    draw = random.Random(f"{program.seed} {mesh}")
    pins = {}
    for number, shape in enumerate(program.shapes):
        axes = list(mesh)
        draw.shuffle(axes)
        dims = []
        for size in shape:
            fits = [axis for axis in axes if size and size % mesh[axis] == 0]
            dims.append(fits[0] if fits and draw.random() < 0.7 else "None")
            axes = [axis for axis in axes if axis != dims[-1]]
        if set(dims) - {"None"}:
            pins[f"x{number}"] = ",".join(dims)
    return pins


def _differences(found: list[Any], wanted: list[Any]) -> str:
    """Return the first difference among results; empty if there is none."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        difference = _difference(one, other)
        if difference:
            return f"result {number} {difference}"
    return ""


def _difference(found: Any, wanted: Any) -> str:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"is {found.dtype}{list(found.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    if str(found.dtype) not in TOLERANCE:
        return "" if np.array_equal(found, wanted) else "has other whole numbers"
    wide = np.complex128 if found.dtype.kind == "c" else np.float64
    one, other = found.astype(wide), wanted.astype(wide)
    finite = np.isfinite(other)
    if not np.array_equal(np.where(finite, 0, one), np.where(finite, 0, other), equal_nan=True):
        return "is elsewhere not finite"
    one, other = one[finite], other[finite]
    scale = max(float(np.abs(other).max(initial=0.0)), 1e-3)
    error = float(np.abs(one - other).max(initial=0.0)) / scale
    return "" if error <= TOLERANCE[str(found.dtype)] else f"is off by {error:.2g}"
