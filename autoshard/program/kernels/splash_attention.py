"""jax's splash attention for TPUs: a kernel that never writes its scores to memory, where a program may choose it.

Every attention of a torch module or a Hugging Face model asks `chosen_kernel` (through `attend`) which kernel it is
computed by; `attention_kernel` says so for what is traced inside of it.
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
"""How attention may be computed: scores in full, jax's splash kernel, a kernel over what a cache holds, cuDNN's on
GPUs, or one of the first three wherever it can be and gains something."""

GPU_AUTO = "auto:cudnn"
"""What `auto` is where a program is planned for GPUs: cuDNN's kernel wherever it can be."""

LANES = 128
"""Elements of a TPU register's row: blocks of scores are multiples of it."""

_BLOCKS = (1024, 512, 256, 128)
_PART = 512
"""Keys of a block that a kernel multiplies at once."""
_MOVED = 450.0
"""FLOPs that a TPU's core multiplies while it moves a byte of its main memory (v6e)."""
_PLAIN = 12
"""Bytes that a score takes through main memory where no kernel computes it: f32 and narrowed, written and read."""
_STEP = 5.2e8
"""FLOPs that a TPU's core multiplies in the 0.7 us that a step of the kernel's grid takes by itself (docs/costs.md)."""
_PARTS = 8
"""Parts of the queries' gradient, one for each block of keys, that a fused backward kernel may leave to be summed:
about as much memory as the feed-forward block of the same layer holds at its time."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Chosen:
    kernel: str
    notes: list[str]
    exchange: str


_chosen: contextvars.ContextVar[_Chosen | None] = contextvars.ContextVar("attention kernel", default=None)


def check_kernel(kernel: str) -> str:
    """The kernel's name. Raises `UserError` for one that there is not."""
    if kernel not in (*KERNELS, GPU_AUTO):
        raise UserError(f"attention `{kernel}` is not known; use {', '.join(KERNELS[:-1])} or {KERNELS[-1]}.")
    return kernel


@contextlib.contextmanager
def attention_kernel(kernel: str, notes: list[str], exchange: str = "auto") -> Iterator[None]:
    """While inside, attention is computed by `kernel` of `KERNELS`; `notes` say where `auto` takes none.

    With the `exchange` `ring` its keys and values go around a ring; `notes` say where they cannot.
    """
    token = _chosen.set(_Chosen(kernel, notes, exchange))
    try:
        yield
    finally:
        _chosen.reset(token)


def takes_splash(refused: str, idle: str) -> bool:
    """Return True if the kernel computes an attention.

    `refused` says why it cannot, `idle` why it would gain nothing (each empty: it can, it gains).

    Raises `UserError` where the kernel was asked for by name.
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


def takes_cached(refused: str, idle: str) -> bool | None:
    """Whether attention over a cache is computed by the kernel for it, which cannot do so for the reason `refused`, or
    would gain nothing for the reason `idle` (each empty: it can, it gains); None where another one was asked for.

    Raises `UserError` where the kernel was asked for by name.
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


def takes_cudnn(refused: str) -> bool:
    """Whether attention that cuDNN cannot compute for the reason `refused` (empty: it can) is computed by it.

    Raises `UserError` where it was asked for by name.
    """
    chosen = _chosen.get()
    if chosen is None or chosen.kernel not in ("cudnn", GPU_AUTO):
        return False
    if refused and chosen.kernel == "cudnn":
        raise UserError(f"attention `cudnn` cannot be: {refused}; use `auto` or `plain`.")
    if refused:
        _note(chosen, f"An attention stays plain: {refused}.")
    return not refused


def takes_ring(refused: str) -> bool:
    """Whether attention whose keys and values cannot go around a ring for the reason `refused` does so."""
    chosen = _chosen.get()
    if chosen is None or chosen.exchange != "ring":
        return False
    if refused:
        _note(chosen, f"An attention goes around no ring: {refused}.")
    return not refused


def prefers_splash() -> bool:
    """Whether the kernel is wanted wherever it can be."""
    chosen = _chosen.get()
    return chosen is not None and chosen.kernel in ("splash", "auto")


def _note(chosen: _Chosen, note: str) -> None:
    if note not in chosen.notes:
        chosen.notes.append(note)


def refusal(
    query: Sequence[int], key: Sequence[int], *, bias: bool, padding: bool, position: bool, causal: bool
) -> str:
    """Why the kernel cannot compute attention of `query` [B, H, S, D] over `key` [B, K, T, D]; empty if it can."""
    length, keys = query[2], key[2]
    masked = mask_refusal(bias=bias, padding=padding, position=position)
    if masked:
        return masked
    if causal and length > keys:
        return f"{length} causal queries of {keys} keys leave some without any"
    return ""


def mask_refusal(*, bias: bool, padding: bool, position: bool) -> str:
    """Why masks that a model brings keep attention from a kernel; empty if they do not."""
    if position:
        return "its queries come after a cache of keys, which the kernel has no mask for"
    if bias:
        return "its scores have a bias or a mask of their own, which the kernel does not take"
    if padding:
        return "it is told which keys are padding, and a query that sees none has no result in the kernel"
    return ""


def no_gain(length: int, keys: int, causal: bool, window: int | None, size: int) -> str:
    """Return why sequences padded to the kernel's blocks would take longer than scores in memory; empty if not."""
    if length % LANES == 0 and keys % LANES == 0:
        return ""
    padded = _work(length, keys, causal, window, size, block_of(length, keys, causal, window, size))
    if padded < length * keys * (4.0 * size + _PLAIN * _MOVED):
        return ""
    return f"{length} queries of {keys} keys take longer padded to a kernel's blocks, which are multiples of {LANES}"


def block_of(length: int, keys: int, causal: bool, window: int | None, size: int) -> int:
    """Return the queries, and keys, of one block: large ones take fewer steps, small ones compute less in vain.

    Sequences that a block does not divide are padded.
    """
    return min(_BLOCKS, key=lambda block: _work(length, keys, causal, window, size, block))


def _work(length: int, keys: int, causal: bool, window: int | None, size: int, block: int) -> float:
    """Return what the forward kernel of one head takes with such a block, as FLOPs of its time."""
    rows, columns = padded(length, block), padded(keys, block)
    sides = (block, block)
    share = computed_share(rows, columns, causal, window, sides)
    # Queries, keys, values and results are read and written, two bytes an element.
    moved = 8.0 * size * ((length + keys) if (rows, columns) != (length, keys) else 0)
    steps = grid_steps(rows, columns, causal, window, sides)
    return share * 4.0 * rows * columns * size + _STEP * steps + _MOVED * moved


def padded(length: int, block: int) -> int:
    """Return the least multiple of `block` that is no less than `length`."""
    return -(-length // block) * block


def blocks_of(length: int, keys: int, causal: bool, window: int | None, size: int) -> KernelBlocks:
    """The blocks of the kernels where nobody says them: squares, as `block_of` finds them.

    One fused backward kernel multiplies the scores five times, two take seven. But it writes a part of the queries'
    gradient for each block of keys, goes through blocks that a window leaves out, and makes all gradients of a shard
    from all of its queries, so that a sequence whose keys are gathered could not be split in it.
    """
    side = block_of(length, keys, causal, window, size)
    chosen = _chosen.get()
    whole = chosen is None or chosen.exchange != "gather"
    square = (side, side)
    return KernelBlocks(square, square, square, fused=whole and window is None and -(-keys // side) <= _PARTS)


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
    """Softmax attention: `query` [B, K, G, S, D], `key` [B, K, T, D], `value` [B, K, T, E] give [B, K, G, S, E].

    Each of the K key-value heads serves G query heads. The kernel is one over the heads of a group, mapped over batch
    and key-value heads, so all three can be split. It runs on TPUs and compiles for them; where JAX has started
    without any it is interpreted. `blocks` are those of its kernels, by default those of `blocks_of`. Sequences are
    padded to a multiple of all of them.
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
        residual_checkpoint_name=mark_of(CONTEXT) or CONTEXT,  # with it its row sums: else it would run again
    )
    if columns > keys and not causal:
        # A causal mask hides padding behind the last query. Else it is a segment that no query is of.
        ids = kernel.SegmentIds(jnp.zeros(rows, jnp.int32), (jnp.arange(columns) >= keys).astype(jnp.int32))
        one = functools.partial(one, segment_ids=ids)
    scaled = query * (size**-0.5 if scale is None else scale)
    mixed: Any = jax.vmap(jax.vmap(one))(
        _lengthened(scaled.astype(query.dtype), rows), _lengthened(key, columns), _lengthened(value, columns)
    )
    return mixed[..., :length, :] if rows > length else mixed


def _lengthened(tensor: Any, length: int) -> Any:
    """Return `tensor` [..., S, D] with zeros behind its sequence, up to `length`."""
    import jax.numpy as jnp

    more = length - tensor.shape[-2]
    return jnp.pad(tensor, [(0, 0)] * (tensor.ndim - 2) + [(0, more), (0, 0)]) if more else tensor


def interpreted() -> bool:
    """Whether kernels are interpreted: where no TPU is. What is compiled for TPUs holds the kernel all the same."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    started = getattr(bridge, "backends_are_initialized", None)
    if started is None or not started():
        return True  # asking would start a backend, and nothing runs yet
    import jax

    return jax.default_backend() != "tpu"


def kernels_as_they_are() -> tuple[Any, Any]:
    """Pallas' primitive, and a lowering of it that makes kernels also of those that are interpreted here."""
    pallas = importlib.import_module("jax._src.pallas.pallas_call")

    def lower(ctx: Any, *values: Any, **params: Any) -> Any:
        interpret = params["interpret"] if params["interpret"] is not True else False
        return pallas._pallas_call_lowering(ctx, *values, **(params | {"interpret": interpret}))

    return (pallas.pallas_call_p, lower)
