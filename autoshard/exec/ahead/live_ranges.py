"""Live memory at a compiled program's peak by kind, from the compiler's live ranges and its scheduled text."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from autoshard.exec.ahead.compile_targets import Compiled
from autoshard.exec.hlo.hlo_text import HOST_SPACE, Shape, tiling
from autoshard.planning import Plan


KINDS = {"parameter": "parameters", "frozen": "frozen_parameters", "optimizer_state": "optimizer_state"}
"""Role of an argument -> its kind of memory; arguments of other roles are `batch`, as in predictions."""

_DONATED = "donated"
"""Kind of a donated argument, and of loop-carried values and in-place writes in its buffer: part of arguments."""

_TAKEN_OVER = re.compile(r"[})] (parameter|while|dynamic-update-slice)\(")
"""Opcode of an instruction whose result reuses an existing buffer: a parameter, a loop, or an in-place update of a
slice.
"""

_Array = tuple[str, str, str]
"""Dtype, dims and layout of an array as printed."""

_Type = _Array | list["_Type"]
"""Array, or a list of types for a tuple."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Buffer:
    """Live range of one value, from its first to its last moment inclusive."""

    start: int
    """First moment: position in the compiler's schedule."""
    stop: int
    """Last moment, inclusive."""
    size: int
    """Padded bytes on one device."""
    kind: str
    """Kind of memory: `donated`, `gradients`, `activations` or `temporaries`."""
    carried: bool
    """True if a loop carries the value or it is written in place: it takes over the memory of an earlier buffer."""


def memory_at_peak(compiled: Compiled, plan: Plan) -> dict[str, int]:
    """Return the bytes of one device by kind at the compiled program's peak; empty if the compiler left no live ranges.

    Arguments have their roles' kinds and live throughout; updated state reuses their buffers. A loop-carried value is
    `gradients` if it has a parameter's dims, else `activations`. Other results of the backward pass with a parameter's
    dims are `gradients` too. The rest is `temporaries`.

    The peak is the first moment with most bytes besides arguments. Values in on-chip or host memory are not counted,
    and kinds of 0 bytes are left out.
    """
    ranges = list(_ranges(compiled.live))
    lines = _instructions(compiled.text)
    if not ranges or not lines:
        return {}
    entry = compiled.text[compiled.text.rfind("\nENTRY ") :]
    arguments = {m[1]: int(m[2]) for m in re.finditer(r"%([\w.\-]+) = [^\n]*? parameter\((\d+)\)", entry)}
    roles = list(plan.roles.values())
    totals: dict[str, int] = collections.defaultdict(int)
    for name, number in arguments.items():
        if name in lines and number < len(roles):
            totals[KINDS.get(roles[number], "batch")] += _bytes(_parse(lines[name])[0])
    root = re.search(r"ROOT %[\w.\-]+ = [^\n]*? tuple\(([^\n]*?)\)", entry)
    header = compiled.text[: compiled.text.find("\n")]
    aliased = {int(m[1]): int(m[2]) for m in re.finditer(r"\{(\d+)\}: \((\d+),", header)}
    results = re.findall(r"%([\w.\-]+)", root[1]) if root else []
    in_place = {_value(lines, name) for k, name in enumerate(results) if k in aliased}
    shapes = _parameter_dims(plan)
    buffers = []
    for name, index, start, stop in ranges:
        is_donated = name in arguments and arguments[name] in aliased.values()
        if (name in arguments and not is_donated) or (name, index) in in_place or name not in lines:
            continue
        array = _part(_parse(lines[name])[0], index)
        if isinstance(array, tuple) and (size := _bytes(array)):
            carried = "dynamic-update-slice" in name or _TAKEN_OVER.search(lines[name]) is not None
            kind = _DONATED if is_donated else _kind(lines[name], array, shapes, carried)
            buffers.append(_Buffer(start, stop, size, kind, carried and not is_donated))
    moments: dict[int, dict[str, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    for buffer in _merge_reused_buffers(buffers):
        if buffer.kind != _DONATED:
            moments[buffer.start][buffer.kind] += buffer.size
            moments[buffer.stop + 1][buffer.kind] -= buffer.size
    now: dict[str, int] = collections.defaultdict(int)
    best: dict[str, int] = {}
    for moment in sorted(moments):
        for kind, size in moments[moment].items():
            now[kind] += size
        if sum(now.values()) > sum(best.values()):
            best = dict(now)
    for kind, size in best.items():
        totals[kind] += size
    return {kind: size for kind, size in sorted(totals.items()) if size}


def host_arguments(compiled: Compiled) -> int:
    """Return the padded bytes of one device's arguments that are in the host's memory; 0 if there are none.

    The compiler's peak includes all arguments, wherever they are, but no other values in the host's memory.
    """
    entry = compiled.text[compiled.text.rfind("\nENTRY ") :]
    return sum(
        _held(_parse(m[1])[0], re.compile(rf"S\({HOST_SPACE}\)"))
        for m in re.finditer(r"%[\w.\-]+ = ([^\n]*?) parameter\(\d+\)", entry)
    )


def reserved_bytes(compiled: Compiled) -> int:
    """Return the bytes of a device's memory that a compiled program reserves: arguments, results and temporaries.

    Donated arguments and their results share memory. On-chip memory does not count.
    """
    memory = compiled.memory
    return sum(memory.get(part, 0) for part in ("arguments", "results", "temporaries")) - memory.get("donated", 0)


def device_peak(compiled: Compiled, at_peak: Mapping[str, int]) -> int | None:
    """Return the HBM bytes of a device at the compiled program's peak; None if they are 0.

    - `at_peak`: bytes of each kind by live ranges (`memory_at_peak`).

    The compiler's `peak` is the arguments plus the fullest of its memories; arguments on the host are subtracted here.
    It is the peak of another memory if it exceeds what is reserved, as that of on-chip buffers in small programs. The
    same holds if it is that of stacks which a loop offloads to the host. The result is then the live bytes, as without
    machine code, where there is no `peak`. Live bytes are the sum of `at_peak`, or the reserved bytes if it is empty,
    and at most those.
    """
    memory, on_host, reserved = compiled.memory, host_arguments(compiled), reserved_bytes(compiled)
    live = min(sum(at_peak.values()) or reserved, reserved) or None
    if "peak" not in memory:
        return live
    stated, stacks = memory["peak"] - on_host, memory.get("host", 0) - on_host
    # The stated peak is just the arguments and the offloaded stacks: it is the peak of the host's memory.
    of_host = stacks > 0 and stated <= (memory["arguments"] + stacks) * _ALIGNED
    return live if of_host or stated > reserved * _ALIGNED else max(0, min(stated, reserved)) or None


_ALIGNED = 1.001
"""Factor by which constants, small buffers and alignment raise the stated peak."""


def _ranges(report: str) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """Yield (instruction, index in its result, first moment, last moment) of every buffer in a live-range report;
    nothing if it is empty.
    """
    part = report.partition("BufferLiveRange:")[2].partition("\n  Live ranges at")[0]
    for m in re.finditer(r"^    (\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", part, re.MULTILINE):
        yield m[1], tuple(int(i) for i in m[2].split(",") if i), int(m[3]), int(m[4])


def _instructions(text: str) -> dict[str, str]:
    """Map the name of each instruction of all computations to the text after its ` = `."""
    return {m[1]: m[2] for m in re.finditer(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$", text, re.MULTILINE)}


def _value(lines: Mapping[str, str], name: str) -> tuple[str, tuple[int, ...]]:
    """Return the instruction that owns a name's buffer, and the index in its result.

    Follows tuple elements, bitcasts and finished copies; the result of `copy-done` is element 0 of its `copy-start`.
    `lines` is the result of `_instructions`.
    """
    index: tuple[int, ...] = ()
    while name in lines:
        part = re.search(r" get-tuple-element\(%([\w.\-]+)\), index=(\d+)", lines[name])
        same = re.search(r" (bitcast|copy-done)\(%([\w.\-]+)\)", lines[name])
        if part:
            name, index = part[1], (int(part[2]), *index)
        elif same:
            name, index = same[2], (0, *index) if same[1] == "copy-done" else index
        else:
            break
    return name, index


def _parse(text: str, at: int = 0) -> tuple[_Type, int]:
    """Parse the HLO type at position `at` of `text`; return it and the position after it.

    Text that is neither an array nor a tuple gives the type `("token", "", "")` and the end of the text.
    """
    if text[at] == "(":
        parts: list[_Type] = []
        at += 1
        while text[at] != ")":
            skipped = re.compile(r"[, ]+|/\*index=\d+\*/").match(text, at)
            if skipped:
                at = skipped.end()
                continue
            part, at = _parse(text, at)
            parts.append(part)
        return parts, at + 1
    array = re.compile(r"(\w+)\[([^\]]*)\](\{[^}]*\})?").match(text, at)
    if array is None:
        return ("token", "", ""), len(text)
    return (array[1], array[2], array[3] or ""), array.end()


def _part(kind: _Type, index: Sequence[int]) -> _Type:
    """Return the part of a tuple type at an index, the type itself for an empty index; an empty tuple if there is
    none.
    """
    for i in index:
        if not isinstance(kind, list) or i >= len(kind):
            return []
        kind = kind[i]
    return kind


def _bytes(array: _Type) -> int:
    """Return the bytes in HBM, padded to the tiles of the layout; 0 for tuples and for values in other memories."""
    return _held(array) if not isinstance(array, list) and not re.search(r"S\([1-9]", array[2]) else 0


def _held(array: _Type, where: re.Pattern[str] | None = None) -> int:
    """Return the padded bytes of an array in any memory, or only if its layout matches `where`; 0 for tuples."""
    if isinstance(array, list) or (where is not None and not where.search(array[2])):
        return 0
    minor, tile = tiling(array[2])
    return Shape(array[0], tuple(_dims(array)), 0, minor, tile).padded_bytes


def _dims(array: _Array) -> list[int]:
    """Return the sizes of an array's dims, the bound of a bounded dim (`<=8`); empty for a scalar."""
    return [int(re.sub(r"\D", "", size)) for size in array[1].split(",") if size]


def _parameter_dims(plan: Plan) -> set[tuple[int, ...]]:
    """Return the keys (`_key`) of every weight, and of one layer of a stack, both whole and of one device's shard.

    Keys with fewer than two sizes are left out, since vectors of other kinds would match them.
    """
    keys: set[tuple[int, ...]] = set()
    for name in plan.arguments:
        if plan.is_weight(name):
            for shape in (plan.shapes[name], plan.arguments[name].local_shape(plan.shapes[name], plan.mesh)):
                keys |= {_key(shape), _key(shape[1:])}
    return {dims for dims in keys if len(dims) > 1}


def _key(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes above 1 in ascending order, so that transposed shapes compare equal."""
    return tuple(sorted(size for size in shape if size > 1))


def _kind(line: str, array: _Array, shapes: set[tuple[int, ...]], carried: bool) -> str:
    """Return the kind of a buffer: `gradients`, `activations` or `temporaries`.

    A carried buffer is `gradients` if its key is in `shapes` (`_parameter_dims`), else `activations`. Another buffer is
    `gradients` if its key is in `shapes` and `line`, its instruction, belongs to a backward pass; else it is
    `temporaries`.
    """
    like = _key(_dims(array)) in shapes
    if carried:
        return "gradients" if like else "activations"
    # JAX marks the ops of a backward pass with `transpose(` in their names.
    return "gradients" if like and 'op_name="' in line and "transpose(" in line else "temporaries"


def _merge_reused_buffers(found: Sequence[_Buffer]) -> list[_Buffer]:
    """Cut each buffer whose memory another one takes over, so that no moment counts both; return all by start.

    A loop's carried value, or the result of an in-place update, begins at the moment when its operand's buffer ends.
    The two have the same size, and either is `carried`; each buffer takes over at most one. The earlier buffer ends one
    moment sooner. The later one inherits its kind if the earlier is carried or donated.
    """
    result = sorted(found, key=lambda b: b.start)
    begun: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    for k, buffer in enumerate(result):
        if buffer.start:
            begun[buffer.start, buffer.size].append(k)
    for k, buffer in enumerate(result):
        after = begun[buffer.stop, buffer.size] if buffer.stop > buffer.start else []
        heir = next((h for h in after if buffer.carried or result[h].carried), None)
        if heir is not None:
            after.remove(heir)
            result[k] = dataclasses.replace(buffer, stop=buffer.stop - 1)
            if buffer.carried or buffer.kind == _DONATED:
                result[heir] = dataclasses.replace(result[heir], kind=buffer.kind)
    return result
