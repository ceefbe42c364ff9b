"""Every command run on a program: its output, its files, and its failures."""

import contextlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import jax
import pytest

import autoshard
from autoshard import UserError, cli
from autoshard.base import device_files
from autoshard.cli.inputs import start_devices
from autoshard.cost import Topology
from autoshard.exec.ahead.compile_targets import Compiled
from autoshard.validation.published_runs import read_rows
from tests.command import run


STEP = """
import sys
import jax
import jax.numpy as jnp
from neighbour import WIDTH

print("noise from the user's file")


def step(params, x):
    def loss(p):
        return jnp.mean((jnp.tanh(x @ p["w1"]) @ p["w2"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def program():
    return step, ({"w1": shape(WIDTH, 4 * WIDTH), "w2": shape(4 * WIDTH, WIDTH)}, shape(32, WIDTH))


def dtypes_differ():
    return step, ({"w1": shape(WIDTH, 4 * WIDTH), "w2": shape(4 * WIDTH, WIDTH)}, shape(16, WIDTH))


def fails():
    raise ValueError("no luck")
"""

ON_CPU = ("--topology", "cpu:8", "--mesh", "data=4,model=2")
Here = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a program file with a module next to it, and its plan, to a folder."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "step.py").write_text(STEP)
    (folder / "neighbour.py").write_text("WIDTH = 64\n")
    result = run("plan", "step.py", *ON_CPU, "--out", "plan.json", "--quiet", cwd=folder)
    assert result.returncode == 0, result.stderr
    (folder / "quiet.txt").write_text(result.stderr)
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Fixture that runs the command in this process, with environment variables of its own."""

    def called(*arguments: str, at: Path = folder, **variables: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as alone:
            alone.chdir(at)
            alone.delenv("XLA_AUTO_SPMD_MESH", raising=False)
            for name, value in variables.items():
                alone.setenv(name, value)
            code = cli.main(list(arguments))
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return called


def test_json_is_one_object_and_nothing_else_is_on_stdout(folder: Path):
    result = run("plan", "step.py", *ON_CPU, "--json", "--memory-limit", "1", cwd=folder)
    assert result.returncode == 0
    figures = json.loads(result.stdout)
    assert "noise from the user's file" in result.stderr
    for key in ("step_time_s", "compute_s", "hidden_comm_s", "exposed_comm_s", "mfu", "peak_bytes", "fits"):
        assert key in figures
        assert all(key in baseline for baseline in figures["baselines"].values())
    assert figures["memory_limit_bytes"] == 2**30
    assert figures["mesh"] == {"data": 4, "model": 2}
    assert figures["fits"] is True
    assert 0 < figures["peak_bytes"] <= 2**30
    assert figures["step_time_s"] == pytest.approx(figures["compute_s"] + figures["exposed_comm_s"])
    assert figures["lower_bound"] <= figures["objective"]
    assert 0 <= figures["solver_gap"] <= figures["plan_gap"] + 1e-9 < 1
    fastest = min(b["step_time_s"] for b in figures["baselines"].values() if b["fits"])
    assert figures["step_time_s"] <= fastest * (1 + 1e-9)
    assert {"trace", "solve", "total"} <= set(figures["wall_s"])
    assert figures["warnings"] == [] or all(isinstance(w, str) for w in figures["warnings"])
    assert {"solver_gap", "plan_gap", "objective", "lower_bound", "wall_s", "mesh", "baselines"} <= set(figures)


def test_progress_is_plain_lines_when_piped_and_nothing_when_quiet(folder: Path):
    result = run("plan", "step.py", *ON_CPU, cwd=folder)
    assert result.stderr.splitlines()[0] == "Tracing step.py"
    assert "\x1b" not in result.stdout + result.stderr
    assert "STEP: " in result.stdout
    assert result.stdout.splitlines()[-1].startswith("Next: add --out plan.json to ")
    assert (folder / "quiet.txt").read_text() == "noise from the user's file\n"


def test_the_printed_next_command_names_the_entry_and_the_rules_and_runs(folder: Path, here: Here):
    (folder / "our rules.py").write_text('import autoshard\n\nautoshard.register_rule("ours", "a -> a")\n')
    options = ("--entry", "dtypes_differ", "--roles", "params=parameter", "--rules", "our rules.py")
    planned = here("plan", "step.py", *options, "--topology", "cpu:1", "--quiet", "--out", "a plan.json")
    line = planned.stdout.splitlines()[-1]
    words = shlex.split(line.removeprefix("Next: autoshard "))
    assert words == ["measure", "step.py", *options, "--plan", "a plan.json", "--check"]
    ran = here(*words, "--quiet")
    assert ran.returncode == 0, ran.stderr


def test_the_mesh_comes_from_the_flag_then_the_environment_then_a_search(folder: Path, here: Here):
    def mesh(*arguments: str, **env: str) -> dict[str, int]:
        result = here("plan", "step.py", "--topology", "cpu:8", "--json", *arguments, **env)
        figures = json.loads(result.stdout)
        searched = figures["meshes"]
        assert not searched or searched[0]["mesh"] == ",".join(f"{k}={v}" for k, v in figures["mesh"].items())
        return {} if searched else figures["mesh"]

    assert mesh() == {}
    assert mesh("--mesh", "auto", XLA_AUTO_SPMD_MESH="2,4") == {}
    assert mesh(XLA_AUTO_SPMD_MESH="2,4") == {"data": 2, "model": 4}
    assert mesh("--mesh", "a=4,b=2", XLA_AUTO_SPMD_MESH="2,4") == {"a": 4, "b": 2}


def test_a_sweep_is_a_table_a_plot_and_rows_that_are_preserved(folder: Path, here: Here):
    line = ("sweep", "step.py", "--topology", "cpu:8,cpu:7", "--out", "sweep.json", "--plot", "sweep.svg")
    shown = here(*line).stdout
    assert "no plan" in shown and "- cpu:7: " in shown
    assert (folder / "sweep.svg").read_text().startswith("<?xml")
    again = here(*line, "--json", "--price", "cpu=2.5")
    assert "2 of 2 rows are in sweep.json already" in again.stderr
    planned, failed = json.loads(again.stdout)["rows"]
    assert planned["topology"] == "cpu:8" and planned["failed"] is None and planned["step_time_s"] > 0
    assert failed["topology"] == "cpu:7" and failed["step_time_s"] is None and failed["failed"]


def test_a_sweep_without_a_plan_fails_after_its_table(folder: Path, here: Here):
    result = here("sweep", "step.py", "--topology", "cpu:7,cpu:5", "--out", "unplanned.json", "--json", "--jobs", "1")
    assert result.returncode == 2
    rows = json.loads(result.stdout)["rows"]
    assert [row["topology"] for row in rows] == ["cpu:7", "cpu:5"] and all(row["failed"] for row in rows)
    assert result.stderr.splitlines()[-1] == f"autoshard: no row of the sweep has a plan: {rows[0]['failed']}"
    assert len(json.loads((folder / "unplanned.json").read_text())["rows"]) == 2


def test_measure_a_saved_plan_and_check_it(folder: Path):
    result = run("measure", "plan.json", "--check", "--steps", "2", "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["step_time_s"] > 0
    assert figures["max_rel_diff"] < 1e-5
    assert set(figures["collectives"]) == {"wire_bytes", "counts", "times"} and figures["profiler"] == ""
    assert all(time["seconds"] > 0 for time in figures["collectives"]["times"])
    for both in (*figures["collectives"]["wire_bytes"].values(), *figures["collectives"]["counts"].values()):
        assert set(both) == {"predicted", "compiled"}


def test_measure_fails_past_the_tolerance(folder: Path, here: Here):
    result = here("measure", "step.py", *ON_CPU, "--check", "--tolerance", "0", "--steps", "1")
    assert result.returncode == 1
    assert "DIFFERS with the unplanned run" in " ".join(result.stdout.split())


def test_solve_takes_the_problem_that_plan_saved(folder: Path, here: Here):
    result = here("plan", "step.py", *ON_CPU, "--json", "--save-problem", "problem.json.gz")
    figures = json.loads(result.stdout)
    solved = here("solve", "problem.json.gz", "--time-limit", "20", "--out", "choices.json")
    assert solved.returncode == 0
    record = json.loads((folder / "choices.json").read_text())
    assert record["choices"] == json.loads(solved.stdout)
    assert record["cost"] == figures["objective"]


def test_compare_runs_the_plan_and_every_baseline(folder: Path, here: Here):
    result = here("compare", "step.py", *ON_CPU, "--measure", "--steps", "2", "--json")
    assert result.returncode == 0, result.stderr
    plans = json.loads(result.stdout)["plans"]
    assert {"plan", "fsdp", "fsdp*", "data_parallel", "data_parallel*"} <= set(plans)
    for name, row in plans.items():
        assert row["failed"] is None
        assert row["measured"]["step_time_s"] > 0
        assert (row["predicted"] is None) == (name != "plan" and not name.endswith("*"))
        if row["predicted"]:
            assert row["predicted"]["step_time_s"] >= plans["plan"]["predicted"]["step_time_s"] * (1 - 1e-9)
    table = here("compare", "step.py", *ON_CPU).stdout
    assert "fsdp* " in table
    assert "measured" not in table


def test_candidates_are_shown_and_written_with_the_plan(folder: Path, here: Here):
    options = [*ON_CPU, "--candidates", "3"]
    figures = json.loads(here("plan", "step.py", *options, "--json").stdout)
    offered = figures["candidates"]
    assert offered[0]["name"] == "plan" and 1 < len(offered) <= 3
    assert offered[0]["step_time_s"] == figures["step_time_s"]
    shown = here("plan", "step.py", *options, "--out", "many.json").stdout
    assert "Candidates that really differ" in shown
    assert f"Candidate {len(offered)} written to many.{len(offered)}.json" in shown
    steps = [autoshard.load(path).prediction.step_time_s for path in (folder / "many.json", folder / "many.2.json")]
    assert steps == pytest.approx([each["step_time_s"] for each in offered[:2]])
    compared = json.loads(here("compare", "step.py", *options, "--json").stdout)["plans"]
    assert {each["name"] for each in offered} <= set(compared)


@pytest.mark.parametrize("failing", [{"plan"}, {"plan", "fsdp", "fsdp*", "data_parallel", "data_parallel*"}])
def test_a_plan_that_cannot_be_judged_is_dropped_and_the_others_go_on(
    failing: set[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    import autoshard.exec
    import autoshard.report
    from autoshard.errors import UserError

    names = iter(["plan", "fsdp", "fsdp*", "data_parallel", "data_parallel*"])

    def judge(program, plan, time_limit, quick):
        if next(names) in failing:
            raise UserError("it ran out of memory")
        times = {"step_time_s": {"estimated": 1.0}, "time": {"by_kind": {}}}
        return {"verdict": "fits", "peak_bytes": {"compiled": 1}, **times}

    def five(plan, baselines, propagated, offered):
        return [(name, plan, True) for name in ("plan", "fsdp", "fsdp*", "data_parallel", "data_parallel*")]

    monkeypatch.setattr("autoshard.exec.ahead.compile_plans.compile_plan", judge)
    monkeypatch.setattr(autoshard.exec, "compile_figures", lambda figures: figures)
    monkeypatch.setattr(autoshard.report, "candidates", five)
    code = cli.main(["compare", str(folder / "step.py"), *ON_CPU, "--compile", "--json", "--quiet"])
    captured = capsys.readouterr()
    if len(failing) > 1:
        assert code == 2 and captured.err.endswith("autoshard: it ran out of memory\n")
        return
    plans = json.loads(captured.out)["plans"]
    assert code == 0 and plans["plan"]["failed"] == "it ran out of memory" and plans["plan"]["compiled"] is None
    assert all(plans[name]["compiled"] for name in plans if name != "plan")


HLO = """HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64]{1,0:T(8,128)} parameter(0)
  ROOT %r = f32[64,64]{1,0:T(8,128)} copy(%p)
}
"""
PLACED = Compiled(HLO, {"arguments": 2**20, "temporaries": 2**20, "peak": 3 * 2**19}, 1.5, None, None, "")
TOO_LARGE = Compiled("", {}, 0.5, 60 * 2**30, 16 * 2**30, "")


@pytest.mark.few(2)
@pytest.mark.parametrize(("found", "code"), [(PLACED, 0), (TOO_LARGE, 1), (UserError("it died"), 2)])
def test_the_verdict_of_a_plan_is_its_compilers(
    found: Compiled | UserError, code: int, folder: Path, here: Here, monkeypatch: pytest.MonkeyPatch
):
    """Plan with the verdict of a compiler that is the test's; the same program is compiled that was planned."""

    def compile_(program, plan, time_limit, quick):
        assert quick and program.fingerprint == plan.program_fingerprint
        if isinstance(found, UserError):
            raise found
        return found

    monkeypatch.setattr("autoshard.exec.ahead.compile_plans.compile_without_devices", compile_)
    monkeypatch.setattr("autoshard.exec.compiler_target", lambda topology: None)
    line = ("plan", "step.py", "--topology", "v5e:2x2", "--mesh", "data=4", "--compile", "--quiet")
    shown, figures = here(*line, "--out", "c.json"), here(*line, "--json")
    assert shown.returncode == figures.returncode == code
    assert autoshard.load(folder / "c.json").topology == "v5e:2x2"
    compiled = json.loads(figures.stdout).get("compiled")
    if code == 2:
        assert "compiled" not in json.loads((folder / "c.json").read_text())
        assert compiled is None and "FITS" in shown.stdout and shown.stderr.endswith("autoshard: it died\n")
        return
    first = shown.stdout.split("Plan\n")[0]
    if code == 1:
        assert "DOES NOT FIT: 60.00 GiB of 15.75 GiB a device" in first and compiled["verdict"] == "does not fit"
        assert not autoshard.load(folder / "c.json").compiled.fits
        return
    assert "FITS: 2.00 MiB of 15.75 GiB a device" in first
    assert re.search(r"COMPILED: memory predicted [\d.]+ .iB, peak 1.50 MiB, reserved 2.00 MiB\n", first)
    assert re.search(r"  step [\d.]+ .?s \+- \d+% by the compiler's schedule\n", first)
    assert compiled["peak_bytes"] == {"predicted": ANY, "compiled": 3 * 2**19, "reserved": 2**21}
    assert "asks the compiler" not in shown.stdout and json.loads(figures.stdout)["wall_s"]["compile"] == 1.5
    here("report", "c.json", "-o", "own.html")
    own = (folder / "own.html").read_text()
    assert "Compiled: fits" in own and "by the compiler's schedule" in own.replace("&#39;", "'")
    saved = json.loads(here("report", "c.json", "--json").stdout)
    assert saved["compiled"] == {key: compiled[key] for key in ("verdict", "peak_bytes", "step_time_s", "wire_bytes")}
    assert "as predicted" in here("report", "c.json").stdout
    (folder / "figures.json").write_text(figures.stdout)
    here("report", "c.json", "--compiled", "figures.json", "-o", "r.html")
    page = (folder / "r.html").read_text()
    assert "Compiled: fits" in page and "memory that the program reserves" in page and "2.00 MiB" in page


def test_validate_prints_every_row_and_its_difference(here: Here):
    questions = str(Path(autoshard.__file__).parent / "validation" / "questions.json")
    result = here("validate", "--json", "--data", questions)
    figures = json.loads(result.stdout)
    assert len(figures["rows"]) > 40
    for row in figures["rows"]:
        assert ("skipped" in row) != ("ours" in row)
        if "ours" in row:
            assert row["delta_percent"] == pytest.approx(100 * (row["ours"] - row["theirs"]) / row["theirs"])
    assert sum(group["rows"] for group in figures["groups"].values()) == len(figures["rows"])
    assert result.returncode == 0
    table = here("validate", "--data", questions).stdout
    assert all(row["id"] in table for row in figures["rows"])


def test_validate_rebuilds_published_runs(tmp_path: Path):
    chosen = [row for row in read_rows() if row["id"].startswith("gemm") or row["id"] == "recipe-v6e-llama3.1-8b-v6e-8"]
    (tmp_path / "runs.json").write_text(json.dumps([*chosen, chosen[-1] | {"id": "later", "value": None}]))
    # Without a chosen platform, JAX would start every installed one, with messages.
    result = run("validate", "--json", "--data", "runs.json", cwd=tmp_path, env={"JAX_PLATFORMS": None})
    figures = json.loads(result.stdout)
    assert result.returncode == 0 and figures["passed"]
    assert [row["id"] for row in figures["rows"]] == [*(row["id"] for row in chosen), "later"]
    assert figures["rows"][-1]["skipped"] == "no rate of one device"
    for row in figures["rows"][:-1]:
        assert row["delta_percent"] == pytest.approx(100 * (row["ours"] - row["theirs"]) / row["theirs"])
    progress = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(progress) == len(chosen) and all(" " in line and "/" in line for line in progress)


def test_validate_names_a_bad_row_and_goes_on(tmp_path: Path, here: Here):
    (row,) = (row for row in read_rows() if row["id"] == "gemm-tpu7x-16384")
    wrong = row | {"id": "wrong", "value": "fast"}
    (tmp_path / "runs.json").write_text(json.dumps([wrong, row]))
    result = here("validate", "--data", "runs.json", at=tmp_path)
    assert result.returncode == 0 and row["id"] in "".join(result.stdout.split())
    assert "1 row that cannot be read, left out:" in result.stdout
    assert "row 0 (wrong): value is 'fast', expected a number above 0" in " ".join(result.stdout.split())
    (tmp_path / "runs.json").write_text(json.dumps([wrong]))
    result = here("validate", "--data", "runs.json", at=tmp_path)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "row 0 (wrong): value" in result.stderr


def test_a_plan_says_what_compiler_flags_change(folder: Path, here: Here):
    command = ("plan", "step.py", "--topology", "v6e:2x4", "--mesh", "data=8", "--json", "--xla-flags")
    figures = json.loads(here(*command, "--xla_made_up=1").stdout)
    assert "flags without effect on the price: --xla_made_up." in figures["warnings"]
    text = here(*command[:-2], "--xla-flags", "--xla_made_up=1").stdout
    assert "Priced for compiler flags" in text and "--xla_made_up=1: no price changes." in text
    refused = here(*command, "made_up")
    assert refused.returncode == 2 and "'made_up' is not an XLA flag" in refused.stderr


def test_diff_of_two_plans(folder: Path, here: Here):
    command = ("plan", "step.py", "--topology", "cpu:8", "--mesh", "data=8", "--out", "other.json")
    assert here(*command).returncode == 0
    figures = json.loads(here("diff", "plan.json", "other.json", "--json").stdout)
    assert figures["settings"]["mesh"] == {"first": "data=4,model=2", "second": "data=8"}
    assert "topology" not in figures["settings"]
    assert figures["shared"] == 3
    same = here("diff", "plan.json", "plan.json").stdout
    assert "0 of 3 common arguments are split differently." in same


def test_report_of_a_saved_plan(folder: Path, here: Here):
    text = here("report", "plan.json")
    assert text.stdout.splitlines()[0].startswith("step on cpu:8 (8 devices), mesh data=4, model=2")
    page = here("report", "plan.json", "-o", "report.html", "--compare", "plan.json")
    assert page.stdout == "Written: report.html\n"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    figures = json.loads(here("report", "plan.json", "--perfetto", "trace.json", "--json").stdout)
    assert figures["fits"] is True
    assert figures["written"] == ["trace.json"]
    trace = json.loads((folder / "trace.json").read_text())
    last = max(event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X")
    assert last == pytest.approx(figures["step_time_s"] * 1e6, rel=1e-3)


def test_a_profile_stands_with_the_prediction(folder: Path, here: Here):
    assert here("measure", "step.py", "--plan", "plan.json", "--profile", "p.json.gz").returncode == 0
    spans = [{"name": "fusion.1", "lane": "compute", "start_s": 0.0, "seconds": 1e-3}]
    (folder / "c.json").write_text(json.dumps({"step_time_s": {}, "time": {"spans": spans}}))
    here("report", "plan.json", "--perfetto", "t.json", "--profile", "p.json.gz", "--compiled", "c.json")
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} >= {1, 2, 3}
    assert any("dot" in event["name"] for event in events if event["pid"] >= 3 and event["ph"] == "X")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("report plan.json --profile p.json.gz", "--profile is for the trace; name it with --perfetto trace.json."),
        ("report plan.json --compiled c.json", "--compiled is for the page or the trace; name one with"),
        ("measure step.py", "`autoshard measure` takes either --plan PLAN.json, or --topology to plan first."),
        ("measure step.py --plan plan.json --mesh data=8", "--mesh is for planning; plan.json is a plan already."),
        ("measure step.py --plan plan.json --time-limit 60", "--time-limit is for planning; plan.json is a plan"),
        ("measure step.py --plan plan.json --seed 0", "--seed is for planning; plan.json is a plan already."),
        ("measure step.py --plan plan.json --no-refine-axes", "--no-refine-axes is for planning; plan.json is a plan"),
        ("measure step.py --plan plan.json --no-calibration", "--no-calibration is for planning; plan.json is a plan"),
        ("measure step.py --plan plan.json --ignore-constraints", "--ignore-constraints is for planning; plan.json is"),
        (
            "measure step.py --plan plan.json --entry dtypes_differ",
            "another program: argument `x` is float32[32,64] in the plan",
        ),
        ("measure step.py --topology v5e:2x2", "the plan is for v5e:2x2, but only CPU devices are here;"),
        ("measure step.py --plan none.json", "cannot read the plan file none.json"),
        ("plan step.py --topology cpu:8 --entry fails", "`fails()` in `step.py` raised ValueError: no luck (line 31)."),
        ("plan step.py --topology cpu:8 --entry nothing", "`step.py` offers no `nothing`; it has "),
        ("plan step.py --topology v5x:4x4", "unknown chip 'v5x'; did you mean "),
        ("plan step.py --topology cpu:8 --mesh data=3", "mesh data=3 = 3, but cpu:8 has 8 devices; they must be equal"),
        # Refused before anything is traced: `fails` raises.
        ("plan step.py --entry fails --topology v5e:3x3", "v5e has no shape 3x3; it has 1x1, 2x2"),
        ("plan step.py --entry fails --topology cpu:8 --mesh data=3", "mesh data=3 = 3, but cpu:8 has 8 devices"),
        ("plan step.py --entry fails --topology cpu:8 --mesh a=2,a=4", "names the axis a twice"),
        ("compare step.py --entry fails --topology cpu:8 --mesh data=-8", "'data=-8' is not an axis"),
        ("measure step.py --entry fails --topology cpu:8 --mesh 0,8", "'0' is not an axis"),
        ("refine step.py --entry fails --topology cpu:8 --mesh data=2", "mesh data=2 = 2, but cpu:8 has 8 devices"),
        ("sweep step.py --entry fails --topology cpu:8 --mesh data=2", "mesh data=2 = 2, but cpu:8 has 8 devices"),
        (
            "plan step.py --entry fails --topology cpu:8 --mesh data=8 --pin x=tensor,-",
            "--pin x=tensor,None names the axis `tensor`, but the mesh has data=8",
        ),
        (
            "plan step.py --entry fails --topology cpu:8 --mesh data=8 --axis-only tensor=batch",
            "--axis-only tensor=batch names the axis `tensor`, but the mesh has data=8",
        ),
        ("plan step.py --topology cpu:8 --memory-limit 1e300", "'1e300' is more GiB than there can be"),
        (f"plan step.py --entry fails --topology cpu:8 --mesh 8{',1' * 16}", "the mesh has 17 axes; at most 16"),
        ("plan step.py --topology cpu:8 --train", "`--train` only applies to `hf:CONFIG` and to torch modules"),
        ("plan step.py --topology cpu:8 --batch 8", "`--batch` only applies to `hf:CONFIG`"),
        ("plan step.py --topology cpu:8 --serve decode", "`--serve` only applies to `hf:CONFIG`"),
        ("plan step.py --topology cpu:8 --roles paras=parameter", "roles: no argument is called `paras` or starts"),
        ("plan step.py --topology cpu:8 --roles x=batches", "roles: `x` is given the role `batches`, which does not"),
        ("plan hf:llama-tiny --topology cpu:8 --roles x=batch", "`--roles` is for files; the roles of `hf:llama-tiny`"),
        ("plan hf:llama-tiny --topology cpu:8 --cache 8", "--cache is for serving; add --serve prefill or --serve"),
        ("plan step.py --topology cpu:8 --memory-limit 0.00001", "no plan fits into 10.49 KiB per device: the least"),
        ("report none.json", "cannot read the plan file none.json"),
        ("report plan.json --compare plan.json", "--compare is for the page; name it with --out report.html."),
        ("report plan.json -o r.html --measured plan.json", "plan.json has no `step_time_s`; give what"),
        ("compile plan.json", "only TPU and GPU topologies can be compiled for"),
        ("compile none.json", "cannot read the plan file none.json"),
        ("compile step.py", "`autoshard compile` takes a PLAN.json, or PROGRAM --plan PLAN.json."),
        ("compile step.py --entry fails --plan plan.json", "only TPU and GPU topologies can be compiled for"),
        ("plan step.py --entry fails --topology cpu:8 --compile", "only TPU and GPU topologies can be compiled for"),
        (
            "plan step.py --entry fails --topology v5e:2x4 --compile --for torch-pipelining",
            "--compile is for one program; leave it out with a program for each stage.",
        ),
        (
            "export plan.json --to jaxx",
            "there is no export to 'jaxx'; choose from jax, jax-export, explicit, flax, maxtext, keras, rules",
        ),
        ("validate --data none.json", "data file none.json cannot be read: No such file or directory"),
        ("diff plan.json none.json", "cannot read the plan file none.json"),
        ("compare step.py --topology v5e:2x2 --measure", "the plan is for v5e:2x2, but only CPU devices are here;"),
        ("solve none.json", "cannot read the problem none.json: No such file or directory"),
    ],
)
def test_bad_input_of_real_programs_gets_one_sentence(
    folder: Path, line: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("XLA_AUTO_SPMD_MESH", raising=False)
    before = {path.name for path in folder.iterdir() if path.is_file()}
    assert cli.main([*line.split(), "--quiet"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (message,) = (text for text in captured.err.splitlines() if not text.startswith("noise"))
    assert message.startswith("autoshard: ")
    assert sentence in message
    assert {path.name for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("topology", "kind", "sentence"),
    [
        ("h100:8", "NVIDIA H100 80GB HBM3", "8 devices are needed but JAX has started with 2 (gpu)"),
        ("h100:2", "NVIDIA H200", "the plan is for h100:2, but the devices here are NVIDIA H200; plan for h200."),
        ("h100:2", "NVIDIA H100 80GB HBM3", ""),
        ("h100:2", "a chip without a file", ""),
    ],
)
def test_number_and_kind_of_accelerators_are_checked(
    topology: str, kind: str, sentence: str, monkeypatch: pytest.MonkeyPatch
):
    jax.devices()  # the backend has started, as on a machine with accelerators
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)] * 2)
    with pytest.raises(UserError, match=re.escape(sentence)) if sentence else contextlib.nullcontext():
        start_devices(Topology.parse(topology))


def test_no_accelerator_is_searched_where_no_device_file_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_files, "PATTERNS", ())
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(UserError, match="the plan is for h100:8, but only CPU devices are here"):
        start_devices(Topology.parse("h100:8"))
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_a_plan_of_another_program_is_refused_before_it_compiles(folder: Path, monkeypatch, capsys, tmp_path: Path):
    monkeypatch.chdir(folder)
    plan = str(tmp_path / "v5e.json")
    assert cli.main(["plan", "step.py", "--topology", "v5e:2x4", "--mesh", "data=4,model=2", "--out", plan]) == 0
    assert cli.main(["compile", plan, "--entry", "dtypes_differ"]) == 2
    assert "argument `x` is float32[32,64] in the plan" in capsys.readouterr().err
    assert cli.main(["compile", "step.py", "--plan", plan, "--entry", "dtypes_differ"]) == 2
    shown = capsys.readouterr().err
    assert "another program: argument `x` is float32[32,64] in the plan" in shown and "Compiling for" not in shown


@pytest.mark.parametrize("suffix", ["graphml", "json", "svg"])
def test_a_graph_is_written_with_the_plan(suffix: str, folder: Path, monkeypatch, capsys, tmp_path: Path):
    monkeypatch.chdir(folder)
    out = tmp_path / f"g.{suffix}"
    assert cli.main(["graph", "step.py", "--plan", "plan.json", "-o", str(out), "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"Written: {out}"
    assert "dot_general" in printed and "cpu:8, mesh data=4, model=2" in printed and "noise" not in printed
    assert "dot_general" in out.read_text() and list(tmp_path.iterdir()) == [out]


def test_a_graph_with_the_plan_of_another_program_is_refused(folder: Path, monkeypatch, capsys, tmp_path: Path):
    monkeypatch.chdir(folder)
    other = ["graph", "step.py", "--entry", "dtypes_differ", "--plan", "plan.json"]
    assert cli.main([*other, "-o", str(tmp_path / "g.svg"), "--quiet"]) == 2
    captured = capsys.readouterr()
    assert "autoshard: the plan (of step) is not for step: it is another program, it has changed" in captured.err
    assert not captured.out and not list(tmp_path.iterdir())
