"""Uses of a program's arguments, read from the module alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import mlir
from autoshard.mlir import Use


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


IDS = jax.ShapeDtypeStruct((8,), jnp.int32)


def module(fn: Callable[..., Any], *args: Any) -> Any:
    return mlir.parse_module(jax.jit(fn, keep_unused=True).lower(*args).as_text())


def conv(x: Any, w: Any) -> Any:
    return jax.lax.conv(x, w, (1, 1), "SAME")


def scanned(stack: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0]


def cached(cache: Any, new: Any, place: Any) -> Any:
    cache = jax.lax.dynamic_update_slice(cache, new, (place, 0))
    return cache, jnp.exp(cache).sum()


@pytest.mark.parametrize(
    ("fn", "args", "uses"),
    [
        (lambda w, x: x @ w, (f32(4, 4), f32(8, 4)), "weight data"),
        (lambda x, w: x @ w, (f32(8, 4), f32(4, 4)), "data weight"),
        (lambda w, x: jnp.tanh(x) @ w.T.astype(jnp.float32), (f32(4, 4), f32(8, 4)), "weight data"),
        (lambda x, one, two: two @ (x @ one).T, (f32(8, 4), f32(4, 6), f32(3, 6)), "data weight weight"),
        (lambda x, b: x + b, (f32(8, 4), f32(4)), "peer weight"),
        (conv, (f32(2, 3, 8, 8), f32(4, 3, 3, 3)), "data weight"),
        (lambda table, ids: table[ids], (f32(16, 4), IDS), "weight data"),
        (scanned, (f32(3, 4, 4), f32(8, 4)), "weight data"),
        (cached, (f32(16, 4), f32(1, 4), jax.ShapeDtypeStruct((), jnp.int32)), "written data data"),
        (lambda x, y: jnp.mean((jnp.tanh(x).sum(1) - y) ** 2), (f32(8, 4), f32(8)), "data peer"),
        (lambda x: jnp.ones(3), (f32(8, 4),), "none"),
    ],
)
def test_use_of_every_argument(fn: Callable[..., Any], args: tuple[Any, ...], uses: str):
    assert mlir.argument_uses(module(fn, *args)) == [Use(word) for word in uses.split()]


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)


SQUARES = {"a": f32(4, 4), "b": f32(4, 4)}


def sgd(w: Any, x: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))


def adam(w: Any, m: Any, v: Any, x: Any) -> Any:
    g = jax.grad(loss)(w, x)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
    v = jax.tree.map(lambda v, g: 0.9 * v + g * g, v, g)
    return v, m, jax.tree.map(lambda p, m, v: p - m / (jnp.sqrt(v) + 1e-8), w, m, v)


@pytest.mark.parametrize(
    ("fn", "args", "ties"),
    [
        (sgd, (SQUARES, f32(4, 4)), {0: 0, 1: 1}),
        (adam, (SQUARES, SQUARES, SQUARES, f32(4, 4)), {0: 4, 1: 5, 2: 2, 3: 3, 4: 0, 5: 1}),
        (jax.grad(loss), (SQUARES, f32(4, 4)), {}),
        (lambda x, y: x + y, (f32(4), f32(4)), {}),
    ],
)
def test_updated_arguments(fn: Callable[..., Any], args: tuple[Any, ...], ties: dict[int, int]):
    assert mlir.updated_arguments(module(fn, *args)) == ties


def test_the_module_stays_as_it_is():
    program = module(sgd, SQUARES, f32(4, 4))
    before = str(program)
    mlir.argument_uses(program)
    mlir.updated_arguments(program)
    assert str(program) == before
