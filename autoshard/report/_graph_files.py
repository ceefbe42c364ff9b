"""A program's graph as a file: GraphML, node-link JSON, or a picture."""

import json
import os
from pathlib import Path
from typing import Any

from autoshard.errors import UserError
from autoshard.plan import ProgramGraph
from autoshard.report._graph_svg import graph_svg
from autoshard.report._names import clean
from autoshard.report._write import write_text


FORMS = (".graphml", ".svg", ".json")


def graph_form(path: str | os.PathLike[str]) -> str:
    """The form in which a graph is written to a path, by its suffix. Raises `UserError` for any other suffix."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMS:
        raise UserError(f"{path}: a graph is written as {', '.join(FORMS)}; {suffix or 'no suffix'} is none of them.")
    return suffix


def write_graph(graph: ProgramGraph, path: str | os.PathLike[str], *, whole: bool = False) -> None:
    """Write a graph, whole or not at all, in the form that the suffix of `path` names.

    `.graphml` is for `networkx.read_graphml` and most other graph tools: attributes that are lists become text, and
    collectives JSON. `.json` is for `networkx.node_link_graph(data, edges="edges")`. `.svg` is a picture, in which
    `whole` gives every op a box of its own (see `graph_svg`). Raises `UserError` for any other suffix, and if the file
    cannot be written.
    """
    form = graph_form(path)
    if form == ".svg":
        text = graph_svg(graph, whole)
    else:
        text = graph_ml(graph) if form == ".graphml" else node_link_json(graph)
    write_text(Path(path), text)


def graph_ml(graph: ProgramGraph) -> str:
    """The graph as GraphML, all attributes strings, numbers or truth values."""
    import networkx

    made = graph.to_networkx()
    flat = networkx.MultiDiGraph()
    flat.graph.update(_scalars(made.graph))
    flat.add_nodes_from((node, _scalars(said)) for node, said in made.nodes(data=True))
    flat.add_edges_from((*ends, _scalars(said)) for *ends, said in made.edges(keys=True, data=True))
    return "\n".join(networkx.generate_graphml(flat)) + "\n"


def node_link_json(graph: ProgramGraph) -> str:
    """The graph as networkx's node-link JSON, edges under `edges`."""
    import networkx

    return json.dumps(networkx.node_link_data(graph.to_networkx(), edges="edges"), allow_nan=False) + "\n"


def _scalars(said: dict[str, Any]) -> dict[str, str | int | float | bool]:
    """Attributes as GraphML can hold them: lists of numbers or words as text, of objects as JSON."""
    found = {}
    for key, value in said.items():
        if isinstance(value, str):
            value = clean(value)
        elif isinstance(value, list):
            value = clean(_text(value))
        found[key] = value
    return found


def _text(values: list[Any]) -> str:
    if any(isinstance(value, dict) for value in values):
        return json.dumps(values, allow_nan=False)
    if any(isinstance(value, list) for value in values):
        return "; ".join(_text(value) for value in values)
    return " x ".join(map(str, values)) if all(isinstance(value, int) for value in values) else ", ".join(values)
