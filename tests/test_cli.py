"""The command's contract: its flags, its sentences, its exit codes, and the stream of each output."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard import __version__, cli
from autoshard.cli.parser import build_parser
from tests.command import run


PROGRAM = {
    *("--batch", "--dtype", "--entry", "--image", "--infer", "--optimizer", "--param-dtype", "--remat", "--seq"),
    *("--cache", "--capacity-factor", "--roles", "--rules", "--serve", "--state-dtype", "--train"),
    *(
        "--attention",
        "--exchange",
        "--experts",
        "--imbalance",
        "--lora",
        "--pad",
        "--loss-chunks",
        "--quantize",
        "--sample",
        "--microbatches",
        "--gradient-groups",
        "--host",
        "--schedule",
        "--stages",
    ),
}
LIMITS = {"--memory-limit", "--mesh", "--no-calibration", "--no-refine-axes", "--seed", "--time-limit", "--topology"}
PLANNING = LIMITS | {"--axis-only", "--forbid", "--ignore-constraints", "--pin", "--pin-from", "--replicate"}
PLANNING |= {"--force", "--save-problem", "--xla-flags"}
FLAGS = {
    "compare": {
        "--candidates",
        "--compile",
        "--debug",
        "--json",
        "--measure",
        "--no-cache",
        "--on",
        "--quiet",
        "--steps",
    }
    | PROGRAM
    | PLANNING,
    "compile": {"--debug", "--force", "--hlo", "--json", "--plan", "--quick", "--quiet", "--time-limit"} | PROGRAM,
    "diff": {"--debug", "--json", "--quiet"},
    "doctor": {"--debug", "--json", "--quiet"},
    "plan": {"--candidates", "--compile", "--debug", "--for", "--json", "--no-cache", "--out", "-o", "--quiet"}
    | PROGRAM
    | PLANNING,
    "degrees": {
        *("--batch", "--debug", "--force", "--framework", "--json", "--out", "-o", "--quiet", "--seq", "--topology"),
    },
    "completion": {"--debug", "--json", "--quiet"},
    "estimate": {
        *("--batch", "--cache", "--debug", "--infer", "--json", "--param-dtype", "--quiet", "--remat", "--seq"),
        *("--serve", "--state-dtype", "--topology", "--train"),
    },
    "list": {"--debug", "--json", "--quiet"},
    "rl-plan": {
        *("--answer", "--answers", "--cache-dtype", "--debug", "--framework", "--json", "--longest", "--prompt"),
        *("--quiet", "--reference", "--scores", "--sequences", "--staleness", "--topology", "--updates", "--weights"),
    },
    "serve-plan": {
        *(
            "--cache-dtype",
            "--check",
            "--debug",
            "--force",
            "--gap",
            "--input",
            "--jax",
            "--json",
            "--output",
            "--quiet",
        ),
        *("--sample", "--topology", "--tpot", "--ttft", "--weights"),
    },
    "explain": {"--debug", "--entry", "--json", "--program", "--quiet", "--solve", "--time-limit"},
    "export": {"--debug", "--entry", "--force", "--json", "--out", "--program", "--quiet", "--to", "-o"},
    "graph": {"--debug", "--force", "--json", "--out", "--plan", "--quiet", "--whole", "-o"} | PROGRAM,
    "measure": {"--check", "--debug", "--json", "--plan", "--profile", "--quiet", "--steps", "--tolerance"}
    | PROGRAM
    | PLANNING,
    "refine": {
        *("--compile-limit", "--debug", "--json", "--judge", "--on", "--out", "-o", "--plans", "--quiet", "--rounds"),
        *("--steps", *PROGRAM),
        *(PLANNING - {"--save-problem"}),
    },
    "report": {
        *("--compare", "--compiled", "--debug", "--json", "--measured", "--out", "--perfetto", "--profile", "--quiet"),
        *("--force", "--plans", "--price", "--tokens", "-o"),
    },
    "sweep": {
        *("--chips", "--debug", "--jobs", "--json", "--no-cache", "--out", "--plot", "--price", "--quiet", "--tokens"),
        *("--force", "--on", "--xla-flags", "-o"),
    }
    | PROGRAM
    | LIMITS,
    "validate": {
        "--assume",
        "--compile",
        "--data",
        "--debug",
        "--force",
        "--html",
        "--json",
        "--only",
        "--pairs",
        "--plot",
        "--quiet",
    },
    "solve": {
        "--debug",
        "--force",
        "--iterations",
        "--json",
        "--out",
        "-o",
        "--quiet",
        "--seed",
        "--threads",
        "--time-limit",
    },
}
"""Every flag of every command: a new option must be added here too."""


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
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
        (
            "plan x.py --topology v5e:4x4 --xla-flags fast",
            "argument --xla-flags: 'fast' is not an XLA flag; write them as --name=value, as in LIBTPU_INIT_ARGS",
        ),
        (
            "plan x.py --topology v5e:4x4 --xla-flags sparsecore",
            "needs SparseCores for collectives, which v5e has not.",
        ),
        ("validate --pairs no.json", "pairs file no.json cannot be read: No such file or directory"),
        (
            "validate --pairs p.json --data d.json",
            "--data d.json and --pairs are two questions: leave one of them out.",
        ),
        ("validate --compile", "--compile is for measured pairs: write `validate --pairs --compile ...`."),
        ("validate --pairs --only zzz", "is called zzz"),
        ("degrees x.py --topology h100:8 --batch 8 --seq 1024", "degrees are chosen for a configuration, hf:CONFIG;"),
        ("degrees hf:gpt2 --topology h100:8 --batch 8 --seq 1024", "gpt2 is of the type gpt2; degrees are chosen for"),
        ("degrees hf:llama3-8b --topology v5e:2x4 --batch 8 --seq 1024", "v5e:2x4 has no GPUs; degrees are chosen for"),
        ("degrees hf:llama3-8b --topology h100:12 --batch 8 --seq 1024", "12 in equal parts are h100:6*2"),
        ("degrees hf:llama3-8b --topology h100:8 --batch 7 --seq 999999", "nothing fits h100:8: the least that"),
        ("validate --pairs vtrain --only zzz", "no problem of vtrain is called zzz."),
        ("validate --pairs vtrain --compile", "--compile is for measured plans of TPUs; vtrain has runs on GPUs."),
        ("validate --plot p.png", "--plot is for measured pairs: write `validate --pairs --plot p.png`."),
        ("plan x.py --topology cpu:8 --tpology v", "`autoshard plan` has no flag --tpology; did you mean --topology?"),
        (
            "--quiet plan x.py --topology cpu:8",
            "--quiet stands before the command; write `autoshard COMMAND ... --quiet`.",
        ),
        ("plan x.py --topology cpu:8 --mem 3", "`autoshard plan` has no flag --mem; did you mean --memory-limit?"),
        ("plan x.py --topolgy cpu:8", "`autoshard plan` has no flag --topolgy; did you mean --topology?"),
        ("plan x.py --topology cpu:8 --zzz", "`autoshard plan` has no flag --zzz; see `autoshard plan --help`."),
        ("plan x.py y.py --topology cpu:8", "`autoshard plan` has no argument y.py; see `autoshard plan --help`."),
        (
            "plan x.py --pin a=8/data x 8 --topology cpu:8",
            "`autoshard plan` has no argument x; put a spec with spaces in quotes, or see `autoshard plan --help`.",
        ),
        ("plan x.py --topology cpu:8 --batch 0", "argument --batch: '0' is not a positive whole number"),
        ("plan x.py --topology cpu:8 --time-limit nan", "argument --time-limit: 'nan' is not a positive number of"),
        ("plan x.py --topology cpu:8 --memory-limit 1G", "argument --memory-limit: '1G' is not a positive number of"),
        ("plan x.py --topology cpu:8 --capacity-factor 0", "argument --capacity-factor: '0' is not a positive number"),
        ("plan x.py --topology cpu:8 --roles params", "argument --roles: 'params' is not NAME=ROLE, such as"),
        ("plan x.py --topology cpu:8 --roles a5-a2=batch", "argument --roles: 'a5-a2' ends before it begins"),
        ("plan x.py --topology cpu:8 --serve chat", "argument --serve: invalid choice: 'chat'"),
        ("plan x.py --topology cpu:8 --train --infer", "argument --infer: not allowed with argument --train"),
        ("plan x.py --topology cpu:8 --out no/where.json", "where.json: the directory "),
        ("plan x.py --topology cpu:8 --out .", "--out . is a directory; name a file."),
        ("plan x.py --topology cpu:8", "there is no file `x.py`; give the path of a Python file"),
        ("plna x.py", "invalid choice: 'plna'"),
        ("graph x.py --out g.dot", "g.dot: a graph is written as .graphml, .svg, .json; .dot is none of them."),
        ("graph x.py --out no/g.svg", "g.svg: the directory "),
        ("graph x.py --whole --out g.graphml", "--whole is for the picture; name it with --out graph.svg."),
        ("graph x.py --plan plan.json", "plan.json"),
        ("sweep x.py --topology cpu:8,,cpu:4", "argument --topology: 'cpu:8,,cpu:4' is not a list A,B,..."),
        ("sweep x.py --topology cpu:8 --batch 8,0", "argument --batch: '0' is not a positive whole number"),
        (
            "sweep x.py --topology cpu:8 --remat all",
            "argument --remat: remat `all` does not exist; use `none`, `dots` or `full`",
        ),
        (
            "sweep x.py --topology cpu:8 --price 3",
            "argument --price: '3' is not CHIP=PRICE, such as v5e=1.2, or a file",
        ),
        ("sweep x.py --topology cpu:8 --price v5e=-1", "argument --price: '-1' is not a positive number"),
        ("sweep x.py --topology cpu:8 --price no.json", "argument --price: no.json cannot be read: No such file"),
        ("sweep x.py --topology cpu:8 --tokens 0", "argument --tokens: '0' is not a number of tokens from 1 on"),
        ("sweep x.py --topology v5q:*", "unknown chip 'v5q'; did you mean v5 or v5p or v5e"),
        ("sweep x.py --topology v5e:9x*", "topology 'v5e:9x*' stands for none; v5e comes in 1x1"),
        ("sweep x.py --topology v5e:8x* --chips 4", "--chips 4 leaves no topology: the smallest, v5e:8x8, has 64"),
        ("sweep x.py --topology cpu:8 --price v9=3", "v9"),
        ("sweep x.py --topology cpu:8 --on dask", "argument --on: 'dask' is not ray, HOST:PORT or ray://HOST:PORT"),
        ("sweep x.py --topology cpu:8 --on 127.0.0.1:1 --out s", "no Ray can be reached at 127.0.0.1:1 (Connection"),
        ("compare x.py --topology v5e:2x2 --on ray", "--on is for --compile: what is measured runs on the devices"),
        ("refine x.py --topology cpu:8 --on ray", "--on is for --judge compile: what is measured runs on the devices"),
        ("refine x.py --topology v5e:2x2 --on 127.0.0.1:1", "--on 127.0.0.1:1: no Ray can be reached at 127.0.0.1:1"),
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


def test_debug_shows_where_an_error_was_raised(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["plan", "missing.py", "--topology", "cpu:8", "--debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback (most recent call last):" in error
    assert error.splitlines()[-1].startswith("autoshard: there is no file `missing.py`")


def test_planning_looks_for_no_accelerator():
    bare = {"JAX_PLATFORMS": None, "PJRT_DEVICE": None}
    done = run("plan", "hf:gpt2-tiny", "--topology", "cpu:2", "--mesh", "data=2", "--no-cache", "--quiet", env=bare)
    assert done.returncode == 0
    assert done.stderr == ""


def test_only_a_process_of_its_own_is_set_up_for_the_command():
    code = (
        "import gc; before = gc.get_threshold(); from autoshard.cli import main; {}; print(before, gc.get_threshold())"
    )
    settings = []
    for call in ("main()", "main(['diff', 'no', 'no'])"):
        done = subprocess.run(
            [sys.executable, "-c", code.format(call), "diff", "no", "no"], capture_output=True, text=True, check=True
        )
        settings.append(done.stdout.replace(") (", ")|(").strip().split("|"))
    (before, own), (_, shared) = settings
    assert own != before == shared


def test_no_command_shows_the_help_and_fails():
    result = run()
    assert result.returncode == 2
    assert result.stdout == ""
    assert "usage: autoshard" in result.stderr
    assert result.stderr.endswith("start with `autoshard plan PROGRAM --topology TOPOLOGY`.\n")


def test_version():
    assert run("--version").stdout == f"autoshard {__version__}\n"


@pytest.mark.parametrize("devices", ["v5q:2x4", "v5e:2x4 --mesh data=3"])
def test_a_wrong_topology_or_mesh_is_refused_without_the_planner(devices: str):
    code = f"""
import sys, autoshard.cli
code = autoshard.cli.main("plan step.py --topology {devices}".split())
print(code, sorted({{"jax", "torch", "autoshard.planning", "autoshard.program"}} & set(sys.modules)))
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "2 []\n" and shown.stderr.startswith("autoshard: ")
