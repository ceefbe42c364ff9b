"""The tested versions: one list for the docs' page and for the doctor."""

import re
import tomllib
from pathlib import Path

import pytest

from autoshard.base import tested_versions
from autoshard.base.tested_versions import PACKAGES, TESTED, VersionSet, minor_of


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=~!;\[ ]", requirement)[0].replace("_", "-").lower() for requirement in requirements}


def test_the_page_lists_the_versions_that_the_doctor_knows():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")]
    assert rows[0] == ["environment", "date", *PACKAGES, "tests that passed", "left out"]
    expected = [
        [each.name, each.day, *(each.versions.get(name, "none") for name in PACKAGES), each.tests, each.left_out]
        for each in TESTED
    ]
    assert rows[2:] == expected
    assert {name for each in TESTED for name in each.versions} <= set(PACKAGES)


def test_the_page_states_the_ranges_of_the_project():
    (sentence,) = re.findall(r"autoshard asks for (.*?)\.\s", PAGE, re.DOTALL)
    asked = re.findall(r"`([^`]+)`", sentence)
    assert set(asked) <= set(PROJECT["dependencies"]) and len(asked) == 3
    (makefile,) = re.findall(r"^NEWEST_TORCH := torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert makefile == max((each.versions["torch"] for each in TESTED if "torch" in each.versions), key=minor_of)


def test_the_command_without_torch_installs_all_other_dependencies():
    (line,) = re.findall(r"^pip install ('jax.*)$", PAGE, re.MULTILINE)
    listed = names(re.findall(r"'[^']*'|\S+", line.replace("'", "")))
    assert listed == names(PROJECT["dependencies"]) - {"torch", "torchax", "transformers"}


@pytest.mark.parametrize(
    ("installed", "differing"),
    [
        ({"jax": "0.10.9", "torch": "2.13.1+cpu"}, []),
        ({"jax": "0.10.9", "torch": None}, []),
        ({"jax": "0.11.0", "torch": "2.9.1", "torch_xla": "2.9.0"}, ["jax", "torch", "torch_xla"]),
    ],
)
def test_minor_versions_are_compared(installed: dict[str, str | None], differing: list[str]):
    each = VersionSet("one", "2026-01-01", {"jax": "0.10.2", "torch": "2.13.0"}, "all", "")
    assert each.differs(installed) == differing


def test_versions_are_ordered_by_number(monkeypatch: pytest.MonkeyPatch):
    sets = tuple(VersionSet("", "", {"torch": version}, "", "") for version in ("2.13.0", "2.9.1", "2.10.0", "2.9.1"))
    monkeypatch.setattr(tested_versions, "TESTED", (*sets, VersionSet("", "", {}, "", "")))
    assert tested_versions.known_versions("torch") == "2.9.1, 2.10.0 and 2.13.0"
    assert tested_versions.newer_than_tested("torch", "2.14.0+cpu")
    assert not tested_versions.newer_than_tested("torch", "2.13.9") and not tested_versions.newer_than_tested(
        "torch", "2.8.0"
    )
