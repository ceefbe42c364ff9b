"""Train a small decoder, written in plain JAX with optax, under a plan.

Run `python examples/jax_decoder.py`: eight CPU devices stand in for a machine, and one device checks the losses.
For real hardware, change `TOPOLOGY` (such as "v5e:4x4" or "h100:8"), set `MESH` to "auto" or another one, and raise the
sizes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autoshard
from autoshard.exec import ensure_devices


TOPOLOGY, MESH = "cpu:8", {"data": 4, "model": 2}
LAYERS, WIDTH, HEADS, INNER, VOCABULARY = 2, 64, 4, 256, 512
BATCH, LENGTH, STEPS = 16, 32, 6
optimizer = optax.adamw(1e-2)


def init(key):
    shapes = {
        "attention_qkv": (LAYERS, 3, WIDTH, HEADS, WIDTH // HEADS),
        "attention_out": (LAYERS, HEADS, WIDTH // HEADS, WIDTH),
        "up": (LAYERS, WIDTH, INNER),
        "down": (LAYERS, INNER, WIDTH),
        "embedding": (VOCABULARY, WIDTH),
        "head": (WIDTH, VOCABULARY),
    }
    keys = jax.random.split(key, len(shapes))
    params = {n: 0.1 * jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}
    return params, optimizer.init(params)


def layer(x, weights):
    """Compute one decoder layer on [batch, tokens, width], as `jax.lax.scan` calls it."""
    q, k, v = jnp.einsum("btd,ndhk->nbthk", jax.nn.standardize(x), weights["attention_qkv"])
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("bthk,hkd->btd", attended, weights["attention_out"])
    return x + jax.nn.gelu(jax.nn.standardize(x) @ weights["up"]) @ weights["down"], None


def step(params, state, tokens):
    """Update parameters and state; both come back first, in the order of the arguments that they replace."""

    def loss(params):
        layers = {name: params[name] for name in ("attention_qkv", "attention_out", "up", "down")}
        x, _ = jax.lax.scan(layer, params["embedding"][tokens[:, :-1]], layers)
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], tokens[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def train(step, params, state):
    """Run the step on counting sequences; return the parameters and the losses."""
    losses = []
    for seed in range(STEPS):
        start = jax.random.randint(jax.random.key(seed), (BATCH, 1), 0, VOCABULARY)
        params, state, loss = step(params, state, (start + jnp.arange(LENGTH + 1)) % VOCABULARY)
        losses.append(float(loss))
    return params, losses


def main():
    ensure_devices(8)  # CPU devices; it changes nothing where there are accelerators
    shapes = jax.eval_shape(init, jax.random.key(0))  # nothing is allocated to plan
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
    program = autoshard.trace(step, (*shapes, tokens), donate_argnums=(0, 1))
    plan = autoshard.plan(program, topology=TOPOLOGY, mesh=MESH)
    print(plan, *plan.words, sep="\n")

    planned = plan.jit(program)
    placed = planned.shardings(*shapes, tokens)[:2]
    start = jax.jit(init, out_shardings=placed)(jax.random.key(0))  # every device makes its own part
    params, losses = train(planned, *start)
    plain_params, plain_losses = train(jax.jit(step), *init(jax.random.key(0)))
    print("planned losses:", *(f"{loss:.4f}" for loss in losses))
    print("plain losses:  ", *(f"{loss:.4f}" for loss in plain_losses))
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3), params, plain_params)
    assert losses[-1] < losses[0]
    print("AGREES with the plain step on one device, losses and parameters")


if __name__ == "__main__":
    main()
