"""Write a decoder as a pipeline by hand, and have the planner find that its stages may stand on different devices.

Run `python examples/pipeline.py`: eight CPU devices stand in for a machine, and one device checks losses and
parameters.
For real hardware, change `TOPOLOGY` (such as "v5e:4x4*4", four slices) and `MESH`, and raise the sizes.
"""

import jax
import jax.numpy as jnp
import numpy as np

import autoshard
from autoshard.exec import ensure_devices


TOPOLOGY, MESH, STEPS = "cpu:8", {"stage": 4, "data": 2}, 3
STAGES, LAYERS, MICROBATCHES, MICROBATCH, LENGTH = 4, 2, 8, 4, 32
WIDTH, HEADS, INNER, VOCABULARY = 64, 4, 256, 256


def layer(x, weights):
    """Compute one decoder layer on [sequences, tokens, width]."""
    y = jax.nn.standardize(x) * weights["norm_attention"]
    q, k, v = (jnp.einsum("btd,dhk->bthk", y, weights[name]) for name in ("wq", "wk", "wv"))
    x = x + jnp.einsum("bthk,hkd->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), weights["wo"])
    return x + jax.nn.gelu(jax.nn.standardize(x) * weights["norm_mlp"] @ weights["up"]) @ weights["down"]


def stage(weights, x):
    """Compute the layers of one stage, one after the other."""
    return jax.lax.scan(lambda x, one: (layer(x, one), None), x, weights)[0]


def pipeline(weights, microbatches):
    """Run all stages on all microbatches: [microbatches, sequences, tokens, width] in and out.

    One array has the inputs of all stages. A tick runs them at once and hands each result on with `jnp.roll`, which
    becomes a collective-permute. `autoshard.stack(layer, weights, x, stages=4, microbatches=8)` is such a function.
    """
    number = jnp.arange(STAGES).reshape(STAGES, 1, 1, 1)
    # While the last microbatches drain, nothing reads the results of the first stage.
    feed = jnp.concatenate([microbatches, jnp.zeros_like(microbatches[: STAGES - 1])])

    def tick(state, fed):
        state = jax.vmap(stage)(weights, jnp.where(number == 0, fed[None], jnp.roll(state, 1, axis=0)))
        # A masked sum, not `state[-1]`: one all-reduce instead of a gather of all stages.
        return state, jnp.where(number == STAGES - 1, state, 0.0).sum(0)

    start = jnp.zeros((STAGES, *microbatches.shape[1:]), microbatches.dtype)
    return jax.lax.scan(tick, start, feed)[1][STAGES - 1 :]


def step(params, tokens):
    """Take one step of gradient descent."""

    def loss(params):
        logits = pipeline(params["stages"], params["embedding"][tokens[..., :-1]]) @ params["head"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., 1:, None], axis=-1).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


def init(layers=LAYERS):
    shapes = dict.fromkeys(("wq", "wk", "wv"), (WIDTH, HEADS, WIDTH // HEADS)) | {"wo": (HEADS, WIDTH // HEADS, WIDTH)}
    shapes |= {"up": (WIDTH, INNER), "down": (INNER, WIDTH)} | dict.fromkeys(("norm_attention", "norm_mlp"), (WIDTH,))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    normal = jax.random.normal
    stages = {n: 0.1 * normal(k, (STAGES, layers, *s)) for k, (n, s) in zip(keys, shapes.items(), strict=True)}
    return {"embedding": normal(keys[0], (VOCABULARY, WIDTH)), "stages": stages, "head": jnp.zeros((WIDTH, VOCABULARY))}


def arguments(layers=LAYERS, microbatches=MICROBATCHES):
    """Return shapes of the parameters and of one batch."""
    tokens = jax.ShapeDtypeStruct((microbatches, MICROBATCH, LENGTH + 1), jnp.int32)
    return jax.eval_shape(lambda: init(layers)), tokens


def program():  # `autoshard plan examples/pipeline.py --topology cpu:8 --mesh stage=4,data=2` plans the same step
    return autoshard.trace(step, arguments(), name="pipeline", donate_argnums=0)


def train(step):
    params, losses = init(), []
    tokens = jax.random.randint(jax.random.key(1), (MICROBATCHES, MICROBATCH, LENGTH + 1), 0, VOCABULARY)
    for _ in range(STEPS):
        params, loss = step(params, tokens)
        losses.append(float(loss))
    return params, losses


def main():
    ensure_devices(8)  # CPU devices; it changes nothing where there are accelerators
    plan = autoshard.plan(program(), topology=TOPOLOGY, mesh=MESH)
    permutes = [each for each in plan.prediction.collectives if each.kind == "collective-permute"]
    print(plan, *plan.words, sep="\n")
    print("hand-overs in a step:", sum(each.count for each in permutes), "over", *{each.axes for each in permutes})

    params, losses = train(plan.jit(step))
    plain_params, plain_losses = train(jax.jit(step))
    print("planned losses:", *(f"{loss:.4f}" for loss in losses))
    print("plain losses:  ", *(f"{loss:.4f}" for loss in plain_losses))
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), params, plain_params)
    assert losses[-1] < losses[0]
    print("AGREES with the plain step on one device, losses and parameters")


if __name__ == "__main__":
    main()
