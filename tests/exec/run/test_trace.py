"""Times of collectives from the profiler, and the message if the profiler has none."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from autoshard.exec import CollectiveTime, CompiledCollective, measure, measurement_figures, read_collectives
from autoshard.exec.devices.profiles import events_in
from autoshard.exec.run import profiled_collectives
from autoshard.exec.run.profiled_collectives import Ran, collective_times
from autoshard.program import Program
from tests.exec import planned_programs as made
from tests.exec.hlo.test_estimate import BIG, MESH, MODEL, module
from tests.exec.planned_programs import handmade


SPECS = {"params.up": "-,model", "params.down": "model,-", "arg1": "data,-", "arg2": "data,-"}


@pytest.fixture(scope="module")
def mlp() -> Program:
    return made.mlp()


def test_collectives_are_timed_by_kind_and_axes(mlp: Program) -> None:
    measurement = measure(mlp, handmade(mlp, {"data": 4, "model": 2}, SPECS), steps=1, warmup=1, timed_collectives=2)
    assert measurement.collective_times is not None and not measurement.collective_times.note
    times = {(t.kind, t.axes): t for t in measurement.collective_times.times}
    assert set(times) == {("all-reduce", ("data",)), ("all-reduce", ("model",))}
    counted = {("all-reduce", c.axes): c.count for c in measurement.collectives}
    assert {key: t.count for key, t in times.items()} == counted
    assert all(t.seconds > 0 for t in times.values())
    figures = measurement_figures(measurement)
    assert [t["axes"] for t in json.loads(json.dumps(figures))["collectives"]["times"]] == [["data"], ["model"]]
    assert figures["profiler"] == ""


def test_without_the_profiler_no_times_are_given(mlp: Program) -> None:
    measurement = measure(mlp, handmade(mlp, {"data": 4, "model": 2}, SPECS), steps=1, warmup=0)
    assert measurement.collective_times is None and "times" not in measurement_figures(measurement)["collectives"]


def test_a_profiler_that_does_not_start_is_a_note(mlp: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__):
        raise RuntimeError("only one profile\ncan run")

    monkeypatch.setattr(jax.profiler, "start_trace", refuse)
    measurement = measure(mlp, handmade(mlp, {"data": 4, "model": 2}, SPECS), steps=1, warmup=0, timed_collectives=1)
    assert measurement_figures(measurement)["profiler"] == "the profiler did not start: only one profile can run"


def test_a_profile_that_cannot_be_read_is_a_note(mlp: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> None:
        raise ValueError("it is no profile")

    monkeypatch.setattr(profiled_collectives, "read_events", refuse)
    measurement = measure(mlp, handmade(mlp, {"data": 4, "model": 2}, SPECS), steps=1, warmup=0, timed_collectives=1)
    assert measurement_figures(measurement)["profiler"] == "the profiler's output cannot be read: it is no profile"


def one(opcode: str) -> CompiledCollective:
    done = f"\n  ROOT %d = {BIG} all-reduce-done(%all-reduce-start.1)" if "start" in opcode else ""
    root = "" if done else "ROOT "
    (found,) = read_collectives(module(f"  {root}%{opcode}.1 = {BIG} {opcode}(%p), {MODEL}, to_apply=%add{done}"), MESH)
    return found


def test_no_op_and_no_collective_are_distinguished() -> None:
    found = [one("all-reduce")]
    assert collective_times([], 1, found).note.startswith("the profiler recorded no op of the compiled program")
    other = collective_times([Ran("fusion.1", "m", 0, 1, 0.0, 1.0)], 1, found)
    assert (other.times, other.note[:40]) == ((), "the profiler recorded no collective by t")
    assert collective_times([Ran("fusion.1", "m", 0, 1, 0.0, 1.0)], 1, []).note == ""


def test_steps_without_numbers_share_their_time() -> None:
    """Average an op of 1 s on one device and of 3 s on the other, over two steps."""
    wanted = (CollectiveTime("all-reduce", ("model",), 2.0, 1),)
    for numbered in (False, True):
        ran = [
            Ran("all-reduce.1", "m", device, step if numbered else -1, 10.0 * step, 1.0 + 2 * device)
            for device in (0, 1)
            for step in (0, 1)
        ]
        assert collective_times(ran, 2, [one("all-reduce")]).times == wanted


def test_a_start_and_its_done_are_one_collective() -> None:
    ran = [Ran("all-reduce-start.1", "m", 0, 1, 0.0, 1.0), Ran("all-reduce-done.1", "m", 0, 1, 4.0, 2.0)]
    assert collective_times(ran, 1, [one("all-reduce-start")]).times == (
        CollectiveTime("all-reduce", ("model",), 3.0, 1),
    )


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    step = jax.jit(lambda x: jnp.tanh(x @ x).sum())
    with jax.profiler.trace(str(folder)):
        step(jnp.ones((64, 64))).block_until_ready()
    (file,) = folder.rglob("*.xplane.pb")
    return file


def test_a_profile_says_when_which_op_ran_where(profile: Path) -> None:
    ops = [event for event in events_in(profile) if "hlo_op" in event.stats]
    assert {"jit__lambda", "jit_<lambda>"} & {event.stats["hlo_module"] for event in ops}
    assert {event.stats["device_ordinal"] for event in ops} == {0}
    assert all(event.plane == "/host:CPU" and event.start_ns > 0 and event.duration_ns >= 0 for event in ops)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="jaxlib's own reader ends the process")
def test_a_profile_is_read_as_jaxlib_reads_it(profile: Path) -> None:
    from jax.profiler import ProfileData

    theirs = [
        (plane.name, line.name, event.name, event.start_ns, event.duration_ns, dict(event.stats))
        for plane in ProfileData.from_file(str(profile)).planes
        for line in plane.lines
        for event in line.events
    ]
    ours = [(e.plane, e.line, e.name, e.start_ns, e.duration_ns, dict(e.stats)) for e in events_in(profile)]
    assert len(ours) > 20 and ours == theirs


def test_what_is_no_profile_is_refused(profile: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.xplane.pb"
    for content in (profile.read_bytes()[:-7], b"\x0b\x0c"):
        cut.write_bytes(content)
        with pytest.raises(ValueError, match="cut.xplane.pb is no profile"):
            list(events_in(cut))
