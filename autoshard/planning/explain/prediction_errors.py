"""Classes of ops whose predictions are less accurate than usual, with their share of a step and the measured error.

The file `prediction_errors.json` has the errors. `experiments/fidelity/ordinary.py --write` derives them from the
ordinary training steps that it plans and compiles.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import LANES
from autoshard.graph import SMALL, Carry, Loop, Op, OpClass, OpGraph
from autoshard.planning.price.evaluate import live_buffers, tensor_spec
from autoshard.planning.price.op_prices import OpPrices
from autoshard.planning.price.step_ledger import Ledger
from autoshard.planning.record.plan_parts import Unsure
from autoshard.planning.space.decision_model import Model
from autoshard.planning.xla.array_layouts import SORTS


_FILE = pathlib.Path(__file__).with_name("prediction_errors.json")

LARGE, SOME, MOST = 0.25, 0.1, 0.5
"""Shares of the predicted time or memory from which the errors of a class count, see `counts`."""
ASK_COMPILER = "; `autoshard plan --compile` asks the compiler, in seconds for a small step"
"""Advice at the end of a sentence on such ops."""

USUAL = 1.3
"""Factor up to which an error is usual: the worst that a covered kind of program may show in its fidelity table."""

_KINDS: Mapping[str, str] = {
    "convolution": "convolutions",
    **dict.fromkeys(SORTS, "sorts"),
    "fft": "Fourier transforms",
    **dict.fromkeys(("cholesky", "triangular_solve"), "factorisations"),
    **dict.fromkeys(("reduce_window", "select_and_scatter"), "windows"),
}
"""Kind of op -> its class. Matmuls, attention kernels and elementwise work are in the tables of decoders."""
ROWS, NARROW_ROWS = "gathers and scatters", "gathers and scatters of narrow rows"
EXTREMA = "maxima and minima of rows"
"""Class of scatters that keep the largest or smallest row, as `jax.ops.segment_max` does."""
ROWS_WITH_EXTREMA = "gathers and scatters with maxima of rows"
"""Class of gathers and scatters in programs with `EXTREMA`, such as softmaxes over the edges of each node."""
RECURRENCES, SCANS, UNKNOWN_CALLS = "recurrences", "elementwise recurrences", "calls of unknown work"
_UNARY = frozenset({"convert", "transpose", "reshape", "broadcast_in_dim"})
"""Ops that change the form of a weight, but not which layer it belongs to."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClassError:
    """Errors of the predictions of compiled programs in which one class of ops holds a large share."""

    programs: int
    """Number of the programs."""
    time: float
    """Factor within which nine of ten predicted times are."""
    memory: float
    """Factor within which nine of ten predicted peaks are of the memory that the program reserves."""


@functools.cache
def class_errors(compiler: str) -> Mapping[str, ClassError]:
    """Return the measured errors by class of ops for the programs of a compiler, `TPU` or `GPU`."""
    rows = json.loads(_FILE.read_text())["errors"].get(compiler, {})
    return {name: ClassError(**row) for name, row in rows.items()}


def class_shares(ledger: Ledger, prices: OpPrices, step_s: float) -> dict[str, tuple[float, float]]:
    """Return by class of ops its share of the step's time, and of the memory at the peak; classes without ops are left
    out.

    - `prices`: the ledger's prices by op.
    - `step_s`: seconds of the predicted step.

    Time is that of the ops, with fusions that end with them and with exposed communication inside them or of their
    operands. Memory is that of tensors which they read or write,
    and of those that elementwise work ties to them.
    """
    model = ledger.model
    class_of = _classes(model.graph)
    if not class_of:
        return {}
    with_extrema = EXTREMA in class_of.values()
    for number, name in class_of.items():
        if name in (ROWS, NARROW_ROWS) and with_extrema:
            class_of[number] = ROWS_WITH_EXTREMA
        elif name == ROWS and _row_shard(model, ledger.choices, model.graph.ops[number]) < LANES:
            class_of[number] = NARROW_ROWS
    seconds: dict[str, float] = defaultdict(float)
    for (what, number), spent in prices.compute.items():
        if what == "op" and number in class_of:
            seconds[class_of[number]] += spent
    sent = [*prices.inside.items(), *((op, made) for (_, op), made in prices.moved.items())]
    for number, collectives in sent:
        if number in class_of:
            seconds[class_of[number]] += sum(each.waited_s for each in collectives)
    classes_of = _clusters(model, class_of)
    bytes_of: dict[str, int] = defaultdict(int)
    peak, held = _at_peak(model, ledger.choices)
    for tensor, size in held:
        for name in classes_of.get(model.structure.cluster_of[tensor], ()) if tensor >= 0 else ():
            bytes_of[name] += size
    return {
        name: (seconds[name] / step_s if step_s > 0 else 0.0, bytes_of[name] / peak if peak else 0.0)
        for name in sorted({*class_of.values()})
    }


def counts(time_share: float, memory_share: float) -> bool:
    """Return True if the errors of a class of ops with these shares count for the whole step.

    It needs `LARGE` of the time, or `SOME` of it and `MOST` of the memory. Memory alone is no reason: the embedding of
    a small decoder holds most of it, and takes no time.
    """
    return time_share >= LARGE or (time_share >= SOME and memory_share >= MOST)


def find_unsure(ledger: Ledger, prices: OpPrices, step_s: float) -> tuple[Unsure, ...]:
    """Return the classes of ops for which the step's time or memory is less sure than usual, the largest share first.

    The arguments are those of `class_shares`. Left out are classes whose errors do not count (`counts`), or are at most
    `USUAL` in compiled programs. Topologies without a compiler of their own have none, as nothing was compiled for
    them.
    """
    traits = ledger.model.mesh.topology.traits
    if not (traits.compiles_ahead or traits.described):
        return ()
    errors = class_errors("TPU" if traits.compiles_ahead else "GPU")
    found = []
    for name, (time_share, memory_share) in class_shares(ledger, prices, step_s).items():
        known = errors.get(name)
        if not counts(time_share, memory_share) or (known and max(known.time, known.memory) <= USUAL):
            continue
        within = (known.time, known.memory, known.programs) if known else (None, None, 0)
        found.append(Unsure(name, time_share, memory_share, *within))
    return tuple(sorted(found, key=lambda each: (-max(each.time_share, each.memory_share), each.ops)))


def unsure_lines(unsure: tuple[Unsure, ...], peak_bytes: int, memory_limit: int) -> list[str]:
    """Return one sentence for each class but calls of unknown work, in order.

    It says so if the peak may exceed the memory limit of a device.
    """
    lines = []
    for each in unsure:
        if each.ops == UNKNOWN_CALLS:
            continue  # no compiler knows their work either; `call_lines` names each
        if each.time_within is None or each.memory_within is None:
            error = "no compiled program of our tables has them, so the prediction may be far off"
        else:
            error = (
                f"{_most(each.programs)} such programs took within a factor {each.time_within:.1f} of the "
                f"predicted time, and reserved within a factor {each.memory_within:.1f} of the predicted memory"
            )
            if peak_bytes <= memory_limit < peak_bytes * each.memory_within:
                error += ", so it may not fit"
        lines.append(
            f"{each.ops} have {each.time_share:.0%} of the predicted step and {each.memory_share:.0%} of the peak: "
            f"{error}{ASK_COMPILER}."
        )
    return lines


def _most(programs: int) -> str:
    """Return words for the number of programs whose errors are at most that of their class: nine of ten, rounded."""
    within = int(0.9 * (programs - 1) + 0.5) + 1
    return f"all {programs}" if within == programs else f"{within} of {programs}"


def _classes(graph: OpGraph) -> dict[int, str]:
    """Return the class of each op that has one, by op id."""
    recurrent = recurrent_dots(graph)
    classes = dict.fromkeys(elementwise_recurrences(graph, recurrent), SCANS)
    classes |= {op.id: name for op in graph.ops if (name := _class_of(graph, op))}
    return classes | dict.fromkeys(recurrent, RECURRENCES)


def _class_of(graph: OpGraph, op: Op) -> str:
    """Return the class of an op by its kind alone; empty if it has none."""
    if op.opaque is not None:
        known = op.flops or op.opaque.traffic or any(part in op.opaque.target for part in SMALL)
        return "" if known else UNKNOWN_CALLS
    if op.kind in ("gather", "scatter") and op.rule is not None:
        if graph.tensors[_moved(op)[0]].elements <= LANES:
            return ""
        if op.name.endswith(("scatter-max", "scatter-min")):
            return EXTREMA
        return NARROW_ROWS if math.prod(op.rule.sizes[f] for f in _columns(op)) < LANES else ROWS
    return _KINDS.get(op.kind, "")


def _moved(op: Op) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Return the tensor of the rows that a gather reads or a scatter writes, and the factors of its dims."""
    assert op.rule is not None
    return (op.results[0], op.rule.results[0]) if op.kind == "gather" else (op.operands[-1], op.rule.operands[-1])


def _columns(op: Op) -> set[int]:
    """Return the factors of one row of a gather or scatter."""
    assert op.rule is not None
    table, indices, moved = ({f for dim in each for f in dim} for each in (*op.rule.operands[:2], _moved(op)[1]))
    return (table & moved) - indices


def _row_shard(model: Model, choices: NDArray[np.int64], op: Op) -> int:
    """Return the elements of a row of a gather or scatter that one device holds."""
    tensor, dims = _moved(op)
    columns = _columns(op)
    local = tensor_spec(model, choices, tensor).local_shape(model.graph.tensors[tensor].shape, dict(model.mesh.axes))
    return math.prod(size for size, dim in zip(local, dims, strict=True) if columns.intersection(dim))


def recurrent_dots(graph: OpGraph) -> frozenset[int]:
    """Return the ids of dots in loops that multiply a carried value by a weight which is the same in every trip.

    A loop over layers slices its weights, and a loop over microbatches carries only sums of gradients.
    """
    found: set[int] = set()
    for loop in graph.loops:
        if loop.branches or loop.trips < 2:
            continue
        carried = {c.body for c in loop.carries if graph.tensors[c.body].elements > 1}
        inner = {i.start: i for i in graph.loops if loop.start <= i.start < loop.stop and i.id != loop.id}
        for op in graph.ops[loop.start : loop.stop]:
            if (within := inner.get(op.id)) is not None:
                carried |= {t for c in within.carries if c.init in carried for t in (c.body, c.result)}
            depends = {t for t in op.operands if t in carried}
            if not depends:
                continue
            carried.update(op.results)
            rest = [t for t in op.operands if t not in depends]
            if op.kind == "dot_general" and rest and all(_is_invariant(graph, loop, t) for t in rest):
                found.add(op.id)
    return frozenset(found)


def elementwise_recurrences(graph: OpGraph, recurrent: frozenset[int]) -> frozenset[int]:
    """Return the ids of all ops in loops that scale a value which they carry, as a selective scan decays its state.

    Loops with recurrent dots, loops around others and loops over layers (`_is_layer`) are left out. Sums of gradients
    are not scaled.
    """
    found: set[int] = set()
    for loop in graph.loops:
        body = graph.ops[loop.start : loop.stop]
        innermost = all(op.loop == loop.id for op in body)
        if loop.branches or loop.trips < 2 or not innermost or any(op.id in recurrent for op in body):
            continue
        for carry in loop.carries:
            if graph.tensors[carry.body].elements <= LANES:
                continue
            near, scaled = {carry.body}, set[int]()
            for op in body:
                if op.op_class in (OpClass.POINTWISE, OpClass.VIEW):
                    near.update(op.results if near.intersection(op.operands) else ())
                    scales = op.kind == "multiply" and near.intersection(op.operands)
                    scaled.update(op.results if scales or scaled.intersection(op.operands) else ())
            if carry.update in scaled and not _is_layer(graph, body, carry):
                found.update(op.id for op in body)
                break
    return frozenset(found)


def _is_layer(graph: OpGraph, body: Sequence[Op], carry: Carry) -> bool:
    """Return True if a loop's body computes the next carried value from the last by a matmul with a weight, or by a
    convolution.

    Both operands and the result of a product with a weight share no dim. Products with a state for each example do.
    """
    after, layered = {carry.body}, set[int]()
    for op in body:
        if after.isdisjoint(op.operands):
            continue
        after.update(op.results)
        weighted = op.kind == "convolution" or (
            op.kind == "dot_general"
            and op.rule is not None
            and not set.intersection(*({f for dim in dims for f in dim} for _, dims in op.sides))
        )
        if weighted or layered.intersection(op.operands):
            layered.update(op.results)
    return carry.update in layered


def _is_invariant(graph: OpGraph, loop: Loop, tensor: int) -> bool:
    """Return True if a tensor is one from outside of the loop, perhaps in another dtype or form."""
    while (op := graph.maker(tensor)) is not None and op.id >= loop.start:
        if op.kind not in _UNARY or len(op.operands) != 1:
            return False
        (tensor,) = op.operands
    return op is not None or graph.tensors[tensor].loop != loop.id


def _clusters(model: Model, class_of: Mapping[int, str]) -> dict[int, set[str]]:
    """Return by cluster the classes of ops that read or write one of its tensors of more than `LANES` elements."""
    graph, classes = model.graph, defaultdict[int, set[str]](set)
    for op, name in class_of.items():
        for tensor in (*graph.ops[op].operands, *graph.ops[op].results):
            if graph.tensors[tensor].elements > LANES and model.structure.cluster_of[tensor] >= 0:
                classes[model.structure.cluster_of[tensor]].add(name)
    return classes


def _at_peak(model: Model, choices: NDArray[np.int64]) -> tuple[int, list[tuple[int, int]]]:
    """Return the bytes at the peak, and (tensor, bytes) of the buffers that are live then."""
    buffers = live_buffers(model, choices)
    events = sorted((at, size) for b in buffers for at, size in ((b.start, b.size), (b.stop, -b.size)))
    total = most = model.fixed_bytes
    moment = 0
    for at, size in events:
        total += size
        if total > most:
            most, moment = total, at
    return most, [(b.tensor, b.size) for b in buffers if b.start <= moment < b.stop]
