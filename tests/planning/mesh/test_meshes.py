"""Search of the mesh: its bounds hold, it returns the best mesh, and it reports the others."""

import functools
import math
import os
import re
import signal
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.base.workers import WorkerCrew
from autoshard.cost import Mesh, Topology, candidate_meshes, load_calibration, make_mesh
from autoshard.errors import InfeasibleError, UserError
from autoshard.planning import Options, Plan, PlanResult, Running, make_plan, read_asked
from autoshard.planning.mesh import mesh_searcher
from autoshard.planning.mesh.baseline_mesh import with_baselines
from autoshard.planning.mesh.mesh_attempt import Incumbent, MeshAttempts
from autoshard.planning.mesh.mesh_search import MeshSearch
from autoshard.planning.mesh.mesh_searcher import Phases, Searcher
from autoshard.planning.price.analysed_program import Task, analyse_program
from autoshard.planning.record.plan_files import plan_to_json
from autoshard.planning.solve.weight_search import SearchResult, WeightSearch
from autoshard.planning.space.baselines import Baseline, baselines
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.derived_axes import LEAST_GAIN
from autoshard.planning.space.dim_groups import Groups
from autoshard.planning.space.spec_constraints import mesh_text
from autoshard.planning.space.user_constraints import Asked
from autoshard.program import trace
from tests.base.test_crew import nap, wait_for_helpers
from tests.graph.programs import f32
from tests.planning import programs as made


WIDE = ("wide mlp", "v5e:4x4")
CASES = [
    ("mlp", "cpu:8"),
    WIDE,
    pytest.param("decoder", "v5e:2x4", marks=pytest.mark.full),
    ("mlp", "v5p:2x2x2*2"),
]


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_AUTO_SPMD_MESH", raising=False)


@functools.cache
def searched(name: str, topology: str) -> Plan:
    program = made.program(name)
    return make_plan(program, Options(topology=topology, mesh="auto", refine_axes=False, time_limit=math.inf)).plan


@functools.cache
def on(name: str, topology: str, mesh: str) -> PlanResult:
    return make_plan(made.program(name), Options(topology=topology, mesh=mesh, refine_axes=False))


@pytest.mark.parametrize(
    ("name", "topology"), [pytest.param(*each, marks=pytest.mark.full) if each == WIDE else each for each in CASES]
)
def test_no_mesh_is_better_and_every_bound_holds(name: str, topology: str) -> None:
    plan = searched(name, topology)
    every = {",".join(f"{k}={v}" for k, v in m.axes.items()): m for m in candidate_meshes(Topology.parse(topology))}
    assert {m.mesh for m in plan.meshes} == set(every), "all are accounted for"
    mine = plan.prediction.step_time_s
    for tried in plan.meshes:
        if tried.step_time_s is None and tried.bound_s is None:
            continue  # pruned for its sizes
        alone = on(name, topology, tried.mesh).plan
        there, rounding = alone.prediction, 0.5e-12 * (alone.provenance["nodes"] + alone.provenance["edges"])
        least = there.step_time_s if there.fits else float("inf")
        assert mine <= least / (1 - LEAST_GAIN) * (1 + 3e-3), tried.mesh
        assert tried.bound_s is None or tried.bound_s <= least + rounding, tried.mesh


@pytest.mark.parametrize(("name", "topology"), CASES)
def test_the_chosen_one_comes_first_and_the_rest_say_why_they_lost(name: str, topology: str) -> None:
    plan = searched(name, topology)
    chosen, *others = plan.meshes
    assert chosen.verdict == "chosen"
    assert chosen.mesh == ",".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    assert chosen.layout == plan.provenance["layout"]
    assert all(other.verdict not in ("", "chosen") for other in others)
    steps = [other.step_time_s for other in others if other.step_time_s is not None]
    assert steps == sorted(steps)


def test_a_mesh_looked_at_ahead_leaves_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.planning.mesh.mesh_search.SCOUTED", 2)
    lines: list[str] = []
    options = Options(topology="v5e:4x4", mesh="auto", refine_axes=False, time_limit=math.inf)
    plan = make_plan(made.program("wide mlp"), options, Running(progress=lines.append)).plan
    in_order = searched("wide mlp", "v5e:4x4")
    (scouted,) = (line.removesuffix(", to hold others against") for line in lines if line.endswith("against"))
    turns = [line for line in lines if line.startswith("mesh ") and not line.endswith("against")]
    numbers = [re.search(r" \((\d+) of (\d+)\): ", line) for line in turns]
    assert [number and number.groups() for number in numbers] == [
        (str(each), str(len(turns))) for each in range(1, len(turns) + 1)
    ]
    assert scouted in [re.sub(r" \(\d+ of \d+\)", "", line) for line in turns], "known when its turn comes"
    # Axes of equal sizes may have swapped places.
    assert plan.mesh == in_order.mesh and plan.prediction.peak_bytes == in_order.prediction.peak_bytes
    assert plan.prediction.step_time_s == pytest.approx(in_order.prediction.step_time_s, rel=1e-9)
    assert {each.mesh for each in plan.meshes} == {each.mesh for each in in_order.meshes}


def test_the_chosen_mesh_given_by_hand_is_the_same_plan() -> None:
    found, given = (
        searched("wide mlp", "v5e:4x4"),
        on("wide mlp", "v5e:4x4", searched("wide mlp", "v5e:4x4").meshes[0].mesh),
    )
    assert found.prediction.step_time_s <= given.plan.prediction.step_time_s * (1 + 1e-9)
    assert set(found.baselines) == set(given.plan.baselines)


def test_equal_input_gives_equal_bytes() -> None:
    """Plan twice without a time limit: on a slow machine the clock may cut the search."""
    again = make_plan(
        made.program("wide mlp"), Options(topology="v5e:4x4", refine_axes=False, time_limit=math.inf)
    ).plan
    assert plan_to_json(again) == plan_to_json(searched("wide mlp", "v5e:4x4"))


@pytest.mark.parametrize(
    ("name", "topology", "helpers"),
    [
        ("wide mlp", "v5e:4x4", 2),
        pytest.param("decoder", "v5e:2x4", 1, marks=pytest.mark.full),
        pytest.param("decoder", "v5e:2x4", 2, marks=pytest.mark.full),
    ],
)
def test_helpers_do_not_change_the_plan(name: str, topology: str, helpers: int) -> None:
    options: dict[str, Any] = {"topology": topology, "mesh": "auto", "refine_axes": False, "time_limit": math.inf}
    lines: list[str] = []
    with WorkerCrew(helpers, "autoshard.planning.warm_planner:ready") as crew:
        wait_for_helpers(crew)
        before = crew.jobs_helped
        helped = make_plan(made.program(name), Options(**options), Running(crew=crew, progress=lines.append))
    assert crew.jobs_helped > before and not any("helper" in line for line in lines)
    assert plan_to_json(helped.plan) == plan_to_json(searched(name, topology))


def test_a_helper_that_dies_does_not_change_the_plan() -> None:
    options: dict[str, Any] = {"topology": "v5e:4x4", "mesh": "auto", "refine_axes": False, "time_limit": math.inf}
    lines: list[str] = []
    with WorkerCrew(1, "autoshard.planning.warm_planner:ready") as crew:
        wait_for_helpers(crew)
        (helper,) = set(crew.map(nap, [0.1] * 4, lambda seconds: (seconds,))) - {os.getpid()}
        os.kill(helper, signal.SIGSTOP)  # the worker starts a job and is killed during it

        def said(line: str) -> None:
            if line.startswith("mesh ") and not any(earlier.startswith("mesh ") for earlier in lines):
                os.kill(helper, signal.SIGKILL)  # by now jobs are handed out, and more will follow
            lines.append(line)

        made_without = make_plan(made.program("wide mlp"), Options(**options), Running(crew=crew, progress=said))
    assert "a helper process failed (it was ended by signal 9); its work is done here" in lines
    assert plan_to_json(made_without.plan) == plan_to_json(searched("wide mlp", "v5e:4x4"))


def test_auto_looks_for_any_value_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_AUTO_SPMD_MESH", "8")
    assert autoshard.plan(made.program("mlp"), topology="cpu:8").meshes == ()
    assert autoshard.plan(made.program("mlp"), topology="cpu:8", mesh="auto").meshes
    monkeypatch.setenv("XLA_AUTO_SPMD_MESH", "auto")
    assert autoshard.plan(made.program("mlp"), topology="cpu:8").meshes


def test_meshes_without_an_axis_that_is_asked_for_are_excluded() -> None:
    asked = read_asked({"w1": "None,model"}) if "w1" in names("mlp") else read_asked({names("mlp")[0]: "None,model"})
    plan = make_plan(made.program("mlp"), Options(topology="cpu:8", asked=asked)).plan
    assert "model" in plan.mesh
    (alone,) = [m for m in plan.meshes if m.mesh == "data=8"]
    assert alone.verdict.startswith("excluded: ") and "names the axis `model`" in alone.verdict


def names(program: str) -> list[str]:
    return [a.name for a in made.program(program).arguments if len(a.shape) == 2 and a.role == "parameter"]


def test_what_no_mesh_can_keep_is_the_usual_sentence() -> None:
    for pins, said in (({"nowhere": "None"}, "matches no argument"), ({names("mlp")[0]: "None,fsdp"}, "`fsdp`")):
        with pytest.raises(UserError, match=said):
            make_plan(made.program("mlp"), Options(topology="cpu:8", asked=read_asked(pins)))


def test_a_topology_without_a_usable_mesh_is_refused_in_one_sentence() -> None:
    with pytest.raises(UserError) as caught:
        make_plan(made.program("matmul"), Options(topology="cpu:7"))
    assert str(caught.value) == (
        "no mesh of 1 to 4 axes over the 7 devices of cpu:7 serves this program, which has dims of 8, 16: "
        "no dim of the program divides by data=7; use a batch that is a multiple of 7, other devices, or a mesh of "
        "your own with --mesh."
    )
    odd = trace(lambda params, x: x @ params, (f32(16, 8), f32(7, 16)), name="odd")
    plan = make_plan(odd, Options(topology="cpu:8")).plan
    assert plan.arguments["x"].dims[0] == (), "its features can be split, its batch cannot"


def test_when_nothing_fits_the_nearest_mesh_is_explained() -> None:
    with pytest.raises(InfeasibleError) as caught:
        make_plan(made.program("mlp"), Options(topology="cpu:8", memory_limit=4000, time_limit=10))
    assert str(caught.value).startswith("no plan fits into 3.91 KiB per device: the least found is ")


def test_a_limit_that_no_choice_can_keep_is_seen_before_anything_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    program = made.program("mlp")
    topology = Topology.parse("cpu:8")
    reading, figures = analyse_program(program, topology.backend), load_calibration(topology.chip)
    trials = MeshAttempts(Task(program, reading, Asked(), 4000, 0, figures), 10.0)
    monkeypatch.setattr(WeightSearch, "run", lambda *_: pytest.fail("solved"))
    chosen = MeshSearch(trials, lambda line: None).run(topology, WorkerCrew())
    assert chosen.choices is None and all(tried.step_time_s is None for tried in chosen.tried)
    assert {t.verdict for t in chosen.tried} == {"chosen", "no plan on it fits"}


def test_a_mesh_without_room_is_bounded_as_if_it_had_room() -> None:
    program, topology = made.program("mlp"), Topology.parse("cpu:8")
    reading, figures = analyse_program(program, topology.backend), load_calibration(topology.chip)
    mesh = make_mesh(topology, {"data": 4, "model": 2})

    def attempts(limit: int) -> MeshAttempts:
        return MeshAttempts(Task(program, reading, Asked(), limit, 0, figures), 10.0)

    roomy = attempts(topology.usable_bytes).attempt(mesh, None, keep=False)
    assert roomy.best is not None
    rival = Incumbent(10 * roomy.step_s, 2, roomy.weights)
    short = attempts(4000).attempt(mesh, rival, keep=False)
    assert short.best is None and short.excess > 0
    assert 0 < short.unconstrained_bound_s <= roomy.step_s


def test_meshes_that_are_not_solved_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    full = {tried.mesh: tried for tried in searched("wide mlp", "v5e:4x4").meshes}
    monkeypatch.setattr("autoshard.planning.mesh.mesh_attempt.MOST_PAIRS", 6000)
    plan = make_plan(made.program("wide mlp"), Options(topology="v5e:4x4", mesh="auto", refine_axes=False)).plan
    unsolved = [tried for tried in plan.meshes if tried.step_time_s is None and tried.verdict != "chosen"]
    open_ones = [tried for tried in unsolved if tried.unsolved]
    assert open_ones and len(unsolved) < len(plan.meshes)
    for tried in unsolved:
        assert tried.bound_s is not None
        assert ("pairs of alternatives" if tried.unsolved else "no plan on it takes less than") in tried.verdict
        excess = tried.bound_s / plan.prediction.step_time_s - 1
        compared = f"at least {excess:.1%} slower" if excess > 5e-4 else f", {-excess:.1%} less than the chosen mesh"
        assert tried.unsolved or compared in tried.verdict or excess >= 1 or abs(excess) <= 5e-4
        there = full[tried.mesh].step_time_s or full[tried.mesh].bound_s
        assert there is not None and 0 < tried.bound_s <= there * (1 + 1e-9)
        if tried not in open_ones:
            assert tried.bound_s >= plan.prediction.step_time_s * (1 - LEAST_GAIN)


def test_a_large_mesh_of_four_axes_is_solved_only_if_the_third_axis_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    full = {tried.mesh: tried for tried in searched("wide mlp", "v5e:4x4").meshes}
    deep = {mesh for mesh in full if mesh.count("=") == 4}
    monkeypatch.setattr("autoshard.planning.mesh.mesh_attempt.SMALL_PAIRS", 0)
    options = Options(topology="v5e:4x4", mesh="auto", refine_axes=False)
    for always, unsolved in ((4, set()), (3, deep)):
        monkeypatch.setattr("autoshard.planning.mesh.mesh_attempt.ALWAYS", always)
        tried = make_plan(made.program("wide mlp"), options).plan.meshes
        skipped = {each.mesh: each for each in tried if "3 axes save too little over 2" in each.verdict}
        assert deep and set(skipped) == unsolved
        for mesh, each in skipped.items():
            there = full[mesh].step_time_s or full[mesh].bound_s
            assert each.step_time_s is None and each.bound_s and there and each.bound_s <= there * (1 + 1e-9)


@pytest.mark.parametrize(
    ("steps", "admitted"),
    [((1.0, 0.98), True), ((1.0, 0.995), False), ((1.0, 0.997, 0.98), True), ((1.0, 0.997, 0.988), False)],
)
def test_a_fourth_axis_is_admitted_by_what_the_third_saved(steps: tuple[float, ...], admitted: bool) -> None:
    axes = [2, 3, 3]
    rival = Incumbent(steps[0], 2, {}, 2)
    for step_s, count in zip(steps[1:], axes[1:], strict=False):
        rival = Incumbent(step_s, count, {}, count, rival.saved_by(step_s, count))
    assert rival.admits(4) is admitted and rival.admits(3) and not Incumbent(1.0, 2, {}, 2).admits(4)


def test_how_much_slower_a_mesh_is_holds_for_its_best_plan() -> None:
    plan, texts = searched(*WIDE), []
    for tried in plan.meshes:
        stated = re.match(r"(?:([\d.]+)% to )?([\d.]+)% slower", tried.verdict)
        if stated is None:
            continue
        best = on(*WIDE, tried.mesh).plan.prediction.step_time_s
        excess, most = 100 * (best / plan.prediction.step_time_s - 1), float(stated[2])
        least = float(stated[1]) if stated[1] else most - 100 * LEAST_GAIN
        assert least - 0.1 <= excess <= most + 0.1, tried
        texts.append(stated[1] is None)
    assert texts


def test_one_device_needs_no_search() -> None:
    plan = make_plan(made.program("nothing"), Options(topology="cpu:1")).plan
    assert plan.mesh == {"data": 1} and [m.verdict for m in plan.meshes] == ["chosen"]


def test_a_program_with_a_mesh_of_its_own_keeps_it() -> None:
    import jax
    from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

    own = NamedSharding(
        AbstractMesh((2, 4), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2), PartitionSpec("rows", "columns")
    )

    def fn(params: Any, x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x @ params, own)

    program = trace(fn, (f32(16, 8), f32(8, 16)), name="own")
    plan = make_plan(program, Options(topology="cpu:8")).plan
    assert plan.mesh == {"rows": 2, "columns": 4} and plan.meshes == ()


def test_baselines_are_those_of_another_mesh_where_the_chosen_one_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Mesh] = []

    def named(model: Model, groups: Groups) -> list[Baseline]:
        asked.append(model.mesh)
        return baselines(model, groups) if len(asked) > 1 else []

    monkeypatch.setattr(mesh_searcher, "baselines", named)
    result = make_plan(made.program("wide mlp"), Options(topology="v5e:4x4", refine_axes=False))
    assert len(asked) == 2 and asked[0] != asked[1] and len(asked[1].axes) <= 2
    assert result.plan.mesh == dict(asked[0].axes) and "fsdp" in result.plan.baselines
    assert result.baseline_plans["fsdp"].mesh == dict(asked[1].axes)
    assert any(f"are on {mesh_text(asked[1])}" in line for line in result.plan.warnings)


def test_a_mesh_without_baselines_is_compared_on_one_whose_first_axis_divides_the_batch():
    def step(w, x):
        loss = lambda w: jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"] - x) ** 2)  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))

    topology = Topology.parse("v5e:4x4")
    program = trace(step, ({"up": f32(256, 1024), "down": f32(1024, 256)}, f32(2, 128, 256)))
    task = Task(program, analyse_program(program, "tpu"), Asked(), topology.usable_bytes, 0, load_calibration("v5e"))
    search_on = Searcher(task, Phases(None), WorkerCrew(), topology)
    chosen = search_on.mesh(make_mesh(topology, {"data": 4, "model": 2, "axis2": 2}), 10.0)
    assert isinstance(chosen.found, SearchResult) and not chosen.found.baselines
    compared = with_baselines(search_on, chosen, (), 10.0)
    assert compared.model.mesh.axes == {"data": 2, "model": 8}
    assert isinstance(compared.found, SearchResult) and "fsdp_tp" in compared.found.baselines
