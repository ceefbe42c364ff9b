"""The command's contract: its flags, its sentences, its exit codes, and what goes to which stream."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard import cli


PROGRAM = {"--batch", "--dtype", "--entry", "--infer", "--optimizer", "--remat", "--seq", "--state-dtype", "--train"}
PLANNING = {"--memory-limit", "--mesh", "--save-problem", "--seed", "--time-limit", "--topology"}
FLAGS = {
    "plan": {"--debug", "--json", "--out", "--quiet"} | PROGRAM | PLANNING,
    "measure": {"--check", "--debug", "--json", "--plan", "--quiet", "--steps", "--tolerance"} | PROGRAM | PLANNING,
    "report": {"--compare", "--debug", "--json", "--measured", "--out", "--quiet", "-o"},
    "solve": {"--debug", "--out", "--quiet", "--seed", "--threads", "--time-limit"},
}
"""Every flag of every command: an option is added here on purpose, or not at all."""


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def test_the_flags_are_those_that_are_listed():
    found = {
        name: {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}
        for name, parser in commands().items()
    }
    assert found == FLAGS


@pytest.mark.parametrize("command", sorted(FLAGS))
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: autoshard {command}")
    actions = [a for a in commands()[command]._actions if a.option_strings and a.dest != "help"]
    assert all(action.help for action in actions)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("plan x.py", "the following arguments are required: --topology; see `autoshard plan --help`."),
        ("plan x.py --topology cpu:8 --tpology v", "`autoshard plan` has no flag --tpology; did you mean --topology?"),
        ("plan x.py --topology cpu:8 --mem 3", "`autoshard plan` has no flag --mem; did you mean --memory-limit?"),
        ("plan x.py --topology cpu:8 --zzz", "`autoshard plan` has no flag --zzz; see `autoshard plan --help`."),
        ("plan x.py y.py --topology cpu:8", "`autoshard plan` has no argument y.py; see `autoshard plan --help`."),
        ("plan x.py --topology cpu:8 --batch 0", "argument --batch: '0' is not a positive whole number"),
        ("plan x.py --topology cpu:8 --time-limit nan", "argument --time-limit: 'nan' is not a positive number of"),
        ("plan x.py --topology cpu:8 --memory-limit 1G", "argument --memory-limit: '1G' is not a positive number of"),
        ("plan x.py --topology cpu:8 --train --infer", "argument --infer: not allowed with argument --train"),
        ("plan x.py --topology cpu:8 --out no/where.json", "where.json: the directory "),
        ("plan x.py --topology cpu:8 --out .", "--out . is a directory; name a file."),
        ("plan x.py --topology cpu:8", "there is no file `x.py`; give the path of a Python file"),
        ("plna x.py", "invalid choice: 'plna'"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(
    line: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*line.split(), "--quiet"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.startswith("autoshard: ")
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_where_an_error_was_raised():
    with pytest.raises(cli.UserError, match="there is no file"):
        cli.main(["plan", "missing.py", "--topology", "cpu:8", "--debug"])


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_AUTO_SPMD_MESH"}
    return subprocess.run(
        [sys.executable, "-m", "autoshard", *arguments],
        capture_output=True,
        text=True,
        env=environment | options.pop("env", {}),
        **options,
    )


def test_no_command_shows_the_help_and_fails():
    result = run()
    assert result.returncode == 2
    assert result.stdout == ""
    assert "usage: autoshard" in result.stderr
    assert result.stderr.endswith("start with `autoshard plan PROGRAM --topology TOPOLOGY`.\n")


def test_version():
    assert run("--version").stdout == f"autoshard {cli.__version__}\n"
