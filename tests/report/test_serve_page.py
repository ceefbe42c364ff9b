"""The page of ways to serve: it contains the plan's own figures, needs no network, and refers to its own files."""

import json
from pathlib import Path
from typing import Any

import pytest

from autoshard import cli
from autoshard.errors import UserError
from autoshard.serving import ServingLimits, ServingRequests, plan_serving, read_serving, serve_page, serving_figures
from tests.report.test_html import Page


LIMITS = ServingLimits(token_s=0.03)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return serving_figures(plan_serving("hf:llama3-8b", "v6e:2x4", ServingRequests(1000, 500), LIMITS))


def test_the_figures_have_every_way_with_its_commands(figures: dict[str, Any]):
    plan = plan_serving("hf:llama3-8b", "v6e:2x4", ServingRequests(1000, 500), LIMITS)
    assert len(figures["points"]) == len(plan.points) > len(figures["frontier"])
    assert (figures["chip"], figures["chips"]) == ("v6e", 8)
    assert figures["first_limit_s"] is None and figures["token_limit_s"] == 0.03
    (best,) = [each for each in figures["points"] if figures["best"].items() <= each.items()]
    assert best["commands"] == figures["commands"]


def test_the_page_holds_them_and_needs_nothing(figures: dict[str, Any]):
    page = Page(serve_page(figures, {"v6e": 2.7}))
    assert page.links == ["data:,"] and len(page.scripts) == 2
    data = json.loads(page.scripts[0])
    assert data["points"] == figures["points"] and data["output"] == 500 and data["price"] == 2.7 and data["chips"] == 8
    assert data["limits"] == [None, 0.03, None]


def test_what_commands_cannot_say_is_on_the_page():
    made = serving_figures(plan_serving("hf:llama3-8b", "v6e:2x4", ServingRequests(1000, 500, cache="int8")))
    assert "vLLM has no keys and values of int8 on TPUs" in serve_page(made, {})


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = "serve-plan hf:llama3-8b --topology v6e:2x4 --input 1000 --output 500 --json".split()
    assert cli.main(line) == 0
    kept = tmp_path / "serve.json"
    kept.write_text(capsys.readouterr().out)
    assert cli.main(["report", str(kept), "-o", str(tmp_path / "serve.html"), "--price", "v6e=2.7"]) == 0
    assert "<title>Serving hf:llama3-8b on v6e:2x4" in (tmp_path / "serve.html").read_text()
    assert cli.main(["report", str(kept)]) == 2
    assert "holds ways to serve: name the page with --out serve.html." in capsys.readouterr().err
    assert cli.main(["report", str(kept), "-o", str(tmp_path / "other.html"), "--compare", "x.json"]) == 2
    assert "--compare is not for ways to serve" in capsys.readouterr().err
    assert not (tmp_path / "other.html").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"chips": "eight"}, "has no `chips` of the right type"),
        ({"points": []}, "holds no way to serve"),
        ({"points": [{"tensor": 1}]}, "`points.0` in"),
        ({"input": None}, "`input` in"),
        ({"gap_limit_s": "soon"}, "`gap_limit_s` in"),
    ],
)
def test_a_damaged_file_gets_one_sentence(tmp_path: Path, figures: dict[str, Any], change: dict, sentence: str):
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({**figures, **change}))
    with pytest.raises(UserError, match=r"make it again with `autoshard serve-plan") as raised:
        read_serving(file)
    assert sentence in str(raised.value)


def test_other_files_are_no_ways_to_serve(tmp_path: Path):
    for text in ("[]", "{}", "not json", '{"model": 1}'):
        (tmp_path / "x.json").write_text(text)
        assert read_serving(tmp_path / "x.json") is None
    assert read_serving(tmp_path) is None and read_serving(tmp_path / "missing.json") is None
