"""Values that the program itself offloads to its host: their memory, their traffic, and runs of such plans."""

import importlib.util
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard.cost import HOST, Compute, Topology, make_mesh
from autoshard.errors import UserError
from autoshard.exec import compile_plan
from autoshard.exec.apply import planned_lowering
from autoshard.exec.apply.planned_lowering import check_host_memory
from autoshard.graph import analyse, read_graph
from autoshard.planning import Options, make_plan
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.program import Program, trace


LAYERS, WIDTH, INNER, TOKENS = 4, 64, 256, 128
POLICIES = jax.checkpoint_policies


def step(offload: bool):
    """Return a step of two-matmul layers whose inner value is saved on the device or on its host."""
    if offload:
        policy = POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=["inner"],
            offload_src="device", offload_dst="pinned_host",
        )  # fmt: skip
    else:
        policy = POLICIES.save_only_these_names("inner")

    def layer(x, weights):
        inner = checkpoint_name(x @ weights["up"], "inner")
        return jnp.tanh(inner) @ weights["down"] + x, None

    def loss(params, x):
        out, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params)
        return jnp.mean(jnp.square(out))

    def fn(params, x):
        value, gradient = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    return fn


def arguments(rng: np.random.Generator):
    sizes = {"up": (LAYERS, WIDTH, INNER), "down": (LAYERS, INNER, WIDTH)}
    params = {name: jnp.asarray(rng.normal(size=shape) / 8, jnp.float32) for name, shape in sizes.items()}
    return params, jnp.asarray(rng.normal(size=(TOKENS, WIDTH)), jnp.float32)


def shapes():
    return jax.eval_shape(lambda: arguments(np.random.default_rng(0)))


def program(offload: bool) -> Program:
    return trace(step(offload), shapes(), name="offload")


def test_a_saved_stack_that_is_offloaded_takes_no_device_memory() -> None:
    graph = read_graph(program(True).module)
    assert [op.kind for op in graph.ops if op.kind in ("to_host", "to_device")] == ["to_host", "to_device"]
    found = analyse(graph)
    away = {graph.tensors[t].shape for t in found.hosted}
    assert (LAYERS, TOKENS, INNER) in away and not {b[0] for b in found.buffers} & found.hosted
    assert away <= {(LAYERS, TOKENS, INNER), (1, TOKENS, INNER), (TOKENS, INNER)}
    assert not analyse(read_graph(program(False).module)).hosted


def test_what_one_trip_sends_is_stored_while_the_next_one_computes() -> None:
    graph = read_graph(program(True).module)
    forward, backward = sorted(graph.loops, key=lambda loop: loop.start)
    sizes = [(graph.tensors[t].elements, start, stop) for t, start, stop in analyse(graph).buffers]
    moved = {span[1:] for span in sizes if span[0] == TOKENS * INNER}
    # One value is in transit until it can be fetched again. The next one is then fetched ahead.
    assert {(forward.start, backward.start), (backward.start, backward.stop)} <= moved
    kept = analyse(read_graph(program(False).module))
    assert len([1 for size, *_ in sizes if size == TOKENS * INNER]) == 2 + sum(
        graph.tensors[t].elements == TOKENS * INNER for t, _, _ in kept.buffers
    )


@pytest.mark.parametrize(("long", "attends"), [(False, True), (True, False), (True, True)])
def test_stacks_that_stay_are_copied_with_others_that_go_where_attention_is_long(long: bool, attends: bool) -> None:
    policy = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["inner"], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip

    def layer(x, weights):
        if attends:
            scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", x, x))
            x = x + jnp.einsum("bst,btd->bsd", scores, x)
        inner = checkpoint_name(x @ weights["up"], "inner")
        return jnp.tanh(inner) @ weights["down"] + x, None

    def loss(params, x):
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params)[0].sum()

    length = 2 * WIDTH if long else WIDTH // 2
    params, _ = shapes()
    graph = read_graph(trace(jax.grad(loss), (params, jax.ShapeDtypeStruct((2, length, WIDTH), "float32"))).module)
    forward, backward = sorted(graph.loops, key=lambda loop: loop.start)
    spans = [b[1:] for b in analyse(graph).buffers if graph.tensors[b[0]].shape == (LAYERS, 2, length, WIDTH)]
    assert ((forward.stop, backward.stop) in spans) == (long and attends)


def test_other_stacks_that_stay_are_not_copied() -> None:
    policy = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=["inner"], names_which_can_be_offloaded=["begin"], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip

    def layer(x, weights):
        x = checkpoint_name(x, "begin")
        inner = checkpoint_name(x @ weights["up"], "inner")
        return jnp.tanh(inner) @ weights["down"] + x, None

    def loss(params, x):
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params)[0].sum()

    params, _ = shapes()
    length = 4 * WIDTH
    graph = read_graph(trace(jax.grad(loss), (params, jax.ShapeDtypeStruct((2, length, WIDTH), "float32"))).module)
    forward, backward = sorted(graph.loops, key=lambda loop: loop.start)
    buffers = analyse(graph).buffers
    assert any(graph.tensors[tensor].shape[:1] == (LAYERS,) for tensor, _, _ in buffers)
    assert (forward.stop, backward.stop) not in [b[1:] for b in buffers if graph.tensors[b[0]].shape[:1] == (LAYERS,)]


def residual_step(policy, name: str):
    """Return a step of residual layers in float32. Only their two matmuls read the carry; `name` names a value."""

    def layer(x, weights):
        x = checkpoint_name(x, "begin") if name == "begin" else x
        inner = checkpoint_name(x @ weights["up"], "inner")
        return checkpoint_name(x + jax.nn.relu(inner) @ weights["down"], "end"), None

    def fn(params, x):
        def loss(params):
            return jnp.mean(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params)[0])

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    return fn


def offloading(name: str):
    return POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[name], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
def test_the_compiler_holds_as_much_with_an_offloaded_stack(topology: str) -> None:
    """Estimate the stack of the layers' inputs, long sequences of few features: stored once, rounded for its
    matmuls.
    """
    if importlib.util.find_spec("libtpu") is None:  # an optional extra
        pytest.skip("libtpu is not installed")
    params = {name: jax.ShapeDtypeStruct((8, 512, 512), "float32") for name in ("up", "down")}
    made = trace(residual_step(offloading("inner"), "inner"), (params, jax.ShapeDtypeStruct((8, 8192, 512), "float32")))
    plan = make_plan(made, Options(topology=topology, mesh="data=4")).baseline_plans["data_parallel"]
    compiled = compile_plan(made, plan, quick=True)
    # Stored in float32, the stack alone would need as many bytes as the whole step, and its copy as many again.
    assert compiled.peak_compiled is not None and 8 * 2 * 8192 * 512 * 4 > 0.9 * compiled.peak_compiled
    assert plan.prediction.peak_bytes == pytest.approx(compiled.peak_compiled, rel=0.3)
    assert plan.prediction.memory["activations"] == pytest.approx(compiled.memory_at_peak["activations"], rel=0.2)


@pytest.mark.parametrize(("name", "idle"), [("begin", False), ("inner", False), ("end", True), ("none", False)])
def test_a_policy_that_offloads_nothing_is_named(name: str, idle: bool) -> None:
    made = trace(residual_step(offloading(name), name), shapes())
    assert [f"offloads `{name}`, which has no effect" in note for note in made.notes] == [True] * idle
    assert bool(analyse(read_graph(made.module)).hosted) == (name in ("begin", "inner"))


def test_offloading_frees_the_memory_of_the_saved_stack() -> None:
    made = [make_plan(program(offload), Options(topology="v5e:2x2", mesh="data=4")) for offload in (False, True)]
    on_device, on_host = (result.baseline_plans["data_parallel"].prediction for result in made)
    saved = on_device.memory["activations"] - on_host.memory.get("activations", 0)
    assert saved == LAYERS * TOKENS * INNER * 4  # small as the stack is, no baseline splits it


def test_traffic_to_the_host_is_that_of_the_saved_values_once_each_way() -> None:
    model = build_model(
        p := program(True), analyse_program(p, "tpu"), make_mesh(Topology.parse("v5e:2x2"), {"data": 4}), 1 << 40
    )
    blocks: dict[int, float] = {}
    for node in model.nodes:
        for (block, what), seconds in node.time.items():
            if what == HOST:
                # The first state is whole on every device.
                blocks[block] = blocks.get(block, 0.0) + float(seconds[0])
    once = float(Compute(model.mesh.topology).host_seconds(LAYERS * TOKENS * INNER * 4))
    assert list(blocks.values()) == pytest.approx([once, once])


def test_a_plan_of_an_offloading_step_runs() -> None:
    args = arguments(np.random.default_rng(1))
    plan = make_plan(program(True), Options(topology="cpu:8", mesh="data=4,model=2")).plan
    found, wanted = plan.jit(step(True))(*args), jax.jit(step(False))(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


def test_a_file_that_places_values_on_the_host_is_understood() -> None:
    text = jax.jit(step(True)).trace(*shapes()).lower(lowering_platforms=("tpu",)).as_text()
    assert re.search("annotate_device_placement", text)
    assert analyse(read_graph(text.encode())).hosted


class Device:
    device_kind = "toy"

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds

    def addressable_memories(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(kind=kind) for kind in self.kinds]


def test_devices_whose_host_holds_nothing_are_refused() -> None:
    check_host_memory(jax.devices()[0])
    with pytest.raises(UserError, match="toy devices have no memory there .* only device; plan it with a recipe that"):
        check_host_memory(Device("device"))


def test_a_plan_that_offloads_is_refused_where_nothing_can_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(program(True), Options(topology="cpu:8", mesh="data=4,model=2")).plan

    def refuse(device: object) -> None:
        raise UserError(f"no host memory beside {device}")

    monkeypatch.setattr(planned_lowering, "check_host_memory", refuse)
    with pytest.raises(UserError, match="no host memory"):
        plan.jit(step(True))(*arguments(np.random.default_rng(1)))
