"""The doctor lists what works with the installed packages."""

import dataclasses
import importlib.metadata
import io
import platform
from pathlib import Path

import pytest
from rich.console import Console

from autoshard.base import device_files
from autoshard.base.tested_versions import TESTED, VersionSet, known_versions
from autoshard.report import doctor, doctor_report
from autoshard.report.terminal import doctor_report as _doctor
from tests.command import run


def text_of(found: dict) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(doctor_report(found))
    return stream.getvalue()


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixture in which no process looks for devices."""
    monkeypatch.setattr(_doctor, "_devices", lambda: ([], "cpu", ""))


def pretend(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None]) -> None:
    real = importlib.metadata.version

    def version(package: str) -> str:
        if package not in versions:
            return real(package)
        found = versions[package]
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.heavy
def test_everything_works_in_the_environment_of_the_tests():
    found = doctor()
    assert found["backend"] == "cpu"
    assert len(found["devices"]) == 8
    assert found["warnings"] == []
    works = {ability["name"]: ability["works"] for ability in found["abilities"]}
    assert works["plan JAX programs"]
    assert works["plan PyTorch and hf: models"]
    assert "JAX sees 8 device(s) on cpu: 0: cpu, 1: cpu" in text_of(found)


def test_what_is_missing_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch, unseen: None):
    pretend(monkeypatch, {"libtpu": None, "pandas": None, "matplotlib": None, "ray": None})
    notes = {ability["name"]: ability["note"] for ability in doctor()["abilities"] if not ability["works"]}
    assert notes == {
        "compile for TPUs without a TPU": "libtpu not installed: pip install 'autoshard[tpu]'",
        "tables and figures in notebooks": "pandas and matplotlib not installed: pip install 'autoshard[notebook]'",
        "give candidates to a Ray cluster (--on)": "ray not installed: pip install 'autoshard[ray]'",
    }


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        ({"torch": "2.9.0", "torch_xla": "2.8.1"}, "torch 2.9.0 and torch_xla 2.8.1 differ in their minor version;"),
        ({"jax": "0.10.2", "jaxlib": "0.10.1"}, "jax 0.10.2 and jaxlib 0.10.1 differ; install one version of both."),
    ],
)
def test_versions_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch, unseen: None, versions: dict, sentence: str):
    pretend(monkeypatch, versions)
    (warning,) = doctor()["warnings"]
    assert sentence in warning
    assert "Warning: " in text_of(doctor())


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        ({"torch": "2.13.9+cpu", "torch_xla": None}, "These versions were tested together on 2"),
        (
            {"torch": None, "torch_xla": None, "torchax": None, "transformers": None},
            "These versions were tested together",
        ),
        (
            {"torch": "2.99.1", "torch_xla": None},
            f"Not tested in this combination (docs/versions.md): torch 2.99.1 (tested: {known_versions('torch')}).",
        ),
    ],
)
def test_installed_versions_are_compared_with_tested_ones(
    monkeypatch: pytest.MonkeyPatch, unseen: None, versions: dict, sentence: str
):
    tested = VersionSet("one", "2026-01-01", {**TESTED[0].versions, "python": platform.python_version()}, "all", "")
    newer = dataclasses.replace(tested, versions={**tested.versions, "torch": "2.13.0"})
    monkeypatch.setattr(_doctor, "TESTED", (tested, newer))
    pretend(monkeypatch, dict(tested.versions) | versions)
    found = doctor()
    assert found["tested"].startswith(sentence)
    assert sentence in text_of(found).replace("\n", " ")


@pytest.mark.heavy
def test_accelerators_that_are_not_here_are_silent():
    done = run("doctor", env={"JAX_PLATFORMS": None, "PJRT_DEVICE": None})
    assert done.returncode == 0
    assert done.stderr == ""
    assert "JAX sees 8 device(s) on cpu" in done.stdout


@pytest.mark.heavy
def test_a_process_that_cannot_look_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_doctor, "_LOOK", "raise RuntimeError('no backend')")
    found = doctor()
    assert (found["devices"], found["backend"]) == ([], "none: RuntimeError: no backend")
    monkeypatch.setattr(_doctor, "_LOOK", "import time; time.sleep(60)")
    monkeypatch.setattr(_doctor, "_WAIT_S", 0.5)
    assert "found no device in" in doctor()["backend"]


@pytest.mark.heavy
def test_an_accelerator_that_is_here_and_not_used_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(device_files, "PATTERNS", (str(tmp_path / "nvidia*"),))
    look = "import sys; print('RuntimeError: cuInit(0) failed', file=sys.stderr); print('{}')"
    answer = '{"devices": ["0: cpu"], "backend": "cpu"}'
    monkeypatch.setattr(_doctor, "_LOOK", look.replace("'{}'", f"'{answer}'"))
    (warning,) = doctor()["warnings"]
    assert warning == f"{tmp_path / 'nvidia0'} is here, but JAX uses the CPU. RuntimeError: cuInit(0) failed"
