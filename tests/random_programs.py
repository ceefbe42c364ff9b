"""Random JAX programs as text, the same for the same seed: ordinary code and unusual code.

Every line is of one kind (`tests/random_ops.py`), reads existing values and computes a new one.
"""

import dataclasses
import functools
import math
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.random_ops import KINDS, PRELUDE


DIMS = (1, 2, 3, 4, 5, 7, 8, 8, 12, 16, 16)
EVEN = (8, 8, 16)
FLOATS = ("float32", "bfloat16", "float16")
WHOLE = ("int32", "int8", "uint8", "uint32", "int16", "uint16")
OTHERS = (*FLOATS, "float32", "int32", "int8", "uint8", "bool", "complex64")
MODES = ("clip", "fill", "wrap")
MOST_ELEMENTS = 1 << 12
INDICES = 2
"""Number of the argument with indices."""
TRIES = 12
"""Tries with other values before a kind of op is left to other programs."""
TOLERANCE = {"float32": 2e-4, "bfloat16": 6e-2, "float16": 1e-2, "complex64": 2e-4}
"""Tolerance relative to the largest value of a result; integers are equal."""
_NOT_OF_THESE = (TypeError, ValueError, IndexError, AssertionError, NotImplementedError, ZeroDivisionError)
"""Errors of JAX for values whose shape or dtype an op does not accept."""
_FIELD = re.compile(r"\{(\w)(\d?)\}|\{(at|size|order|start|mode)\}")


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """One value of a program that is being generated."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    exact: bool = False
    """True for floats without any rounding, so that equal ones are equal on every device."""


@dataclasses.dataclass(frozen=True, slots=True)
class RandomProgram:
    """`program` in `text`, a function of arrays of these shapes and dtypes."""

    seed: int
    text: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    donated: tuple[int, ...]
    kinds: tuple[str, ...]
    """Templates of its lines, in their order."""

    def function(self) -> Callable[..., Any]:
        found: dict[str, Any] = {}
        exec(self.text, found)
        return found["program"]

    def arguments(self, nan: bool = False) -> list[Any]:
        """Return its arrays; with `nan`, one element of the first is NaN. `INDICES` are in and out of range."""
        import jax.numpy as jnp

        draw = np.random.default_rng(self.seed)
        made = []
        for number, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            if number == INDICES:
                value = draw.choice([0, 1, 2, 7, 3, -1, -3, 8, 15, 16, 40, -40], shape)
            elif dtype == "bool":
                value = draw.integers(0, 2, shape).astype(bool)
            elif dtype in WHOLE:
                value = draw.integers(0, 100, shape)
            elif dtype == "complex64":
                value = draw.uniform(-1, 1, shape) + 1j * draw.uniform(-1, 1, shape)
            else:
                value = draw.uniform(-1, 1, shape)
            if nan and number == 0:
                value.reshape(-1)[int(draw.integers(value.size))] = np.nan
            made.append(jnp.asarray(value, dtype=dtype))
        return made


def random_program(seed: int) -> RandomProgram:
    """Return the program of this seed. Programs of neighbouring seeds use different kinds of op in turn."""
    return _Writer(seed).program()


class _Writer:
    def __init__(self, seed: int) -> None:
        self.seed, self.draw = seed, random.Random(seed)
        self.lines: list[str] = []
        self.values: list[Value] = []
        self.kinds: list[str] = []

    def program(self) -> RandomProgram:
        draw = self.draw
        shape = self.shape(draw.choice((1, 2, 2, 3, 3)), draw.choice(EVEN))
        self.values = [
            Value("x0", shape, "float32"),
            Value("x1", shape, "int32"),
            Value("x2", (draw.choice(EVEN),), "int32"),
        ]
        for number in range(3, draw.randint(4, 5)):
            self.values.append(Value(f"x{number}", self.shape(draw.choice((0, 1, 2, 2, 3, 4))), draw.choice(OTHERS)))
        arguments = tuple(self.values)
        self.line("jnp.where(jnp.isnan(x0), x0, x1 % 5 * 0.25 - 0.5)", exact=True)
        wanted = 1 + draw.randint(6, 9)
        for kind in (*_turns(self.seed, 6), *draw.choices(KINDS, k=12)):
            if len(self.lines) < wanted:
                self.add(kind)
        body = "\n".join(f"    {line}" for line in self.lines)
        used = " ".join(line.split(" = ")[1] for line in self.lines)
        results = [value.name for value in self.values[len(arguments) :] if not re.search(rf"\b{value.name}\b", used)]
        results += [draw.choice(arguments).name] * draw.choice((0, 0, 1))
        donated: tuple[int, ...] = ()
        if draw.random() < 0.3:  # a buffer that the first result may alias
            donated = (0,)
            results.insert(0, "x0 * 0.5")
        names = ", ".join(value.name for value in arguments)
        text = f"{PRELUDE}\n\ndef program({names}):\n{body}\n    return {', '.join(results)},\n"
        shapes, dtypes = (tuple(getattr(value, key) for value in arguments) for key in ("shape", "dtype"))
        return RandomProgram(self.seed, text, shapes, dtypes, donated, tuple(self.kinds))

    def shape(self, rank: int, first: int | None = None) -> tuple[int, ...]:
        while True:
            shape = tuple(self.draw.choice(DIMS) for _ in range(rank))
            shape = shape if first is None else (first, *shape[1:])
            if math.prod(shape) <= MOST_ELEMENTS // 4:
                return shape

    def add(self, kind: str) -> None:
        """Append a line of this kind with values that fit it, if there are any."""
        for _ in range(TRIES):
            filled = self.fill(kind)
            if filled is not None and self.line(filled):
                self.kinds.append(kind)
                return

    def line(self, text: str, exact: bool = False) -> bool:
        """Append a line if JAX accepts it and its result is one array that is not too large."""
        import jax

        names = ", ".join(value.name for value in self.values)
        function = eval(f"lambda {names}: {text}", _namespace())
        try:
            made = jax.eval_shape(function, *(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in self.values))
        except _NOT_OF_THESE:
            return False
        if not isinstance(made, jax.ShapeDtypeStruct) or not 0 < math.prod(made.shape) <= MOST_ELEMENTS:
            return False
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.values.append(Value(name, made.shape, str(made.dtype), exact))
        return True

    def fill(self, kind: str) -> str | None:
        """Return the template with a value for each of its fields; None if a field has none."""
        taken: dict[str, Value] = {}
        drawn: dict[tuple[str, str], str] = {}
        last: list[Value] = []

        def value_of(letter: str, rank: int) -> Value | None:
            if letter not in taken:
                like = {"g": "f", "y": "x", "j": "i"}.get(letter)
                first = taken.get(like) if like else None
                found = [each for each in self.values if _fits(each, letter) and len(each.shape) >= rank]
                if first is not None:
                    found = [each for each in found if (each.shape, each.dtype) == (first.shape, first.dtype)]
                if not found and letter in _MADE:
                    self.line(_MADE[letter])
                    found = self.values[-1:]
                if not found:
                    return None
                taken[letter] = self.draw.choice(found[-4:] if self.draw.random() < 0.5 else found)
            return taken[letter]

        def word(field: re.Match[str]) -> str:
            letter, rank, name = field.groups()
            if letter == "k":
                return str(self.draw.randint(1, 3))
            if name is None:
                value = value_of(letter, int(rank or 0))
                if value is None:
                    raise LookupError(letter)
                if letter not in "d":
                    last.append(value)
                return value.name
            key = (name, last[-1].name)
            if key not in drawn:
                drawn[key] = self.about(name, last[-1], int(drawn.get(("at", last[-1].name), 0)))
            return drawn[key]

        try:
            return _FIELD.sub(word, kind)
        except LookupError:
            return None

    def about(self, name: str, value: Value, at: int) -> str:
        """Return an axis, an order of axes, a mode, or an index near or past an end of the value's axis."""
        rank, draw = len(value.shape), self.draw
        if name == "at":
            return str(draw.randrange(rank))
        if name == "size":
            return str(value.shape[at])
        if name == "order":
            return str(tuple(draw.sample(range(rank), rank)))
        if name == "mode":
            return draw.choice(MODES)
        size = value.shape[at]
        return draw.choice(
            ("0", "-1", str(size - 1), str(size), str(size // 2), *(f"x{INDICES}[{k}]" for k in range(4)))
        )


_MADE = {"b": "x1 % 3 == 1", "c": "lax.complex(x0, 0.5 * x0)"}
"""Values of letters for programs that have none yet."""


def _fits(value: Value, letter: str) -> bool:
    """Return True if the value fits a field of this letter."""
    dtype = value.dtype
    if letter == "d":
        return value.name == f"x{INDICES}"
    return {
        "f": dtype == "float32",
        "g": dtype == "float32",
        "x": dtype in FLOATS,
        "y": dtype in FLOATS,
        "i": dtype in WHOLE,
        "j": dtype in WHOLE,
        "b": dtype == "bool",
        "c": dtype == "complex64",
        "t": value.exact,
        "v": True,
    }[letter]


def _turns(seed: int, count: int) -> list[str]:
    """Return the kinds of op of this program's turn."""
    order = random.Random("kinds").sample(KINDS, len(KINDS))
    return [order[(seed * count + k) % len(order)] for k in range(count)]


@functools.cache
def _namespace() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    return names
