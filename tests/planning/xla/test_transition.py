"""Reshards between specs against XLA's partitioner, which compiles each one alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.cost import Collectives, Mesh, Topology, make_mesh
from autoshard.exec import read_collectives, wire_by_axis
from autoshard.planning.explain.plan_pins import gather_intermediates, intermediate_states
from autoshard.planning.xla.axis_assignments import PARTIAL, WHOLE, Step, enumerate_states, transition, waves


SHAPE = (16, 32, 64)
SIZES = {"a": 4, "b": 2}
State = tuple[int, ...]
Wire = dict[str, int]
"""Bytes that one device puts on the wire, by mesh axis."""

Measured = dict[tuple[State, State], tuple[Wire, Wire]]
"""Predicted and compiled bytes of each pair of states."""


@functools.cache
def cpu(**sizes: int) -> Mesh:
    return make_mesh(Topology.parse("cpu:8"), sizes)


def jax_sharding(state: State, rank: int, mesh: Mesh) -> NamedSharding:
    devices = jax.make_mesh(
        tuple(mesh.axes.values()), tuple(mesh.axes), axis_types=(jax.sharding.AxisType.Auto,) * len(mesh.axes)
    )
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis, dim in zip(mesh.axes, state, strict=True):
        if dim >= 0:
            dims[dim].append(axis)
    return NamedSharding(devices, PartitionSpec(*(tuple(d) or None for d in dims)))


def wire(steps: list[Step], mesh: Mesh) -> Wire:
    """Return the bytes on the wire of the first pair of states."""
    names, prices = list(mesh.axes), Collectives(mesh)
    bytes_by_axis: Wire = {}
    for step in steps:
        size = float(step.size[0, 0])
        for axis, share in prices.wire_bytes(step.kind, tuple(names[a] for a in step.axes), size).items():
            if share:
                bytes_by_axis[axis] = bytes_by_axis.get(axis, 0) + round(float(share))
    return bytes_by_axis


def predicted(source: State, target: State, shape: tuple[int, ...], mesh: Mesh) -> Wire:
    one, other = np.array([source]), np.array([target])
    return wire(transition(one, other, shape, 4, 4, Collectives(mesh)), mesh)


def compiled(fn: Any, mesh: Mesh, into: list[Any], out: Any, *args: Any) -> Wire:
    text = jax.jit(fn, in_shardings=into, out_shardings=out).lower(*args).compile().as_text()
    assert text is not None
    return wire_by_axis(read_collectives(text, mesh))


def moved(source: State, target: State, shape: tuple[int, ...], mesh: Mesh) -> Wire:
    into, out = jax_sharding(source, len(shape), mesh), jax_sharding(target, len(shape), mesh)
    return compiled(lambda x: x, mesh, [into], out, jax.ShapeDtypeStruct(shape, jnp.float32))


def renamed(pair: tuple[State, State]) -> tuple[State, State]:
    """Rename the dims of a pair by the order in which they appear."""
    names: dict[int, int] = {WHOLE: WHOLE}
    for dim in (*pair[0], *pair[1]):
        names.setdefault(dim, len(names) - 1)
    return tuple(names[d] for d in pair[0]), tuple(names[d] for d in pair[1])


def pairs() -> list[tuple[State, State]]:
    """List the pairs of states of a three-dim tensor on two axes: all up to the order of dims, forwards and back."""
    states = [tuple(map(int, s)) for s in enumerate_states(SHAPE, list(SIZES.values()))]
    forwards = {renamed((s, t)) for s in states for t in states if s != t}
    back = {WHOLE: WHOLE, 0: 2, 1: 1, 2: 0}
    mirrored = {(tuple(back[d] for d in s), tuple(back[d] for d in t)) for s, t in forwards}
    return sorted(forwards | mirrored)


def changes_alone(source: State, target: State) -> bool:
    """Return True if exactly one axis changes, and the other axis is on neither of the two dims involved."""
    changed = [axis for axis in range(2) if source[axis] != target[axis]]
    if len(changed) != 1:
        return False
    (axis,) = changed
    return source[1 - axis] < 0 or source[1 - axis] not in (source[axis], target[axis])


@pytest.fixture(scope="module")
def measured() -> Measured:
    mesh = cpu(**SIZES)
    return {(s, t): (predicted(s, t, SHAPE, mesh), moved(s, t, SHAPE, mesh)) for s, t in pairs()}


@pytest.mark.heavy
def test_one_axis_that_changes_alone_is_exact(measured: Measured) -> None:
    alone = {pair: found for pair, found in measured.items() if changes_alone(*pair)}
    assert len(alone) >= 20
    assert {pair: found for pair, found in alone.items() if found[0] != found[1]} == {}


def test_gathers_are_exact_for_any_input(measured: Measured) -> None:
    """Gather several axes of one dim at once, and several dims one after the other. Dims that stay are not touched."""
    gathers = {
        (s, t): found
        for (s, t), found in measured.items()
        if all(b in (a, WHOLE) for a, b in zip(s, t, strict=True))
        and not any(a == b != WHOLE and s.count(a) > 1 for a, b in zip(s, t, strict=True))
    }
    assert len(gathers) >= 10
    assert {pair: found for pair, found in gathers.items() if found[0] != found[1]} == {}


def test_most_pairs_are_near_what_is_compiled(measured: Measured) -> None:
    ratios = {pair: (sum(p.values()) + 1) / (sum(c.values()) + 1) for pair, (p, c) in measured.items()}
    far = {pair: ratio for pair, ratio in ratios.items() if not 0.75 <= ratio <= 1 / 0.75}
    assert len(far) <= 0.15 * len(measured), far
    assert min(ratios.values()) > 1 / 3, far


def test_what_moves_to_a_dim_that_is_sliced_over_a_minor_axis_is_put_in_order_there(measured: Measured) -> None:
    """Order the shards within the slices that they move to. Compiled bytes count a permute by its sending devices."""
    whole_below = {(s, t): found for (s, t), found in measured.items() if s[0] >= 0 and s[1] == WHOLE}
    below = [found for (s, t), found in whole_below.items() if WHOLE != t[0] == t[1] != s[0]]
    assert len(below) >= 2
    for predicted_wire, compiled_wire in below:
        assert predicted_wire == pytest.approx(compiled_wire, rel=0.4)
        assert set(predicted_wire) == set(compiled_wire) == set(SIZES)


def test_free_moves_are_those_that_are_free(measured: Measured) -> None:
    assert {pair for pair, (p, _) in measured.items() if not p} == {pair for pair, (_, c) in measured.items() if not c}


# Sums


def contracted(source: State, target: State, mesh: Mesh, dtype: Any = jnp.float32) -> tuple[Wire, Wire]:
    """Return the bytes predicted and compiled for a matmul [16, 64] x [64, 32].

    The axes that are `PARTIAL` in `source` split the contracted dim. The others split the result's dims.
    """
    names = list(mesh.axes)
    left = tuple(1 if d == PARTIAL else d if d == 0 else WHOLE for d in source)
    right = tuple(0 if d == PARTIAL else d if d == 1 else WHOLE for d in source)
    into = [jax_sharding(left, 2, mesh), jax_sharding(right, 2, mesh)]
    inner = NamedSharding(into[0].mesh, PartitionSpec(*_dims(source, names)))
    steps = transition(
        np.array([source]), np.array([target]), (16, 32), jnp.dtype(dtype).itemsize, 4, Collectives(mesh)
    )

    def product(a: Any, b: Any) -> Any:
        return jax.lax.with_sharding_constraint(a @ b, inner)

    arguments = jax.ShapeDtypeStruct((16, 64), dtype), jax.ShapeDtypeStruct((64, 32), dtype)
    return wire(steps, mesh), compiled(product, mesh, into, jax_sharding(target, 2, mesh), *arguments)


def _dims(state: State, names: list[str]) -> list[Any]:
    return [tuple(n for n, d in zip(names, state, strict=True) if d == dim) or None for dim in range(2)]


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((PARTIAL, WHOLE), (WHOLE, WHOLE)),
        ((WHOLE, PARTIAL), (WHOLE, WHOLE)),
        ((PARTIAL, PARTIAL), (WHOLE, WHOLE)),
        ((0, PARTIAL), (0, WHOLE)),
        ((PARTIAL, 1), (WHOLE, 1)),
        ((PARTIAL, WHOLE), (0, WHOLE)),
        ((PARTIAL, PARTIAL), (0, 1)),
        ((0, PARTIAL), (0, 0)),
        ((0, PARTIAL), (0, 1)),
        ((PARTIAL, 1), (0, 1)),
    ],
)
def test_sums_are_exact(source: State, target: State, dtype: Any) -> None:
    found, wanted = contracted(source, target, cpu(**SIZES), dtype)
    assert found == wanted != {}


def test_tpus_scatter_sums_where_they_end_split() -> None:
    mesh = make_mesh(Topology.parse("v5e:2x4"), SIZES)
    steps = transition(
        np.array([[0, PARTIAL], [0, PARTIAL], [0, 1]]),
        np.array([[0, WHOLE], [0, 1]]),
        (256, 512),
        4,
        4,
        Collectives(mesh),
    )
    sizes = {(step.kind, step.axes): step.size.tolist() for step in steps if step.size.any()}
    local = 256 // 4 * 512 * 4
    assert sizes.pop(("reduce-scatter", (1,))) == [[0, local], [0, local], [0, 0]]
    assert sizes.pop(("all-reduce", (1,))) == [[local, 0], [local, 0], [0, 0]]
    assert sizes.pop(("all-gather", (1,))) == [[0, 0], [0, 0], [local, 0]]
    assert sizes == {}


@pytest.mark.parametrize("topology", ["v5e:4x4", "v5p:4x4x4", "v6e:4x4"])
def test_tpus_sum_whole_what_would_leave_an_odd_number_of_registers(topology: str) -> None:
    parsed = Topology.parse(topology)
    mesh = make_mesh(parsed, {"a": 4, "b": parsed.num_devices // 4})

    def kinds(target: State, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...], float]]:
        ends = np.array([(PARTIAL, WHOLE)]), np.array([target])
        return [(s.kind, s.axes, s.size[0, 0]) for s in transition(*ends, shape, 2, 2, Collectives(mesh))]

    whole = 2.0 * 2048 * 5632
    assert kinds((1, WHOLE), (2048, 5632)) == [("all-reduce", (0,), whole)]  # 11 registers on each device
    assert kinds((0, WHOLE), (5632, 2048)) == [("reduce-scatter", (0,), whole)]
    for columns in (4096, 5120, 5632 + 128):  # 8, 10 and 11.25, which are laid out in the rows
        assert kinds((1, WHOLE), (2048, columns)) == [("reduce-scatter", (0,), 2.0 * 2048 * columns)]


MATRICES = [
    # Topology, devices, itemsize and dim of gradients of matmuls, their shapes, and True for a reduce-scatter.
    ("v5e:2x4", 8, 2, 0, [(32, 1000), (32, 65536), (96, 1000), (160, 1000)], False),
    ("v5e:2x4", 8, 2, 0, [(64, 1000), (128, 1000), (512, 64), (1024, 128), (3072, 128)], True),
    ("v5e:2x4", 8, 2, 0, [(512, 1), (65536, 1), (65536, 4), (1024, 64), (3072, 96), (1032, 64), (1024, 100)], False),
    ("v5e:2x4", 8, 2, 0, [(4096, 7), (4096, 16), (2048, 64), (262144, 64), (311296, 32)], True),
    ("v5e:2x4", 8, 2, 0, [(319488, 32), (393216, 64), (524288, 96)], False),
    ("v5e:2x4", 8, 2, 1, [(64, 3072), (64, 1024), (64, 960), (4, 4096), (1000, 32), (1000, 96), (256, 524288)], False),
    ("v5e:2x4", 8, 2, 1, [(64, 4096), (8, 4096), (1000, 64), (1024, 512), (524288, 64)], True),
    ("v5e:2x4", 8, 4, 0, [(32, 1000), (96, 1000), (4096, 2), (65536, 4), (319488, 32)], False),
    ("v5e:2x4", 8, 4, 0, [(64, 1000), (4096, 5), (1024, 16), (3072, 64), (311296, 32)], True),
    ("v5e:2x4", 4, 2, 0, [(233472, 16), (188416, 32)], True),
    ("v5e:2x4", 4, 2, 0, [(235520, 16), (524288, 64)], False),
    ("v5e:4x8", 16, 2, 0, [(372736, 16)], True),
    ("v5e:4x8", 16, 2, 0, [(376832, 16)], False),
    ("v6e:2x4", 8, 2, 0, [(634880, 16)], True),
    ("v6e:2x4", 8, 2, 0, [(655360, 16)], False),
    ("v5p:2x2x2", 4, 2, 0, [(233472, 16)], True),
    ("v5p:2x2x2", 4, 2, 0, [(235520, 16)], False),
    ("v5e:2x4", 8, 4, 0, [(65536,), (4194304,)], False),
]
"""Read from libtpu 0.0.52: gradients of matmuls over a split batch, and sums of vectors."""


@pytest.mark.parametrize(("topology", "devices", "itemsize", "dim", "shapes", "scattered"), MATRICES)
def test_tpus_scatter_matrices_by_the_layout_of_their_shards(
    topology: str, devices: int, itemsize: int, dim: int, shapes: list[tuple[int, ...]], scattered: bool
) -> None:
    parsed = Topology.parse(topology)
    prices = Collectives(make_mesh(parsed, {"d": devices, "rest": parsed.num_devices // devices}))
    ends = np.array([[PARTIAL, WHOLE]]), np.array([[dim, WHOLE]])
    for shape in shapes:
        kinds = [wave.kind for wave in waves(*ends, shape, itemsize, itemsize, prices)]
        assert kinds == ["reduce-scatter" if scattered else "all-reduce"], shape


STACKS = [
    # Shape and itemsize of gradients that v5e:2x4 sums over 8 devices, and the split dims that become reduce-scatters.
    ((3, 3, 64, 2048), 2, (3,)),
    ((3, 3, 96, 1536), 2, ()),
    ((3, 3, 128, 1024), 2, (2,)),
    ((3, 3, 192, 512), 2, ()),
    ((3, 3, 256, 64), 2, (2,)),
    ((3, 3, 32, 512), 4, ()),
    ((3, 3, 64, 1024), 4, (2, 3)),
    ((3, 3, 96, 2048), 4, (3,)),
    ((3, 3, 192, 64), 4, (2,)),
    ((4, 64, 1024), 2, ()),
    ((4, 128, 1024), 2, (1,)),
]
"""Read from libtpu 0.0.52 for `bijk,bn->ijkn` and `ebk,ebn->ekn` over a split batch."""


@pytest.mark.parametrize(("shape", "itemsize", "scattered"), STACKS)
def test_tpus_scatter_stacks_of_matrices_by_whole_tiles(
    shape: tuple[int, ...], itemsize: int, scattered: tuple[int, ...]
) -> None:
    prices = Collectives(make_mesh(Topology.parse("v5e:2x4"), {"d": 8}))
    rank = len(shape)
    for dim in (rank - 2, rank - 1):
        ends = np.array([[PARTIAL]]), np.array([[dim]])
        kinds = [wave.kind for wave in waves(*ends, shape, itemsize, itemsize, prices, stacked=True)]
        assert kinds == ["reduce-scatter" if dim in scattered else "all-reduce"]


def test_what_is_summed_whole_is_sliced_for_the_sums_that_follow() -> None:
    mesh = make_mesh(Topology.parse("v5e:4x4"), {"a": 4, "b": 4})
    ends = np.array([(PARTIAL, PARTIAL)]), np.array([(1, 1)])
    steps = transition(*ends, (2048, 5632), 2, 2, Collectives(mesh))
    assert [(s.kind, s.axes, s.size[0, 0]) for s in steps] == [
        ("all-reduce", (0,), 2.0 * 2048 * 5632),
        ("reduce-scatter", (1,), 2.0 * 2048 * 1408),
    ]


def test_tpus_gather_several_dims_at_once() -> None:
    ends = np.array([[0, 1]]), np.array([[WHOLE, WHOLE]])
    for topology, groups in (("v5e:2x4", [(0, 1)]), ("cpu:8", [(1,), (0,)])):
        steps = transition(*ends, (16, 32), 4, 4, Collectives(make_mesh(Topology.parse(topology), SIZES)))
        assert [step.axes for step in steps] == groups
        assert {step.kind for step in steps} == {"all-gather"}


def test_small_gathers_over_all_devices_run_axis_by_axis_on_tpus() -> None:
    """Repeat four gathers that libtpu 0.0.52 compiled: up to 8 MiB all axes at once become an all-reduce."""
    mesh = make_mesh(Topology.parse("v5e:8x8"), {"a": 32, "b": 2})
    ends = np.array([[0, 0]]), np.array([[WHOLE, WHOLE]])
    for rows, kinds in ((8192, ["all-gather"] * 2), (9216, ["all-gather"])):
        steps = transition(*ends, (rows, 512), 2, 2, Collectives(mesh))
        assert [step.kind for step in steps] == kinds
        between = list(gather_intermediates((0, 0), (WHOLE, WHOLE), Collectives(mesh), rows * 1024))
        assert between == [(0, WHOLE)] * (len(kinds) - 1)
    one = make_mesh(Topology.parse("v6e:8x8"), {"a": 64})
    for rows, kind in ((8192, "all-reduce"), (9216, "all-gather")):
        steps = transition(np.array([[0]]), np.array([[WHOLE]]), (rows, 512), 2, 2, Collectives(one))
        assert [step.kind for step in steps] == [kind]


def test_tpus_sum_once_after_what_they_scatter() -> None:
    """Sum over two axes, one of which ends split, for one summed factor over both and for two."""
    mesh = make_mesh(Topology.parse("v5e:2x4"), SIZES)
    size = 256 * 512 * 4
    for source in ((PARTIAL, PARTIAL), (PARTIAL, PARTIAL - 1)):
        ends = np.array([source]), np.array([(WHOLE, 0), (WHOLE, WHOLE)])
        steps = transition(*ends, (256, 512), 4, 4, Collectives(mesh))
        found = [(step.kind, step.axes, step.size[0].tolist()) for step in steps]
        assert sorted(found) == [
            ("all-reduce", (0,), [size / 2, 0]),
            ("all-reduce", (0, 1), [0, size]),
            ("reduce-scatter", (1,), [size, 0]),
        ]


def test_what_a_sum_scatters_is_reported_at_once() -> None:
    """Pass no whole stage: it would cause one sum over both axes and a slice of the sum."""
    tpu = Collectives(make_mesh(Topology.parse("v5e:4x4"), {"a": 4, "b": 4}))
    assert list(intermediate_states((PARTIAL, PARTIAL), (WHOLE, 0), tpu, 512)) == []
    assert list(intermediate_states((PARTIAL, WHOLE), (0, WHOLE), tpu, 512)) == [(WHOLE, WHOLE)]
    assert list(intermediate_states((PARTIAL, PARTIAL), (0, 1), tpu, 512)) == [(0, WHOLE)]
    assert list(intermediate_states((PARTIAL, PARTIAL), (WHOLE, 0), Collectives(cpu(**SIZES)), 512)) == [(WHOLE, WHOLE)]


def test_what_a_sum_scatters_is_reported_before_what_is_gathered() -> None:
    """Insert a stage: with both ends only, GSPMD gathers the whole sum. On one dim, slice and gather are one
    exchange.
    """
    collectives = Collectives(cpu(**SIZES))
    assert list(intermediate_states((PARTIAL, 0), (1, WHOLE), collectives, 512)) == [(WHOLE, 0), (1, 0)]
    assert list(intermediate_states((PARTIAL, 0), (0, WHOLE), collectives, 512)) == [(WHOLE, 0)]
    assert list(intermediate_states((PARTIAL, 0), (1, 0), collectives, 512)) == [(WHOLE, 0)]


# Other meshes and shapes


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("sizes", "shape", "source", "target"),
    [
        ({"a": 8}, (16, 32), (0,), (1,)),
        ({"a": 8}, (16, 32), (1,), (WHOLE,)),
        ({"a": 2, "b": 2, "c": 2}, (8, 16, 32), (0, 1, 2), (0, WHOLE, 2)),
        ({"a": 2, "b": 2, "c": 2}, (8, 16, 32), (0, WHOLE, WHOLE), (0, 1, 2)),
        ({"a": 2, "b": 2, "c": 2}, (8, 16, 32), (0, 1, WHOLE), (0, 2, WHOLE)),
        ({"a": 2, "b": 2, "c": 2}, (8, 16, 32), (0, 0, 0), (WHOLE, WHOLE, WHOLE)),
        ({"a": 2, "b": 2, "c": 2}, (8, 16, 32), (0, 0, WHOLE), (1, 1, WHOLE)),
    ],
)
def test_meshes_of_one_and_three_axes(sizes: dict[str, int], shape: tuple, source: State, target: State) -> None:
    mesh = cpu(**sizes)
    assert predicted(source, target, shape, mesh) == moved(source, target, shape, mesh)


def test_every_pair_is_what_it_is_alone() -> None:
    """Compare the collectives of all pairs at once with those of each pair alone."""
    mesh, names = cpu(**SIZES), list(SIZES)
    prices = Collectives(mesh)
    states = np.array([[PARTIAL, 0], [PARTIAL, PARTIAL], *enumerate_states(SHAPE, list(SIZES.values())).tolist()])
    whole = states[2:]
    total = np.zeros((len(states), len(whole)))
    for step in transition(states, whole, SHAPE, 4, 4, prices):
        shares = prices.wire_bytes(step.kind, tuple(names[a] for a in step.axes), step.size).values()
        total += sum(np.asarray(share) for share in shares)
    for i, source in enumerate(states):
        for j, target in enumerate(whole):
            alone = sum(predicted(tuple(source), tuple(target), SHAPE, mesh).values())
            assert total[i, j] == pytest.approx(alone, abs=2)
            assert (total[i, j] == 0) == (alone == 0)


@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [({"a": 4, "b": 2}, ["reduce-scatter"] * 2), ({"a": 8}, ["all-reduce"]), ({"a": 8, "b": 1}, ["all-reduce"])],
)
def test_sums_over_a_whole_slice_are_split_axis_by_axis(sizes: dict[str, int], kinds: list[str]) -> None:
    """Split the sum by axes: TPU compilers have no other reduce-scatter over all of a slice of several hosts."""
    mesh = make_mesh(Topology.parse("v5p:2x2x2"), sizes)
    one, other = np.array([[PARTIAL] * len(sizes)]), np.array([[0] * len(sizes)])
    assert [step.kind for step in transition(one, other, SHAPE, 4, 4, Collectives(mesh))] == kinds
