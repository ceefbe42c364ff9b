"""Small programs as JAX users write them, by name: functions over pytrees, Flax NNX and Equinox modules."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.program import Program
from experiments.lib.programs.jax_case import Case, Tree, dense, f32, ids, layers, norm, squares
from experiments.lib.programs.jax_decoders import decoder
from experiments.lib.programs.jax_experts import moe_einsum, moe_ragged, moe_sort
from experiments.lib.programs.jax_modules import equinox_program, nnx_program


def mlp() -> Case:
    """Make four matmuls."""

    def forward(params: Tree, batch: Tree) -> Any:
        return dense(params, batch["x"])

    batch = {"x": f32(256, 256), "y": f32(256, 128)}
    return Case(layers([256, 512, 512, 512, 128]), batch, forward, squares(forward))


def state_space(width: int = 128, inner: int = 256, batch: int = 16, length: int = 64, depth: int = 2) -> Case:
    """Make a diagonal state space model: gated linear recurrences by `associative_scan` over the sequence."""

    def forward(params: Tree, batch: Tree) -> Any:
        x = batch["x"]
        for layer in params["layers"]:
            h = norm(x, layer["norm"])
            decay = jax.nn.sigmoid(h @ layer["decay"] + 2.0)
            value = h @ layer["value"]
            _, state = jax.lax.associative_scan(
                lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, (1 - decay) * value), axis=1
            )
            x = x + (state * jax.nn.silu(h @ layer["gate"])) @ layer["out"]
        return x

    one = {"norm": f32(width), "out": f32(inner, width)} | {n: f32(width, inner) for n in ("decay", "value", "gate")}
    given = {"x": f32(batch, length, width), "y": f32(batch, length, width)}
    return Case({"layers": [one] * depth}, given, forward, squares(forward))


def graph_network(nodes: int = 512, edges: int = 2048, width: int = 64) -> Case:
    """Make messages along the edges of one large graph, which a scatter-add sums at their targets."""

    def forward(params: Tree, batch: Tree) -> Any:
        h = dense(params["encode"], batch["nodes"])
        for block in params["blocks"]:
            both = jnp.concatenate([h[batch["source"]], h[batch["target"]]], axis=-1)
            messages = dense(block["edge"], both)
            received = jnp.zeros((nodes, width)).at[batch["target"]].add(messages)
            h = h + dense(block["node"], jnp.concatenate([h, received], axis=-1))
        return dense(params["decode"], h, lambda x: x)

    block = {"edge": layers([2 * width, 2 * width, width]), "node": layers([2 * width, 2 * width, width])}
    params = {"encode": layers([32, width]), "blocks": [block, block], "decode": layers([width, 16])}
    batch = {"nodes": f32(nodes, 32), "source": ids(edges), "target": ids(edges), "y": f32(nodes, 16)}
    return Case(params, batch, forward, squares(forward), {"source": nodes, "target": nodes})


def embedding_tables(tables: int = 6, rows: int = 1024, width: int = 32, batch: int = 256, tower: int = 128) -> Case:
    """Make a recommender: a table for each feature, their products, and a dense tower."""

    def forward(params: Tree, given: Tree) -> Any:
        bottom = dense(params["bottom"], given["dense"])
        looked = [jnp.take(table, given["ids"][:, i], axis=0) for i, table in enumerate(params["tables"])]
        parts = jnp.stack([bottom, *looked], axis=1)
        products = jnp.einsum("bid,bjd->bij", parts, parts).reshape(batch, -1)
        return dense(params["top"], jnp.concatenate([bottom, products], -1), lambda x: x)[:, 0]

    def loss(params: Tree, given: Tree) -> Any:
        logits = forward(params, given)
        return jnp.mean(jax.nn.softplus(logits) - given["clicked"] * logits)

    params = {
        "tables": [f32(rows, width)] * tables,
        "bottom": layers([16, tower // 2, width]),
        "top": layers([width + (tables + 1) ** 2, tower, 1]),
    }
    given = {"dense": f32(batch, 16), "ids": ids(batch, tables), "clicked": f32(batch)}
    return Case(params, given, forward, loss, {"ids": rows})


def unet(widths: tuple[int, ...] = (16, 32, 64), side: int = 16, batch: int = 16) -> Case:
    """Make a denoiser: convolutions down and up, group norms, skip connections, and an embedded time step."""

    def conv(x: Any, w: Any, stride: int = 1) -> Any:
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def group_norm(x: Any) -> Any:
        b, h, w, c = x.shape
        grouped = x.reshape(b, h, w, 8, c // 8)
        mean = grouped.mean((1, 2, 4), keepdims=True)
        spread = ((grouped - mean) ** 2).mean((1, 2, 4), keepdims=True)
        return ((grouped - mean) * jax.lax.rsqrt(spread + 1e-5)).reshape(b, h, w, c)

    def block(params: Tree, x: Any, time: Any) -> Any:
        h = conv(jax.nn.silu(group_norm(x)), params["one"]) + (time @ params["time"])[:, None, None]
        return x + conv(jax.nn.silu(group_norm(h)), params["two"])

    def forward(params: Tree, given: Tree) -> Any:
        angle = given["time"][:, None] * jnp.exp(-jnp.arange(16) / 4.0)
        time = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
        x, kept = conv(given["noisy"], params["first"]), []
        for level in params["down"]:
            x = block(level["block"], x, time)
            kept.append(x)
            x = conv(x, level["conv"], stride=2)
        x = block(params["middle"], x, time)
        for level, skip in zip(params["up"], reversed(kept), strict=True):
            b, h, w, c = x.shape
            x = jnp.broadcast_to(x[:, :, None, :, None], (b, h, 2, w, 2, c)).reshape(b, 2 * h, 2 * w, c)
            x = block(level["block"], conv(jnp.concatenate([x, skip], -1), level["conv"]), time)
        return conv(x, params["last"])

    def shapes(width: int) -> Tree:
        return {"one": f32(3, 3, width, width), "two": f32(3, 3, width, width), "time": f32(32, width)}

    pairs = list(zip(widths, widths[1:], strict=False))
    params = {
        "first": f32(3, 3, 4, widths[0]),
        "down": [{"block": shapes(a), "conv": f32(3, 3, a, b)} for a, b in pairs],
        "middle": shapes(widths[-1]),
        "up": [{"block": shapes(a), "conv": f32(3, 3, b + a, a)} for a, b in reversed(pairs)],
        "last": f32(3, 3, widths[0], 4),
    }
    images = f32(batch, side, side, 4)
    return Case(params, {"noisy": images, "time": f32(batch), "y": images}, forward, squares(forward))


CASES: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "scanned decoder": lambda: decoder(scanned=True),
    "remat policy": lambda: decoder(False, jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "state space": state_space,
    "graph network": graph_network,
    "embedding tables": embedding_tables,
    "u-net": unet,
    "moe einsum": moe_einsum,
    "moe sort": moe_sort,
    "moe ragged": moe_ragged,
}
MODULES: dict[str, Callable[[str], Program]] = {"nnx module": nnx_program, "equinox module": equinox_program}
