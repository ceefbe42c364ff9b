"""Programs for one GPU of 80 GB, by name: decoders, convolutions, recurrences, graphs, tables, mixtures, serving.

Each program has a size that runs for tens to hundreds of milliseconds on an H100, and a tiny one for eight CPU devices.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from autoshard.program import Program, trace
from experiments.lib.programs.compile_programs import hf, jax_mamba
from experiments.lib.programs.jax_case import Case, Tree, f32, ids, norm, train_program
from experiments.lib.programs.jax_others import lstm, residual_network
from experiments.lib.programs.jax_programs import embedding_tables, graph_network, unet


@dataclasses.dataclass(frozen=True, slots=True)
class Sized:
    """A program at two sizes."""

    make: Callable[..., Program]
    whole: Mapping[str, Any]
    tiny: Mapping[str, Any]

    def program(self, tiny: bool = False) -> Program:
        """Make the program for a GPU, or the `tiny` one."""
        return self.make(**(self.tiny if tiny else self.whole))


def _rotated(x: Any) -> Any:
    """Rotate the halves of every head of x [B, S, H, D] by its position."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = (each[:, None].astype(x.dtype) for each in (jnp.cos(angle), jnp.sin(angle)))
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def _attended(q: Any, k: Any, v: Any, attention: str) -> Any:
    """Compute causal attention of q [B, S, H, D] over k and v [B, S, K, D].

    Each key head serves `H / K` query heads.
    """
    if attention == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    batch, length, heads, size = q.shape
    groups = q.reshape(batch, length, k.shape[2], -1, size)
    scores = jnp.einsum("bqkgd,bmkd->bkgqm", groups, k).astype(jnp.float32) * size**-0.5
    at = jnp.arange(length)
    scores = jnp.where(at[:, None] >= at, scores, -1e30)
    mixed = jnp.einsum("bkgqm,bmkd->bqkgd", jax.nn.softmax(scores).astype(q.dtype), v)
    return mixed.reshape(batch, length, heads, size)


def decoder(
    layers: int, width: int, inner: int, heads: int, kv_heads: int, vocab: int, batch: int, length: int,
    attention: str = "plain", remat: bool = False, donated: bool = True,
) -> Program:  # fmt: skip
    """Trace a step of AdamW on a scanned decoder, in bfloat16 with masters in float32."""
    size = width // heads

    def layer(x: Any, w: Tree) -> Any:
        h = norm(x, w["norm"])
        q, k, v = ((h @ w[name]).reshape(*x.shape[:2], -1, size) for name in ("q", "k", "v"))
        x = x + _attended(_rotated(q), _rotated(k), v, attention).reshape(x.shape) @ w["o"]
        h = norm(x, w["norm2"])
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]

    def loss(params: Tree, given: Tree) -> Any:
        x = params["embed"].astype(jnp.bfloat16)[given["ids"]]
        one = jax.checkpoint(layer) if remat else layer

        def step(x: Any, w: Tree) -> Any:
            return one(x, jax.tree.map(lambda each: each.astype(jnp.bfloat16), w)), None

        x, _ = jax.lax.scan(step, x, params["layers"])
        logits = (norm(x, params["last"].astype(x.dtype)) @ params["head"].astype(x.dtype)).astype(jnp.float32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), given["labels"][..., None], -1)
        return -jnp.mean(picked)

    stacks = {"norm": (width,), "norm2": (width,), "q": (width, width), "o": (width, width)}
    stacks |= {"k": (width, kv_heads * size), "v": (width, kv_heads * size)}
    stacks |= {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    params = {"embed": f32(vocab, width), "head": f32(width, vocab), "last": f32(width)}
    params["layers"] = {name: f32(layers, *shape) for name, shape in stacks.items()}
    given = {"ids": ids(batch, length), "labels": ids(batch, length)}
    if donated:
        return train_program("decoder", Case(params, given, loss, loss, {"ids": vocab, "labels": vocab}), "adamw")
    tx = optax.adamw(1e-3)

    def step(params: Tree, state: Tree, given: Tree) -> Any:
        value, grads = jax.value_and_grad(loss)(params, given)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return trace(step, (params, jax.eval_shape(tx.init, params), given), name="decoder", training=True)


def stack(layers: int, width: int, inner: int, batch: int) -> Program:
    """Trace a step of gradient descent on scanned residual MLPs in bfloat16, whose parameters are not donated."""

    def loss(params: Tree, x: Any) -> Any:
        y, _ = jax.lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w["up"]) @ w["down"], None), x, params)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    def step(params: Tree, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - (1e-3 * g).astype(w.dtype), params, grads), value

    def low(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    params = {"up": low(layers, width, inner), "down": low(layers, inner, width)}
    return trace(step, (params, low(batch, width)), name="stack", training=True)


def mixture(layers: int, width: int, inner: int, experts: int, batch: int, length: int) -> Program:
    """Trace a step of momentum on experts with a capacity; products with one-hot tensors dispatch the tokens."""
    room = 4 * length // experts

    def layer(x: Any, w: Tree) -> Any:
        chances = jax.nn.softmax((x @ w["router"]).astype(jnp.float32))
        best, expert = jax.lax.top_k(chances, 2)
        chosen = jax.nn.one_hot(expert, experts, dtype=jnp.float32)
        flat = chosen.reshape(batch, 2 * length, experts)
        place = jnp.cumsum(flat, 1).reshape(chosen.shape) * chosen - 1
        fits = (place >= 0) & (place < room)
        seats = jax.nn.one_hot(jnp.where(fits, place, -1).astype(jnp.int32), room)
        there = jnp.einsum("bske,bskec->bsec", chosen * fits, seats).astype(x.dtype)
        back = jnp.einsum("bsk,bske,bskec->bsec", best, chosen * fits, seats).astype(x.dtype)
        taken = jnp.einsum("bsec,bsd->becd", there, x)
        hidden = jax.nn.silu(jnp.einsum("becd,edf->becf", taken, w["up"]))
        return x + jnp.einsum("bsec,becd->bsd", back, jnp.einsum("becf,efd->becd", hidden, w["down"]))

    def forward(params: Tree, given: Tree) -> Any:
        def step(x: Any, w: Tree) -> Any:
            return jax.checkpoint(layer)(x, jax.tree.map(lambda each: each.astype(jnp.bfloat16), w)), None

        return jax.lax.scan(step, given["x"].astype(jnp.bfloat16), params)[0]

    def loss(params: Tree, given: Tree) -> Any:
        return jnp.mean(jnp.square(forward(params, given).astype(jnp.float32)))

    params = {"router": f32(layers, width, experts)}
    params |= {"up": f32(layers, experts, width, inner), "down": f32(layers, experts, inner, width)}
    return train_program("mixture", Case(params, {"x": f32(batch, length, width)}, forward, loss), "train")


def diffusion(layers: int, width: int, heads: int, patches: int, batch: int) -> Program:
    """Trace a step of AdamW on a denoising transformer, modulated by an embedded time step."""
    size = width // heads

    def layer(x: Any, w: Tree, time: Any) -> Any:
        shift, scale, gate, shift2, scale2, gate2 = jnp.split((jax.nn.silu(time) @ w["modulate"])[:, None], 6, -1)
        h = norm(x, jnp.zeros((), x.dtype)) * (1 + scale) + shift
        q, k, v = jnp.moveaxis((h @ w["qkv"]).reshape(*h.shape[:2], 3, heads, size), 2, 0)
        scores = jnp.einsum("bqhd,bmhd->bhqm", q, k).astype(jnp.float32) * size**-0.5
        mixed = jnp.einsum("bhqm,bmhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v).reshape(x.shape)
        x = x + gate * (mixed @ w["o"])
        h = norm(x, jnp.zeros((), x.dtype)) * (1 + scale2) + shift2
        return x + gate2 * (jax.nn.gelu(h @ w["up"]) @ w["down"])

    def forward(params: Tree, given: Tree) -> Any:
        low = jax.tree.map(lambda each: each.astype(jnp.bfloat16), params)
        angle = given["time"][:, None] * jnp.exp(-jnp.arange(128) / 14.0)
        time = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1).astype(jnp.bfloat16) @ low["time"]
        x = given["x"].astype(jnp.bfloat16) @ low["first"]
        x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w, time), None), x, low["layers"])
        return (x @ low["last"]).astype(jnp.float32)

    def loss(params: Tree, given: Tree) -> Any:
        return jnp.mean(jnp.square(forward(params, given) - given["noise"]))

    stacks = {"modulate": (width, 6 * width), "qkv": (width, 3 * width), "o": (width, width)}
    stacks |= {"up": (width, 4 * width), "down": (4 * width, width)}
    params = {"time": f32(256, width), "first": f32(16, width), "last": f32(width, 16)}
    params["layers"] = {name: f32(layers, *shape) for name, shape in stacks.items()}
    given = {"x": f32(batch, patches, 16), "noise": f32(batch, patches, 16), "time": f32(batch)}
    return train_program("diffusion", Case(params, given, forward, loss), "adamw")


def decode(layers: int, width: int, inner: int, heads: int, kv_heads: int, batch: int, places: int) -> Program:
    """Trace a step of decoding over caches [L, B, P, K, D], one stack for keys and one for values, not donated."""
    size = width // heads

    def step(params: Tree, caches: Tree, given: Tree) -> Any:
        def layer(x: Any, part: Tree) -> Any:
            w, keys, values = part
            h = norm(x, w["norm"])
            q, k, v = ((h @ w[name]).reshape(batch, 1, -1, size) for name in ("q", "k", "v"))
            keys = jax.lax.dynamic_update_slice(keys, k, (0, given["at"], 0, 0))
            values = jax.lax.dynamic_update_slice(values, v, (0, given["at"], 0, 0))
            groups = q.reshape(batch, kv_heads, -1, size)
            scores = jnp.einsum("bkgd,bpkd->bkgp", groups, keys).astype(jnp.float32) * size**-0.5
            scores = jnp.where(jnp.arange(places) <= given["at"], scores, -1e30)
            mixed = jnp.einsum("bkgp,bpkd->bkgd", jax.nn.softmax(scores).astype(x.dtype), values)
            x = x + mixed.reshape(batch, width) @ w["o"]
            h = norm(x, w["norm2"])
            return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], (keys, values)

        x, (keys, values) = jax.lax.scan(layer, given["x"], (params, caches["k"], caches["v"]))
        return x, {"k": keys, "v": values}

    def low(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    stacks = {"norm": (width,), "norm2": (width,), "q": (width, width), "o": (width, width)}
    stacks |= {"k": (width, kv_heads * size), "v": (width, kv_heads * size)}
    stacks |= {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    params = {name: low(layers, *shape) for name, shape in stacks.items()}
    caches = {name: low(layers, batch, places, kv_heads, size) for name in ("k", "v")}
    given = {"x": low(batch, width), "at": ids()}
    return trace(step, (params, caches, given), name="decode")


def _named(config: Any, tiny: Any, **options: Any) -> Callable[..., Program]:
    """Return a function that opens a model of the transformers library with a batch, full or tiny."""
    return lambda small=False, **sizes: hf(tiny if small else config, **options, **sizes)()


def _case(make: Callable[..., Case], mode: str) -> Callable[..., Program]:
    return lambda **sizes: train_program(make.__name__, make(**sizes), mode)


def _mamba(**sizes: int) -> Program:
    return jax_mamba(**sizes)()


_WIDE = {"layers": 8, "width": 2048, "inner": 8192, "heads": 16, "kv_heads": 8, "vocab": 32000, "length": 2048}
_TINY = {"layers": 2, "width": 64, "inner": 128, "heads": 4, "kv_heads": 2, "vocab": 128, "length": 32, "batch": 8}

PROGRAMS: Mapping[str, Sized] = {
    "decoder-plain": Sized(decoder, _WIDE | {"batch": 4}, _TINY),
    "decoder-plain-remat": Sized(decoder, _WIDE | {"batch": 8, "remat": True}, _TINY | {"remat": True}),
    "decoder-kept": Sized(
        decoder, _WIDE | {"batch": 8, "remat": True, "donated": False}, _TINY | {"remat": True, "donated": False}
    ),
    "decoder-cudnn": Sized(decoder, _WIDE | {"batch": 8, "attention": "cudnn"}, _TINY),
    "decoder-cudnn-remat": Sized(
        decoder, _WIDE | {"batch": 16, "attention": "cudnn", "remat": True}, _TINY | {"remat": True}
    ),
    "decoder-head": Sized(
        decoder,
        {"layers": 4, "width": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256, "length": 4096}
        | {"batch": 2, "attention": "cudnn", "remat": True},
        _TINY | {"vocab": 512},
    ),
    "stack-wide": Sized(
        stack, {"layers": 8, "width": 4096, "inner": 16384, "batch": 16384},
        {"layers": 2, "width": 64, "inner": 128, "batch": 64},
    ),
    "stack-thin": Sized(
        stack, {"layers": 16, "width": 1024, "inner": 4096, "batch": 8192},
        {"layers": 2, "width": 32, "inner": 64, "batch": 64},
    ),
    "mixture": Sized(
        mixture, {"layers": 8, "width": 1024, "inner": 4096, "experts": 8, "batch": 32, "length": 512},
        {"layers": 2, "width": 32, "inner": 64, "experts": 4, "batch": 8, "length": 16},
    ),
    "diffusion": Sized(
        diffusion, {"layers": 12, "width": 1152, "heads": 16, "patches": 256, "batch": 64},
        {"layers": 2, "width": 64, "heads": 4, "patches": 16, "batch": 8},
    ),
    "bert": Sized(
        _named("bert-large", "bert-tiny", train=True), {"batch": 16, "seq": 512},
        {"small": True, "batch": 8, "seq": 16},
    ),
    "vit": Sized(_named("vit-l16", "vit-tiny", train=True), {"batch": 32}, {"small": True, "batch": 8}),
    "resnet": Sized(
        _case(residual_network, "train"), {"width": 64, "blocks": (3, 4, 6, 3), "side": 224, "batch": 128},
        {"width": 8, "blocks": (1, 1), "side": 32, "batch": 8},
    ),
    "resnet-few": Sized(
        _case(residual_network, "train"), {"width": 64, "blocks": (3, 4, 6, 3), "side": 224, "batch": 32},
        {"width": 8, "blocks": (1, 1), "side": 32, "batch": 8},
    ),
    "unet": Sized(
        _case(unet, "adamw"), {"widths": (128, 256, 512), "side": 64, "batch": 32},
        {"widths": (16, 32), "side": 16, "batch": 8},
    ),
    "state-space": Sized(
        _mamba, {"layers": 4, "dim": 1024, "inner": 2048, "states": 16, "batch": 8, "seq": 1024},
        {"layers": 1, "dim": 32, "inner": 64, "states": 4, "batch": 8, "seq": 32},
    ),
    "graph": Sized(
        _case(graph_network, "adamw"), {"nodes": 1 << 17, "edges": 1 << 19, "width": 256},
        {"nodes": 64, "edges": 256, "width": 16},
    ),
    "tables": Sized(
        _case(embedding_tables, "adamw"),
        {"tables": 26, "rows": 200_000, "width": 128, "batch": 65536, "tower": 1024},
        {"tables": 3, "rows": 64, "width": 16, "batch": 64, "tower": 32},
    ),
    "lstm": Sized(
        _case(lstm, "adamw"), {"width": 1024, "depth": 2, "vocab": 32000, "batch": 128, "length": 128},
        {"width": 32, "depth": 1, "vocab": 64, "batch": 8, "length": 8},
    ),
    "decode": Sized(
        decode,
        {"layers": 32, "width": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "batch": 16, "places": 4096},
        {"layers": 2, "width": 64, "inner": 128, "heads": 4, "kv_heads": 2, "batch": 8, "places": 32},
    ),
    "prefill": Sized(
        _named("llama3-8b", "llama-tiny", serve="prefill"), {"batch": 4, "seq": 4096, "attention": "cudnn"},
        {"small": True, "batch": 8, "seq": 32},
    ),
    "decode-hf": Sized(
        _named("llama3-8b", "llama-tiny", serve="decode"), {"batch": 16, "seq": 4096},
        {"small": True, "batch": 8, "seq": 32},
    ),
}  # fmt: skip
"""Programs by name, in the order in which they run."""
