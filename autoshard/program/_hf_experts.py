"""Experts of any mixture of transformers: what its routers choose is dispatched as other experts are.

A router of transformers gives indices of experts and their weights for tokens that lie in one dim; each block of
experts says how its weights lie. Its own ways (a loop over experts, one gathered weight for each token, rows sorted
over the whole batch) ask for values or cannot be split.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from autoshard.program._environment import environment
from autoshard.program._experts import Experts, GatedExperts, Times, mix_experts, sequence_length
from autoshard.program._marks import mark
from autoshard.program._routers import activation_of


@dataclasses.dataclass(frozen=True, slots=True)
class OtherExperts:
    """`after(down(between(up(x))))`, where `between` is any function of what the first weight makes of a token."""

    up: Any
    """[E, F, D]."""
    down: Any
    """[E, D, I]."""
    between: Callable[[Any], Any]
    biases: tuple[Any, Any] | None = None
    """What is added to the results of the two: [E, F] and [E, D]."""
    after: Callable[[Any], Any] | None = None

    @property
    def count(self) -> int:
        """How many experts there are."""
        return int(self.down.shape[0])

    @property
    def weights_each(self) -> int:
        """Elements of the weight matrices of one expert."""
        return int(self.up.size + self.down.size) // self.count

    def apply(self, moved: Any, times: Times, one: bool) -> Any:
        """What the experts make of tokens that lie by expert."""
        wide, narrow = self.biases or (None, None)
        inner = mark(times(moved, self.up, wide), "experts.up_proj")
        out = mark(times(self.between(inner), self.down, narrow), "experts.down_proj")
        return out if self.after is None else self.after(out)


def experts_forward(module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """What transformers calls for a block of experts: tokens [T, D], indices and weights [T, K]; [T, D]."""
    env = environment()
    x, index, share = (env.t2j_iso(each) for each in (hidden_states, top_k_index, top_k_weights))
    return env.j2t_iso(dispatched(x, index, share, layers_of(module)))


def dispatched(x: Any, index: Any, share: Any, layers: Experts) -> Any:
    """Tokens [T, D] after the experts that were chosen for them, indices and weights [T, K]; [T, D].

    An index beyond the experts that there are adds nothing.
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
    """The experts of a block of transformers, from what its `use_experts_implementation` says of its weights."""
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
    """Make `autoshard` an experts implementation of transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("autoshard", experts_forward)
