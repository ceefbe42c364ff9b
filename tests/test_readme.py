"""The README's example runs, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

from autoshard.cli._parser import build_parser, parser_of


README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_example_runs_and_prints_a_falling_loss(tmp_path: Path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    result = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    losses = [float(line.split()[0]) for line in result.stdout.splitlines()[1:]]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
    assert (tmp_path / "step.plan.json").is_file()


def test_it_opens_with_the_two_commands():
    assert README.split("```")[1].split()[:2] == ["make", "demo"]
    assert README.split("```")[1].splitlines()[2].split()[:2] == ["make", "test"]


def test_the_commands_it_shows_exist():
    (block,) = (text for text in README.split("```") if "\nautoshard plan PROGRAM" in text)
    for line in block.strip().splitlines():
        command, arguments = re.fullmatch(r"autoshard (\w+) (.*?)(?:#.*)?", line).groups()  # type: ignore[union-attr]
        parser = parser_of(build_parser(), command)
        known = {flag for action in parser._actions for flag in action.option_strings}
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", arguments)) <= known
