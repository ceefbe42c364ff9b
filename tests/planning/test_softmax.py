"""Attention's scores are priced by their local shape on TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost import Topology, make_mesh
from autoshard.planning import Options, make_plan
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.price.evaluate import evaluate, spec_of
from autoshard.planning.price.op_prices import price_ops
from autoshard.planning.price.step_ledger import itemise
from autoshard.planning.space.decision_model import Model
from autoshard.program import Program, trace
from tests.planning import programs as made


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bkgsd,bktd->bkgst", q, k).astype(jnp.float32)
    return jnp.einsum("bkgst,bktd->bkgsd", jax.nn.softmax(scores).astype(q.dtype), v)


def program(batch: int = 16, heads: int = 16, groups: int = 4, queries: int = 1024, keys: int = 1024) -> Program:
    def half(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    kv = half(batch, heads, keys, 128)
    return trace(attention, (half(batch, heads, groups, queries, 128), kv, kv), name="attention")


@functools.cache
def model(topology: str) -> Model:
    parsed = Topology.parse(topology)
    given = program()
    return build_model(
        given, analyse_program(given, parsed.backend), make_mesh(parsed, {"data": 4, "model": 4}), parsed.usable_bytes
    )


@pytest.mark.parametrize(
    ("split", "again"),
    [
        # Compiled for v5e: local scores, with dims b k g s t.
        ({0: ("data",), 1: ("model",)}, False),  # [4, 4, 4, 1024, 1024]
        ({0: ("data",), 3: ("model",)}, False),  # [4, 16, 4, 256, 1024]
        ({0: ("data", "model")}, True),  # [1, 16, 4, 1024, 1024]
        ({1: ("data", "model")}, True),  # [16, 1, 4, 1024, 1024]
        ({0: ("data",), 2: ("model",)}, True),  # [4, 16, 1, 1024, 1024]
        ({0: ("data",), 4: ("model",)}, True),  # [4, 16, 4, 1024, 256], sums over the rows are collectives
    ],
)
def test_a_dim_of_one_makes_scores_cheaper(split: dict[int, tuple[str, ...]], again: bool) -> None:
    built = model("v5e:4x4")
    (softmax,) = built.liveness.softmaxes
    node = built.nodes[built.cluster_node[softmax.cluster]]
    wanted = tuple(split.get(dim, ()) for dim in range(5))
    (row,) = (r for r in range(len(node.states)) if spec_of(built, node.states, r, 5).dims == wanted)
    local = built.graph.tensors[softmax.scores].elements / 16
    ((_, seconds),) = node.time.items()
    # Bytes of each score: two for each of the two matmuls, and two or four more here, so six or eight in all.
    assert seconds[row] == pytest.approx(float(built.compute.memory_seconds((2 if again else 4) * local)))
    held = sum(int(term.usage[row]) for term in node.memory)
    assert held == (2 if again else 4) * local


def test_memory_from_specs_is_that_of_the_alternatives() -> None:
    built = model("v5e:4x4")
    (softmax,) = built.liveness.softmaxes
    number = built.cluster_node[softmax.cluster]
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(20):
        choices = made.random_choices(built, rng)
        held = [0] * (len(built.graph.ops) + 2)
        for node, choice in zip(built.nodes, choices, strict=True):
            for term in node.memory:
                for moment in range(term.start, term.stop):
                    held[moment] += int(term.usage[choice])
        assert max(held) + built.fixed_bytes == evaluate(built, choices).solved_bytes
        seen.add(tuple(bool(term.usage[choices[number]]) for term in built.nodes[number].memory))
    assert seen == {(True, False), (False, True)}, "both forms were chosen"


def test_a_plan_leaves_a_dim_of_one_where_all_else_is_equal() -> None:
    plan = make_plan(program(groups=2), Options(topology="v5e:4x4", mesh="data=4,model=4")).plan
    query = next(spec for name, spec in plan.arguments.items() if len(spec.dims) == 5)
    assert 1 in query.local_shape((16, 16, 2, 1024, 128), plan.mesh)
    assert not plan.prediction.collectives


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_other_backends_have_none(backend: str) -> None:
    assert analyse_program(program(), backend).liveness.softmaxes == ()


def test_a_matmul_gets_nothing_back_that_it_never_paid_for():
    """Split the second matmul finer than the scores: the part that it reads is smaller than they are."""

    def attend(q, k, v):
        k, v = (jnp.repeat(each, 2, axis=2) for each in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v, preferred_element_type=jnp.float32)

    queries = jax.ShapeDtypeStruct((8, 512, 16, 128), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((8, 512, 8, 128), jnp.bfloat16)
    traced = trace(attend, (queries, keys, keys))
    planned = make_plan(traced, Options(topology="v5e:4x2", mesh={"data": 4, "model": 2}))
    flops = 2 * 2 * 8 * 16 * 512 * 512 * 128  # FLOPs of both products
    assert planned.plan.prediction.step_time_s > flops / 8 / Topology.parse("v5e:4x2").chip.peak_flops("bfloat16")


def test_credit_reduces_the_matmuls_that_paid():
    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v, preferred_element_type=jnp.float32)

    given = trace(attend, [jax.ShapeDtypeStruct((8, 512, 16, 128), jnp.bfloat16)] * 3)
    parsed = Topology.parse("v5e:4x4")
    mesh = make_mesh(parsed, {"data": 4, "model": 4})
    built = build_model(given, analyse_program(given, parsed.backend), mesh, parsed.usable_bytes)
    (softmax,) = built.liveness.softmaxes
    at = built.cluster_node[softmax.cluster]
    time = built.nodes[at].time[softmax.loop, "compute"]
    back = np.flatnonzero(time < 0)
    assert len(back)
    for row in back.tolist():
        choices = np.zeros(len(built.nodes), dtype=np.int64)  # nothing is split
        choices[at] = row
        compute = price_ops(itemise(built, choices)).compute
        assert all(seconds >= 0 for seconds in compute.values())
        alone = sum(float(node.time[softmax.loop, "compute"][0]) for node in built.nodes if node.kind == "op")
        matmuls = [op.id for op in built.graph.ops if op.kind == "dot_general"]
        assert sum(compute["op", op] for op in matmuls) < alone
