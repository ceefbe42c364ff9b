"""Next tokens of logits whose vocabulary may be split over devices: each device sends its best, not its logits."""

import dataclasses
import re
from typing import Any

from autoshard.errors import UserError


_BITS = 2
"""Bits of the threshold that one round of a top-p search finds, with 2 ** bits - 1 sums over the vocabulary.

More bits would take fewer rounds, each of which waits for one reduction over devices, but more compute.
"""
_TOTAL = 30
"""Logarithm of the largest sum of the integer weights of a top-p search."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """The options of `sample_tokens`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    @property
    def candidates(self) -> int:
        """Number of tokens of a row that each part of a split vocabulary sends."""
        return self.top_k or 1

    def rounds(self, bits: int) -> int:
        """Return the number of sums over the vocabulary, one after the other, that the search for top-p takes.

        `bits` are those of a logit.
        """
        searches = self.temperature and self.top_k is None and self.top_p is not None and self.top_p < 1
        return bits // _BITS if searches else 0

    def tokens(self, logits: Any, seed: Any) -> Any:
        """Return a token for each row of `logits` [B, V]; `seed` is an integer scalar, None for a temperature of 0.

        Raises `UserError` if `top_k` is larger than the vocabulary.
        """
        import jax

        if self.top_k is not None and self.top_k > logits.shape[-1]:
            raise UserError(f"--sample: top_k={self.top_k} is more than the vocabulary of {logits.shape[-1]} tokens.")
        key = None if seed is None else jax.random.key(seed)
        return sample_tokens(logits, key, **dataclasses.asdict(self))


def parse_sampling(text: str | None) -> Sampling | None:
    """Return the sampling of `greedy`, or of `temperature=0.8,top_k=50,top_p=0.9` in any order; None for no text.

    Raises `UserError` for other texts, and for numbers outside of their range.
    """
    if text is None:
        return None
    if text == "greedy":
        return Sampling(temperature=0.0)
    forms = {"temperature": r"\d*\.?\d+", "top_k": r"[1-9]\d*", "top_p": r"0*\.\d*[1-9]\d*|1\.?0*"}
    numbers: dict[str, Any] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name in numbers or name not in forms or not re.fullmatch(forms[name], number):
            raise UserError(
                f"sampling `{text}` is not of the form greedy, top_k=50, top_p=0.9 or "
                "temperature=0.8,top_k=50,top_p=0.9, with top_p above 0 and at most 1."
            )
        numbers[name] = int(number) if name == "top_k" else float(number)
    return Sampling(**numbers)


def sample_tokens(
    logits: Any,
    key: Any = None,
    *,
    temperature: Any = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Any:
    """Return a token for each row of `logits`, [B] int32; the most likely one if `temperature` is 0.

    Tokens do not depend on how `logits` are split over devices. A plan may split the vocabulary. Devices then exchange
    their `top_k` best logits, or for `top_p` alone a few numbers in each of 16 rounds (8 for 16-bit logits).

    - `logits`: [B, V], floating-point.
    - `key`: a key of `jax.random`; needed unless `temperature` is 0.
    - `temperature`: divisor of the logits, a number or an array [B] of positive numbers.
    - `top_k`: samples among this many tokens with the largest logits, of equal ones those of the lowest index.
    - `top_p`: samples among the fewest most likely tokens whose probabilities sum to at least `top_p`. Tokens as likely
      as the last of them are included. With `top_k`, probabilities are those among its tokens.

    Raises `UserError` for other shapes and for numbers outside of their range.
    """
    import jax
    import jax.numpy as jnp

    greedy = isinstance(temperature, int | float) and temperature == 0
    _check(logits, key, temperature, top_k, top_p)
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    divisor = jnp.reshape(jnp.asarray(temperature, jnp.float32), (-1, 1))
    if top_k is None:
        scores = logits.astype(jnp.float32) / divisor
        if top_p is not None and top_p < 1:
            scores = jnp.where(_likely(logits, scores, top_p), scores, -jnp.inf)
        return jnp.argmax(scores + jax.random.gumbel(key, scores.shape), axis=-1).astype(jnp.int32)
    values, tokens = jax.lax.top_k(logits, top_k)
    scores = values.astype(jnp.float32) / divisor
    if top_p is not None and top_p < 1:
        shares = jax.nn.softmax(scores, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares
        least = jnp.where(before < top_p, scores, jnp.inf).min(axis=-1, keepdims=True)
        scores = jnp.where(scores >= least, scores, -jnp.inf)
    choice = jnp.argmax(scores + jax.random.gumbel(key, scores.shape), axis=-1)
    return jnp.take_along_axis(tokens, choice[:, None], axis=-1)[:, 0]


def _likely(logits: Any, scores: Any, share: float) -> Any:
    """Return where each row's fewest most likely tokens are whose probabilities sum to `share`, with ties; [B, V] bool.

    The least logit of these tokens is searched bit by bit, in the order of the logits' bits. Probabilities are
    integers, whose sums do not depend on how they are split over devices.

    - `logits`: in their own dtype, which has fewer bits to search than `scores` may have.
    - `scores`: logits in float32, divided by the temperature.
    """
    import jax
    import jax.numpy as jnp

    order, bits = _ordered(logits)
    shares = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    # A coarse sum from above scales the weights such that they sum to at most 2 ** _TOTAL, and each rounds up by one.
    coarse = _TOTAL - (logits.shape[-1] - 1).bit_length()
    total = ((shares * 2.0**coarse).astype(jnp.int32) + 1).sum(axis=-1, keepdims=True)
    scale = 2.0 ** (_TOTAL + coarse) / total.astype(jnp.float32)
    weights = jnp.round(shares * scale).astype(jnp.int32)
    wanted = jnp.maximum(weights.sum(axis=-1).astype(jnp.float32) * share, 1).astype(jnp.int32)
    digits = jnp.arange(1, 2**_BITS, dtype=jnp.uint32)

    def find(turn: Any, least: Any) -> Any:
        """Find the next bits of the threshold: the largest at which the tokens above still have enough weight."""
        shift = jnp.uint32(bits - _BITS) - turn.astype(jnp.uint32) * _BITS
        tried = least[:, None] | (digits << shift)
        above = order[:, None, :] >= tried[:, :, None]
        sums = jnp.where(above, weights[:, None, :], 0).sum(axis=-1)
        return least | ((sums >= wanted[:, None]).sum(axis=-1).astype(jnp.uint32) << shift)

    start = jnp.zeros(logits.shape[:1], jnp.uint32)
    return order >= jax.lax.fori_loop(0, bits // _BITS, find, start)[:, None]


def _ordered(logits: Any) -> tuple[Any, int]:
    """Return integers (uint32) in the order of the logits, equal for equal ones, and their number of bits."""
    import jax
    import jax.numpy as jnp

    if logits.dtype.itemsize not in (2, 4):
        logits = logits.astype(jnp.float32)
    bits = 8 * logits.dtype.itemsize
    logits = jnp.where(logits == 0, jnp.zeros_like(logits), logits)  # -0.0 equals 0.0
    raw = jax.lax.bitcast_convert_type(logits, jnp.uint32 if bits == 32 else jnp.uint16).astype(jnp.uint32)
    sign = jnp.uint32(1 << (bits - 1))
    return jnp.where(raw & sign, raw ^ jnp.uint32(2 * (1 << (bits - 1)) - 1), raw | sign), bits


def _check(logits: Any, key: Any, temperature: Any, top_k: int | None, top_p: float | None) -> None:
    """Raise `UserError` for arguments of `sample_tokens` that are no logits or outside of their range."""
    import jax.numpy as jnp

    if len(logits.shape) != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise UserError(
            f"sample_tokens: logits are {logits.dtype}{list(logits.shape)}; give floating-point logits [batch, "
            "vocabulary], such as `logits[:, -1]` of the last position."
        )
    vocabulary = logits.shape[1]
    if top_k is not None and not 1 <= top_k <= vocabulary:
        raise UserError(f"sample_tokens: top_k is {top_k}; give 1 to {vocabulary}, the size of the vocabulary.")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"sample_tokens: top_p is {top_p}; give a number above 0 and at most 1.")
    number = isinstance(temperature, int | float)
    if number and temperature < 0:
        raise UserError(f"sample_tokens: temperature is {temperature}; give 0 for the most likely token, or more.")
    if key is None and not (number and temperature == 0):
        raise UserError("sample_tokens: key is missing; give a key of `jax.random`, or temperature=0.")
