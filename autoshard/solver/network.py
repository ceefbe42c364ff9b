"""A problem in short, and what is left of it once what a bound proves useless is left out.

The edges of a `Network` share tables between alternatives and between one another, so that it is small where the
tables [alternatives x alternatives] of the `Problem` would not be.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

CLOSED = 1e17
"""Costs from here on are not allowed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """The costs between two nodes: `scale` times `table`, by the row of each alternative of both."""

    first: int
    second: int
    rows: Ints
    columns: Ints
    table: Floats
    scale: float


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """Bytes that a node's alternatives hold during [start, stop)."""

    node: int
    start: int
    stop: int
    usage: Ints


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """A problem in short: costs in picoseconds (float), `FORBIDDEN` or more where not allowed."""

    costs: Sequence[Floats]
    links: Sequence[Link]
    terms: Sequence[Term]
    usage_limit: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Messages:
    """What message passing had come to while nothing was left out yet."""

    kept: tuple[Ints, ...]
    """Per node the alternatives that the messages are over."""
    ends: tuple[tuple[int, int], ...]
    """Both nodes of every link."""
    values: tuple[Floats, ...]
    """Per directed edge (node by node, as flat arrays have them), over the alternatives of the node it leads to."""


@dataclasses.dataclass(frozen=True, slots=True)
class Narrowed:
    """What is left of a network."""

    kept: tuple[Ints, ...]
    """Per node the alternatives left, ascending."""
    bound: float
    """No choices of the whole network cost less."""
    choices: Ints | None
    """The best choices met that keep memory, as alternatives of the whole network; they are among those left."""
    complete: bool
    """Everything left out costs more than `choices`; False when more had to go to keep the rest small."""
    messages: Messages | None = None
    """Messages to begin with on a network that has the same links."""
