"""The names of the first hour at the top of the package: from a user's file to a measured plan."""

from pathlib import Path

import pytest

import autoshard


FIRST_HOUR = (
    *("trace", "from_torch", "from_keras", "load_program", "plan", "Plan", "load", "check", "measure", "compile"),
    *("refine", "sweep", "export", "Topology", "choices", "stack", "register_rule", "remat_policy", "auto_policy"),
    *("UserError", "InfeasibleError"),
)
FILE = """
import jax


def program():
    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    return lambda w, x: (x @ w).sum(), (shape, shape)
"""


def test_the_names_of_the_first_hour_load():
    assert set(FIRST_HOUR) <= set(dir(autoshard))
    assert all(callable(getattr(autoshard, name)) for name in FIRST_HOUR)


@pytest.mark.heavy
def test_a_file_is_loaded_planned_exported_and_measured(tmp_path: Path):
    path = tmp_path / "step.py"
    path.write_text(FILE)
    program = autoshard.load_program(str(path))
    plan = autoshard.plan(program, topology="cpu:2", mesh="data=2")
    assert repr(plan).startswith(f"<Plan of {plan.program_name}: fits, ")
    assert repr(plan).endswith(" a step on data=2 of cpu:2>")
    assert "PartitionSpec" in autoshard.export(plan, "flax", program)
    measured = autoshard.measure(program, plan, steps=1, warmup=0, check=True)
    assert measured.check is not None and measured.check.passed
