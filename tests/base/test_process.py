"""Processes of our own: they import this package, and nothing from the user's working directory."""

import contextlib
import gc
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard.base.processes import collecting_seldom, python_command, scratch_folder, scratch_folders
from autoshard.base.workers import WorkerCrew


TRAP = "import pathlib; pathlib.Path(__file__).with_name('executed').touch(); raise SystemExit('not this one')\n"


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules that have the names of ours and of Python's."""
    for name in ("autoshard", "autoshard/base", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(TRAP)
    for name in ("json", "pickle", "queue", "encodings", "multiprocessing", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path


@pytest.mark.heavy
@pytest.mark.parametrize(
    "prepare", [[], ["autoshard.solver.search.milp_worker"], ["autoshard.solver.exact_solves"]], ids=str
)
def test_children_import_nothing_from_the_working_directory(prepare: list[str], trap: Path):
    done = subprocess.run(python_command("autoshard.base.worker", *prepare), input=b"", capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stderr == b""
    assert not list(trap.rglob("executed"))


@pytest.mark.heavy
def test_children_have_this_package_and_what_the_environment_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.py").write_text(
        "import sys, numpy, autoshard\ndef main(text):\n    print(text, autoshard.__file__, sys.path[0])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = subprocess.run(
        python_command("mine", "a b"), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert out == f"a b {autoshard.__file__} {tmp_path}\n"


@pytest.mark.heavy
def test_helpers_of_a_crew_start_with_such_files(trap: Path):
    said: list[str] = []
    with WorkerCrew(1) as crew:
        crew.progress = said.append
        assert len(set(crew.map(_nap, range(8), lambda number: (0.2,)))) == 2
    assert not said and not list(trap.rglob("executed"))


def _nap(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


@pytest.mark.heavy
def test_children_end_with_their_stdin_in_any_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "busy.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")  # during the import
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with subprocess.Popen(python_command("busy"), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        child.stdin.write(b"unread")
        child.stdin.close()
        assert child.wait(5) == 0


@pytest.mark.parametrize("moment", ["before", "made", "inside", "after", "never"])
def test_a_folder_for_temporary_files_is_gone_whenever_a_signal_comes(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make = Path.mkdir

    def interrupted(self: Path, *arguments: Any, **options: Any) -> None:
        if moment == "made":
            make(self, *arguments, **options)
        raise KeyboardInterrupt

    remove, removals, before = shutil.rmtree, [], set(scratch_folders)

    def removed(*arguments: Any, **options: Any) -> None:
        removals.append(arguments)
        if moment == "after" and len(removals) == 1:
            raise KeyboardInterrupt
        remove(*arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", removed)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if moment in ("before", "made"):
        monkeypatch.setattr(Path, "mkdir", interrupted)
    with contextlib.suppress(KeyboardInterrupt), scratch_folder("test") as folder:
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700 and folder in scratch_folders
        (folder / "file").write_bytes(b"1")
        if moment == "inside":
            raise KeyboardInterrupt
    assert not list(tmp_path.iterdir()) and scratch_folders == before


def test_garbage_is_collected_seldom_for_a_while() -> None:
    before = gc.get_threshold()
    try:
        for given, within in (((700, 10, 60), (100_000, 50, 100)), ((200_000, 10, 10), (200_000, 50, 100))):
            gc.set_threshold(*given)
            with pytest.raises(ZeroDivisionError), collecting_seldom():
                assert gc.get_threshold() == within
                raise ZeroDivisionError
            assert gc.get_threshold() == given
        gc.set_threshold(0, 10, 10)  # never
        with collecting_seldom():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
