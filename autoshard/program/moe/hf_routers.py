"""Routers of transformers' mixtures, and their blocks of experts with the routers' choice."""

from collections.abc import Callable
from typing import Any

from autoshard.program.moe.experts import choose, mix
from autoshard.program.torch_ops.torchax_environment import environment


def softmax_router(logits: Any, count: int) -> tuple[Any, Any]:
    """Return (weights, mask) [..., E] of Mixtral's router: the `count` largest softmax weights, summing to 1.

    Weights are in fp32, and zero outside of the mask.
    """
    import jax
    import jax.numpy as jnp

    probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    mask = jnp.stack(choose(probs, count)).any(0) if count > 1 else choose(probs, 1)[0]
    selected = jnp.where(mask, probs, 0.0)
    return selected / selected.sum(-1, keepdims=True), mask


def group_limited_router(
    logits: Any, bias: Any, count: int, groups: int, best_groups: int, normalise: bool, scale: float
) -> tuple[Any, Any]:
    """Return (weights, mask) of DeepSeek-V3's router: first the best groups of experts, then the best experts in them.

    A group is ranked by the sum of its two largest scores. Weights are zero outside of the mask.

    - `logits`: [..., E]; their sigmoids are the scores.
    - `bias`: [E], added to the scores for the choice only.
    - `count`: number of experts of a token.
    - `groups`, `best_groups`: number of groups of experts, and of those that are selected.
    - `normalise`: True to rescale the weights to sum to 1; `scale` multiplies them after that.
    """
    import jax
    import jax.numpy as jnp

    scores = jax.nn.sigmoid(logits)
    ranking = jax.lax.stop_gradient(scores + bias)
    grouped = ranking.reshape(*ranking.shape[:-1], groups, ranking.shape[-1] // groups)
    best = choose(grouped, 2)
    strength = sum(jnp.where(hot, grouped, 0.0).sum(-1) for hot in best)
    open_groups = _any(choose(strength, best_groups))
    allowed = jnp.broadcast_to(open_groups[..., None], grouped.shape).reshape(ranking.shape)
    mask = _any(choose(jnp.where(allowed, ranking, -jnp.inf), count))
    selected = jnp.where(mask, scores, 0.0)
    if normalise:
        selected = selected / (selected.sum(-1, keepdims=True) + 1e-20)  # as in DeepseekV3
    return selected * scale, mask


def _any(masks: list[Any]) -> Any:
    """Return the union of masks."""
    total = masks[0]
    for mask in masks[1:]:
        total = total | mask
    return total


def mixtral_block(self: Any, hidden_states: Any) -> Any:
    """Replace `MixtralSparseMoeBlock.forward`: tokens [B, S, D] in and out."""
    env = environment()
    logits = hidden_states @ self.gate.weight.T

    def run(x: Any, scores: Any, gate_up: Any, down: Any) -> Any:
        weights, mask = softmax_router(scores, self.top_k)
        return mix(x, weights, mask, gate_up, down, activation_of(self.experts.act_fn), self.top_k)

    return _through(env, run, hidden_states, logits, self.experts.gate_up_proj, self.experts.down_proj)


def deepseek_block(self: Any, hidden_states: Any) -> Any:
    """Replace `DeepseekV3MoE.forward`: tokens [B, S, D] in and out, shared experts included."""
    env, gate = environment(), self.gate
    logits = hidden_states.float() @ gate.weight.float().T

    def run(x: Any, scores: Any, bias: Any, gate_up: Any, down: Any) -> Any:
        weights, mask = group_limited_router(
            scores,
            bias,
            gate.top_k,
            gate.num_group,
            gate.topk_group,
            gate.norm_topk_prob,
            gate.routed_scaling_factor,
        )
        return mix(x, weights, mask, gate_up, down, activation_of(self.experts.act_fn), gate.top_k)

    routed = _through(
        env,
        run,
        hidden_states,
        logits,
        gate.e_score_correction_bias,
        self.experts.gate_up_proj,
        self.experts.down_proj,
    )
    return routed + self.shared_experts(hidden_states)


def activation_of(module: Any) -> Callable[[Any], Any]:
    """Return the torch activation of a module as a function of JAX values."""
    env = environment()
    return lambda x: env.t2j_iso(module(env.j2t_iso(x)))


def _through(env: Any, run: Callable[..., Any], *tensors: Any) -> Any:
    """Call a function of JAX values with torch tensors, and return its result as a torch tensor."""
    return env.j2t_iso(run(*(env.t2j_iso(tensor) for tensor in tensors)))
