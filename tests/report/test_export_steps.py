"""Exports for torch run a whole training step: loss, clipping, update and whole parameters are the module's own."""

import json
import os
from pathlib import Path

import pytest

import autoshard
from autoshard.errors import FormError
from autoshard.exports import export_plan
from autoshard.program import from_torch
from tests import forked
from tests.report.export_modules import CASES, MEETING


FORMS = ("dtensor", "fsdp2", "torchtitan")


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float | str]:
    """Return the difference of every export that is written from the module's own step, or its error."""
    folder = tmp_path_factory.mktemp("steps")
    runs = []
    for name, (make, inputs, targets, loss, mesh, pins) in CASES.items():
        program = from_torch(make(), (inputs,), train=True, loss=loss, targets=targets)
        if "data" in mesh:
            batch = [each for each in program.arguments if each.role == "batch"]
            pins = pins | {each.name: ",".join(["data", *["None"] * (len(each.shape) - 1)]) for each in batch}
        plan = autoshard.plan(program, topology="cpu:4", mesh=mesh, pins=pins)
        for form in FORMS[:1] if name in MEETING else FORMS:
            try:
                text = export_plan(plan, form, program, force=True)
            except FormError:
                continue
            assert "from autoshard" not in text
            (folder / f"{name}_{form}.py").write_text(text)
            runs.append(f"{name}_{form}")
    root = Path(__file__).parents[2]
    command = ["-m", "tests.report.export_modules", str(folder), *runs]
    ran = forked.run(command, root, os.environ | {"PYTHONPATH": str(root)})
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    assert lines, ran.stderr[-3000:]
    return json.loads(lines[-1])


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_modules_own(differences: dict[str, float | str], name: str) -> None:
    """Judge by eager torch on one process; a form that can hold nothing of the plan is refused before."""
    found = {run: each for run, each in differences.items() if run.startswith(f"{name}_")}
    assert f"{name}_dtensor" in found
    for run, each in found.items():
        assert isinstance(each, float) and each < 1e-4, (run, each)
