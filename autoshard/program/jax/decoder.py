"""A training step of a decoder from its dims alone: scanned layers, a named remat policy, attention kernels.

It serves comparisons with published runs, which give a model's dims and the values saved for the backward pass.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.program import model_flops as flop_counter
from autoshard.program.jax import optimizers, train_step
from autoshard.program.jax.decoder_dims import DecoderDims, layer_groups, parameters_of, stacks_of
from autoshard.program.jax.layer_stack import Pipeline, check_pipeline, in_stages, run_stack
from autoshard.program.jax.mla import latent_heads
from autoshard.program.jax.trace import trace
from autoshard.program.kernels.dot_attention import attend
from autoshard.program.kernels.eight_bits import EightBits, in_eight_bits
from autoshard.program.kernels.flash_attention import KernelBlocks, flash_attention
from autoshard.program.kernels.grouped_kernels import GroupedKernels
from autoshard.program.kernels.ring_attention import ring_attention
from autoshard.program.kernels.splash_attention import splash_attention
from autoshard.program.moe.decoder_experts import Routing, product, routed
from autoshard.program.moe.experts import parse_experts
from autoshard.program.program_record import Program, Role
from autoshard.program.source_choices import check_exchange_name


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
"""Remat policies by MaxText's names -> values that a layer saves in addition to its input.

The names are those of `MaxText/layers/decoders.py`. Storing the values on the device or on its host changes no matmul.
`none` saves everything.
"""


SAVABLE = (*_PROJECTIONS, "context", "gate", "up", "down")
"""Values of a layer that a remat policy may save."""

_WEIGHTS = "weights"
"""Name of a layer's weights in the form that its matmuls consume."""

ATTENTIONS = ("flash", "splash", "plain")
"""Kernels of attention (`decoder_program`)."""
ROUTINGS = ("dropless", "capacity", "kernels")
"""Routings of experts in addition to the sorted and ragged forms of `parse_experts`."""


def decoder_program(
    dims: DecoderDims,
    *,
    batch: int,
    seq: int,
    remat: str = "full",
    saves: Collection[str] | None = None,
    attention: str = "flash",
    exchange: str = "auto",
    balanced: bool = False,
    blocks: KernelBlocks | None = None,
    optimizer: str = "adamw",
    name: str = "decoder",
    routing: str = "dropless",
    capacity_factor: float = 1.0,
    expert_kernels: GroupedKernels | None = None,
    accumulation: int = 1,
    moments: str | tuple[str, str] = "float32",
    compute_dtype: str = "bfloat16",
    weights: str = "float32",
    gradients: str | None = None,
    offloads: Collection[str] = (),
    stack_axis: int = 0,
    scanned: bool = True,
    gathered_on: Any = None,
    gradient_groups: int = 1,
    whole_on: Any = None,
    pipeline: Pipeline | None = None,
    quantize: EightBits | None = None,
) -> Program:
    """Return one training step of `batch` sequences of `seq` tokens; by default bf16 compute, f32 state.

    Its `model_flops` are three times those of the forward pass: recomputation does not count.

    - `remat`: `none` or a key of `SAVED`. `saves` replaces the values of that key that a layer saves in addition to
      its input; with `saves`, `none` recomputes all else too.
    - `offloads`: values that a layer stores in its host's memory, from `SAVABLE` or `input`, saved ones or others.
    - `attention`: `flash`, `splash` (jax's kernel for TPUs), or `plain`, which materialises all scores. `flash` can
      be planned and priced but neither run nor compiled (`flash_attention`).
    - `exchange`: exchange of attention if a plan splits the sequence, one of `EXCHANGES`.
    - `balanced`: True if tokens are in zig-zag order, so that all parts of a sequence have equal work. The `flash`
      kernel is priced accordingly.
    - `blocks`: block sizes of the attention kernels.
    - `optimizer`: name of the optimizer, as `optimizers.make_optimizer` reads it; `name`: name of the program.
    - `routing`: exchange of the experts' tokens, see below; `capacity_factor` and `expert_kernels` belong to it.
    - `accumulation`: number of microbatches, computed in sequence. Their gradients and losses are averaged.
    - `compute_dtype`: dtype in which layers compute.
    - `weights`: dtype of the parameters.
    - `moments`: dtype of the optimizer's moments, or a pair for the first and second ones.
    - `gradients`: dtype to which gradients are rounded for the optimizer; None to leave them unchanged.
    - `stack_axis`: dim of stacked parameters that counts layers, 0 or 1.
    - `scanned`: False to unroll the layers, each with its own parameters.
    - `gathered_on`: a `jax.sharding.AbstractMesh` on which a layer's weights are gathered once, in `compute_dtype`. The
      gathered weights are saved for the backward pass. On a mesh with an axis `model` those of attention and MLP stay
      split over it, and the partitioner chooses the sharding of others. None for no constraint.
    - `gradient_groups`: number of parts of a microbatch with separate gradients until all microbatches are done.
    - `whole_on`: abstract mesh on which every device then has the averages whole; None for no constraint.
    - `pipeline`: stages made from the layers, except the first dense ones of a model with experts. Each of the
      `accumulation` microbatches passes through the stages in parts.
    - `quantize`: form in which layers multiply with weights, except for those of experts; None for `compute_dtype`.

    Routings of experts:

    - `dropless`: all tokens are sorted and multiplied by group (`jax.lax.ragged_dot`).
    - `kernels`: the tokens of each sequence are sorted. Grouped matmuls by `expert_kernels` can be planned and priced
      only.
    - `capacity`: each expert has `capacity_factor` times its mean number of tokens as slots in every sequence.
      Further tokens are dropped. With a factor of 1 the matmuls are those of a dropless run whose devices sort their
      own tokens.
    - `sorted`: the tokens of each sequence are sorted, in `sorted:8` into 8 groups of experts; none is dropped.
    - `ragged:8`: the form of that name of `parse_experts`.

    Raises `UserError` for an unknown `remat`, `attention` or `routing`, and for an unknown value to save or offload.
    Sizes that do not divide, and more active experts or dense layers than there are, raise it too. So do a
    `stack_axis` other than 0 and 1, and latent attention with unequal numbers of heads and key-value heads. Offloads
    without remat, and a pipeline with `gathered_on` or unrolled layers, raise it too.
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
    away = tuple(offloads)
    unknown = sorted(set(away) - {*SAVABLE, "input"})
    if unknown:
        raise UserError(f"a decoder layer has no value {unknown[0]!r} to offload; it has input, {', '.join(SAVABLE)}")
    if away and kept is None:
        raise UserError("with remat 'none' nothing can be offloaded; use full or what saves fewer values")
    if kept is not None:
        kept = tuple(key for key in kept if key not in away)
    if accumulation < 1 or batch % accumulation:
        raise UserError(f"a batch of {batch} sequences does not divide into {accumulation} microbatches")
    if gradient_groups < 1 or batch // accumulation % gradient_groups:
        raise UserError(
            f"a microbatch of {batch // accumulation} sequences does not divide into {gradient_groups} groups"
        )
    if routing not in ROUTINGS:
        _check_groups(routing, dims.experts)
    if dims.latent is not None and dims.kv_heads != dims.heads:
        raise UserError(f"decoder: {dims.kv_heads} key-value heads for {dims.heads} heads of latent attention")
    if dims.fused_qkv and (dims.kv_heads != dims.heads or dims.latent is not None or dims.qk_norm):
        raise UserError("decoder: a fused projection has as many key-value heads as heads, neither latent nor normed")
    if dims.active_experts > dims.experts or not 0 <= dims.dense_layers <= dims.layers:
        raise UserError(
            f"decoder: {dims.active_experts} of {dims.experts} experts, {dims.dense_layers} of {dims.layers} layers "
            "dense; neither may be more than there are"
        )
    own = dims.layers - dims.dense_layers
    if own % dims.global_every or dims.heads % dims.kv_heads:
        raise UserError(
            f"decoder: {own} layers in groups of {dims.global_every}, {dims.heads} heads in groups of "
            f"{dims.kv_heads} key-value heads; both must divide"
        )
    if stack_axis not in (0, 1):
        raise UserError(f"stack_axis is {stack_axis}, expected 0 or 1: every stacked parameter has two dims")
    if pipeline is not None and (gathered_on is not None or not scanned):
        raise UserError("the layers of a pipeline are scanned, and their weights are gathered as the plan says")
    groups = layer_groups(dims, "layers")
    if pipeline is not None:
        check_pipeline(pipeline, groups, "the decoder")
    params = parameters_of(dims, weights, stack_axis, scanned, 0 if pipeline is None else pipeline.outside(groups))
    data = {key: jax.ShapeDtypeStruct((batch, seq), "int32") for key in ("input_ids", "labels")}
    rule = optimizers.make_optimizer(optimizer, moments)
    forward_flops = [0.0]
    mix = Routing(routing, capacity_factor, expert_kernels or GroupedKernels())
    how = _LayerOptions(
        kept, away, attention, check_exchange_name(exchange), balanced, blocks, mix, compute_dtype, stack_axis, scanned,
        gathered_on, pipeline, quantize,
    )  # fmt: skip

    def loss(p: Any, given: Any) -> Any:
        with flop_counter.counting() as scope:
            value = _loss(dims, p, given, how)
        forward_flops[0] = scope[0] * accumulation * gradient_groups
        return value

    program = trace(
        train_step.training_step(
            loss,
            rule,
            accumulation=accumulation,
            gradient_groups=gradient_groups,
            whole_on=whole_on,
            gradients=gradients,
        ),
        (params, jax.eval_shape(rule.init, params), data),
        name=name,
        donate_argnums=(0, 1),
        roles=lambda text: Role.PARAMETER if text in params else Role.BATCH if text.startswith("batch.") else None,
        training=True,
        arg_names=("", "optimizer", "batch"),
        tokens=batch * seq,
    )
    program = dataclasses.replace(program, model_flops=3.0 * forward_flops[0], exchange=exchange)
    return in_stages(program, (groups,) if scanned else (), pipeline)


def _check_groups(routing: str, experts: int) -> None:
    """Raise `UserError` for an unknown routing, or one whose groups do not divide the experts."""
    known = routing.startswith(("sorted", "ragged"))
    form = parse_experts(routing) if known else None
    if form is None:
        raise UserError(
            f"routing {routing!r} is not known; known are {', '.join(ROUTINGS)}, sorted, sorted:8 and ragged:8"
        )
    if experts % form.groups:
        raise UserError(f"decoder: {experts} experts do not divide into the {form.groups} groups of {routing!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class _LayerOptions:
    """The way a layer computes: the values that it saves and offloads, its kernels and its routing.

    Fields without a note are arguments of `decoder_program`.
    """

    saved: tuple[str, ...] | None
    """Values that a layer saves in addition to its input; None for all values."""
    offloaded: tuple[str, ...]
    """Values that a layer offloads to its host."""
    attention: str
    exchange: str
    balanced: bool
    blocks: KernelBlocks | None
    routing: Routing
    compute_dtype: str
    stack_axis: int
    scanned: bool
    gathered_on: Any
    pipeline: Pipeline | None = None
    quantize: EightBits | None = None


_AHEAD = 0.1
"""Weight of the losses of tokens after the next one, relative to that of the next token."""


def _loss(dims: DecoderDims, params: Mapping[str, Any], given: Mapping[str, Any], how: _LayerOptions) -> Any:
    """Return the mean loss of the next tokens, plus `_AHEAD` times the mean loss of the layers that look further ahead.

    `given` has `input_ids` and `labels` [B, S]. The labels of a further layer are rolled by one more token, so the last
    ones wrap around.
    """
    import jax.numpy as jnp

    hidden, labels = _hidden(dims, params, given["input_ids"], how), given["labels"]
    value = train_step.token_loss(_logits(dims, params, hidden), labels)
    for number in range(dims.ahead):
        hidden = _joined(dims, hidden, labels, params, f"ahead.{number}.", how)
        labels = jnp.roll(labels, -1, axis=1)
        value = value + _AHEAD / dims.ahead * train_step.token_loss(_logits(dims, params, hidden), labels)
    return value


def _joined(
    dims: DecoderDims, hidden: Any, ids: Any, params: Mapping[str, Any], prefix: str, how: _LayerOptions
) -> Any:
    """Return hidden states of a layer that looks ahead, from the previous ones and the tokens that they predict.

    As in MaxText, nothing of such a layer is recomputed.
    """
    import jax.numpy as jnp

    weights = _own(params, prefix)
    embedded = jnp.take(params["embed_tokens.weight"].astype(how.compute_dtype), ids, axis=0)
    both = [_norm(embedded, weights["embed_norm.weight"]), _norm(hidden, weights["hidden_norm.weight"])]
    mixed = product("bsd,dw->bsw", jnp.concatenate(both, axis=-1), weights["join_proj.weight"])
    return _layer(dims, mixed, weights, window=None, how=dataclasses.replace(how, offloaded=()))


def _logits(dims: DecoderDims, params: Mapping[str, Any], hidden: Any) -> Any:
    """Return the logits [B, S, V] of hidden states [B, S, D]: the last norm, then the head or the tied embedding."""
    head = params["embed_tokens.weight"].T if dims.tied else params["lm_head.weight"]
    return product("bsd,dv->bsv", _norm(hidden, params["norm.weight"]), head)


def _hidden(dims: DecoderDims, params: Mapping[str, Any], ids: Any, how: _LayerOptions) -> Any:
    """Return the hidden states [B, S, D] of `ids` [B, S] after all layers: the dense ones first, then the others.

    The last norm and layers that look ahead are left out.
    """
    import jax.numpy as jnp

    hidden = jnp.take(params["embed_tokens.weight"].astype(how.compute_dtype), ids, axis=0)
    if dims.dense_layers:
        hidden = _layers(dims, hidden, params, ["dense_layers"], how)
    prefixes = ["layers"] if dims.global_every == 1 else [f"layers.{k}" for k in range(dims.global_every)]
    if dims.layers > dims.dense_layers:
        hidden = _layers(dims, hidden, params, prefixes, how)
    return hidden


def _layers(
    dims: DecoderDims, hidden: Any, params: Mapping[str, Any], prefixes: Sequence[str], how: _LayerOptions
) -> Any:
    """Apply groups of layers in sequence; each layer of a group has its own prefix of parameter names.

    The result is the hidden states. Layers are unrolled, scanned, or a pipeline; the dense layers are never a pipeline.
    The last layer of a group has no window.
    """
    import jax.numpy as jnp

    # The last layer of a group attends to all tokens.
    windows = [None if k == len(prefixes) - 1 else dims.window for k in range(len(prefixes))]

    def group(carried: Any, own: Sequence[Mapping[str, Any]]) -> tuple[Any, None]:
        for weights, window in zip(own, windows, strict=True):
            run = functools.partial(_layer, dims, window=window, how=how)
            with in_eight_bits(how.quantize):
                carried = _kept(run, how)(carried, weights)
        return carried, None

    if not how.scanned:
        for number in range(layer_groups(dims, prefixes[0])):
            hidden, _ = group(hidden, [_own(params, f"{prefix}.{number}.") for prefix in prefixes])
        return hidden
    pipeline = None if prefixes == ["dense_layers"] else how.pipeline
    count = layer_groups(dims, prefixes[0])
    outside = 0 if pipeline is None else pipeline.outside(count)
    starts = [stacks_of(prefix, count, outside) for prefix in prefixes]
    for number, own in enumerate(starts[0].values()):
        stacks = [_own(params, list(each)[number]) for each in starts]
        if how.stack_axis:
            stacks = [{key: jnp.moveaxis(value, how.stack_axis, 0) for key, value in own.items()} for own in stacks]
        staged = pipeline if number == len(starts[0]) - 1 else None
        hidden = run_stack(lambda carried, own: group(carried, own)[0], stacks, hidden, staged, own, "the decoder")
    return hidden


def _own(params: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the parameters whose names start with `prefix`, without it."""
    return {key.removeprefix(prefix): value for key, value in params.items() if key.startswith(prefix)}


def _kept(layer: Callable[..., Any], how: _LayerOptions) -> Callable[..., Any]:
    """Return `layer` under `jax.checkpoint` with its policy; unchanged if the layer saves everything.

    Weights gathered on `gathered_on` are saved in addition to `how.saved`.
    """
    import jax

    if how.saved is None:
        return layer
    policies = jax.checkpoint_policies
    saved = (*how.saved, _WEIGHTS) if how.gathered_on is not None else how.saved
    if not how.offloaded:
        return jax.checkpoint(layer, policy=policies.save_only_these_names(*saved))
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(how.offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(layer, policy=policy)


def _layer(
    dims: DecoderDims, hidden: Any, weights: Mapping[str, Any], *, window: int | None, how: _LayerOptions
) -> Any:
    """Return the hidden states [B, S, D] after one layer: attention, then an MLP or experts, each added to its input.

    Experts are used if there is a router among the weights. Each part norms its input first.
    """
    import jax
    from jax.ad_checkpoint import checkpoint_name

    if how.gathered_on is not None:
        weights = {key: _gathered(key, value, how) if value.ndim > 1 else value for key, value in weights.items()}
    if "input" in how.offloaded:
        hidden = checkpoint_name(hidden, "input")
    hidden = hidden + checkpoint_name(_attended(dims, hidden, weights, window, how), "out")
    normed = _norm(hidden, weights["mlp_norm.weight"])
    if "router.weight" in weights:
        return hidden + routed(dims, normed, weights, how.routing)
    up = checkpoint_name(product("bsd,df->bsf", normed, weights["mlp.up_proj.weight"]), "up")
    if dims.gated:
        gate = checkpoint_name(product("bsd,df->bsf", normed, weights["mlp.gate_proj.weight"]), "gate")
        inner = jax.nn.silu(gate) * up
    else:
        inner = jax.nn.gelu(up)
    return hidden + checkpoint_name(product("bsf,fd->bsd", inner, weights["mlp.down_proj.weight"]), "down")


_MODEL_DIMS = {f"attn.{name}_proj.weight": 1 for name in ("q", "k", "v")} | {"attn.o_proj.weight": 0}
_MODEL_DIMS |= {"attn.qkv_proj.weight": 2}
_MODEL_DIMS |= {"mlp.gate_proj.weight": 1, "mlp.up_proj.weight": 1, "mlp.down_proj.weight": 0}
"""Dims of a layer's weights, heads or inner features, that tensor parallelism splits."""


def _gathered(name: str, weight: Any, how: _LayerOptions) -> Any:
    """Return a weight in the compute dtype, whole on every device; its gradient may be split like the parameter.

    On a mesh with an axis `model` a weight stays split over that axis, in its dim of `_MODEL_DIMS`. Weights without
    such a dim, and those that the axis does not divide, are left to the partitioner.
    `how.gathered_on` must not be None. The result is named `_WEIGHTS`, so that a remat policy can save it.
    """
    import jax
    from jax.ad_checkpoint import checkpoint_name
    from jax.sharding import NamedSharding, PartitionSpec

    parts = how.gathered_on.shape.get("model", 1)
    dims: list[Any] = [None] * weight.ndim
    if parts > 1:
        dim = _MODEL_DIMS.get(name)
        if dim is None or weight.shape[dim] % parts:
            dims = [PartitionSpec.UNCONSTRAINED] * weight.ndim
        else:
            dims[dim] = "model"
    spec = NamedSharding(how.gathered_on, PartitionSpec(*dims))

    @jax.custom_vjp  # the transpose of a sharding constraint asks the same of the gradient
    def whole(value: Any) -> Any:
        return jax.lax.with_sharding_constraint(value, spec)

    whole.defvjp(lambda value: (whole(value), None), lambda _, gradient: (gradient,))
    return checkpoint_name(whole(weight.astype(how.compute_dtype)), _WEIGHTS)


def _attended(
    dims: DecoderDims, hidden: Any, weights: Mapping[str, Any], window: int | None, how: _LayerOptions
) -> Any:
    """Return the attention of the hidden states [B, S, D], which it norms first, projected to the model's width.

    Latent attention has one query head for each key head. The result of a fused projection is saved as `query`.
    """
    from jax.ad_checkpoint import checkpoint_name

    normed = _norm(hidden, weights["input_norm.weight"])
    if dims.latent is not None:
        query, key, value = latent_heads(dims.latent, normed, weights, _norm, _rotated)
        query, key, value = (
            checkpoint_name(each, name) for each, name in zip((query, key, value), _PROJECTIONS, strict=False)
        )
        return _mixed(query[:, :, None], key, value, weights, window, how)
    if dims.fused_qkv:
        both = checkpoint_name(product("bsd,dnkh->nbksh", normed, weights["attn.qkv_proj.weight"]), "query")
        return _mixed(_rotated(both[0])[:, :, None], _rotated(both[1]), both[2], weights, window, how)
    query = checkpoint_name(product("bsd,dkgh->bkgsh", normed, weights["attn.q_proj.weight"]), "query")
    key = checkpoint_name(product("bsd,dkh->bksh", normed, weights["attn.k_proj.weight"]), "key")
    value = checkpoint_name(product("bsd,dkh->bksh", normed, weights["attn.v_proj.weight"]), "value")
    if dims.qk_norm:
        query, key = _norm(query, weights["attn.q_norm.weight"]), _norm(key, weights["attn.k_norm.weight"])
    return _mixed(_rotated(query), _rotated(key), value, weights, window, how)


def _mixed(query: Any, key: Any, value: Any, weights: Mapping[str, Any], window: int | None, how: _LayerOptions) -> Any:
    """Return attention of heads [B, K, G, S, H], [B, K, S, H], [B, K, S, E], projected to [B, S, D].

    - `weights`: parameters of the layer by name.
    - `window`: number of last tokens that a token attends to; None for all. A layer with a window uses no ring.
    """
    from jax.ad_checkpoint import checkpoint_name

    ring, blocks = how.exchange == "ring" and window is None, how.blocks or KernelBlocks()
    if ring and how.attention != "flash":
        mixed = ring_attention(query, key, value, causal=True, kernel=how.attention == "splash")
    elif how.attention == "flash":
        mixed = flash_attention(
            query, key, value, causal=True, window=window, blocks=blocks, ring=ring, balanced=how.balanced
        )
    elif how.attention == "splash":
        mixed = splash_attention(query, key, value, causal=True, window=window, blocks=blocks)
    else:
        shape = query.shape
        merged = query.reshape(shape[0], shape[1] * shape[2], *shape[3:])
        plain = attend(merged, key, value, causal=True, window=window)
        mixed = plain.reshape(shape[0], shape[3], shape[1], shape[2], value.shape[3]).transpose(0, 2, 3, 1, 4)
    if how.attention != "splash":  # splash marks its own results, also the sums that its backward pass reads
        mixed = checkpoint_name(mixed, "context")
    return product("bkgsh,kghd->bsd", mixed, weights["attn.o_proj.weight"])


def _norm(x: Any, weight: Any) -> Any:
    """Return the RMS norm of `x` over its last dim, times `weight`: computed in f32, in the dtype of `x`."""
    import jax
    import jax.numpy as jnp

    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)  # avoids a division by zero
    return (wide * scale * weight).astype(x.dtype)


def _rotated(x: Any) -> Any:
    """Return the rotary position embedding of [..., S, H], with base 10000, in the dtype of `x`.

    At position s the pair (k, k + H/2) is rotated by s * 10000^(-2k/H).
    """
    import jax
    import jax.numpy as jnp

    half = x.shape[-1] // 2
    place = jax.lax.broadcasted_iota(jnp.float32, (x.shape[-2], half), 0)
    pair = jax.lax.broadcasted_iota(jnp.float32, (x.shape[-2], half), 1)
    angle = place * jnp.exp(pair * (-jnp.log(10000.0) / half))
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
