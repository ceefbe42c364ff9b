"""Parts of the small JAX programs: a `Case` is parameters, a batch, a forward pass and a loss.

`train_program` and `infer_program` trace its steps. Modes are `train` (SGD with momentum), `adamw` and `infer`.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from autoshard.program import Program, trace


Tree = Any
S = jax.ShapeDtypeStruct


def f32(*shape: int) -> Any:
    return S(shape, jnp.float32)


def ids(*shape: int) -> Any:
    return S(shape, jnp.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """Parts of a model, with bounds of its integer inputs."""

    params: Tree
    batch: Tree
    forward: Callable[[Tree, Tree], Any]
    loss: Callable[[Tree, Tree], Any]
    limits: dict[str, int] = dataclasses.field(default_factory=dict)


def optimizer_of(mode: str) -> Any:
    # With momentum the state after one step equals the gradients.
    return optax.adamw(1e-3) if mode == "adamw" else optax.sgd(0.1, momentum=0.9)


def train_program(name: str, case: Case, mode: str) -> Program:
    """Trace loss, gradients and the optimizer's update, with donated parameters and state."""
    tx = optimizer_of(mode)

    def step(params: Tree, opt_state: Tree, batch: Tree) -> Any:
        value, grads = jax.value_and_grad(case.loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    def make_args(seed: int) -> tuple[Any, ...]:
        params, batch = _values(case, seed)
        return params, tx.init(params), batch

    args = (case.params, jax.eval_shape(tx.init, case.params), case.batch)
    return trace(step, args, name=name, donate_argnums=(0, 1), training=True, make_args=make_args)


def infer_program(name: str, case: Case) -> Program:
    args = (case.params, case.batch)
    return trace(
        lambda params, batch: case.forward(params, batch), args, name=name, make_args=lambda s: _values(case, s)
    )


def _values(case: Case, seed: int) -> tuple[Any, Any]:
    return values(case.params, case.batch, case.limits, seed)


def values(params: Tree, batch: Tree, limits: dict[str, int], seed: int) -> tuple[Any, Any]:
    """Draw small normal numbers, and integers below the limit of their part of the batch, else below 64."""
    key = jax.random.key(seed)

    def fill(path: Any, leaf: Any) -> Any:
        text = jax.tree_util.keystr(path)
        own = jax.random.fold_in(key, zlib.crc32(text.encode()) % 2**31)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            limit = next((n for part, n in limits.items() if f"'{part}'" in text), 64)
            return jax.random.randint(own, leaf.shape, 0, limit, leaf.dtype)
        return 0.05 * jax.random.normal(own, leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, (params, batch))


def layers(sizes: list[int]) -> Tree:
    return [{"w": f32(a, b), "b": f32(b)} for a, b in zip(sizes, sizes[1:], strict=False)]


def dense(params: Tree, x: Any, last: Callable[[Any], Any] = jnp.tanh) -> Any:
    for number, layer in enumerate(params):
        x = x @ layer["w"] + layer["b"]
        x = jnp.tanh(x) if number + 1 < len(params) else last(x)
    return x


def cross_entropy(logits: Any, labels: Any) -> Any:
    picked = jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == labels[..., None], logits, 0), -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def squares(forward: Callable[[Tree, Tree], Any]) -> Callable[[Tree, Tree], Any]:
    return lambda params, batch: jnp.mean((forward(params, batch) - batch["y"]) ** 2)


def norm(x: Any, w: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * (1.0 + w)
