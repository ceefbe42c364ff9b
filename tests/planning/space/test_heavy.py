"""Costs of single heavy ops: sorts, gathers, matmuls of narrow types."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost import Compute, Topology, make_mesh
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.space import op_models
from autoshard.planning.space.decision_model import Node
from autoshard.planning.space.op_work import OpModel
from autoshard.program import trace


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def priced(fn: Callable, *args: jax.ShapeDtypeStruct, topology: str = "v5e:2x2", kind: str) -> Node:
    """Return the node of the only op of that kind; the unsplit op is its first strategy."""
    program = trace(fn, args, name="heavy")
    parsed = Topology.parse(topology)
    model = build_model(
        program, analyse_program(program, parsed.backend), make_mesh(parsed, {"data": parsed.num_devices}), 1 << 40
    )
    (found,) = (node for node in model.nodes if node.kind == "op" and model.graph.ops[node.ref].kind == kind)
    return found


def seconds(fn: Callable, *args: jax.ShapeDtypeStruct, topology: str = "v5e:2x2", kind: str) -> np.ndarray:
    """Return the compute time of the only op of that kind in each of its strategies, the unsplit op first."""
    return next(iter(priced(fn, *args, topology=topology, kind=kind).time.values()))


def test_a_kind_has_the_price_of_its_entry_and_the_roofline_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width, topology = 1 << 16, 256, "h100:4"

    def found() -> Node:
        args = shape(rows, width), shape(dtype="int32")
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=rows // 2)
        return priced(cut, *args, topology=topology, kind="dynamic_slice")

    moved = 4 * width * (rows + rows // 2)
    roofline = float(Compute(Topology.parse(topology)).op_seconds(0, moved))
    plain = found()
    assert plain.time[-1, "compute"][0] == pytest.approx(roofline, rel=1e-6) and not plain.memory
    entry = OpModel(streamed=lambda work, size: work.zeros + 7.0, memory=lambda work: np.full(len(work.states), 11))
    monkeypatch.setattr(op_models, "OP_MODELS", {**op_models.OP_MODELS, "dynamic_slice": entry})
    other = found()
    assert set(other.time[-1, "compute"]) == {7.0}
    assert [set(term.usage) for term in other.memory] == [{11}]


@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:4", "cpu:4"])
def test_a_sort_costs_more_than_one_pass_and_is_split_along_other_dims(topology: str) -> None:
    rows, length = 1024, 65536
    times = seconds(lambda x: jnp.sort(x, axis=1), shape(rows, length), topology=topology, kind="sort")
    compute = Compute(Topology.parse(topology))
    assert times[0] > 1.9 * float(compute.memory_seconds(2 * 4 * rows * length))
    assert times.min() == pytest.approx(times[0] / 4, rel=0.1)


def test_long_runs_take_more_steps_and_those_beyond_the_chip_more_passes() -> None:
    compute = Compute(Topology.parse("v5e:1x1"))
    elements, size = 1 << 30, 8 << 30
    runs = [float(compute.sort_seconds(elements, length, 1, size)) for length in (1 << 10, 1 << 20)]
    assert runs[1] / runs[0] == pytest.approx((20 * 21) / (10 * 11), rel=0.01)
    # 2^24 elements of 4 bytes fill half of the 128 MiB; 2^28 need four more levels, in 10 more passes.
    far = float(compute.memory_seconds(size * 11.0))
    assert float(compute.sort_seconds(elements, 1 << 28, 1, size)) >= far
    assert compute.sort_seconds(elements, 1024, 3, size) == pytest.approx(2 * runs[0], rel=0.01)


def test_a_sort_of_pairs_moves_both() -> None:
    keys = seconds(lambda x: jnp.sort(x), shape(1 << 20), kind="sort")
    pairs = seconds(lambda x: jnp.argsort(x), shape(1 << 20), kind="sort")
    assert pairs[0] == pytest.approx(1.5 * keys[0], rel=0.01)


def test_a_gather_of_rows_reads_them_and_one_of_elements_whole_bursts() -> None:
    compute = Compute(Topology.parse("v5e:2x2"))
    count = 1 << 16
    rows = seconds(lambda t, i: t[i], shape(1 << 20, 256), shape(count, dtype="int32"), kind="gather")
    assert rows[0] == pytest.approx(float(compute.op_seconds(0, (2 * 4 * 256 + 4) * count)), rel=1e-6)
    # A table of 4 MiB is brought onto the chip, where reads are faster by the ratio of the bandwidths.
    near = seconds(lambda t, i: t[i], shape(4096, 256), shape(count, dtype="int32"), kind="gather")
    on_chip = 4 * 256 / compute.topology.chip.vmem_over_hbm_bandwidth
    assert near[0] == pytest.approx(float(compute.op_seconds(0, (4 * 256 + on_chip + 4) * count)), rel=1e-6)
    single = seconds(lambda t, i: t[i], shape(1 << 20), shape(count, dtype="int32"), kind="gather")
    assert single[0] == pytest.approx(float(compute.op_seconds(0, (512 + 4 + 4) * count)), rel=1e-6)


@pytest.mark.parametrize("tables, near", [(8, True), (13, False)])
def test_rows_of_stacked_tables_are_those_of_their_columns(tables: int, near: bool) -> None:
    """Read 131,072 rows of 8 columns of each table: v5e brings 8 tables of 8 MiB onto the chip, and 13 take bursts."""
    count, own = (1 << 17) * tables, (1 << 18) * tables * 8 * 4

    def found(table: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.vmap(lambda one, i: one[i], (0, 1), 1)(table, ids)

    times = seconds(found, shape(tables, 1 << 18, 8), shape(1 << 17, tables, dtype="int32"), kind="gather")
    compute = Compute(Topology.parse("v5e:2x2"))
    assert near == (own <= 96 << 20), "the table of 64 MiB was on the chip, that of 104 was not"
    on_chip = 32 / compute.topology.chip.vmem_over_hbm_bandwidth
    read = on_chip if near else 512
    assert times[0] == pytest.approx(float(compute.op_seconds(0, (4 + read + on_chip) * count)), rel=0.01)


def test_scatters_into_compact_tables_read_updates_in_order() -> None:
    """Add 131,072 rows to each of 13 tables of 8 columns: on v5e the result of 104 MiB was on the chip."""
    count, own = (1 << 17) * 13, (1 << 18) * 13 * 32

    def added(table: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.vmap(lambda one, i, r: one.at[i].add(r), (0, 1, 1))(table, ids, jnp.sin(rows))

    ids, rows = shape(1 << 17, 13, dtype="int32"), shape(1 << 17, 13, 8)
    times = seconds(added, shape(13, 1 << 18, 8), ids, rows, kind="scatter")
    compute = Compute(Topology.parse("v5e:2x2"))
    on_chip = 2 * 32 * count / compute.topology.chip.vmem_over_hbm_bandwidth
    most = float(compute.op_seconds(0, (4 + 32) * count + own + on_chip))
    assert most / 3 < times[0] <= 1.01 * most


@pytest.mark.parametrize(("topology", "passes"), [("v5e:2x2", 3), ("h100:4", 1)])
def test_a_gather_along_an_inner_dim_on_tpus_copies_the_table_before_it_and_the_rows_after_it(
    topology: str, passes: int
) -> None:
    """Price the resize of images. For 256 x 64 x 32 x 256 to twice the width, v5e's schedule has three such passes."""
    images, index = (256, 64, 32, 256), shape(64, 1, dtype="int32")

    def resized(x: jax.Array, i: jax.Array) -> jax.Array:
        dims = jax.lax.GatherDimensionNumbers(offset_dims=(0, 1, 3), collapsed_slice_dims=(2,), start_index_map=(2,))
        return jax.lax.gather(x, i, dims, (256, 64, 1, 256), mode="promise_in_bounds")

    times = seconds(resized, shape(*images, dtype="bfloat16"), index, topology=topology, kind="gather")
    # The table is read as often as the result is written, and each row twice.
    read, written = 2 * 256 * 64 * 64 * 256, 2 * 256 * 64 * 64 * 256
    moved = read + written + (passes - 1) * (written / 2 + written)
    assert times[0] == pytest.approx(float(Compute(Topology.parse(topology)).op_seconds(0, moved)), rel=0.01)


def test_a_scatter_on_gpus_reads_and_writes_a_row_for_each_update() -> None:
    """Add up indices, updates, rows read and written, and the table that is filled, as XLA's cost analysis does."""
    count, table = 1 << 16, 4096
    args = shape(table, 256), shape(count, dtype="int32"), shape(count, 256)
    times = seconds(lambda t, i, u: t.at[i].add(u), *args, topology="h100:4", kind="scatter")
    moved = count * (4 + 3 * 4 * 256) + table * 4 * 256
    assert times[0] == pytest.approx(float(Compute(Topology.parse("h100:4")).op_seconds(0, moved)), rel=0.01)


@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:4"])
def test_a_dot_of_tensors_with_the_same_dims_is_a_product_and_a_sum(topology: str) -> None:
    """Price such a dot at the speed of memory, as in attention's backward pass: it does not use the matrix unit."""
    rows, inner = 1 << 16, 128
    args = shape(32, rows, inner), shape(32, rows, inner)
    times = seconds(lambda a, b: jnp.einsum("hsd,hsd->hs", a, b), *args, topology=topology, kind="dot_general")
    moved = 4 * 32 * rows * (2 * inner + 1)
    assert times[0] == pytest.approx(float(Compute(Topology.parse(topology)).op_seconds(0, moved)), rel=0.02)
    assert times.min() == pytest.approx(times[0] / 4, rel=0.1)


@pytest.mark.parametrize(("topology", "longer"), [("v5e:2x2", 6.0), ("h100:4", 1.0)])
def test_a_matmul_of_the_highest_precision_runs_the_matrix_unit_six_times(topology: str, longer: float) -> None:
    size = 8192
    plain, precise = (
        float(
            seconds(
                functools.partial(jnp.dot, precision=precision),
                *[shape(size, size)] * 2,
                topology=topology,
                kind="dot_general",
            )[0]
        )
        for precision in (None, "highest")
    )
    assert precise / plain == pytest.approx(longer, rel=0.06)


@pytest.mark.parametrize(
    ("dtype", "topology", "faster"),
    [
        ("int8", "v5e:2x2", 2.0),
        ("int8", "v4:2x2x1", 1.0),
        ("float8_e4m3fn", "tpu7x:2x2x1", 2.0),
        ("float8_e4m3fn", "v5p:2x2x1", 1.0),
        ("int8", "h100:4", 2.0),
        ("float8_e5m2", "h200:4", 2.0),
    ],
)
def test_narrow_matmuls_run_at_the_rate_of_their_type(dtype: str, topology: str, faster: float) -> None:
    def multiply(a, b):
        return jax.lax.dot(a, b, preferred_element_type=jnp.int32 if a.dtype == jnp.int8 else jnp.float32)

    size = 16384
    narrow, usual = (
        float(seconds(multiply, *[shape(size, size, dtype=d)] * 2, topology=topology, kind="dot_general")[0])
        for d in (dtype, "bfloat16")
    )
    peak = Compute(Topology.parse(topology)).topology.peak_flops
    assert peak(dtype) == pytest.approx(faster * peak("bfloat16"), rel=0.01)
    assert 2 * size**3 / peak(dtype) <= narrow <= usual
    assert usual / narrow <= 1.05 * faster
