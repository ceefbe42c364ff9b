"""Compiled FLOPs against the program's: rematerialisation explains some, and these cause no complaint."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autoshard.exec import estimate
from autoshard.exec.hlo.compiled_flops import TOLERANCE, FlopCheck, check_flops
from autoshard.program import trace
from tests.exec.hlo.test_estimate import MESH, matmul, module


@pytest.mark.parametrize(
    ("compiled", "remat", "sentence"),
    [
        (100.0, 0.0, ""),
        (100.0 * (1 + 0.9 * TOLERANCE), 0.0, ""),
        (120.0, 20.0, ""),
        (150.0, 0.0, "does 1.50 x the matrix flops of the traced one: several devices do the same work, or a loop"),
        (150.0, 20.0, "does 1.50 x the matrix flops of the traced one (20% may be the compiler's recompute): several"),
        (50.0, 20.0, "does 0.50 x the matrix flops of the traced one: a loop runs more often than was read, or a"),
    ],
)
def test_what_remat_does_not_explain_is_reported(compiled: float, remat: float, sentence: str) -> None:
    found = FlopCheck(100.0, compiled, remat, 80.0)
    assert found.model_ratio == compiled / 80
    assert (sentence in found.complaint) if sentence else found.complaint == ""


def test_flops_of_all_devices_are_compared_with_the_program() -> None:
    shapes = (jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),) * 2
    program = trace(lambda a, b: a @ b, shapes, name="product")
    estimated = estimate(module(matmul("d").replace("%d", "ROOT %d")), MESH)
    check = check_flops(program, estimated, 16)
    assert check.program == 2 * 4096**3 and check.compiled == 16 * check.program and check.remat == 0
    assert check.complaint.startswith("the compiled program does 16.00 x")
    assert not check_flops(program, estimated, 1).complaint


def test_recompute_is_known_by_its_name() -> None:
    text = module(matmul("d.remat") + matmul("e", "d.remat").replace("%e", "ROOT %e"))
    estimated = estimate(text, MESH)
    assert estimated.remat_flops == estimated.flops / 2
    assert dataclasses.replace(estimated, remat_flops=0.0).flops == 2 * 2 * 4096**3
