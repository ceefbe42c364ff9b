"""A small reader of optimised HLO text: computations, instructions, shapes, loop trip counts.

Reads what XLA prints on CPU, GPU and TPU, layouts and memory spaces included. Unknown attributes are kept as text.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping


DTYPE_BITS = {
    "pred": 8,
    "s2": 2,
    "s4": 4,
    "s8": 8,
    "s16": 16,
    "s32": 32,
    "s64": 64,
    "u2": 2,
    "u4": 4,
    "u8": 8,
    "u16": 16,
    "u32": 32,
    "u64": 64,
    "f4e2m1fn": 4,
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "token": 0,
    "opaque": 0,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One array: dtype, dims, and what the layout says of the memory it lives in."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0
    """Memory space of the layout, `S(1)`: on TPU 0 is HBM, 1 VMEM and 6 the scalar core's own."""
    minor: tuple[int, ...] = ()
    """Dims by the layout, innermost first; empty where none is printed."""
    tile: tuple[int, ...] = ()
    """Sizes of the layout's first tile, innermost first: (128, 8) for `T(8,128)`."""

    @property
    def bytes(self) -> int:
        """Of its elements."""
        return -(-math.prod(self.dims) * self._bits // 8)

    @property
    def held(self) -> int:
        """Bytes in memory: its dims are padded to whole tiles, and that is also what reading or writing it moves."""
        sizes = list(self.dims)
        for dim, tile in zip(self.minor, self.tile, strict=False):
            sizes[dim] = -(-sizes[dim] // tile) * tile
        return -(-math.prod(sizes) * self._bits // 8)

    @property
    def _bits(self) -> int:
        return DTYPE_BITS.get(self.dtype, 8 if self.dtype.startswith("f8") else 32)


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    """The result's arrays, tuples flattened."""
    operands: tuple[str, ...]
    attributes: str
    """Everything after the operands, as printed."""
    literal: str
    """What stands between the parentheses, as printed: the value of a constant, the number of a parameter."""
    root: bool

    @property
    def bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes)

    @property
    def held(self) -> int:
        return sum(shape.held for shape in self.shapes)

    def attribute(self, key: str) -> str | None:
        """The raw value of `key=...`, brackets balanced."""
        found = re.search(rf"(?:^|, ){re.escape(key)}=", self.attributes)
        return _balanced(self.attributes, found.end()) if found else None

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that this instruction runs."""
        names: list[str] = []
        for key in _CALL_KEYS:
            value = self.attribute(key)
            if value:
                names += re.findall(r"%?([\w.\-]+)", value)
        return tuple(names)

    @property
    def op_name(self) -> str:
        """The source's name, from the metadata; empty where XLA put a name of its own there (`custom-call.48`)."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return "" if found is None or re.fullmatch(r"[\w\-]+\.\d+", found[1]) else found[1]

    @property
    def frame(self) -> int:
        """`stack_frame_id` of the metadata, -1 if it has none."""
        return _field(self.attributes, "stack_frame_id")


_CALL_KEYS = ("calls", "to_apply", "body", "condition", "branch_computations", "true_computation", "false_computation")


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in printed order (the schedule, if the module says `is_scheduled=true`)."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instructions that take a value, by its name."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.literal): i for i in self.instructions if i.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class HloModule:
    """All computations of one module."""

    computations: dict[str, Computation]
    entry: str
    scheduled: bool
    lines: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """`stack_frame_id` -> `file:line` of the source, from the tables at the head of the text."""

    def trip_count(self, loop: Instruction) -> int | None:
        """How often a while loop's body runs, or None if the text does not tell."""
        known = re.search(r'"known_trip_count":\{"n":"?(\d+)"?', loop.attributes)
        if known:
            return int(known[1])
        owner = next((c for c in self.computations.values() if c.by_name.get(loop.name) is loop), None)
        return _count_trips(self, owner, loop) if owner else None


def parse_hlo(text: str) -> HloModule:
    """Read HLO text as `jax.stages.Compiled.as_text()` prints it."""
    computations: dict[str, Computation] = {}
    entry = ""
    name: str | None = None
    body: list[Instruction] = []
    scheduled = "is_scheduled=true" in text[:2000]
    for line in _whole_lines(text):
        if name is None:
            head = re.match(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$", line)
            if head and not line.startswith("HloModule"):
                name = head[2]
                entry = name if head[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(body))
            name, body = None, []
        else:
            instruction = _parse_line(line)
            if instruction is not None:
                body.append(instruction)
    return HloModule(computations, entry or next(reversed(computations), ""), scheduled, _source_lines(text))


def module_name(text: str) -> str:
    """The name at the head of HLO text, as profilers print it."""
    found = re.match(r"HloModule ([\w.\-]+)", text)
    return found[1] if found else ""


def _whole_lines(text: str) -> Iterator[str]:
    """Lines of HLO text; an attribute that holds line breaks (a kernel's metadata) is joined to its instruction."""
    held: str | None = None
    for line in text.splitlines():
        if held is not None and not line.startswith((" ", "%", "ENTRY")) and re.match(r"\}(,|\s*$)", line) is None:
            held += line
            continue
        if held is not None:
            yield held
        held = line if line.startswith("  ") else None
        if held is None:
            yield line
    if held is not None:
        yield held


def _source_lines(text: str) -> dict[int, str]:
    tables: dict[str, dict[int, str]] = {"FileNames": {}, "FileLocations": {}, "StackFrames": {}}
    current: dict[int, str] | None = None
    for line in text.splitlines():
        number, _, rest = line.partition(" ")
        if number.isdigit():
            if current is not None:
                current[int(number)] = rest
        elif line:
            if line.startswith(("%", "ENTRY")):
                break
            current = tables.get(line)
    lines = {}
    for frame, what in tables["StackFrames"].items():
        place = tables["FileLocations"].get(_field(what, "file_location_id"), "")
        name = tables["FileNames"].get(_field(place, "file_name_id"), "").strip('"')
        if name:
            lines[frame] = f"{name}:{_field(place, 'line')}"
    return lines


def _field(text: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", text)
    return int(found[1]) if found else -1


def _parse_line(line: str) -> Instruction | None:
    head = re.match(r"^\s+(ROOT\s+)?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    shape_text = _balanced(line, head.end(), stop=" ")
    rest = head.end() + len(shape_text) + 1
    opcode = re.match(r"([\w\-]+)\(", line[rest:])
    if opcode is None:
        return None
    open_at = rest + opcode.end() - 1
    inner = _balanced(line, open_at + 1, stop=")")
    operands = tuple(re.findall(r"%([\w.\-]+)", inner)) if opcode[1] not in ("constant", "parameter") else ()
    after = line[open_at + 1 + len(inner) + 1 :]
    attributes = after[2:] if after.startswith(", ") else after
    return Instruction(head[2], opcode[1], _shapes(shape_text), operands, attributes, inner.strip(), bool(head[1]))


def _balanced(text: str, start: int, stop: str = ",") -> str:
    """Text from `start` up to `stop` (or an unmatched closing bracket) outside of brackets and quotes."""
    depth, quoted, position = 0, False, start
    while position < len(text):
        char = text[position]
        if quoted:
            if char == "\\":
                position += 1
            elif char == '"':
                quoted = False
        elif char == '"':
            quoted = True
        elif depth == 0 and char == stop:
            break
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            if depth == 0:
                break
            depth -= 1
        position += 1
    return text[start:position]


_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([^\]]*)\](\{[^}]*\})?")


@functools.lru_cache(maxsize=65536)
def _shapes(text: str) -> tuple[Shape, ...]:
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        sizes = tuple(int(size.strip("<= ")) for size in dims.split(",") if size.strip())
        space = re.search(r"S\((\d+)\)", layout)
        minor, tile = tiling(layout)
        found.append(Shape(dtype, sizes, int(space[1]) if space else 0, minor, tile))
    return tuple(found)


def tiling(layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`Shape.minor` and `Shape.tile` of a layout such as `{1,0:T(8,128)(2,1)}`."""
    found = re.match(r"\{([\d,]*)(?::T\(([\d,]+)\))?", layout)
    if found is None:
        return (), ()
    minor, tile = ([int(number) for number in part.split(",") if number] for part in (found[1], found[2] or ""))
    return tuple(minor), tuple(reversed(tile))


# Trip counts


def _count_trips(module: HloModule, owner: Computation, loop: Instruction) -> int | None:
    """From `carried[k] < limit` in the condition, `carried[k] + step` in the body, and the start value outside."""
    condition = module.computations.get((loop.attribute("condition") or "").lstrip("%"))
    body = module.computations.get((loop.attribute("body") or "").lstrip("%"))
    if condition is None or body is None or not loop.operands:
        return None
    carried = _tuple_elements(owner, loop.operands[0])
    compared = _comparison(module, condition)
    if compared is None or carried is None:
        return None
    direction, left, right = compared
    if right[0] == "carried" and left[0] == "constant":
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if left[0] != "carried":
        return None
    index = left[1]
    start = _constant_of(module, owner, carried[index]) if index < len(carried) else None
    limit: int | None
    if right[0] == "constant":
        limit = right[1]
    else:
        limit = _constant_of(module, owner, carried[right[1]]) if right[1] < len(carried) else None
    updated = _tuple_elements(body, body.root.name)
    if updated is None or index >= len(updated) or start is None or limit is None:
        return None
    change = _affine(module, body, updated[index], {})
    if change is None or change[0] != index or change[1] == 0:
        return None
    step = change[1]
    span = {"LT": limit - start, "LE": limit - start + 1, "GT": start - limit, "GE": start - limit + 1}.get(
        direction, abs(limit - start)
    )
    return max(0, -(-span // abs(step)))


def _tuple_elements(computation: Computation, name: str) -> tuple[str, ...] | None:
    instruction = computation.by_name.get(name)
    while instruction is not None and instruction.opcode in ("copy", "optimization-barrier", "bitcast"):
        instruction = computation.by_name.get(instruction.operands[0])
    return instruction.operands if instruction is not None and instruction.opcode == "tuple" else None


def _constant_of(module: HloModule, computation: Computation, name: str) -> int | None:
    value = _affine(module, computation, name, {})
    return value[1] if value is not None and value[0] is None else None


_Affine = tuple[int | None, int]
"""(carried element or None, offset): `carried[k] + offset`, or a constant."""


def _affine(module: HloModule, computation: Computation, name: str, bound: dict[int, _Affine | None]) -> _Affine | None:
    """An integer scalar as carried element plus offset, seen through copies and fusions; None if it is neither."""
    instruction = computation.by_name.get(name)
    if instruction is None:
        return None
    if instruction.opcode == "constant":
        return (None, int(instruction.literal)) if re.fullmatch(r"-?\d+", instruction.literal) else None
    if instruction.opcode == "parameter":
        return bound.get(int(instruction.literal))
    if instruction.opcode in ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"):
        return _affine(module, computation, instruction.operands[0], bound)
    if instruction.opcode == "get-tuple-element":
        source = computation.by_name.get(instruction.operands[0])
        index = int(instruction.attribute("index") or 0)
        if source is not None and source.opcode == "parameter":
            return (index, 0)
        if source is not None and source.opcode == "fusion":
            return _through_fusion(module, computation, source, index, bound)
        return None
    if instruction.opcode == "fusion":
        return _through_fusion(module, computation, instruction, None, bound)
    if instruction.opcode in ("add", "subtract"):
        left = _affine(module, computation, instruction.operands[0], bound)
        right = _affine(module, computation, instruction.operands[1], bound)
        if left is None or right is None or (left[0] is not None and right[0] is not None):
            return None
        sign = 1 if instruction.opcode == "add" else -1
        if right[0] is not None and sign < 0:
            return None
        return (left[0] if left[0] is not None else right[0], left[1] + sign * right[1])
    return None


def _through_fusion(
    module: HloModule, outside: Computation, fusion: Instruction, index: int | None, bound: dict[int, _Affine | None]
) -> _Affine | None:
    inside = module.computations.get((fusion.attribute("calls") or "").lstrip("%"))
    if inside is None:
        return None
    given = {k: _affine(module, outside, operand, bound) for k, operand in enumerate(fusion.operands)}
    target = inside.root
    if index is not None:
        if target.opcode != "tuple" or index >= len(target.operands):
            return None
        return _affine(module, inside, target.operands[index], given)
    return _affine(module, inside, target.name, given)


def _comparison(module: HloModule, condition: Computation) -> tuple[str, tuple[str, int], tuple[str, int]] | None:
    """Direction and both sides, each ("carried", k) or ("constant", value)."""
    root, computation, bound = condition.root, condition, dict[int, _Affine | None]()
    while root.opcode in ("fusion", "copy", "bitcast", "call"):
        if root.opcode in ("copy", "bitcast"):
            root = computation.by_name[root.operands[0]]
            continue
        inside = module.computations.get((root.attribute("calls") or root.attribute("to_apply") or "").lstrip("%"))
        if inside is None:
            return None
        bound = {k: _affine(module, computation, operand, bound) for k, operand in enumerate(root.operands)}
        computation, root = inside, inside.root
    if root.opcode != "compare":
        return None
    sides = []
    for operand in root.operands:
        value = _affine(module, computation, operand, bound)
        if value is None or (value[0] is not None and value[1] != 0):
            return None
        sides.append(("constant", value[1]) if value[0] is None else ("carried", value[0]))
    return root.attribute("direction") or "LT", sides[0], sides[1]
