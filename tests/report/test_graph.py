"""A program's graph as files for other tools, as a picture, and in figures."""

import dataclasses
import io
import json
import re
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import networkx
import pytest
from rich.console import Console

from autoshard.errors import UserError
from autoshard.planning import Plan, ProgramGraph
from autoshard.program import trace
from autoshard.report import graph_figures, graph_form, graph_report, graph_svg, write_graph
from autoshard.report.drawing.graph_boxes import draw_boxes
from autoshard.report.drawing.graph_svg import COLUMNS, _box
from tests.graph.programs import f32
from tests.planning import programs


SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return programs.planned("wide mlp", "v5e:4x4", "data=4,model=4").plan


@pytest.fixture(scope="module")
def priced(plan: Plan) -> ProgramGraph:
    return plan.graph(programs.program("wide mlp"))


@pytest.fixture
def bare() -> ProgramGraph:
    """Graph of two loops, forward and backward, without a plan."""
    return programs.program("decoder").graph()


@pytest.mark.parametrize("planned", [False, True])
def test_graphml_is_read_back_with_every_node_and_edge(
    planned: bool, bare: ProgramGraph, priced: ProgramGraph, tmp_path: Path
):
    graph = priced if planned else bare
    write_graph(graph, tmp_path / "g.graphml")
    made, read = graph.to_networkx(), networkx.read_graphml(tmp_path / "g.graphml", force_multigraph=True)
    assert set(read) == set(made) and read.number_of_edges() == made.number_of_edges()
    for node, said in made.nodes(data=True):
        assert {key for key in said if not isinstance(said[key], list)} <= set(read.nodes[node])
        for key in ("kind", "name", "block", "flops", "bytes_read", *(("seconds",) if planned else ())):
            assert read.nodes[node][key] == said[key]
    said = next(said for *_, said in read.edges(data=True) if said["shape"])
    assert re.fullmatch(r"\d+( x \d+)*", said["shape"]) and isinstance(said["bytes"], int)
    if planned:
        found = [each for *_, text in read.edges(data="collectives") for each in json.loads(text or "[]")]
        theirs = [each for *_, own in made.edges(data="collectives") for each in own]
        assert sorted(map(str, found)) == sorted(map(str, theirs)) and found


def test_node_link_json_is_the_graph_itself(priced: ProgramGraph, tmp_path: Path):
    write_graph(priced, tmp_path / "g.json")
    read = networkx.node_link_graph(json.loads((tmp_path / "g.json").read_text()), edges="edges")
    assert networkx.utils.graphs_equal(read, priced.to_networkx())


@pytest.mark.parametrize("name", sorted(programs.PROGRAMS))
def test_the_picture_of_every_program_is_well_formed(name: str):
    graph = programs.program(name).graph()
    for whole in (False, True):
        root = xml.etree.ElementTree.fromstring(graph_svg(graph, whole))
        boxes = [each for each in root.iter(f"{SVG}g") if each.get("class", "").startswith("box")]
        assert boxes and all(each.find(f"{SVG}title") is not None for each in boxes)
        places = [each.find(f"{SVG}rect") for each in boxes]
        corners = [tuple(float(place.get(key)) for key in ("x", "y", "width", "height")) for place in places]
        for x, y, width, height in corners:
            assert 0 <= x and x + width <= float(root.get("width")) and y + height <= float(root.get("height"))
            others = [each for each in corners if each[:2] != (x, y)]
            assert len(others) == len(corners) - 1
            assert not any(abs(x - a) < max(width, c) and -height < y - b < d for a, b, c, d in others), "overlap"
        if whole:
            assert len(boxes) == len(graph.to_networkx())


def test_boxes_hold_every_op_but_constants_and_stand_below_what_they_take(bare: ProgramGraph):
    made = bare.to_networkx()
    drawing = draw_boxes(made, whole=False, columns=COLUMNS)
    drawn = [node for box in drawing.boxes for node in box]
    ops = {node for node, said in made.nodes(data=True) if said["op_class"] not in ("", "free")}
    assert sorted(drawn) == sorted(ops)
    assert len(drawing.boxes) < len(ops) / 2
    for box in drawing.boxes:
        assert sum(made.nodes[node]["op_class"] == "heavy" for node in box) <= 1
    row = {box: k for k, own in enumerate(r for section in drawing.sections for r in section.rows) for box in own}
    assert sorted(row) == list(range(len(drawing.boxes)))
    assert all(row[source] < row[target] for source, target in drawing.lines)
    assert [section.title.split(",")[0] for section in drawing.sections][:3] == [
        "outside of loops", "loop 0", "outside of loops",
    ]  # fmt: skip


def boxes_of(fn: Callable[..., Any], *args: Any) -> list[set[str]]:
    """Return the kinds of ops in every box."""
    made = trace(fn, args).graph().to_networkx()
    drawing = draw_boxes(made, whole=False, columns=COLUMNS)
    return [{made.nodes[node]["kind"] for node in box} for box in drawing.boxes]


def test_a_scalar_puts_no_boxes_together_unless_each_needs_the_other():
    def update(params: Any, x: Any) -> Any:
        rate = 0.1 / (1.0 + x[0, 0])
        return [p - rate * jnp.sin(p) for p in params]

    def normalised(w: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w)
        return h / jnp.sqrt(jnp.sum(h * h))

    boxes = boxes_of(update, [f32(64, 64), f32(32, 16)], f32(32, 64))
    assert sum("sine" in kinds for kinds in boxes) == 2
    (one,) = (kinds for kinds in boxes_of(normalised, f32(64, 64), f32(32, 64)) if "tanh" in kinds)
    assert {"tanh", "reduce", "sqrt", "divide"} <= one


@pytest.mark.parametrize("whole", [False, True])
def test_boxes_have_all_of_the_time(whole: bool, plan: Plan, priced: ProgramGraph):
    made = priced.to_networkx()
    boxes = [_box(made, members, lone=whole) for members in draw_boxes(made, whole, COLUMNS).boxes]
    assert sum(box.compute for box in boxes) == pytest.approx(plan.prediction.compute_s, rel=1e-9)
    waited = sum(c.waited_s for c in plan.prediction.collectives)
    assert waited > 0 and sum(box.exposed for box in boxes) == pytest.approx(waited, rel=1e-9)


def test_names_that_are_markup_are_text(tmp_path: Path):
    graph = dataclasses.replace(programs.program("two matmuls"), name="<script>&\x1b[31m\u202e").graph()
    for suffix in ("svg", "graphml"):
        write_graph(graph, tmp_path / f"g.{suffix}")
        text = (tmp_path / f"g.{suffix}").read_text()
        xml.etree.ElementTree.fromstring(text)
        assert "<script" not in text and "\x1b" not in text and "\u202e" not in text


@pytest.mark.parametrize("name", ["g.dot", "g", "g.svg.gz"])
def test_other_suffixes_are_refused_before_anything_is_written(name: str, bare: ProgramGraph, tmp_path: Path):
    with pytest.raises(UserError, match=r"a graph is written as \.graphml, \.svg, \.json"):
        write_graph(bare, tmp_path / name)
    assert not list(tmp_path.iterdir())
    assert graph_form("G.SVG") == ".svg"


def test_a_path_that_cannot_be_written_leaves_nothing_behind(bare: ProgramGraph, tmp_path: Path):
    (tmp_path / "g.svg").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        write_graph(bare, tmp_path / "g.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["g.svg"]


def test_the_same_plan_gives_the_same_files(plan: Plan, priced: ProgramGraph, tmp_path: Path):
    graphs = {"a": priced, "b": programs.program("wide mlp").graph(plan)}
    for suffix in ("svg", "graphml", "json"):
        for name, graph in graphs.items():
            write_graph(graph, tmp_path / f"{name}.{suffix}")
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def test_the_figures_name_the_largest_ops(plan: Plan, bare: ProgramGraph, priced: ProgramGraph):
    plain, figures = graph_figures(bare), graph_figures(priced)
    assert plain["step_time_s"] is None and figures["step_time_s"] == plan.prediction.step_time_s
    assert set(plain) == set(figures) and len(plain["loops"]) == 2
    flops = [row["flops"] for row in plain["largest"]]
    assert flops == sorted(flops, reverse=True) and plain["largest"][0]["kind"] == "dot_general"
    spent = [row["seconds"] + row["exposed_s"] for row in figures["largest"]]
    assert spent == sorted(spent, reverse=True)
    assert figures["collective_s"] == pytest.approx(sum(c.seconds for c in plan.prediction.collectives))
    for each in (plain, figures):
        page = io.StringIO()
        Console(file=page, width=140).print(graph_report(each))
        assert each["largest"][0]["op"] in page.getvalue()
