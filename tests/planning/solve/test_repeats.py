"""Repeated layers share their decisions: they are recognised by their ops, and sharing makes no plan worse."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from autoshard.planning import Options, make_plan, read_asked
from autoshard.planning.solve import repeats as _repeats
from autoshard.planning.solve.mesh_solve import Terms, solve_tied, solve_within
from autoshard.planning.solve.problem_builder import build_network, build_problem, kept_of
from autoshard.planning.solve.repeats import Repeats, find_repeats
from autoshard.planning.solve.time_weights import even_weights, normalise
from autoshard.planning.space.baselines import baselines
from autoshard.planning.space.decision_model import Model
from autoshard.solver import evaluate, prune
from experiments.lib.programs.jax_case import train_program
from experiments.lib.programs.jax_layers import layered
from tests.planning import programs as made


LIMIT = 1 << 34
PATTERNS: dict[str, dict[str, Any]] = {
    "alike": {},
    "every other layer": {"ffns": (4, 8)},
    "tied embedding": {"tied": True},
    "one layer of its own": {"ffns": (4, 4, 4, 4, 8, 4)},
}


def model(depth: int, mesh: str = "data=2,model=4", **pattern: Any) -> Model:
    program = train_program("layers", layered(depth, width=256, batch=32, seq=128, **pattern), "train")
    return made.model_of(program, "v5e:2x4", mesh, LIMIT)


def shared(of: Model) -> Repeats:
    repeats = find_repeats(of)
    assert repeats is not None
    return repeats


@pytest.mark.few(2)
@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_shared_choices_are_choices_of_the_whole(pattern: str) -> None:
    whole = model(6, **PATTERNS[pattern])
    repeats = shared(whole)
    rng = np.random.default_rng(0)
    for _ in range(5):
        weights = normalise({channel: float(rng.random()) for channel in even_weights(whole)})
        choices = np.array([rng.integers(len(node.states)) for node in repeats.nodes])
        tied = evaluate(build_problem(repeats, weights, LIMIT), choices)
        untied = evaluate(build_problem(whole, weights, LIMIT), repeats.whole(choices))
        assert tied.cost == pytest.approx(untied.cost, abs=len(whole.nodes) + len(whole.reshards))
        assert tied.peak_usage == untied.peak_usage
        assert (repeats.part(repeats.whole(choices)) == choices).all()


@pytest.mark.parametrize("pattern", [pytest.param(n, marks=[pytest.mark.full] * (n != "alike")) for n in PATTERNS])
def test_sharing_costs_nothing(pattern: str) -> None:
    whole = model(6, **PATTERNS[pattern])
    repeats = shared(whole)
    weights = normalise(even_weights(whole))
    alone = solve_within(whole, weights, Terms(LIMIT, math.inf, 0))
    tied = solve_tied(repeats, weights, Terms(LIMIT, math.inf, 0))
    both = solve_within(whole, weights, Terms(LIMIT, math.inf, 0), repeats=repeats)
    assert tied is not None and tied.solution.gap == alone.solution.gap == both.solution.gap == 0
    assert both.solution.cost == pytest.approx(alone.solution.cost, rel=1e-6)  # rounded separately
    assert alone.solution.cost <= tied.solution.cost * (1 + 1e-6) <= alone.solution.cost * 1.001


@pytest.mark.full
def test_more_layers_are_no_more_decisions() -> None:
    few, many = model(8), model(16)
    assert len(many.nodes) > 1.7 * len(few.nodes)
    assert len(shared(few).nodes) == len(shared(many).nodes)
    assert len(shared(few).reshards) == len(shared(many).reshards)


def test_names_do_not_matter() -> None:
    case = layered(6, width=256, batch=32, seq=128)
    names = ["wing", "tail", "nose", "fuel", "gear", "door"]
    params = {**case.params, "layers": dict(zip(names, case.params["layers"], strict=True))}

    def listed(p: Any) -> Any:
        return {**p, "layers": [p["layers"][name] for name in names]}

    other = dataclasses.replace(case, params=params, loss=lambda p, b: case.loss(listed(p), b))
    renamed = made.model_of(train_program("layers", other, "train"), "v5e:2x4", "data=2,model=4", LIMIT)
    assert len(shared(renamed).nodes) == len(shared(model(6)).nodes)


@pytest.mark.full
def test_lifted_messages_bound_the_whole_as_closely() -> None:
    whole = model(8, "data=2,seq=2,model=2")
    repeats = shared(whole)
    weights = normalise(even_weights(whole))
    small = prune(build_network(repeats, weights, None, kept_of(repeats, None)))
    lifted = repeats.lift(whole, weights, small.messages)
    assert small.messages is not None and lifted is not None
    least = solve_within(whole, weights, Terms(None, math.inf, 0)).solution
    # Stop after a single round of message passing, which gives the bound.
    first = prune(build_network(whole, weights, None, kept_of(whole, None)), start=lifted, enough=0.0)
    assert 0.99 * least.cost <= first.bound <= least.cost * (1 + 1e-6)


@pytest.mark.full
def test_what_is_asked_of_one_layer_is_preserved() -> None:
    program = train_program("layers", layered(6, width=256, batch=32, seq=128), "train")
    name = next(a.name for a in program.arguments if "layers" in a.name and "3" in a.name and a.name.endswith("up"))
    free = make_plan(program, Options(topology="v5e:2x4", mesh="data=2,model=4")).plan
    assert any(free.arguments[name].dims)
    asked = read_asked({name: "None,None"})
    pinned = make_plan(program, Options(topology="v5e:2x4", mesh="data=2,model=4", asked=asked)).plan
    assert not any(pinned.arguments[name].dims)


@pytest.mark.full
def test_a_plan_takes_as_long_without_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    program = train_program("layers", layered(6, width=256, batch=32, seq=128), "train")
    plans = [make_plan(program, Options(topology="v5e:2x4", mesh="data=2,model=4")).plan]
    monkeypatch.setattr(_repeats, "WORTHWHILE", 0.0)
    plans.append(make_plan(program, Options(topology="v5e:2x4", mesh="data=2,model=4")).plan)
    steps = [plan.prediction.step_time_s for plan in plans]
    assert steps[0] == pytest.approx(steps[1], rel=1e-3)


@pytest.mark.full
def test_baselines_are_completed_as_well() -> None:
    whole = model(6)
    repeats = shared(whole)
    weights = normalise(even_weights(whole))
    groups = made.groups(whole)
    for baseline in baselines(whole, groups):
        tied = solve_tied(repeats, weights, Terms(LIMIT, math.inf, 0, None, baseline.allowed))
        alone = solve_within(whole, weights, Terms(LIMIT, math.inf, 0, None, baseline.allowed))
        assert tied is not None, baseline.name
        assert tied.solution.cost == pytest.approx(alone.solution.cost, rel=1e-4), baseline.name
