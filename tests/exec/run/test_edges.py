"""Checks of measured steps with edge-case arguments: indices at and past the ends, ties, NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoshard
from autoshard import mlir
from autoshard.exec.run.check_inputs import BEYOND, ENDS, UNDEFINED, edge_arguments
from autoshard.exec.run.measurement import measure


X, IDS = jax.ShapeDtypeStruct((16, 8), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
MESH = {"d": 8}


def crop(x, i):
    return lax.dynamic_slice(x, (i[0], 0), (8, 8))


def planned(fn, *args, **pins: str):
    program = autoshard.trace(fn, args)
    plan = autoshard.plan(program, topology="cpu:8", mesh=MESH, pins=pins)
    return program, plan


@pytest.mark.parametrize(
    ("fn", "sizes"),
    [
        (lambda x, i: x[i], {1: (16,)}),
        (lambda x, i: x.at[i].add(1), {1: (16,)}),
        (lambda x, i: jnp.take_along_axis(x[:8], i[:, None], 1), {1: (8,)}),
        (lambda x, i: lax.dynamic_slice(x, (i[0], i[1]), (2, 2)), {1: (8, 16)}),
        (lambda x, i: lax.dynamic_update_slice(x, x[:1], (i[0], 0)), {1: (16,)}),
        (lambda x, i: lax.scan(lambda c, t: (c + x[t], None), x[0], i)[0], {1: (16,)}),
        (lambda x, i: lax.fori_loop(0, i[0], lambda k, c: c + x[i[k]], x[0]), {}),  # the index is a number of trips
        (lambda x, i: x[:8] * i[:, None], {}),
    ],
)
def test_indices_are_known_with_the_sizes_that_they_index(fn, sizes: dict[int, tuple[int, ...]]):
    program = autoshard.trace(fn, (X, IDS))
    with mlir.new_context() as context:
        assert mlir.indexed_sizes(mlir.parse_module(program.module, context)) == sizes


def test_edges_have_ends_numbers_past_them_ties_and_nan():
    program = autoshard.trace(lambda x, i: x[i], (X, IDS))
    leaves = [np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8), np.full(8, 5, np.int32)]
    edges = edge_arguments(program, leaves, 0)
    assert list(edges) == [ENDS, BEYOND, UNDEFINED]
    assert set(edges[ENDS][1]) == {5, 0, 15} and len(np.unique(edges[ENDS][0])) <= 5
    beyond = set(edges[BEYOND][1].tolist()) - {5}
    assert beyond and all(index < 0 or index >= 16 for index in beyond)
    assert np.isnan(edges[UNDEFINED][0]).sum() == 1 and (edges[UNDEFINED][1] == 5).all()


def test_nan_is_not_given_to_python_on_the_host():
    def strict(x):
        assert not np.isnan(x).any()
        return x

    fn = lambda x: jax.pure_callback(strict, jax.ShapeDtypeStruct((16, 8), jnp.float32), x) * 2  # noqa: E731
    program, plan = planned(fn, X)
    found = measure(program, plan, steps=1, warmup=0, check=True)
    assert found.check.passed and found.edges[UNDEFINED] is None


def test_the_check_sees_a_clamp_that_is_lost(monkeypatch: pytest.MonkeyPatch):
    program, plan = planned(crop, X, IDS, result="d,None")
    right = measure(program, plan, steps=1, warmup=0, check=True)
    assert not right.failed and set(right.edges) == {ENDS, BEYOND, UNDEFINED}
    monkeypatch.setattr(mlir, "guard_indexing", lambda module: None)
    wrong = measure(program, plan, steps=1, warmup=0, check=True)
    assert wrong.check is not None and wrong.check.passed  # arguments in range show no difference
    beyond = wrong.edges[BEYOND]
    assert wrong.failed and beyond is not None and not beyond.passed


def test_nan_is_not_compared_where_collectives_drop_it():
    largest = planned(lambda x: jnp.max(x, 0), X, x="d,None")
    total = planned(lambda x: jnp.sum(x, 0), X, x="d,None")
    measured = [measure(program, plan, steps=1, warmup=0, check=True) for program, plan in (largest, total)]
    assert measured[0].edges[UNDEFINED] is None and not measured[0].failed
    check = measured[1].edges[UNDEFINED]
    assert check is not None and check.passed
