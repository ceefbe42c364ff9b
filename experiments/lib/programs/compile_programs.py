"""Programs of at most some tens of layers, near full size in width, for the TPU compiler without a TPU."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoshard.program import Program, open_source, trace


def llama(
    layers: int, dim: int, ffn: int, heads: int, kv_heads: int, vocab: int, head_dim: int = 128
) -> dict[str, Any]:
    """Return a configuration of Llama's architecture."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def mixtral(layers: int, dim: int, ffn: int, heads: int, kv_heads: int, experts: int, vocab: int) -> dict[str, Any]:
    """Return a configuration of Mixtral's architecture."""
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "output_router_logits": False,
    }


def hf(config: str | dict[str, Any], **options: Any) -> Callable[[], Program]:
    """Return a maker of a model of the transformers library, by a bundled name or by its configuration."""

    def make() -> Program:
        if isinstance(config, str):
            return open_source(f"hf:{config}", **options)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / f"{config['model_type']}.json"
            path.write_text(json.dumps(config))
            return open_source(f"hf:{path}", **options)

    return make


def jax_decoder(layers: int, dim: int, ffn: int, heads: int, vocab: int, batch: int, seq: int) -> Callable[[], Program]:
    """Return a maker of a scanned, rematerialised decoder in plain JAX, in bf16 with f32 masters and AdamW."""

    def make() -> Program:
        import jax
        import jax.numpy as jnp
        import optax

        shapes = {
            "embed": (vocab, dim),
            "qkv": (layers, dim, 3, heads, 128),
            "out": (layers, heads, 128, dim),
            "up": (layers, dim, ffn),
            "down": (layers, ffn, dim),
            "norm": (layers, 2, dim),
        }
        stacked = ("qkv", "out", "up", "down", "norm")

        def norm(x, scale):  # noqa: ANN001, ANN202
            y = x.astype(jnp.float32)
            y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
            return (y * (1 + scale)).astype(x.dtype)

        def layer(x, w):  # noqa: ANN001, ANN202
            h = norm(x, w["norm"][0])
            q, k, v = jnp.moveaxis(jnp.einsum("bsd,dchk->cbshk", h, w["qkv"].astype(h.dtype)), 0, 0)
            scores = jnp.einsum("bshk,bthk->bhst", q, k) * 128**-0.5
            scores = jnp.where(jnp.arange(seq)[:, None] >= jnp.arange(seq), scores.astype(jnp.float32), -1e9)
            mixed = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores).astype(h.dtype), v)
            x = x + jnp.einsum("bshk,hkd->bsd", mixed, w["out"].astype(h.dtype))
            h = norm(x, w["norm"][1])
            up = jax.nn.gelu(jnp.einsum("bsd,df->bsf", h, w["up"].astype(h.dtype)))
            return x + jnp.einsum("bsf,fd->bsd", up, w["down"].astype(h.dtype)), None

        def loss(params, batch):  # noqa: ANN001, ANN202
            x = params["embed"].astype(jnp.bfloat16)[batch["ids"]]
            x, _ = jax.lax.scan(jax.checkpoint(layer), x, {name: params[name] for name in stacked})
            logits = jnp.einsum("bsd,vd->bsv", x, params["embed"].astype(x.dtype)).astype(jnp.float32)
            picked = jnp.take_along_axis(logits, batch["labels"][..., None], -1)[..., 0]
            return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

        ids = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        return _adamw_step("jax decoder", loss, params, {"ids": ids, "labels": ids}, optax)

    return make


def jax_mlp(layers: int, width: int, batch: int) -> Callable[[], Program]:
    """Return a maker of matmuls of one size without remat, unrolled, in bf16."""

    def make() -> Program:
        import jax
        import jax.numpy as jnp
        import optax

        params = {f"w{i}": jax.ShapeDtypeStruct((width, width), jnp.bfloat16) for i in range(layers)}

        def loss(params, batch):  # noqa: ANN001, ANN202
            x = batch["x"]
            for i in range(layers):
                x = jax.nn.gelu(x @ params[f"w{i}"])
            return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)

        inputs = {
            "x": jax.ShapeDtypeStruct((batch, width), jnp.bfloat16),
            "y": jax.ShapeDtypeStruct((batch, width), jnp.float32),
        }
        return _adamw_step("jax mlp", loss, params, inputs, optax)

    return make


def jax_recurrent(layers: int, dim: int, inner: int, batch: int, seq: int) -> Callable[[], Program]:
    """Return a maker of a state space model: gated diagonal recurrences by `associative_scan`, in scanned layers."""

    def make() -> Program:
        import jax
        import jax.numpy as jnp
        import optax

        def layer(x, w):  # noqa: ANN001, ANN202
            h = x.astype(jnp.float32)
            h = (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)).astype(x.dtype)
            gate, keep, value = (h @ w[name].astype(h.dtype) for name in ("gate", "keep", "value"))
            decay = jax.nn.sigmoid(keep.astype(jnp.float32) + 2.0)
            _, state = jax.lax.associative_scan(
                lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, (1 - decay) * value.astype(jnp.float32)), axis=1
            )
            return x + (state.astype(x.dtype) * jax.nn.silu(gate)) @ w["out"].astype(x.dtype), None

        def loss(params, batch):  # noqa: ANN001, ANN202
            x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], params)
            return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)

        shapes = {name: (layers, dim, inner) for name in ("gate", "keep", "value")} | {"out": (layers, inner, dim)}
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        inputs = {
            "x": jax.ShapeDtypeStruct((batch, seq, dim), jnp.bfloat16),
            "y": jax.ShapeDtypeStruct((batch, seq, dim), jnp.float32),
        }
        return _adamw_step("jax recurrence", loss, params, inputs, optax)

    return make


def jax_mamba(layers: int, dim: int, inner: int, states: int, batch: int, seq: int) -> Callable[[], Program]:
    """Return a maker of Mamba's selective state spaces.

    A layer has a short convolution and an `associative_scan` of `states` states for each channel.
    """

    def make() -> Program:
        import jax
        import jax.numpy as jnp
        import optax

        rank = 64

        def layer(x, w):  # noqa: ANN001, ANN202
            h = x.astype(jnp.float32)
            h = (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * w["norm"]).astype(x.dtype)
            u, z = jnp.split(h @ w["in"].astype(h.dtype), 2, -1)
            u = sum(jnp.pad(u, ((0, 0), (k, 0), (0, 0)))[:, :seq] * w["conv"][k].astype(u.dtype) for k in range(4))
            u = jax.nn.silu(u)
            dt, b, c = jnp.split(u @ w["x"].astype(u.dtype), [rank, rank + states], -1)
            dt = jax.nn.softplus((dt @ w["dt"].astype(dt.dtype)).astype(jnp.float32) + w["dtb"])
            decay = jnp.exp(dt[..., None] * -jnp.exp(w["a"]))
            added = (dt * u.astype(jnp.float32))[..., None] * b.astype(jnp.float32)[:, :, None, :]
            _, hs = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, added), axis=1)
            y = jnp.einsum("bsdn,bsn->bsd", hs, c.astype(jnp.float32)) + u.astype(jnp.float32) * w["d"]
            y = (y * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
            return x + y @ w["out"].astype(x.dtype), None

        def loss(params, batch):  # noqa: ANN001, ANN202
            x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], params)
            return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)

        shapes = {
            "norm": (dim,),
            "in": (dim, 2 * inner),
            "conv": (4, inner),
            "x": (inner, rank + 2 * states),
            "dt": (rank, inner),
            "dtb": (inner,),
            "a": (inner, states),
            "d": (inner,),
            "out": (inner, dim),
        }
        params = {name: jax.ShapeDtypeStruct((layers, *shape), jnp.float32) for name, shape in shapes.items()}
        inputs = {
            "x": jax.ShapeDtypeStruct((batch, seq, dim), jnp.bfloat16),
            "y": jax.ShapeDtypeStruct((batch, seq, dim), jnp.float32),
        }
        return _adamw_step("mamba", loss, params, inputs, optax)

    return make


def jax_rwkv(layers: int, dim: int, heads: int, batch: int, seq: int) -> Callable[[], Program]:
    """Return a maker of RWKV's time mixing in f32.

    A scan over the sequence saves a matrix of states for each head, for its gradient.
    """

    def make() -> Program:
        import jax
        import jax.numpy as jnp
        import optax

        width = dim // heads

        def step(state, given):  # noqa: ANN001, ANN202
            r, k, v, decay = given
            added = k[..., :, None] * v[..., None, :]
            y = jnp.einsum("bhk,bhkv->bhv", r, state + added)
            return state * decay[..., None] + added, y

        def layer(x, w):  # noqa: ANN001, ANN202
            h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
            before = jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1]
            h = h + 0.5 * (before - h)
            r, k, v, gate = (h @ w[name] for name in "rkvg")
            decay = jnp.exp(-jnp.exp(h @ w["w"]))
            parts = tuple(jnp.moveaxis(t.reshape(batch, seq, heads, width), 1, 0) for t in (r, k, v, decay))
            _, y = jax.lax.scan(step, jnp.zeros((batch, heads, width, width)), parts)
            y = jnp.moveaxis(y, 0, 1).reshape(batch, seq, dim)
            return x + (y * jax.nn.silu(gate)) @ w["o"]

        def loss(params, batch):  # noqa: ANN001, ANN202
            x = batch["x"]
            for i in range(layers):
                x = layer(x, jax.tree.map(lambda stack: stack[i], params))  # noqa: B023
            return jnp.mean((x - batch["y"]) ** 2)

        params = {name: jax.ShapeDtypeStruct((layers, dim, dim), jnp.float32) for name in "rkvgwo"}
        inputs = {name: jax.ShapeDtypeStruct((batch, seq, dim), jnp.float32) for name in "xy"}
        return _adamw_step("rwkv", loss, params, inputs, optax)

    return make


def jax_table(rows: int, width: int, features: int, hidden: int, batch: int) -> Callable[[], Program]:
    """Return a maker of a recommender: one table of `width` columns, one row of it for every feature, and two
    matmuls.
    """

    def make() -> Program:
        import jax
        import jax.numpy as jnp
        import optax

        def loss(params, batch):  # noqa: ANN001, ANN202
            looked_up = jnp.take(params["t0"], batch["ids"], axis=0)
            h = jax.nn.relu(looked_up.reshape(looked_up.shape[0], -1) @ params["w1"])
            return jnp.mean(((h @ params["w2"])[:, 0] - batch["y"]) ** 2)

        shapes = {"t0": (rows, width), "w1": (features * width, hidden), "w2": (hidden, 1)}
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        inputs = {
            "ids": jax.ShapeDtypeStruct((batch, features), jnp.int32),
            "y": jax.ShapeDtypeStruct((batch,), jnp.float32),
        }
        return _adamw_step("table", loss, params, inputs, optax)

    return make


def _adamw_step(name: str, loss: Any, params: Any, batch: Any, optax: Any) -> Program:
    import jax

    tx = optax.adamw(1e-3)

    def step(params, state, batch):  # noqa: ANN001, ANN202
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.eval_shape(tx.init, params)
    return trace(step, (params, state, batch), name=name, donate_argnums=(0, 1), training=True)
