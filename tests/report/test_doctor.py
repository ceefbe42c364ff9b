"""The doctor says what works, from what is installed."""

import importlib.metadata
import io

import pytest
from rich.console import Console

from autoshard.report import doctor, doctor_report


def text_of(found: dict) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(doctor_report(found))
    return stream.getvalue()


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


def test_everything_works_in_the_environment_of_the_tests():
    found = doctor()
    assert found["backend"] == "cpu"
    assert len(found["devices"]) == 8
    assert found["warnings"] == []
    works = {ability["name"]: ability["works"] for ability in found["abilities"]}
    assert works["plan JAX programs"]
    assert works["plan PyTorch and hf: models"]
    assert "JAX sees 8 device(s) on cpu: 0: cpu, 1: cpu" in text_of(found)


def test_what_is_missing_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, {"libtpu": None, "pandas": None, "matplotlib": None})
    notes = {ability["name"]: ability["note"] for ability in doctor()["abilities"] if not ability["works"]}
    assert notes == {
        "compile for TPUs without a TPU": "libtpu not installed: pip install 'autoshard[tpu]'",
        "tables and figures in notebooks": "pandas and matplotlib not installed: pip install 'autoshard[notebook]'",
    }


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        ({"torch": "2.9.0", "torch_xla": "2.8.1"}, "torch 2.9.0 and torch_xla 2.8.1 differ in their minor version;"),
        ({"jax": "0.10.2", "jaxlib": "0.10.1"}, "jax 0.10.2 and jaxlib 0.10.1 differ; install one version of both."),
    ],
)
def test_versions_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch, versions: dict, sentence: str):
    pretend(monkeypatch, versions)
    (warning,) = doctor()["warnings"]
    assert sentence in warning
    assert "Warning: " in text_of(doctor())
