"""Grouped query heads in jax's splash attention: parts of heads, groups and queries add up to the unsplit result."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from autoshard.graph import FactorKind, Op, read_graph
from autoshard.planning import Call, Options, PlanResult, Spec, make_plan
from autoshard.planning.space.dim_groups import factor_states
from autoshard.planning.space.op_strategies import heavy_strategies, result_states
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.program import Program, trace


BATCH, HEADS, KV_HEADS, SEQ, DIM = 2, 4, 2, 256, 128
B, K, G, Q = range(4)
"""Factors: batch, key heads, query heads that share a key head, blocks of queries."""


def attend(q: Any, k: Any, v: Any) -> Any:
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((SEQ, SEQ))] * HEADS)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=128, block_kv=128, block_kv_compute=128, block_q_dkv=128, block_kv_dkv=128, block_kv_dkv_compute=128,
        block_q_dq=128, block_kv_dq=128,
    )  # fmt: skip
    kernel = splash_attention_kernel.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=True)
    return jax.vmap(kernel)(q, k, v)


def step(q: Any, k: Any, v: Any, weights: Any) -> Any:
    def loss(q: Any, k: Any, v: Any) -> Any:
        return (attend(q, k, v) * weights).sum()

    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


def shape(heads: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((BATCH, heads, SEQ, DIM), jnp.float32)


@functools.cache
def grouped() -> Program:
    return trace(step, (shape(HEADS), shape(KV_HEADS), shape(KV_HEADS), shape(HEADS)), name="grouped")


@functools.cache
def planned() -> PlanResult:
    return make_plan(grouped(), Options(topology="cpu:8", mesh="a=2,b=2,c=2"))


def kernels() -> list[Op]:
    return [op for op in read_graph(grouped().module).ops if op.opaque is not None]


def test_heads_are_split_by_those_of_keys_and_then_within_their_groups() -> None:
    for op in kernels():
        assert op.rule is not None and op.opaque is not None
        assert op.rule.sizes[:4] == (BATCH, KV_HEADS, HEADS // KV_HEADS, SEQ // 128)
        # The gradients of keys and values are sums over the query heads that share them, and over the queries.
        inner = FactorKind.REDUCTION if "_dkv_" in op.opaque.target else FactorKind.PARALLEL
        assert op.rule.kinds[:4] == (FactorKind.PARALLEL, FactorKind.PARALLEL, inner, inner)
        assert op.opaque.triangular == ((Q, SEQ // 128),)
        assert op.opaque.dtype == "float32" and op.opaque.head == DIM, "not the mask's table of int8"
        strategies = heavy_strategies(read_graph(grouped().module), op, [2, 2, 2], "cpu")
        states = {tuple(state) for state in strategies.tolist()}
        assert (B, K, G) in states and (K, G, Q) in states
        assert (G, WHOLE, WHOLE) not in states and (G, K, WHOLE) not in states, "parts of a group lie within a part"


@pytest.mark.parametrize("state", [(B, K, G), (K, G, Q)])
def test_parts_add_up(state: tuple[int, int, int]) -> None:
    calls = []
    graph = read_graph(grouped().module)
    row = np.array([state])

    def spec(states: Any, rank: int) -> Spec:
        return Spec(tuple(tuple(a for a, at in zip("abc", states[0], strict=True) if at == d) for d in range(rank)))

    for op in kernels():
        assert op.rule is not None and op.opaque is not None
        ranks = [[len(graph.tensors[t].shape) for t in side] for side in (op.operands, op.results)]
        into = [spec(factor_states(row, dims), rank) for dims, rank in zip(op.rule.operands, ranks[0], strict=True)]
        out = [spec(np.maximum(result_states(op, row, r), WHOLE), rank) for r, rank in enumerate(ranks[1])]
        calls.append(Call(op.number, op.opaque.target, tuple(into), tuple(out)))
    plan = dataclasses.replace(planned().plan, calls=tuple(calls))
    rng = np.random.default_rng(0)
    given = [rng.normal(size=each.shape).astype(np.float32) for each in grouped().args]
    found, wanted = plan.jit(step)(*given), jax.jit(step)(*given)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * float(np.abs(want).max()))
