"""What a command executes is said, and nothing else is executed."""

import dataclasses
from pathlib import Path

import pytest

from autoshard import cli
from tests.plan.record.test_store import PLAN


@pytest.mark.parametrize("command", ["explain plan.json z", "export plan.json --to jax"])
def test_that_a_plans_program_is_run_is_said_before(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "named.py").write_text("import sys\nprint('it runs', file=sys.stderr)\nraise ValueError\n")
    source = {"program": "named.py", "entry": "program", "options": {}}
    dataclasses.replace(PLAN, provenance={"source": source}).save("plan.json")
    cli.main(command.split())
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Running named.py, which plan.json names, for its program"
    assert lines.index("it runs") > 0
