"""Plan a step with kernels of one's own: a Pallas kernel is read from its grid, any other function has a rule.

Run `python examples/pallas_kernel.py`: eight CPU devices interpret the kernel on their shards, and attention in plain
JAX on one device checks losses and parameters.
For real hardware, change `TOPOLOGY` (such as "v5e:4x4"), set `MESH` to "auto" or another one, and raise the sizes.
TPUs compile the kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

import autoshard
from autoshard.exec import ensure_devices


TOPOLOGY, MESH = "cpu:8", {"data": 4, "model": 2}
BATCH, HEADS, LENGTH, SIZE, BLOCK, STEPS = 8, 4, 64, 32, 16, 4
WIDTH = HEADS * SIZE


def attend(q, k, v):
    """Compute attention in plain JAX on [batch, heads, tokens, size]."""
    weights = jax.nn.softmax(jnp.einsum("bhsd,bhtd->bhst", q, k) * SIZE**-0.5, axis=-1)
    return jnp.einsum("bhst,bhtd->bhsd", weights, v)


def kernel(q_ref, k_ref, v_ref, out_ref):
    out_ref[...] = attend(q_ref[...], k_ref[...], v_ref[...])


def forward(q, k, v):
    """Run the kernel on a grid of examples, heads and blocks of queries: these are the dims that a plan may split."""
    queries = pl.BlockSpec((1, 1, BLOCK, SIZE), lambda b, h, s: (b, h, s, 0))
    keys = pl.BlockSpec((1, 1, k.shape[2], SIZE), lambda b, h, s: (b, h, 0, 0))
    return pl.pallas_call(
        kernel,
        grid=(*q.shape[:2], q.shape[2] // BLOCK),
        in_specs=[queries, keys, keys],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        interpret=jax.default_backend() == "cpu",
    )(q, k, v)


RULE = "b h s d, b h t d, b h t d, b h s d -> b h s d, b h t d, b h t d"


@autoshard.register_rule(RULE, need_replication="s t d", flops="10 b h s t d")
def backward(q, k, v, grad):
    """Return the gradients, as a kernel without a grid would on each device's own examples and heads."""
    return jax.vjp(attend, q, k, v)[1](grad)


attend_by_kernel = jax.custom_vjp(forward)
attend_by_kernel.defvjp(lambda q, k, v: (forward(q, k, v), (q, k, v)), lambda saved, grad: backward(*saved, grad))


def step(params, x, attend: Any = attend_by_kernel):
    def loss(params):
        q, k, v = jnp.einsum("bsd,ndhk->nbhsk", x, params["attention_qkv"])
        out = jnp.einsum("bhsk,hkd->bsd", attend(q, k, v), params["attention_out"])
        return jnp.mean((out - jnp.flip(x, 1)) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 10 * g, params, grads), value


def init():
    keys = jax.random.split(jax.random.key(0), 3)
    qkv, out = (3, WIDTH, HEADS, SIZE), (HEADS, SIZE, WIDTH)
    params = {"attention_qkv": jax.random.normal(keys[0], qkv), "attention_out": jax.random.normal(keys[1], out)}
    return jax.tree.map(lambda p: 0.1 * p, params), jax.random.normal(keys[2], (BATCH, LENGTH, WIDTH))


def train(step):
    (params, x), losses = init(), []
    for _ in range(STEPS):
        params, loss = step(params, x)
        losses.append(float(loss))
    return params, losses


def main():
    ensure_devices(8)  # CPU devices; it changes nothing where there are accelerators
    plan = autoshard.plan(autoshard.trace(step, jax.eval_shape(init)), topology=TOPOLOGY, mesh=MESH)
    print(plan, *plan.words, sep="\n")
    for call in plan.calls:
        print(call.name, *call.operands, "->", *call.results)

    params, losses = train(plan.jit(step))
    plain_params, plain_losses = train(jax.jit(functools.partial(step, attend=attend)))
    print("planned losses:", *(f"{loss:.4f}" for loss in losses))
    print("plain losses:  ", *(f"{loss:.4f}" for loss in plain_losses))
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), params, plain_params)
    assert losses[-1] < losses[0]
    print("AGREES with attention in plain JAX on one device, losses and parameters")


if __name__ == "__main__":
    main()
