"""Slices and pads along a dim that is split: by how far they move elements from shard to shard."""

from autoshard.graph._records import FactorKind, Halo, Rule
from autoshard.graph._rotate import Cut


def offsets(kind: str, rule: Rule | None, cut: Cut, halos: tuple[Halo, ...]) -> tuple[tuple[int, int], ...]:
    """(factor, places) for every factor of a slice or pad that takes elements as they follow one another.

    The result begins `places` elements after the operand's beginning, or before it if negative. Factors that a region
    splits (`halos`), and dims with gaps or strides, are left out.
    """
    if rule is None or kind not in ("slice", "pad"):
        return ()
    starts, _, steps = cut
    own = {halo.factor for halo in halos}
    sign, even = (1, 1) if kind == "slice" else (-1, 0)
    return tuple(
        (factors[0], sign * start)
        for factors, start, step in zip(rule.operands[0], starts, steps, strict=True)
        if len(factors) == 1
        and factors[0] not in own
        and step == even
        and rule.kinds[factors[0]] is FactorKind.PERMUTATION
    )
