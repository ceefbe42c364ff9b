"""Values that fit on the chip are priced at on-chip bandwidth if the compiler stores them there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost import Topology, make_mesh
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.space.decision_model import RESERVED, Model, Residency
from autoshard.planning.space.op_models import heavy_seconds
from autoshard.planning.space.op_work import OpWork
from autoshard.program import Program, trace


WIDTH = 1024


def half(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def chain(rows: int) -> Program:
    """Trace two matmuls. The value between them is written and read once."""

    def run(x: Any, w: Any, v: Any) -> Any:
        return jnp.tanh(x @ w) @ v

    return trace(run, (half(rows, WIDTH), half(WIDTH, WIDTH), half(WIDTH, WIDTH)), name="chain")


def scanned(rows: int, layers: int = 4) -> Program:
    """Trace layers in a loop that carries a value."""

    def run(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, w)[0]

    return trace(run, (half(rows, WIDTH), half(layers, 2, WIDTH, WIDTH)), name="scanned")


def built(program: Program, topology: str = "v5e:4x4") -> Model:
    parsed = Topology.parse(topology)
    mesh = make_mesh(parsed, {"data": parsed.num_devices})
    return build_model(program, analyse_program(program, parsed.backend), mesh, parsed.usable_bytes)


def between(model: Model) -> int:
    """Return the first matmul's result."""
    return next(op.results[0] for op in model.graph.ops if op.kind == "dot_general")


def test_a_value_stays_if_its_share_fits() -> None:
    model = built(chain(1 << 20))
    tensor, chip = between(model), model.mesh.topology.chip
    whole = model.graph.tensors[tensor].bytes
    room = chip.vmem_bytes - RESERVED
    assert whole > room
    fits, too_large = room / 2, 2 * room
    assert model.residency.streamed(tensor, [fits, too_large]).tolist() == [
        pytest.approx(fits / chip.vmem_over_hbm_bandwidth),
        too_large,
    ]


def test_what_enters_or_leaves_is_in_main_memory() -> None:
    model = built(chain(1 << 10))
    for tensor in (*model.graph.arguments, *model.graph.results):
        assert model.residency.streamed(tensor, 1000.0) == 1000.0


@pytest.mark.parametrize(("rows", "on_chip"), [(1 << 12, True), (1 << 20, False)])
def test_what_a_loop_carries_is_on_the_chip_if_all_of_a_trip_fits(rows: int, on_chip: bool) -> None:
    model = built(scanned(rows))
    (loop,) = model.graph.loops
    devices = model.mesh.topology.num_devices
    for carry in (each for each in loop.carries if model.graph.tensors[each.body].shape):
        shard = model.graph.tensors[carry.body].bytes / devices
        assert (model.residency.streamed(carry.body, shard) < shard) == on_chip
        for tensor in (carry.init, carry.result):
            assert model.residency.share[tensor] == 0
    assert model.graph.tensors[between(model)].loop == loop.id
    assert model.residency.share[between(model)] > 0


@pytest.mark.parametrize(("width", "on_chip"), [(1 << 9, True), (1 << 13, False)])
def test_a_weight_of_every_trip_is_on_the_chip_if_it_fits_whole(width: int, on_chip: bool) -> None:
    def run(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda h, x: (jnp.tanh(x + h @ w), None), x[0], x)[0]

    model = built(trace(run, (half(64, 1 << 10, width), half(width, width)), name="recurrence"))
    weight = model.graph.arguments[1]
    whole = model.graph.tensors[weight].bytes
    assert (model.residency.streamed(weight, whole) < whole) == on_chip
    slices = next(op for op in model.graph.ops if op.kind == "dynamic_slice")
    assert model.residency.share[slices.operands[0]] == 0


def test_what_is_written_during_a_value_s_life_has_to_fit_with_it() -> None:
    def run(x: Any, w: Any, v: Any) -> Any:
        first, second = x @ w[:, :WIDTH], x @ w
        return (second @ v) @ (first.T @ first)

    program = trace(run, (half(1 << 16, WIDTH), half(WIDTH, 4 * WIDTH), half(4 * WIDTH, WIDTH)), name="together")
    model = built(program)
    made = [op.results[0] for op in model.graph.ops if op.kind == "dot_general"]
    sizes = [model.graph.tensors[t].bytes for t in made]
    room = model.mesh.topology.chip.vmem_bytes - RESERVED
    assert sizes[1] == 4 * sizes[0]
    # The second value lives until the third is computed from it, the first until the fourth is.
    assert model.residency.share[made[1]] == pytest.approx(room / sum(sizes[1:3]))
    assert model.residency.share[made[0]] == pytest.approx(room / sum(sizes[:4]))


def test_layers_that_repeat_are_alike_and_what_they_save_is_in_main_memory() -> None:
    """Give values of unrolled layers shares by their own lifetimes. Values of the last layers live shortest."""

    def loss(w: Any, x: Any) -> Any:
        for layer in w:
            x = x + jnp.tanh(x @ layer[0]) @ layer[1]
        return jnp.sum(x.astype(jnp.float32) ** 2)

    program = trace(jax.grad(loss), ([half(2, WIDTH, WIDTH)] * 12, half(1 << 12, WIDTH)), name="layers")
    model = built(program)
    products = [model.graph.tensors[op.results[0]] for op in model.graph.ops if op.kind == "dot_general"]
    shares = [float(model.residency.share[t.id]) for t in products if t.shape == (1 << 12, WIDTH)]
    # One product of each layer, and none of its gradients, is saved. Some differ at the ends of the program.
    assert len(shares) >= 4 * 12 - 1 and shares.count(0.0) >= 12
    assert len(set(shares)) < 6


def test_a_saved_value_is_read_on_the_chip_by_the_ops_that_follow_at_once() -> None:
    """Read a product that the backward pass needs too: a norm reads it at once, gradients after many writes."""

    def loss(w: Any, x: Any) -> Any:
        for layer in w:
            x = x @ layer
            x = jnp.tanh(x - x.mean(0) * jax.lax.rsqrt(x.var(0) + 1e-5))
        return jnp.sum(x.astype(jnp.float32) ** 2)

    model = built(trace(jax.grad(loss), ([half(WIDTH, WIDTH)] * 40, half(1 << 14, WIDTH)), name="norms"))
    product, residency = between(model), model.residency
    shard = model.graph.tensors[product].bytes / model.mesh.topology.num_devices
    readers = [f.root for f in model.liveness.fusions if product in f.reads]
    assert residency.share[product] == 0 and residency.streamed(product, shard) == shard
    near = [bool(residency.streamed(product, shard, reader) < shard) for reader in readers]
    assert near[0] and not near[-1] and near == sorted(near, reverse=True)
    # One that does not fit is read from main memory even by the next op.
    room = model.mesh.topology.chip.vmem_bytes - RESERVED
    assert residency.streamed(product, 2.0 * room, readers[0]) == 2.0 * room


@pytest.mark.parametrize("topology", ["h100:8", "cpu:8", "v4:2x2x2"])
def test_chips_without_room_read_everything_from_main_memory(topology: str) -> None:
    model = built(chain(1 << 10), topology)
    assert not model.residency.share.any()
    assert model.residency.streamed(between(model), np.array([64.0])).tolist() == [64.0]


def test_a_matmul_of_what_is_there_takes_less_time() -> None:
    """Trace a matmul of many rows and few columns: it is memory-bound if its operand is in main memory."""

    def run(x: Any, w: Any, v: Any) -> Any:
        return jnp.sum((x @ w) @ v)

    model = built(trace(run, (half(1 << 16, 64), half(64, 64), half(64, 64)), name="thin"))
    nowhere = Residency(model.graph, model.liveness, Topology.parse("h100:8").chip)
    op = [op for op in model.graph.ops if op.kind == "dot_general"][1]
    states = np.full((1, 1), -1)
    there, away = (
        heavy_seconds(OpWork(model.graph, op, states, model.axis_sizes, model.compute, where, model.padding))
        for where in (model.residency, nowhere)
    )
    assert there[0] < 0.8 * away[0]
