"""A compact form of a problem (`Network`), and the part of it that remains after pruning by a bound (`Pruned`).

Edges of a `Network` share tables among alternatives and among one another. It is therefore small even when the
`Problem`'s tables [alternatives x alternatives] would be large.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

CLOSED = 1e17
"""Costs at or above this value are not allowed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """Costs between two nodes: `scale` times an entry of `table`, whose row and column depend on the nodes'
    alternatives.
    """

    first: int
    second: int
    """The nodes; a link from a node to itself adds to the node's costs."""
    rows: Ints
    """Row of `table` for each alternative of `first`."""
    columns: Ints
    """Column of `table` for each alternative of `second`."""
    table: Floats
    """Costs before scaling; `CLOSED` or more, before scaling too, for pairs that are not allowed."""
    scale: float
    """Picoseconds for each unit of the table."""


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """Bytes that each alternative of a node uses during [start, stop)."""

    node: int
    start: int
    stop: int
    usage: Ints
    """Bytes of each alternative of `node`, [alternatives]."""


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """Compact problem; costs are float picoseconds, `FORBIDDEN` or more where not allowed."""

    costs: Sequence[Floats]
    """For each node the costs of its alternatives."""
    links: Sequence[Link]
    terms: Sequence[Term]
    usage_limit: int | None
    """Largest total usage in bytes at any time; None for no limit, so that `terms` do not matter."""


@dataclasses.dataclass(frozen=True, slots=True)
class Messages:
    """State of message passing before any alternative was pruned by its cost."""

    alternatives: tuple[Ints, ...]
    """For each node the alternatives that the messages cover."""
    ends: tuple[tuple[int, int], ...]
    """Both end nodes of every link."""
    values: tuple[Floats, ...]
    """One array for each directed edge, over the alternatives of its target node. Edges are sorted by source node, as
    in `Flat`.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Pruned:
    """The part of a network that remains after pruning."""

    alternatives: tuple[Ints, ...]
    """For each node the remaining alternatives, ascending."""
    bound: float
    """Lower bound on the cost of all choices of the whole network."""
    choices: Ints | None
    """Best choices found within the memory limit, as alternatives of the whole network; all of them remain."""
    complete: bool
    """True if every pruned alternative costs more than `choices` or at least `enough` (see `prune`); False if more were
    pruned to limit the size.
    """
    messages: Messages | None = None
    """Messages from which a network with the same links can start."""
