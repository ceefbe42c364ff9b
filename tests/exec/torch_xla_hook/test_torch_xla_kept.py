"""Decisions on captured steps that are cached on disk."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from autoshard.exec.torch_xla_hook.planning import decision_cache
from autoshard.exec.torch_xla_hook.values.live_marks import LiveMesh
from autoshard.planning import Spec
from autoshard.program import trace
from tests.graph.programs import f32


def taken() -> Any:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

    program = trace(step, (f32(64, 32), f32(128, 64)), name="small")
    return SimpleNamespace(program=program, split={}, users=frozenset())


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """List whose length counts the decisions that were really planned."""
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(decision_cache, "registrations", tuple)  # without the registrations of other tests
    planned, decide = [], decision_cache.decide

    def counted(*given: Any) -> Any:
        planned.append(1)
        return decide(*given)

    monkeypatch.setattr(decision_cache, "decide", counted)
    return planned


def test_a_decision_is_found_again_as_it_was_made(count: list[int]):
    mesh = LiveMesh({"data": 4, "model": 2}, range(8))
    made, found = (decision_cache.kept_decision(taken(), "cpu:8", mesh, {}) for _ in range(2))
    assert len(count) == 1
    assert made == found and any(spec is not None and spec.axes for spec in made.specs)


def test_what_else_is_decided_or_asked_for_is_planned_again(count: list[int], monkeypatch: pytest.MonkeyPatch):
    mesh = LiveMesh({"data": 4, "model": 2}, range(8))
    decision_cache.kept_decision(taken(), "cpu:8", mesh, {})
    whole = decision_cache.kept_decision(taken(), "cpu:8", mesh, {0: Spec(((), ()))})
    assert not (whole.specs[0] or Spec(())).axes
    decision_cache.kept_decision(taken(), "cpu:8", LiveMesh({"data": 8, "model": 1}, range(8)), {})
    decision_cache.kept_decision(taken(), "cpu:8", mesh, {}, free=True)
    monkeypatch.setenv("AUTOSHARD_MEMORY_LIMIT", "2")
    decision_cache.kept_decision(taken(), "cpu:8", mesh, {})
    assert len(count) == 5


def test_an_entry_that_says_nothing_is_not_used(count: list[int], monkeypatch: pytest.MonkeyPatch):
    mesh = LiveMesh({"data": 4, "model": 2}, range(8))
    monkeypatch.setattr(decision_cache, "read_entry", lambda *_: b'{"plan": "{}", "notes": []}')
    assert decision_cache.kept_decision(taken(), "cpu:8", mesh, {}).plan.mesh == {"data": 4, "model": 2}
    assert len(count) == 1


def test_only_the_tensor_that_a_step_cuts_gets_a_new_spec(count: list[int]):
    def step(table: Any, w: Any, x: Any) -> Any:
        return jax.lax.dynamic_update_slice(table, (x @ w)[:1], (1, 0))

    program = trace(step, (f32(2, 32), f32(64, 32), f32(128, 64)), name="cut")
    capture: Any = SimpleNamespace(program=program, split={}, users=frozenset())
    mesh = LiveMesh({"data": 4, "model": 2}, range(8))
    fixed = {0: Spec((("model",), ("data",))), 1: Spec((("data",), ()))}
    table, weight, _ = decision_cache.kept_decision(capture, "cpu:8", mesh, fixed).specs
    assert table is not None and not table.dims[0]
    assert weight == fixed[1]


def test_a_mesh_is_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(decision_cache, "registrations", tuple)  # without the registrations of other tests
    made = decision_cache.cached_mesh(taken(), "cpu:8")
    monkeypatch.setattr(decision_cache, "best_mesh", lambda *_: {})
    assert decision_cache.cached_mesh(taken(), "cpu:8") == made != {}
