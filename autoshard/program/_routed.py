"""The experts' part of a decoder that is made from its dims: a router, experts, and experts that see every token.

Either all tokens of the batch are sorted by expert and multiplied by group, or each sequence has slots for each expert,
into which its tokens are gathered. Slots can be split by batch and by expert; the groups of sorted tokens by rows.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from autoshard.program import _flops


class ExpertDims(Protocol):
    """What experts need to know of a decoder's dims."""

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
    """Parameters of a layer's router and experts by name."""
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


def routed(dims: ExpertDims, x: Any, weights: Mapping[str, Any], routing: str, factor: float) -> Any:
    """What the experts make of tokens `x` [B, S, D]: the largest softmax weights (f32), rescaled to sum to 1."""
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    wide = x.astype(jnp.float32)
    _flops.record_matmul((*x.shape[:2], dims.experts), dims.width)
    scores = jnp.einsum("bsd,de->bse", wide, weights["router.weight"])
    best, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), dims.active_experts)
    share = (best / best.sum(-1, keepdims=True)).astype(x.dtype)
    mix = _sorted if routing == "dropless" else _slotted
    mixed = mix(dims, x, share, chosen, weights, factor)
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


def _sorted(dims: ExpertDims, x: Any, share: Any, chosen: Any, weights: Mapping[str, Any], factor: float) -> Any:
    """Every token by all of its experts: rows [B S K, D] sorted by expert, a grouped matmul, and back."""
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
        _flops.record_matmul((left.shape[0], weight.shape[-1]), weight.shape[1])
        return jax.lax.ragged_dot(left, weight, sizes)

    up = checkpoint_name(grouped(rows, "up_proj"), "up")
    gate = checkpoint_name(grouped(rows, "gate_proj"), "gate") if dims.gated else None
    out = checkpoint_name(grouped(_activated(gate, up), "down_proj"), "down")
    back = jnp.take(out, jnp.argsort(order), axis=0).reshape(*x.shape[:2], count, dims.width)
    return jnp.einsum("bskd,bsk->bsd", back, share)


def _slotted(dims: ExpertDims, x: Any, share: Any, chosen: Any, weights: Mapping[str, Any], factor: float) -> Any:
    """Every sequence has slots [E, C] for its tokens, the first ones of each expert; tokens beyond are dropped."""
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    (batch, length, width), count, experts = x.shape, dims.active_experts, dims.experts
    slots = min(length, max(1, math.ceil(length * count * factor / experts)))
    flat = chosen.reshape(batch, length * count)
    order = jnp.argsort(flat, axis=1, stable=True)
    first = jax.vmap(lambda row: jnp.searchsorted(jnp.take(row[0], row[1]), jnp.arange(experts + 1)))((flat, order))
    place = first[:, :-1, None] + jnp.arange(slots)
    used = place < first[:, 1:, None]
    pairs = jnp.take_along_axis(order, jnp.minimum(place, length * count - 1).reshape(batch, -1), axis=1)
    used = used.reshape(batch, -1)
    rank = jnp.argsort(order, axis=1) - jnp.take_along_axis(first, flat, axis=1)
    slot, kept = flat * slots + jnp.minimum(rank, slots - 1), rank < slots
    to_slots, from_slots = _exchange(count, _Places(pairs, used), _Places(slot, kept))
    moved = to_slots(x).reshape(batch, experts, slots, width)
    up = checkpoint_name(product("becd,edf->becf", moved, weights["experts.up_proj.weight"]), "up")
    gate = (
        checkpoint_name(product("becd,edf->becf", moved, weights["experts.gate_proj.weight"]), "gate")
        if dims.gated
        else None
    )
    out = checkpoint_name(product("becf,efd->becd", _activated(gate, up), weights["experts.down_proj.weight"]), "down")
    back = from_slots(out.reshape(batch, experts * slots, width)).reshape(batch, length, count, width)
    return jnp.einsum("bskd,bsk->bsd", back, share)


class _Places(NamedTuple):
    """For each row [B, N] the one of another order that it is, and whether it is one at all."""

    of: Any
    real: Any


def _exchange(count: int, pairs: _Places, slots: _Places) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """How tokens [B, S, D] come into slots [B, N, D], and what slots hold to pairs of token and expert [B, S K, D].

    `pairs`: for each slot its pair; `slots`: for each pair its slot. Each way is the gradient of the other, so that
    nothing is added where it may meet, which TPUs do row by row.
    """
    import jax
    import jax.numpy as jnp

    def taken(rows: Any, places: _Places, each: int = 1) -> Any:
        found = jnp.take_along_axis(rows, (places.of // each)[..., None], axis=1)
        return jnp.where(places.real[..., None], found, 0)

    @jax.custom_vjp
    def there(x: Any, pairs: _Places, slots: _Places) -> Any:
        return taken(x, pairs, count)

    @jax.custom_vjp
    def back(rows: Any, pairs: _Places, slots: _Places) -> Any:
        return taken(rows, slots)

    def there_gradient(kept: tuple[_Places, _Places], of: Any) -> tuple[Any, None, None]:
        found = taken(of, kept[1])
        return found.reshape(found.shape[0], -1, count, found.shape[-1]).sum(2), None, None

    there.defvjp(lambda x, pairs, slots: (there(x, pairs, slots), (pairs, slots)), there_gradient)
    back.defvjp(
        lambda rows, pairs, slots: (back(rows, pairs, slots), (pairs, slots)),
        lambda kept, of: (taken(of, kept[0]), None, None),
    )
    return lambda x: there(x, pairs, slots), lambda rows: back(rows, pairs, slots)


def _activated(gate: Any | None, up: Any) -> Any:
    import jax

    return jax.nn.gelu(up) if gate is None else jax.nn.silu(gate) * up


def product(equation: str, left: Any, weight: Any) -> Any:
    """An einsum with a parameter, in the dtype of its other operand, counted as a matmul."""
    import jax.numpy as jnp

    inputs, out = equation.split("->")
    sizes = dict(zip(inputs.replace(",", ""), (*left.shape, *weight.shape), strict=True))
    contracted = math.prod(size for letter, size in sizes.items() if letter not in out)
    _flops.record_matmul([sizes[letter] for letter in out], contracted)
    return jnp.einsum(equation, left, weight.astype(left.dtype))
