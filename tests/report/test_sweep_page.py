"""The page of a sweep: from the command, whole, with names that close no element."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from autoshard import cli
from autoshard.plan import SweepRow
from autoshard.plan.capacity._sweep import _write
from autoshard.report import sweep_page
from tests.report.test_html import HOSTILE
from tests.report.test_sweep import PRICES, ROWS


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    folder = tmp_path / "kept"
    folder.mkdir()
    _write(folder / "sweep.json", {f"row {number}": row for number, row in enumerate(ROWS)})
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


@pytest.mark.parametrize("name", HOSTILE)
def test_names_cannot_leave_their_place(name: str):
    rows = [dataclasses.replace(ROWS[0], mesh=name, plan=name, recipe={"remat": name})]
    rows += [SweepRow("v5e:4x4", None, None, failed=name)]
    page = sweep_page(rows, PRICES)
    assert page.count("<script") == 2 and "<img" not in page
    assert data_of(page)["rows"][0]["mesh"] == name


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("kept --perfetto t.json", "--perfetto is for one plan; kept is a sweep."),
        ("kept -o no/where.html", "no/where.html: the directory "),
        ("kept --price v5p=-1", "argument --price: '-1' is not a positive number"),
        ("kept --price v5q=1", "unknown chip 'v5q'; did you mean"),
        ("plan.json --tokens 1B", "--tokens is for a sweep; plan.json is none that `autoshard sweep --out` kept."),
        ("empty", "empty has no rows yet; run its sweep first."),
        ("damaged.json", "damaged.json is not a file that `autoshard sweep --out` wrote"),
    ],
)
def test_bad_input_gets_one_sentence(
    flags: str, sentence: str, kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(kept.parent)
    (kept.parent / "empty").mkdir()
    _write(kept.parent / "empty" / "sweep.json", {})
    (kept.parent / "damaged.json").write_text('{"format": "autoshard-sweep", "rows": {"a": {}}}')
    assert cli.main(["report", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not list(kept.parent.glob("*.html"))
