"""Plan files: they load as the same plan, have the same bytes, and every bad file is refused in one sentence."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from autoshard.errors import UserError
from autoshard.planning.record.plan_files import load_plan, plan_to_json, save_plan
from autoshard.planning.record.plan_parts import Collective, Pin, Prediction
from autoshard.planning.record.plan_record import SCHEMA, Plan
from autoshard.planning.record.spec import Spec


def prediction(step: float) -> Prediction:
    return Prediction(
        step_time_s=step,
        compute_s=0.5,
        hidden_comm_s=0.0,
        exposed_comm_s=0.25,
        mfu=None,
        peak_bytes=100,
        memory={"parameters": 60, "batch": 40},
        fits=True,
        wire_bytes={"data": 8, "model": 16},
        collectives=(Collective("all-reduce", ("data",), 2, 8, 1e-6, False, "w"),),
        peak_at="dot",
    )


PLAN = Plan(
    program_name="mlp",
    program_fingerprint="ab" * 32,
    topology="cpu:8",
    mesh={"model": 4, "data": 2},
    device_order=(0, 1, 2, 3, 4, 5, 6, 7),
    memory_limit_bytes=1 << 30,
    arguments={"z": Spec((("model",), ())), "a": Spec((("data", "model"),))},
    results={"loss": Spec(())},
    pins=(Pin(3, 0, Spec((("data",), ()))), Pin(3, 0, Spec(((), ())), operand=(5, 1), name="h")),
    prediction=prediction(0.75),
    baselines={"fsdp": prediction(1.0)},
    objective=750,
    lower_bound=700,
    solver_gap=0.0,
    plan_gap=float("inf"),
    words=("batch over data",),
    warnings=(),
    provenance={"versions": {"jax": "0.10.2"}, "seed": 0},
    shapes={"z": (8, 4), "a": (16,)},
    dtypes={"z": "float32", "a": "int32"},
    roles={"z": "parameter", "a": "batch"},
    module_hash="cd" * 32,
)


def test_a_plan_comes_back_equal_and_in_order(tmp_path: Path):
    PLAN.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == PLAN
    assert list(loaded.arguments) == ["z", "a"]
    assert list(loaded.mesh) == ["model", "data"]
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.json"]


def test_equal_plans_give_equal_bytes():
    shuffled = dataclasses.replace(PLAN, provenance={"seed": 0, "versions": {"jax": "0.10.2"}})
    assert plan_to_json(shuffled) == plan_to_json(PLAN)
    assert plan_to_json(PLAN).startswith('{\n "schema": 1,')


def damaged(change) -> str:
    data = json.loads(plan_to_json(PLAN))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (plan_to_json(PLAN)[:-40], "plan.json is cut short at line"),
        ("", "plan.json is cut short at line 1"),
        ("{'a': 1}", "plan.json is damaged at line 1"),
        ("[1, 2]", "plan.json is not a plan file"),
        ('{"nodes": []}', "plan.json is not a plan file"),
        (damaged(lambda d: d.update(schema=SCHEMA + 1)), f"has schema {SCHEMA + 1}, but this version"),
        (damaged(lambda d: d.update(schema="x")), "`schema` is 'x'"),
        (damaged(lambda d: d.pop("topology")), "`topology` is missing"),
        (damaged(lambda d: d.pop("arguments")), "`arguments` is missing"),
        (damaged(lambda d: d.update(pins=[{"op": 1}])), "`pins.index` is missing"),
        (damaged(lambda d: d.update(objective="fast")), '`objective` is "fast"'),
        (damaged(lambda d: d["prediction"].update(fits=1)), "`prediction.fits` is 1"),
        (damaged(lambda d: d.update(device_order=[0, 1])), "the mesh has 4 x 2 devices but `device_order` names 2"),
        (damaged(lambda d: d["arguments"][0].update(spec=[["pipe"], []])), "z is split over 'pipe', which is not"),
        (damaged(lambda d: d["arguments"][0].update(spec=[["data"], ["data"]])), "z uses a mesh axis twice"),
        (damaged(lambda d: d["arguments"][0].update(spec=[[]])), "z has 2 dims but its spec has 1"),
        (damaged(lambda d: d["arguments"].append(d["arguments"][0])), "a name that is not text or stands twice"),
    ],
)
def test_a_bad_file_gets_one_sentence(tmp_path: Path, text: str, sentence: str):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_plan(path)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_binary_and_missing_files_are_refused(tmp_path: Path):
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not a plan file"):
        load_plan(tmp_path / "plan.json")
    with pytest.raises(UserError, match="cannot read the plan file .*missing.json: No such file"):
        load_plan(tmp_path / "missing.json")


@pytest.mark.parametrize("name", ["step.py", "step.mlir", "hf:llama3-8b"])
def test_a_program_in_the_place_of_a_plan_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.py").write_text("import jax")
    with pytest.raises(UserError, match=f"^{name} is a program, not a plan: `autoshard plan {name} --out"):
        load_plan(name)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match="No space left"):
        save_plan(PLAN, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UserError, match="cannot write the plan to .*nowhere/plan.json: No such file"):
        save_plan(PLAN, tmp_path / "nowhere" / "plan.json")
