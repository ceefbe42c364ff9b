"""Plan, judge, learn, plan again: the best judged plan wins, and judgements are stored, reused and learnt from."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import autoshard
from autoshard.cost import Bill, Database, Topology, compiler_version, load_calibration
from autoshard.errors import UserError
from autoshard.exec import Seen, Verdict, refine, refinement_figures
from autoshard.exec.learn import judges, refinement
from autoshard.exec.learn.judges import CompileJudge, MeasureJudge, judge_of
from autoshard.planning import Options, make_plan, plan_bills, plan_digest
from tests.exec.learn.refine_checks import MadeUpJudge
from tests.planning import programs


ROOT = Path(__file__).parents[3]
CPU = {"topology": "cpu:8", "mesh": "data=4,model=2"}
SLOW_SUMS = dataclasses.replace(load_calibration("cpu"), collective_launch_s=7e-4, memory_efficiency=0.6)
"""A machine on which every collective costs 3 ms."""


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Database:
    monkeypatch.setenv("AUTOSHARD_DATA_DIR", str(tmp_path / "data"))
    return Database(tmp_path / "data")


@pytest.fixture
def judged_by(monkeypatch: pytest.MonkeyPatch) -> Callable[..., MadeUpJudge]:
    """Judge whose time of each bill is a function's result."""

    def replace(seconds: Callable[[Bill], float]) -> MadeUpJudge:
        judge = MadeUpJudge(seconds)
        monkeypatch.setattr(refinement, "judge_of", lambda *_: judge)
        return judge

    return replace


def kept(database: Database) -> int:
    return len(database.read("cpu:8", compiler_version(Topology.parse("cpu:8"))))


def test_the_loop_learns_what_the_machine_is_and_its_choice_stands(judged_by, database: Database):
    judge = judged_by(lambda bill: bill.seconds(SLOW_SUMS))
    lines: list[str] = []
    result = refine(programs.program("mlp"), **CPU, progress=lines.append)
    times = [each.seen.seconds or 0.0 for each in result.judged]
    assert times == sorted(times) and result.best.seen.seconds == times[0]
    assert plan_digest(result.plan) == plan_digest(result.best.plan)
    assert result.settled and 1 < len(judge.asked) == len(set(judge.asked)) == kept(database)
    assert result.stored == str(database.path)
    for each, seconds in zip(result.judged, times, strict=True):
        assert each.predicted_after_s == pytest.approx(seconds, rel=0.15)
        assert each.predicted_before_s < 0.9 * seconds
    moved = {each.figure: each for each in result.fit.figures}
    assert moved["collective_launch_s"].value == pytest.approx(7e-4, rel=0.3)
    refined = result.plan.provenance["refined"]
    assert refined["seen_s"] == times[0] and refined["judge"] == "measure" and refined["judged"] == len(times)
    assert refined["predicted_before_s"] < refined["predicted_after_s"]
    assert any(line.startswith("Round 1: planning with the shipped figures") for line in lines)
    later = make_plan(programs.program("decoder"), Options(**CPU)).plan
    assert later.provenance["learned"]["hash"] == result.fit.hash, "later plans are priced with it"


def test_a_second_run_judges_nothing_again_and_agrees(judged_by):
    judge = judged_by(lambda bill: bill.seconds(SLOW_SUMS))
    first = refine(programs.program("mlp"), **CPU)
    asked = len(judge.asked)
    lines: list[str] = []
    second = refine(programs.program("mlp"), **CPU, progress=lines.append)
    assert len(judge.asked) == asked and all(each.kept for each in second.judged)
    assert second.plan == first.plan
    assert sum("(judged before)" in line for line in lines) == asked


@pytest.mark.full
def test_another_program_is_judged_again(judged_by):
    judge = judged_by(lambda bill: bill.seconds(SLOW_SUMS))
    refine(programs.program("mlp"), **CPU, plans=2, rounds=1)
    asked = len(judge.asked)
    result = refine(programs.program("decoder"), **CPU, plans=2, rounds=1)
    assert len(judge.asked) == asked + 2 and not any(each.kept for each in result.judged)
    assert result.best.predicted_before_s == pytest.approx(result.best.seen.seconds, rel=0.3), "the first one taught it"


def test_without_calibration_the_database_is_left_alone(judged_by, database: Database):
    judge = judged_by(lambda bill: bill.seconds(SLOW_SUMS))
    for _ in range(2):
        result = refine(programs.program("mlp"), **CPU, plans=2, rounds=2, calibration=False)
        assert result.fit.observations >= 2, "what this run has seen still counts for it"
    assert len(judge.asked) >= 4 and not database.folder.exists()


def test_what_was_seen_with_compiler_flags_serves_plans_with_the_same_flags_alone(judged_by):
    slow = dataclasses.replace(load_calibration("v5p"), memory_efficiency=0.4, gather_overlap=0.3)
    judged_by(lambda bill: bill.seconds(slow))
    case = {"topology": "v5p:2x2x1", "mesh": "data=4"}
    result = refine(programs.program("mlp"), **case, plans=2, rounds=1, xla_flags="sparsecore")
    assert result.fit.flags and result.fit.observations == len(result.judged)
    assert result.plan.provenance["xla_flags"]["flags"] == list(result.fit.flags)
    decoder = programs.program("decoder")
    same = make_plan(decoder, Options(**case, xla_flags="sparsecore")).plan
    assert same.provenance["learned"]["hash"] == result.fit.hash
    fitted = {each.figure for each in result.fit.figures}
    assert "gather_overlap" in fitted and not fitted & same.provenance["xla_flags"]["figures"].keys()
    (bill,) = plan_bills(decoder, [same])  # raises if the plan's record does not price it again
    assert bill.seconds(result.fit.calibration) == pytest.approx(same.prediction.step_time_s, rel=1e-6)
    for other in (None, "async"):
        assert "learned" not in make_plan(decoder, Options(**case, xla_flags=other)).plan.provenance


def test_work_goes_on_where_nothing_can_be_preserved(judged_by, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOSHARD_DATA_DIR", str(tmp_path / "file" / "data"))
    judged_by(lambda bill: bill.seconds(SLOW_SUMS))
    assert refine(programs.program("mlp"), **CPU, plans=2).fit.observations >= 2


def test_a_plan_on_which_the_judge_fails_is_dropped_with_its_reason(judged_by, database: Database):
    judge = judged_by(lambda bill: bill.seconds(SLOW_SUMS))
    every = judge.judge

    def fails_on_ours(program, plans, progress):
        for name, seen in every(program, plans, progress):
            yield name, Seen(failed="it exploded") if name == "plan" else seen

    judge.judge = fails_on_ours
    lines: list[str] = []
    result = refine(programs.program("mlp"), **CPU, plans=3, rounds=1, progress=lines.append)
    assert result.judged[-1].name == "plan" and result.judged[-1].seen.failed == "it exploded"
    assert result.best.name != "plan" and result.best.seen.seconds
    assert "Round 1: plan is dropped: it exploded" in lines
    assert kept(database) == len(result.judged) - 1, "a failure is no observation"
    assert refinement_figures(result)["judged"][-1]["failed"] == "it exploded"


def test_a_judge_that_fails_on_all_plans_is_an_error(judged_by):
    judge = judged_by(lambda bill: 1.0)
    judge.judge = lambda program, plans, progress: ((name, Seen(failed="no devices")) for name in plans)
    with pytest.raises(UserError, match="failed on every plan; plan: no devices"):
        refine(programs.program("mlp"), **CPU)


def test_that_nothing_fits_is_an_error(judged_by):
    judge = judged_by(lambda bill: 1.0)
    over = Seen(verdict=Verdict.DOES_NOT_FIT.value, peak_bytes=2**40)
    judge.judge = lambda program, plans, progress: ((name, over) for name in plans)
    with pytest.raises(UserError, match="none of the 2 plans that were judged fits.*--memory-limit"):
        refine(programs.program("mlp"), **CPU, plans=2, rounds=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"judge": "compile"}, "compile is for TPU and GPU topologies, and cpu:8 is neither"),
        ({"judge": "guess"}, "'guess' is no judge"),
        ({"plans": 0}, "0 plans in 3 rounds"),
        ({"steps": 0}, "0 steps are to be timed"),
    ],
)
def test_bad_input_gets_one_sentence(options: dict, message: str):
    with pytest.raises(UserError, match=message):
        autoshard.refine(programs.program("mlp"), **CPU, **options)


def test_the_judge_is_the_devices_for_cpu_and_else_the_compiler():
    assert judge_of(None, Topology.parse("cpu:8"), 3, 60.0) == MeasureJudge(3)
    assert judge_of(None, Topology.parse("v5e:4x4"), 3, 60.0) == CompileJudge(60.0)
    assert judge_of(None, Topology.parse("h100:8*2"), 3, 60.0) == CompileJudge(60.0)
    assert judge_of("measure", Topology.parse("v5e:4x4"), 3, 60.0) == MeasureJudge(3)


def test_plans_are_measured_in_turn_on_the_devices_here(monkeypatch: pytest.MonkeyPatch, database: Database):
    program = programs.program("mlp")
    broken = judges.PlannedStep

    def fails_on_second(program, plan, made, count=[0]):  # noqa: B006
        count[0] += 1
        if count[0] == 2:
            raise UserError("this one cannot be lowered")
        return broken(program, plan, made)

    monkeypatch.setattr(judges, "PlannedStep", fails_on_second)
    result = autoshard.refine(program, **CPU, plans=3, rounds=1, steps=3)
    assert [bool(each.seen.failed) for each in result.judged] == [False, False, True]
    assert all(each.seen.seconds > 0 and each.seen.fits for each in result.judged[:2])
    assert kept(database) == 2 and result.judge == "measure"


def test_the_compiler_tells_whether_it_fits_and_what_is_hidden(monkeypatch: pytest.MonkeyPatch):
    timed = SimpleNamespace(step_time_s=2.0, error=0.2, hidden_comm_s=3.0, exposed_comm_s=1.0, hidden={"sums": 0.75})
    reports = {
        "a": SimpleNamespace(verdict=Verdict.FITS_WITH_REMAT, peak_compiled=7, estimate=timed),
        "b": SimpleNamespace(verdict=Verdict.DOES_NOT_FIT, peak_compiled=9, estimate=None),
    }

    def compile_plan(program, plan, time_limit, quick):
        if plan.program_name not in reports:
            raise UserError("it takes too long")
        return reports[plan.program_name]

    monkeypatch.setattr("autoshard.exec.ahead.compile_plans.compile_plan", compile_plan)
    plans = {name: SimpleNamespace(topology="v5e:4x4", program_name=name) for name in "abc"}
    found = dict(CompileJudge().judge(programs.program("mlp"), plans, lambda line: None))
    assert found["a"] == Seen(2.0, 0.2, Verdict.FITS_WITH_REMAT.value, 7, 0.75, {"sums": 0.75}) and found["a"].fits
    assert found["b"] == Seen(None, 0.0, Verdict.DOES_NOT_FIT.value, 9) and not found["b"].fits
    assert found["c"].failed == "it takes too long" and not found["c"].fits


def start_refinement() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.exec.learn.refine_checks"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGKILL])
def test_an_interrupted_run_goes_on_where_it_was(how: signal.Signals, database: Database):
    with start_refinement() as interrupted:
        assert interrupted.stdout is not None
        judged = 0
        for line in interrupted.stdout:
            judged += " takes " in line
            if judged == 2:
                interrupted.send_signal(how)
                break
        judged += sum(" takes " in line for line in interrupted.stdout)
    assert interrupted.returncode not in (0, None) and 2 <= judged < 4
    assert judged <= kept(database) <= judged + 1, "kept before it is said"
    before = kept(database)
    with start_refinement() as again:
        out, _ = again.communicate(timeout=300)
    assert out.count("(judged before)") == before
    assert out.splitlines()[-1] == f"done {4 - before} 4"
    assert kept(database) == 4 and not list(database.folder.glob("*.aside-*"))


def test_refine_is_public():
    assert autoshard.refine is refine and "refine" in dir(autoshard) and os.environ["AUTOSHARD_DATA_DIR"]
