"""Code that a command executes: the user is informed of it, and nothing else is executed."""

import ast
import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard import cli
from autoshard.base.disk_cache import read_entry, write_entry
from autoshard.base.files import is_ours
from autoshard.cost import Database
from autoshard.planning.record.plan_files import plan_to_json
from tests.cost.observed import bill, observation
from tests.planning.record.test_store import PLAN


@pytest.mark.parametrize("command", ["explain plan.json z", "export plan.json --to jax"])
def test_a_notice_precedes_the_run_of_a_plans_program(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "named.py").write_text("import sys\nprint('it runs', file=sys.stderr)\nraise ValueError\n")
    source = {"program": "named.py", "entry": "program", "options": {}}
    dataclasses.replace(PLAN, provenance={"source": source}).save("plan.json")
    cli.main(command.split())
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Running named.py, which plan.json names, for its program"
    assert lines.index("it runs") > 0


ESCAPES = ("w\x1b]0;owned\x07\x1b[2K\x1b[1A", "\u202egnp.exe", "a\r\nb\x85c", "[red]x[/red][link=https://a.b]y[/link]")


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("line", ["report plan.json", "diff plan.json other.json", "explain plan.json z"])
def test_names_in_a_plan_never_steer_the_terminal(
    line: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Rename axes, baselines and all other names of a plan, and the program whose execution is announced."""
    monkeypatch.chdir(tmp_path)
    source = {"program": f"{name}.py", "entry": "program", "options": {}}
    PLAN.save("other.json")
    own = {*PLAN.mesh, *PLAN.arguments, *PLAN.results, *PLAN.baselines, *PLAN.words, PLAN.program_name}

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {renamed(key): renamed(each) for key, each in value.items()}
        if isinstance(value, list):
            return [renamed(each) for each in value]
        return name + value if value in own and value != "batch" else value

    plan = dataclasses.replace(PLAN, provenance=PLAN.provenance | {"source": source})
    Path("plan.json").write_text(json.dumps(renamed(json.loads(plan_to_json(plan)))))
    code = cli.main(line.split())
    shown = capsys.readouterr()
    assert code == (2 if line.startswith("explain") else 0), shown.err
    assert name[0] in shown.out + shown.err or "\N{REPLACEMENT CHARACTER}" in shown.out + shown.err
    assert not set(shown.out + shown.err) & set("\x1b\x07\r\x85\u202e")


def test_what_is_preserved_is_private_and_others_files_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path / "kept"))
    write_entry("graph", "key", b"body")
    assert read_entry("graph", "key") == b"body"
    assert mode(tmp_path / "kept") == 0o700 and mode(tmp_path / "kept/key.graph") == 0o600
    database = Database(tmp_path / "data")
    one = observation(bill(matmul=1.0), 1.0)
    assert database.add([one])
    assert mode(tmp_path / "data") == 0o700
    assert {mode(path) for path in (tmp_path / "data").iterdir()} == {0o600}
    assert database.read(one.topology, one.compiler) == [one]
    for module in ("autoshard.base.disk_cache", "autoshard.cost.observation_database"):
        monkeypatch.setattr(f"{module}.is_ours", lambda status: False)
    assert read_entry("graph", "key") is None
    assert database.read(one.topology, one.compiler) == [] and not database.add([one])


def test_files_are_ours_if_they_are_the_users_or_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    own = (tmp_path / "file").stat()
    assert is_ours(own)
    monkeypatch.setattr(os, "geteuid", lambda: own.st_uid + 1)
    assert is_ours(own) == (own.st_uid == 0)
    if own.st_uid == 0:
        os.chown(tmp_path / "file", 12345, 12345)
        assert not is_ours((tmp_path / "file").stat())


MAY = {
    "pickle": {
        "base/worker.py",  # through the pipes of processes that we started
        *("base/ray_driver.py", "base/ray_node.py", "base/ray_pool.py"),  # and of a Ray cluster that the user names
    },
    "exec_module": {"program/load.py", "autoload.py"},  # the user's program; and torch_xla, whose import is watched
    "subprocess": {"base/processes.py", "base/worker.py", "base/ray_pool.py"},
    "socket": {"base/ray_driver.py"},  # to check that the user's cluster answers
}
NEVER = {
    "eval",
    "exec",
    "compile",
    "system",
    "popen",
    "urllib",
    "requests",
    "http",
    "shelve",
    "marshal",
    "dill",
}


def test_no_file_becomes_code_and_nothing_is_fetched():
    package = Path(autoshard.__file__).parent
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            words: set[str] = set()
            if isinstance(node, ast.Import):
                words = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                words = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                words = {node.func.id}
            elif isinstance(node, ast.Attribute) and node.attr in ("exec_module", "system", "popen"):
                words = {node.attr}
            elif isinstance(node, ast.keyword):
                words = {node.arg or ""} & {"shell"}
            assert not words & (NEVER | {"shell"}), f"{name}, line {getattr(node, 'lineno', '?')}: {words}"
            for word in words & MAY.keys():
                assert name in MAY[word], f"{name} uses {word}"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
