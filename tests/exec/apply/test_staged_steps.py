"""JAX steps as a program for each stage: they compute what `jax.jit` computes on one device."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autoshard
from autoshard import UserError
from autoshard.exec import measure
from autoshard.exec.apply import staged_steps
from autoshard.exports import export_plan
from autoshard.planning import Plan


STAGED: dict[str, Any] = {"stages": 2, "schedule": "1f1b", "microbatches": 2}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def _layer(x: jax.Array, weights: Any) -> jax.Array:
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]


def decoder_step(params: Any, state: Any, batch: Any) -> Any:
    """Run one step of a small model of words, with a clipped AdamW and a count of right answers."""

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        x = params["words"][batch["ids"]]
        for number, weights in enumerate(params["blocks"]):
            with autoshard.segment(f"block {number}"):
                x = (jax.checkpoint(_layer) if number % 2 else _layer)(x, weights)
        logits = x @ params["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean(), (logits.argmax(-1) == batch["labels"]).mean()

    (value, right), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, {"loss": value, "right": right}


def unet_step(params: Any, state: Any, batch: Any) -> Any:
    """Run one step of a net with a skip connection, a jitted block and a penalty on all weights; the loss is a sum."""

    @jax.jit
    def block(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ weights["kernel"] + weights["bias"])

    def loss(params: Any) -> jax.Array:
        with autoshard.segment("down"):
            skip = block(params["down"], batch["x"])
        with autoshard.segment("middle"):
            x = block(params["middle"], skip)
        with autoshard.segment("up"):
            x = block(params["up"], x) + skip
        with autoshard.segment("head"):
            x = block(params["head"], x)
        return ((x - batch["y"]) ** 2).sum()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), state + 1, value


def forward(params: Any, batch: Any) -> Any:
    """Run a forward pass with results by row, a mean, and numbers of classes."""
    x = batch["x"]
    for number, weights in enumerate(params):
        with autoshard.segment(f"layer {number}"):
            x = jnp.tanh(x @ weights)
    return {"rows": x, "mean": (x**2).mean(), "class": x.argmax(-1)}


def _weights(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape) / 4


def decoder() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    blocks = [{"up": _weights(16, 32 + number), "down": _weights(32 + number, 16)} for number in range(4)]
    params = {"words": _weights(24, 16), "blocks": blocks, "head": _weights(16, 24)}
    ids = jax.random.randint(jax.random.key(0), (16, 8), 0, 24)
    return decoder_step, (params, OPTIMIZER.init(params), {"ids": ids, "labels": jnp.roll(ids, 1, 1)})


def unet() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    names = ("down", "middle", "up", "head")
    params = {
        name: {"kernel": _weights(16, 16) + number / 16, "bias": _weights(16)} for number, name in enumerate(names)
    }
    return unet_step, (params, jnp.int32(0), {"x": _weights(16, 16), "y": _weights(16, 16)})


def classifier() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return forward, ([_weights(16, 16) + number / 16 for number in range(4)], {"x": _weights(8, 16)})


PROGRAMS = {"decoder": decoder, "unet": unet, "classifier": classifier}


def planned(name: str, folder: Path, mesh: str | None = None, **options: Any) -> Plan:
    """Return the plan of one of these programs on eight CPU devices."""
    file = folder / f"{name}.py"
    file.write_text(f"from tests.exec.apply.test_staged_steps import {name} as program\n")
    return autoshard.plan(str(file), topology="cpu:8", mesh=mesh, program_options=options)


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("decoder", None, {"stages": 2, "schedule": "1f1b", "microbatches": 4}),
        ("decoder", "stage=2,data=2,model=2", {"stages": 2, "schedule": "interleaved:2", "microbatches": 4}),
        ("decoder", None, {"stages": 4, "schedule": "zero-bubble", "microbatches": 8}),
        ("unet", None, {"stages": 2, "schedule": "1f1b", "microbatches": 8}),
        ("unet", "stage=2,data=2,model=2", {"stages": 2, "schedule": "zero-bubble", "microbatches": 4}),
        ("unet", "stage=2,data=4", {"stages": 2, "schedule": "interleaved:2", "microbatches": 2}),
        ("classifier", None, {"stages": 4, "schedule": "1f1b", "microbatches": 4}),
    ],
)
def test_planned_stages_compute_what_one_device_computes(
    name: str, mesh: str | None, options: dict[str, Any], tmp_path: Path
) -> None:
    plan = planned(name, tmp_path, mesh, **options)
    step, args = PROGRAMS[name]()
    run, alone = plan.jit(step), jax.jit(step)
    ours, theirs = args, args
    for _ in range(3 if name != "classifier" else 1):
        results, wanted = run(*ours), alone(*theirs)
        ours, theirs = ((*each[:2], args[2]) if len(args) == 3 else args for each in (results, wanted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), results, wanted)


def test_gradients_of_weights_fill_the_bubble(tmp_path: Path) -> None:
    rows = {}
    for schedule in ("1f1b", "zero-bubble"):
        plan = planned("unet", tmp_path, **STAGED | {"schedule": schedule, "microbatches": 8})
        assert plan.pipeline is not None
        table = plan.pipeline.timetable()
        rows[schedule] = table.step_time_s
        weights = sum(work.weights for row in table.rows for work in row)
        assert weights == (2 * 8 if schedule == "zero-bubble" else 0)
    assert rows["zero-bubble"] <= rows["1f1b"]


def test_each_stage_stores_its_own_parameters(tmp_path: Path) -> None:
    plan = planned("unet", tmp_path, **STAGED)
    step, args = unet()
    params, _, _ = plan.jit(step)(*args)
    devices = [params[name]["kernel"].sharding.device_set for name in ("down", "head")]
    assert devices[0].isdisjoint(devices[1]) and len(devices[0] | devices[1]) == 8
    assert "run `plan.jit(step)`" in pytest.raises(UserError, plan.lower, step, args).value.args[0]


def test_a_step_by_stage_is_measured_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("captured", tmp_path, **STAGED | {"microbatches": 4})
    step, args = captured()
    program = autoshard.trace(step, args, make_args=lambda seed: jax.tree.map(np.asarray, args))
    measured = measure(program, plan, steps=1, warmup=0, check=True)
    assert measured.check is not None and measured.check.passed and not measured.edges
    assert not measured.wire_predicted and not measured.collectives and measured.step_time_s > 0
    whole = staged_steps._whole
    monkeypatch.setattr(
        staged_steps, "_whole", lambda relation, total, count, dtype: whole(relation, total, count + 1, dtype)
    )
    measured = measure(program, plan, steps=1, warmup=0, check=True)
    assert measured.check is not None and not measured.check.passed and measured.failed


def test_donated_state_is_consumed(tmp_path: Path) -> None:
    plan = planned("decoder", tmp_path, **STAGED | {"microbatches": 4})
    step, args = decoder()
    run = plan.jit(step, donate_argnums=(0, 1))
    placed = jax.device_put(args[:2], run.shardings(*args)[:2])
    run(*placed, args[2])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(placed[0]))


def test_a_module_of_flax_is_updated_in_place(tmp_path: Path) -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(4)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for number, layer in enumerate(self.layers):
                with autoshard.segment(f"layer {number}"):
                    x = nnx.tanh(layer(x))
            return x

    def step(model: Net, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda model: ((model(batch) - batch) ** 2).mean())(model)
        optimizer.update(model, grads)
        return value

    def made() -> tuple[Net, nnx.Optimizer, jax.Array]:
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), _weights(8, 16)

    program = autoshard.trace(step, made())
    file = tmp_path / "flax.py"
    file.write_text("import tests.exec.apply.test_staged_steps as here\n\n\ndef program():\n    return here.OFFERED\n")
    globals()["OFFERED"] = program
    plan = autoshard.plan(str(file), topology="cpu:4", program_options=STAGED)
    ours, theirs = made(), made()
    run, alone = plan.jit(step), nnx.jit(step)
    for _ in range(2):
        np.testing.assert_allclose(run(*ours), alone(*theirs), rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), nnx.state(ours[0]), nnx.state(theirs[0])
    )


def test_values_of_the_trace_and_several_results_are_right(tmp_path: Path) -> None:
    """Differentiate a sum and return means, counts, constants and a captured array's product."""
    step, args = captured()
    plan = planned("captured", tmp_path, **STAGED | {"microbatches": 4})
    results, wanted = plan.jit(step)(*args), jax.jit(step)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), results, wanted)


def captured() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    mixing = _weights(16, 16)

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            x = batch["x"]
            for number, weights in enumerate(params):
                with autoshard.segment(f"layer {number}"):
                    x = jnp.tanh(x @ weights @ mixing)
            return (x**2).sum(), x

        (_, x), grads = jax.value_and_grad(loss, has_aux=True)(params)
        metrics = {"mean": (x**2).mean(), "positive": (x > 0).sum(), "rate": jnp.float32(0.5), "size": (x**2).sum()}
        metrics["mixing"] = mixing
        return jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads), metrics

    return step, ([_weights(16, 16) + number / 16 for number in range(4)], {"x": _weights(16, 16)})


def penalised() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a step that adds a penalty to a sum over examples, and returns neither."""

    def train(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x = batch["x"]
            for number, weights in enumerate(params):
                with autoshard.segment(f"layer {number}"):
                    x = jnp.tanh(x @ weights)
            return (x**2).sum() + sum((p**2).sum() for p in params)

        return jax.tree.map(lambda p, g: p - 1e-2 * g, params, jax.grad(loss)(params))

    return train, ([_weights(16, 16) + number / 16 for number in range(4)], {"x": _weights(16, 16)})


def test_a_penalty_on_a_sum_over_examples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a gradient is neither a mean nor a sum over examples"):
        planned("penalised", tmp_path, **STAGED)


def test_arrays_that_are_gone_or_given_twice_are_refused(tmp_path: Path) -> None:
    plan = planned("unet", tmp_path, **STAGED)
    step, args = unet()
    run = plan.jit(step, donate_argnums=(0, 1))
    placed = jax.device_put(args[0], run.shardings(*args)[0])
    run(placed, *args[1:])
    with pytest.raises(UserError, match="was donated to an earlier call, and is gone"):
        run(placed, *args[1:])
    kernel = _weights(16, 16)
    twice = {name: {"kernel": kernel, "bias": each["bias"] + 0} for name, each in unet()[1][0].items()}
    with pytest.raises(UserError, match="is an array that is donated twice"):
        run(twice, *unet()[1][1:])
    with pytest.raises(UserError, match="is of a JAX step: run it by"):
        export_plan(plan, "torch-pipelining")


HEAD = """
import jax, jax.numpy as jnp, autoshard

@jax.custom_vjp
def clipped(x):
    return x

clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))
whole = jax.sharding.NamedSharding(jax.sharding.AbstractMesh((4,), ("data",)), jax.sharding.PartitionSpec())

def program():
    def step(params, batch, key):
        def loss(params):
            x = batch["x"]
            for number, weights in enumerate(params):
                with autoshard.segment(f"layer {number}"):
                    x = LAYER
            return LOSS
        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g SCALE, params, grads), value
    shape = jax.ShapeDtypeStruct
    weights = [shape((8, 8), "float32") for _ in range(4)]
    return step, (weights, {"x": shape((8, 8), "float32")}, shape((2,), "uint32"))
"""
LAYER, MEAN = "jnp.tanh(x @ weights)", "(x ** 2).mean()"


@pytest.mark.parametrize(
    ("layer", "loss", "scale", "said"),
    [
        (LAYER, "(x * (batch['x'] > 0)).sum() / (batch['x'] > 0).sum()", "", "does not follow from those of its micro"),
        (
            "x * jax.random.bernoulli(key, 0.5, x.shape) @ weights",
            MEAN,
            "",
            "random numbers of its own",
        ),
        ("jnp.tanh(x - x.mean(0)) @ weights", MEAN, "", "which mixes examples"),
        (LAYER, MEAN, "* batch['x'].mean()", "uses the batch itself"),
        (LAYER, MEAN, "* batch['x'].shape[0]", "the update uses the number of examples"),
        (f"clipped({LAYER})", MEAN, "", "`clipped` has a gradient of its own"),
        (f"jax.pure_callback(abs, x, jax.lax.stop_gradient(x)) + {LAYER}", MEAN, "", "calls Python on the host"),
        (LAYER, MEAN + " * (x ** 2).mean()", "", "`mul` of what is reduced over examples"),
        (f"jax.lax.with_sharding_constraint({LAYER}, whole)", MEAN, "", "the step states a sharding"),
    ],
)
def test_steps_that_microbatches_change_are_refused(
    layer: str, loss: str, scale: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "step.py"
    file.write_text(textwrap.dedent(HEAD).replace("LAYER", layer).replace("LOSS", loss).replace("SCALE", scale))
    with pytest.raises(UserError) as error:
        autoshard.plan(str(file), topology="cpu:4", program_options=STAGED)
    assert said in str(error.value) and ("step.py:" in str(error.value) or "clipped" in said)


def test_a_step_without_marks_or_of_another_plan_is_refused(tmp_path: Path) -> None:
    plan = planned("unet", tmp_path, **STAGED)
    _, args = unet()

    def unmarked(params: Any, state: Any, batch: Any) -> Any:
        value = ((batch["x"] @ params["down"]["kernel"] - batch["y"]) ** 2).sum()
        return params, state + 1, value

    with pytest.raises(UserError, match="cuts at segment `down`, which this step does not have"):
        plan.jit(unmarked)(*args)
    file = tmp_path / "unmarked.py"
    file.write_text(
        "import jax\n\n\ndef program():\n    return lambda x: x * 2, (jax.ShapeDtypeStruct((8,), 'float32'),)\n"
    )
    with pytest.raises(UserError, match="nor marks by autoshard.segment"):
        autoshard.plan(str(file), topology="cpu:4", program_options=STAGED)
    with pytest.raises(UserError, match="3 microbatches do not divide the 16 examples"):
        planned("unet", tmp_path, **STAGED | {"microbatches": 3})
