"""The docs' examples run, their commands work, and the tables of JSON keys are complete."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autoshard
from autoshard.cli import main
from autoshard.cli.parser import build_parser, parser_of
from experiments.lib import command_reference
from tests.compiling import QUICKLY


DOCS = Path(__file__).parent.parent / "docs"
FILES = ("start.md", "first-plan.md", "rules.md", "command.md", "fitting.md", "pipelines.md")
"""Pages with files that examples and commands of any page use."""

BLOCK = re.compile(r"```(\w+)([^\n]*)\n(.*?)```", re.DOTALL)


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [(info.strip(), body) for kind, info, body in BLOCK.findall(text) if kind == language]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of the docs to a folder."""
    folder = tmp_path_factory.mktemp("docs")
    for info, body in [block for page in FILES for block in blocks(page, "python")]:
        if info.startswith("file="):
            (folder / info.removeprefix("file=")).write_text(body)
    return folder


def cached(folder: Path) -> dict[str, str]:
    """Give the pages one cache, as a user has: many of them plan the same programs."""
    return {"AUTOSHARD_CACHE_DIR": str(folder / "cache")}


def run(command: list[str], folder: Path, **variables: str) -> str:
    env = os.environ | {"XLA_FLAGS": QUICKLY} | cached(folder) | variables  # without our own devices
    result = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"
    return result.stdout


EXECUTED = (
    "start",
    "first-plan",
    "fitting",
    "reading",
    "constraints",
    "rules",
    "topologies",
    "modules",
    "torch-modules",
    "code-bases",
    "export",
    "choosing",
    "refining",
    "limits",
    "graphs",
    "serving",
)


FORKING = """
import os, runpy, sys, traceback
import jax, torch, transformers, optax, autoshard.planning, autoshard.program
from autoshard.program.torch_ops.torch_imports import importing_torchax
with importing_torchax():
    import torchax
for name in sys.argv[1:]:
    if (child := os.fork()) == 0:
        sys.argv[:] = [name]
        out = os.open(name + ".out", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1), os.dup2(out, 2)
        try:
            runpy.run_path(name, run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    if os.waitpid(child, 0)[1] == 0:
        os.rename(name + ".out", name + ".done")
"""
"""Code that runs each file in a forked process after the frameworks are imported."""


@pytest.fixture(scope="module")
def examples(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Run the examples of the pages whose tests are selected, and return their names by page."""
    names: dict[str, list[str]] = {}
    selected = [each for each in request.session.items if isinstance(each, pytest.Function)]
    for page in [each.callspec.params["page"] for each in selected if each.originalname == "test_the_examples_run"]:
        bodies = [body for info, body in blocks(f"{page}.md", "python") if info.startswith("after=")]
        names[page] = [f"example_{page}{number}.py" for number in range(len(bodies))]
        for name, body in zip(names[page], bodies, strict=True):
            (folder / name).write_text(body)
    run(["-c", FORKING, *(name for each in names.values() for name in each)], folder)
    return names


# Other tests plan models of the same libraries as `code-bases`.
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.full] * (page == "code-bases")) for page in EXECUTED]
)
def test_the_examples_run(page: str, examples: dict[str, list[str]], folder: Path):
    assert examples[page]
    for name in examples[page]:
        done = folder / f"{name}.done"
        assert done.exists(), (folder / f"{name}.out").read_text()
        assert done.read_text().strip()


def test_the_torch_xla_script_is_planned_and_learns(folder: Path):
    ((settings, script),) = re.findall(
        r"^((?:\w+=\S+ )+)python (\w+\.py)$", (DOCS / "start.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    lines = run([script], folder, **dict(each.split("=", 1) for each in settings.split())).splitlines()
    losses = [float(line.split()[1]) for line in lines if re.match(r"\d ", line)]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2]
    assert lines[-1].startswith("{'data': 4, 'model': 2}")


def commands(page: str) -> list[str]:
    lines = "\n".join(body for _, body in blocks(page, "console")).splitlines()
    return [line.removeprefix("$ autoshard ") for line in lines if line.startswith("$ autoshard ")]


COMMANDS = (
    "start.md",
    "first-plan.md",
    "fitting.md",
    "constraints.md",
    "comparing.md",
    "diagnosing.md",
    "graphs.md",
    "sweeping.md",
    "serving.md",
    "command.md",
    "pipelines.md",
)
"""Pages whose commands run, in the order in which they stand."""

REPEATED = ("first-plan.md", "fitting.md", "pipelines.md", "serving.md")
"""Pages with commands whose kinds other tests run on smaller models."""

LONG = re.compile(r"sweep |.* --(remat|stages) auto ")
"""Commands that plan many times; other tests run them on smaller programs."""


@pytest.mark.parametrize(
    ("page", "long"),
    [
        *(pytest.param(page, False, marks=[pytest.mark.full] * (page in REPEATED)) for page in COMMANDS),
        *(pytest.param(page, True, marks=pytest.mark.full) for page in ("fitting.md", "sweeping.md", "pipelines.md")),
    ],
)
def test_the_commands_shown_work(
    page: str, long: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    for name, value in cached(folder).items():
        monkeypatch.setenv(name, value)
    # Without the compiler's minute. Another test checks that it is shown with existing flags.
    lines = [line for line in commands(page) if not line.startswith("compile ") and bool(LONG.match(line)) is long]
    assert lines
    # A command that reads and writes no file prints the same on each page that shows it.
    earlier = [line for each in COMMANDS[: COMMANDS.index(page)] for line in commands(each)]
    shown = {line for line in earlier if " hf:" in line and not re.search(r"\.json|\.html", line)}
    for line in lines:
        if line in shown:
            continue
        assert main([*line.split(), "--quiet"]) == 0, line
        assert capsys.readouterr().out.strip(), line


def test_every_command_shown_anywhere_has_its_flags():
    shown = [line for page in DOCS.glob("*.md") for line in commands(page.name)]
    assert any(line.startswith("compile ") for line in shown)
    for line in shown:
        name, *words = line.split()
        known = {flag for action in parser_of(build_parser(), name)._actions for flag in action.option_strings}
        assert {word for word in words if word.startswith("-")} <= known, line


def test_the_reference_of_the_command_is_the_parsers():
    text = command_reference.PAGE.read_text(encoding="utf-8")
    assert text == command_reference.page(text), "run `python experiments/lib/command_reference.py`"


def test_no_example_is_left_out():
    """Allow Python that is not executed only on pages of PyTorch/XLA, whose scripts other tests run."""
    left_out = {
        page.stem
        for page in DOCS.glob("*.md")
        for info, _ in blocks(page.name, "python")
        if not info.startswith(("after=", "file="))
    }
    # EasyDeL and MaxText need another Python.
    assert left_out <= {"torch-xla", "code-bases", "maxtext"}
    assert {page.stem for page in DOCS.glob("*.md") if "```python after=" in page.read_text()} == set(EXECUTED)


def test_links_between_pages_lead_somewhere():
    for page in DOCS.glob("*.md"):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)  # without code
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (DOCS / target).exists(), f"{page.name}: {target}"


def test_every_public_name_is_in_the_reference():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    named = {name.rpartition(".")[2] for name in re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.MULTILINE)}
    assert {*autoshard._HOMES, "plan", "UserError", "InfeasibleError"} <= named
