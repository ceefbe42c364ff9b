"""A traced torch step against eager torch, as `autoshard measure --check` compares them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard import cli
from autoshard.exec.run.eager_check import check_eager
from autoshard.program import Program, from_torch


torch = pytest.importorskip("torch")

SOURCE = """
import torch
from autoshard.program import from_torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 16)
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(torch.tanh(self.fc(x)))

def program():
    return from_torch(Net(), (torch.ones(8, 8),), train=True, loss=lambda out: out.sin().mean())
"""


def _wrong(program: Program) -> Program:
    """Scale the traced gradients and loss by 1.5, as a wrong lowering could."""
    import jax

    step = program.eager.step

    def other(*args: Any) -> Any:
        return jax.tree.map(lambda value: value * 1.5, step(*args))

    return dataclasses.replace(program, eager=dataclasses.replace(program.eager, step=other))


def _program() -> Program:
    space: dict[str, Any] = {"__name__": __name__}
    exec(SOURCE, space)
    return space["program"]()


def test_a_step_with_a_batch_norm_agrees():
    check = check_eager(_program())
    assert check.agrees and not check.skipped
    assert check.compared == {"loss": 1, "gradient": 4, "buffer": 3}


def test_a_wrong_trace_is_named():
    check = check_eager(_wrong(_program()))
    assert not check.agrees
    assert check.worst is not None and not check.worst.within
    assert any(each.kind == "gradient" and each.rel_diff == pytest.approx(0.5) for each in check.differences)


def test_inference_compares_outputs():
    check = check_eager(from_torch(torch.nn.Linear(8, 4), (torch.ones(2, 8),)))
    assert check.agrees and check.compared == {"output": 1}


def test_the_command_reports_both_comparisons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    source = tmp_path / "net.py"
    source.write_text(SOURCE)
    command = ["measure", str(source), "--topology", "cpu:2", "--check", "--steps", "1", "--quiet"]
    assert cli.main(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "AGREES with eager torch: loss, 4 gradients, 3 buffers; the largest difference is" in text
    assert "AGREES with the unplanned run" in text

    import autoshard.exec.run.measurement as room

    monkeypatch.setattr(room, "check_eager", lambda program, seed: check_eager(_wrong(program), seed))
    assert cli.main([*command, "--json"]) == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["passed"] and not figures["eager"]["agrees"]
    assert figures["eager"]["worst"]["rel_diff"] > figures["eager"]["worst"]["allowed"]
    assert cli.main(command) == 1
    assert "DIFFERS from eager torch" in capsys.readouterr().out


def test_check_has_both_comparisons():
    program = _program()
    alone = autoshard.check(program)
    assert alone.agrees and alone.plan is None and "agrees with eager torch" in str(alone)
    both = autoshard.check(program, autoshard.plan(program, topology="cpu:2"))
    assert both.agrees and both.plan is not None and "the unplanned one" in str(both)
    wrong = autoshard.check(_wrong(program))
    assert not wrong.agrees and "differs from eager torch" in str(wrong)
