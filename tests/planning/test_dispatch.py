"""The command, `autoshard.plan` and a sweep open the same programs of a source, and make the same plan."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard.cli import main
from autoshard.errors import UserError
from autoshard.planning import load_plan, save_plan
from autoshard.planning.capacity import sweep_task
from autoshard.program import Program, open_source, read_config


MODULE = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
inputs, targets = torch.randn(16, 32), torch.randn(16, 32)


def loss(output, targets):
    return ((output - targets) ** 2).mean()
"""
FUNCTION = """
import autoshard, jax, jax.numpy as jnp


@autoshard.choices(width=[16, 32])
def program(width=64):
    shapes = (width, 16), (8, width)
    return lambda w, x: jnp.tanh(x @ w), tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
"""
TRAIN = {"train": True}
STAGES = {**TRAIN, "stages": 2, "schedule": "1f1b", "microbatches": 2}
OPEN = {**TRAIN, "remat": "auto"}
REMATS = [({**TRAIN, "remat": remat}, {}) for remat in ("none", "dots", "full")]
"""Policies of `OPEN`, each opened once: `full` is slower by its arithmetic, and only forecasts another policy."""
Opened = list[tuple[dict[str, Any], dict[str, Any]]]
"""Options and recipe of each opening of the source."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Record all openings of sources, with the options that a user can set."""
    monkeypatch.delenv("XLA_AUTO_SPMD_MESH", raising=False)
    rows: Opened = []

    def recorded(*source: str, recipe: Mapping[str, Any] | None = None, **options: Any) -> Program:
        given = {name: value for name, value in options.items() if value is not None}
        for name in ("entry", "roles", "kept", "preferred"):
            given.pop(name, None)
        rows.append((given, dict(recipe or {})))
        return open_source(*source, recipe=recipe, **options)

    monkeypatch.setattr("autoshard.program.open_source", recorded)
    monkeypatch.setattr(sweep_task, "open_source", recorded)
    monkeypatch.setattr(sweep_task, "_open_programs", {})
    return rows


def flags(options: Mapping[str, Any]) -> list[str]:
    """Return the options as flags of the command."""
    texts = {name: [] if value is True else [str(value)] for name, value in options.items()}
    return [word for name, values in texts.items() for word in (f"--{name}", *values)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (MODULE, TRAIN, [(TRAIN, {})]),
        (MODULE, STAGES, [(TRAIN, {})]),
        (MODULE, OPEN, REMATS),
        (FUNCTION, {}, [({}, {"width": 16}), ({}, {"width": 32})]),
    ],
    ids=["one program", "by stage", "open options", "own choices"],
)
def test_a_source_is_planned_in_the_same_way_by_all(
    opened: Opened, tmp_path: Path, text: str, options: dict[str, Any], expected: Opened
) -> None:
    source, by_command, by_call = tmp_path / "model.py", tmp_path / "command.json", tmp_path / "call.json"
    source.write_text(text)
    command = ["plan", str(source), "--topology", "cpu:2", "--no-cache", "--quiet", "--out", str(by_command)]
    assert main([*command, *flags(options)]) == 0
    assert opened == expected
    opened.clear()
    save_plan(autoshard.plan(str(source), topology="cpu:2", program_options=options), by_call)
    assert opened == expected
    assert by_call.read_bytes() == by_command.read_bytes()
    opened.clear()
    (row,) = autoshard.sweep(str(source), topologies=["cpu:2"], program_options=options, path=tmp_path / "rows")
    assert opened == [row for number, row in enumerate(expected) if row not in expected[:number]]
    save_plan(load_plan(tmp_path / "rows" / row.plan), by_call)  # a row's plan names its source by the whole path
    assert by_call.read_bytes() == by_command.read_bytes()
    assert row.remat == load_plan(by_command).provenance.get("recipe", {}).get("chosen", {}).get("remat")


def test_levers_that_nobody_set_are_tried_where_the_plain_step_does_not_fit(opened: Opened, tmp_path: Path) -> None:
    """Plan under a limit that the plain step exceeds; options that were set stay as they are."""
    source = tmp_path / "model.py"
    source.write_text(MODULE.replace("randn(16,", "randn(4096,"))
    options: Any = {"topology": "cpu:2", "program_options": TRAIN}
    plain = autoshard.plan(str(source), **options)
    assert opened == [(TRAIN, {})] and plain.origin.recipe is None
    options["memory_limit"] = int(0.8 * plain.prediction.peak_bytes)
    smaller = autoshard.plan(str(source), **options)
    assert smaller.prediction.peak_bytes <= options["memory_limit"] and smaller.origin.recipe is not None
    chosen = smaller.origin.recipe.chosen
    assert chosen["microbatches"] > 1 and smaller.source is not None
    assert smaller.source.options["microbatches"] == chosen["microbatches"]
    options["program_options"] = {**TRAIN, "remat": "none", "microbatches": 1}
    with pytest.raises(autoshard.InfeasibleError, match="no plan fits"):
        autoshard.plan(str(source), **options)


def test_a_function_of_a_remat_policy_is_planned_as_a_source_whose_policy_is_open(
    opened: Opened, tmp_path: Path
) -> None:
    source, by_function, by_source = tmp_path / "model.py", tmp_path / "function.json", tmp_path / "source.json"
    source.write_text(MODULE)
    save_plan(autoshard.plan(str(source), topology="cpu:2", program_options=OPEN), by_source)
    assert opened == REMATS
    made: list[str] = []

    def program(policy: str) -> Program:
        made.append(policy)
        return open_source(str(source), train=True, remat=policy)

    save_plan(autoshard.plan(program, topology="cpu:2"), by_function)
    assert made == [options["remat"] for options, _ in REMATS]
    assert by_function.read_bytes() == by_source.read_bytes()


def test_a_step_in_place_of_a_program_is_named() -> None:
    def step(params: Any, x: Any) -> Any:
        return params * x

    with pytest.raises(UserError, match="`step` takes 2 arguments, as a step does"):
        autoshard.plan(step, topology="cpu:2")  # type: ignore[arg-type]


def test_a_function_with_choices_is_planned_as_a_file_with_them(tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text(FUNCTION)
    of_file = autoshard.plan(str(source), topology="cpu:2").provenance["recipe"]

    @autoshard.choices(width=[16, 32])
    def program(width: int = 64) -> Program:
        return open_source(str(source), recipe={"width": width})

    assert autoshard.plan(program, topology="cpu:2").provenance["recipe"] == of_file


def test_a_problem_of_several_programs_is_not_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "model.py"
    source.write_text(MODULE)
    command = ["plan", str(source), "--topology", "cpu:2", "--save-problem", str(tmp_path / "p.json")]
    assert main([*command, *flags(STAGES)]) == 2
    assert "--save-problem is for one program; leave it out with a program for each stage." in capsys.readouterr().err


def test_a_sweep_counts_the_tokens_of_all_microbatches(tmp_path: Path) -> None:
    config, options = tmp_path / "config.json", {**STAGES, "batch": 4, "seq": 16}
    config.write_text(json.dumps({**read_config("llama-tiny")[1], "num_hidden_layers": 2}))
    (row,) = autoshard.sweep(f"hf:{config}", topologies=["cpu:2"], program_options=options)
    assert not row.failed and row.tokens == 4 * 16
