"""The kernel over a cache under a plan: each device reads its part, and the result equals the unplanned one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.graph import Op, read_graph
from autoshard.planning import Call, Options, PlanResult, Spec, make_plan
from autoshard.planning.space.dim_groups import factor_states
from autoshard.planning.space.op_strategies import heavy_strategies, result_states
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.program import Program, trace
from autoshard.program.kernels.cached_keys import CachedKeys
from autoshard.program.kernels.decode_attention import cached_attention


LAYERS, BATCH, HEADS, GROUP, LENGTH, DIM = 2, 2, 2, 2, 8192, 128
B, K, P = 0, 1, 5
"""Factors: batch, key heads, parts of the positions."""


def step(query: Any, keys: Any, values: Any, position: Any) -> Any:
    return cached_attention(query, CachedKeys(keys, values, 1, LENGTH // 4), position=position)


@functools.cache
def program(dtype: str = "float32") -> Program:
    cache = jax.ShapeDtypeStruct((LAYERS, BATCH, HEADS, LENGTH, DIM), dtype)
    query = jax.ShapeDtypeStruct((BATCH, HEADS, GROUP, DIM), dtype)
    return trace(step, (query, cache, cache, jax.ShapeDtypeStruct((), jnp.int32)), name="decode")


@functools.cache
def planned() -> PlanResult:
    return make_plan(program(), Options(topology="cpu:8", mesh="a=2,b=2,c=2"))


def call() -> Op:
    (found,) = (op for op in read_graph(program().module).ops if op.opaque is not None)
    return found


def test_its_price_is_that_of_the_places_that_are_read() -> None:
    op = call()
    assert op.opaque is not None and op.rule is not None
    assert op.opaque.traffic == BATCH * HEADS * LENGTH // 4 * 2 * DIM * 4
    assert op.flops == 4 * BATCH * HEADS * GROUP * LENGTH // 4 * DIM
    assert op.steps == op.opaque.traffic // (4 << 20)
    assert op.opaque.imbalance == ((P, 4.0),), "the first quarter has all that is read"


@pytest.mark.parametrize("state", [(B, K, P), (WHOLE, P, P)])
def test_parts_add_up(state: tuple[int, int, int]) -> None:
    graph, op, row = read_graph(program().module), call(), np.array([state])
    assert op.rule is not None and op.opaque is not None
    assert state in {tuple(each) for each in heavy_strategies(graph, op, [2, 2, 2], "cpu").tolist()}

    def spec(states: Any, tensor: int) -> Spec:
        rank = len(graph.tensors[tensor].shape)
        return Spec(tuple(tuple(a for a, at in zip("abc", states[0], strict=True) if at == d) for d in range(rank)))

    into = [spec(factor_states(row, dims), t) for dims, t in zip(op.rule.operands, op.operands, strict=True)]
    out = [spec(np.maximum(result_states(op, row, r), WHOLE), t) for r, t in enumerate(op.results)]
    split = Call(op.number, op.opaque.target, tuple(into), tuple(out))
    plan = dataclasses.replace(planned().plan, calls=(split,))
    random = np.random.default_rng(0)
    given = [random.standard_normal(each.shape).astype(np.float32) for each in program().args[:3]]
    mine, theirs = plan.jit(step), jax.jit(step)
    for position in (700, 5000):
        found, wanted = (run(*given, np.int32(position)) for run in (mine, theirs))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * float(np.abs(wanted).max()))
