"""The README is short, its example runs, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

from autoshard.cli.parser import build_parser, parser_of


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURES = ROOT / "docs" / "figures.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_plans(tmp_path: Path):
    (code,) = EXAMPLES
    (tmp_path / "example.py").write_text(code)
    result = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    *words, step = result.stdout.splitlines()
    assert any(" over " in line for line in words)
    assert re.fullmatch(r"[1-9]\d* ms a step", step)


def test_it_is_short():
    assert len(README.splitlines()) <= 120
    for text in (README, FIGURES.read_text(encoding="utf-8")):
        rows = (re.sub(r"\]\([^)]*\)", "", line) for line in text.splitlines() if line.startswith("|"))
        for row in rows:
            assert len(row.replace("|", " ").split()) <= 25, row


def test_install_and_an_example_are_on_the_first_screen():
    screen = README.splitlines()[:42]
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
    text = README.replace("\\\n", "")
    code = "\n".join(text.split("```")[1::2])
    lines = re.findall(r"^autoshard ([\w-]+) ([^#\n]*)", code, re.MULTILINE)
    assert {"plan", "compile", "export"} <= {command for command, _ in lines}
    for command, arguments in lines:
        parser = parser_of(build_parser(), command)
        known = {flag for action in parser._actions for flag in action.option_strings}
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", arguments)) <= known
