"""Where the answer goes: closed, full and lost outputs get one sentence, and no file stands in for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard import cli
from tests.plan.record.test_store import PLAN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    PLAN.save(tmp_path / "plan.json")
    return tmp_path


def shell(line: str, folder: Path) -> tuple[int, str]:
    """Code and stderr of a line of a shell, in which `autoshard` is the command."""
    code = "from autoshard.cli import main; raise SystemExit(main())"
    whole = f"{sys.executable} -c '{code}' {line}"
    root = str(Path(cli.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(["sh", "-c", whole], stderr=subprocess.PIPE, text=True, cwd=folder, env=environment)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("diff plan.json plan.json >&-", 2, "autoshard: stdout is closed, so that the answer could go nowhere; "),
        ("diff plan.json plan.json >/dev/full", 2, "autoshard: a file or the answer cannot be written: No space"),
        ("diff plan.json plan.json --json <&- 2>&- >out", 0, ""),
        ("diff plan.json none.json 2>&-", 2, ""),
        ("report plan.json -o report.html <&- >/dev/full 2>&-", 2, ""),
    ],
)
def test_a_closed_or_full_output_gets_one_sentence(line: str, code: int, said: str, folder: Path):
    found, error = shell(line, folder)
    assert found == code
    assert error.startswith(said) and error.count("\n") == (1 if said else 0)


def test_a_working_directory_that_is_gone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.main(["plan", "hf:gpt2-tiny", "--topology", "cpu:2", "--out", "plan.json"]) == 2
    assert capsys.readouterr().err == (
        "autoshard: the working directory does not exist any more; change to one that does.\n"
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "autoshard: there is not enough memory (the system gives no more); give the process more.\n"),
        (PermissionError(13, "Permission denied", "here"), "autoshard: here: Permission denied.\n"),
        (OSError(28, "No space left on device"), "cannot be written: No space left on device.\n"),
        (KeyboardInterrupt(), "autoshard: interrupted\n"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(
    error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("autoshard.plan.load_plan", fail)
    assert cli.main(["diff", "a", "b"]) == (130 if isinstance(error, KeyboardInterrupt) else 2)
    shown = capsys.readouterr().err
    assert shown.endswith(said) and shown.count("\n") == 1
