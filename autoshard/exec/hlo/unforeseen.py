"""Communication in a compiled program that its plan did not predict, with its cause."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

from autoshard.exec.hlo.compiled_collectives import CompiledCollective
from autoshard.graph import OpGraph, read_graph
from autoshard.planning import Plan, Spec, spec_text
from autoshard.program import Program


UNFORESEEN_SHARE = 0.01
"""Share of the step's communication above which unpredicted communication is reported."""

PADDING_SHARE = 0.12
"""Share by which a collective may exceed its prediction: reduce-scatters of tiled dims are padded by 3 to 10 %."""

SUMMED_WHOLE = "the plan has a reduce-scatter here; the compiler sums everything and takes a slice"
"""Note on an all-reduce where the plan has a reduce-scatter."""

_PERMUTE = "collective-permute"
_LAST = {_PERMUTE: 1, "all-reduce": 2}
"""Kinds that are matched to the prediction last: permutes may belong to any kind, and no plan wants whole sums."""

_SOURCE = re.compile(r' source_(?:file="[^"]*"|(?:end_)?(?:line|column)=\d+)')
"""Source of an instruction in the compiler's text, which may be a file of this package."""

_REDUCING = frozenset({"all-reduce", "reduce-scatter"})
"""Kinds of collectives that sum."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unforeseen:
    """Communication in the compiled program that the plan did not predict."""

    kind: str
    """Kind of the compiled collective."""
    axes: tuple[str, ...]
    """Mesh axes of its groups."""
    wire_bytes: int
    """Bytes that one device sends in one step."""
    share: float
    """Share, from 0 to 1, of all bytes that one device sends in the step."""
    count: int
    """Number of executions in one step."""
    op: str
    """Name of the op in the source, else of the HLO instruction."""
    line: str
    """`file:line` of the source, if known."""
    before: str
    """Spec of the value at its producer, if known."""
    after: str
    """Spec that its user needs, if known."""
    pin: str = ""
    """The `--pin` that keeps an argument whole, if the gathered value is made of one split argument alone."""
    note: str = ""
    """The compiler's own warning, or its replacement for the planned collective, if known."""


def unforeseen(
    program: Program, plan: Plan, found: Sequence[CompiledCollective], log: str = ""
) -> tuple[Unforeseen, ...]:
    """Return the communication beyond the plan's prediction, largest first; empty if the prediction covers it.

    - `found`: collectives of the compiled program.
    - `log`: the compiler's text, whose warnings become notes.

    Within one set of mesh axes, reductions (all-reduce, reduce-scatter) and moves (the other kinds) are compared as
    bytes on the wire. The compiler may choose either kind of each, and merge several collectives into one. A collective
    that runs as often and sends as much as a predicted one, but for padding, matches it. The remaining collectives
    consume the remaining prediction, and are reported if it does not suffice. Collectives below `UNFORESEEN_SHARE` of
    all bytes are left out.

    Specs and source lines come from Shardy's own list of reshards for the pinned program, and from the compiler's
    warnings of involuntary rematerialisation.
    """
    total = sum(c.wire_bytes for c in found)
    if not total:
        return ()
    order = list(plan.mesh)
    expected = [
        Expected(c.kind, tuple(a for a in order if a in c.axes), c.count, float(c.wire_bytes))
        for c in plan.prediction.collectives
    ]
    blamed = beyond(found, expected, UNFORESEEN_SHARE * total)
    if not blamed:
        return ()
    reshards, notes = _reshards(program, plan), involuntary(log)
    graph = read_graph(program.module)
    rows = []
    for c in blamed:
        if c.wire_bytes >= UNFORESEEN_SHARE * total:
            row = _explained(c, total, reshards, notes)
            if c.kind == "all-gather":
                row = dataclasses.replace(row, pin=_pin_whole(program, plan, graph, c))
            planned = any(e.kind == "reduce-scatter" and e.may_be(c) for e in expected)
            summed_whole = c.kind == "all-reduce" and planned and not row.note
            rows.append(dataclasses.replace(row, note=SUMMED_WHOLE) if summed_whole else row)
    return tuple(sorted(rows, key=lambda row: -row.wire_bytes))


def _pin_whole(program: Program, plan: Plan, graph: OpGraph, collective: CompiledCollective) -> str:
    """Return a pin, as of the command line, that keeps an argument whole over the axes of a gather; empty without one.

    The argument is one that alone makes up an operand of the gather's op. If several do, it is the one with the size
    of the gather.
    """
    names = dict(zip(graph.arguments, (argument.name for argument in program.arguments), strict=True))
    inits = {carry.body: carry.init for loop in graph.loops for carry in loop.carries}
    tail, found = _tail(collective.source), dict[str, float]()
    for tensor in {t for op in graph.ops if tail and _tail(op.name) == tail for t in op.operands}:
        chain = [tensor]
        while chain[-1] not in names and len(chain) == len({*chain}):
            op = graph.maker(chain[-1])
            sources = [inits.get(chain[-1], chain[-1])] if op is None else op.operands
            large = {t for t in sources if graph.tensors[t].elements > 1 and t not in graph.generated}
            chain.append(large.pop() if len(large) == 1 else chain[-1])
        name = names.get(chain[-1], "")
        if name and set(plan.arguments[name].axes) & set(collective.axes):
            smallest = min(graph.tensors[t].bytes for t in chain)
            found[name] = abs(smallest * collective.count - collective.wire_bytes)
    if not found:
        return ""
    name = min(found, key=lambda each: found[each])
    kept = [[axis for axis in dim if axis not in collective.axes] for dim in plan.arguments[name].dims]
    return f"{name}={','.join('+'.join(dim) or 'None' for dim in kept)}"


@dataclasses.dataclass(slots=True)
class Expected:
    """A predicted collective, with its bytes on the wire that no compiled collective has consumed."""

    kind: str
    """Kind of the predicted collective."""
    axes: tuple[str, ...]
    """Mesh axes, in mesh order."""
    count: int
    """Executions in one step."""
    bytes: float
    """Bytes that one device sends in one step and that nothing has consumed yet."""

    @property
    def reducing(self) -> bool:
        """True for an all-reduce or a reduce-scatter."""
        return self.kind in _REDUCING

    def may_be(self, collective: CompiledCollective) -> bool:
        """Return True if a compiled collective may be this one or a part of it.

        One must have all axes of the other, and both must reduce or both move. Successive gathers over two axes may be
        compiled as one. A loop of permutes implements either sort. A sum over slices and chips of a slice ends with a
        gather.
        """
        mine, other = set(self.axes), set(collective.axes)
        same = self.reducing == (collective.kind in _REDUCING)
        part = self.kind == "all-reduce" and collective.kind == "all-gather" and mine > other
        return (same or part or collective.kind == _PERMUTE) and (mine <= other or mine >= other)


def beyond(found: Sequence[CompiledCollective], expected: Sequence[Expected], least: float) -> list[CompiledCollective]:
    """Return the compiled collectives for which no predicted bytes remain, those with the largest shortage first.

    Padding (`PADDING_SHARE`) is no shortage. The list ends when the shortage of the rest is below `least` bytes.
    `expected` is modified: its bytes are consumed.
    """
    rest: list[CompiledCollective] = []
    for collective in sorted(_loops_joined(found), key=lambda c: (_LAST.get(c.kind, 0), -c.wire_bytes)):
        size = collective.wire_bytes
        similar = [
            e
            for e in expected
            if e.axes == collective.axes
            and e.reducing == (collective.kind in _REDUCING)
            and e.count == collective.count
            and abs(e.bytes - size) <= PADDING_SHARE * size
        ]
        if similar:
            nearest = min(similar, key=lambda e: abs(e.bytes - size))
            nearest.bytes = max(0.0, nearest.bytes - size)
        else:
            rest.append(collective)
    needs = [collective.wire_bytes for collective in rest]
    for nested in (False, True):
        for k, collective in enumerate(rest):
            near = [e for e in expected if e.may_be(collective) and (nested or e.axes == collective.axes)]
            for e in sorted(near, key=lambda e: e.count != collective.count):
                consumed = min(needs[k], e.bytes)
                e.bytes -= consumed
                needs[k] -= consumed
    short = [(c, need) for c, need in zip(rest, needs, strict=True) if need > PADDING_SHARE * c.wire_bytes]
    missing = sum(need for _, need in short)
    blamed = []
    for collective, need in sorted(short, key=lambda pair: -pair[1]):
        if missing < least:
            break
        blamed.append(collective)
        missing -= need
    return blamed


def _loops_joined(found: Sequence[CompiledCollective]) -> list[CompiledCollective]:
    """Merge the permutes of one op, which together are one gather or reduction that overlaps with parts of a matmul.

    Permutes with equal axes and source are added up by bytes on the wire; all other collectives are returned as they
    are.
    """
    joined: dict[tuple[object, ...], CompiledCollective] = {}
    for number, collective in enumerate(found):
        key = (collective.axes, collective.source) if collective.kind == _PERMUTE and collective.source else (number,)
        if key in joined:
            wire = dict(joined[key].wire)
            for axis, size in collective.wire.items():
                wire[axis] = wire.get(axis, 0.0) + size
            collective = dataclasses.replace(joined[key], wire=wire)
        joined[key] = collective
    return list(joined.values())


def _reshards(program: Program, plan: Plan) -> list[dict[str, Any]]:
    """Return Shardy's list of reshards and sums for the program under the plan.

    Each is a mapping with `before` and `after` (axes of each dim), `shape`, `names` and `line`, and for sums `summed`
    (axes).
    """
    from autoshard import mlir

    module = mlir.inline_calls(mlir.parse_module(program.module))
    mlir.set_shardings(module, "mesh", plan.mesh, list(plan.arguments.values()), list(plan.results.values()))
    regions = mlir.regions_of(module, plan.regions)
    mlir.insert_pins(module, "mesh", plan.mesh, plan.pins)
    mlir.insert_regions(module, "mesh", plan.mesh, regions)
    return [*mlir.explicit_reshards(module), *mlir.explicit_sums(module)]


def involuntary(log: str) -> list[str]:
    """Return the compiler's warnings of involuntary rematerialisation in `log`, the first 400 characters of each line,
    without files of this machine.
    """
    marked = (line.strip() for line in log.splitlines() if "nvoluntary full rematerialization" in line)
    return [_SOURCE.sub("", line)[:400] for line in marked]


def _explained(
    collective: CompiledCollective, total: float, reshards: Sequence[dict[str, Any]], notes: Sequence[str]
) -> Unforeseen:
    """Return a report of a collective with the reshard and the warning that explain it best; empty texts without them.

    - `total`: bytes that one device sends in the step.
    - `reshards`: result of `_reshards`.
    - `notes`: warnings, of which the first with the op's name counts.
    """
    tail = _tail(collective.source)
    best = max(reshards, key=lambda r: _likeness(r, collective), default=None)
    if best is not None and not _likeness(best, collective)[0]:
        best = None
    note = next((text for text in notes if tail and tail in text), "")
    before, after = _specs(best) if best else ("", "")
    return Unforeseen(
        kind=collective.kind,
        axes=collective.axes,
        wire_bytes=round(collective.wire_bytes),
        share=collective.wire_bytes / total,
        count=collective.count,
        op=collective.source or collective.name,
        line=(best["line"] if best else "") or collective.line,
        before=before,
        after=after,
        note=note,
    )


def _likeness(reshard: dict[str, Any], collective: CompiledCollective) -> tuple[bool, bool, bool, int]:
    """Rank how well a reshard of Shardy's list explains a collective; a greater tuple explains it better.

    The first part is True if the reshard explains it, the second if its changed axes are the collective's. The third is
    True for the same op and kind, and the last counts equal leading parts of their names.
    """
    tail = _tail(collective.source)
    same = bool(tail) and any(_tail(name) == tail for name in reshard["names"])
    summed = reshard.get("summed", ())
    places = [{a: d for d, axes in enumerate(reshard[side]) for a in axes} for side in ("before", "after")]
    changed = {*summed, *(a for a in {*places[0], *places[1]} if places[0].get(a) != places[1].get(a))}
    fitting = bool(changed & set(collective.axes))
    near = max((_shared(_tail(name), tail) for name in reshard["names"]), default=0)
    kind = bool(summed) == (collective.kind in _REDUCING)
    return (same or (fitting and kind and near > 0)), fitting, kind and same, near


def _shared(name: str, tail: str) -> int:
    """Count the equal leading parts of two name stacks."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(name.split("/"), tail.split("/"), strict=False))
    return sum(1 for _ in pairs)


def _specs(reshard: dict[str, Any]) -> tuple[str, str]:
    """Return the specs of a reshard before and after, as text; the first one names axes that are not summed yet."""
    before, after = (spec_text(Spec(reshard[side]), reshard["shape"]) for side in ("before", "after"))
    if reshard.get("summed"):
        before += f" not yet summed over {', '.join(reshard['summed'])}"
    return before, after


def _tail(name: str) -> str:
    """Return an op's name stack without its first part, the jitted function's name, which differs between lowerings."""
    return name.partition("/")[2]
