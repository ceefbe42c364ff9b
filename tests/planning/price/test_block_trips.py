"""Number of times that a value moves for an op, by the blocks of its producer and its consumer."""

from types import SimpleNamespace
from typing import Any

import pytest

from autoshard.planning.price.pricing import _Pricer


STEP, SCAN, BRANCH, INNER = -1, 0, 1, 2
"""The step, a loop of 6 trips, one of its two branches, and a loop of 5 trips in the first loop."""
TRIPS = {STEP: 1.0, SCAN: 6.0, BRANCH: 3.0, INNER: 30.0}


@pytest.mark.parametrize(
    ("made", "taken", "trips"),
    [
        (STEP, STEP, 1.0),
        (STEP, SCAN, 1.0),  # moved once, before the loop
        (SCAN, INNER, 6.0),
        (SCAN, SCAN, 6.0),
        (STEP, BRANCH, 3.0),  # not hoisted out of a conditional
        (SCAN, BRANCH, 3.0),
        (BRANCH, SCAN, 6.0),  # a branch's result, consumed by the conditional
        (INNER, SCAN, 6.0),
        (SCAN, STEP, 1.0),
    ],
)
def test_values_move_as_often_as_the_outermost_block_that_does_not_change_them(made: int, taken: int, trips: float):
    loops = [SimpleNamespace(parent=parent, branches=n) for parent, n in ((STEP, 0), (SCAN, 2), (SCAN, 0))]
    graph: Any = SimpleNamespace(tensors=[SimpleNamespace(loop=made)], loops=loops, trips=TRIPS.__getitem__)
    pricer: Any = SimpleNamespace(graph=graph)
    op: Any = SimpleNamespace(loop=taken)
    assert _Pricer.block_trips(pricer, 0, op) == (taken, trips)
