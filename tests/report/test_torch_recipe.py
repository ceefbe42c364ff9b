"""Recipes in exports for torch: layers are recomputed as planned, and prices are those of the code that runs."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef

import autoshard
from autoshard.errors import FormError, UserError
from autoshard.exports import export_plan, make_export
from autoshard.planning import NamedSource, Plan, Spec, is_stacked, plan_any
from autoshard.planning.forms.held_recipes import plan_of_held
from autoshard.planning.space.plan_options import Options
from autoshard.program import Program, open_source, read_config


def tiny(form: str | None = None, **options: Any) -> tuple[Program, Plan]:
    program = open_source("hf:llama-tiny", train=True, batch=16, seq=64, **options)
    return program, autoshard.plan(program, topology="cpu:4", mesh={"data": 4}, form=form)


def gradients(model: Any) -> tuple[float, list[torch.Tensor]]:
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("form", ["fsdp2", pytest.param("torchtitan", marks=pytest.mark.full)])
def test_layers_are_recomputed_as_planned(form: str) -> None:
    """Judge by eager torch: equal gradients, and the modules of a layer run again only where the plan says so."""
    program, plan = tiny(dtype="float32", remat="dots:1+full:2+none")
    names: dict[str, Any] = {}
    exec(export_plan(plan, form, program, force=True), names)  # noqa: S102
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**read_config("llama-tiny")[1])
    ).float()
    model.set_attn_implementation("eager")  # would attend twice to the keys of a cache that is filled twice
    loss, wanted = gradients(model)
    assert model.config.use_cache
    runs = [0] * len(model.model.layers)
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: runs.__setitem__(number, runs[number] + 1))
    names["recompute"](model)
    found_loss, found = gradients(model)
    assert found_loss == loss and all(torch.allclose(a, b, atol=1e-7) for a, b in zip(wanted, found, strict=True))
    assert runs == [2, 2, 2, 1]


def test_lists_of_layers_are_those_that_the_planner_scans() -> None:
    names: dict[str, Any] = {}
    program, plan = tiny(dtype="float32", remat="full")
    exec(export_plan(plan, "torchtitan", program, force=True), names)  # noqa: S102
    block = lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())  # noqa: E731
    model = torch.nn.ModuleDict()
    model["listed"] = torch.nn.ModuleList(block() for _ in range(2))
    model["numbered"] = torch.nn.ModuleDict({str(number): block() for number in range(2)})
    model["named"] = torch.nn.ModuleDict({"first": block(), "last": block()})
    model["repeated"] = torch.nn.Sequential(block(), block())
    model["single"] = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    assert list(names["layer_lists"](model)) == ["listed", "numbered", "repeated"]


def test_dots_saves_what_the_backward_pass_needs() -> None:
    """Judge by torch's storages after the forward pass: the plan saves no result of `down_proj`."""
    program, plan = tiny(dtype="float32", remat="dots")
    names: dict[str, Any] = {}
    exec(export_plan(plan, "fsdp2", program, force=True), names)  # noqa: S102
    model: Any = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**read_config("llama-tiny")[1])
    ).float()
    _, wanted = gradients(model)
    kept: dict[str, list[StorageWeakRef]] = {"down_proj": [], "up_proj": []}
    for layer in model.model.layers:
        for name, each in kept.items():
            module = getattr(layer.mlp, name)
            module.register_forward_hook(
                lambda _, ins, out, each=each: each.append(StorageWeakRef(out.untyped_storage()))
            )
    names["recompute"](model)
    _, found = gradients(model)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(wanted, found, strict=True))
    for each in kept.values():
        each.clear()
    ids = torch.zeros(2, 16, dtype=torch.long)
    loss = model(input_ids=ids, labels=ids).loss
    assert [ref.expired() for ref in kept["down_proj"]] == [True] * 4
    assert [ref.expired() for ref in kept["up_proj"]] == [False] * 4
    loss.backward()


@pytest.mark.full
def test_parameters_are_gathered_in_the_dtype_of_compute() -> None:
    program, plan = tiny()
    text = export_plan(plan, "fsdp2", program, force=True)
    assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in text and "RECOMPUTED" not in text
    assert "compute in bfloat16 with parameters in float32" in export_plan(plan, "dtensor", program, force=True)


def test_fsdp_is_priced_as_it_runs() -> None:
    """Judge by what FSDP does: it splits every parameter, unless a plan leaves all of them whole."""
    program, plan = tiny(dtype="float32")
    assert not any(plan.arguments[name].axes for name, role in plan.roles.items() if role == "parameter")
    whole = make_export(plan, "fsdp2", program)
    assert whole.prediction is not None and whole.prediction.peak_bytes == plan.prediction.peak_bytes
    assert 'mesh["data", "shard"]' in whole.text
    fsdp = plan.baselines["fsdp"]
    with pytest.raises(FormError, match="the torchtitan form cannot hold this plan"):
        make_export(plan, "torchtitan", program)
    split = make_export(plan, "torchtitan", program, force=True).prediction
    assert split is not None and split.step_time_s == pytest.approx(fsdp.step_time_s, rel=0.02)
    assert split.peak_bytes == pytest.approx(fsdp.peak_bytes, rel=0.02)


@pytest.mark.full
def test_figures_are_those_of_the_recomputation_that_a_form_holds() -> None:
    """Judge by FSDP of the program whose layers recompute as they do in the form."""
    fsdp = tiny(dtype="float32", remat="full")[1].baselines["fsdp"]
    program, plan = tiny(dtype="float32", remat="dots")
    found = make_export(plan, "accelerate", program, force=True)
    assert found.prediction is not None and "which the figures count" in found.text
    assert found.prediction.step_time_s == pytest.approx(fsdp.step_time_s, rel=0.02)
    assert found.prediction.peak_bytes == pytest.approx(fsdp.peak_bytes, rel=0.02)
    assert plan.baselines["fsdp"].peak_bytes > 1.1 * fsdp.peak_bytes


@pytest.mark.full
def test_layers_keep_their_specs_under_another_recomputation() -> None:
    """Turn the stacks of a mixture into one stack of all layers, and back."""
    full, plan = tiny(dtype="float32", remat="full")
    mixed, mixture = tiny(dtype="float32", remat="dots:1+none")
    assert plan.arguments.keys() != mixture.arguments.keys()
    split = {name: Spec(((), ("data",))) if is_stacked(name) else Spec((("data",),)) for name in mixture.arguments}
    there = plan_of_held(dataclasses.replace(mixture, arguments=split), full)
    assert there.arguments.keys() == plan.arguments.keys()
    back = plan_of_held(there, mixed)
    assert back.arguments == split


def test_plans_for_a_form_recompute_as_it_can() -> None:
    def source(remat: str) -> NamedSource:
        def opened(options: Mapping[str, Any], recipe: Mapping[str, Any], *, anew: bool) -> Program:
            return open_source("hf:llama-tiny", **options)

        options = {"train": True, "batch": 16, "seq": 64, "dtype": "float32", "remat": remat}
        return NamedSource("hf:llama-tiny", options, opened)

    options = Options(topology="cpu:4", mesh={"data": 4}, form="accelerate")
    with pytest.raises(UserError, match="the accelerate form cannot hold --remat dots"):
        plan_any(source("dots"), options)
    best = plan_any(source("auto"), options).plan
    assert best.recipe is not None
    assert {row["choices"]["remat"] for row in best.recipe.tried} == {"none", "full"}


def test_what_a_policy_has_on_the_hosts_is_named() -> None:
    program, plan = tiny(dtype="float32", remat="full,offload=input")
    text = export_plan(plan, "fsdp2", program, force=True)
    assert "wait in the hosts' memory" in text and "RECOMPUTED = (('full', 0),)" in text


MODULE = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
inputs, targets = torch.ones(8, 16), torch.ones(8, 8)
loss = nn.functional.mse_loss
"""


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("fsdp2", "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"),
        ("torchtitan", "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"),
        ("dtensor", "compute in bfloat16 with parameters in float32"),
    ],
)
def test_a_module_that_was_planned_in_another_dtype_computes_in_it(form: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(MODULE)
    for options, expected in (({"dtype": "bfloat16"}, True), ({}, False)):
        program = open_source(str(file), train=True, **options)
        plan = autoshard.plan(program, topology="cpu:4", mesh={"data": 4}, form=form)
        assert (line in export_plan(plan, form, program)) is expected
