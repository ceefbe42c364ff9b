"""Plans applied to JAX functions on 8 CPU devices: results, donation, pins, and refusals."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.errors import UserError
from autoshard.exec import Application, plan_mesh, read_collectives, wire_by_axis
from autoshard.exec.apply.planned_lowering import donated_aliases, lower_module
from autoshard.planning import Pin
from tests.exec import planned_programs as made
from tests.exec.planned_programs import handmade, spec


MESH = {"data": 2, "model": 4}
TENSOR_PARALLEL = {"params.up": "-,model", "params.down": "model,-", "arg1": "data,-", "arg2": "data,-"}


@pytest.fixture(scope="module")
def mlp():
    return made.mlp()


@pytest.fixture(scope="module")
def decoder():
    return made.decoder()


def largest_difference(a, b) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max() / np.abs(np.asarray(y)).max()) for x, y in pairs)


def test_a_step_gives_the_same_results_in_the_planned_places(mlp):
    plan = handmade(mlp, MESH, TENSOR_PARALLEL)
    args = mlp.make_args(0)
    params, loss = plan.jit(mlp.fn)(*args)
    assert largest_difference((params, loss), jax.jit(mlp.fn)(*args)) < 1e-6
    assert params["up"].sharding.spec == jax.sharding.PartitionSpec(None, "model")
    assert params["up"].addressable_shards[0].data.shape == (32, 16)
    assert [s.spec for s in plan.in_shardings] == [plan.arguments[name].partition_spec() for name in plan.arguments]
    assert [s.spec for s in plan.out_shardings] == [plan.results[name].partition_spec() for name in plan.results]


def test_donation_is_preserved(mlp):
    plan = handmade(mlp, MESH, TENSOR_PARALLEL)
    step = plan.jit(mlp.fn, donate_argnums=mlp.donate_argnums)
    args = jax.device_put(mlp.make_args(0), step.shardings(*mlp.args))
    step(*args)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(args[0]))
    assert not any(leaf.is_deleted() for leaf in args[1:])
    assert step.compile(*mlp.args).memory_analysis().alias_size_in_bytes == 2 * 32 * 64 * 4 // 4


def test_only_state_that_stays_in_its_place_is_written_over(mlp):
    """Reuse the buffer only of state whose spec stays: a shard of another shape cannot share the result's memory."""
    specs = {"params.up": "-,model", "params.down": "-,model"}
    plan = handmade(mlp, MESH, specs, results={"params.up": "model,-", "params.down": "-,model"})
    names = [argument.name for argument in mlp.arguments]
    results = [result.name for result in mlp.results]
    aliases = donated_aliases(mlp, plan)
    assert {names[a]: results[r] for a, r in aliases.items()} == {"params.down": "params.down"}
    compiled = lower_module(Application(plan), mlp.module, aliases).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 64 * 32 * 4 // 4
    args = mlp.make_args(0)
    out = compiled(*jax.device_put(tuple(jax.tree.leaves(args)), compiled.input_shardings[0]))
    assert largest_difference(out, jax.tree.leaves(jax.jit(mlp.fn)(*args))) < 1e-6


def test_a_jitted_function_keeps_its_own_donation(mlp):
    plan = handmade(mlp, MESH, TENSOR_PARALLEL)
    lowered = plan.lower(jax.jit(mlp.fn, donate_argnums=(0,)), *mlp.args)
    assert [leaf.donated for leaf in jax.tree.leaves(lowered.args_info)] == [True, True, False, False]


def compiled_wire(plan, program) -> dict[str, int]:
    text = plan.lower(program.fn, *program.args).compile().as_text()
    return wire_by_axis(read_collectives(text, plan_mesh(plan)))


def test_a_program_is_its_step_with_its_donation(mlp):
    plan = handmade(mlp, MESH, TENSOR_PARALLEL)
    wanted, args = jax.jit(mlp.fn)(*mlp.make_args(0)), mlp.make_args(0)
    step = plan.jit(mlp)
    args = jax.device_put(args, step.shardings(*mlp.args))
    assert largest_difference(step(*args), wanted) < 1e-6
    assert mlp.donate_argnums == (0,) and all(leaf.is_deleted() for leaf in jax.tree.leaves(args[0]))
    kept = jax.device_put(mlp.make_args(0), step.shardings(*mlp.args))
    assert largest_difference(plan.jit(mlp, donate_argnums=())(*kept), wanted) < 1e-6
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(kept))
    assert plan.lower(mlp, *mlp.args).as_text() == plan.lower(mlp.fn, *mlp.args, donate_argnums=(0,)).as_text()


def test_arguments_may_be_named(mlp):
    plan = handmade(mlp, MESH, TENSOR_PARALLEL)

    def step(params, x, y):
        return mlp.fn(params, x, y)

    params, x, y = mlp.make_args(0)
    assert largest_difference(plan.jit(step)(params, y=y, x=x), jax.jit(mlp.fn)(params, x, y)) < 1e-6
    with pytest.raises(UserError, match="`step` cannot be called so: .*'z'"):
        plan.jit(step)(params, x, y, z=y)

    def by_name(params, x, *, y):
        return mlp.fn(params, x, y)

    assert largest_difference(plan.jit(by_name)(params, x, y=y), jax.jit(mlp.fn)(params, x, y)) < 1e-6


@pytest.mark.parametrize(
    ("fn", "donate_argnums", "sentence"),
    [
        (5, None, "a plan is for a function or an autoshard.Program; found 5."),
        (None, 5, "donate_argnums: 5 is not one of the 3 positional arguments of `step`."),
        (None, "0", "donate_argnums is '0'; expected the number of a positional argument, or several."),
    ],
)
def test_other_steps_and_donations_are_refused(mlp, fn, donate_argnums, sentence):
    plan = handmade(mlp, MESH, TENSOR_PARALLEL)
    with pytest.raises(UserError) as caught:
        plan.jit(fn or mlp.fn, donate_argnums=donate_argnums)(*mlp.make_args(0))
    assert str(caught.value) == sentence


def test_pins_change_what_is_compiled(mlp):
    free = handmade(mlp, MESH, {"arg1": "data,-", "arg2": "data,-"})
    first = made.numbers(mlp, "dot_general")[0]
    pinned = dataclasses.replace(free, pins=(Pin(first, 0, spec("data,model")),))
    before, after = compiled_wire(free, mlp), compiled_wire(pinned, mlp)
    assert before.get("model", 0) == 0
    assert after["model"] > 0
    args = mlp.make_args(1)
    assert largest_difference(pinned.jit(mlp.fn)(*args), jax.jit(mlp.fn)(*args)) < 1e-5


def test_a_pin_of_one_use_leaves_the_others(mlp):
    plan = handmade(mlp, MESH, {"arg1": "data,-", "arg2": "data,-"})
    second = made.numbers(mlp, "dot_general")[1]
    one_use = dataclasses.replace(plan, pins=(Pin(0, 0, spec("-,model"), operand=(second, 0)),))
    text = one_use.lower(mlp.fn, *mlp.args).as_text()
    assert text.count("sdy.sharding_constraint") == 1
    (name, value) = re.findall(r"(%\w+) = sdy.sharding_constraint (%\w+) ", text)[0]
    assert len(re.findall(rf"{name}\b", text)) == 2, "made once, used once"
    assert len(re.findall(rf"{value}\b", text)) > 2, "the other uses take the value itself"


def test_pins_of_one_value_chain_and_loops_take_pins(decoder):
    dots = made.numbers(decoder, "dot_general")
    plan = handmade(
        decoder,
        MESH,
        made.MEGATRON,
        pins=(Pin(dots[0], 0, spec("-,data,-,-,-")), Pin(dots[0], 0, spec("-,data,-,model,-"))),
    )
    text = plan.lower(decoder.fn, *decoder.args).as_text()
    first, second = [line for line in text.splitlines() if "sdy.sharding_constraint" in line]
    assert f"sharding_constraint {first.split(' = ')[0].strip()} <" in second
    args = decoder.make_args(0)
    assert largest_difference(plan.jit(decoder.fn)(*args), jax.jit(decoder.fn)(*args)) < 1e-5


def test_plans_do_not_leak_into_each_other_or_into_jit(mlp):
    free = handmade(mlp, MESH, {"arg1": "data,-", "arg2": "data,-"})
    first = made.numbers(mlp, "dot_general")[0]
    pinned = dataclasses.replace(free, pins=(Pin(first, 0, spec("data,model")),))
    args = mlp.make_args(0)
    a = compiled_wire(free, mlp)
    pinned.jit(mlp.fn)(*args)
    assert compiled_wire(free, mlp) == a
    assert "sdy" not in jax.jit(mlp.fn).lower(*mlp.args).as_text()


def test_the_device_order_of_the_plan_is_used(mlp):
    order = (7, 6, 5, 4, 3, 2, 1, 0)
    plan = handmade(mlp, MESH, TENSOR_PARALLEL, device_order=order)
    assert [device.id for device in Application(plan).mesh.devices.flat] == list(order)
    (params, _) = plan.jit(mlp.fn)(*mlp.make_args(0))
    columns = {shard.device.id: shard.index[1].start for shard in params["up"].addressable_shards}
    assert columns[7] in (0, None) and columns[4] == 48


def test_another_lowering_gets_the_planned_body(mlp):
    """Lower for another platform, which lowers some ops differently. The planned body is the one that runs."""
    dots = made.numbers(mlp, "dot_general")
    plan = handmade(mlp, MESH, TENSOR_PARALLEL, pins=(Pin(dots[0], 0, spec("data,-")),))

    def rewritten(params, x, y):
        (down, up), loss = jax.tree.leaves(mlp.fn(params, x, y))[:2], mlp.fn(params, x, y)[1]
        return {"down": down + 0.0, "up": up + 0.0}, loss

    with pytest.raises(UserError, match="the computation has changed"):
        plan.lower(rewritten, *mlp.args)
    lowered = Application(plan).lower(rewritten, mlp.args, module=mlp.module)
    args = mlp.make_args(0)
    out = lowered.compile()(*jax.device_put(args, plan.jit(mlp.fn).shardings(*args)))
    assert lowered.as_text().count("sdy.sharding_constraint") == 1
    assert largest_difference(out, jax.jit(mlp.fn)(*args)) < 1e-6


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p, x, y: (p, x.astype(jnp.bfloat16), y), "argument `arg1` is float32[16,32] in the plan, but args[1]"),
        (lambda p, x, y: (p, jnp.zeros((8, 32)), y), "but args[1] is float32[8,32]"),
        (lambda p, x, y: ({**p, "bias": y}, x, y), "argument `params.down` is float32[64,32] in the plan"),
        (lambda p, x, y: (p, x), "it has 4 arguments, this one 3 (the plan's `arg2` is missing)"),
        (lambda p, x, y: (p, x, y, y), "it has 4 arguments, this one 5 (args[3] is not in the plan)"),
        (lambda p, x, y: (p, x, "text"), "an argument is a str; expected arrays"),
    ],
)
def test_other_arguments_are_refused(mlp, change, sentence):
    step = handmade(mlp, MESH, TENSOR_PARALLEL).jit(mlp.fn)
    with pytest.raises(UserError) as caught:
        step(*change(*mlp.make_args(0)))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_another_computation_is_refused(mlp):
    plan = handmade(mlp, MESH, TENSOR_PARALLEL)
    with pytest.raises(UserError, match="its arguments agree with mlp, but the computation has changed; plan it again"):
        plan.lower(made.sgd(lambda p, x, y: made.mlp_loss(p, x, y) * 2), *mlp.args)
    old = dataclasses.replace(plan, provenance={"versions": {"jax": "0.1"}})
    with pytest.raises(UserError, match=r"the plan was made with jax 0.1, this is"):
        old.lower(made.sgd(lambda p, x, y: made.mlp_loss(p, x, y) * 2), *mlp.args)
    with pytest.raises(UserError, match="it has 3 results, this one 1"):
        plan.lower(lambda p, x, y: made.mlp_loss(p, x, y), *mlp.args)


def test_uneven_specs_are_refused(mlp):
    plan = handmade(mlp, {"data": 8}, {}, topology="cpu:8")
    uneven = dataclasses.replace(plan, mesh={"data": 5}, device_order=(0, 1, 2, 3, 4), topology="cpu:5")
    uneven = dataclasses.replace(uneven, arguments={**plan.arguments, "arg1": spec("data,-")})
    with pytest.raises(
        UserError,
        match=r"argument `arg1` cannot be split as 16/data x 32: dim 0 has 16 elements, which data = 5 does not",
    ):
        uneven.lower(mlp.fn, *mlp.args)


@pytest.mark.parametrize("dims", ["data", "data,-,-"])
def test_a_module_whose_argument_has_other_dims_is_another_program(mlp, dims):
    plan = handmade(mlp, {"data": 8}, {}, topology="cpu:8")
    plan = dataclasses.replace(plan, arguments={**plan.arguments, "arg1": spec(dims)}, module_hash="")
    count = len(dims.split(","))
    with pytest.raises(UserError, match=f"argument `arg1` has {count} dims in the plan, 2 here; plan it again"):
        lower_module(Application(plan), mlp.module, {})


def test_a_planned_step_cannot_be_traced(mlp):
    step = handmade(mlp, MESH, TENSOR_PARALLEL).jit(mlp.fn)
    with pytest.raises(UserError, match="`step` is compiled under a plan and cannot be called inside jax.jit"):
        jax.grad(lambda p, x, y: step(p, x, y)[1])(*mlp.make_args(0))


def test_a_number_of_python_and_an_array_are_different_arguments():
    """Treat weak types as `jax.jit` does: a Python number adopts the other operand's dtype, an array keeps its own."""
    scaled = made.trace(lambda x, scale: x * scale, (jax.ShapeDtypeStruct((8,), jnp.bfloat16), 2.0), name="scaled")
    step = handmade(scaled, {"data": 8}, {"x": "data"}).jit(scaled.fn)
    x = jnp.arange(8, dtype=jnp.bfloat16)
    assert step(x, 3.0).dtype == jax.jit(scaled.fn)(x, 3.0).dtype == jnp.bfloat16
    assert jax.jit(scaled.fn)(x, jnp.float32(3)).dtype == jnp.float32
    with pytest.raises(UserError, match="the computation has changed"):
        step(x, jnp.float32(3))


def test_too_few_devices(mlp):
    plan = handmade(mlp, {"data": 16}, {}, topology="cpu:16")
    with pytest.raises(UserError, match="the plan is for cpu:16 with 16 devices, but JAX sees 8 cpu devices"):
        plan.lower(mlp.fn, *mlp.args)
