"""Sweeps: rows in order, planned once, each failed one with its reason."""

import concurrent.futures
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autoshard
from autoshard.cli import main
from autoshard.errors import UserError
from autoshard.planning import (
    Options,
    SweepChoice,
    SweepRow,
    SweepTask,
    choose_rows,
    make_plan,
    read_assumptions,
    read_sweep,
)
from autoshard.program import open_source, read_config


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


def test_what_is_preserved_changes_no_row(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = autoshard.sweep(source, topologies=["cpu:2"])
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr("autoshard.graph.graph_cache.registrations", lambda: 0)
    for _ in range(2):
        assert autoshard.sweep(source, topologies=["cpu:2"], program_options={"kept": True}) == fresh
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".graph"]


def test_a_row_that_cannot_be_says_why_and_the_rest_goes_on(source: str) -> None:
    rows = autoshard.sweep(source, topologies=["cpu:4", "cpu:7"])
    assert not rows[0].failed and rows[0].step_time_s is not None
    assert rows[1].failed.startswith("no mesh of 1 to 4 axes over the 7 devices of cpu:7")
    assert rows[1].step_time_s is None and rows[1].headroom_bytes is None
    (only,) = autoshard.sweep(source, topologies=["cpu:4"], batches=[8])
    assert "`--batch` only applies to `hf:CONFIG`" in only.failed and only.batch == 8


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
    row["step_time_s"] = 42.0  # a mark that shows where the row was read
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


@pytest.mark.full
def test_tokens_and_prices_stay_with_the_rows(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Report a sweep with the tokens and prices of its run; flags of the report come first."""
    path = tmp_path / "sweep.json"
    sweep = ["sweep", source, "--topology", "v5e:1x1,v6e:1x1", "--quiet", "--out", str(path)]
    assert main([*sweep, "--tokens", "1B", "--price", "v5e=1.5"]) == 0
    assert read_assumptions(path) == {"tokens": 1e9, "prices": {"v5e": 1.5}}
    autoshard.sweep(source, topologies=["cpu:2"], path=path)
    assert len(read_sweep(path)) == 3 and read_assumptions(path).get("tokens") == 1e9
    assert main([*sweep, "--price", "v6e=2.5"]) == 0
    capsys.readouterr()
    assert read_assumptions(path) == {"tokens": 1e9, "prices": {"v6e": 2.5}}
    for flags, tokens in ([], 1e9), (["--tokens", "2B"], 2e9):
        page = tmp_path / "sweep.html"
        assert main(["report", str(path), "--out", str(page), "--force", *flags]) == 0
        capsys.readouterr()
        text = page.read_text().replace(" ", "")
        assert f'"tokens":{tokens}' in text and '"v6e":2.5' in text


ROW = {"topology": "cpu:2", "batch": None, "remat": None}


def rows_of(**changes: Any) -> str:
    return json.dumps({"format": "autoshard-sweep", "rows": {"a": ROW | changes}})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "x"}',
        '{"format": "x", "rows": {}}',
        '{"format": "autoshard-sweep"}',
        '{"rows": {}}',
        '{"format": "autoshard-sweep", "rows": {"a": {}}}',
        rows_of(step_time_s="soon"),
        rows_of(chips=True),
        rows_of(chips=2.5),
        rows_of(topology=None),
        rows_of(words="ab"),
        rows_of(words=[1]),
        rows_of(recipe=[]),
        rows_of(colour="red"),
    ],
)
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


def test_a_folder_keeps_the_plan_of_each_row(source: str, tmp_path: Path) -> None:
    place, said = tmp_path / "kept", Recorder()
    (row,) = autoshard.sweep(source, topologies=["cpu:2"], path=place)
    assert row.plan == "cpu-2.plan.json"
    plan = autoshard.load(place / row.plan)
    assert plan.prediction.step_time_s == row.step_time_s and plan.topology == "cpu:2"
    written = {path.name: path.read_bytes() for path in place.iterdir()}
    assert set(written) == {"sweep.json", "cpu-2.plan.json"}
    assert autoshard.sweep(source, topologies=["cpu:2"], path=place, progress=said) == [row]
    assert said.lines == [f"1 of 1 rows are in {place} already"]
    (place / row.plan).unlink()  # a row without its plan is planned again, with the same result
    assert autoshard.sweep(source, topologies=["cpu:2"], path=place) == [row]
    assert {path.name: path.read_bytes() for path in place.iterdir()} == written
    (other,) = autoshard.sweep(source, topologies=["cpu:2"], path=place, memory_limit=1 << 30)
    assert other.plan == "cpu-2.2.plan.json"


def test_a_sweep_that_is_ended_goes_on_where_it_was(source: str, tmp_path: Path) -> None:
    def end(line: str) -> None:
        if line.startswith("1/2"):
            raise KeyboardInterrupt

    place, said = tmp_path / "kept", Recorder()
    with pytest.raises(KeyboardInterrupt):
        autoshard.sweep(source, topologies=["cpu:2", "cpu:4"], path=place, progress=end)
    assert [path.name for path in sorted(place.iterdir())] == ["cpu-2.plan.json", "sweep.json"]
    rows = autoshard.sweep(source, topologies=["cpu:2", "cpu:4"], path=place, progress=said)
    assert said.lines[0].startswith("1 of 2 rows are in") and said.lines[1].startswith("2/2 cpu:4: ")
    whole = tmp_path / "whole"
    assert autoshard.sweep(source, topologies=["cpu:2", "cpu:4"], path=whole) == rows
    assert {path.name: path.read_bytes() for path in place.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }


def test_patterns_stand_for_topologies(source: str) -> None:
    rows = autoshard.sweep(source, topologies=["v5e:1x*", "v5e:1x1", "v5e:2x2*1-2"])
    assert [row.topology for row in rows] == ["v5e:1x1", "v5e:2x2", "v5e:2x2*2"]


class Dying(concurrent.futures.Executor):
    """Workers that die at their first calls."""

    def __init__(self, deaths: int) -> None:
        self.deaths = deaths

    def submit(self, fn, /, *args, **kwargs):
        future: concurrent.futures.Future = concurrent.futures.Future()
        self.deaths -= 1
        if self.deaths >= 0:
            future.set_exception(concurrent.futures.BrokenExecutor("killed"))
        else:
            future.set_result(fn(*args))
        return future


def test_a_worker_that_dies_is_replaced(source: str) -> None:
    assert autoshard.sweep(source, topologies=["cpu:2"], executor=Dying(2)) == autoshard.sweep(
        source, topologies=["cpu:2"]
    )
    with pytest.raises(UserError, match=r"a worker of the sweep died \(killed\): run it again with fewer --jobs"):
        autoshard.sweep(source, topologies=["cpu:2"], executor=Dying(3))


class Elsewhere(concurrent.futures.Executor):
    """A worker on a machine that differs from this one in something."""

    def __init__(self, change) -> None:
        self.change = change

    def submit(self, fn, /, *args, **kwargs):
        future: concurrent.futures.Future = concurrent.futures.Future()
        self.change()
        try:
            future.set_result(fn(*pickle.loads(pickle.dumps(args))))
        except Exception as error:
            future.set_exception(error)
        return future


def test_a_worker_that_reads_another_file_makes_no_row(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Elsewhere(lambda: Path(source).unlink())
    with pytest.raises(UserError, match=r"step\.py or a file that is read with it is not on .* what it was where the"):
        autoshard.sweep(source, topologies=["cpu:2"], executor=there, path=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    Path(source).write_text(PROGRAM)
    (config := tmp_path / "config.json").write_text(json.dumps(read_config("llama-tiny")[1]))
    there = Elsewhere(lambda: config.write_text(config.read_text() + " "))
    options = {"train": True, "batch": 8, "seq": 64}
    with pytest.raises(UserError, match=r"config\.json or a file that is read with it is not on"):
        autoshard.sweep(f"hf:{config}", topologies=["cpu:2"], executor=there, program_options=options)
    (figures := tmp_path / "figures.json").write_text('{"schema": 1, "chips": {}}')
    monkeypatch.setenv("AUTOSHARD_CALIBRATION", str(figures))
    there = Elsewhere(lambda: figures.write_text(figures.read_text() + " "))
    with pytest.raises(UserError, match="or a file that is read with it is not on"):
        autoshard.sweep(source, topologies=["cpu:2"], executor=there)


def test_a_worker_that_has_learned_something_else_makes_no_row(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def learn() -> None:
        fit = SimpleNamespace(observations=3)
        monkeypatch.setattr("autoshard.planning.capacity.sweep_task.learned_fit", lambda *_: fit)
        monkeypatch.setattr("autoshard.planning.capacity.sweep_task.fit_record", lambda fit: "three of them")

    with pytest.raises(UserError, match="^what was learned is not on .* what it was where the sweep began"):
        autoshard.sweep(source, topologies=["cpu:2"], executor=Elsewhere(learn))


def test_what_cannot_hold_its_state_is_reported_at_once() -> None:
    options = {"train": True, "batch": 8, "seq": 64}
    (row,) = autoshard.sweep("hf:llama-tiny", topologies=["v5e:1x1"], program_options=options, memory_limit=1 << 20)
    assert row.failed == (
        "it does not fit: parameters, state and batch alone are 2.07 MiB, and the 1 devices of v5e:1x1 hold 1.00 MiB."
    )


@pytest.mark.full
def test_recipes_are_chosen_for_each_topology() -> None:
    options = {"train": True, "batch": "auto", "remat": "full", "seq": 32}
    (row,) = autoshard.sweep("hf:llama-tiny", topologies=["v5e:1x1"], program_options=options, mesh="data=1")
    assert row.batch == row.recipe["batch"] and set(row.recipe) == {"batch"}
    assert row.batch is not None and row.tokens == 32 * row.batch
    with pytest.raises(UserError, match="neither a file nor a bundled configuration"):
        autoshard.sweep("hf:llama-tinny", topologies=["v5e:1x1"], program_options=options)


def made(topology: str, step: float, tokens: int = 1000, **more) -> SweepRow:
    return SweepRow(topology, None, None, step_time_s=step, tokens=tokens, **more)


ROWS = [
    made("v5e:4x4", 8.0, chips=16),
    made("v5e:8x8", 3.0, chips=64),
    made("v5p:2x2x2", 2.0, chips=8),
    made("v5e:16x16", 1.9, chips=256),
    SweepRow("v5e:2x2", None, None, failed="it does not fit"),
    made("v5e:4x8", 8.0, chips=32),
]


def test_what_stands_out() -> None:
    priced = choose_rows(ROWS, {"v5e": 1.0, "v5p": 10.0})
    # Dollars a token: 128, 192, 160, 486, and 256 of the last.
    assert (priced.best, priced.smallest, priced.frontier) == (0, 2, (3, 2, 0))
    fastest = choose_rows(ROWS, {"v5e": 1.0})
    assert (fastest.best, fastest.smallest, fastest.frontier) == (3, 2, (3, 2))
    assert choose_rows(ROWS[4:5], {}) == SweepChoice(None, None, ())


def test_days_and_cost_of_a_run() -> None:
    row = ROWS[0]
    assert row.days(86_400_000.0) == pytest.approx(8.0)
    assert row.cost(86_400_000.0, {"v5e": 1.5}) == pytest.approx(8 * 24 * 16 * 1.5)
    assert row.tokens_per_s_per_chip == pytest.approx(1000 / 8 / 16)
    assert ROWS[4].days(1.0) is None and ROWS[4].cost(1.0, {"v5e": 1.5}) is None
