"""A random program planned for a mesh and run on the CPU devices that are here, beside the unplanned one."""

import random
from typing import Any

import numpy as np

import autoshard
from autoshard.errors import UserError
from tests.random_programs import TOLERANCE, RandomProgram


MESHES: tuple[dict[str, int], ...] = ({"a": 8}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2})


def expected(program: RandomProgram) -> list[Any]:
    """What the program computes without a plan."""
    import jax

    return [np.asarray(each) for each in jax.jit(program.function())(*program.arguments())]


def run(program: RandomProgram, mesh: dict[str, int], wanted: list[Any]) -> str:
    """`split` or `whole` where the planned program computes the same, `refused: ...`, or `differs: ...`.

    So small a program is fastest on one device: specs of some arguments are asked for, so that something is split.
    """
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
    found = plan.jit(program.function())(*program.arguments())
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        difference = _difference(np.asarray(one), other)
        if difference:
            return f"differs: result {number} {difference}"
    specs = (*plan.arguments.values(), *plan.results.values(), *(pin.spec for pin in plan.pins))
    return "split" if any(spec.axes for spec in specs) else "whole"


def _pins(program: RandomProgram, mesh: dict[str, int]) -> dict[str, str]:
    """For arguments a spec that divides their dims, drawn by the program's seed."""
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


def _difference(found: Any, wanted: Any) -> str:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"is {found.dtype}{list(found.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    if str(found.dtype) not in TOLERANCE:
        return "" if np.array_equal(found, wanted) else "has other whole numbers"
    wide = np.complex128 if found.dtype.kind == "c" else np.float64
    one, other = found.astype(wide), wanted.astype(wide)
    if not np.isfinite(other).all():
        return "" if np.array_equal(one, other, equal_nan=True) else "is elsewhere not finite"
    scale = max(float(np.abs(other).max(initial=0.0)), 1e-3)
    error = float(np.abs(one - other).max(initial=0.0)) / scale
    return "" if error <= TOLERANCE[str(found.dtype)] else f"is off by {error:.2g}"
