"""Buffers of scatters before their sum, and of slices that collectives move, as compiled steps have them."""

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


def test_a_sum_of_rows_that_is_split_afterwards_stays_whole() -> None:
    """Price a layer of a graph network, whose shards of 31,250 nodes fill no tiles: its sum is an all-reduce."""
    nodes, width, edges = 500_000, 128, 2**24

    def loss(weight: jax.Array, x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(jax.ops.segment_sum(x[senders], receivers, nodes) @ weight) ** 2)

    rows = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((width, width), (nodes, width))]
    program = trace(jax.grad(loss), (*rows, *[jax.ShapeDtypeStruct((edges,), jnp.int32)] * 2))
    pins = {each.name: (("a", "b"),) if each.dtype == "int32" else (None, None) for each in program.arguments}
    options = Options(topology="v5e:4x4", mesh="a=4,b=4", asked=read_asked(pins=pins | {"x": (("a", "b"), None)}))
    priced = make_plan(program, options).plan.graph(program).priced
    (added,) = [op for op in priced.model.graph.ops if op.kind == "scatter"]
    (stored,) = [each for each in live_buffers(priced.model, priced.choices) if each.tensor == added.results[0]]
    assert stored.size == 4 * nodes * width and stored.stop > added.id + 2


def test_a_slice_that_a_collective_moves_is_stored_in_place_of_what_it_slices() -> None:
    """Price experts by capacity: rows are added up into slots, the last is cut off, the rest goes to the experts."""
    tokens, width, experts, capacity = 2**14, 1024, 16, 2048

    def loss(up: jax.Array, x: jax.Array, slots: jax.Array) -> jax.Array:
        inside = jnp.zeros((experts, capacity + 1, width), x.dtype)
        inside = inside.at[jnp.arange(experts)[None], slots].add(x[:, None])[:, :capacity]
        return jnp.mean(jnp.tanh(jnp.einsum("ecd,edf->ecf", inside, up)) ** 2)

    shapes = [
        jax.ShapeDtypeStruct((experts, width, 4 * width), jnp.float32),
        jax.ShapeDtypeStruct((tokens, width), jnp.float32),
    ]
    program = trace(jax.grad(loss), (*shapes, jax.ShapeDtypeStruct((tokens, experts), jnp.int32)))
    pins = {"up": ("d", None, None), "x": (None, "d"), "slots": (None, None)}
    options = Options(topology="v5p:2x2x2", mesh=f"d={DEVICES}", asked=read_asked(pins=pins))
    priced = make_plan(program, options).plan.graph(program).priced
    graph = priced.model.graph
    buffers = live_buffers(priced.model, priced.choices)
    (cut,) = [op for op in graph.ops if op.kind == "slice" and op.results[0] in {each.tensor for each in buffers}]
    (moved,) = [each for each in buffers if each.tensor == cut.results[0]]
    # Rounded for the two matmuls, that of the forward pass and that of the weight's gradient.
    assert moved.size == 2 * experts // DEVICES * capacity * width
    assert moved.stop > max(op.id for op in graph.ops if op.kind == "dot_general")
    (added,) = [each for each in buffers if graph.maker(each.tensor) is not None and each.start == cut.id - 2]
    assert added.stop == cut.id + 1
