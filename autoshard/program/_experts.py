"""Mixtures of experts as einsums: dispatch to a fixed number of slots for each expert, compute, combine.

Gathering expert weights for each token cannot scale, and sorting tokens cannot be split. Here tokens are cut into
groups along the sequence; within a group every expert has `capacity` slots, and one-hot matrices move tokens to slots
and back, as in GShard (Lepikhin et al. 2020, section 3.2). Each dim can be split: batch, group, expert, slot, features.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any

from autoshard.program import _flops
from autoshard.program._environment import environment
from autoshard.program._marks import mark


GROUP = 512
"""Most tokens in a group: moving tokens costs FLOPs in proportion to it."""

CAPACITY_FACTOR = 1.25
"""Slots over the mean number of tokens an expert receives; what does not fit is dropped."""

_factor: contextvars.ContextVar[float] = contextvars.ContextVar("capacity_factor", default=CAPACITY_FACTOR)
_used: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("notes", default=None)


@contextlib.contextmanager
def capacity(factor: float | None, notes: list[str]) -> Iterator[None]:
    """Use `factor` inside, and tell in `notes` that experts were dispatched so."""
    first, second = _factor.set(CAPACITY_FACTOR if factor is None else factor), _used.set(notes)
    try:
        yield
    finally:
        _factor.reset(first)
        _used.reset(second)


def group_size(length: int) -> int:
    """The largest divisor of a sequence length that is at most `GROUP`."""
    return max(size for size in range(1, min(length, GROUP) + 1) if length % size == 0)


def choose(scores: Any, count: int) -> list[Any]:
    """One-hot masks [..., E] of the `count` largest scores, largest first; the lower index wins a tie.

    Made of reductions and comparisons, which can be split over every dim, unlike a sort.
    """
    import jax
    import jax.numpy as jnp

    scores = jax.lax.stop_gradient(scores)
    size = scores.shape[-1]
    index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    chosen: list[Any] = []
    for _ in range(count):
        best = scores.max(-1, keepdims=True)
        first = jnp.where(scores == best, index, size).min(-1, keepdims=True)
        hot = index == first
        chosen.append(hot)
        scores = jnp.where(hot, -jnp.inf, scores)
    return chosen


def mix(x: Any, weights: Any, mask: Any, gate_up: Any, down: Any, activation: Callable[[Any], Any], active: int) -> Any:
    """`sum_e weights[..., e] * expert_e(x)` over the experts that `mask` chooses.

    `x` [B, S, D]; `weights`, `mask` [B, S, E]; `gate_up` [E, 2 I, D]; `down` [E, D, I]; `active` experts for a token.
    """
    import jax.numpy as jnp

    one = x.shape[1] == 1
    if one and x.shape[0] > 1:  # one token for each sequence: the sequences share the slots
        x, weights, mask = (jnp.swapaxes(value, 0, 1) for value in (x, weights, mask))
        return jnp.swapaxes(_mix(x, weights, mask, gate_up, down, activation, active, one), 0, 1)
    return _mix(x, weights, mask, gate_up, down, activation, active, one)


def _mix(
    x: Any, weights: Any, mask: Any, gate_up: Any, down: Any, activation: Callable[[Any], Any], active: int, one: bool
) -> Any:
    """`mix` of tokens along the second dim; `one`: of a step that decodes one token a sequence."""
    import jax
    import jax.numpy as jnp

    batch, length, dim = x.shape
    experts = mask.shape[-1]
    size = group_size(length)
    factor = _factor.get()
    slots = min(size, max(1, math.ceil(size * active * factor / experts)))
    notes = _used.get()
    if notes is not None:
        text = (
            f"Experts are dispatched by einsum: groups of {size} tokens, {slots} slots for each of {experts} experts"
            + (" (no token is ever dropped)." if slots == size else "; tokens beyond the slots are dropped.")
        )
        if text not in notes:
            notes.append(text)
    groups = (batch, length // size, size)
    x = x.reshape(*groups, dim)
    mask, weights = mask.reshape(*groups, experts), weights.reshape(*groups, experts)
    # Place of a token among those of its expert: a triangular matmul, since a cumulative sum cannot be split.
    row = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
    before = (row > column).astype(jnp.float32)
    place = jnp.einsum("st,bnte->bnse", before, mask.astype(jnp.float32))
    slot = jax.lax.broadcasted_iota(jnp.float32, (1, 1, 1, 1, slots), 4)
    dispatch = (place[..., None] == slot) & mask[..., None]
    moved = jnp.einsum("bnsec,bnsd->ebncd", dispatch.astype(x.dtype), x)
    inner = down.shape[-1]
    gate, up = (mark(half, "experts.gate_up_proj") for half in _halves(moved, gate_up, inner, one))
    out = mark(jnp.einsum("ebnci,edi->ebncd", activation(gate) * up, down), "experts.down_proj")
    _flops.record(6.0 * batch * length * active * dim * inner)
    combine = (dispatch * weights[..., None]).astype(x.dtype)
    mixed = jnp.einsum("bnsec,ebncd->bnsd", combine, out)
    return mixed.reshape(batch, length, dim)


def _halves(moved: Any, gate_up: Any, inner: int, one: bool) -> tuple[Any, Any]:
    """What the two halves of the fused weight make of the tokens: gate and up [E, B, N, C, I].

    Apart before the product, each device has its share of either half. A step of one token a sequence (`one`) takes
    next to no time but what reading weights takes, and XLA copies what it slices of a layer's stack in a loop: there
    the product is made of the weight as it is stored, and its small result is taken apart.
    """
    import jax.numpy as jnp

    if one:
        both = jnp.einsum("ebncd,efd->ebncf", moved, gate_up)
        return both[..., :inner], both[..., inner:]
    experts, _, dim = gate_up.shape
    halves = gate_up.reshape(experts, 2, inner, dim)
    return jnp.einsum("ebncd,eid->ebnci", moved, halves[:, 0]), jnp.einsum("ebncd,eid->ebnci", moved, halves[:, 1])


def softmax_router(logits: Any, count: int) -> tuple[Any, Any]:
    """Mixtral's router: the `count` largest softmax weights, rescaled to sum to 1; (weights, mask) [..., E]."""
    import jax
    import jax.numpy as jnp

    probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    mask = jnp.stack(choose(probs, count)).any(0) if count > 1 else choose(probs, 1)[0]
    kept = jnp.where(mask, probs, 0.0)
    return kept / kept.sum(-1, keepdims=True), mask


def group_limited_router(
    logits: Any, bias: Any, count: int, groups: int, best_groups: int, normalise: bool, scale: float
) -> tuple[Any, Any]:
    """DeepSeek-V3's router: sigmoid scores, first the best groups of experts, then the best experts in them."""
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
    kept = jnp.where(mask, scores, 0.0)
    if normalise:
        kept = kept / (kept.sum(-1, keepdims=True) + 1e-20)
    return kept * scale, mask


def _any(masks: list[Any]) -> Any:
    total = masks[0]
    for mask in masks[1:]:
        total = total | mask
    return total


def mixtral_block(self: Any, hidden_states: Any) -> Any:
    """Replaces `MixtralSparseMoeBlock.forward`."""
    env = environment()
    logits = hidden_states @ self.gate.weight.T

    def run(x: Any, scores: Any, gate_up: Any, down: Any) -> Any:
        weights, mask = softmax_router(scores, self.top_k)
        return mix(x, weights, mask, gate_up, down, _activation(self.experts.act_fn), self.top_k)

    return _through(env, run, hidden_states, logits, self.experts.gate_up_proj, self.experts.down_proj)


def deepseek_block(self: Any, hidden_states: Any) -> Any:
    """Replaces `DeepseekV3MoE.forward`."""
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
        return mix(x, weights, mask, gate_up, down, _activation(self.experts.act_fn), gate.top_k)

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


def _activation(module: Any) -> Callable[[Any], Any]:
    """The torch activation of a module as a function of JAX values."""
    env = environment()
    return lambda x: env.t2j_iso(module(env.j2t_iso(x)))


def _through(env: Any, run: Callable[..., Any], *tensors: Any) -> Any:
    return env.j2t_iso(run(*(env.t2j_iso(tensor) for tensor in tensors)))
