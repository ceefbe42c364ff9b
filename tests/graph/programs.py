"""Small programs and their graphs for the tests of `graph`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from autoshard.graph import Op, OpGraph, Structure, build_structure, read_graph
from autoshard.program import Program, Role, trace


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def graph_of(fn: Callable[..., Any], *args: Any) -> OpGraph:
    return read_graph(trace(fn, args).module)


def ops(graph: OpGraph, kind: str) -> list[Op]:
    return [op for op in graph.ops if op.kind == kind]


def structure_of(program: Program) -> tuple[OpGraph, Structure]:
    """Build the structure as a plan does: parameters separate, updated state tied."""
    graph = read_graph(program.module)
    named = list(zip(graph.arguments, program.arguments, strict=True))
    parameters = [t for t, a in named if a.role is Role.PARAMETER]
    ties = [(graph.results[a.result], t) for t, a in named if a.result is not None]
    return graph, build_structure(graph, parameters, ties)


LAYERS, BATCH, SEQ, DIM, HEADS, FFN, VOCABULARY = 3, 8, 16, 32, 4, 64, 128


def mlp() -> Program:
    """Trace AdamW on a two-layer MLP with biases."""
    optimizer = optax.adamw(1e-3)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            h = jax.nn.relu(x @ p["up"] + p["bias"])
            return jnp.mean((h @ p["down"] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = {"up": f32(DIM, FFN), "bias": f32(FFN), "down": f32(FFN, DIM)}
    state = jax.eval_shape(optimizer.init, params)
    return trace(step, (params, state, f32(BATCH, DIM), f32(BATCH, DIM)), name="mlp", donate_argnums=(0, 1))


def _layer(x: Any, p: dict[str, Any]) -> Any:
    q, k, v = jnp.einsum("bsd,dthk->tbshk", x, p["qkv"])
    scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), jnp.einsum("bshk,bthk->bhst", q, k), -1e9)
    x = x + jnp.einsum("bhst,bthk,hkd->bsd", jax.nn.softmax(scores), v, p["out"])
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def decoder(remat: bool = True) -> Program:
    """Trace one SGD step of a scanned decoder."""

    def step(params: Any, tokens: Any) -> Any:
        def loss(p: Any) -> Any:
            layer = jax.checkpoint(_layer) if remat else _layer
            x, _ = lax.scan(lambda c, w: (layer(c, w), None), p["table"][tokens], p["layers"])
            return -jnp.mean(jax.nn.log_softmax(x @ p["table"].T)[..., 0])

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    k = DIM // HEADS
    layers = {
        "qkv": f32(LAYERS, DIM, 3, HEADS, k),
        "out": f32(LAYERS, HEADS, k, DIM),
        "up": f32(LAYERS, DIM, FFN),
        "down": f32(LAYERS, FFN, DIM),
    }
    params = {"layers": layers, "table": f32(VOCABULARY, DIM)}
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    return trace(step, (params, tokens), name="decoder", donate_argnums=(0,))


def convolutions() -> Program:
    """Trace one SGD step of two convolutions, pooling and a head."""

    def step(params: Any, images: Any, labels: Any) -> Any:
        def loss(p: Any) -> Any:
            x = images
            for w, stride in ((p["a"], 1), (p["b"], 2)):
                x = lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
                x = jax.nn.relu(x)
            return jnp.mean((x.mean((1, 2)) @ p["head"] - labels) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {"a": f32(3, 3, 3, 16), "b": f32(3, 3, 16, 32), "head": f32(32, 10)}
    return trace(step, (params, f32(BATCH, 12, 12, 3), f32(BATCH, 10)), name="convolutions", donate_argnums=(0,))


def decoding() -> Program:
    """Trace one token of attention against a cache that is written in place."""

    def step(params: Any, cache: Any, x: Any, position: Any) -> Any:
        kv = x @ params["kv"]
        cache = lax.dynamic_update_slice(cache, kv[:, None, :], (0, position, 0))
        weights = jax.nn.softmax(jnp.einsum("bd,bsd->bs", x @ params["q"], cache))
        return cache, jnp.einsum("bs,bsd->bd", weights, cache) @ params["out"]

    params = {name: f32(DIM, DIM) for name in ("kv", "q", "out")}
    position = jax.ShapeDtypeStruct((), jnp.int32)
    return trace(step, (params, f32(BATCH, SEQ, DIM), f32(BATCH, DIM), position), name="decoding", donate_argnums=(1,))


def decoding_layers(carried: bool) -> Program:
    """Trace `decoding` with layers in a scan that either carries their caches, or reads them and returns new ones."""

    def step(params: Any, caches: Any, x: Any, position: Any) -> Any:
        def attend(x: Any, layer: Any, cache: Any) -> Any:
            weights = jax.nn.softmax(jnp.einsum("bd,bsd->bs", x @ layer["q"], cache))
            return jnp.tanh(jnp.einsum("bs,bsd->bd", weights, cache) @ layer["out"])

        def in_place(state: Any, layer: Any) -> Any:
            x, i, caches = state
            caches = lax.dynamic_update_slice(caches, (x @ layer["kv"])[None, :, None, :], (i, 0, position, 0))
            return (attend(x, layer, lax.dynamic_index_in_dim(caches, i, keepdims=False)), i + 1, caches), None

        def anew(x: Any, given: Any) -> Any:
            layer, cache = given
            cache = lax.dynamic_update_slice(cache, (x @ layer["kv"])[:, None, :], (0, position, 0))
            return attend(x, layer, cache), cache

        if carried:
            (x, _, caches), _ = lax.scan(in_place, (x, jnp.int32(0), caches), params)
        else:
            x, caches = lax.scan(anew, x, (params, caches))
        return caches, x

    params = {name: f32(LAYERS, DIM, DIM) for name in ("kv", "q", "out")}
    position = jax.ShapeDtypeStruct((), jnp.int32)
    args = (params, f32(LAYERS, BATCH, 16 * SEQ, DIM), f32(BATCH, DIM), position)
    return trace(step, args, name="decoding layers", donate_argnums=(1,))


def views() -> Program:
    """Trace reshapes that merge and split dims, sums of a tensor and its transpose, gathers and concatenations."""

    def fn(x: Any, w: Any) -> Any:
        merged = jnp.tanh(x).reshape(BATCH * SEQ, DIM)
        split = (merged @ w).reshape(BATCH, SEQ, HEADS, DIM // HEADS)
        both = jnp.concatenate([split, split[::-1]], axis=-1)
        square = w + w.T
        return both.sum(2), jnp.take(square, jnp.arange(5) * 2, axis=0), lax.top_k(x, 2)

    return trace(fn, (f32(BATCH, SEQ, DIM), f32(DIM, DIM)), name="views")


PROGRAMS: dict[str, Callable[[], Program]] = {
    "decoding, caches carried": lambda: decoding_layers(True),
    "decoding, caches scanned": lambda: decoding_layers(False),
    "mlp": mlp,
    "decoder": decoder,
    "decoder without remat": lambda: decoder(remat=False),
    "convolutions": convolutions,
    "decoding": decoding,
    "views": views,
}
