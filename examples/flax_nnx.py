"""Train a Flax NNX image classifier with batch norms under a plan; its step changes modules in place, as in NNX.

Run `python examples/flax_nnx.py`: eight CPU devices stand in for a machine, and `nnx.jit` on one device checks losses,
parameters and running statistics.
For real hardware, change `TOPOLOGY` (such as "v5e:4x4" or "h100:8"), set `MESH` to "auto" or another one, and raise the
sizes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import autoshard
from autoshard.exec import ensure_devices


TOPOLOGY, MESH = "cpu:8", {"data": 4, "model": 2}
BATCH, SIZE, CHANNELS, WIDTH, CLASSES, STEPS = 64, 32, 32, 256, 8, 4


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(3, CHANNELS, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(CHANNELS, rngs=rngs)
        self.second = nnx.Conv(CHANNELS, CHANNELS, (3, 3), rngs=rngs)
        self.up = nnx.Linear(CHANNELS, WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.second(nnx.relu(self.norm(self.first(images)))))
        return self.down(nnx.relu(self.up(x.mean((1, 2)))))


def make():
    model = Classifier(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, batch):
    """Update the model and the optimizer in place, and return the loss."""

    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["images"]), batch["labels"]).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def main():
    ensure_devices(8)  # CPU devices; it changes nothing where there are accelerators
    shapes = {
        "images": jax.ShapeDtypeStruct((BATCH, SIZE, SIZE, 3), jnp.float32),
        "labels": jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    }
    program = autoshard.trace(step, (*nnx.eval_shape(make), shapes))  # nothing is allocated to plan
    plan = autoshard.plan(program, topology=TOPOLOGY, mesh=MESH)
    print(plan, *plan.words, sep="\n")

    labels = jnp.arange(BATCH) % CLASSES
    images = jax.random.normal(jax.random.key(1), (BATCH, SIZE, SIZE, 3)) + labels[:, None, None, None]
    batch = {"images": images, "labels": labels}
    planned = plan.jit(step)
    (model, optimizer), (plain_model, plain_optimizer) = make(), make()
    losses = [float(planned(model, optimizer, batch)) for _ in range(STEPS)]
    plain_losses = [float(step(plain_model, plain_optimizer, batch)) for _ in range(STEPS)]
    kernel = model.up.kernel[...]  # the module stays split between steps
    print("a device holds", kernel.sharding.shard_shape(kernel.shape), "of the kernel", kernel.shape)
    print("planned losses:", *(f"{loss:.4f}" for loss in losses))
    print("plain losses:  ", *(f"{loss:.4f}" for loss in plain_losses))
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-3)
    ours, theirs = nnx.state(model), nnx.state(plain_model)  # parameters and running statistics
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), ours, theirs)
    assert losses[-1] < losses[0]
    print("AGREES with nnx.jit on one device, losses and state")


if __name__ == "__main__":
    main()
