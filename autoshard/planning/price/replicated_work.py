"""Work that several devices repeat, the sharded share of each dim group, and ops without a rule or of unknown work."""

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.base.units import format_bytes
from autoshard.graph import SMALL, Op
from autoshard.planning.price.evaluate import tensor_spec
from autoshard.planning.price.op_prices import OpPrices
from autoshard.planning.price.step_ledger import Ledger
from autoshard.planning.record.plan_parts import Unruled
from autoshard.planning.record.spec import axis_words
from autoshard.planning.space.decision_model import Model, Node
from autoshard.planning.space.dim_groups import Groups, tensor_groups
from autoshard.planning.space.op_models import FOLDED_OPS
from autoshard.planning.xla.partitioner_rules import whole_factors


NOTICEABLE = 0.05
"""Least share of the step for repeated work to be reported."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicatedWork:
    """Repeated work: ops of one kind at one source line, replicated along the same mesh axes, summed over layers."""

    what: str
    """Kind of the ops and their source line, in words."""
    axes: tuple[str, ...]
    """Mesh axes along which all devices do the same work."""
    seconds: float
    """Compute seconds of the ops in one step."""
    splits: tuple[str, ...]
    """Dim groups that could split the ops, with their sizes; empty if none could."""
    call: bool
    """True if the ops are calls of a kernel, whose work the planner cannot inspect."""
    pin: str = ""
    """Pin of an argument or result that splits most of the work, as `--pin` takes it; empty if there is none."""
    line: str = ""
    """Source line of the ops; empty if it is unknown."""


def find_replicated_work(ledger: Ledger, groups: Groups, names: Mapping[str, int]) -> list[ReplicatedWork]:
    """Return all repeated work, longest first.

    Work is repeated along a mesh axis larger than 1 that splits neither an op nor its manual region. `names` maps names
    of arguments and results to their tensors.
    """
    model = ledger.model
    seconds: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    splits: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}
    longest: dict[tuple[str, tuple[str, ...]], tuple[float, Op]] = {}
    calls: set[tuple[str, tuple[str, ...]]] = set()
    for op, used, op_s in (*_heavy(ledger), *_fused(ledger)):
        idle = tuple(a for a, n in model.mesh.axes.items() if n > 1 and a not in used and a not in op.manual)
        if idle and op_s > 0:
            key = (_words(op), idle)
            seconds[key] += op_s
            splits.setdefault(key, tuple(_splits(model, groups, op)))
            if key not in longest or op_s > longest[key][0]:
                longest[key] = op_s, op
            if op.opaque is not None:
                calls.add(key)
    repeated = []
    for (what, axes), total_s in seconds.items():
        op_s, op = longest[what, axes]
        pin = _pin(ledger, op, axes, names) if op_s >= total_s / 2 else ""
        called = (what, axes) in calls
        repeated.append(ReplicatedWork(what, axes, total_s, splits[what, axes], called, pin, op.line))
    return sorted(repeated, key=lambda each: (-each.seconds, each.what, each.axes))


def replicated_work_lines(
    ledger: Ledger, groups: Groups, step_time_s: float, names: Mapping[str, int], constrainable: bool
) -> list[str]:
    """Return a sentence for each piece of repeated work of at least `NOTICEABLE` of the step, and one for the rest
    along the same axes.

    The rest is omitted if its sum is not noticeable.

    - `step_time_s`: the predicted step; a step of 0 gives no sentence.
    - `names`: tensors by name of arguments and results.
    - `constrainable`: True for JAX code, whose author can constrain a value at its line.
    """
    lines, model = [], ledger.model
    rest: dict[tuple[str, ...], list[ReplicatedWork]] = defaultdict(list)
    for each in find_replicated_work(ledger, groups, names) if step_time_s > 0 else []:
        if each.seconds < NOTICEABLE * step_time_s:
            rest[each.axes].append(each)
            continue
        remedy = f"it can be split by {', '.join(each.splits)}" if each.splits else "it cannot be split"
        if each.splits and each.pin:
            remedy += f"; `--pin '{each.pin}'` shows at what cost"
        elif each.splits and each.line and constrainable:
            remedy += "; `with_sharding_constraint` on its result shows at what cost"
        if each.call and not each.splits:
            remedy = "neither its grid nor a rule says what may be split there; `autoshard.register_rule` can"
        lines.append(
            f"{_devices(model, each.axes)} {each.what}, {each.seconds / step_time_s:.1%} of the step: {remedy}."
        )
    for axes, several in rest.items():
        share = sum(each.seconds for each in several) / step_time_s
        if share >= NOTICEABLE:
            first = ", ".join(each.what for each in several[:3])
            lines.append(f"{_devices(model, axes)} smaller ops, {share:.1%} of the step together: first {first}.")
    return lines


def _devices(model: Model, axes: tuple[str, ...]) -> str:
    """Return the opening of a sentence about the devices along some axes."""
    count = math.prod(model.mesh.axes[a] for a in axes)
    return f"the {count} devices along {' x '.join(axis_words(axes))} do the same work in"


def _heavy(ledger: Ledger) -> Iterator[tuple[Op, set[str], float]]:
    """Yield ops that have strategies of their own, with the axes that split them and their compute seconds in one step.

    Ops without a rule are reported by `find_unruled` instead. Folded ops are reported with the fusions.
    """
    model = ledger.model
    for row in ledger.rows:
        if row.kind != "compute" or row.op < 0:
            continue
        op, number = model.graph.ops[row.op], model.op_node[row.op]
        if op.rule is not None and op.kind not in FOLDED_OPS:
            split = np.flatnonzero(model.nodes[number].states[ledger.choices[number]] >= 0)
            yield op, {model.axis_names[a] for a in split}, row.step_s


def _fused(ledger: Ledger) -> Iterator[tuple[Op, set[str], float]]:
    """Yield the same for fusions of elementwise work, by their last op.

    The axes that split a fusion are those that split any tensor which the fusion reads or writes. Traffic of the host's
    memory does not count.
    """
    model = ledger.model
    for (what, number), passes in itertools.groupby(ledger.passes, key=lambda each: each.place):
        if what == "op":
            op, near = model.graph.ops[number], [each for each in passes if not each.on_host]
            used = {axis for each in near for axis in each.axes}
            seconds = float(model.compute.memory_seconds(sum(each.size for each in near)))
            yield op, used, seconds * model.graph.trips(op.loop)


def _words(op: Op) -> str:
    """Return a description of an op: its kind and its source line, else the end of its name without layer numbers."""
    kind = op.opaque.target if op.opaque else op.kind
    where = op.line or ("" if op.opaque else re.sub(r"\d+", "*", "/".join(op.name.split("/")[-2:])))
    return f"`{kind}` at {where}" if where and where != kind else f"`{kind}`"


def _splits(model: Model, groups: Groups, op: Op) -> Iterator[str]:
    """Yield the named dim groups, with sizes, of the op's factors that a strategy may split, each once; none for an op
    without a rule.
    """
    if op.rule is None:
        return
    whole = whole_factors(model.graph, op, model.mesh.topology.backend)
    sizes = [(factor, size) for factor, size in enumerate(op.rule.sizes) if factor not in whole and size > 1]
    named = [(factor_name(model, groups, op, factor), size) for factor, size in sizes]
    yield from dict.fromkeys(f"{name} ({size})" for name, size in named if name)


def _pin(ledger: Ledger, op: Op, idle: tuple[str, ...], names: Mapping[str, int]) -> str:
    """Return the pin of an argument or result that adds idle axes to a dim of the op, as `--pin` takes it.

    The tensor must always have the spec of a result of the op: an operand could be gathered in front of it. The pin has
    the planned spec in its other dims. Empty if no such tensor has a dim that the axes divide.
    """
    model, structure = ledger.model, ledger.model.structure
    if op.rule is None:
        return ""
    whole = whole_factors(model.graph, op, model.mesh.topology.backend)
    places = {
        (structure.cluster_of[tensor], place)
        for tensor, dims in zip(op.results, op.rule.results, strict=True)
        for place, factors in zip(structure.dims_of[tensor], dims, strict=False)
        if place >= 0 and factors and whole.isdisjoint(factors)
    }
    clusters, order = {cluster for cluster, _ in places}, list(model.mesh.axes)
    for axes, (name, tensor) in itertools.product(((idle, *((axis,) for axis in idle))), names.items()):
        cluster = structure.cluster_of[tensor]
        spec = tensor_spec(model, ledger.choices, tensor) if cluster in clusters else None
        if spec is None or set(spec.axes) & set(axes) or not set(spec.axes) <= set(order):
            continue
        blocked, own = structure.clusters[cluster].blocked, structure.dims_of[tensor]
        stacked = next((dim for dim, place in enumerate(own) if place not in blocked), 0)
        for dim, (place, size) in enumerate(zip(own, model.graph.tensors[tensor].shape, strict=True)):
            split = sorted((*spec.dims[dim], *axes), key=order.index)
            if (
                (cluster, place) in places
                and place not in blocked
                and not size % math.prod(model.mesh.axes[axis] for axis in split)
            ):
                entries = [*spec.dims[stacked:dim], split, *spec.dims[dim + 1 :]]
                return f"{name}={','.join('+'.join(entry) or 'None' for entry in entries)}"
    return ""


def factor_name(model: Model, groups: Groups, op: Op, factor: int) -> str:
    """Return the name of the dim group of a factor of an op with a rule; empty without one."""
    for tensor, dims in op.sides:
        cluster = model.structure.cluster_of[tensor]
        at = next((d for d, factors in enumerate(dims) if factor in factors), None)
        if cluster < 0 or at is None:
            continue
        place = model.structure.dims_of[tensor][at]
        group = groups.of_factor.get((cluster, place)) if place >= 0 else None
        if group is not None and (name := groups.names.get(group, "")):
            return name
    return ""


def shares_of(
    model: Model, groups: Groups, choices: NDArray[np.int64], tensors: Sequence[int]
) -> dict[tuple[int, str], float]:
    """Return by (dim group, axis) the share of bytes that the axis splits along the group.

    The share is of the unsplit bytes of all `tensors` that have the group. Tensors without a cluster are left out, as
    are pairs without any split.
    """
    split: dict[tuple[int, str], int] = defaultdict(int)
    total: dict[int, int] = defaultdict(int)
    for tensor in tensors:
        if model.structure.cluster_of[tensor] < 0:
            continue  # regenerated on every device that needs the tensor
        size = model.graph.tensors[tensor].bytes
        spec = tensor_spec(model, choices, tensor)
        for group, axes in zip(tensor_groups(model.structure, groups.of_factor, tensor), spec.dims, strict=True):
            if group is None:
                continue
            total[group] += size
            for axis in axes:
                split[(group, axis)] += size
    return {(g, a): size / total[g] for (g, a), size in split.items()}


def find_unruled(ledger: Ledger, step_time_s: float) -> tuple[Unruled, ...]:
    """Return the ops that are planned as replicated for lack of a rule, one row by kind or call target, longest first.
    The example is the name of the longest op.
    """
    graph = ledger.model.graph
    op_seconds: dict[int, float] = defaultdict(float)
    for row in ledger.rows:
        if isinstance(row.where, Node):
            op_seconds[row.op] += row.exposed_s if row.axes else row.step_s
    groups: dict[tuple[str, bool], list[tuple[float, Op]]] = defaultdict(list)
    for op_id in graph.without_rule:
        op = graph.ops[op_id]
        kind = op.opaque.target if op.opaque else op.kind
        groups[(kind, op.opaque is not None)].append((op_seconds[op_id], op))
    unruled = []
    for (kind, custom), ops in groups.items():
        seconds = sum(each for each, _ in ops)
        worst = max(ops, key=lambda item: item[0])[1]
        share = seconds / step_time_s if step_time_s > 0 else 0.0
        unruled.append(Unruled(kind, custom, len(ops), seconds, share, worst.name))
    return tuple(sorted(unruled, key=lambda u: (-u.seconds, u.kind)))


def _is_small(target: str) -> bool:
    """Return True if a call target contains a part of `SMALL`: its FLOPs do not count."""
    return any(part in target for part in SMALL)


@dataclasses.dataclass(frozen=True, slots=True)
class UnknownCall:
    """Assumptions for the calls of one target, whose work neither the program nor a rule states."""

    ruled: bool
    """True if a sharding rule is known."""
    axes: tuple[str, ...]
    """Mesh axes that split the calls; without a rule every device repeats them whole."""
    moved_bytes: float
    """Bytes of memory traffic of one device in a step, as which the calls count; they count as no FLOPs."""
    kernel: bool
    """True for a Pallas kernel, of which the traffic of its blocks is known and no matmul was found."""


def unknown_calls(ledger: Ledger, prices: OpPrices) -> dict[str, UnknownCall]:
    """Return the calls of unknown work by target, in the order of the program; `prices` are those of the ledger."""
    model, found = ledger.model, dict[str, UnknownCall]()
    for op in model.graph.ops:
        call = op.opaque
        if call is None or op.flops or _is_small(call.target) or (call.traffic and not call.steps):
            continue
        number = model.op_node.get(op.id)
        if number is None:  # a call of scalars alone, for which nothing is decided
            continue
        split = np.flatnonzero(model.nodes[number].states[ledger.choices[number]] >= 0)
        axes = tuple(model.axis_names[a] for a in split)
        work = prices.work.get(("op", op.id))
        moved = 0.0 if work is None else work.moved_bytes
        if (known := found.get(call.target)) is not None:
            axes, moved = tuple(dict.fromkeys((*known.axes, *axes))), moved + known.moved_bytes
        found[call.target] = UnknownCall(call.rule is not None, axes, moved, bool(call.steps))
    return found


def unruled_lines(unruled: tuple[Unruled, ...], unknown: Mapping[str, UnknownCall]) -> list[str]:
    """Return one sentence for each row of ops without a rule, in order: their share of the step and, for custom calls,
    the remedy. For calls in `unknown` (`unknown_calls`) the sentence has the assumed work too.
    """
    lines = []
    for each in unruled:
        what = f"custom call `{each.kind}`" if each.custom_call else each.kind
        where = f" ({each.example})" if each.example and each.example != each.kind else ""
        count = f"{each.count} x " if each.count > 1 else ""
        call = unknown.get(each.kind) if each.custom_call else None
        lacks = "has no sharding rule" + (" and states no work" if call else "")
        line = f"{count}{what}{where} {lacks}: every device repeats it whole ({each.share:.1%} of the step"
        line += f", as no FLOPs and {format_bytes(call.moved_bytes)} of memory traffic)" if call else ")"
        if call and "callback" in each.kind:
            line += "; it is Python on the host, whose time is not in the prediction"
        elif each.custom_call:
            flops = ', flops="..."' if call else ""
            line += f'; give it {"both" if call else "one"} with autoshard.register_rule("{each.kind}", '
            line += f'"b ... -> b ..."{flops})'
        lines.append(line + ".")
    return lines


def call_lines(model: Model, unknown: Mapping[str, UnknownCall]) -> list[str]:
    """Return sentences on calls with a rule whose work is unknown, then on calls that cannot run on a shard; one for
    each target.

    `unknown` is the result of `unknown_calls`.
    """
    calls = [(op, op.opaque) for op in model.graph.ops if op.opaque is not None]
    fixed = sorted({call.target for op, call in calls if op.rule is not None and call.fixed and call.on_shards})
    lines = []
    for target, each in sorted(unknown.items()):
        if each.ruled:
            split = f"is split along {' x '.join(axis_words(each.axes))}" if each.axes else "runs whole on every device"
            remedy = "the cost_estimate of its pallas_call, or " if each.kernel else ""
            lines.append(
                f"`{target}` states no work: it {split}, and counts as no FLOPs and {format_bytes(each.moved_bytes)} "
                f'of memory traffic on a device; state FLOPs with {remedy}autoshard.register_rule("{target}", ..., '
                'flops="...").'
            )
    return lines + [
        f"`{target}` is compiled for whole tensors in the module: to run the plan where it is split, plan the Python "
        "program it was traced from (autoshard then builds the kernel for its shards)."
        for target in fixed
    ]
