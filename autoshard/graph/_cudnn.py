"""Sharding rules of cuDNN's fused attention, as JAX and XLA call it.

Targets, operands, results and configuration as in jax/_src/cudnn/fused_attention_stablehlo.py (jax 0.10.2): queries,
keys and values are `[b t n h]` or `[b n t h]`, which the dims of the matmuls in the configuration tell; what the call
makes of them is always `[b n t h]`, and the sums of its softmax `[b n t]`.
"""

import json
from collections.abc import Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.graph._records import Tensor
from autoshard.rules import CallRule, bind, parse_call_rule


_PREFIX, _BACKWARD, _BIAS, _EIGHT_BITS = "__cudnn$fmha", "Backward", "Bias", "F8"


def is_cudnn_attention(target: str) -> bool:
    return target.startswith(_PREFIX)


def cudnn_rule(target: str, config: str, operands: Sequence[Tensor], results: Sequence[Tensor]) -> CallRule | None:
    """Batch `b`, heads of keys `k` and heads of queries for each of these `g` are split, all else stays whole.

    Flops are those of two matmuls over the scores forward and of five backward; scores never reach memory. None where
    shards would not mean the same: packed sequences, whose offsets count over batch and heads; paged keys and values,
    which the batch shares; eight-bit floats, whose largest values are results. None too for a call of another form.
    """
    fmha = _read(config)
    heads = _dim_of_heads(fmha)
    packed = int(fmha.get("max_seg_per_batch") or 1) > 1
    if heads is None or packed or fmha.get("is_paged_attention") or _EIGHT_BITS in target:
        return None
    if len(operands) < 3 or any(len(t.shape) != 4 for t in operands[:3]):
        return None

    def laid(head: str, row: str, channel: str) -> str:
        return f"b {head} {row} {channel}" if heads == 1 else f"b {row} {head} {channel}"

    queries, keys, values = laid("(k g)", "s", "h"), laid("k", "t", "h"), laid("k", "t", "v")
    mixed, sums = "b (k g) s v", "b (k g) s"
    takes = [queries, keys, values]
    bias: list[str] = []
    if target.endswith(_BACKWARD):
        takes += [sums, laid("(k g)", "s", "v")]
        if _BIAS in target and len(operands) > 5:
            bias = [_bias(operands[5].shape)]
        takes += [*bias, laid("(k g)", "s", "v")]
        gives = ["b (k g) s h", "b k t h", "b k t v"]
        gives += bias if len(results) == 5 else []
        flops = "6 b k g s t h + 4 b k g s t v"
    else:
        if _BIAS in target and len(operands) > 3:
            bias = [_bias(operands[3].shape)]
        takes += bias
        gives = [mixed, sums] if len(results) == 3 else [mixed]
        flops = "2 b k g s t h + 2 b k g s t v"
    takes += ["b"] * (len(operands) - len(takes))  # lengths of sequences
    gives += ["workspace"] * (len(results) - len(gives))
    text = ", ".join(takes) + " -> " + ", ".join(gives)
    whole = ["s", "t", "h", "v", "workspace"]
    if bias and len(gives) == 5:  # the bias's gradient is summed over what the bias lacks
        whole += [factor for factor in ("b", "k", "g") if factor not in bias[0]]
    shared = operands[0].shape[heads] // max(1, operands[1].shape[heads])
    words = set(text.replace("(", " ").replace(")", " ").replace(",", " ").split())
    rule = parse_call_rule(
        target, text, need_replication=[w for w in whole if w in words], sizes={"g": shared}, flops=flops
    )
    try:
        bind(rule, [t.shape for t in operands], [t.shape for t in results])
    except UserError:
        return None
    return rule


def _read(config: str) -> dict[str, Any]:
    try:
        read = json.loads(config)
    except json.JSONDecodeError:
        return {}
    return read.get("cudnn_fmha_backend_config", {}) if isinstance(read, dict) else {}


def _dim_of_heads(fmha: dict[str, Any]) -> int | None:
    """The dim of heads in queries and keys: the second that the first matmul with one on its right side loops over."""
    for matmul in ("bmm1", "bmm1_grad_gemm1"):
        dims = fmha.get(f"{matmul}_dot_dimension_numbers", {}).get("rhs_batch_dimensions", ())
        if [str(d) for d in dims] in (["0", "1"], ["0", "2"]):
            return int(dims[1])
    return None


def _bias(shape: Sequence[int]) -> str:
    """`[b n s t]`, with batch and heads that may be one for all."""
    if len(shape) != 4:
        return "b (k g) s t"
    return " ".join(["b" if shape[0] > 1 else "alike", "(k g)" if shape[1] > 1 else "common", "s", "t"])
