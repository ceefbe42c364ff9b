"""Work that several devices do alike: what is said of ops of which nothing is split over some axis of the mesh."""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import Op, OpClass
from autoshard.plan.model._groups import Groups
from autoshard.plan.model._heavy import FOLDED_OPS
from autoshard.plan.model._model import Model
from autoshard.plan.price._predict import tensor_spec
from autoshard.plan.record._spec import axis_words
from autoshard.plan.xla._handling import whole_factors


NOTICEABLE = 0.05
"""Share of the step from which on work that is done alike is said."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alike:
    """Ops of one kind at one place of the source, alike on all devices along the same axes; layers put together."""

    what: str
    axes: tuple[str, ...]
    seconds: float
    splits: tuple[str, ...]
    """Dim groups that the ops could be split by, with their sizes."""
    call: bool
    """Whether they are calls of a kernel, into which nobody looks."""


def find_alike(model: Model, groups: Groups, choices: NDArray[np.int64]) -> list[Alike]:
    """All such work, what takes longest first."""
    seconds: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    splits: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}
    calls: set[tuple[str, tuple[str, ...]]] = set()
    for op, used, took in (*_heavy(model, choices), *_fused(model, choices)):
        idle = tuple(a for a, n in model.mesh.axes.items() if n > 1 and a not in used and a not in op.manual)
        if idle and took > 0:
            key = (_words(op), idle)
            seconds[key] += took
            splits.setdefault(key, tuple(_splits(model, groups, op)))
            if op.opaque is not None:
                calls.add(key)
    found = [Alike(*key, took, splits[key], key in calls) for key, took in seconds.items()]
    return sorted(found, key=lambda each: (-each.seconds, each.what, each.axes))


def alike_lines(model: Model, groups: Groups, choices: NDArray[np.int64], step_time_s: float) -> list[str]:
    """A sentence for each op of a noticeable share, and one for the rest over the same axes if they have one."""
    lines = []
    rest: dict[tuple[str, ...], list[Alike]] = defaultdict(list)
    for each in find_alike(model, groups, choices) if step_time_s > 0 else []:
        if each.seconds < NOTICEABLE * step_time_s:
            rest[each.axes].append(each)
            continue
        how = f"it can be split by {', '.join(each.splits)}" if each.splits else "it cannot be split"
        if each.call and not each.splits:
            how = "neither its grid nor a rule says what may be split there; `autoshard.register_rule` can"
        lines.append(f"{_devices(model, each.axes)} {each.what}, {each.seconds / step_time_s:.1%} of the step: {how}.")
    for axes, several in rest.items():
        share = sum(each.seconds for each in several) / step_time_s
        if share >= NOTICEABLE:
            first = ", ".join(each.what for each in several[:3])
            lines.append(f"{_devices(model, axes)} smaller ops, {share:.1%} of the step together: first {first}.")
    return lines


def _devices(model: Model, axes: tuple[str, ...]) -> str:
    count = math.prod(model.mesh.axes[a] for a in axes)
    return f"the {count} devices along {' x '.join(axis_words(axes))} do the same work in"


def _heavy(model: Model, choices: NDArray[np.int64]) -> Iterator[tuple[Op, set[str], float]]:
    """Ops with strategies of their own, the axes that split them, and their compute time. Those without a rule are
    reported apart."""
    for op_id, number in sorted(model.op_node.items()):
        op, node = model.graph.ops[op_id], model.nodes[number]
        if op.rule is None or op.kind in FOLDED_OPS:
            continue
        chosen = int(choices[number])
        used = {model.axis_names[a] for a in np.flatnonzero(node.states[chosen] >= 0)}
        yield op, used, sum(float(s[chosen]) for (_, what), s in node.time.items() if what == "compute")


def _fused(model: Model, choices: NDArray[np.int64]) -> Iterator[tuple[Op, set[str], float]]:
    """The same of elementwise work: a fusion is split over the axes that split anything it reads or writes."""
    for fusion in model.liveness.fusions:
        op = model.graph.ops[fusion.root]
        if op.op_class is OpClass.HEAVY and op.kind not in FOLDED_OPS:
            continue
        used: set[str] = set()
        size = 0.0
        for tensor in (*fusion.moved, *fusion.reads):
            record = model.graph.tensors[tensor]
            if model.structure.cluster_of[tensor] < 0 or tensor in model.liveness.hosted:
                continue
            spec = tensor_spec(model, choices, tensor)
            used.update(spec.axes)
            item = record.itemsize
            local = float(math.prod(spec.local_shape(record.shape, model.mesh.axes))) * item
            size += float(model.residency.streamed(tensor, np.array([local]))[0])
        yield op, used, float(model.compute.memory_seconds(size)) * model.graph.trips(op.loop)


def _words(op: Op) -> str:
    """`dot_general` at model.py:12, else with the end of its name, layers' numbers left out."""
    kind = op.opaque.target if op.opaque else op.kind
    where = op.line or ("" if op.opaque else re.sub(r"\d+", "*", "/".join(op.name.split("/")[-2:])))
    return f"`{kind}` at {where}" if where and where != kind else f"`{kind}`"


def _splits(model: Model, groups: Groups, op: Op) -> Iterator[str]:
    """Dim groups of the op's factors that a strategy may split."""
    if op.rule is None:
        return
    whole = whole_factors(model.graph, op, model.mesh.topology.backend)
    seen = set()
    sides = op.sides
    for factor, size in enumerate(op.rule.sizes):
        if factor in whole or size == 1:
            continue
        for tensor, dims in sides:
            cluster = model.structure.cluster_of[tensor]
            at = next((d for d, factors in enumerate(dims) if factor in factors), None)
            if cluster < 0 or at is None:
                continue
            place = model.structure.dims_of[tensor][at]
            group = groups.of_factor.get((cluster, place)) if place >= 0 else None
            name = groups.names.get(group, "") if group is not None else ""
            if name and (name, size) not in seen:
                seen.add((name, size))
                yield f"{name} ({size})"
                break
