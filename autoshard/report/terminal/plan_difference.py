"""Differences between two plans."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.base.units import format_bytes, format_seconds
from autoshard.errors import UserError
from autoshard.planning import Plan, Spec, StateReshard, axis_words, mesh_words, patterns, predict_reshard, spec_text
from autoshard.report.display import clean, readable


FIGURES = ("step_time_s", "compute_s", "hidden_comm_s", "exposed_comm_s", "peak_bytes", "mfu", "fits")
"""Fields of `Prediction` that are compared."""
LEAST_S = 1e-9
"""Least seconds whose ratio is shown; less than these is rounding."""

SHOWN = 40
"""Most arguments and rows of communication that the report lists; the rest is counted."""
INSIDE = 5
"""Most rows of values inside of the step that the report lists, those of most values first; `--json` has all."""


_OPERAND = re.compile(r" as op \S+ takes it$")
"""End of the name of a value's use by one op."""
FREE = "not pinned"
"""Text in place of a spec if propagation decides."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inside:
    """A value or an op inside of the step that two plans treat differently."""

    name: str
    """Source name, followed by the consuming op if only its use differs."""
    first: str
    """Specs in the first plan, one after the other; `not pinned` if propagation decides."""
    second: str
    """Specs in the second plan, one after the other."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """All communication of one kind over the same axes in a step."""

    count: int = 0
    """Number of collectives."""
    wire_bytes: int = 0
    """Bytes on the wire of all collectives."""
    seconds: float = 0.0
    """Seconds of all collectives in one step."""
    exposed_s: float = 0.0
    """Seconds of these that compute waits for."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlanChange:
    """Differences between two plans."""

    figures: tuple[tuple[str, Any, Any], ...]
    """Figures as (field of `Prediction`, in the first, in the second)."""
    settings: tuple[tuple[str, str, str], ...]
    """Differing inputs: program, topology, mesh, memory limit."""
    specs: tuple[tuple[str, str, str], ...]
    """Differing specs of common arguments as (argument, spec in the first, spec in the second).

    Specs are equal if every device, counted along the mesh, holds the same part: `*/data` of data=8 and `*/data/model`
    of data=4, model=2.
    """
    followers: frozenset[str]
    """Names of optimizer state among `specs` that is split as its parameter in both plans."""
    shared: int
    """Number of arguments that both plans have."""
    renamed: int
    """Number of arguments whose equal specs have other axes in the two plans."""
    only_first: tuple[str, ...]
    """Names of arguments that only the first plan has."""
    only_second: tuple[str, ...]
    """Names of arguments that only the second plan has."""
    inside: tuple[Inside, ...]
    """Differing pins, ops split in space and calls on shards, in program order."""
    collectives: tuple[tuple[str, str, Sent, Sent], ...]
    """Differing communication as (kind, axes, in the first, in the second), the largest difference in seconds first."""
    state: StateReshard | None = None
    """Reshard of the state from the first plan to the second; None if nothing moves or no state is common."""

    @property
    def is_empty(self) -> bool:
        """True if the two plans have equal figures, settings, arguments, choices inside of the step and
        communication.
        """
        figures = any(a != b for _, a, b in self.figures)
        named = self.settings or self.specs or self.only_first or self.only_second
        return not (figures or named or self.inside or self.collectives)


def difference(first: Plan, second: Plan) -> PlanChange:
    """Compare two plans, which may have different meshes, topologies or programs.

    Arguments are matched by name. `figures` lists all of `FIGURES`, equal ones too.
    """
    both = [name for name in first.arguments if name in second.arguments]
    settings = []
    for name, a, b in (
        ("program", first.program_name, second.program_name),
        ("program fingerprint", first.program_fingerprint[:12], second.program_fingerprint[:12]),
        ("topology", first.topology, second.topology),
        ("mesh", _mesh(first), _mesh(second)),
        ("memory limit", format_bytes(first.memory_limit_bytes), format_bytes(second.memory_limit_bytes)),
    ):
        if a != b:
            settings.append((name, a, b))
    equal = {name for name in both if len({_placed(each.arguments[name], each) for each in (first, second)}) == 1}
    labels, other_labels = _labels(first, second), _labels(second, first)
    specs = tuple(
        (name, _argument(first, name, labels), _argument(second, name, other_labels))
        for name in both
        if name not in equal
    )
    return PlanChange(
        figures=tuple((key, getattr(first.prediction, key), getattr(second.prediction, key)) for key in FIGURES),
        settings=tuple(settings),
        specs=specs,
        followers=_followers(first, specs),
        shared=len(both),
        renamed=sum(first.arguments[name] != second.arguments[name] for name in equal),
        only_first=tuple(name for name in first.arguments if name not in second.arguments),
        only_second=tuple(name for name in second.arguments if name not in first.arguments),
        inside=tuple(_inside(first, second)),
        collectives=_collectives(first, second),
        state=_state(first, second),
    )


def _state(first: Plan, second: Plan) -> StateReshard | None:
    """Return the reshard of the state; None if nothing moves or if it cannot be predicted, as without common state."""
    try:
        state = predict_reshard(first, second)
    except UserError:
        return None
    return state if any(state.received_bytes) else None


def _placed(spec: Spec, plan: Plan) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return for each dim the `_steps` of its axes: equal for two specs if each device holds the same part by both."""
    return tuple(_steps(axes, plan.mesh) for axes in spec.dims)


def _steps(axes: Sequence[str], mesh: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    """Return (number of parts, devices from one part to the next) of axes, outer first; neighbours are joined.

    Devices are counted with the last axis of the mesh fastest. In data=4, model=2 the axis data gives ((4, 2),); both
    axes give ((8, 1),), as data=8 does.
    """
    strides = dict(zip(mesh, [*accumulate(reversed([*mesh.values()][1:]), mul, initial=1)][::-1], strict=True))
    steps: list[tuple[int, int]] = []
    for axis in axes:
        size, stride = mesh[axis], strides[axis]
        if size > 1 and steps and steps[-1][1] == size * stride:
            steps[-1] = (steps[-1][0] * size, stride)
        elif size > 1:
            steps.append((size, stride))
    return tuple(steps)


def _labels(plan: Plan, other: Plan) -> dict[str, str]:
    """Return the text for each axis of a plan: with its size, as `data=8`, where the other plan has it at another."""
    return {axis: axis if other.mesh.get(axis, size) == size else f"{axis}={size}" for axis, size in plan.mesh.items()}


def _labelled(spec: Spec, labels: Mapping[str, str]) -> Spec:
    """Return a spec with the labels of its axes."""
    return Spec(tuple(tuple(labels[axis] for axis in axes) for axes in spec.dims))


def _argument(plan: Plan, name: str, labels: Mapping[str, str]) -> str:
    """Return the spec of an argument as text."""
    return spec_text(_labelled(plan.arguments[name], labels), plan.shapes[name])


def _inside(first: Plan, second: Plan) -> Iterator[Inside]:
    """Yield the values that two plans treat differently, by their position in the program.

    Values are matched by their ops if both plans have the same program, else by their names and order.
    """
    same = first.program_fingerprint == second.program_fingerprint
    a, b = _chosen(first, same, _labels(first, second)), _chosen(second, same, _labels(second, first))
    for key in sorted({**a, **b}, key=lambda key: a[key].place if key in a else b[key].place):
        if key not in a or key not in b or a[key].placed != b[key].placed:
            one, other = (" then ".join(side[key].specs) if key in side else FREE for side in (a, b))
            yield Inside((a.get(key) or b[key]).name, one, other)


class ChoiceInside(NamedTuple):
    """A plan's choice at one place inside of the step."""

    place: tuple[int, ...]
    """Position in the program."""
    name: str
    """Source name, followed by the consuming op if the choice is that of a use."""
    specs: list[str]
    """Specs as text, in order."""
    placed: list[Hashable]
    """Parts of the same specs that devices hold, equal for equal parts."""


def _chosen(plan: Plan, by_op: bool, labels: Mapping[str, str]) -> dict[Hashable, ChoiceInside]:
    """Return the plan's choices inside of the step, with these labels of axes.

    The key of a choice is its position with `by_op`, else its name and its number among equal names.
    """
    choices: dict[Hashable, ChoiceInside] = {}
    seen: dict[str, int] = defaultdict(int)
    numbers: dict[Hashable, str] = {}

    def add(place: tuple[int, ...], name: str, spec: str, placed: Hashable) -> None:
        """Add a spec to the choice at a position, and number its name at the first one."""
        if place not in numbers:
            numbers[place] = f"{name} {seen[name]}"
            seen[name] += 1
        key: Hashable = place if by_op else numbers[place]
        choice = choices.setdefault(key, ChoiceInside(place, name, [], []))
        choice.specs.append(spec)
        choice.placed.append(placed)

    for pin in plan.pins:
        use = "" if pin.operand is None else f" as op {pin.operand[0]} takes it"
        place = (pin.op, pin.index, *(pin.operand or ()))
        name = f"{readable(pin.name) or f'op {pin.op}'}{use}"
        add(place, name, spec_text(_labelled(pin.spec, labels)), _placed(pin.spec, plan))
    for region in plan.regions:
        name = f"{readable(region.name) or f'op {region.op}'} in space"
        add((region.op, -1, 0), name, _sides(region, labels), _placed_sides(region, plan))
    for call in plan.calls:
        add((call.op, -1, 1), f"call of {call.name}", _sides(call, labels), _placed_sides(call, plan))
    return choices


def _placed_sides(op: Any, plan: Plan) -> Hashable:
    """Return the `_placed` specs of an op's operands and results on shards, and the steps of the axes of its sum."""
    sides = (tuple(_placed(spec, plan) for spec in specs) for specs in (op.operands, op.results))
    return *sides, _steps(op.summed, plan.mesh)


def _sides(op: Any, labels: Mapping[str, str]) -> str:
    """Return the specs of an op's operands and results on shards: `(a, b) -> (c) summed over x`."""

    def listed(specs: tuple[Spec, ...]) -> str:
        """Return specs as text."""
        return ", ".join(spec_text(_labelled(spec, labels)) for spec in specs)

    summed = f" summed over {', '.join(axis_words([labels[axis] for axis in op.summed]))}" if op.summed else ""
    return f"({listed(op.operands)}) -> ({listed(op.results)}){summed}"


def _collectives(first: Plan, second: Plan) -> tuple[tuple[str, str, Sent, Sent], ...]:
    """Return (kind, axes, first, second) of the differing communication, the largest difference in seconds first."""
    a, b = _sent(first), _sent(second)
    axes = {
        (each.kind, _steps(each.axes, plan.mesh)): ", ".join(axis_words([labels[axis] for axis in each.axes]))
        for plan, labels in ((second, _labels(second, first)), (first, _labels(first, second)))
        for each in plan.prediction.collectives
    }
    rows = [(key[0], axes[key], a.get(key, Sent()), b.get(key, Sent())) for key in dict.fromkeys([*a, *b])]
    differing = [row for row in rows if row[2] != row[3]]
    return tuple(sorted(differing, key=lambda row: (-abs(row[2].seconds - row[3].seconds), row[0], row[1])))


def _sent(plan: Plan) -> dict[tuple[str, tuple[tuple[int, int], ...]], Sent]:
    """Return the communication of a plan in one step by kind and the steps of its axes."""
    sent: dict[tuple[str, tuple[tuple[int, int], ...]], Sent] = {}
    for each in plan.prediction.collectives:
        key = (each.kind, _steps(each.axes, plan.mesh))
        old = sent.get(key, Sent())
        sent[key] = Sent(
            old.count + each.count,
            old.wire_bytes + each.wire_bytes,
            old.seconds + each.seconds,
            old.exposed_s + each.waited_s,
        )
    return {
        # Below a picosecond are rounding errors of the sums.
        key: dataclasses.replace(each, seconds=round(each.seconds, 12), exposed_s=round(each.exposed_s, 12))
        for key, each in sent.items()
    }


def _mesh(plan: Plan) -> str:
    """Return the mesh of a plan as text without spaces."""
    return mesh_words(plan.mesh).replace(", ", ",")


def figure_text(key: str, value: Any) -> str:
    """Return the value of one of `FIGURES` as text for readers; `-` for None."""
    if value is None:
        return "-"
    if key == "fits":
        return "yes" if value else "no"
    if key == "mfu":
        return f"{value:.1%}"
    return format_bytes(value) if key.endswith("_bytes") else format_seconds(value)


def figure_name(key: str) -> str:
    """Return the name of one of `FIGURES` for readers: `step time` for `step_time_s`."""
    return "MFU" if key == "mfu" else key.removesuffix("_s").removesuffix("_bytes").replace("_", " ")


def difference_figures(found: PlanChange) -> dict[str, Any]:
    """Return the JSON object of `autoshard diff --json`; `state` is None if nothing moves."""
    return {
        "figures": {key: {"first": a, "second": b} for key, a, b in found.figures},
        "settings": {name: {"first": a, "second": b} for name, a, b in found.settings},
        "specs": {name: {"first": a, "second": b} for name, a, b in found.specs},
        "shared": found.shared,
        "renamed": found.renamed,
        "only_first": list(found.only_first),
        "only_second": list(found.only_second),
        "inside": [dataclasses.asdict(each) for each in found.inside],
        "collectives": [
            {"kind": kind, "axes": axes, "first": dataclasses.asdict(a), "second": dataclasses.asdict(b)}
            for kind, axes, a, b in found.collectives
        ],
        "state": None if found.state is None else dataclasses.asdict(found.state),
    }


def difference_report(found: PlanChange) -> RenderableType:
    """Return the difference for a terminal: figures and settings, specs, values inside of the step, communication,
    state.

    Tables list at most `SHOWN` rows.
    """
    figures = Table.grid(padding=(0, 3, 0, 0))
    for key, a, b in found.figures:
        ratio = f"{b / a:.2f}x" if key.endswith("_s") and min(a or 0, b or 0) > LEAST_S else ""
        figures.add_row(figure_name(key), figure_text(key, a), figure_text(key, b), Text(ratio, style="dim"))
    for name, a, b in found.settings:
        figures.add_row(Text(name, style="yellow"), Text(clean(a, 30)), Text(clean(b, 30)), "")
    specs, own = _rows(), [row for row in found.specs if row[0] not in found.followers]
    for name, a, b in own[:SHOWN]:
        specs.add_row(Text(clean(name, 44)), Text(a), Text(f"-> {b}"))
    count = f"{len(found.specs)} of {found.shared} common arguments are split differently"
    only = [(len(found.only_first), "first"), (len(found.only_second), "second")]
    only_text = "".join(f"; {n} {'is' if n == 1 else 'are'} only in the {which}" for n, which in only if n)
    parts: list[RenderableType] = [figures, Text(), Text(f"{count}{only_text}.", style="bold"), specs]
    if len(own) > SHOWN:
        parts.append(Text(f"  and {len(own) - SHOWN} more", style="dim"))
    if followers := len(found.specs) - len(own):
        parts.append(Text(f"  and {followers} of optimizer state, which follow these", style="dim"))
    if found.renamed:
        same = f"{found.renamed} are split into the same parts over axes of other names."
        parts.append(Text(same, style="dim"))
    parts += _inside_parts(found)
    parts += _collective_parts(found)
    parts += _state_parts(found.state)
    if found.is_empty:
        parts += [Text(), Text("The two plans are the same.", style="bold")]
    return Group(*parts)


def _followers(plan: Plan, specs: Sequence[tuple[str, str, str]]) -> frozenset[str]:
    """Return the names of optimizer state among rows whose last part and specs are those of a parameter's row."""
    parameters = {(name.rpartition(".")[2], *texts) for name, *texts in specs if plan.is_weight(name)}
    return frozenset(
        name
        for name, *texts in specs
        if plan.roles.get(name) == "optimizer_state" and (name.rpartition(".")[2], *texts) in parameters
    )


def _rows() -> Table:
    """Return an empty table of a name and two specs, which are wrapped in a narrow terminal before the name is cut."""
    table = Table.grid(padding=(0, 2, 0, 2))
    table.add_column(no_wrap=True)
    for _ in range(2):
        table.add_column(overflow="fold")
    return table


def _inside_parts(found: PlanChange) -> list[RenderableType]:
    """Return a title and the table of values inside of the step that differ, layers folded; empty if there are none."""
    if not found.inside:
        return []
    rows: dict[tuple[str, str, str], int] = defaultdict(int)
    shared = patterns(each.name for each in found.inside)
    steps = {each.name.partition("/")[0] for each in found.inside if "/" in each.name}
    for each in found.inside:
        name = _OPERAND.sub(" as operands", shared[each.name])
        rows[name.partition("/")[2] or name if len(steps) == 1 else name, each.first, each.second] += 1
    table = _rows()
    for (name, a, b), count in sorted(rows.items(), key=lambda row: -row[1])[:INSIDE]:
        times = f"{count} of " if count > 1 else ""
        table.add_row(Text(f"{times}{clean(name, 44)}"), Text(a), Text(f"-> {b}"))
    parts: list[RenderableType] = [
        Text(),
        Text(f"{len(found.inside)} values inside the step have other specs.", style="bold"),
        table,
    ]
    if len(rows) > INSIDE:
        parts.append(Text(f"  and {len(rows) - INSIDE} more rows, of fewer values; --json lists all", style="dim"))
    return parts


def _collective_parts(found: PlanChange) -> list[RenderableType]:
    """Return a title and the table of communication that differs, at most `SHOWN` rows; empty if there is none."""
    if not found.collectives:
        return []
    table = Table.grid(padding=(0, 2, 0, 2))
    for kind, axes, a, b in found.collectives[:SHOWN]:
        over, one, other = f"over {clean(axes)}", sent_text(a), f"-> {sent_text(b)}"
        table.add_row(Text(kind, no_wrap=True), Text(over), Text(one), Text(other))
    return [Text(), Text("Communication that differs.", style="bold"), table]


def _state_parts(state: StateReshard | None) -> list[RenderableType]:
    """Return a title and the table on the reshard of the state; empty for None."""
    if state is None:
        return []
    table = Table.grid(padding=(0, 2, 0, 2))
    largest = format_bytes(state.largest_read_bytes)
    before, after, received = map(max, (state.before_bytes, state.after_bytes, state.received_bytes))
    for what, value in (
        ("a device holds at most", f"{format_bytes(before)} -> {format_bytes(after)}"),
        ("and while it is moved tensor by tensor", format_bytes(max(state.peak_bytes))),
        ("it receives at most", f"{format_bytes(received)}, in {format_seconds(state.link_s)} or more"),
        ("all devices together", format_bytes(sum(state.received_bytes))),
        ("a checkpoint takes", format_bytes(state.whole_bytes)),
        ("a host reads of it at most", f"{format_bytes(max(state.read_bytes))}, {largest} of one tensor"),
    ):
        table.add_row(Text(what), Text(value))
    count = f"Moving {len(state.names)} tensors of state from the first to the second."
    return [Text(), Text(count, style="bold"), table]


def sent_text(sent: Sent) -> str:
    """Return communication as text: `32 times, 1.5 GiB, 3.2 ms (1.1 ms exposed)`; `none` if nothing is sent."""
    if not sent.count:
        return "none"
    times = f"{sent.count} time{'s' if sent.count > 1 else ''}, {format_bytes(sent.wire_bytes)}"
    exposed = f" ({format_seconds(sent.exposed_s)} exposed)" if sent.exposed_s > 0 else " (hidden)"
    return f"{times}, {format_seconds(sent.seconds)}{exposed}"
