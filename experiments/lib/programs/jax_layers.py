"""A decoder in plain JAX whose layers are unrolled or scanned, and may differ from each other."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.lib.programs.jax_case import Case, Tree, cross_entropy, f32, ids, norm


VOCAB, HEADS = 4096, 8


def _block(x: Any, w: Tree) -> Any:
    """Compute attention and a feed-forward block; `x` is [B, S, D]."""
    b, s, width = x.shape
    h = norm(x, w["norm1"])
    q, k, v = (jnp.einsum("bsd,df->bsf", h, w[part]).reshape(b, s, HEADS, width // HEADS) for part in "qkv")
    scores = jnp.einsum("bshf,bthf->bhst", q, k) * (width // HEADS) ** -0.5
    scores = jnp.where(jnp.arange(s)[:, None] >= jnp.arange(s), scores, -1e9)
    a = jnp.einsum("bhst,bthf->bshf", jax.nn.softmax(scores), v).reshape(b, s, -1)
    x = x + a @ w["o"]
    h = norm(x, w["norm2"])
    return x + jax.nn.silu(h @ w["up"]) @ w["down"]


def layered(
    depth: int,
    scanned: bool = False,
    width: int = 1024,
    batch: int = 64,
    seq: int = 1024,
    ffns: Sequence[int] = (4,),
    tied: bool = False,
) -> Case:
    """Make `depth` rematerialised layers.

    - `ffns`: factors of the feed-forward widths; layer n has `ffns[n % len(ffns)]` times `width`.
    - `scanned`: if True the layers are one scan.
    - `tied`: if True the embedding is the head too.
    """

    def shapes(number: int) -> Tree:
        ffn = ffns[number % len(ffns)] * width
        square = {part: f32(width, width) for part in "qkvo"}
        return square | {"up": f32(width, ffn), "down": f32(ffn, width), "norm1": f32(width), "norm2": f32(width)}

    def forward(params: Tree, data: Tree) -> Any:
        x = jnp.take(params["embed"], data["ids"], axis=0)
        layer = jax.checkpoint(_block)
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
        else:
            for w in params["layers"]:
                x = layer(x, w)
        return jnp.einsum("bsd,vd->bsv", x, params["embed" if tied else "head"])

    layers: Any = [shapes(number) for number in range(depth)]
    if scanned:
        layers = {name: f32(depth, *part.shape) for name, part in layers[0].items()}
    params = {"embed": f32(VOCAB, width), "layers": layers} | ({} if tied else {"head": f32(VOCAB, width)})
    data = {"ids": ids(batch, seq), "labels": ids(batch, seq)}
    return Case(params, data, forward, lambda p, b: cross_entropy(forward(p, b), b["labels"]))
