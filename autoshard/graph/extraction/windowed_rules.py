"""Sharding rules of windowed ops, with factors that are split in space by exchanging halos."""

import dataclasses
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from autoshard.graph.extraction.rolls import Cut
from autoshard.graph.records import FactorKind, Halo, Rule, Tensor
from autoshard.mlir import convolution_dims, shifted_dims, windowed_dims


_Mapping = tuple[tuple[tuple[int, ...], ...], ...]
"""Factors of each dim of each tensor on one side of a rule."""


class _Draft:
    """A mutable rule, in which dims get new factors."""

    def __init__(self, rule: Rule) -> None:
        self.sizes, self.kinds = list(rule.sizes), list(rule.kinds)
        self.operands = [list(dims) for dims in rule.operands]
        self.results = [list(dims) for dims in rule.results]

    def factor(self, size: int, kind: FactorKind) -> int:
        """Add a factor and return its number."""
        self.sizes.append(size)
        self.kinds.append(kind)
        return len(self.sizes) - 1

    def rule(self) -> tuple[Rule, dict[int, int]]:
        """Return the rule without unused factors, and the new number of each remaining factor by its old one."""
        used = sorted({f for dims in (*self.operands, *self.results) for dim in dims for f in dim})
        number = {f: n for n, f in enumerate(used)}

        def renamed(side: list[list[tuple[int, ...]]]) -> _Mapping:
            """Return the factors of one side under their new numbers."""
            return tuple(tuple(tuple(number[f] for f in dim) for dim in dims) for dims in side)

        kinds = tuple(self.kinds[f] for f in used)
        sizes = tuple(self.sizes[f] for f in used)
        return Rule(sizes, kinds, renamed(self.operands), renamed(self.results)), number


def windowed_rule(
    kind: str,
    rule: Rule,
    attributes: Mapping[str, Any],
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    split: bool = True,
) -> tuple[Rule, tuple[Halo, ...]]:
    """Return the rule of a windowed op and its halos; dims that no halo can split keep Shardy's factors.

    - `kind`, `attributes`: kind and MLIR attributes of the op.
    - `rule`: Shardy's rule.
    - `split`: False to give no windowed dim a halo.

    A factor of a windowed dim has the size whose divisors split the dim evenly. It is a reduction if the op sums over
    the dim, else a permutation. Spatial dims of a convolution that no halo can split stay whole.
    """
    draft = _Draft(rule)
    shapes = [t.shape for t in operands]
    if kind == "convolution":
        spatial = convolution_dims(attributes)
        sides = (draft.operands[0], draft.operands[1], draft.results[0])
        for dims, side, tensor in zip(spatial, sides, (*operands[:2], results[0]), strict=True):
            for dim in dims:
                side[dim] = (draft.factor(tensor.shape[dim], FactorKind.NEED_REPLICATION),)
    halos = []
    count = len(results) if kind == "reduce_window" else 1
    for spot in windowed_dims(kind, attributes, shapes, results[0].shape) if split else ():
        new = draft.factor(spot.parts, FactorKind.REDUCTION if spot.summed else FactorKind.PERMUTATION)
        for dims in draft.operands[:count]:
            dims[spot.source] = (new,)
        if spot.partner is not None:
            draft.operands[1][spot.partner] = (new,)
        if spot.result is not None:
            for dims in draft.results:
                dims[spot.result] = (new,)
        halos.append(Halo(new, spot))
    if kind == "pad":
        _part_from_places(draft, attributes, shapes[0], {halo.factor for halo in halos})
    final, number = draft.rule()
    return final, tuple(dataclasses.replace(halo, factor=number[halo.factor]) for halo in halos)


def _part_from_places(
    draft: _Draft, attributes: Mapping[str, Any], shape: Sequence[int], own: AbstractSet[int]
) -> None:
    """Give dims that a pad cuts as much as it lengthens a permutation factor of their own.

    - `draft`: rule to change in place.
    - `shape`: shape of the pad's operand.
    - `own`: factors of halos, which stay as they are.

    Shardy treats the dims as parallel, since operand and result have equal sizes although elements move.
    """
    for dim in shifted_dims(attributes, len(shape)):
        (factor,) = draft.operands[0][dim] if len(draft.operands[0][dim]) == 1 else (-1,)
        if factor >= 0 and factor not in own and draft.kinds[factor] is FactorKind.PARALLEL:
            draft.operands[0][dim] = draft.results[0][dim] = (draft.factor(shape[dim], FactorKind.PERMUTATION),)


def offsets(kind: str, rule: Rule | None, cut: Cut, halos: tuple[Halo, ...]) -> tuple[tuple[int, int], ...]:
    """Return (factor, places) for every permutation factor of a slice or pad that selects contiguous elements.

    The result begins `places` elements after the operand's beginning, or before it if negative. Factors that halos
    split, and dims with gaps or strides, are left out. Other kinds, and ops without a rule, give none.
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
