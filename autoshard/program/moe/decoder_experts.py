"""Experts of a decoder that is built from its dims: a router, routed experts, and experts that see every token.

There are four dispatches. Tokens of the whole batch are sorted by expert and multiplied by group. Or each sequence has
slots for each expert, into which its tokens are gathered. Or the tokens of each sequence are sorted into groups of
experts. Or kernels of published runs, which can be planned and priced only, multiply each sequence's sorted tokens.
Slots and groups can be split by batch and by expert, but tokens that are sorted over the batch by rows alone.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from autoshard.program import model_flops
from autoshard.program.kernels.eight_bits import dot, rounds
from autoshard.program.kernels.grouped_kernels import GroupedKernels, kernel_matmul
from autoshard.program.kernels.ragged_dots import grouped_matmul
from autoshard.program.moe.expert_dispatch import dispatch, rows_of
from autoshard.program.moe.experts import parse_experts


class ExpertDims(Protocol):
    """The dims of a decoder that its experts need."""

    @property
    def width(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def experts(self) -> int: ...
    @property
    def active_experts(self) -> int: ...
    @property
    def expert_inner(self) -> int: ...
    @property
    def shared_experts(self) -> int: ...


def expert_shapes(dims: ExpertDims) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a layer's router and experts, by name."""
    width, inner, shared = dims.width, dims.expert_inner, dims.shared_experts * dims.expert_inner
    shapes: dict[str, tuple[int, ...]] = {"router.weight": (width, dims.experts)}
    for name in ("gate_proj", "up_proj") if dims.gated else ("up_proj",):
        shapes[f"experts.{name}.weight"] = (dims.experts, width, inner)
        if shared:
            shapes[f"shared.{name}.weight"] = (width, shared)
    shapes["experts.down_proj.weight"] = (dims.experts, inner, width)
    if shared:
        shapes["shared.down_proj.weight"] = (shared, width)
    return shapes


class Routing(NamedTuple):
    """The dispatch of tokens to experts."""

    kind: str
    """`dropless`, `kernels`, `capacity`, or a form of `parse_experts` with groups, such as `sorted:8`."""
    factor: float = 1.0
    """Slots of an expert relative to the mean number of its tokens, for `capacity`."""
    kernels: GroupedKernels = GroupedKernels()
    """Tiles of the kernels and the devices that they run on, for `kernels`."""


def routed(dims: ExpertDims, x: Any, weights: Mapping[str, Any], routing: Routing) -> Any:
    """Return the weighted sums of the experts' results for tokens `x` [B, S, D], plus those of the shared experts.

    The weights of a token's experts are its largest softmax weights (f32), rescaled to sum to 1. Model FLOPs are
    recorded.
    """
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    wide = x.astype(jnp.float32)
    model_flops.record_matmul((*x.shape[:2], dims.experts), dims.width)
    scores = jnp.einsum("bsd,de->bse", wide, weights["router.weight"])
    best, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), dims.active_experts)
    share = (best / best.sum(-1, keepdims=True)).astype(x.dtype)
    mix = {"dropless": _sorted, "kernels": _in_kernels, "capacity": _slotted}.get(routing.kind, _by_groups)
    mixed = mix(dims, x, share, chosen, weights, routing)
    if dims.shared_experts:
        up = checkpoint_name(product("bsd,df->bsf", x, weights["shared.up_proj.weight"]), "up")
        gate = (
            checkpoint_name(product("bsd,df->bsf", x, weights["shared.gate_proj.weight"]), "gate")
            if dims.gated
            else None
        )
        own = product("bsf,fd->bsd", _activated(gate, up), weights["shared.down_proj.weight"])
        mixed = mixed + checkpoint_name(own, "down")
    return mixed


def _sorted(dims: ExpertDims, x: Any, share: Any, chosen: Any, weights: Mapping[str, Any], routing: Routing) -> Any:
    """Return the weighted sums [B, S, D] of every token's experts by rows [B S K, D] that are sorted by expert.

    Grouped matmuls multiply the rows, which are then sorted back. None is dropped.

    - `x`: tokens [B, S, D].
    - `share`, `chosen`: weights and indices of each token's experts [B, S, K].
    - `weights`: parameters of the layer by name.
    """
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    count = dims.active_experts
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=dims.experts).astype(jnp.int32)
    rows = jnp.take(x.reshape(-1, dims.width), order // count, axis=0)

    def grouped(left: Any, name: str) -> Any:
        weight = weights[f"experts.{name}.weight"].astype(x.dtype)
        model_flops.record_matmul((left.shape[0], weight.shape[-1]), weight.shape[1])
        return jax.lax.ragged_dot(left, weight, sizes)

    up = checkpoint_name(grouped(rows, "up_proj"), "up")
    gate = checkpoint_name(grouped(rows, "gate_proj"), "gate") if dims.gated else None
    out = checkpoint_name(grouped(_activated(gate, up), "down_proj"), "down")
    back = jnp.take(out, jnp.argsort(order), axis=0).reshape(*x.shape[:2], count, dims.width)
    return jnp.einsum("bskd,bsk->bsd", back, share)


def _in_kernels(dims: ExpertDims, x: Any, share: Any, chosen: Any, weights: Mapping[str, Any], routing: Routing) -> Any:
    """Return the results by MaxText's sparse matmuls; the arguments are those of `_sorted`.

    Every token is repeated for each of its experts, the rows are sorted by expert, and three kernels multiply them. The
    rows are then sorted back and summed with their weights in f32. Each expert is assumed to have the mean number of
    rows, rounded up, so that the results are those of no real routing. Every step materialises rows again, in both
    directions: the gradient of a permutation of rows is its inverse.
    """
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    (batch, length, width), count, experts = x.shape, dims.active_experts, dims.experts
    each = math.ceil(length * count / experts)
    flat = chosen.reshape(batch, length * count)
    order = jnp.argsort(flat, axis=1, stable=True)
    there = jnp.pad(order, ((0, 0), (0, experts * each - length * count)))
    back = jnp.argsort(order, axis=1)
    repeated = jnp.broadcast_to(x[:, :, None], (batch, length, count, width)).reshape(batch, length * count, width)
    rows = _reordered(repeated, there, back).reshape(batch, experts, each, width)

    def grouped(left: Any, name: str) -> Any:
        weight = weights[f"experts.{name}.weight"].astype(x.dtype)
        return kernel_matmul(left, weight, routing.kernels, dims.expert_inner)

    gate = checkpoint_name(grouped(rows, "gate_proj"), "gate") if dims.gated else None
    up = checkpoint_name(grouped(rows, "up_proj"), "up")
    out = checkpoint_name(grouped(_activated(gate, up), "down_proj"), "down")
    results = _reordered(out.reshape(batch, experts * each, width), back, there).reshape(batch, length, count, width)
    mixed = (results.astype(jnp.float32) * share.astype(jnp.float32)[..., None]).sum(2)
    return mixed.astype(x.dtype)


def _reordered(rows: Any, places: Any, opposite: Any) -> Any:
    """Return `rows` [B, N, D] at `places` [B, M]; its gradient is the result's one at the `opposite` places [B, N]."""
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def taken(rows: Any, places: Any, opposite: Any) -> Any:
        return jnp.take_along_axis(rows, places[..., None], axis=1)

    taken.defvjp(
        lambda rows, places, opposite: (taken(rows, places, opposite), (places, opposite)),
        lambda kept, of: (taken(of, kept[1], kept[0]), None, None),
    )
    return taken(rows, places, opposite)


def _slotted(dims: ExpertDims, x: Any, share: Any, chosen: Any, weights: Mapping[str, Any], routing: Routing) -> Any:
    """Return the results with slots [E, C] in every sequence for the first tokens of each expert; others are dropped.

    The arguments are those of `_sorted`. There are `routing.factor` times the mean number of slots, rounded up, at
    least 1 and at most S.
    """
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    length, count, experts = x.shape[1], dims.active_experts, dims.experts
    slots = min(length, max(1, math.ceil(length * count * routing.factor / experts)))
    to_slots, from_slots, _ = dispatch(chosen, experts, experts, slots)
    moved = to_slots(x)
    up = checkpoint_name(product("becd,edf->becf", moved, weights["experts.up_proj.weight"]), "up")
    gate = (
        checkpoint_name(product("becd,edf->becf", moved, weights["experts.gate_proj.weight"]), "gate")
        if dims.gated
        else None
    )
    out = checkpoint_name(product("becf,efd->becd", _activated(gate, up), weights["experts.down_proj.weight"]), "down")
    return jnp.einsum("bskd,bsk->bsd", from_slots(out), share)


def _by_groups(dims: ExpertDims, x: Any, share: Any, chosen: Any, weights: Mapping[str, Any], routing: Routing) -> Any:
    """Return the results with the tokens of each sequence sorted into groups [G, B, R, D] of experts; none is dropped.

    The arguments are those of `_sorted`.
    """
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    (batch, length), count, groups = x.shape[:2], dims.active_experts, parse_experts(routing.kind).groups
    rows = rows_of(length, count, dims.experts, groups, None)
    ragged = parse_experts(routing.kind).ragged and batch % groups == 0
    real = batch * min(groups * rows, length * count)
    exchange = dispatch(chosen, dims.experts, groups, rows).by_group(real if ragged else None)
    moved, counts = exchange.to_rows(x), exchange.sizes

    def grouped(left: Any, name: str) -> Any:
        weight = weights[f"experts.{name}.weight"].astype(x.dtype).swapaxes(1, 2)
        model_flops.record_matmul((batch * length * count, weight.shape[1]), weight.shape[2])
        return grouped_matmul(left, weight, counts, batch * length * count)

    up = checkpoint_name(grouped(moved, "up_proj"), "up")
    gate = checkpoint_name(grouped(moved, "gate_proj"), "gate") if dims.gated else None
    out = checkpoint_name(grouped(_activated(gate, up), "down_proj"), "down")
    return jnp.einsum("bskd,bsk->bsd", exchange.from_rows(out), share)


def _activated(gate: Any | None, up: Any) -> Any:
    """Return `silu(gate) * up`, or `gelu(up)` if there is no gate."""
    import jax

    return jax.nn.gelu(up) if gate is None else jax.nn.silu(gate) * up


def product(equation: str, left: Any, weight: Any) -> Any:
    """Return an einsum with a parameter `weight`, cast to the dtype of `left`, and record its model FLOPs.

    Inside of `in_eight_bits` its operands have 8 bits, unless it has batch dims.
    """
    import jax.numpy as jnp

    inputs, out = equation.split("->")
    sizes = dict(zip(inputs.replace(",", ""), (*left.shape, *weight.shape), strict=True))
    contracted = math.prod(size for letter, size in sizes.items() if letter not in out)
    model_flops.record_matmul([sizes[letter] for letter in out], contracted)
    weight = weight.astype(left.dtype)
    first, second = inputs.split(",")
    inner = [letter for letter in second if letter in first]
    if not rounds() or set(inner) & set(out):
        return jnp.einsum(equation, left, weight)
    outer = [letter for letter in first if letter not in inner]
    rows = jnp.transpose(left, [first.index(letter) for letter in (*outer, *inner)])
    found = [*outer, *(letter for letter in second if letter not in inner)]
    result = dot(rows, weight, tuple(second.index(letter) for letter in inner))
    return jnp.transpose(result, [found.index(letter) for letter in out])
