"""Sweeps: rows in order, made once, each saying why it failed."""

import concurrent.futures
import json
import pickle
from pathlib import Path

import pytest

import autoshard
from autoshard.errors import UserError
from autoshard.plan import Options, SweepRow, SweepTask, make_plan
from autoshard.program import open_source


PROGRAM = """
import jax, jax.numpy as jnp

def program():
    return lambda params, x: jnp.tanh(x @ params), tuple(jax.ShapeDtypeStruct(s, "float32") for s in ((16, 8), (8, 16)))
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("XLA_AUTO_SPMD_MESH", raising=False)
    (tmp_path / "step.py").write_text(PROGRAM)
    return str(tmp_path / "step.py")


def test_rows_come_in_the_order_asked_for_and_equal_plans_made_alone(source: str) -> None:
    topologies = ["cpu:4", "v5e:2x2", "cpu:2"]
    rows = autoshard.sweep(source, topologies=topologies)
    assert [row.topology for row in rows] == topologies
    for row in rows:
        plan = make_plan(open_source(source), Options(topology=row.topology)).plan
        assert (row.step_time_s, row.peak_bytes) == (plan.prediction.step_time_s, plan.prediction.peak_bytes)
        assert row.mesh == ",".join(f"{axis}={size}" for axis, size in plan.mesh.items())
        assert row.headroom_bytes == plan.memory_limit_bytes - plan.prediction.peak_bytes
        assert row.words == plan.words


def test_what_is_kept_changes_no_row(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = autoshard.sweep(source, topologies=["cpu:2"])
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr("autoshard.graph._kept.registrations", lambda: 0)
    for _ in range(2):
        assert autoshard.sweep(source, topologies=["cpu:2"], program_options={"kept": True}) == fresh
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".graph"]


def test_a_row_that_cannot_be_says_why_and_the_rest_goes_on(source: str) -> None:
    rows = autoshard.sweep(source, topologies=["cpu:4", "cpu:7"])
    assert not rows[0].failed and rows[0].step_time_s is not None
    assert rows[1].failed.startswith("no mesh of 1 to 4 axes over the 7 devices of cpu:7")
    assert rows[1].step_time_s is None and rows[1].headroom_bytes is None
    (only,) = autoshard.sweep(source, topologies=["cpu:4"], batches=[8])
    assert "`--batch` only apply to `hf:CONFIG`" in only.failed and only.batch == 8


def test_a_topology_that_does_not_exist_is_refused_at_once(source: str) -> None:
    with pytest.raises(UserError, match="v5q"):
        autoshard.sweep(source, topologies=["cpu:4", "v5q:2x2"])


def test_any_executor_will_do(source: str) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = autoshard.sweep(source, topologies=["cpu:4", "cpu:2"], executor=pool)
    assert found == autoshard.sweep(source, topologies=["cpu:4", "cpu:2"])


def test_a_task_goes_to_another_process_and_back(source: str) -> None:
    task = SweepTask(source, "program", (), ("cpu:2",), (("time_limit", 20.0),))
    assert pickle.loads(pickle.dumps(task)) == task
    (row,) = task.run()
    assert pickle.loads(pickle.dumps(row)) == row


class Recorder:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)


def test_rows_on_file_are_not_made_again(source: str, tmp_path: Path) -> None:
    path, said = tmp_path / "sweep.json", Recorder()
    first = autoshard.sweep(source, topologies=["cpu:2"], path=path)
    data = json.loads(path.read_text())
    (row,) = data["rows"].values()
    row["step_time_s"] = 42.0  # a mark, to see where the row comes from
    path.write_text(json.dumps(data))
    again = autoshard.sweep(source, topologies=["cpu:2", "cpu:4"], path=path, progress=said)
    assert again[0].step_time_s == 42.0 and again[1].topology == "cpu:4"
    assert said.lines[0] == f"1 of 2 rows are in {path} already"
    assert len(json.loads(path.read_text())["rows"]) == 2
    other = autoshard.sweep(source, topologies=["cpu:2"], path=path, memory_limit=1 << 30)
    assert other[0].step_time_s == first[0].step_time_s, "another limit is another row"
    Path(source).write_text(PROGRAM.replace("(16, 8)", "(16, 32)"))
    changed = autoshard.sweep(source, topologies=["cpu:2"], path=path)
    assert changed[0].step_time_s != 42.0, "a changed program is another row"


@pytest.mark.parametrize("text", ["", "[]", '{"format": "x"}', '{"format": "autoshard-sweep", "rows": {"a": {}}}'])
def test_a_file_of_another_kind_is_left_alone(source: str, tmp_path: Path, text: str) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        autoshard.sweep(source, topologies=["cpu:2"], path=path)
    assert str(caught.value) == (
        f"{path} is not a file that `autoshard sweep --out` wrote; name another one, or remove it."
    )
    assert path.read_text() == text


def test_time_and_price_of_a_token() -> None:
    row = SweepRow("v5e:4x4", 8, None, step_time_s=2.0, chips=16, tokens=4096)
    assert row.seconds_per_token == pytest.approx(2 / 4096)
    assert row.price_per_token({"v5e": 1.8}) == pytest.approx(1.8 * 16 * 2 / 3600 / 4096)
    assert row.price_per_token({"v5p": 1.8}) is None
    assert SweepRow("v5e:4x4", 8, None, step_time_s=2.0, chips=16).price_per_token({"v5e": 1.8}) is None
