"""Auto-sharding inside PyTorch/XLA: the real torch_xla on 8 CPU devices, in processes of their own."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import autoshard.exec
from autoshard import autoload
from experiments.torch_xla import torch_xla_overhead
from tests.exec.torch_xla_hook.torch_xla_processes import run_checks


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install this checkout, with its entry points, as a distribution in a new folder."""
    folder = tmp_path_factory.mktemp("installed")
    torch_xla_overhead.install(folder)
    return folder


def run(installed: Path, *names: str, **environment: str) -> dict[str, dict[str, Any]]:
    return run_checks("torch_xla_checks", *names, path=str(installed), **environment)


@pytest.fixture(scope="module")
def asked(installed: Path) -> dict[str, dict[str, Any]]:
    """Run checks in one process that calls `xr.use_spmd(auto=True)`."""
    names = ("auto", "matmul", "training", "second_model", "accumulation", "compiled_step")
    return run(installed, *names, XLA_AUTO_SPMD_MESH="4,2", AUTOSHARD_STRICT="1")


@pytest.fixture(scope="module")
def unchanged(installed: Path) -> dict[str, dict[str, Any]]:
    """Run checks in one process that only has `XLA_AUTO_SPMD=1`."""
    return run(installed, "unchanged_script", "failing", XLA_AUTO_SPMD="1")


@pytest.fixture(scope="module")
def unasked(installed: Path) -> dict[str, dict[str, Any]]:
    """Run checks in one process without auto-sharding. The second check plans explicitly."""
    return run(installed, "without_asking", "offline", XLA_AUTO_SPMD_MESH="4,2", JAX_PLATFORMS="cpu")


def split(specs: list[str]) -> list[bool]:
    return [text.startswith("{devices=") for text in specs]


def test_training_equals_the_unsharded_run(asked: dict[str, Any]):
    found = asked["training"]
    assert found["loss_difference"] < 1e-5 and found["parameter_difference"] < 1e-5
    assert found["mesh"] == {"data": 4, "model": 2} and found["topology"] == "cpu:8"


def test_parameters_and_state_are_split_and_stay_so(asked: dict[str, Any]):
    found = asked["training"]
    assert split(found["parameters"]).count(True) >= 2
    assert found["states"] == found["parameters"]  # momentum is split like its parameter


def test_later_steps_do_not_compile(asked: dict[str, Any]):
    # As many as in SPMD mode without auto-sharding: results of the first step are returned sharded.
    assert asked["training"]["compiles"] == [1, 2, 2, 2, 2, 2]
    assert asked["second_model"]["compiles"] == [1, 2, 2]


def test_roles_are_known(asked: dict[str, Any]):
    roles = asked["training"]["roles"]
    assert {name for name, role in roles.items() if role == "parameter"} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert sorted(role for role in roles.values() if role == "batch") == ["batch", "batch"]


def test_inputs_of_later_steps_are_split_alike(asked: dict[str, Any]):
    first, *others = asked["training"]["inputs"][1:]
    assert all(other == first for other in others)


def test_a_second_model_and_its_evaluation(asked: dict[str, Any]):
    found = asked["second_model"]
    assert found["loss_difference"] < 1e-5
    assert found["planned_for_evaluation"] == 1
    assert any(split(found["parameters"]))
    assert found["evaluated"] < 1e-2  # AdamW amplifies noise of gradients that are nearly zero


def test_gradient_accumulation(asked: dict[str, Any]):
    found = asked["accumulation"]
    assert found["difference"] < 1e-5
    assert found["compiles"][-1] == found["compiles"][-3]


def test_a_compiled_step_with_batches_of_two_sizes(asked: dict[str, Any]):
    found = asked["compiled_step"]
    assert found["difference"] < 1e-5 and found["plans"] == 1
    # The second size runs under the plan of the first. The first is compiled once more when the results of its planned
    # run are returned sharded.
    assert found["compiles"] == [1, 2, 2, 3, 3, 3, 3, 3]


def test_a_graph_without_modules(asked: dict[str, Any]):
    assert asked["matmul"]["difference"] < 1e-5 and asked["matmul"]["plans"] == 1


def test_an_unchanged_script(unchanged: dict[str, Any]):
    found = unchanged["unchanged_script"]
    assert found["plans"] == 1 and found["modules"] == []
    assert any(split(found["parameters"]))
    assert found["losses"][-1] < found["losses"][0]
    assert found["compiles"][-1] == found["compiles"][2]


def test_a_step_that_cannot_be_planned_runs_replicated(unchanged: dict[str, Any]):
    found = unchanged["failing"]
    assert found["difference"] < 1e-5
    assert found["warned"] == [
        "autoshard: this step runs replicated, since it could not be planned: there is no plan today."
    ]
    assert found["strict"] == "there is no plan today."


@pytest.mark.full
def test_a_model_moved_too_early(installed: Path):
    said = run(installed, "early_tensors")["early_tensors"]["said"]
    assert "4 tensors (of shapes [32, 8], [32], [8, 32], ...) were moved to the XLA device before SPMD mode" in said
    assert "call xr.use_spmd(auto=True)" in said


def test_who_does_not_ask_gets_nothing(unasked: dict[str, Any]):
    found = unasked["without_asking"]
    assert found["loaded"] == ["autoshard", "autoshard.autoload", "autoshard.errors"]
    assert found["value"] == 512.0
    assert found["to"] == "TensorBase.to"


def test_a_module_that_is_planned_and_made_in_parts(unasked: dict[str, Any]):
    found = unasked["offline"]
    assert found["weight"] == "{devices=[2,4]0,2,4,6,1,3,5,7}"
    assert found["difference"] < 1e-5
    assert found["mesh"] == "OrderedDict([('data', 4), ('model', 2)])"
    assert split(found["sent"]) == split(found["planned"]) * 2


@pytest.mark.parametrize(("variable", "auto", "installs"), [("0", False, 0), ("0", True, 1), ("1", False, 1)])
def test_only_what_asks_installs_the_hook(variable: str, auto: bool, installs: int, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    package, runtime, hook = ModuleType("torch_xla"), ModuleType("torch_xla.runtime"), ModuleType("hook")
    runtime.use_spmd = lambda auto=False: calls.append("spmd")  # pyrefly: ignore[missing-attribute]
    hook.install = lambda: calls.append("install")  # pyrefly: ignore[missing-attribute]
    monkeypatch.setitem(sys.modules, "torch_xla", package)
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    monkeypatch.setitem(sys.modules, "autoshard.exec.torch_xla_hook", hook)
    monkeypatch.setattr(autoshard.exec, "torch_xla_hook", hook, raising=False)
    monkeypatch.delenv("XLA_AUTO_SPMD", raising=False)
    autoload._ready()
    # The script sets the variable after torch_xla is imported.
    monkeypatch.setenv("XLA_AUTO_SPMD", variable)
    runtime.use_spmd(auto)
    assert calls == ["install"] * installs + ["spmd"]
