"""cuDNN's attention of JAX (`jax.nn.dot_product_attention(implementation="cudnn")`): how it is split, its FLOPs.

Operands, static arguments and results as in jax/_src/cudnn/fused_attention_stablehlo.py (jax 0.10.2). JAX's own rule
leaves keys and values free, but runs no shards unless queries, keys and values are split alike.
"""

from collections.abc import Sequence
from typing import Any

from autoshard.rules import CallRule, bind, parse_call_rule


_PASSES = {"_dot_product_attention_fwd_impl": False, "_dot_product_attention_bwd_impl": True}
"""Names of the functions, and True for the backward pass."""
_MASK, _LAYOUT, _WINDOW = 4, 5, 6
"""Places of static arguments."""
_CAUSAL = (2, 3)
"""Masks that hide the positions to come."""
_BIAS, _LENGTHS = 3, (4, 5)


def cudnn_rule(name: str, static: Sequence[Any], operands: Sequence[Any], results: Sequence[Any]) -> CallRule | None:
    """Return the rule of a call, by the name of JAX's function: batch and heads of keys are split. None for others."""
    if name not in _PASSES:
        return None

    def laid(head: str, row: str, channel: str) -> str:
        return f"b {head} {row} {channel}" if static[_LAYOUT] else f"b {row} {head} {channel}"

    heads = 1 if static[_LAYOUT] else 2
    shared = operands[0].shape[heads] // max(1, operands[1].shape[heads])
    many = "(k g)" if shared > 1 else "k"
    query, key, value = laid(many, "s", "h"), laid("k", "t", "h"), laid("k", "t", "v")
    mixed, sums = laid(many, "s", "v"), f"b {many} s"
    takes = [query, key, value]
    for number, operand in enumerate(operands[3:10], 3):
        batched = number in _LENGTHS and operand.shape == operands[0].shape[:1]
        takes.append("b" if batched else " ".join(f"u{number}x{dim}" for dim in range(len(operand.shape))))
    if len(operands[_BIAS].shape) == 4:
        sizes = operands[_BIAS].shape
        takes[_BIAS] = f"{'b' if sizes[0] > 1 else 'alike'} {many if sizes[1] > 1 else 'common'} s t"
    if _PASSES[name]:
        takes += [sums, mixed, mixed]
        gives = [query, key, value, *([takes[_BIAS]] if len(results) > 3 else [])]
    else:
        gives = [mixed, sums][: len(results)]
    text = f"{', '.join(takes)} -> {', '.join(gives)}"
    words = set(text.replace("(", " ").replace(")", " ").replace(",", " ").split()) - {"->"}
    whole = words - {"b", "k"}
    if len(gives) == 4:  # the bias's gradient is summed over what the bias lacks
        whole |= {factor for factor in ("b", "k") if factor not in takes[_BIAS].replace("(", "").split()}
    groups = " g" if shared > 1 else ""
    each = f"b k{groups} s t"
    flops = f"6 {each} h + 4 {each} v" if _PASSES[name] else f"2 {each} h + 2 {each} v"
    sizes = {"g": shared} if shared > 1 else {}
    return parse_call_rule(name, text, need_replication=sorted(whole), sizes=sizes, flops=flops)


def cudnn_flops(rule: CallRule, static: Sequence[Any], operands: Sequence[Any], results: Sequence[Any]) -> int:
    """Return the FLOPs of a call: causal masks hide half of the scores, and windows all but so many of a row."""
    flops = bind(rule, [a.shape for a in operands], [r.shape for r in results], f"of `{rule.name}`").flops
    rows = 2 if static[_LAYOUT] else 1
    keys = operands[1].shape[rows]
    share = 0.5 if int(getattr(static[_MASK], "value", static[_MASK])) in _CAUSAL else 1.0
    if static[_WINDOW]:
        share = min(share, static[_WINDOW] / keys)
    return int(flops * share)
