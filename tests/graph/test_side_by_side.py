"""Matmuls that all stages of a pipeline run at once."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.graph import FusionRules, analyse, matmuls_of_stages
from tests.graph.programs import f32, graph_of


STAGES, WIDTH, INNER = 2, 8, 32


def layer(x: Any, weights: Any) -> Any:
    up, down = weights
    return x + jnp.tanh(x @ up) @ down


def stages(x: Any, up: Any, down: Any) -> Any:
    return autoshard.stack(layer, (up, down), x, stages=STAGES, microbatches=4, schedule="gpipe")


def plain(x: Any, up: Any, down: Any) -> Any:
    return autoshard.stack(layer, (up, down), x)


def grouped(x: Any, up: Any, down: Any) -> Any:
    """Compute equal matmuls next to each other, without passing results from one to the next."""
    two = x.reshape(STAGES, -1, WIDTH)
    return jax.lax.scan(lambda c, w: (jax.vmap(lambda one: layer(one, w))(c) + c[::-1], None), two, (up, down))[0]


@pytest.mark.parametrize(("fn", "found"), [(stages, 2), (plain, 0), (grouped, 0)])
def test_they_are_known_by_what_is_handed_round(fn: Any, found: int) -> None:
    graph = graph_of(fn, f32(16, WIDTH), f32(4, WIDTH, INNER), f32(4, INNER, WIDTH))
    dots = [op for op in graph.ops if op.kind == "dot_general"]
    assert len(dots) == 2 and len(matmuls_of_stages(graph)) == found


def test_nothing_but_results_is_stored_between_them() -> None:
    graph = graph_of(stages, f32(16, WIDTH), f32(4, WIDTH, INNER), f32(4, INNER, WIDTH))
    assert matmuls_of_stages(graph)

    def inner(fused: bool) -> list[str]:
        liveness = analyse(graph, rules=FusionRules(fused_matmuls=fused))
        wide = [t for t in liveness.materialised if graph.tensors[t].shape == (STAGES, 4, INNER)]
        return [graph.ops[graph.tensors[t].producer].kind for t in wide]

    assert inner(fused=True) == ["dot_general"]
    assert sorted(inner(fused=False)) == ["dot_general", "tanh"]


def test_matmuls_of_experts_compute_their_activations() -> None:
    """Store only the dots of experts, as TPU compilers do, but the scores of attention as a kernel of its own."""

    def experts(x: Any, up: Any, down: Any) -> Any:
        return jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", x, up)), down)

    shapes = f32(STAGES, 8, WIDTH), f32(STAGES, WIDTH, INNER), f32(STAGES, INNER, WIDTH)
    graph = graph_of(experts, *shapes)
    wide = {fused: inner_values(graph, FusionRules(fused_matmuls=fused)) for fused in (True, False)}
    assert wide[True] == ["dot_general"] and len(wide[False]) == 2

    def heads(q: Any, k: Any) -> Any:
        return jnp.tanh(jnp.einsum("bhsd,bhtd->bhst", q, k)) * 2

    pair = f32(2, 2, 8, 4), f32(2, 2, 8, 4)
    graph = graph_of(lambda q, k: jnp.einsum("bhst,bhtd->bhsd", heads(q, k), k), *pair)
    assert len(analyse(graph, rules=FusionRules(fused_matmuls=True)).fusions) == 3


def inner_values(graph: Any, rules: FusionRules) -> list[str]:
    """Return the kinds of the ops whose stored results have the inner width of experts."""
    stored = [graph.tensors[t] for t in analyse(graph, rules=rules).materialised]
    return [graph.ops[t.producer].kind for t in stored if t.producer >= 0 and t.shape == (STAGES, 8, INNER)]
