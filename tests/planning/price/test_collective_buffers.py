"""Buffers of scatters before their sum, as compiled steps have them."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.planning import Options, make_plan
from autoshard.planning.price.evaluate import live_buffers
from autoshard.planning.space.user_constraints import read_asked
from autoshard.program import trace


DEVICES = 8


@pytest.mark.parametrize("split", [True, False])
def test_a_scatter_is_whole_before_a_reduce_scatter_sums_it(split: bool) -> None:
    """Price the gradients of a graph network; its nodes are split like its edges, or whole."""
    nodes, width, edges = 2**19, 128, 2**20

    def loss(weight: jax.Array, x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        return jnp.mean(x + jax.ops.segment_sum(jax.nn.relu(x @ weight)[senders], receivers, nodes)) ** 2

    rows = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((width, width), (nodes, width))]
    program = trace(jax.grad(loss), (*rows, *[jax.ShapeDtypeStruct((edges,), jnp.int32)] * 2))
    pins = {each.name: ("d",) if each.dtype == "int32" else (None, None) for each in program.arguments}
    pins |= {"x": ("d", None)} if split else {}
    options = Options(topology="v5e:2x4", mesh=f"d={DEVICES}", asked=read_asked(pins=pins))
    priced = make_plan(program, options).plan.graph(program).priced
    ops = priced.model.graph.ops
    added = {op.results[0]: op.id for op in ops if op.kind == "scatter"}
    made = [each for each in live_buffers(priced.model, priced.choices) if added.get(each.tensor) == each.start]
    whole = [each for each in made if each.size == 2 * nodes * width and each.stop == each.start + 1]
    assert bool(whole) == split
