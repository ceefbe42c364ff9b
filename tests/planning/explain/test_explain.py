"""Reasons for a tensor's spec: alternatives with prices that can be checked, from the plan file alone."""

import dataclasses
import functools
import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from autoshard.cli import main
from autoshard.cost import Topology, flag_set, load_calibration, with_flags
from autoshard.errors import UserError
from autoshard.exports import export_plan
from autoshard.planning import (
    Options,
    Plan,
    PlannedOp,
    Spec,
    explain_plan,
    load_plan,
    make_plan,
    plan_bills,
    read_asked,
    save_plan,
)
from autoshard.planning.explain.explanation import _added, named
from autoshard.planning.record.plan_parts import Collective
from autoshard.program import Program, open_source, trace
from autoshard.report.terminal.explanation_report import explanation_report, step_limits
from tests.planning.programs import wide_mlp


SOURCE = """
import jax, jax.numpy as jnp

def step(w, x):
    hidden = jnp.tanh(x @ w["up"])
    return (hidden @ w["down"]).sum()

def program():
    f = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return step, ({"up": f(512, 2048), "down": f(2048, 512)}, f(64, 512))
"""


@functools.cache
def wide() -> tuple[Program, Plan]:
    program = wide_mlp(batch=512, dim=1024, ffn=4096, layers=1)
    return program, make_plan(program, Options(topology="v5e:2x4", mesh="data=4,model=2")).plan


@pytest.mark.parametrize("solve", [False, True])
def test_the_choice_comes_first_and_the_rest_by_time(solve: bool) -> None:
    program, plan = wide()
    explanation = explain_plan(plan, "params.0.up", program, solve=solve)
    first, *others = explanation.alternatives
    assert first.chosen and first.spec == explanation.spec == plan.arguments["params.0.up"]
    assert first.step_time_s == pytest.approx(plan.prediction.step_time_s)
    assert len({one.spec for one in explanation.alternatives}) == len(explanation.alternatives) == 1 + len(others)
    times = [one.step_time_s for one in others if one.step_time_s is not None]
    assert times == sorted(times) and len(times) > 4
    gap = plan.plan_gap * plan.prediction.step_time_s
    for one in others:
        if one.delta_s is not None:
            assert one.delta_s >= -gap - 1e-12, "nothing is better than the certified bound"
    assert not solve or any(one.how == "solved" for one in others)


def test_specs_that_the_fixed_decisions_exclude_are_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explain a weight that is gathered before use: in its own spec alone does that gather go on."""

    def step(w, batch):
        def loss(w):
            return jnp.mean((jax.nn.gelu(batch["x"] @ w["up"]) @ w["down"] - batch["y"]) ** 2)

        return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w))

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    w = {"up": array(8192, 32768), "down": array(32768, 8192)}
    program = trace(step, (w, {"x": array(65536, 8192), "y": array(65536, 8192)}), name="step")
    plan = make_plan(program, Options(topology="v5e:4x4", mesh="data=4,model=4")).plan
    rows = explain_plan(plan, "w.up", program).alternatives
    assert len(rows) > 8 and sum(one.step_time_s is not None for one in rows) > 4
    assert any(one.how == "solved" and not one.chosen for one in rows)
    monkeypatch.setattr("autoshard.planning.explain.explanation.FREED_S", -1.0)
    others = explain_plan(plan, "w.up", program).alternatives
    assert {one.step_time_s for one in others if one.how == "unsolved"} == {None}
    text = io.StringIO()
    Console(file=text, width=200).print(explanation_report(explain_plan(plan, "w.up", program)))
    assert "needs other decisions too: add --solve" in text.getvalue()


def test_fixed_decisions_never_beat_solved_ones() -> None:
    program, plan = wide()
    fixed, solved = (
        {one.spec: one.step_time_s for one in explain_plan(plan, "params.0.up", program, solve=solve).alternatives}
        for solve in (False, True)
    )
    assert fixed.keys() == solved.keys()
    pairs = [(solved[spec], seconds) for spec, seconds in fixed.items() if seconds is not None]
    assert all(best is not None and best <= seconds * (1 + 1e-9) for best, seconds in pairs)
    assert any(best is not None and best < seconds for best, seconds in pairs)


def test_an_alternative_costs_what_a_plan_pinned_to_it_costs() -> None:
    program, plan = wide()
    explanation = explain_plan(plan, "params.0.up", program, solve=True)
    one = next(
        a for a in explanation.alternatives if not a.chosen and a.how == "solved" and a.delta_s and a.delta_s > 1e-7
    )
    entries = ["+".join(axes) or "None" for axes in one.spec.dims]
    pinned = make_plan(
        program,
        Options(topology="v5e:2x4", mesh="data=4,model=2", asked=read_asked({"params.0.up": ",".join(entries)})),
    ).plan
    assert pinned.prediction.step_time_s <= one.step_time_s * (1 + 1e-9), "more weightings, never worse"
    assert pinned.prediction.step_time_s == pytest.approx(one.step_time_s, rel=0.15)
    assert one.wins_if.startswith("wins if")


def test_pins_are_reported_and_preserved() -> None:
    program, _ = wide()
    asked = read_asked({"params.0.down": "None,model"}, replicate=["params.0.up"])
    plan = make_plan(program, Options(topology="v5e:2x4", mesh="data=4,model=2", asked=asked)).plan
    explanation = explain_plan(plan, "up", program)
    assert explanation.name == "params.0.up" and explanation.fixed == "--replicate params.0.up"
    assert explanation.spec == Spec.replicated(2)


def test_a_pattern_stands_for_tensors_that_are_alike() -> None:
    program = wide_mlp(batch=512, dim=256, ffn=512, layers=3)
    plan = make_plan(program, Options(topology="v5e:2x4", mesh="data=4,model=2")).plan
    ups = [f"params.{layer}.up" for layer in range(3)]
    alike = dataclasses.replace(plan, arguments={**plan.arguments, **dict.fromkeys(ups, plan.arguments[ups[0]])})
    assert named(alike, "params.*.up") == named(alike, "*.up") == named(alike, "up") == ups and len(ups) == 3
    assert named(alike, "0.up") == named(alike, "par…0.up") == ["params.0.up"]
    assert explain_plan(alike, "*.up", program).alike == tuple(ups[1:])
    differ = {ups[0]: Spec(((), ("data", "model"))), ups[1]: Spec.replicated(2)}
    unlike = dataclasses.replace(plan, arguments={**alike.arguments, **differ})
    assert named(unlike, "up") == [ups[0]], "layers that differ have a name each"
    stack = "params.[0:2].up"
    stacked = dataclasses.replace(
        plan, arguments={**plan.arguments, stack: Spec.replicated(3)}, shapes={**plan.shapes, stack: (2, 256, 512)}
    )
    assert named(stacked, "up") == [stack], "the largest of a kind"
    with pytest.raises(UserError, match=r"params\* names tensors of several kinds: params\.\*\.down, params\.\*\.up"):
        named(plan, "params*")


def test_a_file_is_not_run_again_to_explain_its_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "model.py").write_text(SOURCE)
    asked, file = ["--topology", "cpu:8", "--mesh", "data=4,model=2", "--quiet"], str(tmp_path / "plan.json")
    assert main(["plan", str(tmp_path / "model.py"), *asked, "-o", file]) == 0
    (tmp_path / "model.py").write_text("raise SystemExit('run again')")
    capsys.readouterr()
    assert main(["explain", file, "w.up", "--quiet"]) == 0
    kept = capsys.readouterr().out
    (tmp_path / "model.py").write_text(SOURCE)
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", "")
    assert main(["explain", file, "w.up", "--quiet"]) == 0
    assert capsys.readouterr().out == kept and "w.up (parameter) is split" in kept


def test_the_file_alone_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(SOURCE)
    made = make_plan(open_source(str(tmp_path / "model.py")), Options(topology="cpu:8", mesh="data=4,model=2")).plan
    save_plan(made, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == made
    assert main(["explain", str(tmp_path / "plan.json"), "w.up", "--json", "--quiet"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["spec"] == made.arguments["w.up"].to_json() and figures["alternatives"][0]["chosen"]
    assert main(["explain", str(tmp_path / "plan.json"), "up", "--quiet"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "w.up (parameter) is split 512" in said and "--solve chooses the rest again" in said
    assert main(["explain", str(tmp_path / "plan.json"), "up", "--quiet", "--solve"]) == 0
    assert "--solve" not in capsys.readouterr().out
    (tmp_path / "moved.py").write_text(SOURCE)
    (tmp_path / "model.py").unlink()
    moved = ["--program", str(tmp_path / "moved.py")]
    assert main(["explain", str(tmp_path / "plan.json"), "w.up", "--quiet", *moved]) == 0
    capsys.readouterr()
    assert main(["explain", str(tmp_path / "plan.json"), "w.upp", "--quiet", *moved]) == 2
    assert "the plan has no argument or result w.upp; did you mean w.up?" in capsys.readouterr().err
    (tmp_path / "moved.py").write_text(SOURCE.replace("tanh", "sin"))
    assert main(["explain", str(tmp_path / "plan.json"), "w.up", "--quiet", *moved]) == 2
    assert "it has changed; plan it again" in capsys.readouterr().err


def test_a_plan_made_for_compiler_flags_is_priced_with_them_again() -> None:
    program, _ = wide()
    flags = "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true --xla_made_up=1"
    machine = {"topology": "v6e:2x4", "mesh": "data=8", "calibration": False}
    plain = make_plan(program, Options(**machine)).plan
    plan = make_plan(program, Options(**machine, xla_flags=flags)).plan
    assert plan.provenance["calibration"] != plain.provenance["calibration"]
    assert plan.provenance["xla_flags"]["flags"] == flags.split() and "xla_flags" not in plain.provenance
    assert "flags without effect on the price: --xla_made_up." in plan.warnings
    assert explain_plan(plan, "params.0.up", program).alternatives[0].step_time_s == plan.prediction.step_time_s


def test_a_set_of_flags_is_named_proposed_and_preserved(monkeypatch: pytest.MonkeyPatch) -> None:
    program = wide_mlp(batch=16384, dim=1024, ffn=4096, layers=2)
    machine = {"topology": "v6e:2x4", "mesh": "data=4,model=2", "calibration": False}
    plain = make_plan(program, Options(**machine)).plan
    gains = plain.provenance["flag_sets"]
    best = min(gains, key=lambda name: gains[name])
    assert {"async", "sparsecore"} == set(gains) and gains[best] < 0.98 * plain.prediction.step_time_s
    (said,) = [line for line in step_limits(plain) if "--xla-flags" in line]
    assert said.startswith(f"With --xla-flags {best} this plan takes")
    named = make_plan(program, Options(**machine, xla_flags=best)).plan
    assert named.prediction.step_time_s <= gains[best]  # at least what the same plan gains
    assert named.provenance["xla_flags"]["from"] == best and best not in named.provenance.get("flag_sets", {})
    flags = " ".join(named.provenance["xla_flags"]["flags"])
    assert f'LIBTPU_INIT_ARGS="{flags}"' in export_plan(named, "jax", program)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", flags)
    heard = make_plan(program, Options(**machine)).plan
    assert heard.provenance["xla_flags"]["from"] == "LIBTPU_INIT_ARGS"
    assert heard.prediction == named.prediction


def test_flags_are_proposed_for_the_plan_that_a_form_holds() -> None:
    program = wide_mlp(batch=16384, dim=1024, ffn=4096, layers=2)
    machine = {"topology": "v6e:2x4", "mesh": "data=4,model=2", "calibration": False}
    within = make_plan(program, Options(**machine, form="flax")).plan
    chip = Topology.parse("v6e:2x4").chip
    flagged = with_flags(load_calibration(chip), flag_set("sparsecore", chip)).calibration
    (bill,) = plan_bills(program, [within])
    assert within.provenance["flag_sets"]["sparsecore"] == pytest.approx(bill.seconds(flagged))


def test_what_cannot_be_explained_is_reported() -> None:
    program, plan = wide()
    with pytest.raises(UserError, match="does not say where its program is: name it with --program"):
        plan.explain("params.0.up")
    with pytest.raises(UserError, match="does not hold the choices that explain it; plan it again"):
        dataclasses.replace(plan, choices="").explain("params.0.up", program)
    slower = dataclasses.replace(plan.prediction, step_time_s=1.0)
    with pytest.raises(UserError, match="predicts 1 s a step, but its choices are priced at"):
        dataclasses.replace(plan, prediction=slower).explain("params.0.up", program)


def planned_op(kind: str, line: str, compute_s: float, bound: str) -> PlannedOp:
    return PlannedOp(f"jit(f)/{kind}", kind, line, "", 1, compute_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0, bound)


def test_lines_that_take_most_compute_are_named_with_their_limit() -> None:
    """Name the costliest lines, and a softmax between matmuls that all go through memory."""
    _, plan = wide()
    step = plan.prediction.step_time_s
    prediction = dataclasses.replace(plan.prediction, compute_s=0.9 * step)
    ops = (
        planned_op("dot_general", "model.py:3", 0.4 * step, "compute"),
        planned_op("dot_general", "model.py:7", 0.1 * step, "memory"),
        planned_op("exponential", "model.py:7", 0.2 * step, "memory"),
        planned_op("add", "model.py:9", 0.01 * step, "memory"),
    )
    lines = step_limits(dataclasses.replace(plan, prediction=prediction, ops=ops))
    (compute,) = [line for line in lines if line.startswith("Compute is")]
    assert compute == (
        "Compute is 90% of the step. Its costliest lines, as shares of the step: "
        "model.py:3 40% (dot_general, limited by FLOPs), model.py:7 30% (exponential, limited by memory traffic)."
    )
    assert not any("softmax" in line for line in lines)
    passed = tuple(dataclasses.replace(op, scores=(1536, 1536, 64, 0)) if op is ops[2] else op for op in ops)
    (line,) = [
        line for line in step_limits(dataclasses.replace(plan, prediction=prediction, ops=passed)) if "softmax" in line
    ]
    kernel = (
        "(jax.experimental.pallas.ops.tpu.splash_attention with block_sizes of 512; its default of 128 takes longer)"
    )
    assert line.startswith("The softmax at model.py:7 ") and kernel in line and "(20% of the step)" in line
    here = dataclasses.replace(plan, prediction=prediction, ops=passed, topology="cpu:8")
    assert not any("softmax" in line for line in step_limits(here))
    added = dataclasses.replace(planned_op("add", "", 0.3 * step, "memory"), name="jit(step)/add")
    for role, words in (("parameter", "add"), ("optimizer_state", "the optimizer's update")):
        roles = dict.fromkeys(plan.roles, role)
        named = step_limits(dataclasses.replace(plan, prediction=prediction, ops=(added,), roles=roles))
        assert any(f"as shares of the step: {words} 30% (add, limited" in line for line in named), named
    waiting = dataclasses.replace(prediction, compute_s=0.4 * step)
    assert not any(line.startswith("Compute is") for line in step_limits(dataclasses.replace(plan, prediction=waiting)))


def test_larger_blocks_are_named_for_a_kernel_that_starts_too_many_steps() -> None:
    """Judge by jax's kernels: blocks divide the sequences, and 1024 x 1024 scores are 64 steps of 128 x 128."""
    _, plan = wide()
    step = plan.prediction.step_time_s
    prediction = dataclasses.replace(plan.prediction, compute_s=0.9 * step)
    slow = dataclasses.replace(
        planned_op("splash_mha_fwd", "", 0.4 * step, "overhead"), scores=(2048, 2048, 128, 128**2)
    )
    large = dataclasses.replace(slow, scores=(2048, 2048, 128, 1024**2))
    uneven = dataclasses.replace(slow, scores=(2000, 2000, 128, 128**2))
    for op, told in (
        (slow, True),
        (large, False),
        (uneven, False),
        (dataclasses.replace(slow, bound="compute"), False),
    ):
        lines = step_limits(dataclasses.replace(plan, prediction=prediction, ops=(op,)))
        advice = [line for line in lines if "block_sizes of 1024, block_kv_compute of 512" in line]
        assert bool(advice) == told
        assert all("128 x 128 of 2048 x 2048" in line and "64 times fewer steps" in line for line in advice)


def test_collectives_are_compared_by_kind_and_axes() -> None:
    """Merge the gathers of a loop under another name: only what takes longer is added."""
    base = (
        Collective("all-gather", ("data",), 2, 80, 0.2, True, "up"),
        Collective("all-reduce", ("data",), 1, 8, 0.1, False),
    )
    other = (
        Collective("all-gather", ("data",), 1, 60, 0.15, True, "down"),
        Collective("all-gather", ("data",), 2, 30, 0.06, False),
    )
    (one,) = _added(base, other)
    assert (one.kind, one.count, one.wire_bytes, one.cause) == ("all-gather", 1, 10, "down")
    assert one.seconds == pytest.approx(0.01) and one.waited_s == pytest.approx(0.06)


@pytest.mark.parametrize("form", ["dtensor", "fsdp2", pytest.param("jax", marks=pytest.mark.full)])
def test_alternatives_of_a_plan_in_a_form_are_priced_within_it(form: str) -> None:
    program, _ = wide()
    options = {"topology": "h100:8", "mesh": "data=8" if form == "fsdp2" else "data=4,model=2", "form": form}
    name = "params.0.up"
    plan = make_plan(program, Options(**options)).plan
    explanation = explain_plan(plan, name, program)
    assert explanation.form == form
    priced = [one for one in explanation.alternatives if one.how == "completed" and one.fits]
    assert priced, "another spec has a price"
    assert {one.how for one in explanation.alternatives} <= {"solved", "completed", "inexpressible"}
    for one in priced[:2]:
        pinned = make_plan(program, Options(**options, asked=read_asked(pins={name: one.spec}))).plan
        assert pinned.arguments[name] == one.spec
        assert pinned.prediction.step_time_s <= one.step_time_s * (1 + 1e-9), "other arguments may change, too"
    if form == "fsdp2":
        whole = next(one for one in explanation.alternatives if not one.spec.axes)
        assert whole.how == "inexpressible", "FSDP gathers what it splits, over every axis of the batch"
    text = io.StringIO()
    Console(file=text, width=200).print(explanation_report(explanation))
    assert f"within --for {form}: other arguments as they are" in text.getvalue()
