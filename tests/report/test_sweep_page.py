"""The page of a sweep: written by the command, complete, and safe with names that contain HTML."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from autoshard import cli
from autoshard.planning import SweepRow, save_plan
from autoshard.planning.capacity.capacity_sweep import FORMAT
from autoshard.report import sweep_page
from tests.report.conftest import llama_plan
from tests.report.test_html import HOSTILE
from tests.report.test_sweep import PRICES, ROWS


def write_rows(path: Path, rows: Mapping[str, SweepRow]) -> None:
    """Write a sweep's file with these rows."""
    body = {key: dataclasses.asdict(row) for key, row in sorted(rows.items())}
    path.write_text(json.dumps({"format": FORMAT, "rows": body}, indent=1))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    folder = tmp_path / "kept"
    folder.mkdir()
    write_rows(folder / "sweep.json", {f"row {number}": row for number, row in enumerate(ROWS)})
    return folder


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


@pytest.mark.parametrize("place", ["kept", "kept/sweep.json"])
def test_the_command_writes_a_page_of_a_sweep(
    place: str, kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "sweep.html"
    line = ["report", str(tmp_path / place), "-o", str(page), "--price", "v5p=4.2,v6e=2.7", "--tokens", "15T"]
    assert cli.main(line) == 0
    assert capsys.readouterr().out == f"Written: {page}\n"
    data = data_of(page.read_text())
    assert data["tokens"] == 15e12
    assert data["chips"] == {"v5e": None, "v5p": 4.2, "v6e": 2.7}
    assert [row["topology"] for row in data["rows"]] == ["v5e:16x16", "v5p:8x8x16", "v6e:16x16*4"]
    assert cli.main(["report", str(kept)]) == 0
    assert "s: the fewest chips that fit" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["report", str(kept), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][3]["topology"] == "v6e:16x16*4"


def test_the_pages_of_its_plans_are_written_and_linked(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [dataclasses.replace(row, plan="" if row.failed else f"row {n}.plan.json") for n, row in enumerate(ROWS)]
    write_rows(kept / "sweep.json", {f"row {number}": row for number, row in enumerate(rows)})
    page = tmp_path / "out.html"
    line = ["report", str(kept / "sweep.json"), "-o", str(page), "--plans"]
    assert cli.main(line) == 2
    assert "cannot read the plan file" in capsys.readouterr().err
    assert not page.exists() and not (tmp_path / "out-plans").exists()
    for row in rows:
        if row.plan:
            save_plan(dataclasses.replace(llama_plan(), program_name=row.plan), kept / row.plan)
    assert cli.main(line) == 0
    assert capsys.readouterr().out == f"Written: {page}, and 3 pages of plans in {tmp_path / 'out-plans'}\n"
    links = [row["page"] for row in data_of(page.read_text())["rows"]]
    assert sorted(links) == [f"out-plans/row {number}.plan.html" for number in range(3)]
    for number in range(3):
        text = (tmp_path / "out-plans" / f"row {number}.plan.html").read_text()
        assert f"<title>row {number}.plan.json on v5p:4x8x8" in text
    assert cli.main([*line, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["written"]) == 4


@pytest.mark.parametrize(
    ("plan", "flags", "sentence"),
    [
        ("../out.json", "-o s.html", "is damaged: '../out.json' is no file in the folder of the sweep."),
        ("", "-o s.html", "keeps no plans: sweep with --out FOLDER to have them."),
        ("a.plan.json", "", "--plans writes pages next to the page of the sweep; name that with --out sweep.html."),
    ],
)
def test_pages_of_plans_need_plans_of_the_sweep(
    plan: str,
    flags: str,
    sentence: str,
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(kept.parent)
    write_rows(kept / "sweep.json", {"row": dataclasses.replace(ROWS[0], plan=plan)})
    assert cli.main(["report", "kept", "--plans", *flags.split()]) == 2
    assert sentence in capsys.readouterr().err
    assert sorted(each.name for each in kept.parent.iterdir()) == ["kept"]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_cannot_leave_their_place(name: str):
    rows = [dataclasses.replace(ROWS[0], mesh=name, plan=name, recipe={"remat": name})]
    rows += [SweepRow("v5e:4x4", None, None, failed=name)]
    page = sweep_page(rows, PRICES, pages={name: name})
    assert page.count("<script") == 2 and "<img" not in page
    assert data_of(page)["rows"][0]["page"] == name
    assert data_of(page)["rows"][0]["mesh"] == name


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("kept --perfetto t.json", "--perfetto is for one plan; kept is a sweep."),
        ("kept -o no/where.html", "no/where.html: the directory "),
        ("kept --price v5p=-1", "argument --price: '-1' is not a positive number"),
        ("kept --price v5q=1", "unknown chip 'v5q'; did you mean"),
        ("plan.json --tokens 1B", "--tokens is for a sweep; plan.json was not saved by `autoshard sweep --out`."),
        ("empty", "empty has no rows yet; run its sweep first."),
        ("damaged.json", "damaged.json is not a file that `autoshard sweep --out` wrote"),
    ],
)
def test_bad_input_gets_one_sentence(
    flags: str, sentence: str, kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(kept.parent)
    (kept.parent / "empty").mkdir()
    write_rows(kept.parent / "empty" / "sweep.json", {})
    (kept.parent / "damaged.json").write_text('{"format": "autoshard-sweep", "rows": {"a": {}}}')
    assert cli.main(["report", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not list(kept.parent.glob("*.html"))
