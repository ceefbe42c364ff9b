"""Which result is the updated value of which argument."""

import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from autoshard.errors import UserError


_STATE_NAME = re.compile(r"^(param|weight|state|opt|theta|model|variables|cache|carry|w$|w\d)", re.IGNORECASE)

Aval = tuple[tuple[int, ...], str]


def subtrees(treedef: Any, start: int = 0) -> list[tuple[int, Any]]:
    """Every subtree of `treedef` as (index of its first leaf, subtree), outermost first."""
    found = [(start, treedef)]
    offset = start
    for child in treedef.children():
        found.extend(subtrees(child, offset))
        offset += child.num_leaves
    return found


def check_ties(ties: Any, argument_avals: Sequence[Aval], result_avals: Sequence[Aval]) -> None:
    """Raise `UserError` for a tie to a leaf that does not exist, that is taken, or that has another shape."""
    if not isinstance(ties, Mapping):
        raise UserError(f"ties is {ties!r}; expected a dict from leaves of the arguments to leaves of the results.")
    for leaf, result in ties.items():
        for number, avals, what in ((leaf, argument_avals, "argument"), (result, result_avals, "result")):
            if not isinstance(number, Integral) or isinstance(number, bool) or not 0 <= int(number) < len(avals):
                raise UserError(f"ties: {number!r} is no {what}; the leaves of the {what}s are 0 to {len(avals) - 1}.")
        if argument_avals[leaf][0] != result_avals[result][0]:
            shapes = [list(avals[number][0]) for avals, number in ((argument_avals, leaf), (result_avals, result))]
            raise UserError(
                f"ties: leaf {leaf} has the shape {shapes[0]}, result {result} {shapes[1]}; they are no pair."
            )
    if len(set(ties.values())) < len(ties):
        raise UserError(f"ties is {dict(ties)!r}; a result takes the place of one leaf only.")


def tie(
    positions: Sequence[str],
    treedefs: Sequence[Any],
    donated: Sequence[bool],
    argument_avals: Sequence[Aval],
    result_tree: Any,
    result_avals: Sequence[Aval],
) -> dict[int, int]:
    """Map argument index -> result index for state that the function returns updated.

    A positional argument is tied to the first free part of the result with the same tree structure, shapes and dtypes.
    A single array counts as state only if it is donated or named like state, since a layer's output often has the
    shape of its input. Donated leaves that no structure explains are tied by shape and dtype, as XLA aliases them.
    """
    ties: dict[int, int] = {}
    taken: set[int] = set()
    parts = subtrees(result_tree)
    start = 0
    loose: list[int] = []
    for position, treedef in enumerate(treedefs):
        count = treedef.num_leaves
        own = range(start, start + count)
        start += count
        if count == 0:
            continue
        single = not treedef.children()
        if single and not donated[position] and not _STATE_NAME.match(positions[position]):
            continue
        match = _match(treedef, [argument_avals[i] for i in own], parts, result_avals, taken)
        if match is not None:
            ties.update(zip(own, match, strict=True))
            taken.update(match)
        elif donated[position]:
            loose.extend(own)
    for index in loose:
        for candidate, aval in enumerate(result_avals):
            if candidate not in taken and aval == argument_avals[index]:
                ties[index] = candidate
                taken.add(candidate)
                break
    return ties


def _match(
    treedef: Any, avals: list[Aval], parts: Sequence[tuple[int, Any]], result_avals: Sequence[Aval], taken: set[int]
) -> range | None:
    for first, part in parts:
        if part != treedef:
            continue
        own = range(first, first + part.num_leaves)
        if taken.isdisjoint(own) and [result_avals[i] for i in own] == avals:
            return own
    return None
