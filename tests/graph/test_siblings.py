"""Kernels with several results."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard.graph import Fusion, FusionRules, analyse
from tests.graph.buffers import TPU
from tests.graph.programs import f32, graph_of


def adam(p: Any, m: Any, v: Any, g: Any) -> Any:
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * g * g
    return p - m / (jnp.sqrt(v) + 1e-6), m, v


def light(fusions: tuple[Fusion, ...]) -> tuple[int, int]:
    """Return the number of kernels and the number of values that fusions read."""
    return sum(not f.is_fused_sibling for f in fusions), sum(len(f.reads) for f in fusions)


@pytest.mark.parametrize("tpu", [False, True])
def test_an_update_reads_its_gradient_once(tpu: bool) -> None:
    fusions = analyse(graph_of(adam, *[f32(64, 64)] * 4), rules=FusionRules(fused_matmuls=tpu)).fusions
    assert len(fusions) == 3
    assert light(fusions) == ((1, 4) if tpu else (3, 7))


def test_sizes_that_differ_and_what_waits_for_others_stay_apart() -> None:
    def fn(x: Any, y: Any, w: Any) -> Any:
        first = jnp.sin(x) * y
        return first, jnp.cos(y) + first @ w, jnp.sin(x)[:4]

    graph = graph_of(fn, f32(8, 8), f32(8, 8), f32(8, 8))
    fusions = analyse(graph, rules=TPU).fusions
    assert all(not f.is_fused_sibling for f in fusions)


def test_scalars_that_need_no_kernel_are_computed_before_it() -> None:
    """Count by hand: AdamW reads a parameter, two moments and a gradient once, also if bias corrections come late."""

    rule = optax.adamw(1e-3)

    def update(params: Any, state: Any, gradients: Any) -> Any:
        changes, state = rule.update(gradients, state, params)
        return optax.apply_updates(params, changes), state

    params = [f32(64, 64), f32(64, 128)]
    graph = graph_of(update, params, jax.eval_shape(rule.init, params), params)
    large = {t.id for t in graph.tensors if t.elements > 1}
    fusions = [f for f in analyse(graph, rules=TPU).fusions if large.intersection(f.writes)]
    assert sum(not f.is_fused_sibling for f in fusions) == 2
    assert sum(len(large.intersection(f.reads)) for f in fusions) == 8
