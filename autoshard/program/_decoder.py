"""A training step of a decoder from its dims alone: layers scanned, rematerialised as named, attention as one kernel.

For checks against published runs, which name a model by its dims and say what they saved for the backward pass.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.program import _flops, _train
from autoshard.program._attention import attend
from autoshard.program._kernels import KernelBlocks, flash_attention, splash_attention
from autoshard.program._program import Program, Role
from autoshard.program._trace import trace


_PROJECTIONS = ("query", "key", "value", "out")

SAVED: Mapping[str, tuple[str, ...]] = {
    "full": (),
    "minimal": (*_PROJECTIONS, "gate", "up", "down"),
    "minimal_with_context": (*_PROJECTIONS, "context", "gate", "up", "down"),
    "save_dot_except_mlpwi": (*_PROJECTIONS, "down"),
    "save_dot_except_mlp": _PROJECTIONS,
    "save_qkv_proj": ("query", "key", "value"),
    "qkv_proj_offloaded": ("query", "key", "value"),
    "custom": _PROJECTIONS,
    "custom offload": _PROJECTIONS,
}
"""Rematerialisation by MaxText's names -> values that a layer keeps beside its input (`MaxText/layers/decoders.py`).

Where they are kept, on the device or on its host, changes no matmul. `none` keeps everything.
"""


SAVABLE = (*_PROJECTIONS, "context", "gate", "up", "down")
"""Values of a layer that rematerialisation may keep."""

ATTENTIONS = ("flash", "splash", "plain")


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderDims:
    """What the model is: layers, width, MLP width, query heads, key/value heads, head size, vocabulary.

    `gated` MLPs have three matrices, others two; `tied` models use one matrix for embedding and head. One layer in
    `global_every` attends to everything, the others to the last `window` tokens (None: all to everything).
    `autoshard.cost.Decoder` counts what such a model computes and holds.
    """

    layers: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    window: int | None = None
    global_every: int = 1


def decoder_program(
    dims: DecoderDims,
    *,
    batch: int,
    seq: int,
    remat: str = "full",
    saves: Collection[str] | None = None,
    attention: str = "flash",
    blocks: KernelBlocks | None = None,
    optimizer: str = "adamw",
    compute: str = "bfloat16",
    weights: str = "float32",
    state: str = "float32",
    name: str = "decoder",
) -> Program:
    """One training step of `batch` sequences of `seq` tokens: by default bf16 compute on f32 parameters and moments.

    `compute` is the dtype that layers compute in, `weights` that of parameters, `state` that of `optimizer`'s moments.

    `attention` is `flash`, one kernel that can be planned and priced but neither run nor compiled (`flash_attention`);
    `splash`, jax's kernel for TPUs; or `plain`, scores in full. `remat` is `none` or a key of `SAVED`, of which `saves`
    may say otherwise what a layer keeps beside its input; `blocks` are those of a `flash` kernel.
    Raises: UserError for an unknown `remat`, value to save or `attention`, or layers or heads that do not divide.
    """
    import jax

    if attention not in ATTENTIONS:
        raise UserError(f"attention {attention!r} is not known; known are {', '.join(ATTENTIONS)}")
    if remat != "none" and remat not in SAVED:
        raise UserError(f"remat {remat!r} is not known; known are none, {', '.join(SAVED)}")
    kept = SAVED.get(remat) if saves is None else tuple(saves)
    unknown = sorted(set(kept or ()) - set(SAVABLE))
    if unknown:
        raise UserError(f"a decoder layer has no value {unknown[0]!r} to save; it has {', '.join(SAVABLE)}")
    if dims.layers % dims.global_every or dims.heads % dims.kv_heads:
        raise UserError(
            f"decoder: {dims.layers} layers in groups of {dims.global_every}, {dims.heads} heads in groups of "
            f"{dims.kv_heads} key-value heads; both must divide"
        )
    params = _parameters(dims, weights)
    data = {key: jax.ShapeDtypeStruct((batch, seq), "int32") for key in ("input_ids", "labels")}
    rule = _train.make_optimizer(optimizer, state)
    forward_flops = [0.0]

    def loss(p: Any, given: Any) -> Any:
        with _flops.counting() as scope:
            logits = _forward(dims, p, given["input_ids"], kept, attention, blocks, compute)
            value = _train.token_loss(logits, given["labels"])
        forward_flops[0] = scope[0]
        return value

    program = trace(
        _train.training_step(loss, rule),
        (params, jax.eval_shape(rule.init, params), data),
        name=name,
        donate_argnums=(0, 1),
        roles=lambda text: Role.PARAMETER if text in params else Role.BATCH if text.startswith("batch.") else None,
        training=True,
        arg_names=("", "optimizer", "batch"),
        tokens=batch * seq,
    )
    return dataclasses.replace(program, model_flops=3.0 * forward_flops[0])


def _parameters(dims: DecoderDims, dtype: str) -> dict[str, Any]:
    """Parameters by name; those of a layer are stacked [groups, layers in a group, ...]."""
    import jax

    width, size, group = dims.width, dims.head_size, dims.heads // dims.kv_heads
    layer = {
        "input_norm.weight": (width,),
        "attn.q_proj.weight": (width, dims.kv_heads, group, size),
        "attn.k_proj.weight": (width, dims.kv_heads, size),
        "attn.v_proj.weight": (width, dims.kv_heads, size),
        "attn.o_proj.weight": (dims.kv_heads, group, size, width),
        "mlp_norm.weight": (width,),
        "mlp.up_proj.weight": (width, dims.mlp_width),
        "mlp.down_proj.weight": (dims.mlp_width, width),
    }
    if dims.gated:
        layer["mlp.gate_proj.weight"] = layer["mlp.up_proj.weight"]
    groups = dims.layers // dims.global_every
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (dims.vocabulary, width), "norm.weight": (width,)}
    if not dims.tied:
        shapes["lm_head.weight"] = (width, dims.vocabulary)
    for offset in range(dims.global_every):
        prefix = "layers" if dims.global_every == 1 else f"layers.{offset}"
        shapes |= {f"{prefix}.*.{key}": (groups, *shape) for key, shape in layer.items()}
    return {key: jax.ShapeDtypeStruct(shape, dtype) for key, shape in shapes.items()}


def _forward(
    dims: DecoderDims,
    params: Mapping[str, Any],
    ids: Any,
    kept: Sequence[str] | None,
    attention: str,
    blocks: KernelBlocks | None,
    compute: str,
) -> Any:
    import jax
    import jax.numpy as jnp

    hidden = jnp.take(params["embed_tokens.weight"].astype(compute), ids, axis=0)
    prefixes = ["layers"] if dims.global_every == 1 else [f"layers.{k}" for k in range(dims.global_every)]
    stacks = [
        {key.removeprefix(f"{prefix}.*."): value for key, value in params.items() if key.startswith(f"{prefix}.*.")}
        for prefix in prefixes
    ]
    # The last layer of a group is the one that sees everything.
    windows = [dims.window if k < dims.global_every - 1 else None for k in range(dims.global_every)]

    def layers(carried: Any, own: Sequence[Mapping[str, Any]]) -> tuple[Any, None]:
        for weights, window in zip(own, windows, strict=True):
            run = functools.partial(_layer, dims, window=window, attention=attention, blocks=blocks)
            carried = _kept(run, kept)(carried, weights)
        return carried, None

    with _flops.counting() as scope:
        hidden, _ = jax.lax.scan(layers, hidden, stacks)
    _flops.record(scope[0] * dims.layers // dims.global_every)
    hidden = _norm(hidden, params["norm.weight"])
    head = params["embed_tokens.weight"].T if dims.tied else params["lm_head.weight"]
    return _product("bsd,dv->bsv", hidden, head)


def _kept(layer: Callable[..., Any], kept: Sequence[str] | None) -> Callable[..., Any]:
    import jax

    if kept is None:
        return layer
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*kept))


def _layer(
    dims: DecoderDims,
    hidden: Any,
    weights: Mapping[str, Any],
    *,
    window: int | None,
    attention: str,
    blocks: KernelBlocks | None,
) -> Any:
    import jax
    from jax.ad_checkpoint import checkpoint_name

    normed = _norm(hidden, weights["input_norm.weight"])
    query = checkpoint_name(_product("bsd,dkgh->bkgsh", normed, weights["attn.q_proj.weight"]), "query")
    key = checkpoint_name(_product("bsd,dkh->bksh", normed, weights["attn.k_proj.weight"]), "key")
    value = checkpoint_name(_product("bsd,dkh->bksh", normed, weights["attn.v_proj.weight"]), "value")
    query, key = _rotated(query), _rotated(key)
    if attention != "plain":
        kernel = functools.partial(flash_attention, blocks=blocks) if attention == "flash" else splash_attention
        mixed = kernel(query, key, value, causal=True, window=window)
    else:
        shape = query.shape
        merged = query.reshape(shape[0], shape[1] * shape[2], *shape[3:])
        plain = attend(merged, key, value, causal=True, window=window)
        mixed = plain.reshape(shape[0], shape[3], shape[1], shape[2], shape[4]).transpose(0, 2, 3, 1, 4)
    mixed = checkpoint_name(mixed, "context")
    out = _product("bkgsh,kghd->bsd", mixed, weights["attn.o_proj.weight"])
    hidden = hidden + checkpoint_name(out, "out")
    normed = _norm(hidden, weights["mlp_norm.weight"])
    up = checkpoint_name(_product("bsd,df->bsf", normed, weights["mlp.up_proj.weight"]), "up")
    if dims.gated:
        gate = checkpoint_name(_product("bsd,df->bsf", normed, weights["mlp.gate_proj.weight"]), "gate")
        inner = jax.nn.silu(gate) * up
    else:
        inner = jax.nn.gelu(up)
    return hidden + checkpoint_name(_product("bsf,fd->bsd", inner, weights["mlp.down_proj.weight"]), "down")


def _product(equation: str, left: Any, weight: Any) -> Any:
    """An einsum with a parameter, in the other operand's dtype, counted as a matmul."""
    import math

    import jax.numpy as jnp

    inputs, out = equation.split("->")
    sizes = dict(zip(inputs.replace(",", ""), (*left.shape, *weight.shape), strict=True))
    contracted = math.prod(size for letter, size in sizes.items() if letter not in out)
    _flops.record_matmul([sizes[letter] for letter in out], contracted)
    return jnp.einsum(equation, left, weight.astype(left.dtype))


def _norm(x: Any, weight: Any) -> Any:
    import jax
    import jax.numpy as jnp

    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * scale * weight).astype(x.dtype)


def _rotated(x: Any) -> Any:
    """Rotary position embedding of [..., S, H]: pairs (k, k + H/2) turned by an angle that grows with s."""
    import jax
    import jax.numpy as jnp

    half = x.shape[-1] // 2
    place = jax.lax.broadcasted_iota(jnp.float32, (x.shape[-2], half), 0)
    pair = jax.lax.broadcasted_iota(jnp.float32, (x.shape[-2], half), 1)
    angle = place * jnp.exp(pair * (-jnp.log(10000.0) / half))
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
