"""Programs that fix specs themselves, planned and run: constraints, arguments with shardings, manual regions."""

import functools
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import UserError
from autoshard.exec import measure
from autoshard.planning import Options, PlanResult, Spec, explain_plan, make_plan
from autoshard.program import Program, lift_constraints, trace
from tests.exec.planned_programs import assert_close


SIZES, NAMES = (4, 2), ("data", "model")
FULL = pytest.mark.full


def concrete() -> Any:
    return jax.make_mesh(SIZES, NAMES, axis_types=(AxisType.Auto,) * 2)


def abstract() -> Any:
    return AbstractMesh(SIZES, NAMES, axis_types=(AxisType.Auto,) * 2)


def f32(*shape: int, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def sgd(loss: Any) -> Any:
    def step(params: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return step


def constrained(mesh: Any) -> Any:
    """Return an MLP step whose hidden value has one unconstrained dim."""

    def loss(params: Any, x: Any) -> Any:
        hidden = x @ params["up"] if mesh is None else constrain(mesh, x @ params["up"], "data", P.UNCONSTRAINED)
        return ((jnp.tanh(hidden) @ params["down"]) ** 2).mean()

    return sgd(loss), ({"up": f32(64, 128), "down": f32(128, 64)}, f32(32, 64))


def constrain(mesh: Any, value: Any, *spec: Any) -> Any:
    return value if mesh is None else lax.with_sharding_constraint(value, NamedSharding(mesh, P(*spec)))


def scanned(mesh: Any) -> Any:
    """Return a step whose weights are gathered layer by layer, and whose carry has a spec."""

    def loss(stack: Any, x: Any) -> Any:
        def layer(hidden: Any, weight: Any) -> Any:
            weight = constrain(mesh, weight, None, "model")
            return constrain(mesh, jnp.tanh(hidden @ weight), "data", None), None

        return (lax.scan(layer, constrain(mesh, x, "data"), stack)[0] ** 2).mean()

    return sgd(loss), (f32(4, 64, 64), f32(32, 64))


def by_hand(mesh: Any) -> Any:
    """Return a step with a manual tensor-parallel layer that sums, inside a program that is not manual."""

    def inner(hidden: Any, down: Any) -> Any:
        return hidden @ down

    def summed(hidden: Any, down: Any) -> Any:
        return lax.psum(hidden @ down, "model")

    def loss(params: Any, x: Any) -> Any:
        body = inner
        if mesh is not None:
            specs = (P("data", "model"), P("model", None))
            body = jax.shard_map(summed, mesh=mesh, in_specs=specs, out_specs=P("data", None))
        return (body(jnp.tanh(x @ params["up"]), params["down"]) ** 2).mean()

    return sgd(loss), ({"up": f32(64, 128), "down": f32(128, 64)}, f32(32, 64))


def partly_by_hand(mesh: Any) -> Any:
    """Return a step that is data parallel by hand, with a scan inside and the other axis free."""

    def gradients(stack: Any, x: Any) -> Any:
        def loss(stack: Any) -> Any:
            hidden = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0]
            return (hidden**2).mean()

        results = jax.value_and_grad(loss)(stack)
        return results if mesh is None else lax.pmean(results, "data")

    def step(stack: Any, x: Any) -> Any:
        body = gradients
        if mesh is not None:
            body = jax.shard_map(
                gradients, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}, check_vma=False
            )
        value, gradient = body(stack, x)
        return value, stack - 0.1 * gradient

    return step, (f32(4, 64, 64), f32(32, 64))


def shifted(mesh: Any) -> Any:
    """Return a region with every kind of collective that a region may contain."""

    def body(x: Any) -> Any:
        x = lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])
        whole = lax.all_gather(x, "model", axis=1, tiled=True)
        part = lax.psum_scatter(whole, "model", scatter_dimension=1, tiled=True)
        return lax.all_to_all(part, "model", 1, 0, tiled=True) * lax.axis_index("data")

    return jax.shard_map(body, mesh=mesh, in_specs=P("data", "model"), out_specs=P(("data", "model"), None)), (
        f32(16, 16),
    )


PROGRAMS = {made.__name__: made for made in (constrained, scanned, by_hand, partly_by_hand)}


@functools.cache
def planned(name: str, kind: str) -> tuple[Program, PlanResult]:
    mesh = concrete() if kind == "concrete" else abstract()
    fn, args = PROGRAMS[name](mesh)
    program = trace(fn, args, name=name)
    return program, make_plan(program, Options(topology="cpu:8"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "abstract") for name in PROGRAMS),
        ("constrained", "concrete"),
        *(pytest.param(name, "concrete", marks=FULL) for name in PROGRAMS if name != "constrained"),
    ],
)
def test_planned_equals_the_same_written_without_a_mesh(name: str, kind: str) -> None:
    program, made = planned(name, kind)
    assert made.plan.mesh == {"data": 4, "model": 2}, "the program's own mesh"
    values = program.make_args(0)  # type: ignore[misc]
    fn, _ = PROGRAMS[name](None)
    wanted = jax.jit(fn)(*values)
    found = made.plan.jit(program.fn)(*values)
    assert_close(found, wanted, 1e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_was_predicted_is_what_is_compiled(name: str) -> None:
    program, made = planned(name, "abstract")
    measured = measure(program, made.plan, steps=1, warmup=0, check=True)
    assert measured.check is not None and measured.check.passed
    for axis, predicted in measured.wire_predicted.items():
        assert measured.wire_compiled.get(axis, 0) == pytest.approx(predicted, rel=0.02, abs=128), axis


def test_a_regions_own_collectives_are_priced_on_their_axes() -> None:
    _, made = planned("by_hand", "abstract")
    (total,) = [c for c in made.plan.prediction.collectives if c.axes == ("model",)]
    assert (total.kind, total.count, total.wire_bytes) == ("all-reduce", 1, 8 * 64 * 4)
    (said,) = made.plan.provenance["said_by_program"]
    assert said.startswith("shard_map at test_own_specs.py:") and said.endswith(": by hand over data, model")


def test_every_kind_of_collective_is_priced() -> None:
    fn, args = shifted(abstract())
    made = make_plan(trace(fn, args), Options(topology="cpu:8"))
    found = {c.kind: (c.axes, c.wire_bytes) for c in made.plan.prediction.collectives}
    tile = 4 * 8 * 4
    assert found["collective-permute"] == (("data",), tile)
    assert found["all-gather"] == found["reduce-scatter"] == (("model",), tile)
    assert found["all-to-all"] == (("model",), tile // 2)


def test_the_constrained_value_has_the_spec_it_asks_for() -> None:
    _, made = planned("constrained", "abstract")
    pins = [pin.spec for pin in made.plan.pins if pin.operand is None and "sharding_constraint" in pin.name]
    assert pins and all(spec.dims[0] == ("data",) for spec in pins)


def test_shardings_of_arguments_hold() -> None:
    own = NamedSharding(abstract(), P(None, "data"))
    program = trace(lambda x, w: jnp.tanh(x @ w), (f32(16, 32, sharding=own), f32(32, 64)))
    assert program.notes == ("The program itself says how 1 argument is split; this is respected.",)
    plan = make_plan(program, Options(topology="cpu:8")).plan
    assert plan.arguments["x"] == Spec(((), ("data",)))


def test_shardings_given_to_jit_hold() -> None:
    def own(*spec: Any) -> Any:
        return NamedSharding(concrete(), P(*spec))

    fn = jax.jit(lambda x, w: x @ w, in_shardings=(own("model"), own(None, "data")), out_shardings=own(None, "data"))
    plan = make_plan(trace(fn, (f32(16, 32), f32(32, 64))), Options(topology="cpu:8")).plan
    assert plan.arguments == {"x": Spec((("model",), ())), "w": Spec(((), ("data",)))}
    assert plan.results == {"result": Spec(((), ("data",)))}


def test_another_mesh_may_have_the_same_axes() -> None:
    fn, args = constrained(abstract())
    plan = make_plan(trace(fn, args), Options(topology="cpu:8", mesh="model=4,data=2")).plan
    assert plan.mesh == {"model": 4, "data": 2}
    assert ("data",) in {pin.spec.dims[0] for pin in plan.pins if pin.name.endswith("sharding_constraint")}


def test_a_search_for_axes_that_only_the_program_knows_ends_before_it_begins() -> None:
    own = AbstractMesh((2, 4), ("rows", "cols"), axis_types=(AxisType.Auto,) * 2)
    program = trace(lambda x: constrain(own, x * 2, "rows", "cols"), (f32(16, 32),))
    assert make_plan(program, Options(topology="cpu:8")).plan.mesh == {"rows": 2, "cols": 4}
    with pytest.raises(UserError, match=r"mesh axes rows, cols, .* --mesh rows=4,cols=4, for example"):
        make_plan(program, Options(topology="v5e:4x4"))


@pytest.mark.parametrize(
    "make, mesh, said",
    [
        (
            lambda: lambda x: constrain(AbstractMesh((8,), ("expert",), axis_types=(AxisType.Auto,)), x * 2, "expert"),
            "data=8",
            r"with_sharding_constraint at test_own_specs.py:\d+ names the axis `expert`, but the mesh has data=8: "
            "plan with a --mesh that has `expert`, or change the program.",
        ),
        (
            lambda: (
                lambda x: jax.shard_map(
                    lambda v: v * 2,
                    mesh=AbstractMesh((8,), ("expert",), axis_types=(AxisType.Auto,)),
                    in_specs=P("expert"),
                    out_specs=P("expert"),
                )(x)
            ),
            "data=8",
            r"shard_map at test_own_specs.py:\d+ names the axis `expert`, but the mesh has data=8: plan with --mesh "
            "expert=8, or change the program.",
        ),
        (
            lambda: (
                lambda x: jax.shard_map(lambda v: v * 2, mesh=abstract(), in_specs=P("data"), out_specs=P("data"))(x)
            ),
            "data=2,model=4",
            r"shard_map at test_own_specs.py:\d+ is written for the mesh data=4,model=2, but the mesh of the plan is "
            "data=2,model=4: plan with --mesh data=4,model=2.",
        ),
        (
            lambda: lambda x: constrain(abstract(), x * 2, ("model", "data")),
            "data=4,model=2",
            r"with_sharding_constraint at test_own_specs.py:\d+ splits dim 0 over model, data in this order, but the "
            "mesh is data=4,model=2: axes that split one dim must stand in the mesh's order, so plan with "
            "--mesh model=2,data=4.",
        ),
        (
            lambda: lambda x: constrain(abstract(), x * 2, None, "model"),
            "data=1,model=8",
            r"with_sharding_constraint at test_own_specs.py:\d+ splits dim 1 of \[16, 4\] over model = 8, which does "
            "not divide 4: take axes whose sizes do, or leave the dim whole.",
        ),
    ],
)
def test_what_cannot_hold_is_reported(make: Any, mesh: str, said: str) -> None:
    with pytest.raises(UserError, match=f"^{said}$"):
        make_plan(trace(make(), (f32(16, 4),)), Options(topology="cpu:8", mesh=mesh))


def test_constraints_that_exclude_each_other_are_preserved_and_reported() -> None:
    """Pin a value's split in an inner loop one way, and in the outer loop another way."""

    def fn(mesh: Any, stack: Any, x: Any) -> Any:
        def inner(hidden: Any, weight: Any) -> Any:
            return constrain(mesh, jnp.tanh(hidden @ weight), "data", None), None

        def outer(hidden: Any, weights: Any) -> Any:
            return constrain(mesh, lax.scan(inner, hidden, weights)[0], None, "model"), None

        return lax.scan(outer, x, stack)[0]

    program = trace(functools.partial(fn, abstract()), (f32(3, 2, 64, 64), f32(32, 64)), name="nested")
    plan = make_plan(program, Options(topology="cpu:8")).plan
    said = [line for line in plan.warnings if "the way between them is not in the prediction" in line]
    assert len(said) == 1 and said[0].startswith("with_sharding_constraint at test_own_specs.py:")
    values = program.make_args(0)  # type: ignore[misc]
    found, wanted = plan.jit(program.fn)(*values), fn(None, *values)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))


def one_device(kind: str) -> Any:
    """Return the mesh of a laptop: every axis is named and none splits anything."""
    if kind == "abstract":
        return AbstractMesh((1, 1), NAMES, axis_types=(AxisType.Auto,) * 2)
    return jax.make_mesh((1, 1), NAMES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])


def replicating(mesh: Any) -> Any:
    """Return a step as frameworks write it for one device: specs without the axes of size one."""

    def loss(params: Any, x: Any) -> Any:
        hidden = constrain(mesh, constrain(mesh, x) @ params["up"])
        return (constrain(mesh, jnp.tanh(hidden) @ params["down"]) ** 2).mean()

    said = None if mesh is None else NamedSharding(mesh, P())
    return sgd(loss), ({"up": f32(64, 128), "down": f32(128, 64)}, f32(32, 64, sharding=said))


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (replicating, "concrete"),
        (scanned, "abstract"),
        *(pytest.param(*case, marks=FULL) for case in ((replicating, "abstract"), (scanned, "concrete"))),
    ],
)
def test_constraints_on_one_device_say_nothing(made: Any, kind: str) -> None:
    fn, args = made(one_device(kind))
    program = trace(fn, args)
    assert any("on a mesh of one device" in note for note in program.notes)
    assert not any("respected" in note for note in program.notes)
    options: dict[str, Any] = {"topology": "cpu:8", "mesh": "data=4,tensor=2"}
    plan = make_plan(program, Options(**options)).plan
    plain, shapes = made(None)
    free = make_plan(trace(plain, shapes), Options(**options)).plan
    assert plan.arguments == free.arguments
    if made is replicating:  # the gradient of a scan saves other values if it has a constraint
        assert plan.prediction.step_time_s == free.prediction.step_time_s
    assert "said_by_program" not in plan.provenance and any("one device" in line for line in plan.warnings)
    values = program.make_args(0)  # type: ignore[misc]
    wanted = jax.jit(plain)(*values)
    assert_close(plan.jit(fn)(*values), wanted, 1e-5)
    check = measure(program, plan, steps=1, warmup=0, check=True).check
    assert check is not None and check.passed, check


def wholly_replicated(mesh: Any) -> Any:
    """Return a step with constraints that forbid every useful plan, and a manual region, which stays."""
    fn, args = replicating(mesh)

    def step(params: Any, x: Any) -> Any:
        body = jnp.tanh if mesh is None else jax.shard_map(jnp.tanh, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return fn(params, body(x))

    return step, (args[0], f32(32, 64, sharding=None if mesh is None else NamedSharding(mesh, P())))


@pytest.mark.parametrize("kind", [pytest.param("concrete", marks=FULL), "abstract"])
def test_constraints_are_lifted_where_the_user_asks_for_it(kind: str, tmp_path: pathlib.Path) -> None:
    fn, args = wholly_replicated(concrete() if kind == "concrete" else abstract())
    program = trace(fn, args)
    kept = autoshard.plan(program, topology="cpu:8")
    autoshard.plan(program, topology="cpu:8", ignore_constraints=True).save(tmp_path / "plan.json")
    plan = autoshard.load(tmp_path / "plan.json")
    assert plan.mesh == {"data": 4, "model": 2}, "that of the region, which stays"
    said = plan.provenance["said_by_program"]
    assert any("with_sharding_constraint" in line for line in kept.provenance["said_by_program"])
    assert all("shard_map" in line for line in said) and said
    assert any(re.search("sharding constraints?; (it is|they are) lifted", line) for line in plan.warnings), (
        plan.warnings
    )
    assert any("how 1 argument is split; this is lifted" in line for line in plan.warnings), plan.warnings
    assert plan.prediction.step_time_s < kept.prediction.step_time_s
    assert plan.program_fingerprint != kept.program_fingerprint
    values = program.make_args(0)  # type: ignore[misc]
    wanted = jax.jit(wholly_replicated(None)[0])(*values)
    assert_close(plan.jit(fn)(*values), wanted, 1e-5)
    check = measure(program, plan, steps=1, warmup=0, check=True).check
    assert check is not None and check.passed, check
    assert explain_plan(plan, "x", program, time_limit=5.0).alternatives


def test_lifting_leaves_a_program_without_constraints_as_it_is() -> None:
    program = trace(*constrained(None))
    assert lift_constraints(program) is program


def accumulated_layers(params: Any, x: Any) -> Any:
    """Return the new weights of a step over 2 microbatches, each a loop over 3 recomputed layers."""

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    def loss(params: Any, x: Any) -> Any:
        return (lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params)[0] ** 2).mean()

    def body(sums: Any, part: Any) -> Any:
        return jax.tree.map(jnp.add, sums, jax.grad(loss)(params, part)), None

    sums, _ = lax.scan(body, jax.tree.map(jnp.zeros_like, params), x.reshape(2, -1, x.shape[1]))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, sums)


def test_fixed_stacks_are_gathered_layer_by_layer():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"params.up": P(None, None, "data"), "params.down": P(None, "data", None), "x": P("data", None)}

    def shapes(up: Any = None, down: Any = None, x: Any = None) -> Any:
        weights = {"up": f32(3, 256, 512, sharding=up), "down": f32(3, 512, 256, sharding=down)}
        return weights, f32(8192, 256, sharding=x)

    args = shapes(*(NamedSharding(mesh, spec) for spec in specs.values()))
    fixed = autoshard.plan(trace(accumulated_layers, args), topology="cpu:8", mesh={"data": 8})
    free = trace(accumulated_layers, shapes())
    pinned = autoshard.plan(free, topology="cpu:8", mesh={"data": 8}, pins=specs)
    assert fixed.prediction.step_time_s == pytest.approx(pinned.prediction.step_time_s)
    assert fixed.prediction.peak_bytes == pinned.prediction.peak_bytes
    counts = [c.count for c in fixed.prediction.collectives if c.cause.startswith("params")]
    assert counts and all(count % (2 * 3) == 0 for count in counts), "once in each layer of each microbatch"
    text = fixed.lower(accumulated_layers, *args).compile().as_text()
    gathered = set(re.findall(r"= f32\[([\d,]*)\]\S* all-gather", text))
    assert gathered and not any(shape.startswith("3,") for shape in gathered), "no stack is gathered"
