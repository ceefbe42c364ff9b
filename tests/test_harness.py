"""The command of experiments: rows that run, rows that are saved, the table and the exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.lib import harness


ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}

SCRIPT = '''"""A script of four rows."""

import os
import sys
import time

from experiments.lib.harness import Experiment, grid, page


def work(name):
    if name == "dies":
        os._exit(3)
    if name == "sleeps":
        time.sleep(60)
    return {"length": len(name), "process": os.getpid()}


def table(rows):
    return page("# Lengths", grid("name | length:", ((name, row.get("length")) for name, row in rows.items())))


if __name__ == "__main__":
    names = ("longer", "short", "dies", "sleeps")
    sys.exit(Experiment(script=__file__, names=names, work=work, table=table, apart=True, limit_s=20.0).run())
'''


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "lengths.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), *options, "--out", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT)


def test_rows_are_separated_and_are_not_run_again(tmp_path: Path) -> None:
    first = run(tmp_path, "--only", "longer", "dies")
    rows = json.loads((tmp_path / "lengths.json").read_text())
    assert first.returncode == 1 and "dies: failed, exit code 3" in first.stderr
    assert list(rows) == ["longer"] and rows["longer"]["length"] == 6 and rows["longer"]["code"]
    second = run(tmp_path, "--only", "o")
    again = json.loads((tmp_path / "lengths.json").read_text())
    assert second.returncode == 0 and again["longer"] == rows["longer"] and again["short"]["length"] == 5
    assert again["short"]["process"] != again["longer"]["process"]
    text = (tmp_path / "lengths.md").read_text()
    assert (
        text == "# Lengths\n\n| name | length |\n| --- | ---: |\n| longer | 6 |\n| short | 5 |\n" == second.stdout[:-1]
    )
    third = run(tmp_path, "--only", "short", "--again")
    assert json.loads((tmp_path / "lengths.json").read_text())["short"]["process"] != again["short"]["process"]
    assert third.returncode == 0
    (tmp_path / "lengths.md").unlink()
    assert run(tmp_path, "--table").returncode == 0 and (tmp_path / "lengths.md").read_text() == text
    unknown = run(tmp_path, "--only", "nothing")
    assert unknown.returncode == 1 and "no row 'nothing'; there are longer, short, dies, sleeps" in unknown.stderr


def test_a_row_that_takes_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 5.0)

    monkeypatch.setattr(harness.subprocess, "run", late)
    monkeypatch.setattr(harness, "checked_out", lambda: "abc")
    monkeypatch.setattr(sys, "argv", ["lengths.py", "--out", str(tmp_path)])
    code = harness.Experiment(
        script="lengths.py",
        names=["a"],
        work=len,
        table=str,
        apart=True,
        limit_s=5.0,
        is_wrong=lambda row: "error" in row,
    ).run()
    assert code == 1
    assert json.loads((tmp_path / "lengths.json").read_text()) == {"a": {"code": "abc", "error": "not run within 5 s"}}


def test_a_known_row_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps({"a": {"error": "no"}, "bb": {"length": 7}, "old": 1}))
    monkeypatch.setattr(sys, "argv", ["lengths.py", "--out", str(tmp_path)])
    harness.Experiment(
        script="lengths.py",
        names=["bb", "a"],
        work=lambda name: {"length": len(name)},
        table=lambda rows: " ".join(f"{name} {row['length']}" for name, row in rows.items()),
        is_open=lambda row: "error" in row,
    ).run()
    assert (tmp_path / "lengths.md").read_text() == "bb 7 a 1"
    assert json.loads((tmp_path / "lengths.json").read_text())["old"] == 1


def test_pages_leave_empty_blocks_out_and_cells_hold_bars() -> None:
    assert harness.page("# A", "", ["x", "y"], []) == "# A\n\nx\ny\n"
    assert harness.plain("a|b\nc") == "a\\|b c"
    assert harness.grid(" | n:", [["x", 1]]) == "| | n |\n| --- | ---: |\n| x | 1 |"
