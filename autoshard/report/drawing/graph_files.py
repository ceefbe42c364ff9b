"""A program's graph as a file or as figures: GraphML, JSON, a picture, or a table for a terminal."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoshard.base.units import format_count, format_seconds
from autoshard.errors import UserError
from autoshard.planning import ProgramGraph
from autoshard.report.display import clean, readable, write_text
from autoshard.report.drawing.graph_svg import graph_svg


if TYPE_CHECKING:
    import networkx


FORMS = (".graphml", ".svg", ".json")
"""Suffixes of the files that a graph is written to."""


def graph_form(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a graph's file in lower case, one of `FORMS`. Raises `UserError` for any other suffix."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMS:
        raise UserError(f"{path}: a graph is written as {', '.join(FORMS)}; {suffix or 'no suffix'} is none of them.")
    return suffix


def write_graph(graph: ProgramGraph, path: str | os.PathLike[str], *, whole: bool = False) -> None:
    """Write a graph atomically, in the format that the suffix of `path` names.

    `.graphml` is for `networkx.read_graphml` and most other graph tools: attributes that are lists become text, and
    collectives JSON. `.json` is for `networkx.node_link_graph(data, edges="edges")`. `.svg` is a picture, in which
    `whole` gives every op its own box (see `graph_svg`). Raises `UserError` for any other suffix, and if the file
    cannot be written.
    """
    form = graph_form(path)
    if form == ".svg":
        text = graph_svg(graph, whole)
    else:
        text = graph_ml(graph) if form == ".graphml" else node_link_json(graph)
    write_text(Path(path), text)


def graph_ml(graph: ProgramGraph) -> str:
    """Serialise the graph as GraphML; all attributes are strings, numbers or truth values."""
    import networkx

    made = graph.to_networkx()
    flat = networkx.MultiDiGraph()
    flat.graph.update(_scalars(made.graph))
    flat.add_nodes_from((node, _scalars(attrs)) for node, attrs in made.nodes(data=True))
    flat.add_edges_from((*ends, _scalars(attrs)) for *ends, attrs in made.edges(keys=True, data=True))
    return "\n".join(networkx.generate_graphml(flat)) + "\n"


def node_link_json(graph: ProgramGraph) -> str:
    """Serialise the graph as networkx's node-link JSON, with edges under `edges`."""
    import networkx

    return json.dumps(networkx.node_link_data(graph.to_networkx(), edges="edges"), allow_nan=False) + "\n"


def _scalars(said: dict[str, Any]) -> dict[str, str | int | float | bool]:
    """Convert attributes to GraphML's types: lists of numbers or words become text, lists of objects JSON.

    Other values stay; text is cleaned of characters that are not printable.
    """
    scalars = {}
    for key, value in said.items():
        if isinstance(value, str):
            value = clean(value)
        elif isinstance(value, list):
            value = clean(_text(value))
        scalars[key] = value
    return scalars


def _text(values: list[Any]) -> str:
    """Format a list as text: objects as JSON, numbers (a shape) as `2 x 3`, other words separated by commas.

    Nested lists are separated by semicolons.
    """
    if any(isinstance(value, dict) for value in values):
        return json.dumps(values, allow_nan=False)
    if any(isinstance(value, list) for value in values):
        return "; ".join(_text(value) for value in values)
    return " x ".join(map(str, values)) if all(isinstance(value, int) for value in values) else ", ".join(values)


LARGEST = 10
"""Number of ops that are listed as the largest."""

_COUNTED = ("ops", "arguments", "results", "tensors", "clusters")
"""Figures that the report counts in words."""


def graph_figures(graph: ProgramGraph) -> dict[str, Any]:
    """Return the JSON object of `autoshard graph --json`, without the name of the written file.

    Without a plan the figures of topology, mesh, times and reshards are None. Times are in seconds of one step.
    """
    made = graph.to_networkx()
    nodes = [attrs for _, attrs in made.nodes(data=True)]
    edges = [attrs for *_, attrs in made.edges(data=True)]
    figures = {
        "program": graph.program.name,
        "ops": sum(bool(attrs["op_class"]) for attrs in nodes),
        "heavy": sum(attrs["op_class"] == "heavy" for attrs in nodes),
        "arguments": sum(attrs["kind"] == "argument" for attrs in nodes),
        "results": sum(attrs["kind"] == "result" for attrs in nodes),
        "nodes": len(nodes),
        "edges": len(edges),
        "tensors": len({attrs["tensor"] for attrs in edges}),
        "clusters": len({attrs["cluster"] for attrs in edges} - {-1}),
        "loops": [{key: loop[key] for key in ("loop", "parent", "trips", "known")} for loop in _loops(made)],
        "flops": made.graph["flops"],
        **dict.fromkeys(("topology", "mesh", "step_time_s", "compute_s", "reshards", "collective_s")),
        "largest": _largest(made),
    }
    if graph.priced is not None:
        collectives = [each for attrs in (*nodes, *edges) for each in attrs["collectives"]]
        figures |= {key: made.graph[key] for key in ("topology", "mesh", "step_time_s", "compute_s")}
        figures["reshards"] = sum(bool(attrs["collectives"]) for attrs in (*nodes, *edges))
        figures["collective_s"] = sum(each["seconds"] for each in collectives)
    return figures


def _loops(made: "networkx.MultiDiGraph") -> list[dict[str, Any]]:
    """Return the entries of the graph's loops without those of conditionals' branches."""
    return [loop for loop in made.graph["loops"] if not loop["is_branch"]]


def _largest(made: "networkx.MultiDiGraph") -> list[dict[str, Any]]:
    """Return the `LARGEST` ops with the most seconds of compute and waiting; without a plan, with the most FLOPs.

    The largest comes first. Waiting includes that of the op's operands' collectives.
    """
    rows = []
    for node, attrs in made.nodes(data=True):
        entering = [each for *_, collectives in made.in_edges(node, data="collectives") for each in collectives or ()]
        row = {key: attrs[key] for key in ("kind", "name", "line", "block", "trips", "flops")}
        row |= {"seconds": attrs.get("seconds"), "exposed_s": None}
        if row["seconds"] is not None:
            row["exposed_s"] = sum(each["exposed_s"] for each in (*entering, *attrs["collectives"]))
        if attrs["op_class"]:
            rows.append({"op": node, **row})
    rows.sort(key=lambda row: -(row["flops"] if row["seconds"] is None else row["seconds"] + row["exposed_s"]))
    return rows[:LARGEST]


def graph_report(figures: dict[str, Any]) -> RenderableType:
    """Format the figures of `graph_figures` for a terminal."""
    loops = [
        f"loop {each['loop']} with {each['trips'] if each['known'] else 'an unknown number of'} trips"
        for each in figures["loops"]
    ]
    counts = {key: f"{figures[key]} {key if figures[key] != 1 else key[:-1]}" for key in _COUNTED}
    text = (
        f"{counts['ops']}, {figures['heavy']} of them heavy; {counts['arguments']}, {counts['results']}; "
        f"{counts['tensors']} in {counts['clusters']}"
    )
    lines: list[RenderableType] = [Text(clean(figures["program"]), style="bold"), Text(text)]
    lines += [Text("; ".join(loops))] if loops else []
    planned = figures["step_time_s"] is not None
    if planned:
        lines.append(
            Text(
                f"{figures['topology']}, mesh {figures['mesh']}: {format_seconds(figures['step_time_s'])} a step, "
                f"{format_seconds(figures['compute_s'])} of it compute; {figures['reshards']} places with collectives, "
                f"{format_seconds(figures['collective_s'])} in all"
            )
        )
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    columns = ["compute", "waiting", "FLOPs"] if planned else ["FLOPs"]
    for column in (*columns, "op", "kind", "name", "at"):
        table.add_column(column, justify="right" if column in columns else "left", no_wrap=column != "name")
    for row in figures["largest"]:
        seconds = [format_seconds(row["seconds"]), format_seconds(row["exposed_s"])] if planned else []
        name = readable(row["name"]).replace(", in a loop)", ")").replace(" (in a loop)", "")
        words = (row["op"], clean(row["kind"], 24), clean(name, 60), clean(row["line"].rpartition("/")[2], 24))
        table.add_row(*seconds, format_count(row["flops"]), *map(Text, words))
    if figures["largest"]:
        lines.append(Padding(table, (1, 0, 0, 2)))
    return Group(*lines)
