"""Layout of a program's graph: ops grouped into boxes, boxes into the sections of the step."""

import dataclasses
import itertools
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import networkx

PASSED_THROUGH = frozenset({"loop_in", "loop_out"})
"""Nodes that compute nothing; if they are not drawn, lines begin at the producer of the value."""

ENDS = frozenset({"argument", "result"})
"""Kinds of nodes at the ends of the graph."""

STORED = frozenset({"parameter", "optimizer_state"})
"""Roles of arguments that a step stores from one call to the next."""


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """Boxes of one part of the step, in rows from top to bottom."""

    title: str
    """Name of the part, such as `loop 3, 32 trips`."""
    nodes: tuple[str, ...]
    """All nodes of the graph in the section, drawn or not."""
    rows: tuple[tuple[int, ...], ...]
    """Numbers of boxes from left to right; the operands of a row in the same section are computed in rows above it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes and the lines between them."""

    sections: tuple[Section, ...]
    """Sections from top to bottom, in program order."""
    boxes: tuple[tuple[str, ...], ...]
    """Nodes of each box, in program order."""
    lines: dict[tuple[int, int], list[dict[str, Any]]]
    """Attributes of the graph's edges between two boxes, by (box, box)."""


def draw_boxes(made: "networkx.MultiDiGraph", whole: bool, columns: int) -> Drawing:
    """Lay out a graph of `ProgramGraph.to_networkx()` in boxes, at most `columns` boxes in a row.

    Heavy ops have boxes of their own. The connected light ops of one section between them form one box. A light op that
    only prepares stored tensors for one heavy op (a layer's slice, a conversion) is in that op's box. Arguments,
    results, constants and values that loops carry have no box. With `whole` every node has a box. Edges inside a box
    and to a loop's next trip are not drawn.
    """
    import networkx

    nodes = [node for node, attrs in made.nodes(data=True) if whole or attrs["op_class"] not in ("", "free")]
    section_of, titles = _sections(made, nodes)
    boxes = [(node,) for node in nodes] if whole else _collapsed(made, nodes, section_of)
    box_of = {node: number for number, box in enumerate(boxes) for node in box}
    lines: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for source, target, attrs in made.edges(data=True):
        ends = (box_of.get(_maker(made, source, box_of)), box_of.get(target))
        if ends[0] is not None and ends[1] is not None and ends[0] != ends[1] and not attrs["back"]:
            lines.setdefault((ends[0], ends[1]), []).append(attrs)
    drawn = networkx.DiGraph()
    drawn.add_nodes_from(range(len(boxes)))
    drawn.add_edges_from(lines)
    inside = [tuple(group) for group in _by_section(made, section_of, len(titles))]
    sections = []
    for number, title in enumerate(titles):
        own = [box for box, members in enumerate(boxes) if section_of[members[0]] == number]
        rows = _rows(drawn.subgraph(own), columns)
        sections.append(Section(title, inside[number], rows))
    return Drawing(tuple(sections), tuple(boxes), lines)


def _maker(made: "networkx.MultiDiGraph", node: str, box_of: dict[str, int]) -> str:
    """Return the node from which the lines of a value begin.

    It is `node` itself, except for a loop's value without a box. Lines of that value begin at its initial value
    (`loop_in`) or at its producer in the body (`loop_out`), which may have no box either.

    - `box_of`: number of the box of each drawn node.
    """
    while node not in box_of and made.nodes[node]["kind"] in PASSED_THROUGH:
        node = next(source for source, _, back in made.in_edges(node, data="back") if not back)
    return node


def _sections(made: "networkx.MultiDiGraph", nodes: list[str]) -> tuple[dict[str, int], list[str]]:
    """Return the number of the section of every drawn node, and the sections' titles.

    A section is a run of program order within one block or branch. A later run of the same block is `continued`.
    """

    def place(node: str) -> tuple[str, int, int]:
        """Return kind (empty unless argument or result), block and branch of a node."""
        attrs = made.nodes[node]
        return attrs["kind"] if attrs["kind"] in ENDS else "", attrs["block"], attrs["branch"]

    section_of: dict[str, int] = {}
    titles: list[str] = []
    seen: set[tuple[str, int, int]] = set()
    for where, run in itertools.groupby(nodes, place):
        section_of |= dict.fromkeys(run, len(titles))
        titles.append(_title(made, *where) + (", continued" if where in seen else ""))
        seen.add(where)
    return section_of, titles


def _title(made: "networkx.MultiDiGraph", kind: str, block: int, branch: int) -> str:
    """Return the title of a section: arguments or results by `kind`, all others by their loop or branch.

    - `block`, `branch`: numbers of the innermost loop and conditional's branch; -1 for none.
    """
    if kind:
        return f"{kind}s"
    loops = made.graph["loops"]
    inner = max(block, branch)
    if inner < 0:
        return "outside of loops"
    if inner == branch:
        return f"a branch of a conditional ({branch})"
    trips = f"{loops[block]['trips']} trips" if loops[block]["known"] else "trips unknown"
    outer = loops[block]["parent"]
    return f"loop {block}, {trips}" + (f", inside of {outer}" if outer >= 0 else "")


def _by_section(made: "networkx.MultiDiGraph", section_of: dict[str, int], count: int) -> Iterator[list[str]]:
    """Return the nodes of each of `count` sections, or of one if there is none, in program order.

    A node that is not drawn is in the section of the node before it.
    """
    groups: list[list[str]] = [[] for _ in range(max(1, count))]
    current = 0
    for node in made:
        current = section_of.get(node, current)
        groups[current].append(node)
    return iter(groups)


def _collapsed(made: "networkx.MultiDiGraph", nodes: list[str], section_of: dict[str, int]) -> list[tuple[str, ...]]:
    """Group the nodes into boxes: heavy ops with their preparation, and connected light ops between them.

    Light ops join if they are in one section, at the same depth of heavy ops, and pass a tensor that is no scalar.
    Over a scalar they join only if both have scalars alone as operands and results. Groups that need each other
    become one box.
    """
    import networkx

    heavy = {node for node in nodes if made.nodes[node]["op_class"] == "heavy"}
    depth = _depths(made, nodes, section_of, heavy)
    home = _place_sources(made, nodes, section_of, heavy, depth)
    light = networkx.Graph()
    light.add_nodes_from(node for node in nodes if node not in home)
    scalar = {node for node in light if not any(made.nodes[node]["shapes"])}
    scalar = {node for node in scalar if not any(shape for *_, shape in made.in_edges(node, data="shape"))}
    for source, target, shape in made.edges(data="shape"):
        if source in light and target in light:
            near = section_of[source] == section_of[target] and depth[source] == depth[target]
            # A scalar such as a learning rate does not join the updates of all parameters that read it.
            if near and (shape or {source, target} <= scalar):
                light.add_edge(source, target)
    with_heavy: dict[str, list[str]] = {node: [] for node in nodes if node in heavy}
    for node, own in home.items():
        with_heavy[own].append(node)
    return _without_cycles(made, nodes, [*networkx.connected_components(light), *with_heavy.values()])


def _without_cycles(
    made: "networkx.MultiDiGraph", nodes: list[str], groups: list[Collection[str]]
) -> list[tuple[str, ...]]:
    """Merge groups that need each other, over a scalar such as a norm; return boxes by their last node in program
    order.
    """
    import networkx

    group_of = {node: number for number, group in enumerate(groups) for node in group}
    between = networkx.DiGraph()
    between.add_nodes_from(range(len(groups)))
    between.add_edges_from((group_of[a], group_of[b]) for a, b in made.edges() if a in group_of and b in group_of)
    order = {node: number for number, node in enumerate(nodes)}
    boxes = [
        tuple(sorted((node for number in together for node in groups[number]), key=order.__getitem__))
        for together in networkx.strongly_connected_components(between)
    ]
    return sorted(boxes, key=lambda box: order[box[-1]])


def _depths(
    made: "networkx.MultiDiGraph", nodes: list[str], section_of: dict[str, int], heavy: set[str]
) -> dict[str, int]:
    """Return for each node the largest number of heavy ops of its section on a path to it, itself included.

    - `section_of`: section of each node.
    - `heavy`: the heavy ops.
    """
    depth: dict[str, int] = {}
    for node in nodes:
        before = [depth[p] for p in made.predecessors(node) if section_of.get(p) == section_of[node]]
        depth[node] = max(before, default=0) + (node in heavy)
    return depth


def _place_sources(
    made: "networkx.MultiDiGraph", nodes: list[str], section_of: dict[str, int], heavy: set[str], depth: dict[str, int]
) -> dict[str, str]:
    """Return the heavy op in whose box each node is, by node; light ops in no heavy op's box are left out.

    Other ops on stored tensors alone, or without operands, get the depth of their first users (in `depth`, in place).

    - `section_of`: section of each node.
    - `heavy`: the heavy ops.
    - `depth`: heavy ops on a path to each node.
    """
    home = {node: node for node in heavy}
    for node in reversed(_sources(made, nodes, heavy)):
        users = set(made.successors(node))
        here = [user for user in users if section_of.get(user) == section_of[node]]
        homes = {home.get(user, "") for user in users}
        if len(homes) == 1 and len(here) == len(users) and "" not in homes:
            home[node] = homes.pop()
        elif here:
            depth[node] = min(depth[home[user]] - 1 if user in home else depth[user] for user in here)
    return home


def _sources(made: "networkx.MultiDiGraph", nodes: list[str], heavy: set[str]) -> list[str]:
    """List light ops that read only parameters, optimizer state, scalars, constants, and results of other such ops."""
    sources: dict[str, None] = {}
    for node in nodes:
        operands = [(p, made.nodes[p]) for p, _, shape in made.in_edges(node, data="shape") if shape]
        stored = (p in sources or attrs["role"] in STORED or attrs["op_class"] == "free" for p, attrs in operands)
        if node not in heavy and all(stored):
            sources[node] = None
    return list(sources)


def _rows(boxes: "networkx.DiGraph", columns: int) -> tuple[tuple[int, ...], ...]:
    """Place boxes in rows: each generation below its operands, in as many rows of at most `columns` as it needs.

    A box is placed near the boxes above it that it reads from.
    """
    import networkx

    places: dict[int, float] = {}
    rows = []
    for generation in networkx.topological_generations(boxes):
        ordered = sorted(generation)
        for start in range(0, len(ordered), columns):
            row = ordered[start : start + columns]
            above = {box: [places[p] for p in boxes.predecessors(box)] for box in row}
            wish = {box: sum(near) / len(near) if near else 0.0 for box, near in above.items()}
            row.sort(key=wish.__getitem__)
            # A place is a fraction of the row from its middle, so that rows of different lengths compare.
            places |= {box: (place + 0.5) / len(row) - 0.5 for place, box in enumerate(row)}
            rows.append(tuple(row))
    return tuple(rows)
