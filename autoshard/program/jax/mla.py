"""Multi-head latent attention (MLA): keys, values and optionally queries are projected from a latent vector.

DeepSeek-V2, section 2.1 (arXiv 2405.04434). In training its heads differ from plain ones in two ways. Values are
narrower than queries and keys, and the rotary part of the key is shared by all heads.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from autoshard.program.moe.decoder_experts import product


@dataclasses.dataclass(frozen=True, slots=True)
class LatentDims:
    """Sizes of latent attention."""

    key_rank: int
    """Width of the latent vector from which keys and values of all heads are projected."""
    nope_size: int
    """Size of the part of a head's query and key without position embedding (nope)."""
    rope_size: int
    """Size of the part with rotary position embedding (rope)."""
    value: int
    """Size of a head's values."""
    query_rank: int = 0
    """Width of the latent vector of queries; 0 if queries are projected from the token directly."""

    @property
    def head_size(self) -> int:
        """Size of a head's query and key."""
        return self.nope_size + self.rope_size


class LatentHeads(Protocol):
    """The dims of a decoder that latent attention needs."""

    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...


def latent_shapes(dims: LatentHeads, own: LatentDims) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a layer's latent attention, by name.

    Queries have one matrix, or with `query_rank` a projection down, a norm and a projection up.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "attn.kv_down.weight": (dims.width, own.key_rank + own.rope_size),
        "attn.kv_norm.weight": (own.key_rank,),
        "attn.kv_up.weight": (own.key_rank, dims.heads, own.nope_size + own.value),
        "attn.o_proj.weight": (dims.heads, 1, own.value, dims.width),
    }
    if not own.query_rank:
        return shapes | {"attn.q_proj.weight": (dims.width, dims.heads, own.head_size)}
    return shapes | {
        "attn.q_down.weight": (dims.width, own.query_rank),
        "attn.q_norm.weight": (own.query_rank,),
        "attn.q_up.weight": (own.query_rank, dims.heads, own.head_size),
    }


def latent_heads(
    own: LatentDims,
    x: Any,
    weights: Mapping[str, Any],
    norm: Callable[[Any, Any], Any],
    rotated: Callable[[Any], Any],
) -> tuple[Any, Any, Any]:
    """Return queries and keys [B, H, S, nope + rope] and values [B, H, S, value] of normed tokens `x` [B, S, D].

    The rotary part of the key is computed once and broadcast to all heads.

    - `weights`: parameters of the layer by name.
    - `norm`: function of a value and the norm's scale.
    - `rotated`: function that applies the rotary position embedding to [..., S, rope].
    """
    import jax.numpy as jnp

    if own.query_rank:
        narrow = norm(product("bsd,dr->bsr", x, weights["attn.q_down.weight"]), weights["attn.q_norm.weight"])
        query = product("bsr,rkh->bksh", narrow, weights["attn.q_up.weight"])
    else:
        query = product("bsd,dkh->bksh", x, weights["attn.q_proj.weight"])
    query = jnp.concatenate([query[..., : own.nope_size], rotated(query[..., own.nope_size :])], axis=-1)
    down = product("bsd,dr->bsr", x, weights["attn.kv_down.weight"])
    latent = norm(down[..., : own.key_rank], weights["attn.kv_norm.weight"])
    rotary_key = rotated(down[:, None, :, own.key_rank :])
    up = product("bsr,rkh->bksh", latent, weights["attn.kv_up.weight"])
    shape = (*up.shape[:3], own.rope_size)
    key = jnp.concatenate([up[..., : own.nope_size], jnp.broadcast_to(rotary_key, shape)], axis=-1)
    return query, key, up[..., own.nope_size :]
