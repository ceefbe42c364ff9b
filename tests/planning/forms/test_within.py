"""Plans in a form's terms: priced as the form expresses them, and unchanged by the form where planned within it."""

import dataclasses
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard import InfeasibleError, UserError
from autoshard.base.units import format_seconds
from autoshard.errors import FormError
from autoshard.exports import export_plan
from autoshard.planning import FORMS, Plan, Rest, Spec, expressible_specs, form_named, price_form, splits_nothing
from autoshard.planning.forms import spec_search
from autoshard.planning.forms.export_forms import gathered_specs, parameter_of
from autoshard.planning.forms.lost_values import as_held, lost_values
from autoshard.planning.forms.propagated_specs import Propagation
from autoshard.planning.forms.spec_search import NEAR
from autoshard.planning.forms.within_form import plan_within
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.price.evaluate import evaluate, tensor_spec
from autoshard.planning.solve.weight_search import Candidate, evaluated_candidate, search
from autoshard.planning.space.baselines import baselines
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.user_constraints import Required
from autoshard.program import Program, from_torch, trace
from autoshard.report.figures import mesh_notes
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
    inside = FORMS[form].splits_inside
    assert inside or not (plan.pins or plan.regions or plan.calls)
    assert plan.provenance["for"] == form
    assert plan.prediction.step_time_s >= free.prediction.step_time_s * (1 - 1e-9)
    said = next(line for line in plan.warnings if f"within what the {form} form can hold" in line)
    assert ("nothing inside the step is pinned" in said) != inside
    if FORMS[form].rest is not Rest.MAXTEXT:
        stripped = dataclasses.replace(plan, provenance={k: v for k, v in plan.provenance.items() if k != "for"})
        held = price_form(stripped, program, form_named(form))
        assert held is not None
        assert held.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=1e-9)
        assert held.peak_bytes == plan.prediction.peak_bytes
    if form == "dtensor":
        assert plan == autoshard.plan(program, topology="v5e:2x4", mesh=MESH, form=form)


def test_a_form_that_cannot_split_kernels_of_attention_says_so():
    plan = autoshard.plan(mlp(), topology="v5e:2x4", mesh=MESH)
    step, name = plan.prediction.step_time_s, "splash_mha_fwd_residuals"
    kernel = dataclasses.replace(plan.ops[0], kind=name, scores=(4096, 4096, 128, 1 << 20), compute_s=0.4 * step)
    plan = dataclasses.replace(plan, ops=(kernel,))
    (said,) = [line for line in as_held(plan, FORMS["jax"], step).warnings if "cannot split kernels" in line]
    assert f"({name}), so every device computes them whole, 40% of the step: call them in `jax.shard_map`" in said
    assert not any("cannot split kernels" in line for line in as_held(plan, FORMS["dtensor"], step).warnings)


def test_a_form_that_must_split_a_parameter_does_where_copies_would_be_faster():
    def step(p, x):
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2))(p)
        return loss, jax.tree.map(lambda a, b: a - 0.1 * b, p, gradients)

    program = trace(step, ({"up": f32(64, 128), "down": f32(128, 64)}, f32(4096, 64)))
    options = {"topology": "cpu:4", "mesh": {"data": 2, "model": 2}}
    copied, split = (autoshard.plan(program, form=form, **options) for form in ("fsdp2", "transformers"))
    assert all(spec.shards(copied.mesh) == 1 for name, spec in copied.arguments.items() if copied.is_weight(name))
    assert any(spec.shards(split.mesh) > 1 for name, spec in split.arguments.items() if split.is_weight(name))


def test_a_form_with_specs_of_state_finds_what_a_form_without_them_finds(monkeypatch: pytest.MonkeyPatch):
    for name, most in (("TRIES", 30), ("HEARD", 12), ("UNTIED", 12)):
        monkeypatch.setattr(spec_search, name, most)
    optimizer = optax.adam(1e-3)

    def step(params, state, x):
        def loss(params):
            hidden = jax.nn.relu(jax.nn.relu(x @ params["up"]) @ params["mid"])
            return jnp.mean((hidden @ params["down"]) ** 2)

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = {"up": f32(256, 1024), "mid": f32(1024, 512), "down": f32(512, 256)}
    program = trace(step, (params, jax.eval_shape(optimizer.init, params), f32(64, 256)))
    plans = [
        autoshard.plan(program, topology="cpu:8", mesh=MESH, pins={"x": "model,None"}, form=form)
        for form in ("jax", "flax")
    ]
    with_state, without = [plan.prediction.step_time_s for plan in plans]
    assert with_state <= without * (1 + 1e-9)


def test_planned_within_a_form_it_is_faster_than_what_the_form_holds_of_a_plan():
    program, lost = pinned_inside()
    held = price_form(lost, program, form_named("dtensor"))
    plan = autoshard.plan(program, topology="v5e:2x4", mesh=MESH, form="dtensor")
    assert held is not None and plan.prediction.step_time_s < 0.7 * held.step_time_s
    assert any(spec.axes for spec in plan.arguments.values())


def trained(batch: int) -> Program:
    """Trace a training step of two matrices of 512 x 2048 by SGD."""

    def step(params, x, y):
        def loss(params):
            return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - y) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    return trace(step, ({"up": f32(512, 2048), "down": f32(2048, 512)}, f32(batch, 512), f32(batch, 512)), name="mlp")


@pytest.mark.parametrize("batch", [64, 65536])
@pytest.mark.parametrize("form", ["accelerate", "torchtitan"])
def test_a_plan_for_fsdp_has_the_price_of_fsdp(form: str, batch: int):
    """Judge by what FSDP sends: every parameter is gathered before its uses, and its gradient is scattered.

    A plan without the form leaves parameters whole for many rows, and exchanges activations for few.
    """
    program = trained(batch)
    plan = autoshard.plan(program, topology="h100:8", mesh={"data": 8}, form=form)
    parameters = [spec for name, spec in plan.arguments.items() if plan.roles[name] == "parameter"]
    assert len(parameters) == 2 and all(spec.axes == ("data",) for spec in parameters)
    one = 512 * 2048 * 4 * 7 / 8
    sent = {kind: 0.0 for kind in ("all-gather", "reduce-scatter")}
    for each in plan.prediction.collectives:
        assert each.kind in sent
        sent[each.kind] += each.wire_bytes
    assert sent["reduce-scatter"] == pytest.approx(2 * one, rel=0.01)
    # The first matrix has no use in the backward pass, since the input has no gradient.
    assert 2 * one * 0.99 < sent["all-gather"] < 4 * one * 1.01


@pytest.mark.parametrize("form", ["fsdp2", "accelerate"])
def test_a_form_that_gathers_has_all_devices_in_one_axis(form: str):
    """Judge by the plans on meshes that a user may give: none of them is much faster."""
    program = trained(65536)
    plan = autoshard.plan(program, topology="h100:8", form=form)
    assert plan.mesh == {"data": 8}
    assert [each.verdict for each in plan.meshes if each.verdict == "chosen"] == ["chosen"]
    assert plan.meshes[0].mesh == "data=8" and not any("fits" in each.verdict for each in plan.meshes)
    given = autoshard.plan(program, topology="h100:8", mesh={"data": 8}, form=form)
    assert plan.meshes[0].step_time_s == pytest.approx(given.prediction.step_time_s, rel=1e-3)
    assert any("without the" in note for note in mesh_notes(plan))
    for mesh in ({"data": 8}, {"data": 4, "model": 2}):
        given = autoshard.plan(program, topology="h100:8", mesh=mesh, form=form)
        assert plan.prediction.step_time_s <= given.prediction.step_time_s * (1 + NEAR)


@pytest.mark.parametrize(
    ("batch", "excess", "mesh", "verdict"),
    [
        (64, 0.2, {"data": 8}, "within the form 20.0% slower in eager torch"),
        (64, math.inf, {"data": 8}, "too large for eager torch"),
        (64, 0.0, {"data": 4, "model": 2}, ""),
        (512, -0.2, {"data": 4, "model": 2}, ""),
    ],
)
def test_the_mesh_of_an_eager_form_is_chosen_by_its_time_in_eager_torch(
    monkeypatch: pytest.MonkeyPatch, batch: int, excess: float, mesh: dict[str, int], verdict: str
) -> None:
    """Plan steps whose mesh of two axes is faster with compiled ops with 64 rows, and as fast with 512."""
    monkeypatch.setattr("autoshard.planning.mesh_choice.eager_excess", lambda plan, other: excess)
    plan = autoshard.plan(trained(batch), topology="h100:8", form="torchtitan")
    assert plan.mesh == mesh
    assert not verdict or verdict in [each.verdict for each in plan.meshes if each.mesh == "data=4,model=2"]


@pytest.mark.parametrize(
    ("seconds", "mesh", "verdict"),
    [
        (0.8, {"data": 4, "model": 2}, "within the form 25.0% slower in eager torch"),
        (0.997, {"data": 8}, ""),
    ],
)
def test_a_mesh_with_tensor_parallelism_is_planned_if_it_is_faster_in_eager_torch(
    monkeypatch: pytest.MonkeyPatch, seconds: float, mesh: dict[str, int], verdict: str
) -> None:
    """Plan a step whose mesh of one axis is fastest with compiled ops, and one of two axes in eager torch."""

    def price(plan: Plan) -> float:
        return seconds if plan.mesh.get("model") == 2 and plan.batch_axes == ("data",) else 1.0

    monkeypatch.setattr("autoshard.planning.forms.eager_memory.provider", lambda request: price)
    plan = autoshard.plan(trained(4096), topology="h100:8", form="fsdp2")
    assert plan.mesh == mesh and plan.batch_axes == ("data",)
    assert plan.prediction.eager_step_time_s == (seconds if verdict else 1.0)
    assert [each.verdict for each in plan.meshes].count("chosen") == 1 and plan.meshes[0].verdict == "chosen"
    assert not verdict or verdict in [each.verdict for each in plan.meshes if each.mesh == "data=8"]


@pytest.mark.parametrize("axes", [("data",), ("data", "model")])
def test_no_baseline_of_its_mesh_beats_a_plan_in_eager_torch(
    monkeypatch: pytest.MonkeyPatch, axes: tuple[str, ...]
) -> None:
    """Plan a step for which one of FSDP and tensor parallelism is faster in eager torch."""
    monkeypatch.setattr(
        "autoshard.planning.forms.eager_memory.provider",
        lambda request: lambda plan: 0.5 if plan.batch_axes == axes else 1.0,
    )
    plan = autoshard.plan(trained(512), topology="h100:8", mesh=MESH, form="fsdp2")
    assert plan.batch_axes == axes and plan.prediction.eager_step_time_s == 0.5
    assert {row.eager_step_time_s for row in plan.baselines.values()} == {0.5, 1.0}
    assert plan.provenance["for"] == "fsdp2"


@pytest.mark.few(3)
@pytest.mark.parametrize("form", ["torchtitan", "fsdp2", "transformers"])
@pytest.mark.parametrize("batch", [64, 4096])
def test_a_plan_for_fsdp_and_tensor_parallelism_has_the_price_of_its_export(form: str, batch: int):
    program = trained(batch)
    plan = autoshard.plan(program, topology="h100:8", mesh=MESH, form=form)
    stripped = dataclasses.replace(plan, provenance={k: v for k, v in plan.provenance.items() if k != "for"})
    held = price_form(stripped, program, form_named(form))
    assert held is not None
    assert held.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=0.02)
    assert held.peak_bytes == pytest.approx(plan.prediction.peak_bytes, rel=0.02)
    if form == "torchtitan" and plan.batch_axes:
        assert all(
            set(plan.batch_axes) <= set(spec.axes)
            for name, spec in plan.arguments.items()
            if plan.roles[name] == "parameter"
        )


class Recurrent(torch.nn.Module):
    """Embedding, GRU and head."""

    def __init__(self, words: int = 1000, width: int = 256):
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.gru = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, 16)

    def forward(self, ids):
        return self.head(self.gru(self.embed(ids))[0])


def test_torch_has_no_split_of_a_recurrence_or_a_softmax_on_dtensors() -> None:
    """Judge by torch itself, without communication: the parts of two processes, one of which exists."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        module = distribute_module(Recurrent(32, 8), mesh)
        rows = DTensor.from_local(torch.zeros(2, 6, 8), mesh, [Shard(0)])
        assert isinstance(torch.relu(rows), DTensor)
        with pytest.raises((RuntimeError, NotImplementedError), match=r"[Ss]harding (strategy|propagation)"):
            module.gru(rows)
        # The loss of a split head, whose logits are gathered, is priced so in eager torch.
        logits = DTensor.from_local(torch.zeros(4, 8), mesh, [Shard(1)])
        assert torch.log_softmax(logits, 1).placements == (Replicate(),)
    finally:
        torch.distributed.destroy_process_group()


def test_faster_baselines_that_a_form_cannot_hold_are_named_with_a_form_that_can() -> None:
    with torch.device("meta"):
        module, ids = Recurrent(), torch.zeros(256, 16, dtype=torch.int64)
    program = autoshard.from_torch(module, (ids,), loss=lambda out: out.square().mean(), train=True)
    options = {"topology": "h100:8", "mesh": {"data": 8}}
    plan = autoshard.plan(program, **options, form="dtensor")
    held, baseline = autoshard.plan(program, **options, form="fsdp2"), plan.baselines["data_parallel"]
    assert plan.prediction.step_time_s > baseline.step_time_s and "data_parallel" in plan.origin.not_held
    assert held.prediction.step_time_s <= baseline.step_time_s * 1.001 and not held.origin.not_held
    (line,) = (line for line in plan.warnings if "cannot state" in line)
    assert "data_parallel" in line
    assert f"--for fsdp2 takes {format_seconds(held.prediction.step_time_s)} a step" in line


@pytest.mark.parametrize("form", ["jax", "dtensor", "fsdp2"])
def test_a_baseline_that_a_form_holds_is_no_faster_than_the_plan(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the search without the form leave many other choices, of which the form could price no further one."""
    model, named = _model(trained(4096)), form_named(form)
    groups = analyse_program(model.program, "tpu").groups
    limits = Limits(model.mesh.topology.usable_bytes, 10.0, 0)
    found = search(model, baselines(model, groups), limits, lambda line: None)
    other: list[Candidate] = []
    for dim, axis, name in itertools.product((0, 1), MESH, ("params.up", "params.down")):
        spec = Spec(tuple((axis,) if each == dim else () for each in (0, 1)))
        choices = Propagation(model, Rest.DTENSOR).choices({name: spec})
        other.append(evaluated_candidate(model, "other", choices, evaluate(model, choices), limits.memory_bytes))
    for limit in ("TRIES", "HEARD", "RUN"):
        monkeypatch.setattr(spec_search, limit, 1 + len(found.baselines))
    baseline = found.baselines["data_parallel"]
    found = dataclasses.replace(found, best=other[0], fitting=tuple(other))
    for known in (found.baselines, {}):  # a mesh whose axes are cut into parts has none
        within = plan_within(
            named,
            model,
            groups,
            dataclasses.replace(found, baselines=known),
            Required({}, {}),
            limits,
            lambda line: None,
        )
        assert within.best.outcome.step_time_s <= baseline.outcome.step_time_s * 1.001


def scanned(batch: int = 128, width: int = 2048) -> Program:
    """Return a training step of layers in a loop, recomputed for the backward pass, with a moment of each weight."""

    def layer(x, w):
        return x + jnp.tanh((x * w["scale"]) @ w["up"]) @ w["down"], None

    def loss(params, ids):
        x = params["table"][ids]
        return jnp.square(jax.lax.scan(jax.checkpoint(layer), x, params["layers"])[0]).mean()

    def step(params, opt_state, ids):
        opt_state = jax.tree.map(lambda m, g: 0.9 * m + g, opt_state, jax.grad(loss)(params, ids))
        return jax.tree.map(jnp.subtract, params, opt_state), opt_state

    layers = {"up": f32(12, width, 4 * width), "down": f32(12, 4 * width, width), "scale": f32(12, width)}
    params = {"table": f32(32000, width), "layers": layers}
    return trace(step, (params, params, jax.ShapeDtypeStruct((batch, 512), jnp.int32)), donate_argnums=(0, 1))


def test_sums_of_a_loop_that_meet_a_split_optimizer_leave_the_batch_split() -> None:
    """Plan ZeRO-1. XLA keeps the batch's split of the layers (`tests/mlir/test_partitioned.py`)."""
    program = scanned()
    moments = {"layers.up": "-,-,data", "layers.down": "-,data,-", "layers.scale": "-,data", "table": "data,-"}
    pins = {"ids": "data,-", **{f"opt_state.{name}": spec for name, spec in moments.items()}}
    options = {"topology": "v6e:8x8", "mesh": {"data": 64}, "replicate": ["params.*"]}
    plan = autoshard.plan(program, pins=pins, **options)
    held = price_form(plan, program, form_named("jax"))
    assert held is not None and held.step_time_s <= 1.1 * plan.prediction.step_time_s


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_plan_of_fsdp_near_the_bound_of_all_plans_ends_the_search(share: float, monkeypatch: pytest.MonkeyPatch):
    model, named = _model(trained(4096)), form_named("fsdp2")
    groups = analyse_program(model.program, "tpu").groups
    limits = Limits(model.mesh.topology.usable_bytes, 10.0, 0)
    found = search(model, baselines(model, groups), limits, lambda line: None)
    tried: list[str] = []
    monkeypatch.setattr(spec_search.SpecSearch, "run", lambda *_: tried.append("tensor parallelism"))
    seconds = plan_within(named, model, groups, found, Required({}, {}), limits, lambda line: None).best.expected_s
    tried.clear()
    found = dataclasses.replace(found, bound_s=share * seconds)
    again = plan_within(named, model, groups, found, Required({}, {}), limits, lambda line: None).best
    assert again.expected_s == seconds and bool(tried) == (share < 1.0)


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


@pytest.mark.parametrize("form", ["dtensor", "fsdp2"])
def test_parameters_of_one_element_are_whole_in_a_form(form: str):
    module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    program = from_torch(module, torch.ones(8, 16), train=True)
    plan = autoshard.plan(program, topology="cpu:2", mesh={"data": 2}, form=form)
    assert not plan.arguments["2.bias"].axes and "'2\\\\.bias$'" in export_plan(plan, form, program)


def test_state_belongs_to_the_parameter_it_is_called_after():
    shapes = {"w": (4, 4), "up": (8,), "optimizer.mu.w": (4, 4), "optimizer.count": (), "opt.0.mu.up": (8,)}
    shapes |= {"params.a": (2, 2), "m.a": (2, 2), "m.b": (2, 2)}
    roles = {name: "parameter" if name in ("w", "up", "params.a") else "optimizer_state" for name in shapes}
    assert parameter_of("optimizer.mu.w", shapes, roles) == "w"
    assert parameter_of("opt.0.mu.up", shapes, roles) == "up"
    assert parameter_of("m.a", shapes, roles) == "params.a"
    assert parameter_of("m.b", shapes, roles) is None
    assert parameter_of("optimizer.count", shapes, roles) is None
    shapes = dict.fromkeys(("model.up", "ema.model.up", "opt.mu.up.value", "opt.mu.model.up"), (4, 4))
    roles = {name: "optimizer_state" if name.startswith("opt") else "parameter" for name in shapes}
    assert parameter_of("opt.mu.up.value", shapes, roles) == "model.up", "an average of it has a longer name"
    assert parameter_of("opt.mu.model.up", shapes, roles) == "model.up"


def test_every_choice_of_a_propagation_is_one():
    for program in (programs.mixed(), programs.two_matmuls()):
        model = _model(program)
        for rest in (Rest.XLA, Rest.DTENSOR):
            choices = Propagation(model, rest).choices({})
            assert all(0 <= c < len(n.states) for c, n in zip(choices, model.nodes, strict=True))
            assert all(not np.any(n.states[c] >= 0) for c, n in zip(choices, model.nodes, strict=True))


@pytest.mark.parametrize("form", ["jax", "flax", "maxtext", "dtensor"])
def test_a_plan_without_the_programs_own_constraints_is_priced_without_them(form: str):
    mesh = jax.sharding.AbstractMesh((4, 2), tuple(MESH), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def step(params, x, own):
        hidden = x @ params["up"]
        if own:
            spec = jax.sharding.PartitionSpec(None, "data")
            hidden = jax.lax.with_sharding_constraint(hidden, jax.sharding.NamedSharding(mesh, spec))
        return hidden @ params["down"]

    args = ({"up": f32(512, 2048), "down": f32(2048, 512)}, f32(2048, 512))
    own = trace(lambda params, x: step(params, x, True), args, name="mlp")
    free = trace(lambda params, x: step(params, x, False), args, name="mlp")
    asked = {"topology": "v5e:2x4", "mesh": MESH, "pins": {"params.*": "None,None", "x": "None,None"}}
    lifted = price_form(autoshard.plan(own, ignore_constraints=True, **asked), own, form_named(form))
    assert lifted == price_form(autoshard.plan(free, **asked), free, form_named(form))


def test_maxtext_is_priced_without_the_programs_own_constraints():
    mesh = jax.sharding.AbstractMesh((4, 2), tuple(MESH), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    whole, rows = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in ((), MESH))

    def step(params, x):
        return x @ params["up"] @ params["down"]

    args = ({"up": f32(512, 2048), "down": f32(2048, 512)}, f32(2048, 512))
    own = trace(jax.jit(step, in_shardings=({"up": rows, "down": whole}, None)), args, name="mlp")
    asked = {"topology": "v5e:2x4", "mesh": MESH}
    free = trace(jax.jit(step), args, name="mlp")
    as_free = autoshard.plan(free, **asked, pins={"params.up": "data,model", "params.down": "-,-"})
    held = price_form(autoshard.plan(own, **asked), own, form_named("maxtext"))
    assert held is not None and held == price_form(as_free, free, form_named("maxtext"))


def test_a_constraint_on_the_first_lost_values_keeps_their_splits():
    program, plan = pinned_inside()
    form = form_named("flax")
    first, *others = lost_values(plan, program, form)
    assert re.fullmatch(r"test_within.py:\d+", first.line) and first.kind == "dot_general" and not others
    mesh = jax.sharding.AbstractMesh((4, 2), tuple(MESH), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.NamedSharding(mesh, first.spec.partition_spec())

    def step(params, x):
        return jax.lax.with_sharding_constraint(x @ params["up"], spec) @ params["down"]

    kept = trace(step, program.args, name="mlp")
    again = autoshard.plan(kept, topology="v5e:2x4", mesh=MESH, pins={"params.*": "None,None", "x": "None,None"})
    held, whole = price_form(again, kept, form), price_form(plan, program, form)
    assert held is not None and whole is not None and held.compute_s < 0.5 * whole.compute_s
    assert not [*lost_values(again, kept, form)]


def test_what_propagation_gives_is_not_lost():
    program = mlp()
    plan = autoshard.plan(program, topology="v5e:2x4", mesh=MESH, pins={"params.*": "-,-", "x": "data+model,-"})
    assert not [*lost_values(plan, program, form_named("jax"))] and not [
        *lost_values(plan, program, form_named("dtensor"))
    ]


def test_a_hybrid_form_copies_parameters_over_axes_that_split_none() -> None:
    mesh, shapes = {"data": 2, "model": 4}, {"w": (64, 16), "b": (64,), "x": (32, 16)}
    roles = {"w": "parameter", "b": "parameter", "x": "batch"}
    specs = {"w": Spec(((), ("model",))), "b": Spec(((),)), "x": Spec((("data", "model"), ()))}
    axes = ("data", "model")
    found = gathered_specs(FORMS["fsdp2"], specs, shapes, roles, mesh, axes)
    assert (found["w"], found["b"]) == (Spec(((), ("model",))), Spec((("model",),)))
    whole = gathered_specs(FORMS["transformers"], specs, shapes, roles, mesh, axes)
    assert (whole["w"], whole["b"]) == (Spec(((), ("data", "model"))), Spec((("data", "model"),)))


def lookup_then_layers() -> Program:
    """Trace an SGD step of a table, a scan over two matrices and a gain a layer, and a head."""

    def step(params, tokens):
        def loss(params):
            def layer(x, weights):
                return x + jax.nn.relu(x * weights["gain"] @ weights["up"]) @ weights["down"], None

            x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][tokens], params["layers"])
            return jnp.mean(jax.nn.logsumexp(x @ params["head"], -1))

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    layers = {"gain": f32(4, 1024), "up": f32(4, 1024, 4096), "down": f32(4, 4096, 1024)}
    params = {"embed": f32(4096, 1024), "head": f32(1024, 4096), "layers": layers}
    return trace(jax.jit(step, donate_argnums=0), (params, jax.ShapeDtypeStruct((64, 64), jnp.int32)), name="lookup")


@pytest.mark.full
def test_a_form_in_which_nothing_fits_names_the_way_to_state_the_plan():
    asked = {"topology": "v6e:8x8", "mesh": {"data": 32, "model": 2}, "memory_limit": 15 << 20}
    program = lookup_then_layers()
    free = autoshard.plan(program, **asked)
    with pytest.raises(InfeasibleError) as refused:
        autoshard.plan(program, **asked, form="jax")
    step = format_seconds(free.prediction.step_time_s)
    assert f"plan without `--for` (in Python `form`), which takes {step} a step" in str(refused.value)
    assert "names the first values that lose a split" in str(refused.value)
    with pytest.raises(FormError, match="The first values that lose a split are at "):
        export_plan(free, "jax", program)


class Patches(torch.nn.Module):
    """A layer on patches of images, so small that devices which repeat its work take least time."""

    def __init__(self):
        super().__init__()
        self.cut, self.head = torch.nn.Conv2d(3, 32, 4, 4), torch.nn.Linear(32, 4)
        self.inner = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32), torch.nn.GELU())

    def forward(self, x):
        hidden = self.cut(x).flatten(2).transpose(1, 2)
        return self.head((hidden + self.inner(hidden)).mean(1))


def test_no_axis_of_a_form_that_gathers_repeats_all_work():
    program = from_torch(Patches(), (torch.randn(8, 3, 16, 16),), train=True, loss=lambda out: out.square().mean())
    plan = autoshard.plan(program, topology="cpu:4", mesh={"data": 2, "model": 2}, form="fsdp2")
    assert not any("nothing over" in line for line in plan.words)
    assert "MESH = {" in export_plan(plan, "fsdp2", program)


@pytest.mark.parametrize("form", ["torch-xla", "dtensor"])
def test_code_for_torch_says_that_a_plan_is_of_jax_code(form: str):
    program = mlp()
    plan = autoshard.plan(program, topology="cpu:2", mesh={"data": 2})
    assert "The plan is of JAX code" in " ".join(export_plan(plan, form, program, force=True).replace("# ", "").split())
    module = from_torch(Patches(), (torch.randn(8, 3, 16, 16),), train=True)
    plan = autoshard.plan(module, topology="cpu:2", mesh={"data": 2})
    assert "JAX code" not in export_plan(plan, form, module, force=True)
