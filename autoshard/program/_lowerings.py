"""JAX lowerings of torch operations, as replacements for torchax's own.

Two aims: no operation merges dims that a plan may want to split apart (batch with sequence, batch with heads), and
result dtypes follow torch, so that a bf16 program stays bf16. Every function takes and returns JAX values.
"""

from collections.abc import Callable
from typing import Any

from autoshard.program import _flops
from autoshard.program._attention import attend


def table() -> dict[Any, Callable[..., Any]]:
    """torch callable -> lowering."""
    import torch

    aten = torch.ops.aten
    functional = torch.nn.functional
    tensor = torch.Tensor
    return {
        functional.linear: linear,
        aten.linear: linear,
        aten.addmm: addmm,
        aten.mm: matmul,
        aten.bmm: matmul,
        aten.matmul: matmul,
        torch.matmul: matmul,
        torch.bmm: matmul,
        tensor.matmul: matmul,
        tensor.__matmul__: matmul,
        tensor.bmm: matmul,
        torch.einsum: einsum,
        functional.embedding: embedding,
        aten.embedding: take_rows,
        functional.scaled_dot_product_attention: scaled_dot_product_attention,
        functional.cross_entropy: cross_entropy,
        tensor.repeat_interleave: repeat_interleave,
        torch.repeat_interleave: repeat_interleave,
        functional.layer_norm: layer_norm,
        torch.layer_norm: layer_norm,
        functional.rms_norm: rms_norm,
        aten.add.Tensor: add,
        aten.add.Scalar: add,
        aten.sub.Tensor: sub,
        aten.sub.Scalar: sub,
        aten.rsub.Tensor: rsub,
        aten.rsub.Scalar: rsub,
        aten.mul.Tensor: mul,
        aten.mul.Scalar: mul,
        aten.div.Tensor: div,
        aten.div.Scalar: div,
        aten.div.Tensor_mode: div,
        aten.div.Scalar_mode: div,
        aten.pow.Tensor_Scalar: power,
        aten.pow.Tensor_Tensor: power,
        aten.pow.Scalar: power,
    }


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """`x` [..., in], `weight` [out, in]; the leading dims stay as they are."""
    import jax

    result = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    _flops.record_matmul(result.shape, weight.shape[1])
    return result if bias is None else result + bias


def linear_parts(x: Any, weight: Any, bias: Any) -> Any:
    """Several linear layers side by side: `x` [..., in], `weight` [in, parts, out], `bias` [parts, out]."""
    import jax

    result = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (0,)), ((), ())))
    _flops.record_matmul(result.shape, weight.shape[0])
    return result + bias


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

    dim = 1 if logits.ndim > 1 else 0
    logits = logits.astype(jnp.float32)
    log_probs = logits - jax.nn.logsumexp(logits, axis=dim, keepdims=True)
    classes = jnp.ones((logits.shape[dim],), jnp.float32) if weight is None else weight
    classes = classes.reshape([-1 if i == dim else 1 for i in range(logits.ndim)])
    if jnp.issubdtype(target.dtype, jnp.floating):
        smooth = target * (1 - label_smoothing) + label_smoothing / logits.shape[dim]
        loss = -(smooth * log_probs * classes).sum(dim)
        total = loss.size
    else:
        kept = target != ignore_index
        hit = jax.lax.broadcasted_iota(target.dtype, logits.shape, dim) == jnp.expand_dims(target, dim)
        loss = -jnp.where(hit, log_probs * classes, 0.0).sum(dim)
        if label_smoothing:
            smooth = -(log_probs * classes).mean(dim)
            loss = loss * (1 - label_smoothing) + smooth * label_smoothing
        loss = jnp.where(kept, loss, 0.0)
        total = jnp.where(kept, jnp.where(hit, classes, 0.0).sum(dim), 0.0).sum()
    if reduction == "none":
        return loss
    return loss.sum() / total if reduction == "mean" else loss.sum()


def repeat_interleave(x: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> Any:
    """`torch.repeat_interleave`; with a fixed count as a broadcast and a reshape instead of a gather."""
    import jax.numpy as jnp

    if dim is None or not isinstance(repeats, int):
        return jnp.repeat(x, repeats, axis=dim, total_repeat_length=output_size)
    place = dim % x.ndim
    wide = jnp.broadcast_to(jnp.expand_dims(x, place + 1), (*x.shape[: place + 1], repeats, *x.shape[place + 1 :]))
    return wide.reshape(*x.shape[:place], x.shape[place] * repeats, *x.shape[place + 1 :])


def layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    """`torch.nn.functional.layer_norm`, statistics in fp32."""
    import jax
    import jax.numpy as jnp

    dims = tuple(range(x.ndim - len(tuple(normalized_shape)), x.ndim))
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(dims, keepdims=True)
    result = centred * jax.lax.rsqrt(jnp.mean(centred * centred, dims, keepdims=True) + eps)
    if weight is not None:
        result = result * weight.astype(jnp.float32)
    if bias is not None:
        result = result + bias.astype(jnp.float32)
    return result.astype(x.dtype)


def rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """`torch.nn.functional.rms_norm`, statistics in fp32."""
    import jax
    import jax.numpy as jnp

    dims = tuple(range(x.ndim - len(tuple(normalized_shape)), x.ndim))
    wide = x.astype(jnp.float32)
    small = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    result = wide * jax.lax.rsqrt(jnp.mean(wide * wide, dims, keepdims=True) + small)
    if weight is not None:
        result = result * weight.astype(jnp.float32)
    return result.astype(x.dtype)


def batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """`torch.nn.functional.batch_norm` on torch tensors; in training it updates the running statistics in place.

    Statistics are plain means over batch and space in fp32, so that a split batch needs one small all-reduce.
    """
    import jax
    import jax.numpy as jnp

    from autoshard.program._torch_env import environment

    env = environment()
    value, scale, shift = (None if t is None else env.t2j_iso(t) for t in (x, weight, bias))
    dims = (0, *range(2, value.ndim))

    def wide(vector: Any) -> Any:
        return vector.astype(jnp.float32).reshape([-1 if i == 1 else 1 for i in range(value.ndim)])

    exact = value.astype(jnp.float32)
    if training or running_mean is None:
        mean = exact.mean(dims)
        var = jnp.square(exact - wide(mean)).mean(dims)
        if training and running_mean is not None:
            count = value.size // value.shape[1]
            for running, now in ((running_mean, mean), (running_var, var * (count / max(count - 1, 1)))):
                old = running._elem
                running._elem = (old * (1 - momentum) + now * momentum).astype(old.dtype)
    else:
        mean, var = env.t2j_iso(running_mean), env.t2j_iso(running_var)
    result = (exact - wide(mean)) * jax.lax.rsqrt(wide(var) + eps)
    if scale is not None:
        result = result * wide(scale)
    if shift is not None:
        result = result + wide(shift)
    return env.j2t_iso(result.astype(value.dtype))


def counted_convolution(convolution: Callable[..., Any]) -> Callable[..., Any]:
    """torchax's own convolution, with its FLOPs counted."""

    def run(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: Any, *rest: Any) -> Any:
        result = convolution(x, weight, bias, stride, padding, dilation, transposed, *rest)
        if transposed:
            _flops.record_matmul(x.shape, weight.size // weight.shape[0])
        else:
            _flops.record_matmul(result.shape, weight.size // weight.shape[0])
        return result

    return run


def add(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """`x + alpha * y`."""
    x, y = _promoted(x, y)
    return x + (y if alpha == 1 else y * alpha)


def sub(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """`x - alpha * y`."""
    x, y = _promoted(x, y)
    return x - (y if alpha == 1 else y * alpha)


def rsub(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """`y - alpha * x`."""
    return sub(y, x, alpha=alpha)


def mul(x: Any, y: Any) -> Any:
    """`x * y`."""
    x, y = _promoted(x, y)
    return x * y


def div(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    """`x / y`; integers divide to floats unless a rounding mode is given."""
    import jax.numpy as jnp

    x, y = _promoted(x, y)
    if rounding_mode is None:
        return x / y
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    quotient = jnp.trunc(x / y)
    return quotient.astype(jnp.result_type(x, y))


def power(x: Any, y: Any) -> Any:
    """`x ** y`; small whole exponents become multiplications, which differentiate and run better."""
    import jax
    import jax.numpy as jnp

    if isinstance(y, (int, float)) and not isinstance(x, (int, float)):
        if float(y).is_integer() and 0 < y <= 4:
            whole = x if isinstance(y, int) or jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
            return whole * whole if y == 2 else jax.lax.integer_pow(whole, int(y))
        if y == 0.5:
            return jnp.sqrt(x)
    x, y = _promoted(x, y)
    return jnp.power(x, y)


def _promoted(x: Any, y: Any) -> tuple[Any, Any]:
    """torch's rule that a 0-d tensor does not widen a tensor of the same kind; JAX follows it for Python numbers."""
    import jax.numpy as jnp

    def rank(value: Any) -> int:
        return getattr(value, "ndim", -1)

    def kind(value: Any) -> int:
        dtype = value.dtype
        return 0 if dtype == jnp.bool_ else 1 if jnp.issubdtype(dtype, jnp.integer) else 2

    if rank(x) == 0 and rank(y) > 0 and kind(x) <= kind(y):
        return x.astype(y.dtype), y
    if rank(y) == 0 and rank(x) > 0 and kind(y) <= kind(x):
        return x, y.astype(x.dtype)
    return x, y
