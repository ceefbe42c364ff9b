"""Train an Equinox module with attention under a plan; leaves that are no arrays stay static, as under `filter_jit`.

Run `python examples/equinox_model.py`: eight CPU devices stand in for a machine, and `eqx.filter_jit` on one device
checks losses and parameters.
For real hardware, change `TOPOLOGY` (such as "v5e:4x4" or "h100:8"), set `MESH` to "auto" or another one, and raise the
sizes.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import autoshard
from autoshard.exec import ensure_devices


TOPOLOGY, MESH = "cpu:8", {"data": 4, "model": 2}
BATCH, LENGTH, WIDTH, HEADS, VOCABULARY, STEPS = 16, 32, 64, 4, 256, 5
optimizer = optax.sgd(0.5)


class Tagger(eqx.Module):
    """Tag every token of one sequence; `jax.vmap` makes it a batch."""

    embedding: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[1])
        self.mlp = eqx.nn.MLP(WIDTH, VOCABULARY, 4 * WIDTH, 1, jax.nn.gelu, key=keys[2])

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        return jax.vmap(self.mlp)(x + self.attention(x, x, x))


def make():
    model = Tagger(jax.random.key(0))
    return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))


def step(model, state, batch):
    """Return the new model and state first, in the order of the arguments that they replace, and the loss."""

    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(batch["tokens"]), batch["tags"]).mean()

    value, grads = eqx.filter_value_and_grad(loss)(model)
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, value


def train(step, batch):
    model, state = make()
    losses = []
    for _ in range(STEPS):
        model, state, loss = step(model, state, batch)
        losses.append(float(loss))
    return model, losses


def main():
    ensure_devices(8)  # CPU devices; it changes nothing where there are accelerators
    ids = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    program = autoshard.trace(step, (*eqx.filter_eval_shape(make), {"tokens": ids, "tags": ids}))
    plan = autoshard.plan(program, topology=TOPOLOGY, mesh=MESH)
    print(plan, *plan.words, sep="\n")

    tokens = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, VOCABULARY)
    batch = {"tokens": tokens, "tags": (3 * tokens + 1) % VOCABULARY}
    model, losses = train(plan.jit(step), batch)
    plain_model, plain_losses = train(eqx.filter_jit(step), batch)
    weight = model.mlp.layers[0].weight
    print("a device holds", weight.sharding.shard_shape(weight.shape), "of the MLP's first weight", weight.shape)
    print("planned losses:", *(f"{loss:.4f}" for loss in losses))
    print("plain losses:  ", *(f"{loss:.4f}" for loss in plain_losses))
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-4)
    ours, theirs = eqx.filter(model, eqx.is_array), eqx.filter(plain_model, eqx.is_array)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), ours, theirs)
    assert losses[-1] < losses[0]
    print("AGREES with eqx.filter_jit on one device, losses and parameters")


if __name__ == "__main__":
    main()
