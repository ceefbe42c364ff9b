"""Stacks along a second dim: the ones that are copied row by row around the loop over their layers."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost import Compute, Topology
from autoshard.graph import read_graph
from autoshard.graph.memory.stack_layouts import tile_row_copies
from autoshard.program import trace


WIDTH, INNER = 256, 1024


def copies(layers: int, axis: int, update: Any, shape: Sequence[int] = (WIDTH, INNER)) -> list[tuple[int, ...]]:
    """Return the shapes of row copies if a layer's weights of that shape are stacked along `axis`."""
    stacked = (*shape[:axis], layers, *shape[axis:])

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        wide = w.reshape(WIDTH, INNER)
        return x + jnp.tanh(x @ wide) @ wide.T, None

    def loss(w: Any, x: Any) -> Any:
        return jax.lax.scan(layer, x, jnp.moveaxis(w, axis, 0))[0].sum()

    def step(w: Any, m: Any, x: Any) -> Any:
        return update(w, m, jax.grad(loss)(w, x))

    stack = jax.ShapeDtypeStruct(stacked, jnp.float32)
    graph = read_graph(trace(step, (stack, stack, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32))).module)
    passes = tile_row_copies(graph)
    assert all(each.by_rows and each.count == 1 and each.block == -1 for each in passes)
    return [graph.tensors[each.tensor].shape for each in passes]


def momentum(w: Any, m: Any, g: Any) -> Any:
    m = 0.9 * m + g
    return w - 0.1 * m, m


@pytest.mark.parametrize(("layers", "count"), [(8, 3), (16, 3), (4, 3), (2, 3), (3, 0), (5, 0), (9, 0), (12, 0)])
def test_layers_that_fill_tiles_are_removed_and_put_back(layers: int, count: int) -> None:
    # The parameter before the loop; parameter and momentum after the update.
    assert copies(layers, 1, momentum) == [(WIDTH, layers, INNER)] * count


def test_an_update_without_state_copies_the_parameter_alone() -> None:
    assert len(copies(8, 1, lambda w, m, g: (w - 0.1 * g, m))) == 2


def test_stacks_with_layers_outermost_or_outside_of_the_tiles_are_not_copied() -> None:
    assert copies(8, 0, momentum) == []
    assert copies(8, 1, momentum, shape=(WIDTH, 8, INNER // 8)) == []


def test_a_row_takes_its_time_for_any_memory() -> None:
    for name in ("v5p:2x2x1", "v6e:2x2"):
        compute = Compute(Topology.parse(name))
        rows = 1000
        seconds = float(compute.memory_seconds(rows * 128 * 4)) * compute.row_passes(4)
        assert seconds == pytest.approx(rows * compute.calibration.row_copy_s)
        assert compute.row_passes(4) > 2
    assert Compute(Topology.parse("h100:8")).row_passes(4) == 0
