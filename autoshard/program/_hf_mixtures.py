"""Blocks of transformers whose experts are called in ways of their own, as dispatch that can be split.

Their own code sorts tokens by expert, or asks which experts were chosen at all: it needs values.
"""

from typing import Any

from autoshard.program._environment import environment
from autoshard.program._experts import GatedExperts
from autoshard.program._hf_experts import OtherExperts, dispatched
from autoshard.program._marks import mark
from autoshard.program._routers import activation_of


def longcat_experts(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Replaces `LongcatFlashExperts.forward`: experts beyond those with weights give a token as it is."""
    import jax.numpy as jnp

    env = environment()
    x, index, share = (env.t2j_iso(each) for each in (hidden_states, top_k_index, top_k_weights))
    same = x * jnp.where(index >= self.num_routed_experts, share, 0).sum(-1, keepdims=True).astype(x.dtype)
    if self.gate_up_proj is None:
        return env.j2t_iso(same)
    up, down = env.t2j_iso(self.gate_up_proj), env.t2j_iso(self.down_proj)
    layers = GatedExperts(up[: self.num_routed_experts], down, activation_of(self.act_fn), None)
    return env.j2t_iso(dispatched(x, index, share, layers) + same)


def switch_experts(self: Any, hidden_states: Any, selected_experts: Any, routing_weights: Any) -> Any:
    """Replaces `SwitchTransformersExperts.forward`: tokens [T, D], the chosen expert of each as ones [T, 1, E], none of
    a token for which it has no room, and its weights [T, 1]."""
    import jax.numpy as jnp

    env = environment()
    x, chosen, share = (env.t2j_iso(each) for each in (hidden_states, selected_experts, routing_weights))
    index = jnp.where(chosen.any(-1), chosen.argmax(-1), self.num_experts)
    each = [self[f"expert_{number}"] for number in range(self.num_experts)]
    up, down = (jnp.stack([env.t2j_iso(getattr(one, key).weight) for one in each]) for key in ("wi", "wo"))
    return env.j2t_iso(dispatched(x, index, share, OtherExperts(up, down, activation_of(each[0].act))))


def dbrx_experts(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Replaces `DbrxExperts.forward`: tokens [B, S, D], indices and weights [B S, K]."""
    import jax.numpy as jnp

    env = environment()
    x, index, share = (env.t2j_iso(each) for each in (hidden_states, top_k_index, top_k_weights))
    gate, up, down = (
        env.t2j_iso(getattr(self.mlp, key)).reshape(self.num_experts, self.ffn_hidden_size, self.hidden_size)
        for key in ("w1", "v1", "w2")
    )
    layers = GatedExperts(
        jnp.concatenate([gate, up], 1), down.swapaxes(1, 2), activation_of(self.mlp.activation_fn), None
    )
    return env.j2t_iso(dispatched(x.reshape(-1, self.hidden_size), index, share, layers).reshape(x.shape))


def jetmoe_mlp(self: Any, layer_input: Any) -> Any:
    """Replaces `JetMoeMoE.forward`: tokens [B, S, D]."""
    env = environment()
    x, bias = env.t2j_iso((layer_input, self.bias))
    up, down = env.t2j_iso((self.input_linear.weight, self.output_linear.weight))
    index, share = _jetmoe_choice(self, x)
    rows = x.reshape(-1, x.shape[-1])
    mixed = dispatched(rows, index, share, GatedExperts(up, down, activation_of(self.activation), None))
    return env.j2t_iso(mixed.reshape(x.shape) + bias)


def jetmoe_queries(self: Any, layer_input: Any) -> tuple[Any, Any, Any]:
    """Replaces `JetMoeMoA.map`: the queries [B, S, K, H] that the chosen experts make of tokens [B, S, D]."""
    import jax
    import jax.numpy as jnp

    env = environment()
    x, weight = env.t2j_iso((layer_input, self.input_linear.weight))
    index, share = (each.reshape(*x.shape[:2], -1) for each in _jetmoe_choice(self, x))
    hot = jax.nn.one_hot(index, weight.shape[0], dtype=x.dtype)
    every = mark(jnp.einsum("bsd,ehd->bseh", x, weight), "experts.up_proj")
    queries = jnp.einsum("bske,bseh->bskh", hot, every)
    return env.j2t_iso(queries), None, (hot, share)


def jetmoe_outputs(self: Any, layer_input: Any, topo_info: Any) -> Any:
    """Replaces `JetMoeMoA.reduce`: the sum of what the chosen experts make of their results [B, S, K, H]."""
    import jax.numpy as jnp

    env = environment()
    x, weight, bias = env.t2j_iso((layer_input, self.output_linear.weight, self.bias))
    hot, share = topo_info
    by_expert = jnp.einsum("bske,bskh->bseh", hot * share[..., None].astype(hot.dtype), x)
    return env.j2t_iso(mark(jnp.einsum("bseh,edh->bsd", by_expert, weight), "experts.down_proj") + bias)


def _jetmoe_choice(self: Any, x: Any) -> tuple[Any, Any]:
    """Indices of the chosen experts and their weights [B S, K] of tokens [B, S, D]."""
    import jax
    import jax.numpy as jnp

    router = self.router
    logits = x.reshape(-1, x.shape[-1]) @ environment().t2j_iso(router.layer.weight).T
    best, index = jax.lax.top_k(logits.astype(jnp.float32), router.top_k)
    return index, jax.nn.softmax(best, axis=-1)
