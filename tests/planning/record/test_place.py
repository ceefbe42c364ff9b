"""Place of a plan's program: the same bytes for any spelling and working directory, and found from anywhere."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard import cli
from autoshard.planning.record.program_place import is_same_program
from tests.planning.record.test_store import PLAN


PROGRAM = "import jax\nprogram = (lambda x: x @ x, (jax.ShapeDtypeStruct((64, 64), 'float32'),))\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "models" / "deep").mkdir(parents=True)
    (tmp_path / "models" / "step.py").write_text(PROGRAM)
    (tmp_path / "link").symlink_to(tmp_path / "models")
    return tmp_path


def of(program: str) -> Any:
    source = {"program": program, "entry": "program", "options": {}}
    return dataclasses.replace(PLAN, provenance=PLAN.provenance | {"source": source})


NAMINGS = [
    (".", "models/step.py"),
    (".", "./models//deep/../step.py"),
    (".", "link/step.py"),
    ("models", "step.py"),
    ("models/deep", "../step.py"),
    ("models/deep", "{project}/models/step.py"),
]


def test_the_bytes_do_not_depend_on_the_name_or_the_directory(project: Path, monkeypatch: pytest.MonkeyPatch):
    written = set()
    for folder, name in NAMINGS:
        monkeypatch.chdir(project / folder)
        of(name.format(project=project)).save(project / "plan.json")
        written.add((project / "plan.json").read_bytes())
        loaded = autoshard.load(project / "plan.json").provenance["source"]["program"]
        assert os.path.samefile(loaded, project / "models" / "step.py")
        assert is_same_program(loaded, name.format(project=project))
    (text,) = written
    assert b'"program": "models/step.py"' in text and str(project).encode() not in text


def test_the_command_writes_the_same_and_explains_from_anywhere(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    written = set()
    for folder, name in NAMINGS[::5]:
        monkeypatch.chdir(project / folder)
        line = ["plan", name.format(project=project), "--topology", "v5e:2x2", "--mesh", "data=4", "--quiet"]
        assert cli.main([*line, "--no-cache", "--out", str(project / "plan.json")]) == 0
        written.add((project / "plan.json").read_bytes())
    assert len(written) == 1
    project.rename(moved := project.with_name("moved"))
    monkeypatch.chdir(moved.parent)
    assert cli.main(["explain", "moved/plan.json", "x", "--quiet"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("name", ["hf:llama-tiny", "no\0where.py", "", "hf:"])
def test_what_is_no_path_stays_as_it_is(name: str, tmp_path: Path):
    of(name).save(tmp_path / "plan.json")
    assert autoshard.load(tmp_path / "plan.json").provenance["source"]["program"] == name


def test_a_configuration_in_a_file_is_one(project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(project / "models")
    of("hf:own.json").save(project / "plan.json")
    assert '"hf:models/own.json"' in (project / "plan.json").read_text()
    assert autoshard.load("../plan.json").provenance["source"]["program"] == "hf:own.json"


def test_a_device_has_no_place(monkeypatch: pytest.MonkeyPatch, project: Path):
    monkeypatch.chdir(project)
    of("models/step.py").save("/dev/null")
    with open(project / "out", "w+") as file:
        of("models/step.py").save(f"/dev/fd/{file.fileno()}")
        assert '"program": "models/step.py"' in (project / "out").read_text()
