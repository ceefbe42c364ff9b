"""Rules of ops that Shardy has none for: the ends of regions that a program splits by hand, and what is inside.

At an end of a region a dim that the region splits is one factor outside, which only the region's own axes may split,
and another inside, which stays whole; every other dim is one factor on both sides, free for the other axes.
"""

from collections.abc import Sequence

from autoshard.graph._records import FactorKind, Rule, Sharding


IN, OUT = "shard_map_in", "shard_map_out"
"""Kinds of the ops that stand for the ends of a region: one for every operand, one for every result."""

COLLECTIVES = frozenset(
    {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "collective_broadcast",
    }
)  # fmt: skip

Fixed = tuple[tuple[int, tuple[str, ...]], ...]


def end_rule(outside: Sequence[int], inside: Sequence[int], sharding: Sharding, kind: str) -> tuple[Rule, Fixed]:
    """The rule of one end of a region, and which axes split which of its factors, from both shapes."""
    sizes: list[int] = []
    kinds: list[FactorKind] = []
    outer: list[tuple[int, ...]] = []
    inner: list[tuple[int, ...]] = []
    fixed = []
    for large, small, axes in zip(outside, inside, sharding.dims, strict=True):
        outer.append((len(sizes),))
        if axes:
            fixed.append((len(sizes), tuple(axis.name for axis in axes)))
            sizes += [large, small]
            kinds += [FactorKind.PARALLEL, FactorKind.NEED_REPLICATION]
        else:
            sizes.append(large)
            kinds.append(FactorKind.PARALLEL)
        inner.append((len(sizes) - 1,))
    sides = (outer, inner) if kind == IN else (inner, outer)
    return Rule(tuple(sizes), tuple(kinds), (tuple(sides[0]),), (tuple(sides[1]),)), tuple(fixed)


def same_rule(operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]) -> Rule | None:
    """The rule of a collective, or of a constraint: dims keep their place, those that change size stay whole.

    None where operands and results have different ranks.
    """
    rank = len(operands[0])
    if any(len(shape) != rank for shape in (*operands, *results)):
        return None
    sizes, kinds = list(operands[0]), [FactorKind.PARALLEL] * rank
    sides = []
    for shape in (*operands, *results):
        dims = []
        for dim, size in enumerate(shape):
            if size == operands[0][dim]:
                dims.append((dim,))
                continue
            kinds[dim] = FactorKind.NEED_REPLICATION
            dims.append((len(sizes),))
            sizes.append(size)
            kinds.append(FactorKind.NEED_REPLICATION)
        sides.append(tuple(dims))
    count = len(operands)
    return Rule(tuple(sizes), tuple(kinds), tuple(sides[:count]), tuple(sides[count:]))
