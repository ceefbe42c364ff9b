"""Plans in a form's terms: priced as the form expresses them, and unchanged by the form where planned within it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import InfeasibleError, UserError
from autoshard.planning import FORMS, Plan, Rest, Spec, expressible_specs, form_named, price_form, splits_nothing
from autoshard.planning.forms.export_forms import parameter_of
from autoshard.planning.forms.propagated_specs import Propagation
from autoshard.planning.forms.within_form import plan_within
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.price.evaluate import evaluate, tensor_spec
from autoshard.planning.solve.weight_search import search
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.user_constraints import Required
from autoshard.program import Program, trace
from tests.graph.programs import f32
from tests.planning import programs


MESH = {"data": 4, "model": 2}


def mlp(width: int = 512, hidden: int = 2048, batch: int = 2048) -> Program:
    def step(params, x):
        return x @ params["up"] @ params["down"]

    return trace(step, ({"up": f32(width, hidden), "down": f32(hidden, width)}, f32(batch, width)), name="mlp")


def pinned_inside() -> tuple[Program, Plan]:
    """Plan whole arguments with the work split inside, which no form without pins can express."""
    program = mlp()
    whole = {"params.*": "None,None", "x": "None,None"}
    plan = autoshard.plan(program, topology="v5e:2x4", mesh=MESH, pins=whole)
    assert plan.pins and all(not spec.axes for spec in plan.arguments.values())
    return program, plan


@pytest.mark.parametrize("form", ["torch-xla", "dtensor", "flax"])
def test_what_only_pins_split_is_lost_and_its_price_says_so(form: str):
    program, plan = pinned_inside()
    assert any(spec.axes for spec in (pin.spec for pin in plan.pins))
    held = price_form(plan, program, form_named(form))
    assert held is not None and held.step_time_s > 1.5 * plan.prediction.step_time_s
    assert held.collectives == ()
    given = expressible_specs(form_named(form), plan.arguments, plan.shapes, plan.roles, plan.mesh)
    assert splits_nothing(given, plan.mesh)


def test_arrays_of_typed_keys_have_dims_that_no_spec_names():
    def step(w, keys, x):
        kept = jax.random.bernoulli(keys[0], 0.5, x.shape)
        return w - jax.grad(lambda w: jnp.mean(((x * kept) @ w) ** 2))(w), jax.random.split(keys[0], 8)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    program = trace(step, (f32(64, 64), keys, f32(64, 64)))
    plan = autoshard.plan(program, topology="cpu:8", mesh=MESH, pins={"w": "-,model", "x": "data,-"})
    for form in ("jax", "flax", "dtensor"):
        held = price_form(plan, program, form_named(form))
        assert held is not None and held.step_time_s > 0


@pytest.mark.parametrize("rest", [Rest.XLA, Rest.DTENSOR])
def test_megatrons_arguments_alone_give_megatrons_step(rest: Rest):
    program = mlp()
    wanted = {"params.up": Spec(((), ("model",))), "params.down": Spec((("model",), ())), "x": Spec((("data",), ()))}
    model = _model(program)
    choices = Propagation(model, rest).choices(wanted)
    outcome = evaluate(model, choices)
    assert [(c.kind, c.axes) for c in outcome.collectives] == [("all-reduce", ("model",))]
    assert tensor_spec(model, choices, model.graph.results[0]) == Spec((("data",), ()))
    hidden = [t.id for t in model.graph.tensors if t.shape == (2048, 2048)]
    assert hidden and all(tensor_spec(model, choices, t) == Spec((("data",), ("model",))) for t in hidden)


def _model(program: Program):
    from autoshard.cost import Topology, make_mesh

    mesh = make_mesh(Topology.parse("v5e:2x4"), MESH)
    return build_model(program, analyse_program(program, "tpu"), mesh, mesh.topology.usable_bytes)


@pytest.mark.parametrize("form", ["jax", "torch-xla", "dtensor", "maxtext"])
def test_a_plan_for_a_form_is_what_the_form_holds(form: str):
    program = mlp()
    plan = autoshard.plan(program, topology="v5e:2x4", mesh=MESH, form=form)
    free = autoshard.plan(program, topology="v5e:2x4", mesh=MESH)
    assert not plan.pins and not plan.regions and not plan.calls
    assert plan.provenance["for"] == form
    assert plan.prediction.step_time_s >= free.prediction.step_time_s * (1 - 1e-9)
    assert any(form in line and "nothing inside the step is pinned" in line for line in plan.warnings)
    if FORMS[form].rest is not Rest.MAXTEXT:
        stripped = dataclasses.replace(plan, provenance={k: v for k, v in plan.provenance.items() if k != "for"})
        held = price_form(stripped, program, form_named(form))
        assert held is not None
        assert held.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=1e-9)
        assert held.peak_bytes == plan.prediction.peak_bytes
    if form == "dtensor":
        assert plan == autoshard.plan(program, topology="v5e:2x4", mesh=MESH, form=form)


def test_planned_within_a_form_it_is_faster_than_what_the_form_holds_of_a_plan():
    program, lost = pinned_inside()
    held = price_form(lost, program, form_named("dtensor"))
    plan = autoshard.plan(program, topology="v5e:2x4", mesh=MESH, form="dtensor")
    assert held is not None and plan.prediction.step_time_s < 0.7 * held.step_time_s
    assert any(spec.axes for spec in plan.arguments.values())


def test_what_is_asked_for_holds_within_a_form():
    program = mlp()
    plan = autoshard.plan(program, topology="v5e:2x4", mesh=MESH, form="dtensor", pins={"params.up": "None,model"})
    assert plan.arguments["params.up"] == Spec(((), ("model",)))


def test_a_plan_for_fsdp_splits_a_batch_that_is_best_left_whole() -> None:
    """Judge by the export, which refuses a plan that splits no batch."""
    program = mlp(256, 512, 8)
    plan = autoshard.plan(program, topology="h100:4", mesh={"data": 2, "model": 2}, form="fsdp2")
    assert plan.arguments["x"].dims[0] and "def shard(" in autoshard.export(plan, "fsdp2", program)


def test_what_cannot_be_planned_for_a_form_is_reported():
    program = mlp()
    with pytest.raises(UserError, match="there is no export to 'sonnet'"):
        autoshard.plan(program, topology="v5e:2x4", mesh=MESH, form="sonnet")
    with pytest.raises(UserError, match="'jax-export' holds a plan whole: leave it out"):
        autoshard.plan(program, topology="v5e:2x4", mesh=MESH, form="jax-export")


def test_where_nothing_for_a_form_fits_it_says_the_least():
    model, form = _model(mlp()), form_named("dtensor")
    limit = model.mesh.topology.usable_bytes
    searched = search(model, [], Limits(limit, 10.0, 0), lambda line: None)
    groups = analyse_program(model.program, "tpu").groups
    with pytest.raises(InfeasibleError, match=r"that the dtensor form can hold fits into 1 B .* the least found is"):
        plan_within(form, model, groups, searched, Required({}, {}), Limits(1, 10.0, 0), lambda line: None)


def test_state_belongs_to_the_parameter_it_is_called_after():
    shapes = {"w": (4, 4), "up": (8,), "optimizer.mu.w": (4, 4), "optimizer.count": (), "opt.0.mu.up": (8,)}
    shapes |= {"params.a": (2, 2), "m.a": (2, 2), "m.b": (2, 2)}
    roles = {name: "parameter" if name in ("w", "up", "params.a") else "optimizer_state" for name in shapes}
    assert parameter_of("optimizer.mu.w", shapes, roles) == "w"
    assert parameter_of("opt.0.mu.up", shapes, roles) == "up"
    assert parameter_of("m.a", shapes, roles) == "params.a"
    assert parameter_of("m.b", shapes, roles) is None
    assert parameter_of("optimizer.count", shapes, roles) is None


def test_every_choice_of_a_propagation_is_one():
    for program in (programs.mixed(), programs.two_matmuls()):
        model = _model(program)
        for rest in (Rest.XLA, Rest.DTENSOR):
            choices = Propagation(model, rest).choices({})
            assert all(0 <= c < len(n.states) for c, n in zip(choices, model.nodes, strict=True))
            assert all(not np.any(n.states[c] >= 0) for c, n in zip(choices, model.nodes, strict=True))
