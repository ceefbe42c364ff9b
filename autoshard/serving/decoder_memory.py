"""Memory of a decoder's step by closed form: bytes of one device by kind."""

from autoshard.serving.decoder_counts import Decoder
from autoshard.serving.decoder_step import Layout, StepAsked


def kv_parts(decoder: Decoder, layout: Layout) -> int:
    """Return the number of parts of a sequence's keys and values; devices beyond the heads have copies.

    The cache of latent attention has no heads, so all devices have a full copy.
    """
    return 1 if decoder.latent is not None else min(layout.heads, decoder.kv_heads)


def _widths(decoder: Decoder) -> dict[str, int]:
    """Return the elements for one token of each intermediate of a layer; those of experts in all active ones."""
    widths = decoder.activation_widths()
    if decoder.experts > 1:
        inner = (decoder.active_experts + decoder.shared_experts) * decoder.expert_inner
        widths |= {name: inner for name in ("gate", "up", "product") if name in widths}
    return widths


def saved_bytes(decoder: Decoder, asked: StepAsked, layout: Layout) -> float:
    """Return the bytes of what one device saves for the backward pass."""
    widths = _widths(decoder)
    # Policy -> intermediates that are saved; `dots` recomputes norms and the gated product.
    saved = {
        "full": ("input",),
        "dots": tuple(set(widths) - {"normed", "mlp_normed", "product"}),
        "none": tuple(widths),
    }[asked.remat]
    layers, tokens = decoder.layers + decoder.ahead, asked.tokens // layout.data
    return 2.0 * layers * tokens / layout.model * sum(widths[name] for name in saved)


def step_bytes(decoder: Decoder, asked: StepAsked, layout: Layout, sequences: float) -> dict[str, float]:
    """Return the bytes of one device by kind; a kind that the step lacks is absent.

    Training splits parameters, moments and gradients over all devices, and scoring parameters. Other steps have a copy
    of the parameters for each `data`. Only `prefill` and `decode` have a cache, of all sequences at `seq` tokens, or at
    `room`.

    - `sequences`: those of one group in attention.
    """
    model, tokens = layout.model, asked.tokens // layout.data
    parts = model * (layout.data if asked.shards_weights else 1)
    # Each group has all attention weights. Embedding and head are stored in at least two bytes.
    ends = (1 if decoder.tied else 2) * decoder.vocabulary * decoder.width
    attention = (decoder.layers + decoder.ahead) * decoder.attention_params
    repeated = (layout.groups - 1) * attention
    stored = asked.param_bytes * (decoder.params - ends + repeated) + max(2.0, asked.param_bytes) * ends
    sizes = {"parameters": stored / parts}
    columns = decoder.vocabulary / model
    widths = _widths(decoder)
    layer = 2.0 * tokens / model * sum(widths.values())
    if asked.training:
        sizes["optimizer state"] = 2 * asked.state_bytes * decoder.params / parts
        sizes["gradients"] = asked.param_bytes * decoder.params / parts
        layers, sizes["saved"] = decoder.layers + decoder.ahead, saved_bytes(decoder, asked, layout)
        # Gathered parameters in 16 bits: those of a layer, and of the next one in advance.
        gathered = 2.0 * 2.0 * decoder.params / layers / model if layout.data > 1 else 0.0
        # Logits and their gradient are live between the last layer and its backward pass, not during a layer.
        sizes["temporaries"] = max(layer + gathered, 4.0 * tokens * columns)
        return sizes
    if asked.kind in ("prefill", "decode"):
        stored_tokens = sequences * max(asked.seq, asked.room)
        sizes["cache"] = decoder.kv_bytes(stored_tokens, asked.cache_bytes) / kv_parts(decoder, layout)
    rows = tokens if asked.kind in ("infer", "score") else asked.batch / layout.data
    sizes["temporaries"] = layer + 4.0 * rows * columns
    return sizes
