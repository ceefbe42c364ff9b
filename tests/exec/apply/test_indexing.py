"""Ops with starts, indices and edges, split in every way, against one device.

`experiments/correctness/indexed_ops.py` has all of them. Starts and indices lie before, at and past the ends.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoshard
from experiments.correctness.indexed_ops import MESHES, Comparison, cases


CASES = {case.name: case for case in cases()}


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "name",
    [
        "roll by 1, set first [1]",
        "roll by 1, set at [2]",
        "sort, set last [1]",
        "repeat by counts [1]",
        "concatenation, add at several [1]",
        "strided slice, update one [1]",
        "nothing, slice eight [2]",
        "windows of 4, clip",
        "slices of rows",
        "updates of one a row",
        "update of a column",
        "updates in a loop",
        "pad inside, cut before [2]",
        "fft over all dims [2]",
        "bitwise xor [2]",
        "parity [1]",
        "one element a device, twice",
    ],
)
def test_indexed_ops_compute_the_same_in_every_split(name: str):
    comparison = Comparison(CASES[name])
    outcomes = {str(pins): comparison.outcome(MESHES["8"], pins) for pins in comparison.splits(MESHES["8"])}
    assert {key: outcome for key, outcome in outcomes.items() if outcome[0] not in ("right", "refused")} == {}
    assert sum(outcome == "right" for outcome, _ in outcomes.values()) >= 3


def test_windows_that_shards_cut_from_one_window_start_where_the_whole_one_does():
    rows = jax.vmap(lambda row, start: lax.dynamic_slice(row, (start,), (8,)))
    args = jnp.arange(64.0).reshape(4, 16), jnp.array([0, 100, -3, 12])
    for dtype in ("int32", "uint8", "int8"):
        given = args[0], args[1].astype(dtype)
        plan = autoshard.plan(
            autoshard.trace(rows, given), topology="cpu:8", mesh={"a": 2, "b": 4}, pins={"result": "b,a"}
        )
        np.testing.assert_array_equal(plan.jit(rows)(*given), jax.jit(rows)(*given))
