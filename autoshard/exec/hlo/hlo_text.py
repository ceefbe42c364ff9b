"""A small parser of optimised HLO text: computations, instructions, shapes, source lines.

It reads the output of XLA on CPU, GPU and TPU, layouts and memory spaces included. Unknown attributes stay text.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

from autoshard.mlir import shown_line


DTYPE_BITS = {
    "pred": 8,
    "s1": 1,
    "s2": 2,
    "s4": 4,
    "s8": 8,
    "s16": 16,
    "s32": 32,
    "s64": 64,
    "u1": 1,
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
"""Bits of an element in memory by HLO dtype; dtypes not listed have 8 (`f8...`) or 32."""


HOST_SPACE, SCALAR_SPACE = 5, 6
"""Memory spaces of a TPU's layouts: the host's memory, and the scalar core's own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One array: its dtype, its dims, and the memory space and tiles of its layout."""

    dtype: str
    """HLO's name of the dtype."""
    dims: tuple[int, ...]
    """Sizes of the dims; a bounded dim counts with its bound."""
    space: int = 0
    """Memory space of the layout, 1 for `S(1)`. On TPU 0 is HBM, 1 VMEM, 5 the host's memory, 6 the scalar core's."""
    minor: tuple[int, ...] = ()
    """Dims in the order of the layout, innermost first; empty without a layout."""
    tile: tuple[int, ...] = ()
    """Sizes of the layout's first tile, innermost first: (128, 8) for `T(8,128)`."""

    @property
    def bytes(self) -> int:
        """Bytes of its elements, without padding, rounded up to whole bytes."""
        return -(-math.prod(self.dims) * self._bits // 8)

    @property
    def padded_bytes(self) -> int:
        """Bytes in memory, with dims padded to whole tiles; reads and writes move the padding as well.

        Equal to `bytes` without a layout or tile.
        """
        sizes = list(self.dims)
        for dim, tile in zip(self.minor, self.tile, strict=False):
            sizes[dim] = -(-sizes[dim] // tile) * tile
        return -(-math.prod(sizes) * self._bits // 8)

    @property
    def _bits(self) -> int:
        """Bits of an element."""
        return DTYPE_BITS.get(self.dtype, 8 if self.dtype.startswith("f8") else 32)


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation."""

    name: str
    """Name without `%`."""
    opcode: str
    """HLO's opcode, such as `dot` or `all-gather-start`."""
    shapes: tuple[Shape, ...]
    """Arrays of the result, with tuples flattened."""
    operands: tuple[str, ...]
    """Names of the operands, without `%`; empty for constants and parameters."""
    attributes: str
    """Text after the operands, as printed."""
    literal: str
    """Text between the parentheses, as printed: the value of a constant, the number of a parameter."""
    root: bool
    """True for the computation's `ROOT`."""

    @property
    def bytes(self) -> int:
        """Bytes of the result's elements."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def padded_bytes(self) -> int:
        """Bytes of the result in memory, padded to tiles."""
        return sum(shape.padded_bytes for shape in self.shapes)

    def attribute(self, key: str) -> str | None:
        """Return the raw value of `key=...` with balanced brackets; None without that key."""
        match = re.search(rf"(?:^|, ){re.escape(key)}=", self.attributes)
        return _balanced(self.attributes, match.end()) if match else None

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that this instruction runs, by kind of attribute: calls, reductions, body,
        condition, branches.
        """
        names: list[str] = []
        for key in _CALL_KEYS:
            value = self.attribute(key)
            if value:
                names += re.findall(r"%?([\w.\-]+)", value)
        return tuple(names)

    @property
    def op_name(self) -> str:
        """Name in the source, from the metadata; empty without one, or if XLA put a name of its own there
        (`custom-call.48`).
        """
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return "" if match is None or re.fullmatch(r"[\w\-]+\.\d+", match[1]) else match[1]

    @property
    def frame(self) -> int:
        """`stack_frame_id` of the metadata, -1 without one."""
        return _field(self.attributes, "stack_frame_id")


_CALL_KEYS = ("calls", "to_apply", "body", "condition", "branch_computations", "true_computation", "false_computation")
"""Attributes that name called computations."""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in printed order (the schedule, if the module says `is_scheduled=true`)."""

    name: str
    """Name without `%`."""
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by their name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns; the last one if none is marked."""
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instructions that consume a value, by the value's name."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameter instructions by their number."""
        return {int(i.literal): i for i in self.instructions if i.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class HloModule:
    """All computations of one module."""

    computations: dict[str, Computation]
    """Computations by name, in printed order."""
    entry: str
    """Name of the entry computation; empty for text without computations."""
    scheduled: bool
    """True if the text says that instructions are in the order of execution."""
    lines: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """`stack_frame_id` -> the user's `file:line`, from the tables at the head of the text."""


def parse_hlo(text: str) -> HloModule:
    """Parse HLO text as `jax.stages.Compiled.as_text()` prints it.

    The entry is the computation marked `ENTRY`, else the last. Lines that are no instruction are skipped, and nothing
    is raised for other text.
    """
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
    """Return the name at the head of HLO text, as profilers print it; empty if the text has no such head."""
    match = re.match(r"HloModule ([\w.\-]+)", text)
    return match[1] if match else ""


def _whole_lines(text: str) -> Iterator[str]:
    """Yield the lines of HLO text; the lines of an attribute with line breaks (a kernel's metadata) are joined."""
    pending: str | None = None
    for line in text.splitlines():
        if pending is not None and not line.startswith((" ", "%", "ENTRY")) and re.match(r"\}(,|\s*$)", line) is None:
            pending += line
            continue
        if pending is not None:
            yield pending
        pending = line if line.startswith("  ") else None
        if pending is None:
            yield line
    if pending is not None:
        yield pending


def _source_lines(text: str) -> dict[int, str]:
    """Map each stack frame to the innermost line of the user's code in it and its callers (`mlir.shown_line`).

    The tables at the head of the text have the frames. A frame without such a line is left out.
    """
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
    places = {}
    for number, place in tables["FileLocations"].items():
        if name := tables["FileNames"].get(_field(place, "file_name_id"), "").strip('"'):
            places[number] = name, _field(place, "line")
    frames = {
        number: (places.get(_field(frame, "file_location_id")), _field(frame, "parent_frame_id"))
        for number, frame in tables["StackFrames"].items()
    }

    def outward(number: int) -> Iterator[tuple[str, int]]:
        """Yield file and line of a frame and of its callers, innermost first."""
        passed = set[int]()
        while number in frames and number not in passed:  # the outermost frame may be its own caller
            passed.add(number)
            place, number = frames[number]
            if place is not None:
                yield place

    return {number: line for number in frames if (line := shown_line(outward(number)))}


def _field(text: str, key: str) -> int:
    """Return the number of `key=...` in a text, -1 without one."""
    match = re.search(rf"\b{key}=(\d+)", text)
    return int(match[1]) if match else -1


def _parse_line(line: str) -> Instruction | None:
    """Parse one line of a computation; return None if it is no instruction."""
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
    """Return the text from `start` up to `stop` (or an unmatched closing bracket, or the end) outside of brackets and
    quotes.
    """
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
    """Parse all arrays in the text of a type, tuples flattened, in order."""
    shapes = []
    for dtype, dims, layout in _ARRAY.findall(text):
        sizes = tuple(int(size.strip("<= ")) for size in dims.split(",") if size.strip())
        space = re.search(r"S\((\d+)\)", layout)
        minor, tile = tiling(layout)
        shapes.append(Shape(dtype, sizes, int(space[1]) if space else 0, minor, tile))
    return tuple(shapes)


def tiling(layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `Shape.minor` and `Shape.tile` of a layout such as `{1,0:T(8,128)(2,1)}`: (1, 0) and (128, 8); both empty
    for other text.
    """
    match = re.match(r"\{([\d,]*)(?::T\(([\d,]+)\))?", layout)
    if match is None:
        return (), ()
    minor, tile = ([int(number) for number in part.split(",") if number] for part in (match[1], match[2] or ""))
    return tuple(minor), tuple(reversed(tile))
