"""2,000 random problems against brute force; `make bench` has ten times as many."""

import collections

import pytest
from random_problems import EACH, EXTREMES, KINDS, judged, random_problem


@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_is_wrong(kind: str):
    outcomes = collections.Counter[str]()
    for seed in range(EACH):
        outcome = judged(random_problem(kind, seed))
        assert not outcome.startswith("wrong"), f"{kind}, seed {seed}: {outcome}"
        outcomes[outcome] += 1
    answered = outcomes["optimal"] + outcomes["infeasible"]
    if kind in EXTREMES:
        assert answered + outcomes["feasible"] >= EACH / 3, outcomes
    else:
        assert answered == EACH and outcomes["optimal"] >= EACH / 10, outcomes
        assert outcomes["infeasible"] >= (EACH / 3 if kind == "infeasible" else 1), outcomes
