"""CONTRIBUTING.md is true: its recipes work, its files exist, and its rooms and shelves are complete."""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autoshard
from autoshard import exports
from autoshard.base import call_rules
from autoshard.cli import main
from autoshard.cost import Topology, calibration, chip_of_kind, load_chip
from autoshard.cost import chip as chips
from autoshard.exports import form_writers
from autoshard.planning import FORMS, Form, Rest
from tests.planning import programs as made
from tests.test_rooms import ROOMS, SHELVES


ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
PATH = r"`((?:autoshard|docs|experiments|tests)/[\w./*-]+)`"


def recipe(name: str) -> str:
    (block,) = re.findall(rf"^```\w+ recipe={name}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    return block


def test_every_file_it_names_exists():
    paths = set(re.findall(PATH, PROSE)) | set(re.findall(r"\]\((?!https?:)([^)#]+)", PROSE))
    compiled = {path for path in paths if path.endswith((".nbi", ".nbc"))}  # written once a kernel has run
    assert len(paths) > 80
    assert [path for path in sorted(paths - compiled) if not any(ROOT.glob(path))] == []


def test_every_name_it_gives_stands_in_its_file():
    named = re.findall(PATH + r"\s+\(((?:`\w+`,?\s*)+)\)", PROSE)
    assert len(named) > 15
    for path, names in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^\s*(?:def|class) {name}\b|^{name}\b.*=|^    def {name}\b", source, re.M), (path, name)


def test_the_table_has_every_room_and_shelf_in_its_order():
    rows = re.findall(r"^\| `autoshard/([\w/]+)` \|", TEXT, re.MULTILINE)
    assert rows[0] == "base"
    assert list(dict.fromkeys(row.partition("/")[0] for row in rows[1:])) == list(ROOMS)
    for room, levels in SHELVES.items():
        places = [ROOT / "autoshard" / room / name for level in levels for name in level]
        folders = [place.name for place in places if (place / "__init__.py").is_file()]
        assert [row.partition("/")[2] for row in rows if row.startswith(f"{room}/")] == folders


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the chips and their calibration, read in place of the shipped ones, in the working directory."""
    cost = tmp_path / "autoshard" / "cost"
    (cost / "chips").mkdir(parents=True)
    for path in (calibration._FILE, *chips._FOLDER.glob("*.json")):
        (cost / path.relative_to(calibration._FILE.parent)).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chips, "_FOLDER", cost / "chips")
    monkeypatch.setattr(calibration, "_FILE", cost / "calibration.json")
    chips._chips.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    chips._chips.cache_clear()


def test_the_recipe_of_a_chip(checkout: Path):
    before = set(chips.chip_names())
    exec(recipe("chip"), {})
    chips._chips.cache_clear()
    (name,) = set(chips.chip_names()) - before
    chip = load_chip(name)
    assert (checkout / "autoshard/cost/chips" / f"{name}.json").is_file()
    assert chip_of_kind(chip.device_kinds[0]) == chip
    topology = f"{name}:4x4"
    assert f"--topology {topology}" in TEXT
    assert Topology.parse(topology).num_devices == 16
    program, mesh = made.two_matmuls(), {"data": 8, "model": 2}
    plan = autoshard.plan(program, topology=topology, mesh=mesh)
    other = autoshard.plan(program, topology="v6e:4x4", mesh=mesh)
    assert plan.topology == topology and plan.prediction.step_time_s < other.prediction.step_time_s
    assert Topology.parse(topology).usable_bytes == chip.usable_bytes_per_device


def test_the_recipe_of_a_chip_leaves_out_nothing(checkout: Path):
    """Remove each of the recipe's two files: the error names what is missing."""
    exec(recipe("chip"), {})
    chips._chips.cache_clear()
    path = checkout / "autoshard/cost/calibration.json"
    document = json.loads(path.read_text())
    del document["chips"]["v8lite"]
    path.write_text(json.dumps(document))
    with pytest.raises(autoshard.UserError, match="calibration.json misses matmul_efficiency, .* of v8lite"):
        autoshard.plan(made.two_matmuls(), topology="v8lite:4x4", mesh={"data": 16})


def test_the_recipe_of_a_rule(capsys: pytest.CaptureFixture[str]):
    try:
        found: dict[str, object] = {}
        exec(recipe("rule"), found)
    finally:
        call_rules.forget("experts")
    plan = found["plan"]
    assert isinstance(plan, autoshard.Plan)
    (call,) = plan.calls
    axes = {axis for spec in call.results for dim in spec.dims for axis in dim}
    assert call.name == "experts" and axes == {"data", "model"} and not plan.unruled
    assert not any(spec.dims[-2] for spec in call.operands[1:]), "a factor that needs replication is split"
    assert capsys.readouterr().out.strip()


def test_the_recipe_of_a_model_family(tmp_path: Path):
    from autoshard.program import open_source
    from autoshard.program.config_files import bundled

    fields = json.loads(recipe("family"))
    assert not any(name.startswith(fields["model_type"]) for name in bundled())
    (tmp_path / "new-tiny.json").write_text(json.dumps(fields))
    program = open_source(f"hf:{tmp_path / 'new-tiny.json'}", train=True, batch=8, seq=16)
    assert program.name == "new-tiny training"
    plan = autoshard.plan(program, topology="v5e:2x2", mesh={"data": 2, "model": 2})
    assert "model.layers.*.mlp.down_proj.weight" in plan.arguments and plan.prediction.fits


def test_the_recipe_of_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Follow the recipe's two steps of code, a fact and a file: each use of forms knows the new one."""
    monkeypatch.setitem(FORMS, "words", Form("words", "a reader of words", Rest.XLA, state=False))
    (tmp_path / "spoken_words.py").write_text(
        "from autoshard.exports.form_writers import writes\n\n\n"
        "@writes('words')\ndef words_text(plan, sentence):\n    return f'{sentence} ' + ', '.join(plan.arguments)\n"
    )
    monkeypatch.setattr(exports, "__path__", [*exports.__path__, str(tmp_path)])
    program, mesh = made.two_matmuls(), {"data": 4, "model": 2}
    plan = autoshard.plan(program, topology="v5e:2x4", mesh=mesh, form="words")
    try:
        text = exports.export_plan(plan, "words", program)
    finally:
        form_writers._WRITERS.pop("words", None)
        sys.modules.pop("autoshard.exports.spoken_words", None)
    assert text.startswith("Predicted with what this form holds: a step of ") and text.endswith("params.up, x")
    assert plan.origin.form == "words" and not plan.pins
    with pytest.raises(autoshard.UserError, match="no export to 'word'; choose from jax, .*, torch-pipelining, words"):
        exports.export_plan(plan, "word")
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    assert re.search(r"^  words +a reader of words$", capsys.readouterr().out, re.MULTILINE)


def test_every_form_has_a_writer_and_is_reported_where_the_recipe_of_an_export_says():
    docs = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \| .* \|$", docs, re.MULTILINE)
    plain = {name: re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell).replace("`", "") for name, cell in rows}
    assert plain == {name: form.help for name, form in FORMS.items()}
    assert re.findall(r"^### `([\w-]+)`$", docs, re.MULTILINE) == list(FORMS)
    assert {name for name, form in FORMS.items() if not form.text} == {"jax-export"}
    for form in FORMS.values():
        if form.text:
            given = inspect.signature(form_writers.writer_of(form).write).parameters
            assert ("program" in given) == form.reads_program
