"""Small programs, in every way a program can be brought, for the experiments that really run on 8 CPU devices."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from autoshard.program import Program, open_source, trace


BATCH, SEQ = 16, 128


def mlp(optimizer: str) -> Program:
    """Four matmuls of one size, as a JAX user would write them."""
    sizes = [256, 512, 512, 512, 128]
    params = {
        f"layer{i}": {"w": jax.ShapeDtypeStruct((a, b), jnp.float32), "b": jax.ShapeDtypeStruct((b,), jnp.float32)}
        for i, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False))
    }

    def loss(params, batch):  # noqa: ANN001, ANN202
        x = batch["x"]
        for i in range(len(sizes) - 1):
            x = jnp.tanh(x @ params[f"layer{i}"]["w"] + params[f"layer{i}"]["b"])
        return jnp.mean((x - batch["y"]) ** 2)

    batch = {
        "x": jax.ShapeDtypeStruct((256, sizes[0]), jnp.float32),
        "y": jax.ShapeDtypeStruct((256, sizes[-1]), jnp.float32),
    }
    return _step("mlp", loss, params, batch, optimizer)


def scanned_decoder(optimizer: str) -> Program:
    """A decoder with grouped heads, scanned and rematerialised, in plain JAX."""
    layers, width, ffn, heads, groups, head, vocab = 4, 256, 1024, 4, 2, 32, 2048
    shapes = {
        "embed": (vocab, width),
        "q": (layers, groups * heads * head, width),
        "k": (layers, heads * head, width),
        "v": (layers, heads * head, width),
        "o": (layers, width, groups * heads * head),
        "up": (layers, ffn, width),
        "down": (layers, width, ffn),
        "norm1": (layers, width),
        "norm2": (layers, width),
        "head": (vocab, width),
    }
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def norm(x, w):  # noqa: ANN001, ANN202
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * w

    def layer(x, w):  # noqa: ANN001, ANN202
        b, s, _ = x.shape
        h = norm(x, 1.0 + w["norm1"])
        q = jnp.einsum("bsd,fd->bsf", h, w["q"]).reshape(b, s, heads, groups, head)
        k = jnp.einsum("bsd,fd->bsf", h, w["k"]).reshape(b, s, heads, head)
        v = jnp.einsum("bsd,fd->bsf", h, w["v"]).reshape(b, s, heads, head)
        scores = jnp.einsum("bskgh,btkh->bkgst", q, k) * head**-0.5
        scores = jnp.where(jnp.arange(s)[:, None] >= jnp.arange(s), scores, -1e9)
        a = jnp.einsum("bkgst,btkh->bskgh", jax.nn.softmax(scores), v).reshape(b, s, -1)
        x = x + jnp.einsum("bsf,df->bsd", a, w["o"])
        h = norm(x, 1.0 + w["norm2"])
        x = x + jnp.einsum("bsf,df->bsd", jax.nn.silu(jnp.einsum("bsd,fd->bsf", h, w["up"])), w["down"])
        return x, None

    def loss(params, batch):  # noqa: ANN001, ANN202
        x = jnp.take(params["embed"], batch["ids"], axis=0)
        stacked = {name: params[name] for name, shape in shapes.items() if shape[0] == layers}
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, stacked)
        logits = jnp.einsum("bsd,vd->bsv", x, params["head"])
        picked = jnp.sum(jnp.where(jnp.arange(vocab) == batch["labels"][..., None], logits, 0), -1)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    ids = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    return _step("scanned decoder", loss, params, {"ids": ids, "labels": ids}, optimizer)


def _step(name: str, loss: Callable, params: dict, batch: dict, optimizer: str) -> Program:
    # Momentum, so that one step also returns the gradients, as its state.
    tx = optax.sgd(0.1, momentum=0.9) if optimizer == "momentum" else optax.adamw(1e-3)

    def step(params, opt_state, batch):  # noqa: ANN001, ANN202
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    args = (params, jax.eval_shape(tx.init, params), batch)

    def make_args(seed: int) -> tuple:
        key = jax.random.key(seed)

        def fill(path, leaf):  # noqa: ANN001, ANN202
            own = jax.random.fold_in(key, _stable(str(path)))
            if jnp.issubdtype(leaf.dtype, jnp.integer):
                return jax.random.randint(own, leaf.shape, 0, 64, leaf.dtype)
            return 0.05 * jax.random.normal(own, leaf.shape, leaf.dtype)

        made = jax.tree_util.tree_map_with_path(fill, (params, batch))
        return made[0], tx.init(made[0]), made[1]

    return trace(step, args, name=name, donate_argnums=(0, 1), training=True, make_args=make_args)


def _stable(text: str) -> int:
    import zlib

    return zlib.crc32(text.encode()) % 2**31


def _hf(config: str) -> Callable[[str], Program]:
    return lambda optimizer: open_source(
        f"hf:{config}", train=True, batch=BATCH, seq=SEQ, dtype="float32", optimizer=optimizer
    )


PROGRAMS: dict[str, Callable[[str], Program]] = {
    "hf:gpt2-tiny": _hf("gpt2-tiny"),
    "hf:llama-tiny": _hf("llama-tiny"),
    "jax mlp": mlp,
    "jax scanned decoder": scanned_decoder,
}
"""Name -> a function from the optimizer's name to the program."""

MESHES = ({"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4})
