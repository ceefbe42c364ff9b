"""Ordinary training steps drawn at random by a seed: no decoders, and shapes of 0.2 to 10 GB a device on eight devices.

The order of the draws is part of the data: a seed names the same program in every run.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from autoshard.program import Program, trace
from experiments.lib.programs.jax_case import Tree


_IMAGES = ("NHWC", "HWIO", "NHWC")


class Drawn(NamedTuple):
    """A training step of shapes only."""

    loss: Callable[..., Any]
    """Loss of (parameters, batch arguments)."""
    params: Tree
    batch: tuple[Tree, ...]


def ordinary(seed: int) -> Program:
    """Trace the training step of a seed."""
    rng = random.Random(seed)
    dtype = rng.choice([jnp.bfloat16, jnp.bfloat16, jnp.float32])
    drawn = _KINDS[rng.choice(_kinds(seed))](rng, lambda *shape: jax.ShapeDtypeStruct(shape, dtype))
    optimizer = rng.choice([optax.sgd(1e-3), optax.sgd(1e-3, 0.9), optax.adamw(1e-3)])
    donated = (0, 1) if rng.random() < 0.6 else ()

    def step(params: Tree, state: Tree, *batch: Tree) -> tuple[Tree, Tree, Any]:
        loss, gradients = jax.value_and_grad(drawn.loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = jax.eval_shape(optimizer.init, drawn.params)
    return trace(jax.jit(step, donate_argnums=donated), (drawn.params, state, *drawn.batch))


def kind_of(seed: int) -> str:
    """Return the kind of program that `ordinary` draws for a seed."""
    rng = random.Random(seed)
    rng.choice(range(3))
    return rng.choice(_kinds(seed))


def _kinds(seed: int) -> list[str]:
    """Return the kinds among which a seed draws.

    State-space models have the seeds from -99 to -1, graph networks with attention those below; no other seed draws
    either.
    """
    apart = {"state_space": -99 <= seed < 0, "graph_attention": seed < -99}
    return [kind for kind in _KINDS if apart.get(kind, seed >= 0)]


def _ids(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _normed(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean, var = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(var + 1e-5)).astype(x.dtype) * scale


def _squares(out: Any, y: Any) -> Any:
    return jnp.mean((out - y).astype(jnp.float32) ** 2)


def _entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def _mlp(rng: random.Random, array: Callable[..., Any]) -> Drawn:
    batch = 2 ** rng.randint(14, 18)
    dims = [2 ** rng.randint(9, 13) for _ in range(rng.randint(3, 6))]
    act = rng.choice([jax.nn.relu, jax.nn.gelu, jax.nn.silu, jnp.tanh])

    def loss(params: Tree, x: Any, y: Any) -> Any:
        for w, b in params[:-1]:
            x = act(x @ w + b)
        return _squares(x @ params[-1][0], y)

    params = [(array(a, b), array(b)) for a, b in zip(dims, dims[1:], strict=False)]
    return Drawn(loss, params, (array(batch, dims[0]), array(batch, dims[-1])))


def _mlp_scan(rng: random.Random, array: Callable[..., Any]) -> Drawn:
    batch, d, layers = 2 ** rng.randint(13, 16), 2 ** rng.randint(10, 12), rng.randint(4, 16)
    gated, remat = rng.random() < 0.5, rng.random() < 0.3

    def layer(x: Any, p: Tree) -> tuple[Any, None]:
        h = _normed(x, p["scale"])
        up = jax.nn.silu(h @ p["gate"]) * (h @ p["up"]) if gated else jax.nn.gelu(h @ p["up"])
        return x + up @ p["down"], None

    def loss(params: Tree, x: Any, labels: Any) -> Any:
        x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params["layers"])
        return _entropy(x @ params["head"], labels)

    stacked = {"scale": array(layers, d), "up": array(layers, d, 4 * d), "down": array(layers, 4 * d, d)}
    if gated:
        stacked["gate"] = array(layers, d, 4 * d)
    return Drawn(loss, {"layers": stacked, "head": array(d, 1000)}, (array(batch, d), _ids(batch)))


def _mixer(rng: random.Random, array: Callable[..., Any]) -> Drawn:
    batch, patches, d, layers = 2 ** rng.randint(9, 12), 196, 2 ** rng.randint(8, 10), rng.randint(2, 6)

    def loss(params: Tree, x: Any, y: Any) -> Any:
        for p in params:
            h = jnp.swapaxes(_normed(x, p["s1"]), 1, 2)
            x = x + jnp.swapaxes(jax.nn.gelu(h @ p["t1"]) @ p["t2"], 1, 2)
            x = x + jax.nn.gelu(_normed(x, p["s2"]) @ p["c1"]) @ p["c2"]
        return _squares(x.mean(1), y)

    one = {"s1": array(d), "s2": array(d), "t1": array(patches, 384), "t2": array(384, patches)}
    one |= {"c1": array(d, 4 * d), "c2": array(4 * d, d)}
    return Drawn(loss, [one] * layers, (array(batch, patches, d), array(batch, d)))


def _conv(rng: random.Random, array: Callable[..., Any]) -> Drawn:
    batch, size = 2 ** rng.randint(7, 11), rng.choice([32, 56, 64, 112])
    width, layers = 2 ** rng.randint(5, 8), rng.randint(2, 6)
    strided = rng.random() < 0.5

    def loss(params: Tree, x: Any, labels: Any) -> Any:
        for i, (kernel, scale) in enumerate(params["convs"]):
            stride = (2, 2) if strided and i % 2 else (1, 1)
            y = jax.lax.conv_general_dilated(x, kernel, stride, "SAME", dimension_numbers=_IMAGES)
            mean, var = y.mean((0, 1, 2)), y.var((0, 1, 2))
            y = jax.nn.relu((y - mean) * jax.lax.rsqrt(var + 1e-5) * scale)
            x = y if y.shape != x.shape else x + y
        return _entropy(x.mean((1, 2)) @ params["head"], labels)

    convs = [(array(3, 3, 3 if i == 0 else width, width), array(width)) for i in range(layers)]
    return Drawn(loss, {"convs": convs, "head": array(width, 1000)}, (array(batch, size, size, 3), _ids(batch)))


def _attention(rng: random.Random, array: Callable[..., Any]) -> Drawn:
    batch, length, heads = 2 ** rng.randint(4, 7), rng.choice([512, 1024, 2048]), rng.choice([8, 16])
    d, layers = rng.choice([64, 128]), rng.randint(1, 4)
    causal = rng.random() < 0.5

    def loss(params: Tree, x: Any, y: Any) -> Any:
        for p in params:
            h = _normed(x, p["s"])
            q, k, v = (jnp.einsum("bsd,dhk->bshk", h, p[name]) for name in "qkv")
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
            x = x + jnp.einsum("bshk,hkd->bsd", mixed, p["o"])
            x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return _squares(x, y)

    m = heads * d
    one = {"s": array(m), "o": array(heads, d, m), "up": array(m, 4 * m), "down": array(4 * m, m)}
    one |= {name: array(m, heads, d) for name in "qkv"}
    return Drawn(loss, [one] * layers, (array(batch, length, m), array(batch, length, m)))


def _lstm(rng: random.Random, array: Callable[..., Any]) -> Drawn:
    batch, steps, d = 2 ** rng.randint(11, 14), rng.choice([64, 128]), 2 ** rng.randint(8, 10)

    def loss(params: Tree, x: Any, y: Any) -> Any:
        def cell(state: Any, x: Any) -> Any:
            h, c = state
            i, f, g, o = jnp.split(x @ params["wx"] + h @ params["wh"] + params["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((x.shape[1], d), x.dtype)
        return _squares(jax.lax.scan(cell, (zero, zero), x)[1] @ params["out"], y)

    params = {"wx": array(d, 4 * d), "wh": array(d, 4 * d), "b": array(4 * d), "out": array(d, d)}
    return Drawn(loss, params, (array(steps, batch, d), array(steps, batch, d)))


def _state_space(rng: random.Random, array: Callable[..., Any]) -> Drawn:
    layers, batch, steps = 2, 2 ** rng.randint(7, 9), rng.choice([256, 512])
    d, states = 2 ** rng.randint(9, 11), rng.choice([8, 16])

    def layer(h: Any, p: Tree) -> Any:
        decay = -jnp.exp(p["decay"].astype(jnp.float32)).astype(h.dtype)

        def cell(state: Any, inputs: Any) -> Any:
            u, dt, write, read = inputs
            state = jnp.exp(dt[..., None] * decay) * state + (dt * u)[..., None] * write[:, None, :]
            return state, jnp.einsum("bdn,bn->bd", state, read)

        dt = jax.nn.softplus(h @ p["dt"])
        start = jnp.zeros((h.shape[1], d, states), h.dtype)
        return h + jax.lax.scan(cell, start, (h, dt, h @ p["write"], h @ p["read"]))[1] @ p["out"], None

    def loss(params: Tree, x: Any, y: Any) -> Any:
        return _squares(jax.lax.scan(jax.checkpoint(layer), x, params)[0], y)

    params = {"decay": array(layers, d, states), "dt": array(layers, d, d), "out": array(layers, d, d)}
    params |= {name: array(layers, d, states) for name in ("write", "read")}
    return Drawn(loss, params, (array(steps, batch, d), array(steps, batch, d)))


def _tables(rng: random.Random, array: Callable[..., Any]) -> Drawn:
    batch, rows = 2 ** rng.randint(14, 18), 2 ** rng.randint(18, 21)
    d, features = 2 ** rng.randint(5, 7), rng.randint(4, 16)

    def loss(params: Tree, ids: Any, labels: Any) -> Any:
        x = jax.vmap(lambda table, i: table[i], (0, 1), 1)(params["tables"], ids).reshape(ids.shape[0], -1)
        for w in params["mlp"]:
            x = jax.nn.relu(x @ w)
        logits = (x @ params["out"])[:, 0].astype(jnp.float32)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

    mlp = [array(features * d, 1024), array(1024, 512)]
    params = {"tables": array(features, rows, d), "mlp": mlp, "out": array(512, 1)}
    return Drawn(loss, params, (_ids(batch, features), _f32(batch)))


def _mixture(rng: random.Random, array: Callable[..., Any]) -> Drawn:
    tokens, d, experts = 2 ** rng.randint(15, 18), rng.choice([512, 1024]), rng.choice([8, 16, 32])
    capacity = 2 * tokens // experts

    def loss(params: Tree, x: Any, y: Any) -> Any:
        gates = jax.nn.softmax((x @ params["router"]).astype(jnp.float32))
        _, chosen = jax.lax.top_k(gates, 2)
        mask = jax.nn.one_hot(chosen, experts, dtype=jnp.int32).sum(1)
        place = jnp.cumsum(mask, 0) * mask - 1
        # The last slot of an expert takes the tokens that it drops.
        slots = jnp.where((place >= 0) & (place < capacity), place, capacity)
        inside = jnp.zeros((experts, capacity + 1, x.shape[1]), x.dtype)
        mine = (jnp.arange(experts)[None], slots)
        inside = inside.at[mine].add(x[:, None] * (mask[..., None] > 0).astype(x.dtype))[:, :capacity]
        h = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inside, params["up"]))
        h = jnp.einsum("ecf,efd->ecd", h, params["down"])
        h = jnp.concatenate([h, jnp.zeros_like(h[:, :1])], 1)
        back = h[jnp.arange(experts)[None], slots]
        return _squares(x + jnp.einsum("ned,ne->nd", back, (gates * mask).astype(x.dtype)), y)

    params = {"router": array(d, experts), "up": array(experts, d, 4 * d), "down": array(experts, 4 * d, d)}
    return Drawn(loss, params, (array(tokens, d), array(tokens, d)))


def _graph(rng: random.Random, array: Callable[..., Any]) -> Drawn:
    nodes, edges = 2 ** rng.randint(16, 19), 2 ** rng.randint(20, 23)
    d, layers = rng.choice([64, 128, 256]), rng.randint(1, 3)

    def loss(params: Tree, x: Any, senders: Any, receivers: Any, y: Any) -> Any:
        for w in params:
            x = x + jax.ops.segment_sum(jax.nn.relu(x @ w)[senders], receivers, x.shape[0])
        return _squares(x, y)

    return Drawn(loss, [array(d, d)] * layers, (array(nodes, d), _ids(edges), _ids(edges), array(nodes, d)))


def _graph_attention(rng: random.Random, array: Callable[..., Any]) -> Drawn:
    nodes, edges = 2 ** rng.randint(15, 18), 2 ** rng.randint(19, 21)
    d, layers = rng.choice([64, 128, 256]), rng.randint(1, 4)

    def loss(params: Tree, x: Any, senders: Any, receivers: Any, y: Any) -> Any:
        for layer in params:
            messages = jax.nn.relu(jnp.concatenate([x[senders], x[receivers]], -1) @ layer["message"])
            scores = (messages @ layer["score"])[:, 0]
            scores = jnp.exp(scores - jax.ops.segment_max(scores, receivers, nodes)[receivers])
            weights = scores / jax.ops.segment_sum(scores, receivers, nodes)[receivers]
            x = x + jax.ops.segment_sum(messages * weights[:, None], receivers, nodes) @ layer["update"]
        return _squares(x, y)

    one = {"message": array(2 * d, d), "score": array(d, 1), "update": array(d, d)}
    return Drawn(loss, [one] * layers, (array(nodes, d), _ids(edges), _ids(edges), array(nodes, d)))


def _autoencoder(rng: random.Random, array: Callable[..., Any]) -> Drawn:
    batch, size, width = 2 ** rng.randint(8, 12), rng.choice([32, 64]), 2 ** rng.randint(5, 7)

    def convolved(x: Any, kernel: Any, stride: int) -> Any:
        strides = (stride, stride)
        return jax.nn.silu(jax.lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=_IMAGES))

    def loss(params: Tree, x: Any) -> Any:
        skips, h = [], x
        for kernel in params["down"]:
            h = convolved(h, kernel, 2)
            skips.append(h)
        for kernel, skip in zip(params["up"], reversed(skips), strict=True):
            h = h if h is skip else jnp.concatenate([h, skip], -1)
            n, high, wide, channels = h.shape
            h = convolved(jax.image.resize(h, (n, 2 * high, 2 * wide, channels), "nearest"), kernel, 1)
        return _squares(h @ params["out"], x)

    down = [array(3, 3, 3, width), array(3, 3, width, 2 * width), array(3, 3, 2 * width, 4 * width)]
    up = [array(3, 3, 4 * width, 2 * width), array(3, 3, 4 * width, width), array(3, 3, 2 * width, width)]
    return Drawn(loss, {"down": down, "up": up, "out": array(width, 3)}, (array(batch, size, size, 3),))


_KINDS: dict[str, Callable[[random.Random, Callable[..., Any]], Drawn]] = {
    "mlp": _mlp,
    "mixer": _mixer,
    "conv": _conv,
    "attention": _attention,
    "lstm": _lstm,
    "tables": _tables,
    "mixture": _mixture,
    "graph": _graph,
    "autoencoder": _autoencoder,
    "mlp_scan": _mlp_scan,
    "state_space": _state_space,
    "graph_attention": _graph_attention,
}
"""Maker of each kind, in the order in which a seed draws them."""
