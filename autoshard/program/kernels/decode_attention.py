"""Attention of one new token over a key-value cache, as a kernel that reads only the filled places.

jax's own TPU kernels do not fit this cache. `paged_attention` rounds keys and values to bfloat16 and does not return
the sums with which parts of a cache on several devices could be combined. `ragged_paged_attention` wants keys and
values of a position next to each other.

This kernel reads the stack of all layers `[layers, B, K, T, D]` and looks the layer up. Compilers copy a layer that is
sliced out of a stack for a kernel. Batch, key-value heads and parts of the positions are independent, so a plan may
split all three.
"""

import dataclasses
import functools
import math
from typing import Any

from autoshard.base.call_rules import parse_call_rule
from autoshard.mlir import CallWork
from autoshard.program import model_flops
from autoshard.program.kernels.cached_keys import CachedKeys, lies_in_order
from autoshard.program.kernels.splash_attention import LANES, interpreted
from autoshard.program.registered_rules import RuledFunction


NAME = "cached_attention"
"""Name of the call in a program, and of the kernel in the compiled program."""

_BLOCK_BYTES = 4 << 20
"""Bytes of keys and values in one grid step; two such blocks fit a TPU's scoped memory."""
_ROWS = 16
"""Most heads, of one sequence or several, in one block; each adds two small matmuls to the kernel's code."""
_PART = 2048
"""Fewest positions in a part that a plan may split off; each part adds a result for every query head."""
_PARTS = 32
"""Most parts of the positions."""
_PLACES = 5
"""Number of the call rule's factor for the parts."""
_WORTH = 0.5
"""Largest filled share of a cache at which `auto` uses the kernel.

A grid step costs a tenth (v5e) to half (tpu7x) of reading its block, so that a filled cache is slower with the kernel.
Evidence: docs/compiler_behaviour.md, "Time of the cached-attention kernel over a filled cache".
"""
_LOW = -1e30
"""A number below any score, and finite so that the difference of two is no NaN."""


def cached_refusal(query: tuple[int, ...], held: CachedKeys, *, masked: str, causal: bool) -> str:
    """Return the reason why the kernel cannot compute an attention over the cache; empty if it can.

    - `query`: shape [B, H, S, D]; S must be 1.
    - `held`: the cache; its positions and head sizes must be multiples of 128, laid out row by row.
    - `masked`: reason why masks of the model exclude every kernel, or empty.
    - `causal`: True if the attention is causal.
    """
    if query[2] != 1 or not causal:
        return "the kernel is for one new token a sequence, which sees what was before it"
    if masked:
        return masked
    *_, length, size = held.keys.shape
    if not all(lies_in_order(each.shape) and each.shape[-1] % LANES == 0 for each in (held.keys, held.values)):
        return f"heads of {size} are no multiples of {LANES}, so a TPU lays their cache out otherwise than kernels read"
    if length % LANES:
        return f"a cache of {length} tokens is no multiple of {LANES}"
    return ""


def no_gain(held: CachedKeys) -> str:
    """Return the reason why `auto` does not use the kernel although it could; empty if it does.

    The kernel gains if at most `_WORTH` of the places are expected to be read.
    """
    length = held.keys.shape[-2]
    if held.filled <= _WORTH * length:
        return ""
    return (
        f"{held.filled} of its {length} places are to be read, and without a kernel all are read once, which is as fast"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Blocks:
    """Numbers of sequences, heads and positions in one step of the kernel's grid."""

    batch: int
    heads: int
    positions: int

    @classmethod
    def of(cls, batch: int, heads: int, length: int, position_bytes: int) -> "_Blocks":
        """Return the largest blocks within the limits `_ROWS` and `_BLOCK_BYTES` that divide the sizes.

        - `batch`, `heads`, `length`: sequences, key-value heads and positions on a device.
        - `position_bytes`: bytes of key and value of one position and one head.

        Heads come first, then sequences. Blocks of positions are multiples of `LANES`, and at least that.
        """
        of_heads = _divisor(heads, _ROWS)
        of_batch = _divisor(batch, _ROWS // of_heads)
        most = _BLOCK_BYTES // (of_heads * of_batch * position_bytes)
        fitting = [n for n in range(LANES, min(length, most) + 1, LANES) if length % n == 0]
        return cls(of_batch, of_heads, max(fitting, default=LANES))


def cached_attention(
    query: Any,
    held: CachedKeys,
    *,
    position: Any,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Any:
    """Compute softmax attention over the places up to `position` of a cache; return [B, K, G, E] in fp32.

    - `query`: [B, K, G, D], one new token for each sequence.
    - `held`: keys [layers, B, K, T, D] and values [layers, B, K, T, E]; the call's price is that of `held.filled`
      places. Without a layer number it is layer 0.
    - `position`: position of the new token, a scalar; it sees itself too.
    - `scale`: factor of the scores; None for D ** -0.5.
    - `window`: if given, only the last so many places are visible.
    - `softcap`: bound of the scores, applied as a scaled tanh.

    The kernel runs on TPUs and compiles for them. It is interpreted unless JAX has started with a TPU (`interpreted`).
    """
    import jax.numpy as jnp

    keys, values = held.keys, held.values
    batch, heads, groups, size = query.shape
    length, value_size = keys.shape[3], values.shape[4]
    parts = next((n for n in range(min(_PARTS, length // _PART), 1, -1) if length % (n * LANES) == 0), 1)
    each = length // parts
    seen = min(held.filled, length if window is None else window)
    model_flops.record(2.0 * batch * heads * groups * seen * (size + value_size))

    end = jnp.asarray(position, jnp.int32) + 1
    begin = jnp.int32(0) if window is None else jnp.maximum(end - window, 0)
    first = jnp.arange(parts, dtype=jnp.int32) * each
    begins, ends = (jnp.clip(x - first, 0, each) for x in (begin, end))
    call = _call(
        seen=seen,
        rows=batch * heads,
        sizes=(groups, parts, each, size, value_size),
        itemsize=keys.dtype.itemsize,
        scale=size**-0.5 if scale is None else scale,
        softcap=softcap,
    )
    layer = jnp.zeros((1,), jnp.int32) if held.layer is None else jnp.asarray(held.layer, jnp.int32).reshape(1)
    mixed, sums = call(query, keys, values, layer, begins, ends)
    if parts == 1:
        return mixed[:, :, :, 0]
    # Parts are combined by their sums of exponentials, relative to the largest for stability.
    shares = jnp.exp(sums - sums.max(axis=3, keepdims=True))
    return (mixed * shares[..., None]).sum(axis=3) / shares.sum(axis=3)[..., None]


def _call(
    *, seen: int, rows: int, sizes: tuple[int, ...], itemsize: int, scale: float, softcap: float | None
) -> RuledFunction:
    """Return the call of one attention over `rows` pairs of sequence and key-value head, with rule, FLOPs and bytes.

    - `seen`: places that are expected to be read.
    - `sizes`: G, number of parts, positions of one part, D, E.
    - `itemsize`: bytes of one element of the cache.
    - `scale`, `softcap`: factor and bound of the scores; None for no bound.
    """
    groups, parts, each, size, value_size = sizes
    flops = 2 * rows * groups * seen * (size + value_size)
    read = rows * seen * (size + value_size) * itemsize
    places = "(p t)" if parts > 1 else "t"
    rule = parse_call_rule(
        NAME,
        f"b k g d, l b k {places} d, l b k {places} e, o, p, p -> b k g p e, b k g p",
        need_replication="g d l t e o",
        sizes={"t": each},
    )

    def fn(query: Any, keys: Any, values: Any, layer: Any, begins: Any, ends: Any) -> Any:
        return _on_shards(query, keys, values, layer, begins, ends, seen=seen, scale=scale, softcap=softcap)

    # A cache fills from its first part on, so that the first parts are full while the last are empty.
    uneven = {_PLACES: each * parts / seen} if parts > 1 and seen < each * parts else {}
    return RuledFunction(fn, rule, (), CallWork(flops, read, steps=-(-read // _BLOCK_BYTES), imbalance=uneven))


def _on_shards(
    query: Any,
    keys: Any,
    values: Any,
    layer: Any,
    begins: Any,
    ends: Any,
    *,
    seen: int,
    scale: float,
    softcap: float | None,
) -> tuple[Any, Any]:
    """Return the means of values [B, K, G, P, E], and the logarithms of their sums of exponentials [B, K, G, P].

    All parts of one device are computed as one and returned as its first part; the other parts have empty sums. `seen`:
    places that are expected to be read, in all parts.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    batch, heads, groups, size = query.shape
    length, value_size = keys.shape[3], values.shape[4]
    parts = begins.shape[0]
    blocks = _Blocks.of(batch, heads, length, (size + value_size) * keys.dtype.itemsize)
    steps = length // blocks.positions
    where = jnp.stack([layer[0], begins.sum(), ends.sum()])

    def of_query(b: Any, k: Any, t: Any, where: Any) -> tuple[Any, ...]:
        return b, k, 0, 0

    def of_cache(b: Any, k: Any, t: Any, where: Any) -> tuple[Any, ...]:
        # Outside of the visible places the index stays at the nearest visible block, so that no block is read twice.
        last = jax.lax.div(jnp.maximum(where[2] - 1, 0), blocks.positions)
        first = jnp.minimum(jax.lax.div(where[1], blocks.positions), last)
        return where[0], b, k, jnp.clip(t, first, last), 0

    def block(*shape: int) -> tuple[int, ...]:
        return (blocks.batch, blocks.heads, *shape)

    rows = math.prod(block())
    kernel = functools.partial(_kernel, steps=steps, blocks=blocks, scale=scale, softcap=softcap)
    scores = batch * heads * min(seen, length)
    mixed, sums = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch // blocks.batch, heads // blocks.heads, steps),
            in_specs=[
                pl.BlockSpec(block(groups, size), of_query),
                pl.BlockSpec((1, *block(blocks.positions, size)), of_cache),
                pl.BlockSpec((1, *block(blocks.positions, value_size)), of_cache),
            ],
            out_specs=[pl.BlockSpec(block(groups, value_size), of_query), pl.BlockSpec(block(groups, 1), of_query)],
            scratch_shapes=[
                pltpu.VMEM((rows, groups, value_size), jnp.float32),
                pltpu.VMEM((rows, groups, 1), jnp.float32),
                pltpu.VMEM((rows, groups, 1), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, groups, value_size), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, groups, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * scores * groups * (size + value_size),
            transcendentals=scores * groups,
            bytes_accessed=scores * (size + value_size) * keys.dtype.itemsize,
        ),
        interpret=interpreted(),
        name=NAME,
    )(where, query, keys, values)
    own = jnp.arange(parts) == 0
    return (
        jnp.where(own[:, None], mixed[:, :, :, None], 0.0),
        jnp.where(own, sums, _LOW),
    )


def _kernel(
    where: Any,
    query: Any,
    keys: Any,
    values: Any,
    mixed: Any,
    sums: Any,
    total: Any,
    highest: Any,
    weight: Any,
    *,
    steps: int,
    blocks: _Blocks,
    scale: float,
    softcap: float | None,
) -> None:
    """Compute one block of positions of a few heads: update the running sum of values, maximum score and weight.

    - `where`: layer, first visible place and end of the visible places, [3] int32.
    - `query`, `keys`, `values`: blocks of the operands.
    - `mixed`, `sums`: blocks of the results, written at the last step.
    - `total`, `highest`, `weight`: running sums, maxima and weights in scratch memory.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    step = pl.program_id(2)
    start = step * blocks.positions
    heads = [(b, k) for b in range(blocks.batch) for k in range(blocks.heads)]

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)
        highest[...] = jnp.full_like(highest, _LOW)
        weight[...] = jnp.zeros_like(weight)

    @pl.when((start < where[2]) & (start + blocks.positions > where[1]))
    def _() -> None:
        place = start + jax.lax.broadcasted_iota(jnp.int32, (query.shape[2], blocks.positions), 1)
        seen = (place >= where[1]) & (place < where[2])
        for row, (b, k) in enumerate(heads):
            scores = _product(query[b, k], keys[0, b, k], ((1,), (1,))) * scale
            if softcap is not None:
                scores = jnp.tanh(scores / softcap) * softcap
            scores = jnp.where(seen, scores, _LOW)
            high = jnp.maximum(highest[row], scores.max(axis=1, keepdims=True))
            less = jnp.exp(highest[row] - high)
            shares = jnp.where(seen, jnp.exp(scores - high), 0.0)
            weight[row] = weight[row] * less + shares.sum(axis=1, keepdims=True)
            total[row] = total[row] * less + _product(shares.astype(values.dtype), values[0, b, k], ((1,), (0,)))
            highest[row] = high

    @pl.when(step == steps - 1)
    def _() -> None:
        for row, (b, k) in enumerate(heads):
            positive = jnp.maximum(weight[row], jnp.finfo(jnp.float32).tiny)
            mixed[b, k] = total[row] / positive
            sums[b, k] = highest[row] + jnp.log(positive)


def _product(left: Any, right: Any, contracted: Any) -> Any:
    """Multiply in the right operand's dtype and accumulate in fp32; fp32 operands are multiplied in full precision."""
    import jax
    import jax.numpy as jnp

    exact = jax.lax.Precision.HIGHEST if right.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        left.astype(right.dtype), right, (contracted, ((), ())), precision=exact, preferred_element_type=jnp.float32
    )


def _divisor(size: int, most: int) -> int:
    """Return the largest divisor of `size` that is at most `most`."""
    return next(n for n in range(max(1, min(size, most)), 0, -1) if size % n == 0)
