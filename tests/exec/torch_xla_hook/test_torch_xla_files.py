"""Captured steps in files: planned elsewhere by the command, and run by the script under the plan that it is given."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


pytest.importorskip("torch_xla")
from autoshard.planning import load_plan  # noqa: E402
from tests.exec.torch_xla_hook.torch_xla_processes import run_module  # noqa: E402


def train(count: int, width: str = "64", **environment: str) -> dict[str, Any]:
    """Run the script on so many devices, and return what it prints."""
    return run_module("torch_xla_file_steps", (width,), ("run",), CPU_NUM_DEVICES=str(count), **environment)["run"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the script on 8 devices and plan its step for 4."""
    where = tmp_path_factory.mktemp("steps")
    train(8, XLA_AUTO_SPMD_DUMP=str(where))
    options = ["--topology", "cpu:4", "--mesh", "data=2,model=2", "--pin", "0.weight=model,None", "--quiet"]
    run("plan", "0-Sequential.mlir", *options, "-o", "four.json", where=where)
    return where


def run(*words: str, where: Path) -> str:
    """Run the command in a folder, and return what it prints."""
    here = os.environ | {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-m", "autoshard", *words]
    return subprocess.run(command, cwd=where, env=here, check=True, capture_output=True, text=True).stdout


def test_the_command_takes_a_captured_step_with_its_names(folder: Path):
    live, four = (load_plan(folder / name) for name in ("0-Sequential.json", "four.json"))
    assert live.program_fingerprint == four.program_fingerprint and live.module_hash == four.module_hash
    assert live.roles == four.roles and live.results.keys() == four.results.keys()
    assert four.roles["0.weight"] == "parameter" and four.roles["batch.0.0"] == "batch"
    assert "0.weight" in run("report", "0-Sequential.json", where=folder)


def test_a_script_runs_under_the_plan_of_its_step(folder: Path):
    free = train(4, XLA_AUTO_SPMD_MESH="4")
    for ahead in ("0", "1"):
        given = train(4, XLA_AUTO_SPMD_PLAN=str(folder / "four.json"), XLA_AUTO_PLAN_AHEAD=ahead)
        assert given["losses"] == pytest.approx(free["losses"], rel=1e-5)
        assert given["plans"] == [["0-Sequential", {"data": 2, "model": 2}]]
        assert given["weight"] == "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"


REFUSED = {
    "another step": ((4, "72"), {}, " is float32[72"),
    "other devices": ((8,), {}, "the plan is for cpu:4 with 4 devices, but PyTorch/XLA sees 8"),
    "another mesh": ((4,), {"XLA_AUTO_SPMD_MESH": "4"}, "XLA_AUTO_SPMD_MESH=4 asks for another: unset one of them."),
    "a mark": ((4,), {"MARKED": "1"}, "the plan splits 0.weight as "),
    "a name": ((4,), {"XLA_AUTO_SPMD_MSEH": "4"}, "XLA_AUTO_SPMD_MSEH is no variable of auto-sharding: unset it"),
    "no folder": ((4,), {"XLA_AUTO_SPMD_DUMP": "/dev/null/x"}, "XLA_AUTO_SPMD_DUMP=/dev/null/x is no folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_the_plan_is_refused_before_the_first_step(folder: Path, case: str):
    given, environment, sentence = REFUSED[case]
    with pytest.raises(AssertionError) as error:
        train(*given, XLA_AUTO_SPMD_PLAN=str(folder / "four.json"), **environment)
    last = str(error.value).strip().splitlines()[-1]
    assert sentence in last and "XLA_AUTO_SPMD_" in last


def test_a_missing_plan_is_refused():
    with pytest.raises(AssertionError, match="XLA_AUTO_SPMD_PLAN=none.json: cannot read the plan file none.json"):
        train(4, XLA_AUTO_SPMD_PLAN="none.json")
