"""The README's example runs, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

from autoshard.cli.parser import build_parser, parser_of


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run_example(number: int, folder: Path) -> list[str]:
    """The lines that one of the two examples prints."""
    code = EXAMPLES[number]
    (folder / "example.py").write_text(code)
    result = subprocess.run([sys.executable, "example.py"], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_the_first_example_plans(tmp_path: Path):
    lines = run_example(0, tmp_path)
    assert any(" over data" in line for line in lines[:-1])
    assert re.fullmatch(r"[1-9]\d* ms a step", lines[-1])


def test_the_second_example_prints_a_falling_loss(tmp_path: Path):
    losses = [float(line.split()[0]) for line in run_example(1, tmp_path)[1:]]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
    assert (tmp_path / "step.plan.json").is_file()


def test_install_and_an_example_are_on_the_first_screen():
    screen = README.splitlines()[:35]
    assert any("pip install ." in line for line in screen)
    start = screen.index("```python")
    code = screen[start + 1 : screen.index("```", start)]
    assert "\n".join(code) + "\n" == EXAMPLES[0]
    assert len([line for line in code if line]) <= 12
    assert "\n".join(screen) in README.partition("<!-- demo")[0]


def test_what_it_links_to_is_there():
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^## (.+)$", README, re.MULTILINE)
    }
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        path, _, heading = target.partition("#")
        assert (ROOT / path).exists() and (path or heading in headings), target


def test_it_opens_with_the_two_commands():
    assert README.split("```")[1].split()[:2] == ["make", "demo"]
    assert README.split("```")[1].splitlines()[2].split()[:2] == ["make", "test"]


def test_the_commands_it_shows_exist():
    (block,) = (text for text in README.split("```") if "\nautoshard plan PROGRAM" in text)
    for line in block.strip().splitlines():
        command, arguments = re.fullmatch(r"autoshard ([\w-]+) (.*?)(?:#.*)?", line).groups()  # type: ignore[union-attr]
        parser = parser_of(build_parser(), command)
        known = {flag for action in parser._actions for flag in action.option_strings}
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", arguments)) <= known
