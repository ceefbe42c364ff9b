"""Writes to views and in-place activations under `plan.distribute` and its export: four processes compute what eager
torch does.
"""

from pathlib import Path

import pytest

import autoshard
from autoshard.exports import export_plan
from autoshard.program import from_torch
from tests.exec.apply.written_views import made
from tests.exec.workers import run_workers


WORKER = """
import sys
from tests.exec.apply.written_views import main
main(sys.argv[1], sys.argv[2], "4", *sys.argv[3:])
"""
INPUTS = {"batch": "data,None,None", "sequence": "None,data,None", "all": "data+model,None,None"}


def planned(inputs: str) -> autoshard.Plan:
    """Return a plan that splits the batch, the sequence or the batch over all devices, and layers but in the last."""
    model, x = made()
    program = from_torch(model.float(), x.float(), train=True, loss=lambda y: y.square().mean())
    rows, columns = ("None,None",) * 2 if inputs == "all" else ("model,None", "None,model")
    pins = {"a.weight": rows, "b.weight": columns, "batch.x": INPUTS[inputs]}
    return autoshard.plan(program, topology="cpu:4", mesh={"data": 2, "model": 2}, pins=pins)


def check(folder: Path, names: list[str], grads: str, least: int) -> None:
    """Run forms with and without gradients (`grads` is of 1 and 0) on four processes; no names are all forms."""
    for found in run_workers(WORKER, [str(folder), ",".join(names), grads], count=4, timeout_s=900.0):
        assert len(found) >= least
        assert not {form: each for form, each in found.items() if isinstance(each, str) or not each < 1e-9}


def test_writes_reach_all_that_share_memory(tmp_path: Path) -> None:
    planned("batch").save(tmp_path / "plan.json")
    check(tmp_path, COMMON, "1", len(COMMON))


COMMON = ["zero_ of columns", "masked_fill_", "transposed", "module", "view_after", "no_base", "nested", "detached",
          "parameter", "doubled", "in_autograd"]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("inputs", INPUTS)
def test_every_write_reaches_all_that_share_memory(inputs: str, tmp_path: Path) -> None:
    planned(inputs).save(tmp_path / "plan.json")
    check(tmp_path, [], "", 100)


@pytest.mark.full
def test_the_export_writes_as_distribute_does(tmp_path: Path) -> None:
    (tmp_path / "split.py").write_text(export_plan(planned("batch"), "dtensor", force=True))
    check(tmp_path, [], "", 100)
