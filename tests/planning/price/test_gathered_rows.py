"""Rows that sparse cores gather have memory of their own, padded: buffers by hand, and compiled graph networks."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.exec.ahead.ahead_process import compile_without_devices
from autoshard.exec.ahead.live_ranges import reserved_bytes
from autoshard.planning import Options, Plan, make_plan
from autoshard.planning.price.evaluate import live_buffers, solved_buffers
from autoshard.planning.space.user_constraints import read_asked
from autoshard.program import Program, trace


NODES, EDGES, WIDTH, DEVICES = 65536, 2**22, 64, 8
ROWS = EDGES // DEVICES * WIDTH * 2
"""Bytes of the rows of one device's edges in bfloat16, without padding."""


def network(layers: int) -> Program:
    """Trace the gradients of a graph network whose messages are rows of nodes, added up by receiver."""

    def loss(weights: list[Any], x: Any, senders: Any, receivers: Any) -> Any:
        for w in weights:
            x = x + jax.ops.segment_sum(jax.nn.relu(x @ w)[senders], receivers, NODES)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    edges = jax.ShapeDtypeStruct((EDGES,), jnp.int32)
    return trace(jax.grad(loss), ([array(WIDTH, WIDTH)] * layers, array(NODES, WIDTH), edges, edges))


def planned(topology: str, layers: int) -> tuple[Program, Plan]:
    program = network(layers)
    edges = {argument.name: "d" for argument in program.arguments if argument.dtype == "int32"}
    nodes = {argument.name: "-,-" for argument in program.arguments if argument.dtype != "int32"}
    asked = read_asked(edges | nodes)
    return program, make_plan(program, Options(topology=topology, mesh=f"d={DEVICES}", asked=asked)).plan


def test_masked_rows_are_written_next_to_those_that_a_sparse_core_gathers() -> None:
    """Compare with the buffers of the solver, which has the mask written over what it masks, without padding."""
    program, plan = planned("v5p:2x2x2", 1)
    priced = plan.graph(program).priced
    ops = priced.model.graph.ops
    for made, size, apart in ((solved_buffers, ROWS, 0), (live_buffers, 2 * ROWS, 1)):
        rows = [each for each in made(priced.model, priced.choices) if each.size == size and each.tensor >= 0]
        (masked,) = [each for each in rows if ops[each.start].kind == "select"]
        assert [each.stop for each in rows if ops[each.start].kind == "gather"][-1] == masked.start + apart


@pytest.mark.heavy
@pytest.mark.parametrize("layers", [1, 2])
def test_memory_of_a_graph_network_is_what_the_compiler_reserves(layers: int) -> None:
    if importlib.util.find_spec("libtpu") is None:  # an optional extra
        pytest.skip("libtpu is not installed")
    program, plan = planned("v5p:2x2x2", layers)
    compiled = compile_without_devices(program, plan, 300.0, quick=True)
    assert plan.prediction.peak_bytes == pytest.approx(reserved_bytes(compiled), rel=0.1)
