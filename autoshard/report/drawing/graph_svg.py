"""A program's graph as a picture: one self-contained SVG file, for light and dark pages."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from autoshard.base.units import format_bytes, format_count, format_seconds
from autoshard.planning import ProgramGraph
from autoshard.report.display import clean, readable
from autoshard.report.drawing.graph_boxes import Drawing, Section, draw_boxes
from autoshard.report.page.html_report import environment


if TYPE_CHECKING:
    import networkx

COLUMNS = 6
"""Maximum number of boxes in a row."""
WIDTH, GAP, ROW_GAP, MARGIN, LINE, TOP = 272, 24, 34, 24, 14, 130
"""Pixels of a box, between boxes, between rows, of the margin, of a line of text, and above the sections."""
LETTERS, TITLE_LETTERS = 42, 38
"""Letters that fit in a box's width, plain and bold."""
LISTED = 3
"""Number of arguments, and of collectives, that a box lists; its tooltip lists all."""
TOLD = 60
"""Maximum number of lines of a tooltip."""

Collectives = dict[tuple[str, str], list[float]]
"""Seconds, seconds that compute waits for, bytes on the wire, and count, by (kind, axes)."""


@dataclasses.dataclass(slots=True)
class _Box:
    """One box: its contents and its place in pixels."""

    heavy: bool
    """True if the box is that of a heavy op."""
    texts: list[tuple[str, str]]
    """Lines of text, each with its CSS class."""
    title: str
    """Text of the tooltip."""
    compute: float
    """Seconds of compute of a step; 0 without a plan."""
    exposed: float
    """Seconds of a step that compute waits for the box's collectives."""
    x: float = 0.0
    """Distance of the left edge from that of the picture."""
    y: float = 0.0
    """Distance of the upper edge from that of the picture."""
    width: float = WIDTH
    bars: Sequence[tuple[str, float, float]] = ()
    """Bars in pixels: (CSS class, start, length)."""

    @property
    def height(self) -> int:
        """Pixels from the top to the bottom, by the number of lines."""
        return LINE * len(self.texts) + 18


def graph_svg(graph: ProgramGraph, whole: bool = False) -> str:
    """Draw the graph as SVG text: boxes for ops, sections for loops, lines for tensors, tooltips for figures.

    Heavy ops (matmuls, convolutions, gathers ...) have boxes of their own; the ops between them share boxes. With
    `whole` every op, argument and result has its own box. With a plan, boxes state their time and the collectives that
    they wait for. Bars are to one scale, with the longest box's as wide as a box.
    """
    made = graph.to_networkx()
    drawing = draw_boxes(made, whole, COLUMNS)
    boxes = [_box(made, members, lone=whole) for members in drawing.boxes]
    longest = max((box.compute + box.exposed for box in boxes), default=0.0)
    for box in boxes:
        scale = (WIDTH - 16) / longest if longest else 0.0
        bars = (("compute", 0.0, box.compute * scale), ("exposed", box.compute * scale, box.exposed * scale))
        # A bar shorter than half a pixel would be invisible.
        box.bars = [(mark, round(start, 1), round(length, 1)) for mark, start, length in bars if length >= 0.5]
    sections, height = _place(made, drawing, boxes)
    return (
        environment()
        .get_template("graph.svg")
        .render(
            width=2 * MARGIN + _inner_width(drawing),
            height=height,
            margin=MARGIN,
            title=f"{graph.program.name}: ops",
            about=list(_about(made, drawing, whole)),
            sections=sections,
            boxes=boxes,
            lines=list(_lines(drawing, boxes)),
        )
    )


def _about(made: "networkx.MultiDiGraph", drawing: Drawing, whole: bool) -> Iterable[str]:
    """Yield the lines below the picture's title."""
    total = made.graph
    ops = sum(bool(op_class) for _, op_class in made.nodes(data="op_class"))
    boxes = "every node has a box"
    if not whole:
        boxes = f"in {len(drawing.boxes)} boxes: heavy ops, and what is between them; constants are left out"
    yield f"{ops} ops, {boxes}. {format_count(total['flops'], 'FLOP')} of matrix work a step."
    if "topology" in total:
        parts = f"{format_seconds(total['compute_s'])} compute, {format_seconds(total['exposed_comm_s'])} waiting"
        yield f"{total['topology']}, mesh {total['mesh']}: {format_seconds(total['step_time_s'])} a step, {parts}."
        yield "Bars: time of a step in compute (blue) and waiting for collectives (red). Coloured lines: reshards."
    yield "Point at a box or a line for all that is known of it."


def _inner_width(drawing: Drawing) -> int:
    """Return the pixels of a section's width: of the longest row, and at least of three boxes."""
    widest = max((len(row) for section in drawing.sections for row in section.rows), default=1)
    return max(3, widest) * (WIDTH + GAP) + GAP


def _place(made: "networkx.MultiDiGraph", drawing: Drawing, boxes: list[_Box]) -> tuple[list[dict[str, Any]], float]:
    """Set the place of every box, in place; return the frames of the sections, and the picture's height in pixels."""
    inner, y = _inner_width(drawing), float(TOP)
    sections = []
    for section in drawing.sections:
        top = y
        y += 36
        for row in section.rows:
            left = MARGIN + (inner - len(row) * (WIDTH + GAP) + GAP) / 2
            for place, number in enumerate(row):
                boxes[number].x, boxes[number].y = left + place * (WIDTH + GAP), y
            y += max(boxes[number].height for number in row) + ROW_GAP
        y -= ROW_GAP - 14
        frame = {"x": MARGIN, "y": top, "width": inner, "height": y - top}
        sections.append({**frame, "title": section.title, "about": _section_about(made, section)})
        y += 16
    return sections, y + MARGIN


def _section_about(made: "networkx.MultiDiGraph", section: Section) -> str:
    """Describe a section: its number of ops and their time, or FLOPs without a plan; empty for a section
    without ops.
    """
    nodes = [made.nodes[node] for node in section.nodes]
    ops = [node for node in nodes if node["op_class"]]
    if not ops:
        return ""
    if "topology" not in made.graph:
        return f"{len(ops)} ops, {format_count(sum(node['flops'] for node in ops), 'FLOP')}"
    edges = made.in_edges(section.nodes, data="collectives")
    collectives = [c for *_, each in edges for c in each] + [c for node in nodes for c in node["collectives"]]
    compute = format_seconds(sum(node["seconds"] for node in nodes))
    waiting = format_seconds(sum(c["exposed_s"] for c in collectives))
    return f"{len(ops)} ops, {compute} compute, {waiting} waiting"


def _box(made: "networkx.MultiDiGraph", members: tuple[str, ...], lone: bool) -> _Box:
    """Return the box of the nodes `members`, with its lines and tooltip, without a place.

    - `lone`: True if every node has its own box; results then have boxes, so their collectives count there.
    """
    nodes = [made.nodes[node] for node in members]
    main = next((node for node in nodes if node["op_class"] == "heavy"), nodes[-1])
    heavy = main["op_class"] == "heavy"
    entering = [(source, attrs) for source, _, attrs in made.in_edges(members, data=True)]
    leaving = [(target, attrs) for _, target, attrs in made.out_edges(members, data=True)]
    name, facts = _name([main] if heavy or lone else nodes)
    kinds = Counter(node["kind"] for node in nodes)
    head = main["kind"] if heavy or lone else _kinds(kinds)
    texts = [("title", head + (f", {len(nodes) - 1} more" if heavy and len(nodes) > 1 else ""))]
    texts += [("dim", text) for text in (name, facts) if text]
    arguments = _ends(made, (source for source, _ in entering), "argument")
    results = _ends(made, (target for target, _ in leaving), "result")
    texts += [("", f"takes {each}") for each in _some(arguments)] + [("", f"gives {each}") for each in _some(results)]
    planned = "specs" in main
    if main["shapes"]:
        texts.append(("spec", f"→ {_result(main)}"))
    collectives = _collectives(
        nodes, [attrs for _, attrs in entering], [s for t, s in leaving if _is_result(made, t) and not lone]
    )
    compute = sum(node.get("seconds", 0.0) for node in nodes)
    figures = [format_seconds(compute)] if compute else []
    if flops := sum(node["flops"] for node in nodes):
        figures.append(format_count(flops, "FLOP"))
    elif not planned and not lone:
        figures.append(f"writes {format_bytes(sum(node['bytes_written'] for node in nodes))}")
    texts += [("", " · ".join(figures))] if figures else []
    ranked = sorted(collectives.items(), key=lambda item: (-item[1][0], item[0]))
    texts += [(f"k-{kind}", f"{kind} {axes} {format_seconds(s[0])}") for (kind, axes), s in ranked[:LISTED]]
    texts += [("dim", f"and {len(ranked) - LISTED} more collectives")] if len(ranked) > LISTED else []
    exposed = sum(seconds[1] for seconds in collectives.values())
    clipped = [(mark, clean(text, TITLE_LETTERS if mark == "title" else LETTERS)) for mark, text in texts]
    return _Box(heavy, clipped, _tooltip(members, nodes, arguments, results, ranked), compute, exposed)


def _tooltip(
    members: Sequence[str],
    nodes: Sequence[dict[str, Any]],
    taken: Sequence[str],
    given: Sequence[str],
    collectives: Sequence[tuple[tuple[str, str], list[float]]],
) -> str:
    """Return the lines of a box's tooltip, as one text: its nodes, arguments, results and collectives.

    At most `TOLD` lines are listed, and a last one counts the rest.

    - `members`, `nodes`: names and attributes of the nodes.
    - `taken`, `given`: names of the arguments that the box reads and of the results that it computes.
    - `collectives`: figures by kind and axes, the longest first.
    """
    lines = [
        " ".join(
            part
            for part in (
                f"{member}: {node['kind']}",
                " and ".join(node["specs"] if "specs" in node else [_shape(node)]),
                f"{node['trips']:g} times" if node["trips"] != 1 else "",
                format_count(node["flops"], "FLOP") if node["flops"] else "",
                format_seconds(node["seconds"]) if node.get("seconds") else "",
                f"at {node['line']}" if node["line"] else "",
                node["name"],
            )
            if part
        )
        for member, node in zip(members, nodes, strict=True)
    ]
    lines += [f"takes {name}" for name in taken] + [f"gives {name}" for name in given]
    lines += [_collective(*key, figures) for key, figures in collectives]
    more = [f"and {len(lines) - TOLD} more lines"] if len(lines) > TOLD else []
    return "\n".join(clean(line) for line in (*lines[:TOLD], *more))


def _collective(kind: str, axes: str, figures: list[float]) -> str:
    """Format the figures of one collective: seconds, seconds waited for, bytes on the wire, and count."""
    seconds, exposed, wire, count = figures
    return (
        f"{kind} over {axes}: {format_seconds(seconds)}, {format_seconds(exposed)} of it waited for; "
        f"{format_bytes(wire)} on the wire, {count:g} times"
    )


def _lines(drawing: Drawing, boxes: list[_Box]) -> Iterable[dict[str, str]]:
    """Yield the curve between every pair of connected boxes, with its CSS classes and tooltip.

    The classes are those of the costliest collective, or `far` for a line between sections.
    """
    place = {number: k for k, section in enumerate(drawing.sections) for row in section.rows for number in row}
    for (source, target), edges in drawing.lines.items():
        start, end = boxes[source], boxes[target]
        x, y = start.x + WIDTH / 2, start.y + start.height
        # The bend keeps short curves round and long ones out of the boxes.
        bend = min(60.0, max(16.0, (end.y - y) / 2))
        path = (
            f"M{x:.0f} {y:.0f}C{x:.0f} {y + bend:.0f} {end.x + WIDTH / 2:.0f} {end.y - bend:.0f} "
            f"{end.x + WIDTH / 2:.0f} {end.y:.0f}"
        )
        collectives = _collectives([], edges, [])
        marks = ["far"] if place[source] != place[target] else []
        if collectives:
            marks = ["moves", f"k-{max(collectives, key=lambda key: collectives[key][0])[0]}"]
        tensors = {attrs["tensor"]: attrs for attrs in edges}
        lines = [
            f"{attrs.get('spec') or 'x'.join(map(str, attrs['shape'])) or 'scalar'} {attrs['dtype']}, "
            f"{format_bytes(attrs['bytes'])} {attrs['name']}".rstrip()
            for attrs in tensors.values()
        ]
        lines += [_collective(*key, figures) for key, figures in collectives.items()]
        yield {"marks": " ".join(marks), "path": path, "title": "\n".join(clean(line) for line in lines[:TOLD])}


def _collectives(
    nodes: Iterable[dict[str, Any]], entering: Iterable[dict[str, Any]], leaving: Iterable[dict[str, Any]]
) -> Collectives:
    """Return the sums of the collectives of nodes and of the edges that enter and leave, by kind and axes."""
    totals: Collectives = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for attrs in (*nodes, *entering, *leaving):
        for each in attrs.get("collectives", ()):
            figures = totals[each["kind"], ", ".join(each["axes"])]
            for place, name in enumerate(("seconds", "exposed_s", "wire_bytes", "count")):
                figures[place] += each[name]
    return dict(totals)


def _ends(made: "networkx.MultiDiGraph", nodes: Iterable[str], kind: str) -> list[str]:
    """Return the names of the nodes of a kind, `argument` or `result`, each once and in order."""
    return list(dict.fromkeys(made.nodes[n]["name"] for n in nodes if made.nodes[n]["kind"] == kind))


def _is_result(made: "networkx.MultiDiGraph", node: str) -> bool:
    """Return True if a node is a result of the program."""
    return made.nodes[node]["kind"] == "result"


def _some(names: Sequence[str]) -> list[str]:
    """Return the names, or of more than `LISTED` the first ones and the number of the others, `LISTED`
    entries in all.
    """
    return [*names[: LISTED - 1], f"{len(names) - LISTED + 1} more"] if len(names) > LISTED else list(names)


def _kinds(kinds: Counter[str]) -> str:
    """Format counts of kinds as `4 ops: multiply x3, add`, the most frequent first, up to `TITLE_LETTERS`.

    Left out kinds become ` ...`. A single op is its kind alone.
    """
    words = [kind + (f" x{count}" if count > 1 else "") for kind, count in kinds.most_common()]
    if kinds.total() == 1:
        return words[0]
    text = f"{kinds.total()} ops: {words[0]}"
    for each in words[1:]:
        if len(text) + len(each) + 6 > TITLE_LETTERS:
            return f"{text} ..."
        text += f", {each}"
    return text


def _name(nodes: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return two lines: the readable name of one node, or the most common module of several, and the facts of a node.

    The facts are JAX's, such as `backward`, with the file and line in the user's code; either line may be empty.
    """
    named = [(node, *readable(node["name"]).partition(" (")) for node in nodes if node["name"]]
    if not named:
        return "", next((node["line"].rpartition("/")[2] for node in nodes if node["line"]), "")
    places = Counter(name.rpartition("/")[0] for _, name, _, _ in named)
    place = places.most_common(1)[0][0]
    node, name, _, facts = next(each for each in named if each[1].rpartition("/")[0] == place)
    if len(nodes) > 1 or name.rpartition("/")[2] == node["kind"]:
        name = place
    facts = ", ".join(fact for fact in facts.rstrip(")").split(", ") if fact and fact != "in a loop")
    return name, " · ".join(part for part in (facts, node["line"].rpartition("/")[2]) if part)


def _result(node: dict[str, Any]) -> str:
    """Format the first result's spec, or shape without a plan, and its abbreviated dtype: `2 x 3 bf16`."""
    dtype = node["dtypes"][0].replace("bfloat", "bf").replace("float", "f").replace("int", "i")
    return f"{node['specs'][0] if 'specs' in node else _shape(node)} {dtype}"


def _shape(node: dict[str, Any]) -> str:
    """Return the shapes of a node's results as text, such as `2 x 3 and scalar`."""
    return " and ".join(" x ".join(map(str, shape)) or "scalar" for shape in node["shapes"])
