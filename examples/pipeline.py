"""A decoder written as a pipeline: stages side by side in one dim, shifted by one after every tick.

The layers are cut into stages of equal shape, and a batch into microbatches. One array holds what every stage works on;
a tick runs all stages at once (`vmap`) and hands each result on to the next stage with `jnp.roll`. Nothing here names
a mesh: the planner finds that the stages may stand on different devices, and that handing on is then a
collective-permute.

    autoshard plan examples/pipeline.py --topology cpu:8 --mesh stage=4,data=2
    autoshard measure examples/pipeline.py --topology cpu:8 --mesh stage=4,data=2 --check
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import autoshard


STAGES, LAYERS, MICROBATCHES, MICROBATCH, LENGTH = 4, 2, 8, 2, 64
WIDTH, HEADS, INNER, VOCABULARY = 128, 4, 512, 512


def normalise(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def layer(x: Any, weights: dict[str, Any]) -> Any:
    """One decoder layer on [sequences, tokens, width]."""
    y = normalise(x, weights["norm_attention"])
    q, k, v = (jnp.einsum("btd,dhk->bthk", y, weights[name]) for name in ("wq", "wk", "wv"))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    before = jnp.arange(x.shape[1])[:, None] >= jnp.arange(x.shape[1])[None, :]
    seen = jax.nn.softmax(jnp.where(before, scores, -1e9), axis=-1)
    x = x + jnp.einsum("bhts,bshk,hkd->btd", seen, v, weights["wo"])
    y = normalise(x, weights["norm_mlp"])
    return x + jax.nn.gelu(y @ weights["up"]) @ weights["down"]


def stage(weights: Any, x: Any) -> Any:
    """The layers of one stage, one after the other."""
    return jax.lax.scan(lambda x, one: (layer(x, one), None), x, weights)[0]


def pipeline(weights: Any, microbatches: Any) -> Any:
    """All stages on all microbatches: [microbatches, sequences, tokens, width] in and out."""
    count, stages = microbatches.shape[0], STAGES
    number = jnp.arange(stages).reshape(stages, 1, 1, 1)
    # While the last microbatches drain, the first stage gets what nobody looks at.
    feed = jnp.concatenate([microbatches, jnp.zeros_like(microbatches[: stages - 1])])

    def tick(state: Any, fed: Any) -> Any:
        state = jnp.where(number == 0, fed[None], jnp.roll(state, 1, axis=0))
        state = jax.vmap(stage)(weights, state)
        # A masked sum, not `state[-1]`: one all-reduce instead of a gather of all stages.
        return state, jnp.where(number == stages - 1, state, 0.0).sum(0)

    start = jnp.zeros((stages, *microbatches.shape[1:]), microbatches.dtype)
    return jax.lax.scan(tick, start, feed)[1][stages - 1 : stages - 1 + count]


def loss(params: Any, tokens: Any) -> Any:
    x = params["embedding"][tokens[..., :-1]]
    logits = pipeline(params["stages"], x) @ params["head"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., 1:, None], axis=-1)
    return -picked.mean()


def step(params: Any, tokens: Any) -> Any:
    """One step of gradient descent."""
    value, gradients = jax.value_and_grad(loss)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments(
    stages: int = STAGES, layers: int = LAYERS, microbatches: int = MICROBATCHES, microbatch: int = MICROBATCH
) -> tuple[Any, Any]:
    """Shapes of the parameters and of one batch."""
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    head = WIDTH // HEADS
    shapes = {
        "norm_attention": (WIDTH,),
        "wq": (WIDTH, HEADS, head),
        "wk": (WIDTH, HEADS, head),
        "wv": (WIDTH, HEADS, head),
        "wo": (HEADS, head, WIDTH),
        "norm_mlp": (WIDTH,),
        "up": (WIDTH, INNER),
        "down": (INNER, WIDTH),
    }
    stacked = {name: f32((stages, layers, *shape)) for name, shape in shapes.items()}
    params = {"embedding": f32((VOCABULARY, WIDTH)), "stages": stacked, "head": f32((WIDTH, VOCABULARY))}
    return params, jax.ShapeDtypeStruct((microbatches, microbatch, LENGTH + 1), jnp.int32)


def program() -> autoshard.Program:
    return autoshard.trace(step, arguments(), name="pipeline", donate_argnums=0)
