"""CONTRIBUTING.md is true: its recipes work, its files exist, and its rooms and shelves are complete."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import autoshard
from autoshard.base import call_rules
from autoshard.cost import Topology, calibration, chip_of_kind, load_chip
from autoshard.cost import chip as chips
from autoshard.planning import FORMS
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


def test_every_form_is_said_where_the_recipe_of_an_export_says():
    from autoshard.cli.parser import build_parser, parser_of

    export = parser_of(build_parser(), "export")
    (shown,) = (action.help or "" for action in export._actions if "--to" in action.option_strings)
    docs = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    for form in FORMS.values():
        assert re.search(rf"(?<![\w-]){form.name}(?![\w-])", shown)
        assert f"| `{form.name}` |" in docs
