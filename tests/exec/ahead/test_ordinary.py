"""A slice of the table of ordinary training steps: predictions are near the TPU compiler's figures, kind by kind."""

import dataclasses
import importlib.util

import pytest

from autoshard.planning import Options, Plan, make_plan
from experiments.fidelity import ordinary
from experiments.fidelity.ordinary import judge, name_of
from experiments.fidelity.schedule_physics import MOST, bounds
from experiments.lib.programs.ordinary_programs import kind_of
from experiments.lib.saved_results import figures_digest


SEEDS = {"mlp": 15, "mlp_scan": 1, "lstm": 4, "mixture": 24, "graph": 16, "attention": 22}
"""Kinds of programs that are predicted within the bounds, and a seed of each that compiles in two or three seconds."""


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", SEEDS)
def test_a_kind_is_predicted_within_wide_bounds(kind: str) -> None:
    """Allow a factor of 2 for memory and of 2.5 for time, and 30 % of the bytes on the wire."""
    if importlib.util.find_spec("libtpu") is None:  # an optional extra
        pytest.skip("libtpu is not installed")
    seed = SEEDS[kind]
    assert kind_of(seed) == kind
    row = judge(name_of(seed, "v5e:2x4"))
    assert row["verdict"] == "fits"
    assert 1 / 2 < row["memory"]["predicted"] / row["memory"]["compiled"] < 2
    assert 1 / 2.5 < row["seconds"]["predicted"] / row["seconds"]["compiled"] < 2.5
    assert row["wire"]["predicted"] == pytest.approx(row["wire"]["compiled"], rel=0.3)
    assert all(0 <= share <= 1 for shares in row["classes"].values() for share in shares)


def test_a_known_row_is_compiled_again_only_if_its_plan_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take compiled figures from the known row, and predicted ones from the plan; compile a plan with another spec."""
    compiled: list[dict[str, object]] = []

    def compile_now(program: object, plan: Plan) -> dict[str, object]:
        compiled.append({argument: str(spec) for argument, spec in plan.arguments.items()})
        return {
            "verdict": "fits",
            "memory": {"compiled": 7, "predicted": 3},
            "wire": {"compiled": 5},
            "seconds": {"compiled": 0.5},
            "unforeseen": 0.25,
        }

    monkeypatch.setattr(ordinary, "_compiled", compile_now)
    name = name_of(15, "v5e:2x4")
    row = judge(name)
    assert row["memory"]["compiled"] == 7 and row["memory"]["predicted"] > 1e6
    assert judge(name, known=row) == row and compiled == [row["specs"]]
    assert judge(name, known=row | {"inputs": "older"}) == row and len(compiled) == 2
    program = ordinary._program(15)
    plan = make_plan(program, Options(topology="v5e:2x4", mesh={"a": 2, "b": 4})).plan
    assert figures_digest(program, plan) == row["inputs"]
    other = dataclasses.replace(plan, arguments=plan.arguments | {"params.1.1": plan.arguments["params.0.1"]})
    assert figures_digest(program, other) != row["inputs"]


def test_bounds_of_bare_physics() -> None:
    """Let the longest part be the least, and a multiple of all parts the most; four links share the wire's bytes."""
    row = {"hbm_s": 1.0, "flops_s": 2.0, "wire_s": 12.0}
    assert bounds(row) == (3.0, MOST * 15.0)
