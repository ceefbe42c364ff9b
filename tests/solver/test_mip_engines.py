"""What solves the exact programs: HiGHS by its own package, or OR-Tools' in its place."""

import importlib.util
import os
import subprocess
import sys

import pytest
from random_problems import make_problem
from test_exact import hard_parts, job, never, small_problem

from autoshard.errors import UserError
from autoshard.solver import Status, engine_named, solve
from autoshard.solver._clock import processor_seconds
from autoshard.solver._exact import solve_apart
from autoshard.solver._graph import build
from autoshard.solver._mip_engines import ENGINES


def test_the_engine_is_named_by_the_caller_then_by_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AUTOSHARD_ENGINE", raising=False)
    assert engine_named(None) == "highs" and engine_named("ortools") == "ortools"
    monkeypatch.setenv("AUTOSHARD_ENGINE", "ortools")
    assert engine_named(None) == "ortools" and engine_named("highs") == "highs"
    monkeypatch.setenv("AUTOSHARD_ENGINE", "glpk")
    with pytest.raises(UserError, match="the engine 'glpk' in AUTOSHARD_ENGINE is not known"):
        solve(small_problem())
    with pytest.raises(UserError, match="the engine 'cplex' is not known; exact solves go through highs or ortools"):
        solve(small_problem(), engine="cplex")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs OR-Tools, which is not installed: pip install 'autoshard\[ortools\]'"):
        engine_named("ortools")


@pytest.mark.parametrize("count", [4, 6, 8])
def test_engines_agree(count: int):
    problem = make_problem(*hard_parts(count))
    first, second = (solve(problem, engine=name) for name in ENGINES)
    assert first.status == second.status
    assert (first.cost, first.lower_bound) == (second.cost, second.lower_bound)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_exact_solve_is_bounded_alike(engine: str):
    graph = build(small_problem())
    free = solve_apart(job(graph, engine=engine), never)
    assert free is not None and free.finished and free.choices is not None
    best = round(free.bound)
    # A cutoff at the optimum leaves nothing better; one above it leaves the optimum.
    none = solve_apart(job(graph, engine=engine, cutoff=float(best)), never)
    assert none is not None and none.finished and none.bound >= best
    same = solve_apart(job(graph, engine=engine, cutoff=best + 1.0), never)
    assert same is not None and round(same.bound) == best
    timed = solve_apart(job(graph, engine=engine, clock=processor_seconds, deadline=processor_seconds() + 60), never)
    assert timed is not None and round(timed.bound) == best
    assert solve_apart(job(graph, engine=engine), lambda: True) is None


def test_a_plan_can_be_made_with_ortools_alone():
    """In a process where highspy cannot be loaded, and in the processes that it starts."""
    code = """
import sys
from autoshard.plan import Options, make_plan
from tests.plan.programs import wide_mlp
plan = make_plan(wide_mlp(), Options(topology="v5e:2x4", mesh="data=4,model=2")).plan
print(plan.provenance["versions"].keys() >= {"ortools"}, plan.prediction.step_time_s)
"""
    found = {}
    for engine in ENGINES:
        environment = {**os.environ, "AUTOSHARD_ENGINE": engine, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        found[engine] = done.stdout.split()
    assert found["highs"][0] == "False" and found["ortools"][0] == "True"
    assert found["highs"][1] == found["ortools"][1]


def test_a_proven_answer_is_proven_by_either():
    answers = [solve(small_problem(), engine=name) for name in ENGINES]
    assert {answer.status for answer in answers} == {Status.OPTIMAL}
