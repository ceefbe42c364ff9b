"""Copies of tables for gathers and scatters in other layouts."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.cost import Topology, make_mesh
from autoshard.exec import compile_plan
from autoshard.planning import Options, make_plan, read_asked
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.price.evaluate import solved_buffers
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.planning.xla.table_layouts import Copies, table_copies
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


def copies(kind: str, shape: tuple[int, ...], dtype: str, topology: str = "v5e:2x2", optimizer: str = "none") -> Copies:
    """Return the copies of the gather or scatter of a whole table, or of a stack of tables, with 4096 ids for each.

    - `optimizer`: update of the table in the same program, `none`, `sgd`, `momentum` or `adamw`.
    """

    def found(table: Any, ids: Any) -> Any:
        return jax.vmap(lambda one, i: one[i], (0, 1), 1)(table, ids) if len(shape) > 2 else table[ids]

    def step(table: Any, state: Any, ids: Any, rows: Any) -> Any:
        gradient = jax.vjp(lambda table: found(table, ids), table)[1](jnp.sin(rows))[0]
        if optimizer == "none":
            return found(table, ids), jnp.dot(gradient.ravel(), gradient.ravel())
        updates, state = update(optimizer).update(gradient, state, table)
        return optax.apply_updates(table, updates), state

    table = jax.ShapeDtypeStruct(shape, dtype)
    ids = jax.ShapeDtypeStruct((4096, *shape[:-2]), "int32")
    rows = jax.ShapeDtypeStruct((*ids.shape, shape[-1]), dtype)
    state = jax.eval_shape(update(optimizer).init, table) if optimizer != "none" else ()
    graph = analyse_program(trace(step, (table, state, ids, rows)), "tpu").graph
    op = next(op for op in graph.ops if op.kind == kind)
    made = table_copies(graph, op, np.full((1, 1), WHOLE), [1], Topology.parse(topology))
    assert made is not None
    return made


def update(optimizer: str) -> optax.GradientTransformation:
    """Return an optimizer by its name."""
    return {"sgd": optax.sgd(1e-3), "momentum": optax.sgd(1e-3, 0.9), "adamw": optax.adamw(1e-3)}[optimizer]


def padded(kind: str, shape: tuple[int, ...], dtype: str, topology: str = "v5e:2x2") -> int:
    """Return the MiB of the copy of the table itself."""
    rows = 4096 * math.prod(shape[:-2]) * math.ceil(shape[-1] / 128) * 128
    held = [int(size[0]) for _, _, size in copies(kind, shape, dtype, topology).held]
    return sum(size for size in held if size > rows * jnp.dtype(dtype).itemsize) >> 20


@pytest.mark.parametrize(
    "kind, shape, dtype, expected",
    [  # MiB that the compiler allocated in addition to the table and its narrow copy, v5e
        ("scatter", (1 << 20, 2), "float32", 512),
        ("scatter", (1 << 20, 32), "float32", 512),
        ("scatter", (1 << 20, 100), "float32", 512),
        ("scatter", (1 << 20, 160), "float32", 1024),
        ("scatter", (1 << 20, 8), "bfloat16", 256),
        ("scatter", (1 << 20, 128), "float32", 0),
        ("gather", (1 << 20, 2), "float32", 0),
        ("gather", (1 << 20, 32), "bfloat16", 0),
        ("gather", (1 << 20, 64), "float32", 512),
        ("gather", (1 << 20, 64), "bfloat16", 256),
        ("gather", (1 << 20, 160), "float32", 1024),
        ("gather", (1 << 20, 128), "float32", 0),
        # Stacks of tables: their rows are those of one table.
        ("scatter", (4, 1 << 18, 4), "float32", 512),
        ("scatter", (15, 1 << 16, 32), "bfloat16", 240),
        ("scatter", (15, 1 << 19, 32), "bfloat16", 0),
        ("gather", (13, 1 << 16, 64), "bfloat16", 208),
    ],
)
def test_padded_copies_are_the_compilers(kind: str, shape: tuple[int, ...], dtype: str, expected: int) -> None:
    assert padded(kind, shape, dtype) == expected


@pytest.mark.parametrize(
    "topology, with_copy, without",
    [("v5e:2x2", 812, 832), ("v6e:2x2", 1536, 1792), ("v5p:2x2x1", 4096, 5120)],
)
def test_large_tables_of_narrow_rows_are_scattered_into_in_compact_form(
    topology: str, with_copy: int, without: int
) -> None:
    """Compare with two sizes that were compiled, in MiB of padded rows; the compiler's limit is between them."""
    rows = 1 << 11
    assert padded("scatter", (with_copy * rows, 32), "float32", topology) == with_copy
    assert padded("scatter", (without * rows, 32), "float32", topology) == 0
    assert padded("scatter", (without * rows // 2, 160), "float32", topology) == without, "less than half is padding"


@pytest.mark.parametrize(
    "shape, dtype, optimizer, expected",
    [  # MiB of temporaries of whole training steps in which the table was by far the largest, v5e
        ((1, 1 << 20, 32), "float32", "momentum", 1536),
        ((7, 1 << 20, 16), "float32", "adamw", 2568),
        ((7, 1 << 17, 128), "float32", "adamw", 896),
        ((8, 1 << 20, 4), "float32", "momentum", 128),
        ((10, 1 << 20, 4), "float32", "momentum", 512),
        ((15, 1 << 20, 4), "float32", "adamw", 768),
        ((15, 1 << 19, 4), "float32", "sgd", 248),
        ((9, 1 << 20, 16), "float32", "sgd", 2048),
        ((8, 1 << 20, 16), "bfloat16", "sgd", 256),
    ],
)
def test_updates_of_tables_have_the_layout_of_the_scatter(
    shape: tuple[int, ...], dtype: str, optimizer: str, expected: int
) -> None:
    made = copies("scatter", shape, dtype, optimizer=optimizer)
    last = max(stop for _, stop, _ in made.held)
    assert sum(int(size[0]) for _, stop, size in made.held if stop == last) >> 20 == pytest.approx(expected, rel=0.06)


def test_no_plan_slices_the_result_of_a_scatter_that_can_be_split() -> None:
    """Forbid to compute the gradient whole and slice it: the partitioner splits the scatter instead."""
    program, parsed = recommender(), Topology.parse("v5e:2x2")
    model = build_model(program, analyse_program(program, "tpu"), make_mesh(parsed, {"d": 4}), parsed.usable_bytes)
    (number,) = (number for op, number in model.op_node.items() if model.graph.ops[op].kind == "scatter")
    (reshard,) = (each for each in model.reshards if each.source == number)
    source, target, forbidden = reshard.path.source[:, 0], reshard.path.target[:, 0], reshard.forbidden
    assert forbidden is not None and {0, 1} <= set(target.tolist())
    assert forbidden[np.ix_(source == WHOLE, target >= 0)].all()
    assert not forbidden[np.ix_(source != WHOLE, target >= 0)].any() and not forbidden[:, target == WHOLE].any()


def test_the_gradient_of_one_table_is_stored_once() -> None:
    """Count arrays by hand: compiled for v5e, AdamW of one table stored parameter, moments and gradient, 4 in all."""

    def step(table: Any, state: Any, ids: Any, rows: Any) -> Any:
        gradient = jax.vjp(lambda table: table[ids], table)[1](jnp.sin(rows))[0]
        updates, state = update("adamw").update(gradient, state, table)
        return optax.apply_updates(table, updates), state

    table, ids = jax.ShapeDtypeStruct((1 << 22, 16), "float32"), jax.ShapeDtypeStruct((4096,), "int32")
    given = (table, jax.eval_shape(update("adamw").init, table), ids, jax.ShapeDtypeStruct((4096, 16), "float32"))
    program = trace(step, given, donate_argnums=(0, 1), training=True)
    peak = make_plan(program, Options(topology="v5e:1x1", mesh={"data": 1})).plan.prediction.peak_bytes
    assert peak == pytest.approx(4 * (1 << 22) * 16 * 4, rel=0.02)


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
    assert {(held.start, held.stop, held.kind) for held in node.memory} == {(op.id, op.id + 1, "temporaries")}
    usage = np.sum([held.usage for held in node.memory], axis=0)
    few = (ROWS * 128 + BATCH * (128 - 2)) * 4
    assert int(usage[columns]) == few, "2 columns of 64 take a register of 128, in the rows that are added as well"
    assert int(usage[rows]) == (ROWS // 32 * 128 + BATCH * (128 - WIDTH)) * 4
    assert seconds[columns] > seconds[rows]
    choices = np.zeros(len(model.nodes), dtype=np.int64)
    choices[scatter] = columns
    sizes = [b.size for b in solved_buffers(model, choices) if (b.start, b.kind) == (op.id, "temporaries")]
    assert {int(held.usage[columns]) for held in node.memory}.issubset(sizes)


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
    expected = [512 * width * 4, edges * (width - (16 if made else 0)) * 4]
    assert [int(held.usage[columns]) for held in node.memory] == expected


@pytest.mark.heavy
def test_rows_of_a_split_table_are_summed_in_float32_and_whole_ones_are_rounded() -> None:
    """Round rows of a whole table where they are read, and partial rows after their sum, as the compiler does."""

    def found(table: Any, ids: Any, w: Any) -> Any:
        return table[ids] @ w

    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((ROWS, 128), "float32"), ((BATCH,), "int32"))]
    program = trace(found, (*given, jax.ShapeDtypeStruct((128, 128), "float32")))
    asked = read_asked({"table": "data,-", "ids": "-", "w": "-,-", "result": "data,-"})
    plan = make_plan(program, Options(topology="v5e:2x4", mesh="data=8", asked=asked)).plan
    (summed,) = plan.prediction.collectives
    assert summed.wire_bytes == pytest.approx(7 / 8 * BATCH * 128 * 4)
    (compiled,) = compile_plan(program, plan, 300.0, quick=True).collectives
    assert (compiled.kind, compiled.wire_bytes) == (summed.kind, pytest.approx(summed.wire_bytes))


def test_gradients_of_weighed_rows_are_written_in_padded_rows_at_once() -> None:
    """Count the padding alone of rows that an outer product computes and a transposition only reorders."""

    def added(x: Any, gates: Any, ids: Any) -> Any:
        rows = jax.grad(lambda back: jnp.square(jnp.einsum("ned,ne->nd", back, gates)).sum())
        return jnp.zeros((ROWS, WIDTH), "float32").at[ids].add(rows(x))

    rows = jax.ShapeDtypeStruct((BATCH, 8, WIDTH), "float32")
    ids = jax.ShapeDtypeStruct((BATCH, 8), "int32")
    program = trace(added, (rows, jax.ShapeDtypeStruct(ids.shape, "float32"), ids))
    graph = analyse_program(program, "tpu").graph
    op = next(op for op in graph.ops if op.kind == "scatter")
    assert graph.ops[graph.tensors[op.operands[2]].producer].kind == "transpose"
    made = table_copies(graph, op, np.full((1, 1), WHOLE), [1], Topology.parse("v5e:2x2"))
    assert made is not None
    # Rows of 64 columns fill 128 lanes.
    assert [int(size[0]) for _, _, size in made.held][1] == BATCH * 8 * (128 - WIDTH) * 4
