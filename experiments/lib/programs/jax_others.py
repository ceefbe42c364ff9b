"""Programs of architectures that no bundled model has, near full size, for the TPU compiler without a TPU."""

from typing import Any

import jax
import jax.numpy as jnp

from experiments.lib.programs.jax_case import Case, Tree, cross_entropy, dense, f32, ids, layers, norm, squares


def conv(x: Any, w: Any, stride: int = 1, dilation: int = 1) -> Any:
    """Compute a convolution of [B, ..., C] with [..., C, D], padded so that only a stride reduces the size."""
    names = {1: "W", 2: "HW", 3: "DHW"}[x.ndim - 2]
    numbers = (f"N{names}C", f"{names}IO", f"N{names}C")
    ways = ((stride,) * len(names), "SAME", (1,) * len(names), (dilation,) * len(names))
    return jax.lax.conv_general_dilated(x, w, *ways, dimension_numbers=numbers)


def lstm(width: int, depth: int, vocab: int, batch: int, length: int) -> Case:
    """Make a language model of LSTMs: a loop over the sequence for each layer."""

    def layer(params: Tree, x: Any) -> Any:
        def step(state: Any, gates: Any) -> Any:
            h, c = state
            i, f, g, o = jnp.split(gates + h @ params["recurrent"], 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        gates = x @ params["input"] + params["bias"]
        zero = jnp.zeros((x.shape[0], width), x.dtype)
        _, out = jax.lax.scan(step, (zero, zero), gates.swapaxes(0, 1))
        return out.swapaxes(0, 1)

    def forward(params: Tree, given: Tree) -> Any:
        x = params["embed"][given["ids"]]
        for each in params["layers"]:
            x = layer(each, x)
        return x @ params["head"]

    one = {"input": f32(width, 4 * width), "recurrent": f32(width, 4 * width), "bias": f32(4 * width)}
    params = {"embed": f32(vocab, width), "layers": [one] * depth, "head": f32(width, vocab)}
    given = {"ids": ids(batch, length), "labels": ids(batch, length)}
    return Case(params, given, forward, lambda p, g: cross_entropy(forward(p, g), g["labels"]))


def residual_network(width: int, blocks: tuple[int, ...], side: int, batch: int) -> Case:
    """Make bottlenecks of convolutions in bfloat16, with batch norms over the whole batch."""

    def batch_norm(x: Any, params: Tree) -> Any:
        y = x.astype(jnp.float32)
        mean, square = y.mean((0, 1, 2)), (y * y).mean((0, 1, 2))
        scale = params["scale"] * jax.lax.rsqrt(square - mean * mean + 1e-5)
        return ((y - mean) * scale + params["bias"]).astype(x.dtype)

    def forward(params: Tree, given: Tree) -> Any:
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16) if w.ndim == 4 else w, params)
        x = jax.nn.relu(batch_norm(conv(given["images"].astype(jnp.bfloat16), low["stem"], 2), low["first"]))
        for stage, blocks in enumerate(low["stages"]):
            for number, block in enumerate(blocks):
                stride = 2 if stage and not number else 1
                h = jax.nn.relu(batch_norm(conv(x, block["down"]), block["norms"][0]))
                h = jax.nn.relu(batch_norm(conv(h, block["middle"], stride), block["norms"][1]))
                h = batch_norm(conv(h, block["up"]), block["norms"][2])
                x = jax.nn.relu(h + (conv(x, block["short"], stride) if "short" in block else x))
        return x.astype(jnp.float32).mean((1, 2)) @ low["head"]

    def block(inputs: int, inner: int, outputs: int) -> Tree:
        parameters = {
            "down": f32(1, 1, inputs, inner),
            "middle": f32(3, 3, inner, inner),
            "up": f32(1, 1, inner, outputs),
        }
        parameters["norms"] = [{"scale": f32(n), "bias": f32(n)} for n in (inner, inner, outputs)]
        return parameters | ({"short": f32(1, 1, inputs, outputs)} if inputs != outputs else {})

    stages, inputs = [], width
    for number, count in enumerate(blocks):
        inner = width << number
        stages.append([block(inputs if not each else 4 * inner, inner, 4 * inner) for each in range(count)])
        inputs = 4 * inner
    params = {"stem": f32(7, 7, 3, width), "first": {"scale": f32(width), "bias": f32(width)}}
    params |= {"stages": stages, "head": f32(inputs, 1000)}
    given = {"images": f32(batch, side, side, 3), "labels": ids(batch)}
    return Case(params, given, forward, lambda p, g: cross_entropy(forward(p, g), g["labels"]), {"labels": 1000})


def retention(width: int, heads: int, depth: int, vocab: int, batch: int, length: int, chunk: int) -> Case:
    """Make linear attention in chunks: products within a chunk, and a scan that carries a state matrix for each
    head.
    """
    size = width // heads

    def layer(x: Any, params: Tree) -> Any:
        h = norm(x, params["norm"])
        q, k, v = (jnp.einsum("bsd,dhk->bshk", h, params[name]) for name in ("q", "k", "v"))
        parts = [
            jnp.moveaxis(each.reshape(each.shape[0], length // chunk, chunk, heads, size), 1, 0) for each in (q, k, v)
        ]
        decay = 1 - 2.0 ** (-5 - jnp.arange(heads, dtype=jnp.float32))
        at = jnp.arange(chunk, dtype=jnp.float32)
        lag = at[:, None] - at[None]
        within = jnp.where(lag >= 0, decay[:, None, None] ** jnp.maximum(lag, 0), 0)  # [H, C, C]
        before, after = (decay[None] ** each[:, None] for each in (at + 1, chunk - 1 - at))  # [C, H]

        def step(state: Any, part: Any) -> Any:
            q, k, v = part
            scores = jnp.einsum("bqhk,bmhk->bhqm", q, k) * within.astype(q.dtype)
            out = jnp.einsum("bhqm,bmhv->bqhv", scores, v)
            out = out + jnp.einsum("bqhk,bhkv->bqhv", q * before[..., None].astype(q.dtype), state.astype(q.dtype))
            new = jnp.einsum("bmhk,bmhv->bhkv", k * after[..., None].astype(k.dtype), v).astype(jnp.float32)
            return state * decay[:, None, None] ** chunk + new, out

        zero = jnp.zeros((x.shape[0], heads, size, size), jnp.float32)
        _, out = jax.lax.scan(step, zero, tuple(parts))
        x = x + jnp.einsum("bshv,hvd->bsd", jnp.moveaxis(out, 0, 1).reshape(q.shape), params["o"])
        h = norm(x, params["norm2"])
        return x + jax.nn.gelu(h @ params["up"]) @ params["down"]

    def forward(params: Tree, given: Tree) -> Any:
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        x = low["embed"][given["ids"]]
        x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, low["layers"])
        return (x @ low["head"]).astype(jnp.float32)

    many = {"norm": f32(depth, width), "norm2": f32(depth, width), "o": f32(depth, heads, size, width)}
    many |= {name: f32(depth, width, heads, size) for name in ("q", "k", "v")}
    many |= {"up": f32(depth, width, 4 * width), "down": f32(depth, 4 * width, width)}
    params = {"embed": f32(vocab, width), "layers": many, "head": f32(width, vocab)}
    given = {"ids": ids(batch, length), "labels": ids(batch, length)}
    return Case(params, given, forward, lambda p, g: cross_entropy(forward(p, g), g["labels"]))


def wave_network(width: int, depth: int, batch: int, length: int) -> Case:
    """Make dilated convolutions over a waveform, with gates and skips."""

    def forward(params: Tree, given: Tree) -> Any:
        x, total = given["wave"] @ params["first"], 0.0
        for number, block in enumerate(params["blocks"]):
            both = conv(x, block["conv"], dilation=2 ** (number % 8))
            h = jnp.tanh(both[..., :width]) * jax.nn.sigmoid(both[..., width:])
            total = total + h @ block["skip"]
            x = x + h @ block["out"]
        return jax.nn.relu(total) @ params["last"]

    block = {"conv": f32(3, width, 2 * width), "skip": f32(width, width), "out": f32(width, width)}
    params = {"first": f32(1, width), "blocks": [block] * depth, "last": f32(width, 1)}
    return Case(params, {"wave": f32(batch, length, 1), "y": f32(batch, length, 1)}, forward, squares(forward))


def perceiver(width: int, latents: int, heads: int, depth: int, batch: int, length: int) -> Case:
    """Make latents that attend to a long array of inputs and to each other, in bfloat16."""
    size = width // heads

    def attend(params: Tree, x: Any, given: Any) -> Any:
        q = jnp.einsum("bsd,dhk->bshk", norm(x, params["norm"]), params["q"])
        k, v = (jnp.einsum("bsd,dhk->bshk", given, params[name]) for name in ("k", "v"))
        scores = jnp.einsum("bqhk,bmhk->bhqm", q, k).astype(jnp.float32) * size**-0.5
        out = jnp.einsum("bhqm,bmhk->bqhk", jax.nn.softmax(scores).astype(x.dtype), v)
        x = x + jnp.einsum("bqhk,hkd->bqd", out, params["o"])
        return x + jax.nn.gelu(norm(x, params["norm2"]) @ params["up"]) @ params["down"]

    def forward(params: Tree, given: Tree) -> Any:
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        inputs = given["x"].astype(jnp.bfloat16) @ low["project"]
        x = jnp.broadcast_to(low["latents"], (inputs.shape[0], latents, width))
        for block in low["blocks"]:
            x = attend(block["cross"], x, inputs)
            for each in block["own"]:
                x = attend(each, x, norm(x, each["norm"]))
        return x.astype(jnp.float32).mean(1) @ params["head"]

    one = {"norm": f32(width), "norm2": f32(width), "o": f32(heads, size, width)}
    one |= {name: f32(width, heads, size) for name in ("q", "k", "v")}
    one |= {"up": f32(width, 4 * width), "down": f32(4 * width, width)}
    params = {"project": f32(64, width), "latents": f32(latents, width), "head": f32(width, 128)}
    params["blocks"] = [{"cross": one, "own": [one] * 3}] * depth
    return Case(params, {"x": f32(batch, length, 64), "y": f32(batch, 128)}, forward, squares(forward))


def radiance_field(width: int, depth: int, rays: int, samples: int) -> Case:
    """Make a field of colours and densities by a narrow MLP, summed along rays: minor dims of 3, 60 and 1."""

    def forward(params: Tree, given: Tree) -> Any:
        far = jnp.linspace(0.1, 4.0, samples)
        points = given["origin"][:, None] + given["way"][:, None] * far[:, None]  # [R, S, 3]
        angles = points[..., None] * 2.0 ** jnp.arange(10)
        x = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).reshape(rays, samples, 60)
        out = dense(params["field"], x, lambda each: each)
        opacity = 1 - jnp.exp(-jax.nn.softplus(out[..., :1]) * (4.0 / samples))
        passed = jnp.cumprod(1 - opacity + 1e-6, axis=1) / (1 - opacity + 1e-6)
        return (passed * opacity * jax.nn.sigmoid(out[..., 1:])).sum(1)

    params = {"field": layers([60, *[width] * depth, 4])}
    given = {"origin": f32(rays, 3), "way": f32(rays, 3), "y": f32(rays, 3)}
    return Case(params, given, forward, squares(forward))
