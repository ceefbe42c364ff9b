"""Shardings, pins, regions and groups, compared with programs that XLA partitions and runs on eight devices."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard import mlir
from autoshard.mlir import Window
from autoshard.mlir.module_results import place_of
from tests.mlir.interpreting import Pin, Spec, compiled, random


SIZES = {"a b": 4, 'c"': 2}
"""Axes whose names need quotes and escapes."""
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), tuple(SIZES))


@dataclasses.dataclass(frozen=True)
class Region:
    op: int
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    summed: tuple[str, ...] = ()


A, C = ("a b",), ('c"',)


def placed(*dims: Any) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*dims))


def lowered(fn: Callable[..., Any], arguments: Any, *places: Any) -> Any:
    """Lower a function with arguments of these shardings; its results have any."""
    return jax.jit(fn, keep_unused=True, in_shardings=places).lower(*arguments)


def two_matmuls(x: Any, w: Any, v: Any) -> Any:
    return jnp.tanh(x @ w) @ v


MATRICES = random(16, 8), random(8, 32, seed=1), random(32, 4, seed=2)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "specs",
    [
        [(A, ()), ((), C), (C, ())],
        [((), ()), ((), ("a b", 'c"')), (("a b", 'c"'), ())],
        [(("a b", 'c"'), ()), ((), ()), ((), ())],
        [(C, A), (A, ()), ((), ())],
    ],
)
def test_propagation_gives_the_shardings_that_xla_compiles(specs: list[Any]) -> None:
    """Leave the result open, and read its sharding from XLA's executable."""
    lowering = lowered(two_matmuls, MATRICES, *(placed(*(dim or None for dim in dims)) for dims in specs))
    specs_of = mlir.propagated_specs(
        mlir.to_bytes(lowering.compiler_ir("stablehlo")), SIZES, [Spec(dims) for dims in specs], [None]
    )
    last = max(number for number, _ in specs_of)
    found = specs_of[(last - 1, 0)] if (last, 0) not in specs_of else specs_of[(last, 0)]
    ours = placed(*(dim or None for dim in found or ()))
    assert lowering.compile().output_shardings.is_equivalent_to(ours, 2)


def looked_up(table: Any, ids: Any, head: Any) -> Any:
    rows = table[ids]
    rows = rows / rows.sum(1, keepdims=True)
    return rows, rows @ head


@pytest.mark.heavy
@pytest.mark.parametrize("table", [((), ()), (A, ())])
@pytest.mark.parametrize("ids", [((),), (A,)])
@pytest.mark.parametrize("head", [(A, ()), ((), A)])
def test_rows_of_a_lookup_are_split_as_xla_splits_them(table: Any, ids: Any, head: Any) -> None:
    """Give one axis to token ids and the head, which want it for different dims; the ids get a dim of one."""
    args, specs = (random(32, 8), np.arange(16), random(8, 4)), (table, ids, head)
    lowering = lowered(looked_up, args, *(placed(*(dim or None for dim in dims)) for dims in specs))
    module = mlir.to_bytes(lowering.compiler_ir("stablehlo"))
    inlined = mlir.inline_calls(mlir.parse_module(module))
    ops = mlir.number_ops(inlined)
    numbers = {op: number for number, op in enumerate(ops)}
    specs_of = mlir.propagated_specs(module, SIZES, [Spec(dims) for dims in specs], [None, None])
    for value, theirs in zip(ops[-1].operands, lowering.compile().output_shardings, strict=True):
        ours = placed(*(dim or None for dim in specs_of[place_of(value, numbers)] or ()))
        assert theirs.is_equivalent_to(ours, 2), (ours, theirs)


def scanned_step(weights: Any, moments: Any, ids: Any) -> Any:
    """Compute one step with recomputed layers in a loop, whose gradients meet an average in the optimizer's state."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return x + jnp.tanh((x * w["scale"]) @ w["up"]) @ w["down"], None

    def loss(weights: Any) -> Any:
        layers = {name: array for name, array in weights.items() if name != "table"}
        return jnp.square(jax.lax.scan(jax.checkpoint(layer), weights["table"][ids], layers)[0]).mean()

    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)(weights))
    return jax.tree.map(jnp.subtract, weights, moments), moments


@pytest.mark.heavy
@pytest.mark.parametrize("dims", [(0, 0), (1, 2), (2, 1)])
def test_matmuls_of_a_loop_are_split_as_xla_splits_them(dims: tuple[int, int]) -> None:
    """Give the batch's axes to dims of the optimizer's state too; 0 leaves the moment of a matrix whole.

    They meet in the backward pass's loop, which reads the activations that the forward pass saved.
    """
    layers, batch, width, ffn = 3, 80, 16, 48
    axes, whole = tuple(SIZES), placed()
    shapes = {"down": (layers, ffn, width), "scale": (layers, width), "table": (32, width), "up": (layers, width, ffn)}
    weights = {name: random(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    matrices = [placed(*(axes if each == dim else None for each in range(3))) if dim else whole for dim in dims]
    moments = {"down": matrices[0], "scale": placed(None, axes), "table": placed(axes), "up": matrices[1]}
    places = jax.tree.map(lambda _: whole, weights), moments, placed(axes)
    state = (weights, weights, np.arange(batch) % 32)
    lowering = jax.jit(scanned_step, in_shardings=places, out_shardings=places[:2]).lower(*state)
    inlined = mlir.inline_calls(mlir.parse_module(mlir.to_bytes(lowering.compiler_ir("stablehlo"))))
    leaves = zip(jax.tree.leaves(places), jax.tree.leaves(state), strict=True)
    specs = [spec_of_placed(place, array.ndim) for place, array in leaves]
    specs_of = mlir.propagated_specs(mlir.to_bytes(inlined), SIZES, specs, specs[:-1])
    ours: Counter[tuple[int, ...]] = Counter()
    for number, op in enumerate(mlir.number_ops(inlined)):
        if op.name == "stablehlo.dot_general":
            shape = mlir.tensor_type(op.results[0].type)[0]
            split = specs_of[number, 0] or ((),) * len(shape)
            ours[tuple(n // math.prod(SIZES[a] for a in d) for n, d in zip(shape, split, strict=True))] += 1
    found = re.finditer(r"f32\[([\d,]+)\]\S* dot\(", lowering.compile().as_text())
    theirs = Counter(tuple(map(int, each[1].split(","))) for each in found)
    for rows in ((batch // 8, ffn), (batch // 8, width)):
        assert ours[rows] == theirs[rows] > 0, (ours, theirs)


def spec_of_placed(place: NamedSharding, rank: int) -> Spec:
    """Return the spec of a sharding on the mesh."""
    dims = [() if each is None else (each,) if isinstance(each, str) else tuple(each) for each in place.spec]
    return Spec((*dims, *[()] * (rank - len(dims))))


@pytest.mark.heavy
def test_sums_and_reshards_name_axes_that_need_quotes() -> None:
    """Compare with the collectives of the compiled program: it sums over the axis of the contracted dim."""
    specs = [Spec((A, C)), Spec((C, ())), Spec(((), ()))]
    lowering = lowered(two_matmuls, MATRICES, placed(A, C), placed(C, None), placed())
    module = mlir.inline_calls(mlir.parse_module(mlir.to_bytes(lowering.compiler_ir("stablehlo"))))
    mlir.set_shardings(module, "mesh", SIZES, specs, [Spec(((), ()))])
    (gathered,) = mlir.explicit_reshards(module)
    assert gathered["before"] == (A, ()) and gathered["after"] == ((), ()) and gathered["shape"] == (16, 4)
    (total,) = mlir.explicit_sums(module)
    assert total["summed"] == C and total["shape"] == (16, 32)
    text = lowering.compile().as_text()
    (groups,) = set(re.findall(r"all-reduce\(.*replica_groups=(\S+),", text))
    assert groups.startswith(("{{0,1},{2,3},{4,5},{6,7}}", "[4,2]<=[8]"))


@pytest.mark.heavy
@pytest.mark.parametrize("row", [0, 5, 15])
def test_rows_of_a_split_constant_are_written_where_they_are_asked_for(row: int) -> None:
    """Compare with numpy: without a barrier XLA writes into a wrong shard."""
    values = random(16, 8)

    def run(factor: Any) -> Any:
        return lax.with_sharding_constraint(jnp.asarray(values), placed(("a b", 'c"'))).at[row].set(0) * factor

    def guard(module: Any) -> None:
        mlir.guard_indexing(mlir.inline_calls(module))

    expected = values * 2
    expected[row] = 0
    lowering = lowered(run, [np.full((16, 8), 2, np.float32)], placed())
    np.testing.assert_array_equal(compiled(lowering, guard, np.full((16, 8), 2, np.float32)), expected)


@pytest.mark.heavy
def test_reshards_at_both_sides_of_a_manual_computation_are_read() -> None:
    """Gather inside of a region over one axis, and its result outside: XLA gathers over each axis once."""

    def body(x: Any) -> Any:
        return lax.with_sharding_constraint(x, PartitionSpec(None, None)) * 2

    def run(x: Any) -> Any:
        rows = PartitionSpec("a b", None)
        made = jax.shard_map(body, mesh=MESH, in_specs=rows, out_specs=rows, axis_names={"a b"}, check_vma=False)(x)
        return lax.with_sharding_constraint(made, placed())

    lowering = lowered(run, [random(16, 8)], placed(A, C))
    module = mlir.inline_calls(mlir.parse_module(mlir.to_bytes(lowering.compiler_ir("stablehlo"))))
    inner, outer = mlir.explicit_reshards(module)
    assert (inner["shape"], inner["before"], inner["after"]) == ((4, 8), ((), C), ((), ()))
    assert (outer["shape"], outer["before"], outer["after"]) == ((16, 8), (A, ()), ((), ()))
    assert lowering.compile().as_text().count(" all-gather(") == 2


@pytest.mark.heavy
def test_pinned_values_have_their_shardings_and_values_stay() -> None:
    pins = [Pin(0, 0, Spec((C, A))), Pin(1, 0, Spec(((), ("a b", 'c"')))), Pin(-1, 1, Spec((A, C)), (0, 1))]
    lowering = lowered(two_matmuls, MATRICES, placed(), placed(), placed())

    def pin(module: Any) -> None:
        mlir.inline_calls(module)
        assert mlir.insert_pins(module, "mesh", SIZES, pins) == len(pins) and module.operation.verify()

    found = compiled(lowering, pin, *MATRICES)
    np.testing.assert_allclose(found, two_matmuls(*MATRICES), rtol=1e-4, atol=1e-5)
    collectives = re.findall(r" (all-reduce|all-gather|all-to-all)", lowering.compile().as_text())
    assert collectives, "the pinned dims are gathered again"


@pytest.mark.heavy
@pytest.mark.parametrize("axes", [("a b",), ('c"',), ("a b", 'c"')])
def test_groups_of_a_collective_are_the_devices_that_it_sums_over(axes: tuple[str, ...]) -> None:
    """Sum powers of two, one of each device: the bits of the total are the members of the device's group."""

    def body(x: Any) -> Any:
        return lax.psum(x, axes)

    spec = PartitionSpec(tuple(SIZES))
    run = jax.jit(jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False))
    powers = np.int32(2) ** np.arange(8, dtype=np.int32)
    totals = np.asarray(run(powers))
    module = mlir.inline_calls(mlir.parse_module(run.lower(powers).as_text()))
    (reduce,) = [op for op in mlir.number_ops(module) if op.name == "stablehlo.all_reduce"]
    for group in mlir.device_groups(reduce):
        for device in group:
            assert totals[device] == sum(1 << member for member in group)


@pytest.mark.heavy
def test_pairs_of_a_permute_are_the_devices_that_send_and_receive() -> None:
    pairs = [(0, 1), (1, 2), (3, 0)]
    spec = PartitionSpec(tuple(SIZES))

    def body(x: Any) -> Any:
        return lax.ppermute(x, "a b", pairs)

    run = jax.jit(jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False))
    numbers = np.arange(1, 9, dtype=np.int32)
    received = np.asarray(run(numbers))
    module = mlir.inline_calls(mlir.parse_module(run.lower(numbers).as_text()))
    (permute,) = [op for op in mlir.number_ops(module) if op.name == "stablehlo.collective_permute"]
    wanted = np.zeros(8, np.int32)
    for source, target in mlir.device_groups(permute):
        wanted[target] = numbers[source]
    np.testing.assert_array_equal(received, wanted)


def convolution(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def grouped(x: Any, w: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=4)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("fn", "arguments", "operands", "result"),
    [
        (convolution, (random(2, 8, 8, 4), random(3, 3, 4, 6)), [((), A, C, ()), ((),) * 4], ((), A, C, ())),
        (convolution, (random(2, 8, 8, 4), random(3, 3, 4, 6)), [(C, A, (), ()), ((),) * 4], (C, A, (), ())),
        (grouped, (random(2, 8, 8, 8), random(3, 3, 2, 8)), [((), C, (), A), ((), (), (), A)], ((), C, (), A)),
        (lambda x: lax.slice(x, (2, 0), (14, 8)), (random(16, 8),), [((), C)], ((), C)),
        (lambda x: lax.pad(x, np.float32(3), ((1, -1, 0), (0, 0, 0))), (random(16, 8),), [(A, C), ()], (A, C)),
    ],
)
def test_regions_compute_what_the_whole_op_does(fn: Any, arguments: Any, operands: Any, result: Any) -> None:
    lowering = lowered(fn, arguments, *(placed(*(dim or None for dim in dims)) for dims in operands[: len(arguments)]))
    kinds = ("convolution", "slice", "pad")

    def split(module: Any) -> None:
        mlir.inline_calls(module)
        numbers = [n for n, op in enumerate(mlir.number_ops(module)) if op.name.rpartition(".")[2] in kinds]
        region = Region(numbers[0], tuple(map(Spec, operands)), (Spec(result),))
        assert mlir.insert_regions(module, "mesh", SIZES, mlir.regions_of(module, [region])) == 1
        assert module.operation.verify()

    np.testing.assert_allclose(compiled(lowering, split, *arguments), fn(*arguments), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(("stride", "spread"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_a_shard_with_its_halo_computes_its_part_of_a_window(size: int, stride: int, spread: int) -> None:
    """Run every shard alone, with zeros beyond the edges, and compare with the sums over the windows of the whole."""
    length, split = 24, 0
    x = random(length)

    def sums(x: np.ndarray, w: Window) -> np.ndarray:
        wide = np.pad(x, (max(0, w.low), max(0, w.high)))
        wide = wide[max(0, -w.low) : len(wide) - max(0, -w.high)]
        last = len(wide) - (w.size - 1) * w.spread - 1
        return np.array([wide[at : at + w.size * w.spread : w.spread].sum() for at in range(0, last + 1, w.stride)])

    reach = (size - 1) * spread
    for low in sorted({-1, 0, 1, reach // 2, reach}):
        for high in sorted({-1, 0, 1, reach - reach // 2, reach}):
            whole = Window(size, stride, low, high, spread=spread)
            source = f"""
                func.func @main(%x: tensor<{length}xf32>, %z: tensor<f32>) -> tensor<{len(sums(x, whole))}xf32> {{
                  %0 = "stablehlo.reduce_window"(%x, %z) ({{
                    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
                      %s = stablehlo.add %a, %b : tensor<f32>
                      stablehlo.return %s : tensor<f32>
                  }}) {{window_dimensions = array<i64: {size}>, window_strides = array<i64: {stride}>,
                       window_dilations = array<i64: {spread}>,
                       padding = dense<[[{low}, {high}]]> : tensor<1x2xi64>}}
                    : (tensor<{length}xf32>, tensor<f32>) -> tensor<{len(sums(x, whole))}xf32>
                  return %0 : tensor<{len(sums(x, whole))}xf32>
                }}"""
            op = mlir.number_ops(mlir.parse_module(source))[0]
            wanted = sums(x, whole)
            for dim in mlir.windowed_dims("reduce_window", op.attributes, [(length,), ()], (len(wanted),)):
                assert dim.window == whole and not dim.summed
                for shards in (each for each in (2, 3, 4, 6) if dim.fits(each)):
                    split += 1
                    padded = np.pad(x, (dim.before, dim.after))
                    own = length // shards
                    parts = [padded[k * own : k * own + own + dim.before + dim.after] for k in range(shards)]
                    joined = np.concatenate([sums(part, dim.local(shards)) for part in parts])
                    np.testing.assert_allclose(joined, wanted, rtol=1e-5, atol=1e-6)
    assert split


def test_numbers_of_a_convolution_are_those_that_jax_wrote() -> None:
    spatial = (2, 0), (3, 1), (1, 3)
    numbers = lax.ConvDimensionNumbers((3, 1, 2, 0), (2, 0, 3, 1), (0, 2, 1, 3))

    def run(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), [(1, 1), (2, 0)], (2, 1), (1, 1), numbers, feature_group_count=2)

    module = mlir.parse_module(jax.jit(run).lower(random(6, 4, 5, 3), random(2, 3, 4, 3)).as_text())
    (op,) = [op for op in mlir.number_ops(mlir.inline_calls(module)) if op.name == "stablehlo.convolution"]
    assert mlir.convolution_dims(op.attributes) == tuple(map(list, spatial)) and mlir.has_groups(op.attributes)
    assert mlir.numbers_of(op.attributes["lhs_dilation"]) == [2, 1]


@pytest.mark.parametrize(
    ("precision", "passes"),
    [
        (None, 1),
        ("high", 3),
        ("highest", 6),
        (("default", "high"), 3),
        (lax.DotAlgorithmPreset.BF16_BF16_F32, 1),
        (lax.DotAlgorithmPreset.BF16_BF16_F32_X3, 3),
        (lax.DotAlgorithmPreset.BF16_BF16_F32_X6, 6),
        (lax.DotAlgorithmPreset.F32_F32_F32, 6),
    ],
)
def test_passes_of_a_matmul(precision: Any, passes: int) -> None:
    def run(x: Any, w: Any) -> Any:
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())), precision=precision)

    lowering = jax.jit(run).trace(random(4, 4), random(4, 4)).lower(lowering_platforms=("tpu",))
    (op, _) = mlir.number_ops(mlir.parse_module(lowering.as_text()))
    assert mlir.precision_passes(op.attributes) == passes


def test_a_constraint_has_its_spec_after_propagation() -> None:
    def step(x: Any, y: Any) -> Any:
        return jax.lax.with_sharding_constraint(x @ y, placed(None, A)) + 1.0

    lowering = lowered(step, MATRICES[:2], placed(), placed())
    specs_of = mlir.propagated_specs(
        mlir.to_bytes(lowering.compiler_ir("stablehlo")), SIZES, [Spec(((), ()))] * 2, [None]
    )
    assert specs_of[0, 0] == specs_of[1, 0] == ((), A)
