"""Closed, full and lost outputs: the command prints one sentence, and writes no file instead."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard import cli
from tests.planning.record.test_store import PLAN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    PLAN.save(tmp_path / "plan.json")
    return tmp_path


def shell(line: str, folder: Path) -> tuple[int, str]:
    """Run a line of a shell in which `autoshard` is the command. Return its exit code and stderr."""
    code = "from autoshard.cli import main; raise SystemExit(main())"
    whole = f"{sys.executable} -c '{code}' {line}"
    root = str(Path(cli.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(["sh", "-c", whole], stderr=subprocess.PIPE, text=True, cwd=folder, env=environment)
    return done.returncode, done.stderr


@pytest.mark.few(2)
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


@pytest.fixture
def sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that commands read, each with a symbolic and a hard link."""
    (folder / "sweep").mkdir()
    for name in ("step.py", "chips.json", "config.json", "plan.2.json", "step.mlir", "sweep/sweep.json"):
        (folder / name).write_text('{"v5e": 1}')
    for path in [each for each in folder.iterdir() if each.is_file()]:
        path.with_name(f"soft-{path.name}").symlink_to(path)
        path.with_name(f"hard-{path.name}").hardlink_to(path)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("line", "flag", "read"),
    [
        ("plan step.py --topology cpu:2", "--out", "step.py"),
        ("plan hf:config.json --topology cpu:2", "--save-problem", "config.json"),
        ("plan step.py --topology cpu:2 --pin-from plan.json", "--out", "plan.json"),
        ("plan step.py --topology cpu:2 --rules chips.json", "--out", "chips.json"),
        ("refine step.py --topology cpu:2", "--out", "step.py"),
        ("sweep step.py --topology cpu:2 --price chips.json", "--plot", "chips.json"),
        ("sweep step.py --topology cpu:2 --price chips.json", "--out", "chips.json"),
        ("compare step.py --topology cpu:2", "--save-problem", "step.py"),
        ("measure step.py --plan plan.json", "--profile", "plan.json"),
        ("compile step.mlir --plan plan.json", "--hlo", "plan.json"),
        ("export plan.json --to jax", "--out", "plan.json"),
        ("export plan.json --to jax --program step.py", "-o", "step.py"),
        ("report plan.json", "-o", "plan.json"),
        ("report plan.json -o r.html --measured chips.json", "--perfetto", "chips.json"),
        ("graph step.mlir", "-o", "step.mlir"),
        ("solve chips.json", "--out", "chips.json"),
        ("validate --pairs chips.json", "--html", "chips.json"),
        ("serve-plan hf:config.json --topology v5e:4 --input 8 --output 8", "--jax", "config.json"),
        ("degrees hf:. --topology h100:8 --batch 8 --seq 8", "--out", "config.json"),
    ],
)
@pytest.mark.parametrize("form", ["{}", "./{}", "soft-{}", "hard-{}", "sweep/../{}"])
def test_no_command_writes_over_what_it_reads(
    line: str, flag: str, read: str, form: str, sources: Path, capsys: pytest.CaptureFixture[str]
):
    before = (sources / read).read_bytes()
    output = form.format(read)
    assert cli.main([*line.split(), flag, output]) == 2
    shown = capsys.readouterr().err
    assert f"{'--out' if flag == '-o' else flag} {Path(output)} would write over" in shown
    assert shown.endswith("reads; name another file, or add --force.\n") and shown.count("\n") == 1
    assert (sources / read).read_bytes() == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "plan step.py --topology cpu:2 --pin-from plan.2.json --candidates 2 --out plan.json",
            "plan.2.json would",
        ),
        ("report sweep -o sweep/sweep.json", "--out sweep/sweep.json would write over sweep/sweep.json, which"),
        (
            "plan step.py --topology cpu:2 --out a.json --save-problem ./a.json",
            "both write a.json; name a",
        ),
    ],
)
def test_files_with_what_is_named_are_saved_as_well(
    line: str, said: str, sources: Path, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(line.split()) == 2
    assert said in capsys.readouterr().err


def test_a_plan_is_not_written_over_a_module_that_the_program_imports(
    sources: Path, capsys: pytest.CaptureFixture[str]
):
    (sources / "beside_step.py").write_text("SIZE = 8\n")
    (sources / "step.py").write_text(
        "import jax, beside_step\n"
        "def program():\n"
        "    return (lambda x: x * 2), (jax.ShapeDtypeStruct((beside_step.SIZE,), 'float32'),)\n"
    )
    line = ["plan", "step.py", "--topology", "cpu:2", "--quiet"]
    assert cli.main([*line, "--out", "beside_step.py"]) == 2
    assert "beside_step.py, which `autoshard plan` reads" in capsys.readouterr().err
    assert (sources / "beside_step.py").read_text() == "SIZE = 8\n"
    assert cli.main([*line, "--out", "step.json"]) == 0
    # Exports read the program of a plan again without being given its name.
    assert cli.main(["export", "step.json", "--to", "jax-export", "-o", "step.py"]) == 2
    assert "--out step.py would write over step.py, which `autoshard export` reads" in capsys.readouterr().err
    assert cli.main(["report", "step.json", "-o", "step.json", "--force"]) == 0
    assert "<html" in (sources / "step.json").read_text()


def test_a_working_directory_that_is_gone_is_reported(
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

    monkeypatch.setattr("autoshard.planning.load_plan", fail)
    assert cli.main(["diff", "a", "b"]) == (130 if isinstance(error, KeyboardInterrupt) else 2)
    shown = capsys.readouterr().err
    assert shown.endswith(said) and shown.count("\n") == 1
