"""Experts and mixtures of transformers, with a dispatch that can be sharded."""

import dataclasses
from collections.abc import Callable
from typing import Any

from autoshard.program.moe.experts import Experts, GatedExperts, Times, mix_experts, sequence_length
from autoshard.program.moe.hf_routers import activation_of
from autoshard.program.remat_marks import mark
from autoshard.program.torch_ops.torchax_environment import environment


@dataclasses.dataclass(frozen=True, slots=True)
class OtherExperts:
    """Experts `after(down(between(up(x))))`, with any function `between` of the first matmul's result."""

    up: Any
    """Weights [E, F, D]."""
    down: Any
    """Weights [E, D, I]."""
    between: Callable[[Any], Any]
    biases: tuple[Any, Any] | None = None
    """Biases of the two matmuls: [E, F] and [E, D]."""
    after: Callable[[Any], Any] | None = None
    """Function of the second matmul's result; None for none."""

    @property
    def count(self) -> int:
        """Number of experts."""
        return int(self.down.shape[0])

    @property
    def weights_each(self) -> int:
        """Elements of the weight matrices of one expert."""
        return int(self.up.size + self.down.size) // self.count

    def apply(self, moved: Any, times: Times, one: bool) -> Any:
        """Return the experts' results for tokens grouped by expert."""
        wide, narrow = self.biases or (None, None)
        inner = mark(times(moved, self.up, wide), "experts.up_proj")
        out = mark(times(self.between(inner), self.down, narrow), "experts.down_proj")
        return out if self.after is None else self.after(out)


def experts_forward(module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Compute a block of experts for transformers: tokens [T, D], indices and weights [T, K]; return [T, D].

    All are torch tensors of torchax.
    """
    env = environment()
    x, index, share = (env.t2j_iso(each) for each in (hidden_states, top_k_index, top_k_weights))
    return env.j2t_iso(dispatched(x, index, share, layers_of(module)))


def dispatched(x: Any, index: Any, share: Any, layers: Experts) -> Any:
    """Return the weighted sums [T, D] of the chosen experts for tokens [T, D], with indices and weights [T, K].

    An index beyond the number of experts adds nothing. Tokens are grouped by sequence if `sequence_length` is known and
    divides T; otherwise they are one sequence.
    """
    import jax
    import jax.numpy as jnp

    shape = x.shape
    tokens, active = index.size // index.shape[-1], int(index.shape[-1])
    length = sequence_length() or tokens
    lead = (tokens // length, length) if tokens % length == 0 else (1, tokens)
    one_hot = jax.lax.broadcasted_iota(index.dtype, (*lead, active, layers.count), 3)
    one_hot = one_hot == index.reshape(*lead, active, 1)
    weights = jnp.where(one_hot, share.reshape(*lead, active, 1).astype(jnp.float32), 0.0).sum(2)
    mixed = mix_experts(x.reshape(*lead, shape[-1]), weights, one_hot.any(2), layers, active)
    return mixed.reshape(shape).astype(x.dtype)


def layers_of(module: Any) -> Experts:
    """Return the experts of a block of transformers, from the layout that `use_experts_implementation` declares.

    They are `GatedExperts` for the usual gate without a norm after the experts, else `OtherExperts`.
    """
    from transformers.integrations import moe

    env = environment()
    first = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = env.t2j_iso(getattr(module, first)), env.t2j_iso(module.down_proj)
    if module.is_transposed:
        up, down = up.swapaxes(1, 2), down.swapaxes(1, 2)
    biases = None
    if module.has_bias:
        biases = (env.t2j_iso(getattr(module, f"{first}_bias")), env.t2j_iso(module.down_proj_bias))
    usual = getattr(type(module), "_apply_gate", None) is moe._default_apply_gate
    if module.has_gate and usual and not module.has_post_expert_norm:
        return GatedExperts(up, down, activation_of(module.act_fn), biases)
    between = activation_of(module._apply_gate if module.has_gate else module.act_fn)
    return OtherExperts(
        up, down, between, biases, activation_of(module.post_expert_norm) if module.has_post_expert_norm else None
    )


def register_experts() -> None:
    """Register `autoshard` as an experts implementation of transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("autoshard", experts_forward)


def longcat_experts(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Replace `LongcatFlashExperts.forward`; experts beyond those with weights return a token unchanged."""
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
    """Replace `SwitchTransformersExperts.forward`: tokens [T, D], chosen experts [T, 1, E], weights [T, 1].

    The choice is one-hot, and all zeros for a token that exceeds its expert's capacity.
    """
    import jax.numpy as jnp

    env = environment()
    x, chosen, share = (env.t2j_iso(each) for each in (hidden_states, selected_experts, routing_weights))
    index = jnp.where(chosen.any(-1), chosen.argmax(-1), self.num_experts)
    each = [self[f"expert_{number}"] for number in range(self.num_experts)]
    up, down = (jnp.stack([env.t2j_iso(getattr(one, key).weight) for one in each]) for key in ("wi", "wo"))
    return env.j2t_iso(dispatched(x, index, share, OtherExperts(up, down, activation_of(each[0].act))))


def dbrx_experts(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Replace `DbrxExperts.forward`: tokens [B, S, D], indices and weights [B S, K]."""
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
    """Replace `JetMoeMoE.forward`: tokens [B, S, D]."""
    env = environment()
    x, bias = env.t2j_iso((layer_input, self.bias))
    up, down = env.t2j_iso((self.input_linear.weight, self.output_linear.weight))
    index, share = _jetmoe_choice(self, x)
    rows = x.reshape(-1, x.shape[-1])
    mixed = dispatched(rows, index, share, GatedExperts(up, down, activation_of(self.activation), None))
    return env.j2t_iso(mixed.reshape(x.shape) + bias)


def jetmoe_queries(self: Any, layer_input: Any) -> tuple[Any, Any, Any]:
    """Replace `JetMoeMoA.map`: return the queries [B, S, K, H] of the chosen experts for tokens [B, S, D].

    The second result is None, and the third is the one-hot choice [B, S, K, E] with its weights [B, S, K]. All experts
    are computed for every token.
    """
    import jax
    import jax.numpy as jnp

    env = environment()
    x, weight = env.t2j_iso((layer_input, self.input_linear.weight))
    index, share = (each.reshape(*x.shape[:2], -1) for each in _jetmoe_choice(self, x))
    hot = jax.nn.one_hot(index, weight.shape[0], dtype=x.dtype)
    projected = mark(jnp.einsum("bsd,ehd->bseh", x, weight), "experts.up_proj")
    queries = jnp.einsum("bske,bseh->bskh", hot, projected)
    return env.j2t_iso(queries), None, (hot, share)


def jetmoe_outputs(self: Any, layer_input: Any, topo_info: Any) -> Any:
    """Replace `JetMoeMoA.reduce`: return the sum of the chosen experts' projections of their results [B, S, K, H].

    `topo_info` is the third result of `jetmoe_queries`.
    """
    import jax.numpy as jnp

    env = environment()
    x, weight, bias = env.t2j_iso((layer_input, self.output_linear.weight, self.bias))
    hot, share = topo_info
    by_expert = jnp.einsum("bske,bskh->bseh", hot * share[..., None].astype(hot.dtype), x)
    return env.j2t_iso(mark(jnp.einsum("bseh,edh->bsd", by_expert, weight), "experts.down_proj") + bias)


def _jetmoe_choice(self: Any, x: Any) -> tuple[Any, Any]:
    """Return the indices of the chosen experts and their weights [B S, K] for tokens [B, S, D].

    The weights are the softmax of the chosen logits in fp32.
    """
    import jax
    import jax.numpy as jnp

    router = self.router
    logits = x.reshape(-1, x.shape[-1]) @ environment().t2j_iso(router.layer.weight).T
    best, index = jax.lax.top_k(logits.astype(jnp.float32), router.top_k)
    return index, jax.nn.softmax(best, axis=-1)
