"""Comparison of results: tolerance by dtype, noise, and Adam's amplification of noise."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from autoshard.exec.run.result_check import compare, default_tolerance
from autoshard.program import Argument, Program, Result, Role


def program(*results: tuple[str, Role | None], shape: tuple[int, ...] = (4,), dtype: str = "float32") -> Program:
    """Build a program of results that replace an argument of a role, or of none if the role is None."""
    arguments, outs = [], []
    for i, (name, role) in enumerate(results):
        if role is not None:
            arguments.append(Argument(name, shape, dtype, role, i))
        outs.append(Result(name, shape, dtype, len(arguments) - 1 if role is not None else None))
    return Program("p", lambda: None, (), (), tuple(arguments), tuple(outs), b"", "")


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_difference_is_relative_to_the_largest_element():
    check = compare(program(("loss", None)), [array(1, 2, 3, 100.0001)], [array(1, 2, 3, 100)])
    assert check.max_rel_diff == pytest.approx(1e-6, rel=0.1) and check.passed
    assert check.worst is not None and check.worst.name == "loss"
    check = compare(program(("loss", None)), [array(1, 2.1, 3, 100)], [array(1, 2, 3, 100)])
    assert check.max_rel_diff == pytest.approx(1e-3, rel=0.1) and not check.passed


@pytest.mark.parametrize(
    ("found", "wanted", "rel_diff"),
    [
        (array(np.nan, 1), array(np.nan, 1), 0.0),
        (array(np.nan, 1), array(2, 1), math.inf),
        (array(np.inf, 1), array(np.inf, 1), 0.0),
        (array(np.inf, 1), array(3, 1), math.inf),
        (array(0, 0), array(0, 0), 0.0),
        (array(0, 1e-9), array(0, 0), math.inf),
        (np.array([1, 5]), np.array([1, 4]), 0.25),
        (np.array([True, False]), np.array([True, True]), 1.0),
        (np.array([np.nan, 5j], np.complex64), np.array([np.nan, 4j], np.complex64), 0.25),
        (array(1, 2, 3), array(1, 2), math.inf),
        (np.array([], np.float32), np.array([], np.float32), 0.0),
    ],
)
def test_odd_values(found, wanted, rel_diff):
    assert compare(program(("r", None)), [found], [wanted]).max_rel_diff == pytest.approx(rel_diff)


def test_narrow_floats_are_read_and_have_a_wider_tolerance():
    narrow = program(("r", None), dtype="bfloat16")
    value = np.array([1.0, 2.0], ml_dtypes.bfloat16)
    assert compare(narrow, [value], [value]).passed
    assert default_tolerance(narrow) == 3e-2
    assert default_tolerance(program(("r", None))) == 1e-5
    assert compare(narrow, [value], [value], tolerance=0.5).tolerance == 0.5


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e3m4", "float8_e4m3b11fnuz"])
def test_results_in_float8_may_differ_by_one_unit_in_the_last_place(dtype):
    """Count the units by the dtype's own bits; a tolerance that is given has no such exception."""
    narrow = program(("r", None), dtype=dtype)
    largest = np.array([1.0], dtype)
    near, far = ((largest.view(np.uint8) + np.uint8(units)).view(dtype) for units in (1, 2))
    assert compare(narrow, [near], [largest]).passed and compare(narrow, [largest], [near]).passed
    assert not compare(narrow, [far], [largest]).passed
    assert not compare(narrow, [near], [largest], tolerance=1e-5).passed
    wide = program(("r", None))
    assert not compare(wide, [array(1.01)], [array(1)]).passed


ADAM = program(("params.w", Role.PARAMETER), ("opt.0.mu.w", Role.OPTIMIZER_STATE), ("opt.0.nu.w", Role.OPTIMIZER_STATE))
P = array(0, 0, 0, 0)
MU, NU = array(1, -1, 1e-7, 0.5), array(1, 1, 1e-14, 0.25)
UPDATED = array(-0.01, 0.01, -0.01, -0.01)
STATE = [P, MU * 0, NU * 0]


def test_under_adam_moments_explain_what_is_noise():
    """Compare steps whose third gradient is noise: its sign may differ, and so may the whole update."""
    unplanned = [UPDATED, MU, NU]
    flipped = [array(-0.01, 0.01, 0.01, -0.01), array(1, -1, -1e-7, 0.5), NU]
    check = compare(ADAM, flipped, unplanned, before=STATE)
    assert check.passed and check.differences[0].compared == 0.75
    assert check.differences[1].rel_diff == pytest.approx(2e-7)
    # The same parameters with moments that agree are wrong, and so is a difference that moments do not explain.
    assert not compare(ADAM, [flipped[0], MU, NU], unplanned, before=STATE).passed
    wrong = compare(ADAM, [array(-0.01, 0.0101, 0.01, -0.01), *flipped[1:]], unplanned, before=STATE)
    assert not wrong.passed and wrong.worst is not None and wrong.worst.name == "params.w"
    # The check without the state before the step explains nothing.
    assert not compare(ADAM, flipped, unplanned).passed


def test_a_gradient_that_differs_is_caught_by_the_first_moment():
    wrong = [UPDATED, array(1, -1, 1e-3, 0.5), array(1, 1, 1e-6, 0.25)]
    check = compare(ADAM, wrong, [UPDATED, MU, NU], before=STATE)
    assert not check.passed and check.worst is not None and check.worst.name == "opt.0.mu.w"


def test_a_moment_that_is_zero_in_one_run_explains_anything():
    unplanned = [array(-0.01, 0.01, 0, -0.01), array(1, -1, 0, 0.5), array(1, 1, 0, 0.25)]
    assert compare(ADAM, [UPDATED, MU, NU], unplanned, before=STATE).passed


def test_without_two_moments_everything_is_compared():
    momentum = dataclasses.replace(ADAM, arguments=ADAM.arguments[:2], results=ADAM.results[:2])
    check = compare(momentum, [array(1, 1, 1.001, 1), MU], [array(1, 1, 1, 1), MU], before=[P, MU])
    assert not check.passed and check.differences[0].compared == 1.0


def test_a_tensor_that_is_noise_is_compared_on_its_family():
    both = program(
        ("params.b", Role.PARAMETER),
        ("params.w", Role.PARAMETER),
        ("opt.0.mu.b", Role.OPTIMIZER_STATE),
        ("opt.0.mu.w", Role.OPTIMIZER_STATE),
        ("opt.0.nu.b", Role.OPTIMIZER_STATE),
        ("opt.0.nu.w", Role.OPTIMIZER_STATE),
    )
    ones, noise = array(1, 1, 1, 1), array(1e-8, -1e-8, 1e-8, 1e-8)
    before = [ones, ones, ones * 0, ones * 0, ones * 0, ones * 0]
    unplanned = [ones - 1e-3, ones, noise, ones, noise**2, ones]
    planned = [ones + 1e-3, ones, -noise, ones, noise**2, ones]
    check = compare(both, planned, unplanned, before=before)
    assert check.passed
    assert [d.compared for d in check.differences] == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert check.differences[2].rel_diff == pytest.approx(2e-8)
    large = [ones + 1e-3, ones, noise + 1e-3, ones, noise**2, ones]
    assert not compare(both, large, unplanned, before=before).passed
