"""The partitioner's handling of split factors: our table against every op compiled alone on eight CPU devices."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.cost import Collectives, Topology, make_mesh
from autoshard.exec import Application, read_collectives, wire_by_axis
from autoshard.graph import FactorKind, Op, OpGraph, read_graph
from autoshard.planning import Call, Options, Pin, Plan, Spec, make_plan
from autoshard.planning.explain.plan_pins import region_of
from autoshard.planning.price.reshard_paths import path_steps
from autoshard.planning.space.decision_model import Path
from autoshard.planning.space.dim_groups import factor_states
from autoshard.planning.space.op_strategies import heavy_strategies, result_states
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.planning.xla.partitioner_rules import (
    TABLE,
    Handling,
    called_on_shards,
    handling,
    inner_collectives,
    whole_factors,
)
from autoshard.planning.xla.spatial_splits import in_region, shifts
from autoshard.program import Program, trace
from tests.exec.planned_programs import handmade
from tests.graph.programs import f32


MESH = make_mesh(Topology.parse("cpu:8"), {"x": 8})


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def several(x: Any) -> Any:
    """Return the largest element of each row and its position."""
    where = lax.broadcasted_iota(jnp.int32, x.shape, 1)

    def larger(a: Any, b: Any) -> Any:
        first = a[0] >= b[0]
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    return lax.reduce((x, where), (-jnp.inf, jnp.int32(0)), larger, (1,))


@dataclasses.dataclass(frozen=True)
class Case:
    """One op, and the expected handling of the factor in dim `dim` of operand `operand` (-1: the result)."""

    name: str
    kind: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    operand: int
    dim: int
    factor: FactorKind
    handling: Handling


P, R, N, M = FactorKind.PARALLEL, FactorKind.REDUCTION, FactorKind.NEED_REPLICATION, FactorKind.PERMUTATION
LOCAL, SUM, COLLECT, SHIFT, SWAP, GATHERED = (
    Handling.LOCAL, Handling.SUM, Handling.COLLECT, Handling.SHIFT, Handling.SWAP, Handling.WHOLE,
)  # fmt: skip


def set_rows(x: Any, i: Any, u: Any) -> Any:
    return x.at[i].set(u, mode="promise_in_bounds")


def add_rows(x: Any, i: Any, u: Any) -> Any:
    return x.at[i].add(u, mode="promise_in_bounds")


def rolled_back(x: Any) -> Any:
    """Differentiate a roll: the transposed op, as JAX writes it."""
    return jax.linear_transpose(lambda x: jnp.roll(x, 1, 0), x)(x)[0]


def rows(x: Any, i: Any) -> Any:
    return x.at[i].get(mode="promise_in_bounds")


def along(x: Any, i: Any) -> Any:
    return jnp.take_along_axis(x, i, 1, mode="promise_in_bounds")


def put(x: Any, u: Any, k: Any) -> Any:
    return lax.dynamic_update_slice(x, u, (jnp.uint32(0), k))


def take(size: int) -> Callable[..., Any]:
    return lambda x, k: lax.dynamic_slice(x, (jnp.uint32(0), k), (16, size))


def solve(a: Any, b: Any) -> Any:
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=True)


def bits(key: Any) -> Any:
    return lax.rng_bit_generator(key, (16, 64), dtype=jnp.uint32)[1]


U32 = jax.ShapeDtypeStruct((), jnp.uint32)
KEY = jax.ShapeDtypeStruct((4,), jnp.uint32)
ROWS = (f32(64, 32), i32(16), f32(16, 32))
X = f32(16, 64)
CASES = [
    Case("cumsum, along", "reduce_window", lambda x: jnp.cumsum(x, 1), (X,), 0, 1, M, GATHERED),
    Case("cumsum, across", "reduce_window", lambda x: jnp.cumsum(x, 1), (X,), 0, 0, P, LOCAL),
    Case("concatenate, along", "concatenate", lambda x, y: jnp.concatenate([x, y], 1), (X, X), 0, 1, N, GATHERED),
    Case("concatenate, across", "concatenate", lambda x, y: jnp.concatenate([x, y], 1), (X, X), 0, 0, P, LOCAL),
    Case("dynamic_slice, one", "dynamic_slice", take(1), (X, U32), 0, 1, N, GATHERED),
    Case("dynamic_slice, some", "dynamic_slice", take(8), (X, U32), 0, 1, N, GATHERED),
    Case("dynamic_slice, across", "dynamic_slice", take(8), (X, U32), 0, 0, P, LOCAL),
    Case("dynamic_update_slice, one", "dynamic_update_slice", put, (X, f32(16, 1), U32), 0, 1, P, LOCAL),
    Case("dynamic_update_slice, some", "dynamic_update_slice", put, (X, f32(16, 8), U32), 0, 1, P, GATHERED),
    Case("dynamic_update_slice, update", "dynamic_update_slice", put, (X, f32(16, 8), U32), 1, 1, N, GATHERED),
    Case("dynamic_update_slice, across", "dynamic_update_slice", put, (X, f32(16, 8), U32), 0, 0, P, LOCAL),
    Case("gather, table", "gather", rows, ROWS[:2], 0, 0, R, SUM),
    Case("gather, indices", "gather", rows, ROWS[:2], -1, 0, P, LOCAL),
    Case("gather, features", "gather", rows, ROWS[:2], 0, 1, P, LOCAL),
    Case("gather, batch", "gather", along, (X, i32(16, 8)), 0, 0, P, LOCAL),
    Case("gather, within a batch", "gather", along, (X, i32(16, 8)), 0, 1, R, SUM),
    Case("scatter-add, updates", "scatter", add_rows, ROWS, 2, 0, R, SUM),
    Case("scatter-add, table", "scatter", add_rows, ROWS, 0, 0, P, LOCAL),
    Case("scatter-add, features", "scatter", add_rows, ROWS, 0, 1, P, LOCAL),
    Case("scatter, updates", "scatter", set_rows, ROWS, 2, 0, N, GATHERED),
    Case("scatter, table", "scatter", set_rows, ROWS, 0, 0, P, LOCAL),
    Case("sort, along", "sort", lambda x: lax.sort(x, dimension=1), (X,), 0, 1, N, GATHERED),
    Case("sort, across", "sort", lambda x: lax.sort(x, dimension=1), (X,), 0, 0, P, LOCAL),
    Case("roll, along", "rotate", lambda x: jnp.roll(x, 1, 1), (X,), 0, 1, M, SWAP),
    Case("roll far, along", "rotate", lambda x: jnp.roll(x, 11, 1), (X,), 0, 1, M, SWAP),
    Case("roll back, along", "rotate", lambda x: jnp.roll(x, -1, 1), (X,), 0, 1, M, SWAP),
    Case("roll, across", "rotate", lambda x: jnp.roll(x, 1, 1), (X,), 0, 0, P, LOCAL),
    Case("stages", "rotate", lambda x: jnp.roll(x, 1, 0), (f32(8, 16),), 0, 0, M, SWAP),
    Case("stages, back", "rotate", rolled_back, (f32(8, 16),), 0, 0, M, SWAP),
    Case("roll's gradient", "rotate", rolled_back, (f32(16, 16),), 0, 0, M, SWAP),
    Case("reverse, along", "reverse", lambda x: lax.rev(x, (1,)), (X,), 0, 1, M, SWAP),
    Case("reverse, across", "reverse", lambda x: lax.rev(x, (1,)), (X,), 0, 0, P, LOCAL),
    Case("slice, begin", "slice", lambda x: x[:, 8:], (X,), 0, 1, M, SHIFT),
    Case("slice, end", "slice", lambda x: x[:, :-8], (X,), 0, 1, M, SHIFT),
    Case("slice, both", "slice", lambda x: x[:, 3:-5], (X,), 0, 1, M, SHIFT),
    Case("slice, across", "slice", lambda x: x[:, 3:-5], (X,), 0, 0, P, LOCAL),
    Case("pad, begin", "pad", lambda x: jnp.pad(x, ((0, 0), (8, 0))), (f32(16, 56),), 0, 1, M, SHIFT),
    Case("pad, both", "pad", lambda x: jnp.pad(x, ((0, 0), (3, 5))), (f32(16, 56),), 0, 1, M, SHIFT),
    Case("top_k, along", "top_k", lambda x: lax.top_k(x, 8), (X,), 0, 1, R, COLLECT),
    Case("top_k, across", "top_k", lambda x: lax.top_k(x, 8), (X,), 0, 0, P, LOCAL),
    Case("maximum of each row", "reduce", lambda x: x.max(1), (X,), 0, 1, R, SUM),
    Case("maximum and its place", "reduce", several, (X,), 0, 1, R, COLLECT),
    Case("maximum and its place, across", "reduce", several, (X,), 0, 0, P, LOCAL),
    Case("fft, along", "fft", jnp.fft.fft, (jax.ShapeDtypeStruct((16, 64), jnp.complex64),), 0, 1, N, GATHERED),
    Case("fft, across", "fft", jnp.fft.fft, (jax.ShapeDtypeStruct((16, 64), jnp.complex64),), 0, 0, P, LOCAL),
    Case("triangular solve, batch", "custom_call", solve, (f32(16, 8, 8), f32(16, 8, 32)), 0, 0, P, LOCAL),
    Case("triangular solve, rows", "custom_call", solve, (f32(16, 8, 8), f32(16, 8, 32)), 0, 1, N, GATHERED),
    Case("random bits", "rng_bit_generator", bits, (KEY,), -1, 0, P, LOCAL),
    Case("matmul, contracted", "dot_general", lambda a, b: a @ b, (X, f32(64, 32)), 0, 1, R, SUM),
    Case("matmul, rows", "dot_general", lambda a, b: a @ b, (X, f32(64, 32)), 0, 0, P, LOCAL),
]


def found_op(case: Case) -> tuple[Program, OpGraph, Op, int]:
    program = trace(case.fn, case.args, name=case.name)
    graph = read_graph(program.module)
    (op,) = (op for op in graph.ops if op.kind == case.kind)
    assert op.rule is not None
    dims = op.rule.results[-1] if case.operand < 0 else op.rule.operands[case.operand]
    return program, graph, op, dims[case.dim][0]


def spec(state: np.ndarray, shape: tuple[int, ...]) -> Spec:
    """Convert a state to a spec. A dim that eight devices cannot share evenly stays whole."""
    return Spec(tuple(("x",) if dim in state and size % 8 == 0 else () for dim, size in enumerate(shape)))


def wire_of_collectives(program: Program, graph: OpGraph, op: Op, factor: int) -> dict[str, int]:
    """Return the bytes on the wire by collective if the op's operands and results are split by the factor."""
    assert op.rule is not None
    state = np.array([[factor]])
    names = {t: a.name for t, a in zip(graph.arguments, program.arguments, strict=True)}
    into = {
        names[t]: spec(factor_states(state, dims)[0], graph.tensors[t].shape)
        for t, dims in zip(op.operands, op.rule.operands, strict=True)
        if t in names
    }
    shapes = [graph.tensors[t].shape for t in op.results]
    out = [spec(np.maximum(result_states(op, state, r)[0], WHOLE), shape) for r, shape in enumerate(shapes)]
    results = dict(zip(op.results, out, strict=True))
    takes = [spec(factor_states(state, dims)[0], graph.tensors[t].shape) for t, dims in op.sides[: len(op.operands)]]
    called = called_on_shards(op, state, [8], "cpu")[0]
    by_hand = op.kind == "fft" and in_region(op, state)[0] and handling(graph, op, factor, "cpu") is Handling.LOCAL
    plan: Plan = dataclasses.replace(
        handmade(program, {"x": 8}, {}),
        arguments={a.name: into.get(a.name, Spec.replicated(len(a.shape))) for a in program.arguments},
        results={r.name: results[t] for r, t in zip(program.results, graph.results, strict=True)},
        pins=tuple(Pin(op.number, r, s) for r, s in enumerate(out)),
        regions=(region_of(graph, op, state, ["x"]),) if by_hand else (),
        calls=(Call(op.number, op.kind, tuple(takes), tuple(out)),) if called else (),
    )
    text = Application(plan).lower(program.fn, program.args, module=program.module).compile().as_text()
    return wire_by_axis(read_collectives(text, MESH))


def predicted(graph: OpGraph, op: Op, factor: int) -> dict[str, int]:
    assert op.rule is not None
    collectives, state = Collectives(MESH), np.array([[factor]])
    steps = [(i.kind, i.size[0] * i.senders) for i in inner_collectives(graph, op, state, [8], "cpu")]
    for r, tensor in enumerate(op.results):
        left = result_states(op, state, r)
        record = graph.tensors[tensor]
        item = record.bytes // record.elements
        collected = handling(graph, op, factor, "cpu") is Handling.COLLECT
        ends = left, np.maximum(left, WHOLE)
        path = Path(record.shape, left, left, record.shape, *ends, item, item, collected)
        steps += [(step.kind, step.size[0, 0]) for step in path_steps(path, collectives)[1]]
    wire = sum(round(float(collectives.wire_bytes(kind, ("x",), size)["x"])) for kind, size in steps)
    return {"x": wire} if wire else {}


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_split_factor_costs_what_the_table_says(case: Case) -> None:
    program, graph, op, factor = found_op(case)
    assert op.rule is not None
    assert op.rule.kinds[factor] is case.factor
    assert handling(graph, op, factor, "cpu") is case.handling
    offered = (heavy_strategies(graph, op, [8], "cpu") == factor).any()
    assert offered == (case.handling is not Handling.WHOLE)
    compiled = wire_of_collectives(program, graph, op, factor)
    if case.handling is Handling.WHOLE:
        assert compiled, "what stands in the way of splitting it is gathered or moved"
    else:
        assert compiled == predicted(graph, op, factor)


def test_every_row_is_compiled() -> None:
    seen = set()
    for case in CASES:
        _, graph, op, factor = found_op(case)
        for row in TABLE.get(case.kind, ()):
            if row.factor in (None, case.factor) and row.when(graph, op, factor):
                assert case.handling is row.handling
                seen.add(row)
    assert seen == {row for kind, rows in TABLE.items() if kind != "*" for row in rows}


def test_shards_of_a_convolution_borrow_along_its_windows_only() -> None:
    """Check that shards exchange halos along the windows only, not along channels or images."""
    numbers = ("NCHW", "OIHW", "NCHW")
    program = trace(
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers),
        (f32(8, 16, 32, 32), f32(64, 16, 3, 3)),
    )
    graph = read_graph(program.module)
    (op,) = (op for op in graph.ops if op.kind == "convolution")
    assert op.rule is not None
    images, weights = ([handling(graph, op, f, "cpu") for (f,) in dims] for dims in op.rule.operands)
    assert images == [Handling.LOCAL, Handling.SUM, Handling.HALO, Handling.HALO]
    assert weights[:2] == [Handling.LOCAL, Handling.SUM]


def test_shards_of_a_slice_borrow_the_rows_past_their_ends() -> None:
    """Drop the first two of 16 rows: split over one of two axes, over both, and with the columns split too."""
    graph = read_graph(trace(lambda x: x[2:], (f32(16, 6),), name="slice").module)
    (op,) = (op for op in graph.ops if op.kind == "slice")
    assert op.rule is not None
    (row,), (column,) = op.rule.operands[0]
    states = np.array([[WHOLE, WHOLE], [row, WHOLE], [WHOLE, row], [row, row], [row, column], [column, row]])
    borrowed = [{}, {(0,): 2 * 6 * 4}, {(1,): 1 * 6 * 4}, {(0, 1): 2 * 6 * 4}, {(0,): 2 * 3 * 4}, {(1,): 1 * 2 * 4}]
    found: list[dict[tuple[int, ...], float]] = [{} for _ in states]
    for each in shifts(graph, op, states, (4, 2)):
        shards = math.prod((4, 2)[axis] for axis in each.axes)
        assert each.kind == "collective-permute" and each.senders == pytest.approx((shards - 1) / shards)
        for state in np.flatnonzero(each.size):
            found[state][each.axes] = found[state].get(each.axes, 0.0) + each.size[state]
    assert found == borrowed


def test_compound_dims_are_left_to_the_reshapes_around() -> None:
    program = trace(lambda x: x.reshape(16, 4, 16), (X,), name="reshape")
    graph = read_graph(program.module)
    (op,) = (op for op in graph.ops if op.kind == "reshape")
    assert op.rule is not None and op.rule.operands[0][1] == (1, 2)
    assert whole_factors(graph, op, "cpu") == {1, 2}


@pytest.mark.heavy
def test_planning_and_running_a_mirrored_tensor() -> None:
    """Plan a reversal along the only dim that can be split, under a tight limit. It is permuted, not gathered."""

    def step(w: Any, x: Any) -> Any:
        return jnp.tanh(lax.rev(jnp.sin(x) * w, (1,))) * 2

    program = trace(step, (f32(1, 8192), f32(1, 8192)), name="mirror")
    plan = make_plan(program, Options(topology="cpu:8", mesh="x=8", memory_limit=60_000)).plan
    assert {c.kind for c in plan.prediction.collectives} == {"collective-permute"}
    lowered = plan.lower(program.fn, *program.args)
    collectives = read_collectives(lowered.compile().as_text(), MESH)
    assert wire_by_axis(collectives).get("x", 0) == plan.prediction.wire_bytes["x"]
    rng = np.random.default_rng(0)
    values = [rng.normal(size=a.shape).astype(np.float32) for a in program.args]
    np.testing.assert_allclose(plan.jit(step)(*values), jax.jit(step)(*values), rtol=1e-6, atol=1e-6)
