"""Random JAX programs as text, the same for the same seed: what people write, and what nobody does.

Every line takes values that are there and makes a new one. Values stay small and finite, and nothing depends on the
order of sums by more than rounding: what jumps (comparing, picking the largest) is done with whole numbers.
"""

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np


DIMS = (1, 2, 3, 4, 5, 7, 8, 8, 12, 16, 16)
FLOATS = ("float32", "float32", "float32", "bfloat16", "float16")
WHOLE = ("int32", "int8", "uint8", "uint32", "int16")
MOST_ELEMENTS = 1 << 12
TOLERANCE = {"float32": 2e-4, "bfloat16": 6e-2, "float16": 1e-2, "complex64": 2e-4}
"""Relative to the largest value of a result; whole numbers are equal."""
PRELUDE = """
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.custom_vjp
def halved(x):
    return 0.5 * jnp.tanh(x)


halved.defvjp(lambda x: (halved(x), x), lambda x, g: (0.5 * g * (1 - jnp.tanh(x) ** 2),))


@jax.custom_jvp
def bent(x):
    return jnp.sin(x)


bent.defjvp(lambda primals, tangents: (jnp.sin(*primals), jnp.cos(*primals) * tangents[0]))
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """One value of a program that is being written."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def floating(self) -> bool:
        return self.dtype in TOLERANCE and self.dtype != "complex64"

    @property
    def whole(self) -> bool:
        return self.dtype in WHOLE


@dataclasses.dataclass(frozen=True, slots=True)
class RandomProgram:
    """`program` in `text` takes arrays of these shapes and dtypes."""

    seed: int
    text: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    donated: tuple[int, ...]

    def function(self) -> Callable[..., Any]:
        found: dict[str, Any] = {}
        exec(self.text, found)
        return found["program"]

    def arguments(self) -> list[Any]:
        """The values that it is run on."""
        import jax.numpy as jnp

        draw = np.random.default_rng(self.seed)
        made = []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            if dtype == "bool":
                value = draw.integers(0, 2, shape).astype(bool)
            elif dtype in WHOLE:
                value = draw.integers(0, 100, shape)
            elif dtype == "complex64":
                value = draw.uniform(-1, 1, shape) + 1j * draw.uniform(-1, 1, shape)
            else:
                value = draw.uniform(-1, 1, shape)
            made.append(jnp.asarray(value, dtype=dtype))
        return made


def random_program(seed: int) -> RandomProgram:
    return _Writer(seed).program()


class _Writer:
    def __init__(self, seed: int) -> None:
        self.seed, self.draw = seed, random.Random(seed)
        self.lines: list[str] = []
        self.values: list[Value] = []

    def program(self) -> RandomProgram:
        for number in range(self.draw.randint(2, 4)):
            dtype = (
                "float32"
                if number == 0
                else self.draw.choice((*FLOATS, *FLOATS, "int32", "uint8", "bool", "complex64"))
            )
            rank = self.draw.choice((1, 2, 2, 3, 3, 4)) if number == 0 else self.draw.choice((0, 1, 2, 2, 3, 4))
            self.values.append(Value(f"x{number}", self.shape(rank), dtype))
        arguments = tuple(self.values)
        steps = [getattr(self, name) for name in sorted(dir(_Writer)) if name.startswith("do_")]
        wanted = self.draw.randint(4, 10)
        for _ in range(200):
            if len(self.lines) < wanted:
                self.draw.choice(steps)()
        count = self.draw.randint(1, 3)
        results = [value.name for value in self.values[-count:]]
        results += [self.draw.choice(arguments).name] * self.draw.choice((0, 0, 1))
        donated: tuple[int, ...] = ()
        if self.draw.random() < 0.3:  # a buffer that the first result may take
            donated = (0,)
            results.insert(0, "(x0 * jnp.asarray(0.5, x0.dtype))")
        body = "".join(f"    {line}\n" for line in self.lines)
        names = ", ".join(value.name for value in arguments)
        text = f"{PRELUDE}\n\ndef program({names}):\n{body}    return {', '.join(results)},\n"
        shapes, dtypes = (tuple(getattr(value, key) for value in arguments) for key in ("shape", "dtype"))
        return RandomProgram(self.seed, text, shapes, dtypes, donated)

    def shape(self, rank: int) -> tuple[int, ...]:
        while True:
            shape = tuple(self.draw.choice(DIMS) for _ in range(rank))
            if self.draw.random() < 0.02 and rank:
                return (0, *shape[1:])
            if math.prod(shape) <= MOST_ELEMENTS:
                return shape

    def pick(self, *, kind: Callable[[Value], bool] = lambda value: True, rank: int = 0) -> Value | None:
        """A value of that kind and at least that rank, rather a late one; None if there is none."""
        found = [value for value in self.values if kind(value) and len(value.shape) >= rank]
        return self.draw.choice(found[-4:] if self.draw.random() < 0.7 else found) if found else None

    def floating(self, rank: int = 0) -> Value | None:
        return self.pick(kind=lambda value: value.floating and 0 not in value.shape, rank=rank)

    def add(self, text: str, shape: tuple[int, ...], dtype: str) -> None:
        if math.prod(shape) <= MOST_ELEMENTS:
            name = f"v{len(self.lines)}"
            self.lines.append(f"{name} = {text}")
            self.values.append(Value(name, shape, dtype))

    def numbers(self, count: int, below: int, distinct: bool = False) -> list[int]:
        return self.draw.sample(range(below), count) if distinct else [self.draw.randrange(below) for _ in range(count)]

    # Elementwise

    def do_unary(self) -> None:
        if x := self.floating():
            form = self.draw.choice(
                ("jnp.tanh({})", "jnp.sin({})", "jnp.abs({})", "-{}", "halved({})", "bent({})", "jnp.exp(-jnp.abs({}))",
                 "jax.checkpoint(lambda t: jnp.tanh(jnp.sin(t)))({})", "lax.optimization_barrier({})",
                 "jax.nn.softmax({}, axis=-1)" if x.shape else "jnp.cos({})")
            )  # fmt: skip
            self.add(form.format(x.name), x.shape, x.dtype)

    def do_binary(self) -> None:
        if x := self.floating():
            like = [v for v in self.values if v.dtype == x.dtype and v.shape in (x.shape, x.shape[1:], ())]
            y = self.draw.choice(like or [x])
            self.add(f"0.5 * ({x.name} {self.draw.choice('+-*')} {y.name})", x.shape, x.dtype)

    def do_outer(self) -> None:
        x, y = self.floating(1), self.floating(1)
        if x and y and x.dtype == y.dtype:
            rows, columns = x.shape[0], y.shape[-1]
            self.add(
                f"{x.name}.reshape({rows}, -1)[:, :1] * {y.name}.reshape(-1, {columns})[:1]", (rows, columns), x.dtype
            )

    def do_where(self) -> None:
        x, mask = self.floating(), self.pick(kind=lambda value: value.dtype == "bool")
        if x and mask and mask.shape in (x.shape, ()):
            self.add(f"jnp.where({mask.name}, {x.name}, 0.25)", x.shape, x.dtype)

    def do_compare(self) -> None:
        if x := self.pick(kind=lambda value: value.whole):
            self.add(f"{x.name} % 3 == 1", x.shape, "bool")

    def do_whole(self) -> None:
        if x := self.pick(kind=lambda value: value.whole):
            self.add(
                self.draw.choice(("{0} * 3 + 1", "{0} ^ ({0} >> 1)", "jnp.minimum({0}, 7)")).format(x.name),
                x.shape,
                x.dtype,
            )

    def do_cast(self) -> None:
        if x := self.pick(kind=lambda value: value.dtype != "complex64" and value.dtype in (*FLOATS, "bool")):
            dtype = self.draw.choice(FLOATS if x.floating else (*FLOATS, "int32"))
            self.add(f"{x.name}.astype('{dtype}')", x.shape, dtype)

    def do_complex(self) -> None:
        if (x := self.floating()) and x.dtype == "float32":
            self.add(f"lax.complex({x.name}, 0.5 * {x.name})", x.shape, "complex64")

    def do_of_complex(self) -> None:
        if x := self.pick(kind=lambda value: value.dtype == "complex64"):
            self.add(f"jnp.{self.draw.choice(('real', 'imag'))}({x.name} * {x.name})", x.shape, "float32")

    def do_constant(self) -> None:
        shape = self.shape(self.draw.choice((1, 2, 2, 3)))
        form = self.draw.choice(
            (f"jnp.asarray(np.linspace(-1, 1, {math.prod(shape)}).reshape({shape}), 'float32')",
             f"jax.random.uniform(jax.random.key({self.draw.randrange(99)}), {shape}, minval=-1.0)",
             f"lax.broadcasted_iota('float32', {shape}, {len(shape) - 1}) / {max(1, shape[-1])}")
        )  # fmt: skip
        self.add(form, shape, "float32")

    # Shapes

    def do_transpose(self) -> None:
        if x := self.pick(rank=2):
            order = self.numbers(len(x.shape), len(x.shape), distinct=True)
            self.add(f"{x.name}.transpose({order})", tuple(x.shape[k] for k in order), x.dtype)

    def do_merge(self) -> None:
        if x := self.pick(rank=2):
            at = self.draw.randrange(len(x.shape) - 1)
            shape = (*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])
            self.add(f"{x.name}.reshape({shape})", shape, x.dtype)

    def do_split(self) -> None:
        if x := self.pick(kind=lambda value: any(size > 3 and size % 2 == 0 for size in value.shape), rank=1):
            at = self.draw.choice([k for k, size in enumerate(x.shape) if size > 3 and size % 2 == 0])
            two = self.draw.choice(((2, x.shape[at] // 2), (x.shape[at] // 2, 2)))
            shape = (*x.shape[:at], *two, *x.shape[at + 1 :])
            if len(shape) <= 5:
                self.add(f"{x.name}.reshape({shape})", shape, x.dtype)

    def do_slice(self) -> None:
        if x := self.pick(rank=1):
            at = self.draw.randrange(len(x.shape))
            size = x.shape[at]
            start, step = self.draw.randrange(size // 2 + 1), self.draw.choice((1, 1, 2))
            left = len(range(start, size, step))
            index = ":, " * at + f"{start}::{step}"
            self.add(f"{x.name}[{index}]", (*x.shape[:at], left, *x.shape[at + 1 :]), x.dtype)

    def do_shift(self) -> None:
        if x := self.pick(rank=1):
            at = self.draw.randrange(len(x.shape))
            form = self.draw.choice(("jnp.flip({}, {})", "jnp.roll({}, 1, {})", "jnp.roll({}, -2, {})"))
            self.add(form.format(x.name, at), x.shape, x.dtype)

    def do_pad(self) -> None:
        if x := self.pick(kind=lambda value: value.dtype != "bool", rank=1):
            at = self.draw.randrange(len(x.shape))
            pads = [(0, 0)] * len(x.shape)
            pads[at] = (self.draw.randrange(3), self.draw.randrange(3))
            self.add(
                f"jnp.pad({x.name}, {pads})", tuple(s + sum(p) for s, p in zip(x.shape, pads, strict=True)), x.dtype
            )

    def do_concatenate(self) -> None:
        if x := self.pick(rank=1):
            at = self.draw.randrange(len(x.shape))
            shape = (*x.shape[:at], 2 * x.shape[at], *x.shape[at + 1 :])
            self.add(f"jnp.concatenate([{x.name}, jnp.flip({x.name}, {at})], {at})", shape, x.dtype)

    # Contractions and windows

    def do_reduce(self) -> None:
        if x := self.floating(1):
            at = self.draw.randrange(len(x.shape))
            what = self.draw.choice(("mean", "max", "min", "mean"))
            self.add(f"jnp.{what}({x.name}, {at})", (*x.shape[:at], *x.shape[at + 1 :]), x.dtype)

    def do_einsum(self) -> None:
        x, y = self.floating(1), self.floating(1)
        if not x or not y or x.dtype != y.dtype or len(x.shape) + len(y.shape) > 7:
            return
        letters: dict[str, int] = {}
        words = ["", ""]
        for word, value in enumerate((x, y)):
            for size in value.shape:
                same = [a for a, s in letters.items() if s == size and a not in words[word]]
                letter = self.draw.choice(same) if same and self.draw.random() < 0.7 else "abcdefghij"[len(letters)]
                letters[letter] = size
                words[word] += letter
        kept = [
            letter for letter in letters if self.draw.random() < 0.6 or not set(letter) <= set(words[0]) & set(words[1])
        ]
        self.draw.shuffle(kept)
        dropped = math.prod(size for letter, size in letters.items() if letter not in kept)
        shape = tuple(letters[letter] for letter in kept)
        letters_said = f"{words[0]},{words[1]}->{''.join(kept)}"
        text = f"jnp.einsum('{letters_said}', {x.name}, {y.name}) * {1 / max(1, dropped) ** 0.5:.3f}"
        self.add(text, shape, x.dtype)

    def do_convolution(self) -> None:
        if (x := self.floating(3)) and x.dtype == "float32" and len(x.shape) == 3:
            n, c, w = x.shape
            out = self.draw.choice((2, 4, 8))
            kernel = f"jnp.asarray(np.linspace(-1, 1, {out * c * 3}).reshape({out}, {c}, 3), 'float32')"
            stride = self.draw.choice((1, 2))
            text = f"lax.conv_general_dilated({x.name}, {kernel}, ({stride},), 'SAME') / {3 * c}"
            self.add(text, (n, out, -(-w // stride)), "float32")

    def do_pool(self) -> None:
        if (x := self.floating(2)) and x.dtype == "float32" and x.shape[-1] >= 2:
            window = (*[1] * (len(x.shape) - 1), 2)
            text = f"lax.reduce_window({x.name}, -jnp.inf, lax.max, {window}, {window}, 'VALID')"
            self.add(text, (*x.shape[:-1], x.shape[-1] // 2), "float32")

    def do_cumulate(self) -> None:
        if x := self.floating(1):
            at = self.draw.randrange(len(x.shape))
            self.add(f"jnp.cumsum({x.name}, {at}) / {x.shape[at]}", x.shape, x.dtype)

    def do_sort(self) -> None:
        if x := self.pick(kind=lambda value: value.floating or value.whole, rank=1):
            self.add(f"jnp.sort({x.name}, {self.draw.randrange(len(x.shape))})", x.shape, x.dtype)

    def do_largest(self) -> None:
        if x := self.pick(kind=lambda value: value.whole and 0 not in value.shape, rank=1):
            at = self.draw.randrange(len(x.shape))
            shape = (*x.shape[:at], *x.shape[at + 1 :])
            self.add(f"jnp.argmax({x.name}, {at}).astype('int32')", shape, "int32")

    # Indices

    def do_gather(self) -> None:
        if x := self.pick(kind=lambda value: 0 not in value.shape, rank=1):
            at = self.draw.randrange(len(x.shape))
            rows = self.numbers(self.draw.choice((2, 4, 8)), x.shape[at])
            self.add(
                f"jnp.take({x.name}, jnp.array({rows}), axis={at})",
                (*x.shape[:at], len(rows), *x.shape[at + 1 :]),
                x.dtype,
            )

    def do_gather_rows(self) -> None:
        x, index = self.floating(1), self.pick(kind=lambda value: value.whole and len(value.shape) == 1)
        if x and index:
            self.add(f"{x.name}[{index.name}.astype('int32') % {x.shape[0]}]", (*index.shape, *x.shape[1:]), x.dtype)

    def do_scatter(self) -> None:
        if x := self.floating(1):
            rows = self.numbers(self.draw.randint(1, x.shape[0]), x.shape[0], distinct=True)
            self.add(f"{x.name}.at[jnp.array({rows})].{self.draw.choice(('add', 'set', 'mul'))}(0.5)", x.shape, x.dtype)

    def do_dynamic_slice(self) -> None:
        if x := self.floating(1):
            starts = ", ".join(["0"] * (len(x.shape) - 1))
            sizes = (max(1, x.shape[0] // 2), *x.shape[1:])
            whole = self.pick(kind=lambda value: value.whole and 0 not in value.shape)
            start = f"{whole.name}.ravel()[0].astype('int32') % {x.shape[0]}" if whole else "1"
            self.add(f"lax.dynamic_slice({x.name}, ({start}, {starts}), {sizes})".replace(", )", ",)"), sizes, x.dtype)

    # Control

    def do_scan(self) -> None:
        if x := self.floating(2):
            text = f"lax.scan(lambda c, t: (0.5 * jnp.tanh(c + t), c), jnp.zeros_like({x.name}[0]), {x.name})"
            self.add(f"{text}[1]", x.shape, x.dtype)

    def do_loop(self) -> None:
        if x := self.floating():
            form = self.draw.choice(
                ("lax.fori_loop(0, 3, lambda i, c: 0.5 * jnp.sin(c) + 0.1, {})",
                 "lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, 0.5 * jnp.tanh(s[1])), (0, {}))[1]")
            )  # fmt: skip
            self.add(form.format(x.name), x.shape, x.dtype)

    def do_condition(self) -> None:
        x, whole = self.floating(), self.pick(kind=lambda value: value.whole and 0 not in value.shape)
        if x and whole:
            test = f"{whole.name}.ravel()[0] % 2 == 0"
            self.add(f"lax.cond({test}, lambda t: jnp.sin(t), lambda t: 0.5 * t, {x.name})", x.shape, x.dtype)

    def do_gradient(self) -> None:
        if (x := self.floating()) and x.dtype == "float32":
            inner = self.draw.choice(("jnp.tanh(t) * t", "halved(t) ** 2", "bent(t) * 0.3", "jnp.sort(t.ravel()) ** 2"))
            self.add(f"jax.grad(lambda t: jnp.sum({inner}))({x.name})", x.shape, x.dtype)

    def do_batch(self) -> None:
        if (x := self.floating(2)) and x.dtype == "float32":
            self.add(f"jax.vmap(lambda t: t / (1.0 + jnp.sum(t * t)))({x.name})", x.shape, x.dtype)
