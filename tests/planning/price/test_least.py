"""Least time of a program: its matrix work alone, computed by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost import Topology, load_calibration
from autoshard.planning.price.analysed_program import analyse_program, least_seconds
from autoshard.program import trace
from tests.graph.programs import bf16


def seconds(fn: Any, *args: Any) -> float:
    graph = analyse_program(trace(fn, args), "tpu").graph
    return least_seconds(graph, Topology.parse("v5e:4x4"), load_calibration("v5e"))


def test_matmuls_run_on_all_devices_at_the_calibrated_share_of_their_peak() -> None:
    one = 2 * 256 * 512 * 128 / (197e12 * load_calibration("v5e").matmul_efficiency * 16)
    x, w = bf16(256, 512), bf16(512, 128)
    assert seconds(lambda x, w: x @ w, x, w) == pytest.approx(one)
    repeated = seconds(lambda x, w: jax.lax.fori_loop(0, 5, lambda i, s: s + jnp.sum(x @ w), jnp.bfloat16(0)), x, w)
    assert repeated == pytest.approx(5 * one)


@pytest.mark.parametrize("words", ["ij,ij->", "ij,ij->i", "ij,ij->ij"])
def test_products_of_what_has_the_same_dims_are_no_matmuls(words: str) -> None:
    """Price no matrix work: XLA multiplies and sums such operands elementwise, at the speed of memory."""
    assert seconds(lambda x, y: jnp.einsum(words, x, y), bf16(256, 512), bf16(256, 512)) == 0.0
