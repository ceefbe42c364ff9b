"""torchax with lowerings that keep the dims of a program apart."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from autoshard.program import _flops
from autoshard.program._attention import attend


@functools.cache
def environment() -> Any:
    """Our own torchax environment: torch operations become JAX operations, canonical ones where it matters."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    import torch
    from torchax import tensor
    from torchax.ops import ops_registry

    env = tensor.Environment()
    aten = torch.ops.aten
    functional = torch.nn.functional
    lowerings: dict[Any, Callable[..., Any]] = {
        functional.linear: linear,
        aten.linear: linear,
        aten.addmm: addmm,
        aten.mm: matmul,
        aten.bmm: matmul,
        aten.matmul: matmul,
        torch.matmul: matmul,
        torch.bmm: matmul,
        torch.Tensor.matmul: matmul,
        torch.Tensor.__matmul__: matmul,
        torch.Tensor.bmm: matmul,
        torch.einsum: einsum,
        functional.embedding: embedding,
        aten.embedding: take_rows,
        functional.scaled_dot_product_attention: scaled_dot_product_attention,
        functional.cross_entropy: cross_entropy,
        torch.Tensor.repeat_interleave: repeat_interleave,
        torch.repeat_interleave: repeat_interleave,
    }
    for operation, lowering in lowerings.items():
        env._ops[operation] = ops_registry.Operator(
            operation, lowering, is_jax_function=True, is_user_defined=True, needs_env=False, is_view_op=False
        )
    return env


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """`x` [..., in], `weight` [out, in]; the leading dims stay as they are."""
    import jax

    result = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    _flops.record_matmul(result.shape, weight.shape[1])
    return result if bias is None else result + bias


def addmm(bias: Any, x: Any, weight: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """`beta * bias + alpha * (x @ weight)`."""
    result = matmul(x, weight)
    if alpha != 1:
        result = result * alpha
    if beta == 0:
        return result
    return result + (bias if beta == 1 else bias * beta)


def matmul(x: Any, y: Any) -> Any:
    """`torch.matmul`: leading dims of both are batch dims and are broadcast, not merged."""
    import jax.numpy as jnp

    result = jnp.matmul(x, y)
    _flops.record_matmul(result.shape, x.shape[-1])
    return result


def einsum(equation: str, *operands: Any) -> Any:
    """`torch.einsum`, counting a contraction of two operands as a matmul."""
    import jax.numpy as jnp

    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    result = jnp.einsum(equation, *operands)
    text = equation.replace(" ", "")
    if len(operands) == 2 and "." not in text and "->" in text:
        inputs, output = text.split("->")
        sizes = {
            letter: size
            for part, operand in zip(inputs.split(","), operands, strict=True)
            for letter, size in zip(part, operand.shape, strict=True)
        }
        contracted = 1
        for letter, size in sizes.items():
            if letter not in output:
                contracted *= size
        _flops.record_matmul(result.shape, contracted)
    return result


def take_rows(
    table: Any, ids: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    """Rows of an embedding table as one plain gather (ids are valid, so nothing is filled or clamped)."""
    return table.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)


def embedding(
    ids: Any,
    table: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """`torch.nn.functional.embedding` without renormalisation."""
    return take_rows(table, ids)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention` on [..., heads, length, dim]."""
    import jax.numpy as jnp

    lead = query.shape[:-3]
    if len(lead) != 1:
        query, key, value = (x.reshape(-1, *x.shape[-3:]) if lead else x[None] for x in (query, key, value))
    result = attend(query, key, value, causal=is_causal, scale=scale, bias=attn_mask)
    result = jnp.swapaxes(result, 1, 2)
    if len(lead) != 1:
        result = result.reshape(*lead, *result.shape[1:])
    return result


def cross_entropy(
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`torch.nn.functional.cross_entropy`; the target's logit is picked by comparing ids with an iota.

    A gather over a split class dim would fetch the logits; a comparison and a sum only need a reduction.
    """
    import jax
    import jax.numpy as jnp

    axis = 1 if logits.ndim > 1 else 0
    logits = logits.astype(jnp.float32)
    log_probs = logits - jax.nn.logsumexp(logits, axis=axis, keepdims=True)
    if jnp.issubdtype(target.dtype, jnp.floating):
        smooth = target * (1 - label_smoothing) + label_smoothing / logits.shape[axis]
        scale = 1.0 if weight is None else jnp.expand_dims(weight, [i for i in range(logits.ndim) if i != axis])
        loss = -(smooth * log_probs * scale).sum(axis)
        share = jnp.ones_like(loss)
        total = float(loss.size)
    else:
        expanded = jnp.expand_dims(target, axis)
        hit = jax.lax.broadcasted_iota(target.dtype, logits.shape, axis) == expanded
        class_weight = (
            jnp.ones((), jnp.float32)
            if weight is None
            else jnp.expand_dims(weight, [i for i in range(logits.ndim) if i != axis])
        )
        share = jnp.where(hit, class_weight, 0.0).sum(axis) * (target != ignore_index)
        loss = -jnp.where(hit, log_probs * class_weight, 0.0).sum(axis)
        if label_smoothing:
            loss = loss * (1 - label_smoothing) - (log_probs * class_weight).mean(axis) * label_smoothing
        loss = loss * (target != ignore_index)
        total = share.sum()
    if reduction == "none":
        return loss
    return loss.sum() / total if reduction == "mean" else loss.sum()


def repeat_interleave(x: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> Any:
    """`torch.repeat_interleave`; with a fixed count as a broadcast and a reshape instead of a gather."""
    import jax.numpy as jnp

    if dim is None or not isinstance(repeats, int):
        return jnp.repeat(x, repeats, axis=dim, total_repeat_length=output_size)
    dim = dim % x.ndim
    wide = jnp.broadcast_to(jnp.expand_dims(x, dim + 1), (*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :]))
    return wide.reshape(*x.shape[:dim], x.shape[dim] * repeats, *x.shape[dim + 1 :])


@contextlib.contextmanager
def canonical_modules() -> Iterator[None]:
    """While inside, module classes whose own code merges dims run our equal code instead."""
    import sys

    replaced: list[tuple[type, Any]] = []
    for path, forward in _FORWARDS.items():
        module_name, class_name = path.rsplit(".", 1)
        if module_name in sys.modules:
            cls = getattr(sys.modules[module_name], class_name)
            replaced.append((cls, cls.__dict__["forward"]))
            cls.forward = forward
    try:
        yield
    finally:
        for cls, forward in replaced:
            cls.forward = forward


def _conv1d(self: Any, x: Any) -> Any:
    """GPT-2's linear layer (weight [in, out]) on [..., in] without flattening the leading dims."""
    return x @ self.weight + self.bias


_FORWARDS: dict[str, Callable[..., Any]] = {"transformers.pytorch_utils.Conv1D": _conv1d}
