"""Portfolios: plans that really differ, the chosen plan first."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from autoshard.cost import Topology, make_mesh
from autoshard.errors import UserError
from autoshard.planning import Options, PlanResult, load_plan, make_plan, plan_recipes, read_asked
from autoshard.planning.mesh.portfolio import DIFFERENCE, MEMORY_TARGETS, SLOWEST, differ
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.price.evaluate import Outcome, evaluate
from autoshard.planning.record.plan_files import plan_to_json
from autoshard.planning.record.plan_parts import Collective
from tests.planning import programs as made


ON: dict[str, Any] = {"topology": "v5e:4x4", "mesh": "data=4,model=4", "time_limit": math.inf}


def portfolio(name: str = "wide mlp", **options: Any) -> PlanResult:
    return make_plan(made.program(name), Options(**ON | {"candidates": 5} | options))


@pytest.fixture(scope="module")
def offered() -> PlanResult:
    return portfolio()


def test_an_ordinary_plan_offers_itself_and_is_the_same_in_a_portfolio(offered: PlanResult):
    alone = make_plan(made.program("wide mlp"), Options(**ON))
    assert [each.name for each in alone.candidates] == ["plan"]
    assert "candidates" not in alone.wall_s
    assert plan_to_json(alone.candidates[0].plan) == plan_to_json(alone.plan)
    assert plan_to_json(offered.plan) == plan_to_json(alone.plan)
    assert plan_to_json(offered.candidates[0].plan) == plan_to_json(alone.plan)


def test_two_portfolios_are_the_same(offered: PlanResult):
    again = portfolio()
    assert [(each.name, each.why) for each in again.candidates] == [(c.name, c.why) for c in offered.candidates]
    for first, second in zip(offered.candidates, again.candidates, strict=True):
        assert plan_to_json(first.plan) == plan_to_json(second.plan)


def test_candidates_fit_and_are_ordered_and_none_is_another_one(offered: PlanResult):
    plans = [each.plan for each in offered.candidates]
    assert len(plans) == 5 == len({each.name for each in offered.candidates})
    assert all(each.why for each in offered.candidates)
    times = [plan.prediction.step_time_s for plan in plans]
    assert times == sorted(times) and times[-1] <= SLOWEST * times[0]
    assert all(plan.prediction.fits and plan.baselines == offered.plan.baselines for plan in plans)
    written = [(plan.mesh, plan.arguments, plan.results, plan.pins) for plan in plans]
    assert all(one != other for number, one in enumerate(written) for other in written[:number])


def test_the_figures_of_every_candidate_are_those_of_its_choices(offered: PlanResult):
    model = made.model("wide mlp", ON["topology"], ON["mesh"])
    outcomes = [evaluate(model, np.array(each.plan.choices.split(), np.int64)) for each in offered.candidates]
    for each, outcome in zip(offered.candidates, outcomes, strict=True):
        assert outcome.step_time_s == pytest.approx(each.plan.prediction.step_time_s, rel=1e-9)
        assert outcome.peak_bytes == each.plan.prediction.peak_bytes
        assert each.plan.provenance["bound_s"] <= outcome.step_time_s * (1 + 1e-9)
    assert all(differ(one, other) for number, one in enumerate(outcomes) for other in outcomes[:number])


def test_a_candidate_is_a_plan_like_any_other(offered: PlanResult, tmp_path: Any):
    offered.candidates[1].plan.save(tmp_path / "second.json")
    assert load_plan(tmp_path / "second.json") == offered.candidates[1].plan


@pytest.mark.full
def test_memory_targets_are_tried_where_the_plan_needs_more():
    on = {"topology": "cpu:8", "mesh": "data=4,model=2", "candidates": 12}
    free = portfolio("decoder", **on)
    assert not any("memory" in each.name for each in free.candidates), "a plan far below has nothing to gain"
    limit = int(free.plan.prediction.peak_bytes / 0.99)
    tight = portfolio("decoder", **on, memory_limit=limit)
    within = {each.name: each.plan.prediction.peak_bytes for each in tight.candidates if "memory" in each.name}
    assert within, "the decoder's state can be split further, at a price"
    for part in MEMORY_TARGETS:
        assert within.get(f"memory {part:.0%}", 0) <= part * limit


def test_every_candidate_keeps_what_was_asked_for():
    free = portfolio(candidates=12)
    name = next(name for name, role in free.plan.roles.items() if role == "parameter")
    asked = read_asked(replicate=[name])
    pinned = portfolio(candidates=12, asked=asked)
    assert len(pinned.candidates) > 1
    for each in pinned.candidates:
        assert each.plan.arguments[name].axes == ()
        assert each.plan.provenance["asked"] == asked.lines
    assert any(each.plan.arguments[name].axes for each in free.candidates)


def test_other_meshes_are_offered_with_choices_of_their_own():
    plans = portfolio(mesh=None, candidates=12)
    elsewhere = [each for each in plans.candidates if each.plan.mesh != plans.plan.mesh]
    assert elsewhere
    program = made.program("wide mlp")
    topology = Topology.parse(ON["topology"])
    for each in elsewhere:
        assert each.name == ",".join(f"{axis}={size}" for axis, size in each.plan.mesh.items())
        mesh = make_mesh(topology, each.plan.mesh)
        model = build_model(program, analyse_program(program, "tpu"), mesh, topology.usable_bytes)
        outcome = evaluate(model, np.array(each.plan.choices.split(), np.int64))
        assert outcome.step_time_s == pytest.approx(each.plan.prediction.step_time_s, rel=1e-9)
    assert plans.plan.meshes and not any(each.plan.meshes for each in elsewhere)


def test_a_program_with_nothing_to_choose_offers_one_plan():
    assert len(portfolio("nothing", topology="cpu:1", mesh="data=1").candidates) == 1


def test_no_candidates_are_refused():
    with pytest.raises(UserError, match="0 candidates are asked for"):
        portfolio(candidates=0)


def test_candidates_of_recipes_say_which_recipe_they_are():
    choices = {"remat": ("none",)}
    _, result = plan_recipes(lambda remat: made.program("wide mlp"), choices, Options(**ON, candidates=3))
    assert len(result.candidates) == 3
    assert result.candidates[0].plan == result.plan
    assert all(each.plan.words[-1] == "remat none" for each in result.candidates)


def outcome(peak: int, **seconds: float) -> Outcome:
    """Build an outcome with one second of compute and some seconds of collectives."""
    collectives = [Collective(kind, ("x",), 1, 1, s, False) for kind, s in seconds.items()]
    channels = {(-1, "compute"): 1.0, (-2, "exposed"): sum(seconds.values())}
    return Outcome(channels, tuple(collectives), peak, 0, {})


def test_plans_differ_by_what_time_goes_to_or_by_memory_not_by_names_of_axes():
    gather = outcome(1000, gather=0.5)
    assert not differ(gather, gather)
    over = tuple(dataclasses.replace(c, axes=("y",)) for c in gather.collectives)
    assert not differ(gather, dataclasses.replace(gather, collectives=over))
    assert not differ(gather, outcome(1000, gather=0.5 + 1.4 * DIFFERENCE))
    assert differ(gather, outcome(1000, gather=0.5 + 1.6 * DIFFERENCE))
    assert differ(gather, outcome(1000, gather=0.4, sum=0.1)), "as long, but spent otherwise"
    assert differ(gather, outcome(900, gather=0.5))
