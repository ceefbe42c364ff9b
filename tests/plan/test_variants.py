"""The best of several variants of a program."""

from collections.abc import Callable
from typing import Any

import pytest

from autoshard.errors import InfeasibleError
from autoshard.plan import make_plan, plan_variants
from autoshard.program import Program, trace
from tests.graph.programs import f32
from tests.plan import programs as made


ON: dict[str, Any] = {"topology": "v5e:2x4", "mesh": "data=2,model=4", "time_limit": 20}
VARIANTS: dict[str, Callable[[], Program]] = {
    "none": lambda: made.program("mlp"),
    "full": lambda: made.program("two matmuls"),
}


def test_the_fastest_is_taken_and_the_others_are_said() -> None:
    name, result = plan_variants(VARIANTS, **ON)
    steps = {n: make_plan(make(), **ON).plan.prediction.step_time_s for n, make in VARIANTS.items()}
    assert result.plan.prediction.step_time_s == min(steps.values())
    assert steps[name] == min(steps.values())
    assert result.plan.words[-1].startswith(f"remat {name} (instead: ")
    assert set(result.plan.provenance["remat"]) == set(VARIANTS)
    assert set(result.wall_s) >= {"extract", "price", "solve"}


def test_a_variant_that_does_not_fit_is_passed_over() -> None:
    def first() -> Program:
        return trace(lambda w, x: x @ w, (f32(2048, 2048), f32(2048, 2048)), name="large")

    small = {"large": first, "small": lambda: made.program("mlp")}
    limit = make_plan(made.program("mlp"), **ON).plan.prediction.peak_bytes + 1000
    name, result = plan_variants(small, what="size", **ON, memory_limit=limit)
    assert name == "small" and result.plan.words[-1] == "size small (instead: large does not fit)"


def test_when_none_fits_the_last_says_what_would_help() -> None:
    only: dict[str, Callable[[], Program]] = {"none": lambda: made.program("two matmuls")}
    with pytest.raises(InfeasibleError, match="the least found is"):
        plan_variants(only, **ON, memory_limit=200)
