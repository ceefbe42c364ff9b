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


def network(layers: int, nodes: int = NODES) -> Program:
    """Trace the gradients of a graph network whose messages are rows of nodes, added up by receiver."""

    def loss(weights: list[Any], x: Any, senders: Any, receivers: Any) -> Any:
        for w in weights:
            x = x + jax.ops.segment_sum(jax.nn.relu(x @ w)[senders], receivers, nodes)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    edges = jax.ShapeDtypeStruct((EDGES,), jnp.int32)
    return trace(jax.grad(loss), ([array(WIDTH, WIDTH)] * layers, array(nodes, WIDTH), edges, edges))


def planned(topology: str, layers: int, nodes: int = NODES, split: bool = False) -> tuple[Program, Plan]:
    """Plan a network whose edges are split; `split` splits the nodes too."""
    program = network(layers, nodes)
    edges = {argument.name: "d" for argument in program.arguments if argument.dtype == "int32"}
    whole = {argument.name: "-,-" for argument in program.arguments if argument.dtype != "int32"}
    states = {argument.name: "d,-" for argument in program.arguments if split and nodes in argument.shape}
    asked = read_asked(edges | whole | states)
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


@pytest.mark.parametrize(("nodes", "apart"), [(65536, False), (131072, True)])
def test_the_other_core_of_v6e_gathers_from_small_tables(nodes: int, apart: bool) -> None:
    """Try tables of 16 and 32 MiB of padded rows: up to 30 MiB they were read on the chip, from 32 MiB not."""
    program, plan = planned("v6e:2x4", 1, nodes)
    priced = plan.graph(program).priced
    ops = priced.model.graph.ops
    rows = [each for each in live_buffers(priced.model, priced.choices) if each.size == 2 * ROWS and each.tensor >= 0]
    masked = [each.start for each in rows if ops[each.start].kind == "select"]
    beside = [each for each in rows if ops[each.start].kind == "gather" and each.stop - 1 in masked]
    assert bool(beside) == apart


def test_scatters_by_the_same_indices_share_those_that_the_first_sorts() -> None:
    """Use a network of two layers, which adds up by receivers twice forwards, and by senders twice backwards."""
    program, plan = planned("v5p:2x2x2", 2)
    priced = plan.graph(program).priced
    ops = priced.model.graph.ops
    scatters = [op.id for op in ops if op.kind == "scatter"]
    size = EDGES // DEVICES * 4
    held = [each for each in live_buffers(priced.model, priced.choices) if each.size == size and each.start > 0]
    spans = [(each.start, each.stop - 1) for each in held if ops[each.start].kind == "scatter"]
    assert sorted(spans) == 2 * [tuple(scatters[:2])] + 2 * [tuple(scatters[2:])]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("topology", "layers", "nodes", "split"),
    [
        pytest.param("v5p:2x2x2", 1, NODES, False, marks=pytest.mark.full),
        pytest.param("v5p:2x2x2", 2, NODES, False, marks=pytest.mark.full),
        pytest.param("v6e:2x4", 1, 131072, False, marks=pytest.mark.full),
        ("v6e:2x4", 1, 8 * NODES, True),
    ],
)
def test_memory_of_a_graph_network_is_what_the_compiler_reserves(
    topology: str, layers: int, nodes: int, split: bool
) -> None:
    if importlib.util.find_spec("libtpu") is None:  # an optional extra
        pytest.skip("libtpu is not installed")
    program, plan = planned(topology, layers, nodes, split)
    compiled = compile_without_devices(program, plan, 300.0, quick=True)
    assert plan.prediction.peak_bytes == pytest.approx(reserved_bytes(compiled), rel=0.1)
