"""Baselines: the plans of an expert, completed by the solver, and never better than our plan."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import autoshard
from autoshard.graph import FactorKind
from autoshard.planning import PlanResult
from autoshard.planning.price.evaluate import tensor_spec
from autoshard.planning.space.baselines import (
    Baseline,
    baselines,
    split_by_group,
    split_parameters,
    tensor_parallel_groups,
)
from autoshard.planning.space.decision_model import Model
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.program import LatentDims, decoder_program
from autoshard.serving import Decoder
from tests.graph.programs import f32
from tests.planning import programs as made


ALL = ["data_parallel", "fsdp", "tensor_parallel", "tensor_parallel_sp", "fsdp_tp", "fsdp_tp_sp"]


def specs(result: PlanResult, name: str) -> dict[str, str]:
    return {argument: str(spec) for argument, spec in result.baseline_plans[name].arguments.items()}


def state_follows(found: dict[str, str]) -> bool:
    """Return True if every moment is split like its parameter."""
    return all(
        spec == found["params." + name.split(".", 2)[2]]
        for name, spec in found.items()
        if name.startswith(("state.mu.", "state.nu."))
    )


MLP = {
    "data_parallel": {"up": "[-, -]", "bias": "[-]", "down": "[-, -]", "x": "[dataxmodel, -]"},
    "fsdp": {"up": "[-, dataxmodel]", "bias": "[dataxmodel]", "down": "[dataxmodel, -]", "x": "[dataxmodel, -]"},
    "tensor_parallel": {"up": "[-, model]", "bias": "[model]", "down": "[model, -]", "x": "[data, -]"},
    "fsdp_tp": {"up": "[data, model]", "bias": "[dataxmodel]", "down": "[model, data]", "x": "[data, -]"},
}


@pytest.mark.parametrize("name", MLP)
def test_baselines_of_an_mlp(name: str) -> None:
    specs_by_name = specs(made.planned("mlp"), name)
    wanted = {("params." + key if key not in ("x", "y") else key): spec for key, spec in MLP[name].items()}
    assert {key: specs_by_name[key] for key in wanted} == wanted
    assert specs_by_name["y"] == specs_by_name["x"]
    assert state_follows(specs_by_name)


DECODER = {
    "data_parallel": ("[-, -, -, -, -]", "[-, -, -, -]", "[-, -, -]", "[-, -, -]", "[-, -]", "[dataxmodel, -]"),
    "tensor_parallel": (
        "[-, -, -, model, -]",
        "[-, model, -, -]",
        "[-, -, model]",
        "[-, model, -]",
        "[model, -]",
        "[data, -]",
    ),
    "fsdp_tp": (
        "[-, data, -, model, -]",
        "[-, model, -, data]",
        "[-, data, model]",
        "[-, model, data]",
        "[model, data]",
        "[data, -]",
    ),
}


@pytest.mark.parametrize("name", DECODER)
@pytest.mark.parametrize("suffix", ["", "_sp"])
def test_baselines_of_a_decoder(name: str, suffix: str) -> None:
    """Split heads, ffn and vocabulary over `model`, column then row in each pair, but no layer dim or head size."""
    if name == "data_parallel":
        suffix = ""
    specs_by_name = specs(made.planned("decoder"), name + suffix)
    names = [f"params.layers.{key}" for key in ("qkv", "out", "up", "down")] + ["params.table", "tokens"]
    assert tuple(specs_by_name[key] for key in names) == DECODER[name]


def test_fsdp_splits_every_parameter_once_over_all_devices() -> None:
    result = made.planned("decoder")
    plan = result.baseline_plans["fsdp"]
    for name, spec in plan.arguments.items():
        if not name.startswith("params."):
            continue
        split = [d for d, axes in enumerate(spec.dims) if axes]
        assert len(split) == 1 and spec.dims[split[0]] == ("data", "model")
        if name.startswith("params.layers."):
            assert split != [0], "never the layer dim"


def restricted(model: Model, name: str) -> Baseline:
    return next(b for b in baselines(model, made.groups(model)) if b.name == name)


@pytest.mark.parametrize(("name", "axes"), [("tensor_parallel", ()), ("tensor_parallel_sp", ("model",))])
def test_the_residual_stream_is_whole_or_split_on_the_sequence(name: str, axes: tuple[str, ...]) -> None:
    model = made.model("decoder")
    groups = made.groups(model)
    baseline = restricted(model, name)
    choices = np.zeros(len(model.nodes), dtype=np.int64)
    for node, allowed in baseline.allowed.items():
        choices[node] = np.flatnonzero(allowed)[0]
    (carried,) = {c.body for c in model.graph.loops[0].carries if model.graph.tensors[c.body].shape == (8, 16, 32)}
    assert model.cluster_node[model.structure.cluster_of[carried]] in baseline.allowed
    assert tensor_spec(model, choices, carried).dims == (("data",), axes, ())
    cluster = model.structure.cluster_of[carried]
    found = {groups.of_factor[(cluster, f)] for f in model.structure.dims_of[carried]}
    assert found == {groups.batch, groups.sequence, groups.hidden}


def test_groups_of_a_decoder_are_named() -> None:
    groups = made.groups(made.model("decoder"))
    named = {name for name in groups.names.values() if name}
    assert {"batch", "sequence", "hidden"} <= named
    table = next(p for p, a in enumerate(made.program("decoder").arguments) if a.name == "params.table")
    tokens = [g for g, holders in groups.parameters.items() if table in holders]
    assert groups.hidden in tokens and len(tokens) == 2


def test_the_inner_dim_of_an_mlp_is_not_mistaken_for_a_stream() -> None:
    two = made.groups(made.model("mlp"))
    assert two.hidden is None
    deep = made.model("wide mlp", "v5e:4x4", "data=4,model=4")
    groups = made.groups(deep)
    (x,) = (t for t, a in zip(deep.graph.arguments, deep.program.arguments, strict=True) if a.name == "x")
    assert groups.hidden == groups.of_factor[(deep.structure.cluster_of[x], deep.structure.dims_of[x][1])]


def test_with_one_axis_all_of_it_is_tensor_parallel() -> None:
    specs_by_name = specs(made.planned("mlp", "cpu:8", "data=8"), "tensor_parallel")
    assert (specs_by_name["params.up"], specs_by_name["params.down"], specs_by_name["x"]) == (
        "[-, data]",
        "[data, -]",
        "[-, -]",
    )
    assert set(made.planned("mlp", "cpu:8", "data=8").baseline_plans) == set(ALL) - {"fsdp_tp", "fsdp_tp_sp"}


def test_with_three_axes_the_last_is_tensor_parallel() -> None:
    specs_by_name = specs(made.planned("wide mlp", "v5p:2x2x2", "a=2,b=2,c=2"), "fsdp_tp")
    assert (specs_by_name["params.0.up"], specs_by_name["params.0.down"], specs_by_name["x"]) == (
        "[axb, c]",
        "[c, axb]",
        "[axb, -]",
    )


def test_a_batch_that_a_loop_runs_through_is_reported_as_one() -> None:
    """Name the loop as the cause: the program runs its steps one after the other, with any spec of the parameter."""

    def steps(w: Any, x: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), None

        return jax.lax.scan(step, w, x)[0]

    shape = jax.ShapeDtypeStruct
    program = autoshard.trace(steps, (shape((256, 256), "float32"), shape((8, 64, 256), "float32")))
    plan = autoshard.plan(program, topology="v5e:2x4", mesh="data=8")
    (line,) = (line for line in plan.warnings if "data_parallel" in line)
    assert "the first dim of x, the batch, cannot be split: a loop runs through it" in line


def test_a_program_without_parameters_has_data_parallelism_only() -> None:
    assert set(made.planned("nothing", "cpu:1", None).baseline_plans) <= {"data_parallel"}


@pytest.mark.parametrize(
    ("name", "topology", "mesh"),
    [
        ("mlp", "cpu:8", "data=4,model=2"),
        ("decoder", "cpu:8", "data=4,model=2"),
        ("mixed", "cpu:8", "data=4,model=2"),
        ("convolutions", "cpu:8", "data=8"),
        ("decoding", "v5e:2x4", "data=2,model=4"),
        ("wide mlp", "v5e:4x4", "data=4,model=4"),
        ("wide mlp", "v5p:2x2x2", "a=2,b=2,c=2"),
    ],
)
def test_the_plan_is_never_worse_than_a_baseline_that_fits(name: str, topology: str, mesh: str) -> None:
    plan = made.planned(name, topology, mesh).plan
    fitting = [b for b in plan.baselines.values() if b.fits]
    assert fitting and plan.prediction.fits
    for baseline in fitting:
        assert plan.prediction.step_time_s <= baseline.step_time_s + 1e-12
    bound = plan.provenance["bound_s"]
    rounding = 0.5e-12 * (plan.provenance["nodes"] + plan.provenance["edges"])
    assert bound <= plan.prediction.step_time_s + rounding
    assert plan.plan_gap == pytest.approx(max(0.0, 1 - bound / plan.prediction.step_time_s))


def test_among_equally_fast_plans_the_one_with_less_memory_is_chosen() -> None:
    plan = made.planned("wide mlp", "v5e:4x4", "data=4,model=4").plan
    for baseline in plan.baselines.values():
        if math.isclose(baseline.step_time_s, plan.prediction.step_time_s, abs_tol=1e-12):
            assert plan.prediction.peak_bytes <= baseline.peak_bytes


def test_a_baseline_that_needs_more_memory_is_shown_as_not_fitting() -> None:
    limit = 80 << 20
    result = made.planned("wide mlp", "v5e:4x4", "data=4,model=4", limit)
    assert result.plan.prediction.fits and result.plan.prediction.peak_bytes <= limit
    replicated = result.plan.baselines["data_parallel"]
    assert not replicated.fits and replicated.peak_bytes > limit
    assert result.plan.baselines["fsdp_tp"].fits


def test_baselines_restrict_arguments_and_leave_matmuls_to_the_solver() -> None:
    model = made.model("decoder")
    for baseline in baselines(model, made.groups(model)):
        for node, allowed in baseline.allowed.items():
            assert model.nodes[node].kind == "cluster" and allowed.any()
    assert [b.name for b in baselines(model, made.groups(model))] == ALL


def test_a_contracted_dim_is_never_gathered_in_a_row_parallel_matmul() -> None:
    """Check that the second matmul's result is summed, which makes the two matmuls Megatron's pair."""
    result = made.planned("wide mlp", "v5e:4x4", "data=4,model=4")
    kinds = {(c.kind, c.axes) for c in result.plan.baselines["tensor_parallel"].collectives}
    assert ("all-reduce", ("model",)) in kinds or ("reduce-scatter", ("model",)) in kinds
    model = made.model("wide mlp", "v5e:4x4", "data=4,model=4")
    rows = [
        model.nodes[n].states
        for o, n in model.op_node.items()
        if (rule := model.graph.ops[o].rule) is not None and FactorKind.REDUCTION in rule.kinds
    ]
    assert rows and all((states == WHOLE).all(axis=1).any() for states in rows)


def test_tensor_parallelism_splits_heads_of_latent_attention_not_what_they_are_made_from() -> None:
    latent = LatentDims(key_rank=32, nope_size=16, rope_size=8, value=16, query_rank=48)
    decoder = Decoder(3, 64, 160, 4, 4, latent.head_size, 128, latent=latent)
    program = decoder_program(decoder, batch=8, seq=16, remat="none", attention="plain")
    model = made.model_of(program, "cpu:8", "data=4,model=2")
    groups = made.groups(model)
    chosen = tensor_parallel_groups(model, groups, 2)
    split = {}
    for position in split_parameters(model):
        name = program.arguments[position].name
        split[name.removeprefix("params.")] = split_by_group(model, groups, position, chosen, (1,))
    heads = {name: split[f"layers.*.attn.{name}.weight"] for name in ("q_up", "kv_up", "o_proj", "q_down", "kv_down")}
    assert heads == {"q_up": {2: (1,)}, "kv_up": {2: (1,)}, "o_proj": {1: (1,)}, "q_down": {}, "kv_down": {}}
    assert split["layers.*.mlp.up_proj.weight"] and split["lm_head.weight"]


def test_the_reason_for_a_missing_baseline_is_its_own() -> None:
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def step(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - g, w, jax.grad(lambda w: ((x @ w["up"] @ w["down"]) ** 2).mean())(w))

    def warnings(batch: int, **options: Any) -> list[str]:
        args = ({"up": f32(64, 128), "down": f32(128, 64)}, f32(batch, 64))
        plan = autoshard.plan(autoshard.trace(jax.jit(step, **options), args), topology="cpu:8", mesh=mesh.shape)
        return [line for line in plan.warnings if line.startswith("not compared")]

    assert warnings(32) == []
    fixed = warnings(32, in_shardings=({"up": rows, "down": rows}, rows))
    assert fixed and all(line.endswith(": the program fixes other specs.") for line in fixed)
    assert warnings(4) == ["not compared with data_parallel, fsdp: the batch of 4 (x) does not divide by 8 devices."]
    assert any("the batch of 6 (x) does not divide by 4 devices" in line for line in warnings(6))
