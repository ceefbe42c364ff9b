"""Relayouts of tables for gathers and scatters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost import Topology, make_mesh
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.price.evaluate import memory_events
from autoshard.planning.xla.array_layouts import padded_bytes
from autoshard.program import Program, trace


ROWS, WIDTH, BATCH = 1 << 16, 64, 4096


def recommender(batch: int = BATCH) -> Program:
    """Trace a step in which a table's rows are looked up and trained."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            found = jnp.take(params["table"], batch["ids"], axis=0)
            return jnp.mean((found @ params["w"] - batch["y"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.01 * g, params, jax.grad(loss)(params))

    params = {"table": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), "w": jax.ShapeDtypeStruct((WIDTH,), "float32")}
    given = {"ids": jax.ShapeDtypeStruct((batch,), jnp.int32), "y": jax.ShapeDtypeStruct((batch,), jnp.float32)}
    return trace(step, (params, given), name="recommender", donate_argnums=(0,), training=True)


@pytest.mark.parametrize(
    "kind, shape, itemsize, expected",
    [  # bytes that the compiler allocated in addition to the table and its narrow copy, v5e
        ("scatter", (1 << 20, 2), 4, 512 << 20),
        ("scatter", (1 << 20, 32), 4, 512 << 20),
        ("scatter", (1 << 20, 100), 4, 512 << 20),
        ("scatter", (1 << 20, 160), 4, 1024 << 20),
        ("scatter", (1 << 20, 8), 2, 256 << 20),
        ("scatter", (1 << 20, 128), 4, 0),
        ("gather", (1 << 20, 2), 4, 0),
        ("gather", (1 << 20, 32), 2, 0),
        ("gather", (1 << 20, 64), 4, 512 << 20),
        ("gather", (1 << 20, 64), 2, 256 << 20),
        ("gather", (1 << 20, 160), 4, 1024 << 20),
        ("gather", (1 << 20, 128), 4, 0),
    ],
)
def test_padded_copies_are_the_compilers(kind: str, shape: tuple[int, int], itemsize: int, expected: int) -> None:
    assert padded_bytes(kind, shape, itemsize) == expected


@pytest.mark.parametrize("topology, padded", [("v5e:4x8", True), ("cpu:32", False)])
def test_narrow_shards_of_a_table_take_whole_registers(topology: str, padded: bool) -> None:
    program, parsed = recommender(), Topology.parse(topology)
    mesh = make_mesh(parsed, {"data": 32})
    model = build_model(program, analyse_program(program, parsed.backend), mesh, parsed.usable_bytes)
    (scatter,) = (number for op, number in model.op_node.items() if model.graph.ops[op].kind == "scatter")
    node, op = model.nodes[scatter], model.graph.ops[model.nodes[scatter].ref]
    assert op.rule is not None
    columns = int(np.flatnonzero(node.states[:, 0] == op.rule.operands[0][1][0])[0])
    rows = int(np.flatnonzero(node.states[:, 0] == op.rule.operands[0][0][0])[0])
    seconds = node.time[(-1, "compute")]
    if not padded:
        assert node.memory == ()
        return
    (held,) = node.memory
    assert (held.start, held.stop, held.kind) == (op.id, op.id + 1, "temporaries")
    few = (ROWS * 128 + BATCH * (128 - 2)) * 4
    assert int(held.usage[columns]) == few, "2 columns of 64 take a register of 128, in the rows that are added as well"
    assert int(held.usage[rows]) == (ROWS // 32 * 128 + BATCH * (128 - WIDTH)) * 4
    assert seconds[columns] > seconds[rows]
    choices = np.zeros(len(model.nodes), dtype=np.int64)
    choices[scatter] = columns
    assert (op.id, few, "temporaries") in memory_events(model, choices)


@pytest.mark.parametrize("made", [False, True])
def test_rows_of_an_argument_are_copied_and_those_that_the_program_makes_are_padded_at_once(made: bool) -> None:
    """Sum messages along edges by receiver: 16 of 128 columns on each of eight chips (v5e, libtpu 0.0.52)."""
    edges, width = 1 << 14, 128

    def step(messages: Any, receivers: Any) -> Any:
        return jax.ops.segment_sum(jnp.sin(messages) if made else messages, receivers, 512)

    given = jax.ShapeDtypeStruct((edges, width), jnp.float32), jax.ShapeDtypeStruct((edges,), jnp.int32)
    program, parsed = trace(step, given), Topology.parse("v5e:2x4")
    model = build_model(program, analyse_program(program, "tpu"), make_mesh(parsed, {"data": 8}), parsed.usable_bytes)
    (scatter,) = (number for op, number in model.op_node.items() if model.graph.ops[op].kind == "scatter")
    node, op = model.nodes[scatter], model.graph.ops[model.nodes[scatter].ref]
    assert op.rule is not None
    columns = int(np.flatnonzero(node.states[:, 0] == op.rule.operands[0][1][0])[0])
    (held,) = node.memory
    copies = edges * (width - (16 if made else 0)) * 4
    assert int(held.usage[columns]) == 512 * width * 4 + copies
