"""JAX lowerings of torch's layers: losses, norms and convolution.

Like the elementary lowerings they leave dims unmerged and follow torch's dtypes.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.program import model_flops
from autoshard.program.torch_ops.attention_lowerings import multi_head_attention, scaled_dot_product_attention
from autoshard.program.torch_ops.saved_values import from_inputs, marked
from autoshard.program.torch_ops.torchax_environment import environment


def layer_table() -> dict[Any, Callable[..., Any]]:
    """Return lowerings of attention, losses, norms and antialiased resizing, by torch callable."""
    import torch

    functional = torch.nn.functional
    return {
        functional.scaled_dot_product_attention: scaled_dot_product_attention,
        functional.multi_head_attention_forward: multi_head_attention,
        functional.cross_entropy: cross_entropy,
        functional.ctc_loss: ctc_loss,
        functional.gaussian_nll_loss: gaussian_nll_loss,
        torch.ops.aten.multilabel_margin_loss_forward: multilabel_margin_loss,
        functional.layer_norm: layer_norm,
        torch.layer_norm: layer_norm,
        functional.rms_norm: rms_norm,
        torch.ops.aten._upsample_bilinear2d_aa: resizing("linear"),
        torch.ops.aten._upsample_bicubic2d_aa: resizing("cubic"),
    }


def _exact(x: Any) -> Any:
    """Return floats as fp32, or unchanged if they are float64."""
    import jax.numpy as jnp

    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


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
    """Lower `torch.nn.functional.cross_entropy`, with the target's logit selected by comparing ids with an iota.

    A gather over a split class dim would all-gather the logits; a comparison and a sum only need a reduction. The
    result is float64 for such `logits` [B, C, ...] or [C], and fp32 for others. Float targets are class probabilities.
    The mean is over the class weights of targets that are not ignored, or over all examples for probabilities. The
    legacy `size_average` and `reduce` override `reduction`.
    """
    import jax
    import jax.numpy as jnp
    from torch.nn import _reduction

    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    dim = 1 if logits.ndim > 1 else 0
    logits = _exact(logits)
    log_probs = logits - jax.nn.logsumexp(logits, axis=dim, keepdims=True)
    classes = jnp.ones((logits.shape[dim],), logits.dtype) if weight is None else weight
    classes = classes.reshape([-1 if i == dim else 1 for i in range(logits.ndim)])
    if jnp.issubdtype(target.dtype, jnp.floating):
        smooth = target * (1 - label_smoothing) + label_smoothing / logits.shape[dim]
        loss = -(smooth * log_probs * classes).sum(dim)
        total = loss.size
    else:
        counted = target != ignore_index
        hit = jax.lax.broadcasted_iota(target.dtype, logits.shape, dim) == jnp.expand_dims(target, dim)
        loss = -jnp.where(hit, log_probs * classes, 0.0).sum(dim)
        if label_smoothing:
            smooth = -(log_probs * classes).mean(dim)
            loss = loss * (1 - label_smoothing) + smooth * label_smoothing
        loss = jnp.where(counted, loss, 0.0)
        total = jnp.where(counted, jnp.where(hit, classes, 0.0).sum(dim), 0.0).sum()
    if reduction == "none":
        return loss
    return loss.sum() / total if reduction == "mean" else loss.sum()


def gaussian_nll_loss(
    x: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """Lower `torch.nn.functional.gaussian_nll_loss`, whose own code reads values to check the variance.

    Variances below `eps` count as `eps`, and negative ones are not refused. `var` may lack the last dim of `x`.
    """
    import jax
    import jax.numpy as jnp

    var = jnp.asarray(var, x.dtype)
    if var.shape != x.shape and x.shape[:-1] == var.shape:
        var = var[..., None]
    # The gradient of the variance passes below the least variance, as in torch.
    safe = var + jax.lax.stop_gradient(jnp.maximum(var, eps) - var)
    loss = 0.5 * (jnp.log(safe) + jnp.square(x - target) / safe) + (0.5 * math.log(2 * math.pi) if full else 0)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    """Lower `torch.nn.functional.ctc_loss` of `log_probs` [T, N, C] or [T, C], with the alignments of optax.

    The classes of each step must be normalised, as by `log_softmax`. `targets` are rows [N, S], or [S] for one example.
    Targets one after the other are refused, since their lengths decide which are read. Without an alignment the loss is
    infinite, or 0 with `zero_infinity`.
    """
    import jax.numpy as jnp
    import optax

    targets, single = jnp.asarray(targets), log_probs.ndim == 2
    if single:
        log_probs, targets = log_probs[:, None], targets.reshape(1, -1)
    if targets.ndim < 2:
        raise UserError("ctc_loss of targets one after the other has no lowering; give them as padded rows.")
    steps, lengths = (jnp.reshape(jnp.asarray(each), (-1,)) for each in (input_lengths, target_lengths))
    labels = jnp.arange(targets.shape[1])
    counted = labels < lengths[:, None]
    padded = jnp.arange(log_probs.shape[0]) >= steps[:, None]
    loss = optax.ctc_loss(_exact(log_probs).swapaxes(0, 1), padded, targets, ~counted, blank_id=blank)
    # A blank must part two equal labels.
    repeated = ((targets[:, 1:] == targets[:, :-1]) & counted[:, 1:]).sum(1)
    loss = jnp.where(lengths + repeated > steps, 0.0 if zero_infinity else jnp.inf, loss).astype(log_probs.dtype)
    if reduction == "mean":
        return (loss / jnp.maximum(lengths, 1)).mean()
    return loss.sum() if reduction == "sum" else loss[0] if single else loss


def multilabel_margin_loss(x: Any, target: Any, reduction: int) -> Any:
    """Lower `torch.nn.functional.multilabel_margin_loss`, where the first negative label ends the labels of a row.

    Returns the loss of `x` [..., C] with labels `target` [..., C], and the flags of the labels in the dtype of `x`.
    Torch's own gradient uses these flags. `reduction` is 0 for none, 1 for the mean and 2 for the sum.
    """
    import jax.numpy as jnp

    counted = jnp.cumprod((target >= 0).astype(jnp.int32), axis=-1).astype(bool)
    hit = (target[..., None] == jnp.arange(x.shape[-1])) & counted[..., None]
    labelled = hit.any(-2)
    chosen = jnp.where(hit, x[..., None, :], 0).sum(-1)
    apart = jnp.maximum(0, 1 - (chosen[..., :, None] - x[..., None, :]))
    loss = jnp.where(counted[..., :, None] & ~labelled[..., None, :], apart, 0).sum((-2, -1)) / x.shape[-1]
    return (loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()), labelled.astype(x.dtype)


def layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    """Lower `torch.nn.functional.layer_norm` over the last dims; the result has the dtype of `x`.

    It is computed in fp32, or in float64 for such `x`.
    """
    import jax
    import jax.numpy as jnp

    dims = tuple(range(x.ndim - len(tuple(normalized_shape)), x.ndim))

    def normalised(x: Any) -> Any:
        """Return the norm of `x`."""
        wide = _exact(x)
        centred = wide - marked(wide.mean(dims, keepdims=True))
        result = centred * marked(jax.lax.rsqrt(jnp.mean(centred * centred, dims, keepdims=True) + eps))
        if weight is not None:
            result = result * weight.astype(wide.dtype)
        if bias is not None:
            result = result + bias.astype(wide.dtype)
        return result.astype(x.dtype)

    return from_inputs(normalised)(x)


def rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """Lower `torch.nn.functional.rms_norm` over the last dims; the result has the dtype of `x`.

    It is computed in fp32, or in float64 for such `x`. Without `eps` it is the machine epsilon of the dtype of `x`.
    """
    import jax
    import jax.numpy as jnp

    dims = tuple(range(x.ndim - len(tuple(normalized_shape)), x.ndim))
    small = float(jnp.finfo(x.dtype).eps) if eps is None else eps

    def normalised(x: Any) -> Any:
        """Return the norm of `x`."""
        wide = _exact(x)
        result = wide * marked(jax.lax.rsqrt(jnp.mean(wide * wide, dims, keepdims=True) + small))
        if weight is not None:
            result = result * weight.astype(wide.dtype)
        return result.astype(x.dtype)

    return from_inputs(normalised)(x)


_left_out: list[list[str]] = []
"""The list of each `without_batch_statistics` that is entered."""


@contextlib.contextmanager
def without_batch_statistics() -> Iterator[list[str]]:
    """Leave the statistics of batch norms out of traces, which then show if other operations mix examples.

    Yields a list with an entry for each such norm.
    """
    _left_out.append([])
    try:
        yield _left_out[-1]
    finally:
        _left_out.pop()


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
    """Lower `torch.nn.functional.batch_norm` for torch tensors [B, C, ...]; the result has the dtype of `x`.

    It is computed in fp32, or in float64 for such `x`. In training, or without running statistics, those of the batch
    are used. In training the running ones are updated in place. Statistics are plain means over batch and space, so
    that a split batch needs one small all-reduce.
    """
    dims = (0, *range(2, x.ndim))
    running = (running_mean, running_var)
    if (training or running_mean is None) and _left_out:
        _left_out[-1].append("batch_norm")
        return _normed(x, running, weight, bias, None, 0.0, eps)
    return _normed(x, running, weight, bias, dims if training or running_mean is None else (), momentum, eps)


def instance_norm(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Lower `torch.nn.functional.instance_norm` for torch tensors [B, C, ...]; the result has the dtype of `x`.

    It is computed as `batch_norm`, with statistics of each example over space. Running ones are updated in place with
    the means over the batch.
    """
    dims = tuple(range(2, x.ndim)) if use_input_stats else ()
    return _normed(x, (running_mean, running_var), weight, bias, dims, momentum, eps)


def _normed(
    x: Any, running: Sequence[Any], weight: Any, bias: Any, dims: Sequence[int] | None, momentum: float, eps: float
) -> Any:
    """Return `x`, torch tensors [B, C, ...], less a mean and over a deviation, scaled and shifted by channel.

    - `running`: running mean and variance [C]; each may be None.
    - `dims`: dims that statistics of `x` reduce; they update the running ones in place. Empty for running statistics,
      None for a mean of 0 and a variance of 1.
    """
    import jax
    import jax.numpy as jnp

    env = environment()
    value: Any = env.t2j_iso(x)
    scale, shift = (None if t is None else env.t2j_iso(t) for t in (weight, bias))
    exact = _exact(value)

    def wide(vector: Any) -> Any:
        """Return a vector [C], or statistics [B, C], that broadcasts along the other dims of `x`."""
        leading = vector.shape if vector.ndim > 1 else (1, -1)
        return vector.astype(exact.dtype).reshape(*leading, *(1 for _ in range(2, value.ndim)))

    if dims is None:
        mean, var = jnp.zeros_like(exact, shape=value.shape[1]), jnp.ones_like(exact, shape=value.shape[1])
    elif dims:
        mean = exact.mean(dims)
        var = jnp.square(exact - wide(mean)).mean(dims)
        count = value.size // mean.size
        # torch's running variance is unbiased (n - 1), the variance of the batch is not.
        for each, now in zip(running, (mean, var * (count / max(count - 1, 1))), strict=True):
            if each is not None:
                now = now.mean(0) if now.ndim > 1 else now
                each._elem = (each._elem * (1 - momentum) + now * momentum).astype(each._elem.dtype)
    else:
        mean, var = (env.t2j_iso(each) for each in running)
    result = (exact - wide(mean)) * jax.lax.rsqrt(wide(var) + eps)
    if scale is not None:
        result = result * wide(scale)
    if shift is not None:
        result = result + wide(shift)
    return env.j2t_iso(result.astype(value.dtype))


def counted_convolution(convolution: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for `aten.convolution` that counts its FLOPs.

    It calls torchax's own `convolution`, or for transposed ones `transposed_convolution` of this module.
    """

    def run(
        x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: Any, *rest: Any
    ) -> Any:
        """Return the convolution, and record its FLOPs."""
        if transposed:
            model_flops.record_matmul(x.shape, weight.size // weight.shape[0])
            return transposed_convolution(x, weight, bias, stride, padding, dilation, *rest)
        result = convolution(x, weight, bias, stride, padding, dilation, transposed, *rest)
        model_flops.record_matmul(result.shape, weight.size // weight.shape[0])
        return result

    return run


def transposed_convolution(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, output_padding: Any, groups: int
) -> Any:
    """Compute `torch.nn.functional.conv_transpose1d` to `3d` of `x` [B, C, *sides] or [C, *sides].

    - `weight`: [C, D / groups, *sides], where D is the number of channels of the result.
    - `bias`: [D] or None.
    - `stride`, `padding`, `dilation`, `output_padding`: one number for each side, or one for all.

    Raises `ValueError` if output padding is not smaller than stride or dilation.
    """
    import jax
    import jax.numpy as jnp

    count = weight.ndim - 2
    spaces = tuple(range(2, weight.ndim))
    strides, pads, gaps, more = (
        tuple(each) * (count if len(each) == 1 else 1) for each in (stride, padding, dilation, output_padding)
    )
    kernel = jnp.flip(weight, spaces)
    if groups > 1:
        # XLA expects the result's channels of all groups in order, and only one group's input channels.
        kernel = kernel.reshape(groups, -1, *kernel.shape[1:]).swapaxes(1, 2)
        kernel = kernel.reshape(-1, *kernel.shape[2:])
    if any(extra >= max(step, gap) for extra, step, gap in zip(more, strides, gaps, strict=True)):
        raise ValueError("output padding must be smaller than either stride or dilation")
    edges = []
    for width, pad, gap, extra in zip(weight.shape[2:], pads, gaps, more, strict=True):
        front = gap * (width - 1) - pad
        edges.append((front, front + extra))
    batch = x.shape[: x.ndim - count - 1]
    result = jax.lax.conv_general_dilated(
        x if batch else x[None],
        kernel,
        (1,) * count,
        edges,
        lhs_dilation=strides,
        rhs_dilation=gaps,
        dimension_numbers=jax.lax.ConvDimensionNumbers(
            (0, 1, *spaces), (0, 1, *spaces) if groups > 1 else (1, 0, *spaces), (0, 1, *spaces)
        ),
        feature_group_count=groups,
    )
    if bias is not None:
        result = result + bias.reshape(1, -1, *(1,) * count)
    return result.reshape(*batch, *result.shape[1:])


def resizing(method: str) -> Callable[..., Any]:
    """Return the lowering of `torch.nn.functional.interpolate(..., antialias=True)` for images [B, C, H, W].

    `method` is that of `jax.image.resize`. Without a size, the scale factors give it, rounded down.

    The lowering raises `UserError` for aligned corners.
    """

    def resize(x: Any, size: Any, align_corners: bool = False, *scales: Any, **others: Any) -> Any:
        """Return the images [..., H, W] resized to `size`, or by the scale factors if it is None."""
        import jax

        if align_corners:
            raise UserError("interpolate with `antialias=True` and aligned corners has no lowering; leave one out.")
        if size is None:
            factors = others.get("scale_factors") or scales[0]
            size = [int(each * factor) for each, factor in zip(x.shape[-2:], factors, strict=True)]
        return jax.image.resize(x, (*x.shape[:-2], *size), method, antialias=True)

    return resize
