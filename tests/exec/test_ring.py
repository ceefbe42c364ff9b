"""A ring of keys and values under a plan: every device computes its part, and the result equals the unplanned one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.graph import Op, find_attentions, read_graph
from autoshard.planning import Call, Options, PlanResult, Spec, make_plan
from autoshard.planning.space.dim_groups import factor_states
from autoshard.planning.space.op_strategies import heavy_strategies, result_states
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.program import Program, ring_attention, trace


BATCH, KV_HEADS, GROUP, SEQ, DIM = 2, 2, 2, 32, 8
B, K, S = 0, 1, 3
"""Factors: batch, key heads, parts of the sequence."""


def step(q: Any, k: Any, v: Any, weights: Any) -> Any:
    def loss(q: Any, k: Any, v: Any) -> Any:
        return (ring_attention(q, k, v, causal=True) * weights).sum()

    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


@functools.cache
def program() -> Program:
    queries, keys = (BATCH, KV_HEADS, GROUP, SEQ, DIM), (BATCH, KV_HEADS, SEQ, DIM)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (queries, keys, keys, queries)]
    return dataclasses.replace(trace(step, tuple(shapes), name="ring"), exchange="ring")


@functools.cache
def planned() -> PlanResult:
    return make_plan(program(), Options(topology="cpu:8", mesh="a=2,b=2,c=2"))


def rings() -> list[Op]:
    graph = read_graph(program().module)
    return [graph.ops[each.op] for each in find_attentions(graph)]


def test_both_calls_are_known_as_rings() -> None:
    attentions = find_attentions(read_graph(program().module))
    assert [(each.forward, each.ring, each.heads) for each in attentions] == [
        (True, True, (2, 2)),
        (False, True, (2, 2)),
    ]
    for each, op in zip(attentions, rings(), strict=True):
        assert op.opaque is not None and op.opaque.head == DIM and op.flops > 0
        assert each.queries == each.keys and S in each.sequence


@pytest.mark.parametrize("state", [(S, S, S), (B, S, S), (K, WHOLE, S), (B, K, S)])
def test_parts_of_the_sequence_add_up(state: tuple[int, int, int]) -> None:
    graph, calls, row = read_graph(program().module), [], np.array([state])

    def spec(states: Any, rank: int) -> Spec:
        return Spec(tuple(tuple(a for a, at in zip("abc", states[0], strict=True) if at == d) for d in range(rank)))

    for op in rings():
        assert op.rule is not None and op.opaque is not None
        assert state in {tuple(each) for each in heavy_strategies(graph, op, [2, 2, 2], "cpu").tolist()}
        ranks = [[len(graph.tensors[t].shape) for t in side] for side in (op.operands, op.results)]
        into = [spec(factor_states(row, dims), rank) for dims, rank in zip(op.rule.operands, ranks[0], strict=True)]
        out = [spec(np.maximum(result_states(op, row, r), WHOLE), rank) for r, rank in enumerate(ranks[1])]
        calls.append(Call(op.number, op.opaque.target, tuple(into), tuple(out)))
    plan = dataclasses.replace(planned().plan, calls=tuple(calls))
    rng = np.random.default_rng(0)
    given = [rng.normal(size=each.shape).astype(np.float32) for each in program().args]
    found, wanted = plan.jit(step)(*given), jax.jit(step)(*given)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(np.abs(want).max()))
