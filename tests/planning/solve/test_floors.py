"""Lower bounds before the solve: they hold for every choice."""

import numpy as np
import pytest

from autoshard.cost import Topology, make_mesh
from autoshard.planning.price.analysed_program import analyse_program
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.solve.problem_builder import kept_of, least_bytes, least_seconds
from tests.planning import programs as made


CASES = [
    ("mlp", "cpu:8", "data=4,model=2"),
    pytest.param("decoder", "v5e:2x4", "data=2,model=4", marks=pytest.mark.full),
    ("wide mlp", "v5e:4x4", "data=4,model=4"),
    ("convolutions", "v5p:2x2x2", "data=2,model=2,axis2=2"),
]


@pytest.mark.parametrize(("name", "topology", "mesh"), CASES)
def test_no_choice_is_below(name: str, topology: str, mesh: str) -> None:
    model = made.model(name, topology, mesh)
    parsed = Topology.parse(topology)
    reading = analyse_program(model.program, parsed.backend)
    seconds = least_seconds(model.program, reading, make_mesh(parsed, dict(model.mesh.axes)), parsed.usable_bytes)
    size = least_bytes(model, kept_of(model, None))
    assert seconds > 0 and size > 0
    rng = np.random.default_rng(5)
    outcomes = [evaluate(model, made.random_choices(model, rng)) for _ in range(30)]
    assert all(outcome.step_time_s >= seconds * (1 - 1e-9) for outcome in outcomes)
    assert all(outcome.peak_bytes >= size for outcome in outcomes)
    best = made.planned(name, topology, mesh).plan.prediction
    assert seconds <= best.step_time_s * (1 + 1e-9) and size <= best.peak_bytes


def test_one_alternative_each_leaves_nothing_open() -> None:
    model = made.model("mlp")
    rng = np.random.default_rng(6)
    for _ in range(5):
        choices = made.random_choices(model, rng)
        only = {
            n: np.arange(len(node.states)) == c for n, (node, c) in enumerate(zip(model.nodes, choices, strict=True))
        }
        assert least_bytes(model, kept_of(model, only)) == evaluate(model, choices).peak_bytes
