"""What holds memory at the compiled program's peak, by kind: from the compiler's live ranges and its scheduled text."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from autoshard.exec.ahead.compile_targets import Compiled
from autoshard.exec.hlo.hlo_text import HOST_SPACE, Shape, tiling
from autoshard.planning import Plan


KINDS = {"parameter": "parameters", "optimizer_state": "optimizer_state"}
"""Kinds of arguments by role; those of other roles are `batch`, as in predictions."""

_DONATED = "donated"
"""Kind of a donated argument, and of what a loop carries and writes in its place: counted with the arguments."""

_TAKEN_OVER = re.compile(r"[})] (parameter|while|dynamic-update-slice)\(")

_Array = tuple[str, str, str]
"""dtype, dims and layout as printed."""

_Type = _Array | list["_Type"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Buffer:
    """One value in memory from one moment to another, both counted."""

    start: int
    stop: int
    size: int
    kind: str
    carried: bool
    """Whether a loop carries it, or it is written in place: what was there before is handed on to it."""


def memory_at_peak(compiled: Compiled, plan: Plan) -> dict[str, int]:
    """Bytes of one device by kind when the compiled program holds most; empty if the compiler left no live ranges.

    Arguments have their roles' kinds and are there throughout (updated state takes their place). What a loop carries
    is `gradients` if it has a parameter's dims, else `activations`; so is what else the backward pass makes with a
    parameter's dims. The rest is `temporaries`. What lives in the chip's fast memory is not counted.
    """
    ranges = list(_ranges(compiled.live))
    lines = _instructions(compiled.text)
    if not ranges or not lines:
        return {}
    entry = compiled.text[compiled.text.rfind("\nENTRY ") :]
    arguments = {m[1]: int(m[2]) for m in re.finditer(r"%([\w.\-]+) = [^\n]*? parameter\((\d+)\)", entry)}
    roles = list(plan.roles.values())
    held: dict[str, int] = collections.defaultdict(int)
    for name, number in arguments.items():
        if name in lines and number < len(roles):
            held[KINDS.get(roles[number], "batch")] += _bytes(_parse(lines[name])[0])
    root = re.search(r"ROOT %[\w.\-]+ = [^\n]*? tuple\(([^\n]*?)\)", entry)
    header = compiled.text[: compiled.text.find("\n")]
    aliased = {int(m[1]): int(m[2]) for m in re.finditer(r"\{(\d+)\}: \((\d+),", header)}
    results = re.findall(r"%([\w.\-]+)", root[1]) if root else []
    in_place = {_value(lines, name) for k, name in enumerate(results) if k in aliased}
    shapes = _parameter_dims(plan)
    found = []
    for name, index, start, stop in ranges:
        given = name in arguments and arguments[name] in aliased.values()
        if (name in arguments and not given) or (name, index) in in_place or name not in lines:
            continue
        array = _part(_parse(lines[name])[0], index)
        if isinstance(array, tuple) and (size := _bytes(array)):
            carried = "dynamic-update-slice" in name or _TAKEN_OVER.search(lines[name]) is not None
            kind = _DONATED if given else _kind(lines[name], array, shapes, carried)
            found.append(_Buffer(start, stop, size, kind, carried and not given))
    moments: dict[int, dict[str, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    for buffer in _handed_on(found):
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
        held[kind] += size
    return {kind: size for kind, size in sorted(held.items()) if size}


def host_arguments(compiled: Compiled) -> int:
    """Bytes of arguments in the host's memory. The compiler counts arguments in its peak wherever they are; what else
    waits on the host it leaves out."""
    entry = compiled.text[compiled.text.rfind("\nENTRY ") :]
    return sum(
        _held(_parse(m[1])[0], re.compile(rf"S\({HOST_SPACE}\)"))
        for m in re.finditer(r"%[\w.\-]+ = ([^\n]*?) parameter\(\d+\)", entry)
    )


def device_peak(compiled: Compiled, at_peak: Mapping[str, int]) -> int | None:
    """Bytes of a device at the compiled program's peak, of which `at_peak` tells the kinds; None if nothing tells.

    The compiler states arguments and the fullest of all memories together: of small programs that may be the memory on
    the chip. Where it is the host's, with stacks in it that a loop offloads, and before machine code is written, when
    nothing is stated, the device's peak is what lives there at once, and no more than was allocated.
    """
    memory, on_host = compiled.memory, host_arguments(compiled)
    allocated = sum(memory.get(part, 0) for part in ("arguments", "results", "temporaries")) - memory.get("donated", 0)
    live = min(sum(at_peak.values()) or allocated, allocated)
    if "peak" not in memory:
        return max(live, memory["arguments"] + memory["on_chip"]) or None
    stated, stacks = memory["peak"] - on_host, memory.get("host", 0) - on_host
    if stacks > 0 and stated <= (memory["arguments"] + stacks) * _ALIGNED:
        return live
    return max(0, stated) or None


_ALIGNED = 1.001
"""What small buffers and their alignment add to what is stated."""


def _ranges(report: str) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """(instruction, index in its result, first, last moment) of every buffer."""
    part = report.partition("BufferLiveRange:")[2].partition("\n  Live ranges at")[0]
    for m in re.finditer(r"^    (\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", part, re.MULTILINE):
        yield m[1], tuple(int(i) for i in m[2].split(",") if i), int(m[3]), int(m[4])


def _instructions(text: str) -> dict[str, str]:
    """What stands after `=`, by instruction."""
    return {m[1]: m[2] for m in re.finditer(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$", text, re.MULTILINE)}


def _value(lines: Mapping[str, str], name: str) -> tuple[str, tuple[int, ...]]:
    """The instruction, and the index in its result, whose buffer a name stands for."""
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
    """The type that text begins with, and where it ends: an array, or a list for a tuple."""
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
    found = re.compile(r"(\w+)\[([^\]]*)\](\{[^}]*\})?").match(text, at)
    if found is None:
        return ("token", "", ""), len(text)
    return (found[1], found[2], found[3] or ""), found.end()


def _part(kind: _Type, index: Sequence[int]) -> _Type:
    for i in index:
        if not isinstance(kind, list) or i >= len(kind):
            return []
        kind = kind[i]
    return kind


def _bytes(array: _Type) -> int:
    """Bytes in HBM, padded to the tiles of the layout; 0 for tuples and what lives elsewhere."""
    return _held(array) if not isinstance(array, list) and not re.search(r"S\([1-9]", array[2]) else 0


def _held(array: _Type, where: re.Pattern[str] | None = None) -> int:
    """The same wherever it lives, or only where the layout says so."""
    if isinstance(array, list) or (where is not None and not where.search(array[2])):
        return 0
    minor, tile = tiling(array[2])
    return Shape(array[0], tuple(_dims(array)), 0, minor, tile).held


def _dims(array: _Array) -> list[int]:
    return [int(re.sub(r"\D", "", size)) for size in array[1].split(",") if size]


def _parameter_dims(plan: Plan) -> set[tuple[int, ...]]:
    """Dims, in any order, of every parameter and of one layer of a stack, whole and of one device."""
    found: set[tuple[int, ...]] = set()
    for name in plan.arguments:
        if plan.is_weight(name):
            for shape in (plan.shapes[name], plan.arguments[name].local_shape(plan.shapes[name], plan.mesh)):
                found |= {_key(shape), _key(shape[1:])}
    return {dims for dims in found if len(dims) > 1}


def _key(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def _kind(line: str, array: _Array, shapes: set[tuple[int, ...]], carried: bool) -> str:
    like = _key(_dims(array)) in shapes
    if carried:
        return "gradients" if like else "activations"
    return "gradients" if like and 'op_name="' in line and "transpose(" in line else "temporaries"


def _handed_on(found: Sequence[_Buffer]) -> list[_Buffer]:
    """The same; what a loop takes over, or a slice is put into, ends where the new buffer begins: they are one."""
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
