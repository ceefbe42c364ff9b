"""Kernels of attention under plans: every split of a table adds up to the unplanned result on 8 CPU devices.

The kernels are a ring of keys and values, grouped query heads in jax's splash attention, and a kernel over a cache.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from autoshard.graph import FactorKind, Op, OpGraph, find_attentions, read_graph
from autoshard.planning import Call, Options, Plan, Spec, make_plan
from autoshard.planning.space.dim_groups import factor_states
from autoshard.planning.space.op_strategies import heavy_strategies, result_states
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.program import Program, ring_attention, trace
from autoshard.program.kernels.cached_keys import CachedKeys
from autoshard.program.kernels.decode_attention import cached_attention
from tests.exec.planned_programs import assert_close, f32


B, K = 0, 1
"""Factors of each kernel: batch and key heads."""
RING_PARTS, GROUP, QUERIES, PLACES = 3, 2, 3, 5
"""Further factors: parts of a ring's sequence, query heads of a key head, blocks of queries, places of a cache."""

BATCH, KV_HEADS, GROUPED, RING_SEQ, RING_DIM = 2, 2, 2, 32, 8
HEADS, SEQ, DIM = 4, 256, 128
LAYERS, LENGTH = 2, 8192


def gradients(attend: Callable[..., Any]) -> Callable[..., Any]:
    def step(q: Any, k: Any, v: Any, weights: Any) -> Any:
        return jax.value_and_grad(lambda q, k, v: (attend(q, k, v) * weights).sum(), (0, 1, 2))(q, k, v)

    return step


def splash(q: Any, k: Any, v: Any) -> Any:
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((SEQ, SEQ))] * HEADS)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=128, block_kv=128, block_kv_compute=128, block_q_dkv=128, block_kv_dkv=128, block_kv_dkv_compute=128,
        block_q_dq=128, block_kv_dq=128,
    )  # fmt: skip
    kernel = splash_attention_kernel.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=True)
    return jax.vmap(kernel)(q, k, v)


def ring() -> Program:
    queries, keys = f32(BATCH, KV_HEADS, GROUPED, RING_SEQ, RING_DIM), f32(BATCH, KV_HEADS, RING_SEQ, RING_DIM)
    step = gradients(functools.partial(ring_attention, causal=True))
    return dataclasses.replace(trace(step, (queries, keys, keys, queries), name="ring"), exchange="ring")


def grouped() -> Program:
    queries, keys = f32(BATCH, HEADS, SEQ, DIM), f32(BATCH, KV_HEADS, SEQ, DIM)
    return trace(gradients(splash), (queries, keys, keys, queries), name="grouped")


def cached() -> Program:
    def step(query: Any, keys: Any, values: Any, position: Any) -> Any:
        return cached_attention(query, CachedKeys(keys, values, 1, LENGTH // 4), position=position)

    cache, query = f32(LAYERS, BATCH, KV_HEADS, LENGTH, DIM), f32(BATCH, KV_HEADS, GROUPED, DIM)
    return trace(step, (query, cache, cache, jax.ShapeDtypeStruct((), jnp.int32)), name="decode")


PROGRAMS: dict[str, Callable[[], Program]] = {"ring": ring, "grouped": grouped, "cached": cached}


@functools.cache
def planned(name: str) -> tuple[Program, OpGraph, Plan]:
    program = PROGRAMS[name]()
    return program, read_graph(program.module), make_plan(program, Options(topology="cpu:8", mesh="a=2,b=2,c=2")).plan


def kernels(name: str) -> list[Op]:
    _, graph, _ = planned(name)
    if name == "ring":
        return [graph.ops[each.op] for each in find_attentions(graph)]
    return [op for op in graph.ops if op.opaque is not None]


def split_call(graph: OpGraph, op: Op, state: Sequence[int]) -> Call:
    """Return a kernel's call in which each of the axes a, b and c splits the factor of its place in `state`."""
    assert op.rule is not None and op.opaque is not None
    row = np.array([state])

    def spec(states: Any, tensor: int) -> Spec:
        rank = len(graph.tensors[tensor].shape)
        return Spec(tuple(tuple(a for a, at in zip("abc", states[0], strict=True) if at == d) for d in range(rank)))

    into = [spec(factor_states(row, dims), t) for dims, t in zip(op.rule.operands, op.operands, strict=True)]
    out = [spec(np.maximum(result_states(op, row, r), WHOLE), t) for r, t in enumerate(op.results)]
    return Call(op.number, op.opaque.target, tuple(into), tuple(out))


def states(graph: OpGraph, op: Op) -> set[tuple[int, ...]]:
    return {tuple(state) for state in heavy_strategies(graph, op, [2, 2, 2], "cpu").tolist()}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "state", "relative"),
    [
        *(("ring", (*state, RING_PARTS), 1e-5) for state in ((3, 3), (B, 3), (K, WHOLE), (B, K))),
        *(("grouped", state, 2e-6) for state in ((B, K, GROUP), (K, GROUP, QUERIES))),
        ("cached", (B, K, PLACES), 1e-5),
        pytest.param("cached", (WHOLE, PLACES, PLACES), 1e-5, marks=pytest.mark.full),
    ],
)
def test_parts_add_up(name: str, state: tuple[int, int, int], relative: float) -> None:
    program, graph, plan = planned(name)
    assert all(state in states(graph, op) for op in kernels(name))
    calls = tuple(split_call(graph, op, state) for op in kernels(name))
    assert program.fn is not None
    found, wanted = dataclasses.replace(plan, calls=calls).jit(program.fn), jax.jit(program.fn)
    random = np.random.default_rng(0)
    given = [random.normal(size=each.shape).astype(np.float32) for each in program.args if each.shape]
    for position in ((np.int32(700),), (np.int32(5000),)) if name == "cached" else ((),):
        assert_close(found(*given, *position), wanted(*given, *position), relative)


def test_both_calls_are_known_as_rings() -> None:
    _, graph, _ = planned("ring")
    attentions = find_attentions(graph)
    assert [(each.forward, each.ring, each.heads) for each in attentions] == [
        (True, True, (2, 2)),
        (False, True, (2, 2)),
    ]
    for each, op in zip(attentions, kernels("ring"), strict=True):
        assert op.opaque is not None and op.opaque.head == RING_DIM and op.flops > 0
        assert each.queries == each.keys and RING_PARTS in each.sequence


def test_heads_are_split_by_those_of_keys_and_then_within_their_groups() -> None:
    _, graph, _ = planned("grouped")
    for op in kernels("grouped"):
        assert op.rule is not None and op.opaque is not None
        assert op.rule.sizes[:4] == (BATCH, KV_HEADS, HEADS // KV_HEADS, SEQ // 128)
        # The gradients of keys and values are sums over the query heads that share them, and over the queries.
        inner = FactorKind.REDUCTION if "_dkv_" in op.opaque.target else FactorKind.PARALLEL
        assert op.rule.kinds[:4] == (FactorKind.PARALLEL, FactorKind.PARALLEL, inner, inner)
        assert op.opaque.triangular == ((QUERIES, SEQ // 128),)
        assert op.opaque.dtype == "float32" and op.opaque.head == DIM, "not the mask's table of int8"
        possible = states(graph, op)
        assert (B, K, GROUP) in possible and (K, GROUP, QUERIES) in possible
        assert possible.isdisjoint({(GROUP, WHOLE, WHOLE), (GROUP, K, WHOLE)}), "parts of a group lie within a part"


def test_its_price_is_that_of_the_places_that_are_read() -> None:
    (op,) = kernels("cached")
    assert op.opaque is not None and op.rule is not None
    assert op.opaque.traffic == BATCH * KV_HEADS * LENGTH // 4 * 2 * DIM * 4
    assert op.flops == 4 * BATCH * KV_HEADS * GROUPED * LENGTH // 4 * DIM
    assert op.steps == op.opaque.traffic // (4 << 20)
    assert op.opaque.imbalance == ((PLACES, 4.0),), "the first quarter has all that is read"
