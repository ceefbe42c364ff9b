"""The cross entropy of a head by chunks of tokens and classes, so that all logits are never in memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

from autoshard.base.named_counts import read_counts
from autoshard.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class LossChunks:
    """Numbers of chunks in which logits are computed, one chunk after the other."""

    tokens: int = 1
    """Chunks of each sequence."""
    vocabulary: int = 1
    """Chunks of the classes."""

    def __str__(self) -> str:
        """Return the text that `parse_loss_chunks` reads."""
        return f"tokens={self.tokens},vocabulary={self.vocabulary}"


def parse_loss_chunks(text: str | None) -> LossChunks | None:
    """Return the chunks of `8` (of the vocabulary), `tokens=4` or `tokens=4,vocabulary=8`; None for one of each.

    Raises `UserError` for other texts, and for numbers below 1.
    """
    if text is None:
        return None
    form = "8, tokens=4 or tokens=4,vocabulary=8"
    chunks = LossChunks(**read_counts("--loss-chunks", text, ("tokens", "vocabulary"), form))
    return None if chunks == LossChunks() else chunks


def chunked_cross_entropy(
    hidden: Any, head: Any, labels: Any, *, tokens: int = 1, vocabulary: int = 1, bias: Any = None
) -> Any:
    """Return the mean negative log-likelihood of labels, fp32, with logits of one chunk at a time.

    The backward pass computes each chunk's logits again. Chunks of the vocabulary add no communication when the batch
    is split over devices; chunks of tokens then reduce the head's gradient once a chunk.

    - `hidden`: [B, S, D], input of the head.
    - `head`: [V, D], weights of the head, a row for each class; cast to the dtype of `hidden`.
    - `labels`: [B, S], classes.
    - `tokens`: chunks of each sequence; `vocabulary`: chunks of the classes.
    - `bias`: [V], added to the logits; None for none.

    Raises `UserError` if the chunks do not divide the sequence or the classes.
    """
    import jax.numpy as jnp

    for count, size, what in ((tokens, hidden.shape[1], "tokens"), (vocabulary, head.shape[0], "classes")):
        if size % count:
            raise UserError(f"the loss: {size} {what} do not divide into {count} chunks.")
    if bias is None:
        bias = jnp.zeros((), hidden.dtype)
    return _loss(LossChunks(tokens, vocabulary))(hidden, head, bias, labels)


def _strided(x: Any, count: int, axis: int) -> Any:
    """Return `count` chunks of every `count`-th element along `axis`, as a new leading dim.

    A dim that is split over devices in contiguous parts then stays so in every chunk.
    """
    import jax.numpy as jnp

    shape = (*x.shape[:axis], x.shape[axis] // count, count, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def _joined(chunks: Any, axis: int) -> Any:
    """Return the inverse of `_strided`."""
    import jax.numpy as jnp

    x = jnp.moveaxis(chunks, 0, axis + 1)
    return x.reshape((*x.shape[:axis], -1, *x.shape[axis + 2 :]))


def _scan(body: Callable[[Any, Any], tuple[Any, Any]], start: Any, chunks: Any, count: int) -> tuple[Any, Any]:
    """Return `jax.lax.scan(body, start, chunks)`; one chunk makes no loop."""
    import jax

    if count > 1:
        return jax.lax.scan(body, start, chunks)
    end, out = body(start, jax.tree.map(lambda x: x[0], chunks))
    return end, jax.tree.map(lambda x: x[None], out)


def _loss(chunks: LossChunks) -> Callable[..., Any]:
    """Return the loss as a function of `hidden`, `head`, `bias` and `labels` with a backward pass of its own."""
    import jax
    import jax.numpy as jnp

    numbers, count = jnp.arange(chunks.vocabulary), chunks.vocabulary

    def classes(head: Any, bias: Any, dtype: Any) -> tuple[Any, ...]:
        """Return chunks of weights [n, V / n, D] in `dtype` and of biases, with the chunks' numbers."""
        biases = _strided(bias, count, 0) if bias.ndim else jnp.zeros((count,), bias.dtype)
        return _strided(head.astype(dtype), count, 0), biases, numbers

    def logits_of(hidden: Any, labels: Any, weights: Any, bias: Any, number: Any) -> tuple[Any, Any]:
        """Return the fp32 logits of one chunk [B, S, V / n], and where they are those of the labels."""
        logits = jnp.einsum("bsd,vd->bsv", hidden, weights).astype(jnp.float32)
        position = jax.lax.broadcasted_iota(labels.dtype, logits.shape, 2) * count + number.astype(labels.dtype)
        return logits + bias.astype(jnp.float32), position == labels[..., None]

    def normalisers(hidden: Any, labels: Any, parts: tuple[Any, ...]) -> tuple[Any, Any]:
        """Return log-sum-exp and label logit [B, S] of one chunk of tokens."""

        def add(carried: tuple[Any, Any, Any], part: tuple[Any, ...]) -> tuple[tuple[Any, Any, Any], None]:
            highest, total, picked = carried
            logits, hit = logits_of(hidden, labels, *part)
            above = jnp.maximum(highest, logits.max(-1))
            total = total * jnp.exp(highest - above) + jnp.exp(logits - above[..., None]).sum(-1)
            return (above, total, picked + jnp.where(hit, logits, 0.0).sum(-1)), None

        zeros = jnp.zeros(labels.shape, jnp.float32)
        start = (jnp.full(labels.shape, -jnp.inf, jnp.float32), zeros, zeros)
        (highest, total, picked), _ = _scan(add, start, parts, count)
        return highest + jnp.log(total), picked

    def forward(hidden: Any, head: Any, bias: Any, labels: Any) -> tuple[Any, Any]:
        parts = classes(head, bias, hidden.dtype)

        def add(total: Any, part: tuple[Any, Any]) -> tuple[Any, Any]:
            normaliser, picked = normalisers(*part, parts)
            return total + (normaliser - picked).sum(), normaliser

        tokens = tuple(_strided(x, chunks.tokens, 1) for x in (hidden, labels))
        total, normaliser = _scan(add, jnp.zeros((), jnp.float32), tokens, chunks.tokens)
        return total / labels.size, (hidden, head, bias, labels, _joined(normaliser, 1))

    def backward(saved: tuple[Any, ...], gradient: Any) -> tuple[Any, ...]:
        hidden, head, bias, labels, normaliser = saved
        parts = classes(head, bias, hidden.dtype)

        def gradients(hidden: Any, labels: Any, normaliser: Any) -> tuple[Any, Any, Any]:
            """Return the gradients of one chunk of tokens: of `hidden`, and of weights and biases by chunk."""

            def add(total: Any, part: tuple[Any, ...]) -> tuple[Any, tuple[Any, Any]]:
                logits, hit = logits_of(hidden, labels, *part)
                error = (jnp.exp(logits - normaliser[..., None]) - hit) * (gradient / saved[3].size)
                narrow = error.astype(hidden.dtype)
                own = jnp.einsum("bsv,bsd->vd", narrow, hidden, preferred_element_type=jnp.float32)
                onward = jnp.einsum("bsv,vd->bsd", narrow, part[0], preferred_element_type=jnp.float32)
                return total + onward, (own, error.sum((0, 1)) if bias.ndim else jnp.zeros(()))

            total, (weights, biases) = _scan(add, jnp.zeros(hidden.shape, jnp.float32), parts, count)
            return total.astype(hidden.dtype), weights, biases

        def add(total: tuple[Any, Any], part: tuple[Any, ...]) -> tuple[tuple[Any, Any], Any]:
            onward, *own = gradients(*part)
            return jax.tree.map(jnp.add, total, tuple(own)), onward

        tokens = tuple(_strided(x, chunks.tokens, 1) for x in (hidden, labels, normaliser))
        if chunks.tokens == 1:
            onward, weights, biases = gradients(hidden, labels, normaliser)
        else:
            start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), parts[:2])
            (weights, biases), onward = jax.lax.scan(add, start, tokens)
            onward = _joined(onward, 1)
        biases = _joined(biases, 0) if bias.ndim else biases.sum()
        return onward, _joined(weights, 0).astype(head.dtype), biases.astype(bias.dtype), None

    loss = jax.custom_vjp(lambda *given: forward(*given)[0])
    loss.defvjp(forward, backward)
    return loss
