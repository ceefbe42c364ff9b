"""jax's splash attention for TPUs, a kernel that never writes its scores to memory, and the choice of kernels.

Every attention of a torch module or a Hugging Face model asks through `attend` which kernel computes it. The context
manager `attention_kernel` sets the answer for the code that is traced inside it.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.program import model_flops
from autoshard.program.kernels.attention_masks import computed_share, grid_steps, seen_share
from autoshard.program.kernels.flash_attention import KernelBlocks
from autoshard.program.remat_marks import CONTEXT, mark_of


KERNELS = ("plain", "splash", "cached", "cudnn", "auto")
"""Names of the ways to compute attention.

`plain` has scores in memory, `splash` is jax's kernel, `cached` a kernel over a key-value cache, `cudnn` is for GPUs.
`auto` is one of the first three, wherever it is possible and faster.
"""

GPU_AUTO = "auto:cudnn"
"""Meaning of `auto` in a program that is planned for GPUs: cuDNN's kernel wherever possible."""

LANES = 128
"""Number of elements in a row of a TPU's register; blocks of scores are multiples of it."""

# Numbers of queries, and of keys, that a block may have.
_BLOCKS = (1024, 512, 256, 128)
_PART = 512
"""Number of keys of a block that a kernel multiplies at once."""
_MOVED = 450.0
"""FLOPs that a TPU core computes while one byte of main memory moves (v6e)."""
_PLAIN = 12
"""Main memory traffic of one score without a kernel, in bytes: in f32 and narrowed, written and read."""
_STEP = 5.2e8
"""FLOPs that a TPU core computes in 0.6 us, the overhead of one grid step (docs/costs.md)."""
_PARTS = 8
"""Most parts of the queries' gradient, one per block of keys, that a fused backward kernel may leave to be summed.

So many parts need about as much memory as the feed-forward block of the same layer at its time.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class _Chosen:
    """The kernel and exchange that are set for the code that is traced."""

    kernel: str
    notes: list[str]
    """Receives notes on attentions that do not use the kernel or the ring."""
    exchange: str


_chosen: contextvars.ContextVar[_Chosen | None] = contextvars.ContextVar("attention kernel", default=None)


def check_kernel(kernel: str) -> str:
    """Return the kernel's name, one of `KERNELS` or `GPU_AUTO`, unchanged.

    Raises `UserError` for an unknown name.
    """
    if kernel not in (*KERNELS, GPU_AUTO):
        raise UserError(f"attention `{kernel}` is not known; use {', '.join(KERNELS[:-1])} or {KERNELS[-1]}.")
    return kernel


@contextlib.contextmanager
def attention_kernel(kernel: str, notes: list[str], exchange: str = "auto") -> Iterator[None]:
    """Set the kernel, of `KERNELS` or `GPU_AUTO`, that computes attention while inside.

    - `kernel`: name of the kernel, not checked here (`check_kernel`).
    - `notes`: receives the attentions for which `auto` uses no kernel, and those that cannot use a requested ring.
    - `exchange`: `ring` sends keys and values around a ring of devices; `gather` excludes the fused backward kernel
      (`blocks_of`).
    """
    token = _chosen.set(_Chosen(kernel, notes, exchange))
    try:
        yield
    finally:
        _chosen.reset(token)


def uses_splash(refused: str, idle: str) -> bool:
    """Return True if the splash kernel computes an attention: named, or with `auto` possible and a gain.

    - `refused`: reason why the kernel is impossible, or empty.
    - `idle`: reason why the kernel would gain nothing, or empty; it counts for `auto` only, which notes either
      reason.

    Outside of `attention_kernel` it is False. Raises `UserError` if the user named splash and it is impossible. It
    also does so, in every case, if the user named `cached`: this attention has no cache.
    """
    chosen = _chosen.get()
    if chosen is None or chosen.kernel in ("plain", "cudnn", GPU_AUTO):
        return False
    if chosen.kernel == "cached":
        raise UserError("attention `cached` is for steps of decoding (--serve decode); use `auto` or `splash`.")
    if chosen.kernel == "splash" and refused:
        raise UserError(f"attention `splash` cannot be: {refused}; use `auto` or `plain`.")
    if chosen.kernel == "auto" and (refused or idle):
        _note(chosen, f"An attention stays plain: {refused or idle}.")
        return False
    return True


def uses_cached(refused: str, idle: str) -> bool | None:
    """Return True if the cached kernel computes an attention over a cache; None with any kernel but `cached` and
    `auto`.

    - `refused`: reason why the kernel is impossible, or empty.
    - `idle`: reason why the kernel would gain nothing, or empty; it counts for `auto` only.

    Outside of `attention_kernel` it is None. It is False if `auto` finds either reason, which becomes a note. Raises
    `UserError` if the user named the kernel and it is impossible.
    """
    chosen = _chosen.get()
    if chosen is None or chosen.kernel not in ("cached", "auto"):
        return None
    if refused and chosen.kernel == "cached":
        raise UserError(f"attention `cached` cannot be: {refused}; use `auto` or `plain`.")
    if chosen.kernel == "auto" and (refused or idle):
        _note(chosen, f"An attention over the cache stays plain: {refused or idle}.")
        return False
    return True


def uses_cudnn(refused: str) -> bool:
    """Return True if cuDNN computes an attention; `refused` is the reason why it is impossible, or empty.

    Raises `UserError` if the user named the kernel and it is impossible; with `GPU_AUTO` the reason becomes a note.
    """
    chosen = _chosen.get()
    if chosen is None or chosen.kernel not in ("cudnn", GPU_AUTO):
        return False
    if refused and chosen.kernel == "cudnn":
        raise UserError(f"attention `cudnn` cannot be: {refused}; use `auto` or `plain`.")
    if refused:
        _note(chosen, f"An attention stays plain: {refused}.")
    return not refused


def uses_ring(refused: str) -> bool:
    """Return True if keys and values go around a ring; `refused` is the reason why this is impossible, or empty.

    A ring must be requested by `attention_kernel`; if it is impossible, a note gives the reason.
    """
    chosen = _chosen.get()
    if chosen is None or chosen.exchange != "ring":
        return False
    if refused:
        _note(chosen, f"An attention goes around no ring: {refused}.")
    return not refused


def prefers_splash() -> bool:
    """Return True if the splash kernel is requested wherever it is possible (`splash` or `auto`)."""
    chosen = _chosen.get()
    return chosen is not None and chosen.kernel in ("splash", "auto")


def _note(chosen: _Chosen, note: str) -> None:
    """Add a note once."""
    if note not in chosen.notes:
        chosen.notes.append(note)


def refusal(
    query: Sequence[int], key: Sequence[int], *, bias: bool, padding: bool, position: bool, causal: bool
) -> str:
    """Return the reason why splash attention is impossible; empty if it is possible.

    - `query`, `key`: shapes [B, H, S, D] and [B, K, T, D].
    - `bias`, `padding`: True if the scores have a bias or mask, or if keys are marked as padding.
    - `position`: True if queries follow a cache of keys.
    - `causal`: True if the attention is causal.
    """
    length, keys = query[2], key[2]
    masked = mask_refusal(bias=bias, padding=padding, position=position)
    if masked:
        return masked
    if causal and length > keys:
        return f"{length} causal queries of {keys} keys leave some without any"
    return ""


def mask_refusal(*, bias: bool, padding: bool, position: bool) -> str:
    """Return the first reason why a model's own masks exclude kernels; empty if they do not.

    - `bias`, `padding`: True for a bias or mask of the scores, and for a mask of padded keys.
    - `position`: True if queries follow a cache of keys.
    """
    if position:
        return "its queries come after a cache of keys, which the kernel has no mask for"
    if bias:
        return "its scores have a bias or a mask of their own, which the kernel does not take"
    if padding:
        return "it has a mask of padded keys, and a query that sees none has no result in the kernel"
    return ""


def no_gain(length: int, keys: int, causal: bool, window: int | None, size: int) -> str:
    """Return the reason why sequences padded to the kernel's blocks take longer than scores in memory; empty if not.

    It is empty for lengths that are multiples of `LANES`.

    - `length`, `keys`: numbers of queries and keys.
    - `causal`, `window`: masks of the scores.
    - `size`: head dim.
    """
    if length % LANES == 0 and keys % LANES == 0:
        return ""
    padded = _work(length, keys, causal, window, size, block_of(length, keys, causal, window, size))
    if padded < length * keys * (4.0 * size + _PLAIN * _MOVED):
        return ""
    return f"{length} queries of {keys} keys take longer padded to a kernel's blocks, which are multiples of {LANES}"


def block_of(length: int, keys: int, causal: bool, window: int | None, size: int) -> int:
    """Return the queries, and keys, of the fastest block, the largest of equal ones.

    Large blocks need fewer steps, small ones compute fewer masked scores. Sequences that a block does not divide are
    padded.
    """
    return min(_BLOCKS, key=lambda block: _work(length, keys, causal, window, size, block))


def block_sizes_words(length: int, keys: int, size: int) -> tuple[int, str]:
    """Return the side of the fastest block that divides both sequences under a causal mask, and `block_sizes` in words.

    jax's kernels refuse sequences that their blocks do not divide. (0, "") if no block divides them. `length`, `keys`
    and `size` are as in `block_of`.
    """
    sides = [block for block in _BLOCKS if length % block == 0 and keys % block == 0]
    if not sides:
        return 0, ""
    side = min(sides, key=lambda block: _work(length, keys, True, None, size, block))
    part = math.gcd(side, _PART)
    return side, f"block_sizes of {side}" + (f", block_kv_compute of {part}" if part < side else "")


def _work(length: int, keys: int, causal: bool, window: int | None, size: int, block: int) -> float:
    """Return the time of the forward kernel of one head with square blocks of `block`, as FLOPs of a TPU core."""
    rows, columns = padded(length, block), padded(keys, block)
    sides = (block, block)
    share = computed_share(rows, columns, causal, window, sides)
    # Padding reads and writes queries, keys, values and results, with two bytes an element.
    moved = 8.0 * size * ((length + keys) if (rows, columns) != (length, keys) else 0)
    steps = grid_steps(rows, columns, causal, window, sides)
    # Two matmuls over the scores, with two FLOPs for each product.
    return share * 4.0 * rows * columns * size + _STEP * steps + _MOVED * moved


def kernel_work(length: int, window: int | None, size: int) -> tuple[float, int]:
    """Return the share of one head's causal scores that a kernel with default blocks computes, and its grid steps.

    The share is that of `length` x `length` scores, and above 1 where padding needs more; others as in `block_of`.
    """
    side = block_of(length, length, True, window, size)
    rows = padded(length, side)
    share = computed_share(rows, rows, True, window, (side, side)) * (rows / length) ** 2
    return share, grid_steps(rows, rows, True, window, (side, side))


def padded(length: int, block: int) -> int:
    """Return the least multiple of `block` that is no less than `length`."""
    return -(-length // block) * block


def blocks_of(length: int, keys: int, causal: bool, window: int | None, size: int) -> KernelBlocks:
    """Return the default blocks of the kernels: squares, with the side from `block_of`.

    The backward kernel is fused if there is no window and keys have at most `_PARTS` blocks, unless
    `attention_kernel` has the exchange `gather`. One fused kernel has five matmuls over the scores, two kernels have
    seven. But the fused kernel writes a part of the queries' gradient for each block of keys, and does not skip
    blocks outside of a window. It also computes all gradients of a shard from all of its queries. A sequence whose
    keys are gathered could therefore not be split.
    """
    side = block_of(length, keys, causal, window, size)
    chosen = _chosen.get()
    ungathered = chosen is None or chosen.exchange != "gather"
    square = (side, side)
    return KernelBlocks(square, square, square, fused=ungathered and window is None and -(-keys // side) <= _PARTS)


def splash_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    blocks: KernelBlocks | None = None,
) -> Any:
    """Compute softmax attention by jax's kernel; return [B, K, G, S, E].

    - `query`: [B, K, G, S, D]; each of the K key-value heads serves G query heads.
    - `key`, `value`: [B, K, T, D] and [B, K, T, E].
    - `causal`, `window`, `softcap`: masks and bound of the scores. Causal queries see the last `window` keys, others
      the keys less than `window` away. The last query is at the last key.
    - `scale`: factor of the scores; None for D ** -0.5.
    - `blocks`: blocks of the kernels, by default those of `blocks_of`. They are shortened to the sequences, rounded
      up to `LANES`; sequences are padded to a multiple of all.

    It records the model FLOPs of the visible scores (`model_flops`). It does not check that the attention is
    possible (`refusal`).

    The kernel covers the heads of a group and is mapped over batch and key-value heads, so that all three can be
    split. It runs on TPUs and compiles for them. It is interpreted unless JAX has started with a TPU
    (`interpreted`).
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, keys, size = query.shape[3], key.shape[2], query.shape[4]
    scores = math.prod(query.shape[:4]) * keys * seen_share(length, keys, causal, window)
    model_flops.record(2.0 * scores * (size + value.shape[3]))
    if blocks is None:
        blocks = blocks_of(length, keys, causal, window, size)
    high, wide = padded(length, LANES), padded(keys, LANES)
    forward, of_keys, of_queries = (
        (min(q, high), min(k, wide)) for q, k in (blocks.forward, blocks.keys, blocks.queries)
    )
    sizes = kernel.BlockSizes(
        block_q=forward[0],
        block_kv=forward[1],
        block_kv_compute=math.gcd(forward[1], _PART),
        block_q_dkv=of_keys[0],
        block_kv_dkv=of_keys[1],
        block_kv_dkv_compute=math.gcd(of_keys[1], _PART),
        block_q_dq=None if blocks.fused else of_queries[0],
        block_kv_dq=None if blocks.fused else of_queries[1],
        use_fused_bwd_kernel=blocks.fused,
    )
    divided = (forward, of_keys) if blocks.fused else (forward, of_keys, of_queries)
    rows, columns = (
        padded(count, math.lcm(*(sides[k] for sides in divided))) for k, count in enumerate((length, keys))
    )
    late = keys - length  # the last query sees the last key
    if window is not None:
        mask: Any = masks.LocalMask((rows, columns), (window - 1, 0 if causal else window - 1), late)
    else:
        mask = masks.CausalMask((rows, columns), late) if causal else masks.FullMask((rows, columns))
    one = kernel.make_splash_mqa_single_device(
        masks.MultiHeadMask([mask] * query.shape[2]),
        block_sizes=sizes,
        attn_logits_soft_cap=softcap,
        interpret=interpreted(),
        residual_checkpoint_name=mark_of(CONTEXT) or CONTEXT,  # row sums too, or the kernel would run again
    )
    if columns > keys and not causal:
        # A causal mask hides padding after the last query. Without one, padding is a segment without queries.
        ids = kernel.SegmentIds(jnp.zeros(rows, jnp.int32), (jnp.arange(columns) >= keys).astype(jnp.int32))
        one = functools.partial(one, segment_ids=ids)
    scaled = query * (size**-0.5 if scale is None else scale)
    mixed: Any = jax.vmap(jax.vmap(one))(
        _lengthened(scaled.astype(query.dtype), rows), _lengthened(key, columns), _lengthened(value, columns)
    )
    return mixed[..., :length, :] if rows > length else mixed


def _lengthened(tensor: Any, length: int) -> Any:
    """Return `tensor` [..., S, D] with zeros appended to its sequence, up to `length`."""
    import jax.numpy as jnp

    more = length - tensor.shape[-2]
    return jnp.pad(tensor, [(0, 0)] * (tensor.ndim - 2) + [(0, more), (0, 0)]) if more else tensor


def interpreted() -> bool:
    """Return True if kernels are interpreted, which is so without a TPU, and as long as JAX has no backend.

    Programs that are compiled for TPUs contain the kernel in either case.
    """
    bridge = sys.modules.get("jax._src.xla_bridge")
    started = getattr(bridge, "backends_are_initialized", None)
    if started is None or not started():
        return True  # a query would start a backend, and nothing runs yet
    import jax

    return jax.default_backend() != "tpu"


def kernels_as_they_are() -> tuple[Any, Any]:
    """Return Pallas' primitive, and a lowering of it that emits real kernels for those with `interpret=True` too."""
    pallas = importlib.import_module("jax._src.pallas.pallas_call")

    def lower(ctx: Any, *values: Any, **params: Any) -> Any:
        interpret = params["interpret"] if params["interpret"] is not True else False
        return pallas._pallas_call_lowering(ctx, *values, **(params | {"interpret": interpret}))

    return (pallas.pallas_call_p, lower)
