"""Decoders in plain JAX: a training step, scanned or layer by layer, and one token of decoding with a cache."""

from typing import Any

import jax
import jax.numpy as jnp

from autoshard.program import Program, trace
from experiments.lib.programs.jax_case import Case, Tree, cross_entropy, f32, ids, norm, values


WIDTH, FFN, HEADS, GROUPS, HEAD, VOCAB, DEPTH, BATCH, SEQ = 128, 512, 4, 2, 32, 1024, 2, 16, 64


def _decoder_shapes() -> dict[str, tuple[int, ...]]:
    inner = GROUPS * HEADS * HEAD
    return {
        "q": (DEPTH, inner, WIDTH),
        "k": (DEPTH, HEADS * HEAD, WIDTH),
        "v": (DEPTH, HEADS * HEAD, WIDTH),
        "o": (DEPTH, WIDTH, inner),
        "up": (DEPTH, FFN, WIDTH),
        "down": (DEPTH, WIDTH, FFN),
        "norm1": (DEPTH, WIDTH),
        "norm2": (DEPTH, WIDTH),
    }


def decoder_layer(x: Any, w: Tree) -> Any:
    """Compute grouped-query attention and a feed-forward block; `x` is [B, S, D]."""
    b, s, _ = x.shape
    h = norm(x, w["norm1"])
    q = jnp.einsum("bsd,fd->bsf", h, w["q"]).reshape(b, s, HEADS, GROUPS, HEAD)
    k = jnp.einsum("bsd,fd->bsf", h, w["k"]).reshape(b, s, HEADS, HEAD)
    v = jnp.einsum("bsd,fd->bsf", h, w["v"]).reshape(b, s, HEADS, HEAD)
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k) * HEAD**-0.5
    scores = jnp.where(jnp.arange(s)[:, None] >= jnp.arange(s), scores, -1e9)
    a = jnp.einsum("bkgst,btkh->bskgh", jax.nn.softmax(scores), v).reshape(b, s, -1)
    x = x + jnp.einsum("bsf,df->bsd", a, w["o"])
    h = norm(x, w["norm2"])
    return x + jnp.einsum("bsf,df->bsd", jax.nn.silu(jnp.einsum("bsd,fd->bsf", h, w["up"])), w["down"])


def decoder(scanned: bool, policy: Any = None) -> Case:
    """Make a rematerialised decoder in plain JAX: its layers scanned, or one after the other with a policy."""

    def forward(params: Tree, batch: Tree) -> Any:
        x = jnp.take(params["embed"], batch["ids"], axis=0)
        layer = jax.checkpoint(decoder_layer, policy=policy)
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
        else:
            for number in range(DEPTH):
                x = layer(x, {name: stack[number] for name, stack in params["layers"].items()})
        return jnp.einsum("bsd,vd->bsv", x, params["head"])

    params = {
        "embed": f32(VOCAB, WIDTH),
        "layers": {name: f32(*shape) for name, shape in _decoder_shapes().items()},
        "head": f32(VOCAB, WIDTH),
    }
    batch = {"ids": ids(BATCH, SEQ), "labels": ids(BATCH, SEQ)}
    return Case(params, batch, forward, lambda p, b: cross_entropy(forward(p, b), b["labels"]))


def decode_step(batch: int = 16, length: int = 128, heads: int = HEADS) -> Program:
    """Trace one token for every sequence, with a key-value cache as donated state."""
    inner = GROUPS * heads * HEAD
    shapes = _decoder_shapes() | {
        "q": (DEPTH, inner, WIDTH),
        "k": (DEPTH, heads * HEAD, WIDTH),
        "v": (DEPTH, heads * HEAD, WIDTH),
        "o": (DEPTH, WIDTH, inner),
    }

    def step(params: Tree, cache: Tree, token: Any, position: Any) -> Any:
        x = jnp.take(params["embed"], token, axis=0)

        def layer(x: Any, both: Any) -> Any:
            w, held = both
            h = norm(x, w["norm1"])
            q = (h @ w["q"].T).reshape(batch, heads, GROUPS, HEAD)
            new = {part: (h @ w[part].T).reshape(batch, 1, heads, HEAD) for part in ("k", "v")}
            held = {p: jax.lax.dynamic_update_slice(held[p], new[p], (0, position, 0, 0)) for p in held}
            scores = jnp.einsum("bkgh,btkh->bkgt", q, held["k"]) * HEAD**-0.5
            scores = jnp.where(jnp.arange(length) <= position, scores, -1e9)
            a = jnp.einsum("bkgt,btkh->bkgh", jax.nn.softmax(scores), held["v"]).reshape(batch, -1)
            x = x + a @ w["o"].T
            return x + jax.nn.silu(norm(x, w["norm2"]) @ w["up"].T) @ w["down"].T, held

        x, cache = jax.lax.scan(layer, x, (params["layers"], cache))
        return x @ params["head"].T, cache

    params = {
        "embed": f32(VOCAB, WIDTH),
        "layers": {name: f32(*shape) for name, shape in shapes.items()},
        "head": f32(VOCAB, WIDTH),
    }
    cache = {part: f32(DEPTH, batch, length, heads, HEAD) for part in ("k", "v")}
    given = {"cache": cache, "token": ids(batch), "position": ids()}

    def make_args(seed: int) -> tuple[Any, ...]:
        made, data = values(params, given, {"position": length}, seed)
        return made, data["cache"], data["token"], data["position"]

    args = (params, cache, ids(batch), ids())
    return trace(step, args, name="decode step", donate_argnums=(1,), make_args=make_args)
