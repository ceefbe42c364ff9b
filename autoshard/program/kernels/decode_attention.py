"""Attention of one new token over a key-value cache as a kernel, which reads only the places that hold something.

jax's own kernels for TPUs do not fit what is cached here: `paged_attention` rounds keys and values to bfloat16 whatever
the cache holds, and keeps the sums that parts of a cache on several devices would be combined by to itself;
`ragged_paged_attention` wants keys and values of a position side by side. This one takes the stack of all layers as it
lies, `[layers, B, K, T, D]`, and looks the layer up: compilers copy what they cut out of a stack for a kernel. Batch,
key-value heads and parts of the positions are independent, so a plan may split all three.
"""

import dataclasses
import functools
import math
from typing import Any

from autoshard.base.call_rules import parse_call_rule
from autoshard.mlir import CallWork
from autoshard.program import model_flops
from autoshard.program.kernels.cached_keys import Held, lies_in_order
from autoshard.program.kernels.splash_attention import LANES, interpreted
from autoshard.program.registered_rules import RuledFunction


NAME = "cached_attention"
"""The call in a program, and the kernel in what is compiled from it."""

_BLOCK_BYTES = 4 << 20
"""Keys and values of one step of the kernel's grid: two such blocks, one being read, fit a TPU's scoped memory."""
_ROWS = 16
"""Heads, of one sequence or several, in one block: each adds two small matmuls to the kernel's code."""
_PART = 2048
"""Fewest positions that the plan may split off: each part of a cache adds a result for every query head."""
_PARTS = 32
"""Most parts of the positions."""
_PLACES = 5
"""Factor of the call's rule: the parts."""
_WORTH = 0.5
"""Share of a cache that may be filled where the kernel is taken unasked. A step of its grid costs a tenth (v5e) to half
(tpu7x) of what reading its block does, so that a cache that is filled takes as much longer than without it."""
_LOW = -1e30
"""Below any score, and finite: differences of two of it are no NaN."""


def cached_refusal(query: tuple[int, ...], held: Held, *, masked: str, causal: bool) -> str:
    """Why the kernel cannot compute attention of `query` [B, H, S, D] over what is `held`; empty if it can.

    `masked`: why masks of the model's own keep it from any kernel, or empty.
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


def no_gain(held: Held) -> str:
    """Why the kernel is not taken unasked where it can be; empty if it is."""
    length = held.keys.shape[-2]
    if held.filled <= _WORTH * length:
        return ""
    return (
        f"{held.filled} of its {length} places are to be read, and without a kernel all are read once, which is as fast"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Blocks:
    """What one step of the kernel's grid takes."""

    batch: int
    heads: int
    positions: int

    @classmethod
    def of(cls, batch: int, heads: int, length: int, position_bytes: int) -> "_Blocks":
        """`position_bytes`: of one position's key and value of one head."""
        of_heads = _divisor(heads, _ROWS)
        of_batch = _divisor(batch, _ROWS // of_heads)
        most = _BLOCK_BYTES // (of_heads * of_batch * position_bytes)
        fitting = [n for n in range(LANES, min(length, most) + 1, LANES) if length % n == 0]
        return cls(of_batch, of_heads, max(fitting, default=LANES))


def cached_attention(
    query: Any,
    held: Held,
    *,
    position: Any,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Any:
    """Softmax attention: `query` [B, K, G, D] over the places up to `position` of a cache [layers, B, K, T, D] give
    [B, K, G, E] in fp32; with a `window` over the last so many of them.

    It runs on TPUs and compiles for them; where JAX has started without any it is interpreted. Its price is that of
    `held.filled` places.
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
    shares = jnp.exp(sums - sums.max(axis=3, keepdims=True))
    return (mixed * shares[..., None]).sum(axis=3) / shares.sum(axis=3)[..., None]


def _call(
    *, seen: int, rows: int, sizes: tuple[int, ...], itemsize: int, scale: float, softcap: float | None
) -> RuledFunction:
    """The call of one attention of `rows` sequences times heads; `sizes`: G, parts, positions of one, D, E."""
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

    # Parts of a cache that is filled to some place are filled one after the other, the first ones wholly.
    uneven = {_PLACES: each * parts / seen} if parts > 1 and seen < each * parts else {}
    return RuledFunction(fn, rule, (), CallWork(flops, read, steps=-(-read // _BLOCK_BYTES), uneven=uneven))


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
    """Means of values [B, K, G, P, E], and logarithms of the sums of exponentials that they are over [B, K, G, P].

    The parts of one device are computed as one, and given as the first of them: the others have no sums. `seen`: places
    that are expected to be read, in all parts.
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
        # Outside of what is seen the block is the nearest one that was read, or will be: nothing is read again.
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
    """One block of positions of a few heads: a running mean of values, its scores' maximum and weight."""
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
            held = jnp.maximum(weight[row], jnp.finfo(jnp.float32).tiny)
            mixed[b, k] = total[row] / held
            sums[b, k] = highest[row] + jnp.log(held)


def _product(left: Any, right: Any, contracted: Any) -> Any:
    import jax
    import jax.numpy as jnp

    exact = jax.lax.Precision.HIGHEST if right.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        left.astype(right.dtype), right, (contracted, ((), ())), precision=exact, preferred_element_type=jnp.float32
    )


def _divisor(size: int, most: int) -> int:
    """The largest divisor of `size` that is at most `most`."""
    return next(n for n in range(max(1, min(size, most)), 0, -1) if size % n == 0)
