"""Tables of measured plans next to our predictions."""

import io
import json
import math
import pathlib
import re

import pytest
from rich.console import Console

from autoshard.errors import UserError
from autoshard.validation import PairGroup, PairRow, pair_figures, pair_report, plot_pairs, write_pair_page


GROUPS = (
    PairGroup(
        "a <group>", "owner/name@0:x.md", "TPU v5p", True, True,
        (
            PairRow("fsdp=4", "fsdp=4", 1.0, 1.2, 1.3, 8, 2 << 30, 3 << 30, True, True),
            PairRow("tp=4", "tp=4", 2.0, 2.2, 2.3, 8, None, 3 << 30, False, True),
            PairRow("ep=4", "ep=4", 3.0, skipped="experts are not rebuilt"),
        ),
    ),
    PairGroup(
        "b", "s", "H100", True, False, (PairRow("dp=8", "dp=8", None, 1.0, 1.0, 8, None, 1 << 30, True, False),) * 2
    ),
)  # fmt: skip


def shown() -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(pair_report(GROUPS))
    return out.getvalue()


def test_the_terminal_shows_rows_scores_and_reasons():
    text = shown()
    assert "+20.0 %" in text and "no (measured yes)" in text
    assert "tau 1.00 over 1 decided pairs" in text and "we would choose fsdp=4" in text
    assert "a <group>, ep=4: experts are not rebuilt" in text


def test_figures_can_be_written_as_json():
    document = json.loads(json.dumps(pair_figures(GROUPS), allow_nan=False))
    first, second = document["groups"]
    assert first["rows"][0] == {
        "plan": "fsdp=4", "measured_s": 1.0, "predicted_s": 1.2, "unseen_s": 1.3, "measured_gib": 2.0,
        "predicted_gib": 3.0, "fits": True, "measured_fits": True, "skipped": None, "assumed": [], "note": None,
    }  # fmt: skip
    assert first["rows"][2]["skipped"] == "experts are not rebuilt" and first["regret"] == 1.0
    assert document["summary"]["rows"] == 5 and document["tpu"]["rows"] == 3
    assert document["tpu"]["memory_error_median"] == pytest.approx(0.5)
    assert second["regret"] is None


def test_one_page_holds_everything_and_is_the_same_twice(tmp_path: pathlib.Path):
    write_pair_page(GROUPS, tmp_path / "a.html")
    write_pair_page(GROUPS, tmp_path / "b.html")
    page = (tmp_path / "a.html").read_text()
    assert page == (tmp_path / "b.html").read_text()
    assert "<svg" in page and "a &lt;group&gt;" in page and "experts are not rebuilt" in page
    assert not re.search(r"(?:src|href)\s*=\s*[\"']https?:", page)  # the page loads nothing


def test_pictures_end_as_their_kind(tmp_path: pathlib.Path):
    plot_pairs(GROUPS, tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    with pytest.raises(UserError, match="^cannot write .*: a picture ends in one of"):
        plot_pairs(GROUPS, tmp_path / "a.nothing")
    with pytest.raises(UserError, match="nothing to plot"):
        plot_pairs(GROUPS[1:], tmp_path / "b.svg")


def test_a_plan_that_ran_out_of_memory_is_named():
    rows = (
        PairRow("a", "a", 1.0, 1.0, 1.0, 8, None, 1, True, True),
        PairRow("b", "b", 2.0, 2.0, 2.0, 8, None, 1, True, True),
    )
    bad = PairGroup("c", "s", "TPU", True, True, (*rows, PairRow("o", "o", None, 0.5, 0.5, 8, None, 1, True, False)))
    assert bad.regret == math.inf
    assert pair_figures([bad])["groups"][0]["chosen_ran_out_of_memory"] is True
    out = io.StringIO()
    Console(file=out, width=120).print(pair_report([bad]))
    assert "ran out of memory" in out.getvalue()
