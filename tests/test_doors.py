"""Small commands: lists, estimates and completion, as a user runs them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from autoshard import cli
from autoshard.cli.parser import build_parser
from autoshard.cost import Topology, chip_names, slice_names
from autoshard.program import bundled
from tests.test_cli import commands


def answer(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert cli.main([*line, "--quiet"] if line[0] not in ("list", "completion") else [*line]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_everything_that_can_be_named_is_listed(capsys: pytest.CaptureFixture[str]):
    shown = answer(capsys, "list", "models")
    assert all(f"hf:{name}" in shown for name in bundled())
    shown = answer(capsys, "list", "chips")
    assert all(name in shown for name in chip_names())
    rows = json.loads(answer(capsys, "list", "topologies", "--json"))["topologies"]
    named = {row["slice"] for row in rows} - {None}
    assert len(rows) > 200 and named <= set(slice_names()) and len(named) > 200
    shown = answer(capsys, "list", "topologies", "v6e:2x4*1-2")
    assert [line.split()[0] for line in shown.splitlines()[2:]] == ["v6e:2x4", "v6e:2x4*2"]
    assert "v6e-8" in shown and "500" not in shown
    chips = {row["name"]: row for row in json.loads(answer(capsys, "list", "chips", "--json"))["chips"]}
    of_one = json.loads(answer(capsys, "list", "topologies", "H100-SXM", "--json"))["topologies"]
    assert [row["name"] for row in of_one] == ["h100:1", "h100:2", "h100:4", "h100:8"]
    assert of_one[0]["memory_bytes"] == chips["h100"]["memory_bytes"] == Topology.parse("h100:1").usable_bytes


def test_an_estimate_shows_memory_by_kind_for_each_policy(capsys: pytest.CaptureFixture[str]):
    line = ("estimate", "hf:llama3-8b", "--train", "--topology", "v5p:4x4x4", "--batch", "64", "--seq", "8192")
    shown = answer(capsys, *line)
    assert shown.startswith("hf:llama3-8b, 8.03 G parameters: a training step of 64 x 8192 tokens")
    for word in ("remat none", "remat dots", "remat full", "parameters", "optimizer state", "saved", "tokens/s"):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 80
    rows = json.loads(answer(capsys, *line, "--json"))["rows"]
    assert [row["remat"] for row in rows] == ["none", "dots", "full"]
    assert all(row["peak_bytes"] == pytest.approx(sum(row["bytes"].values())) for row in rows)


def test_an_estimate_of_several_topologies_has_a_line_for_each(capsys: pytest.CaptureFixture[str]):
    line = ("estimate", "hf:llama3-8b", "--train", "--topology", "v5e:8x*,h100:8*3", "--batch", "64", "--seq", "4096")
    lines = answer(capsys, *line).splitlines()
    assert [each.split()[0] for each in lines if each.startswith("v5e:")] == ["v5e:8x8", "v5e:8x16"]
    assert "no layout of the 24 devices of h100:8*3" in " ".join(lines)


def test_what_is_no_decoder_is_traced(capsys: pytest.CaptureFixture[str]):
    shown = answer(capsys, "estimate", "hf:bert-tiny", "--train", "--topology", "v5e:2x2", "--batch", "8")
    assert "The least that any plan needs" in shown and "optimizer state" in shown


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("list planets", "argument {models,topologies,chips}: invalid choice: 'planets' (choose from "),
        ("list", "the following arguments are required: {models,topologies,chips}"),
        ("list models v5e:*", "a pattern is for topologies: write `autoshard list topologies 'v5e:*'`."),
        ("list topologies v5e:9x*", "topology 'v5e:9x*' stands for none; v5e comes in 1x1"),
        ("estimate step.py --topology v5e:4x4", "an estimate is of a configuration, hf:CONFIG; found 'step.py'"),
        ("estimate hf:llama3-9b --topology v5e:4x4", "did you mean `llama3-8b`"),
        ("estimate hf:gpt2 --topology v5e:4x4 --batch 0", "argument --batch: '0' is not a positive whole number"),
        ("estimate hf:gpt2 --topology v5e:4x4 --batch 5", "no layout of the 16 devices of v5e:4x4 divides a batch of"),
        ("completion fish", "argument shell: invalid choice: 'fish'"),
    ],
)
def test_bad_input_gets_one_sentence(line: str, sentence: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and sentence in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("command", sorted(commands()))
def test_help_fits_80_columns(command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    (parser,) = (parser for name, parser in commands().items() if name == command)
    assert [line for line in parser.format_help().splitlines() if len(line) > 80] == []


def test_the_command_s_own_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert [line for line in build_parser().format_help().splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_every_command_can_be_completed(shell: str, capsys: pytest.CaptureFixture[str]):
    shown = answer(capsys, "completion", shell)
    assert all(name in shown for name in commands())


def test_bash_completes_a_command_and_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash is here")
    (tmp_path / "completion").write_text(answer(capsys, "completion", "bash"))

    def completed(*words: str) -> list[str]:
        code = 'source completion; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_autoshard; echo "${COMPREPLY[@]}"'
        done = subprocess.run([bash, "-c", code, "-", *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("autoshard", "swe") == ["sweep"]
    assert completed("autoshard", "list", "top") == ["topologies"]
    assert "--topology" in completed("autoshard", "estimate", "--t")
