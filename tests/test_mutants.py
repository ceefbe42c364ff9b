"""The mutation run of `experiments/correctness/mutants.py`, on a package of one file whose tests cover half of it."""

import ast
import shutil
from pathlib import Path

import pytest

from experiments.correctness import mutants
from experiments.lib import mutations


SOURCE = '''"""No change of 1 + 1 in words."""

def least(x: int, y: int = 2) -> int:
    if not x and y > 0:
        raise ValueError(f"{x + 1} is less than {1}")
    return min(x, y - 1)


def elsewhere(x):
    return x * 5


def unseen(x):
    return x + 1


if __name__ == "__main__":
    print(elsewhere(len("ab")))
'''
CHANGES = {
    "2 -> 3",
    "not x and y > 0 -> False",
    "not x and y > 0 -> not x or y > 0",
    "not x -> x",
    "y > 0 -> y >= 0",
    "0 -> 1",
    "min(x, y - 1) -> max(x, y - 1)",
    "y - 1 -> y + 1",
    "1 -> 2",
    "x + 1 -> x - 1",
    "x * 5 -> x // 5",
    "5 -> 6",
    "__name__ == '__main__' -> False",
    "__name__ == '__main__' -> __name__ != '__main__'",
}
TESTS = """
import subprocess, sys
import pytest
from autoshard.cost.sums import least

def test_least():
    assert least(5) == 1 and least(0, 0) == -1
    with pytest.raises(ValueError):
        least(0)

def test_elsewhere():
    done = subprocess.run([sys.executable, "-m", "autoshard.cost.sums"], capture_output=True, text=True, check=True)
    assert done.stdout == "10\\n"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {"autoshard/__init__.py": "", "autoshard/cost/__init__.py": "", "autoshard/cost/sums.py": SOURCE}
    files |= {"tests/cost/test_sums.py": TESTS, "pyproject.toml": "", "experiments/__init__.py": ""}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "experiments" / "lib").mkdir()
    shutil.copy(mutants.ROOT / "experiments" / "lib" / "line_map.py", tmp_path / "experiments" / "lib")
    return tmp_path


def test_changes_are_those_of_what_is_computed(checkout: Path) -> None:
    drawn = mutations.drawn(checkout / "autoshard", "cost", 100)
    assert {f"{mutant.before} -> {mutant.after}" for mutant in drawn} == CHANGES
    texts = {mutant.source(SOURCE.encode()) for mutant in drawn}
    assert len(texts) == len(drawn) == len({mutant.key for mutant in drawn})
    trees = {ast.dump(ast.parse(text)) for text in texts}
    assert len(trees) == len(texts) and ast.dump(ast.parse(SOURCE)) not in trees


def test_a_draw_stays_when_other_functions_come(checkout: Path) -> None:
    before = [mutant.key for mutant in mutations.drawn(checkout / "autoshard", "cost", 100)]
    path = checkout / "autoshard" / "cost" / "sums.py"
    path.write_text("def first(x):\n    return x < 1\n\n\n" + path.read_text())
    after = [mutant.key for mutant in mutations.drawn(checkout / "autoshard", "cost", 100)]
    assert [key for key in after if ":first:" not in key] == before != after


@pytest.mark.full
def test_what_a_test_sees_is_killed_and_the_copy_is_put_back(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "BUILD", checkout / "build")
    monkeypatch.setattr(mutants, "NEAREST", {"cost": ("cost",)})
    drawn = {f"{each.before} -> {each.after}": each for each in mutations.drawn(checkout / "autoshard", "cost", 100)}
    seen, same, unseen = (drawn[key] for key in ("min(x, y - 1) -> max(x, y - 1)", "2 -> 3", "x + 1 -> x - 1"))
    killed = mutants.outcome(checkout, seen)
    assert killed["kind"] == "killed" and "test_least" in killed["text"]
    (away,) = (each for each in drawn.values() if each.after == "x // 5")
    killed_there = mutants.outcome(checkout, away)
    assert killed_there["kind"] == "killed" and "test_elsewhere" in killed_there["text"]
    assert mutants.chosen(checkout, away)[0] == ["tests/cost/test_sums.py::test_elsewhere"], "a process ran the line"
    assert mutants.outcome(checkout, same)["kind"] == "killed", "what runs when a file is imported has all its tests"
    survived = mutants.outcome(checkout, unseen)
    assert (survived["kind"], survived["text"]) == ("survived", "0 + 2 tests"), "where none runs the line, all nearby"
    assert (checkout / "autoshard" / "cost" / "sums.py").read_text() == SOURCE
    rows = {"a": {"room": "cost"} | killed, "b": {"room": "cost", "kind": "survived", "text": ""}}
    assert "| cost | 2 | 1 | 0 | 0 | 1 | 50 % |" in mutants.table(rows, {})
    assert "| cost | 2 | 1 | 0 | 1 | 0 | 100 % |" in mutants.table(rows, {"b": "The same."})
