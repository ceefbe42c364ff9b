"""Output of `--json`: it has the keys that the docs list, for every command."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard.cli import main
from autoshard.cli.parser import build_parser
from autoshard.exec import CompileReport, Verdict, compile_figures
from autoshard.planning import load_plan, save_plan


TEXT = (Path(__file__).parent.parent / "docs" / "json.md").read_text(encoding="utf-8")
STEP = """
import jax, jax.numpy as jnp

def step(params, x):
    grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["up"]) @ p["down"]))(params)
    return jax.tree.map(lambda p, g: p - g, params, grads)

def program():
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    return step, ({"up": shape(64, 128), "down": shape(128, 64)}, shape(32, 64))
"""
MESH = "--topology cpu:8 --mesh data=4,model=2"


ROWS = ("estimate", "list")
"""Commands for which the docs list the keys of their rows too."""


def documented(command: str) -> set[str]:
    (section,) = re.findall(rf"^## `autoshard {command}`\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("json")
    (folder / "step.py").write_text(STEP)
    nodes = {"intervals": [[0, 2], [1, 3]], "costs": [[3, 2], [0, 2]], "usages": [[1, 4], [1, 1]]}
    edges = {"nodes": [[0, 1]], "costs": [[0, 0, 9, 0]]}
    (folder / "problem.json").write_text(json.dumps({"problem": {"nodes": nodes, "edges": edges, "usage_limit": 4}}))
    assert main(["plan", str(folder / "step.py"), *MESH.split(), "--out", str(folder / "plan.json"), "--quiet"]) == 0
    other = load_plan(folder / "plan.json")
    save_plan(dataclasses.replace(other, topology="cpu:8", memory_limit_bytes=2**30), folder / "other.json")
    return folder


@pytest.fixture
def printed(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Any]:
    """Function that returns the object that a command prints on stdout."""
    monkeypatch.chdir(folder)

    def run(line: str) -> Any:
        assert main([*line.split(), "--json", "--quiet"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_every_command_has_the_flag_and_a_section():
    (commands,) = (a.choices for a in build_parser()._actions if isinstance(a.choices, dict))
    for name, parser in commands.items():
        assert "--json" in {flag for action in parser._actions for flag in action.option_strings}, name
    assert set(re.findall(r"^## `autoshard ([\w-]+)`$", TEXT, re.MULTILINE)) == set(commands)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("plan", f"step.py {MESH}"),
        ("measure", "step.py --plan plan.json --check --steps 2"),
        ("compare", f"step.py {MESH}"),
        ("refine", f"step.py {MESH} --plans 2 --rounds 1 --steps 2"),
        ("diff", "plan.json other.json"),
        ("explain", "plan.json params.up"),
        ("export", "plan.json --to jax"),
        ("graph", "step.py --plan plan.json"),
        ("solve", "problem.json"),
        ("doctor", ""),
        ("estimate", "hf:llama-tiny --train --topology v5e:2x4"),
        ("list", "models"),
        ("completion", "bash"),
        ("serve-plan", "hf:llama3-8b --topology v6e:2x4 --input 1000 --output 1000"),
        ("rl-plan", "hf:llama3-8b --topology h100:8 --sequences 64 --prompt 100 --answer 100"),
        ("validate", f"--data {Path(autoshard.__file__).parent / 'validation' / 'questions.json'}"),
    ],
)
def test_the_keys_are_those_in_the_docs(command: str, line: str, printed: Callable[[str], Any]):
    found = printed(f"{command} {line}")
    keys = set(found) | {key for rows in found.values() if command in ROWS for row in rows[:1] for key in row}
    assert keys <= documented(command) if command == "list" else keys == documented(command)


def test_a_report_has_the_keys_of_a_plan(printed: Callable[[str], Any]):
    assert set(printed("report plan.json")) == documented("plan") - {"wall_s"} | documented("report")


def test_nested_objects_have_the_keys_in_the_docs(printed: Callable[[str], Any]):
    plan = printed(f"plan step.py {MESH}")
    alternatives = printed("explain plan.json params.up")["alternatives"]
    (row,) = [line for line in TEXT.splitlines() if line.startswith("| `alternatives`")]
    assert set(re.findall(r"`(\w+)`", row)) >= set(alternatives[0]) - {"chosen"}
    figures = next(iter(plan["baselines"].values()))
    assert set(figures) < set(plan)
    row = next(iter(printed(f"compare step.py {MESH}")["plans"].values()))
    (line,) = [line for line in TEXT.splitlines() if line.startswith("| `plans`")]
    assert set(row) <= set(re.findall(r"`(\w+)`", line))
    assert set(row["predicted"]) == set(figures)


def test_solve_says_what_it_found(printed: Callable[[str], Any]):
    found = printed("solve problem.json")
    del found["wall_s"]
    assert found == {
        "choices": [0, 0],
        "cost": 3,
        "lower_bound": 3,
        "status": "optimal",
        "gap": 0.0,
        "nodes": 2,
        "edges": 1,
        "usage_limit": 4,
        "peak_usage": 2,
    }


def test_what_compile_prints():
    empty = dict.fromkeys(field.name for field in dataclasses.fields(CompileReport))
    tables = dict.fromkeys(("memory_predicted", "memory_compiled", "wire_predicted", "wire_compiled"), {})
    lists = dict.fromkeys(("collectives", "unforeseen", "warnings"), ())
    report = CompileReport(**{**empty, **tables, **lists, "verdict": Verdict.FITS})
    assert set(compile_figures(report)) == documented("compile")
