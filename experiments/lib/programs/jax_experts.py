"""Layers of experts as JAX users write them: one-hot dispatch, sorting into slots, ragged matmuls."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.lib.programs.jax_case import Case, Tree, f32, norm, squares


WIDTH, EXPERTS, EXPERT_FFN, TOKENS = 128, 8, 128, 512


def _moe(expert_layer: Callable[[Tree, Any], Any]) -> Case:
    def forward(params: Tree, batch: Tree) -> Any:
        x = batch["x"]
        return x + expert_layer(params, norm(x, params["norm"]))

    params = {
        "norm": f32(WIDTH),
        "router": f32(WIDTH, EXPERTS),
        "up": f32(EXPERTS, WIDTH, EXPERT_FFN),
        "down": f32(EXPERTS, EXPERT_FFN, WIDTH),
    }
    return Case(params, {"x": f32(TOKENS, WIDTH), "y": f32(TOKENS, WIDTH)}, forward, squares(forward))


def moe_einsum() -> Case:
    """Make experts by one-hot dispatch and einsums (Lepikhin et al. 2020, section 3.2)."""
    slots = 2 * TOKENS // EXPERTS

    def expert_layer(params: Tree, x: Any) -> Any:
        weights = jax.nn.softmax(x @ params["router"])
        chosen = jax.nn.one_hot(jnp.argmax(weights, -1), EXPERTS)
        place = jnp.einsum("se,se->s", jnp.cumsum(chosen, axis=0) - chosen, chosen)
        dispatch = chosen[:, :, None] * jax.nn.one_hot(place.astype(jnp.int32), slots)[:, None]
        moved = jnp.einsum("sec,sd->ecd", dispatch, x)
        out = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", moved, params["up"])), params["down"])
        return jnp.einsum("sec,ecd->sd", dispatch * weights[:, :, None], out)

    return _moe(expert_layer)


def _sorted(params: Tree, x: Any) -> tuple[Any, Any, Any, Any]:
    """Sort tokens by expert: return the order, sorted experts, sorted tokens, and weights of the choice."""
    weights = jax.nn.softmax(x @ params["router"])
    expert = jnp.argmax(weights, -1)
    order = jnp.argsort(expert, stable=True)
    return order, expert[order], x[order], jnp.max(weights, -1)


def moe_sort() -> Case:
    """Make experts that scatter sorted tokens into slots, and gather the results."""
    slots = 2 * TOKENS // EXPERTS

    def expert_layer(params: Tree, x: Any) -> Any:
        order, expert, moved, weight = _sorted(params, x)
        first = jnp.searchsorted(expert, jnp.arange(EXPERTS))
        slot = jnp.arange(TOKENS) - first[expert]
        held = jnp.zeros((EXPERTS, slots, WIDTH)).at[expert, slot].set(moved, mode="drop")
        out = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", held, params["up"])), params["down"])
        back = jnp.zeros_like(x).at[order].set(out.at[expert, slot].get(mode="fill", fill_value=0.0))
        return back * weight[:, None]

    return _moe(expert_layer)


def moe_ragged() -> Case:
    """Make experts that sort tokens and multiply ragged groups."""

    def expert_layer(params: Tree, x: Any) -> Any:
        order, expert, moved, weight = _sorted(params, x)
        sizes = jnp.sum(expert[:, None] == jnp.arange(EXPERTS), axis=0, dtype=jnp.int32)
        h = jax.nn.gelu(jax.lax.ragged_dot(moved, params["up"], sizes))
        return jnp.zeros_like(x).at[order].set(jax.lax.ragged_dot(h, params["down"], sizes)) * weight[:, None]

    return _moe(expert_layer)
