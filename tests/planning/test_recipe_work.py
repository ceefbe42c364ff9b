"""The work of a recipe search: each program is traced and analysed once, and recipes share what they have in common."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from autoshard.base.shared_results import shared, sharing_results
from autoshard.planning import NamedSource, Options, plan_any
from autoshard.program import Program, open_source


MODEL = "hf:llama-tiny"
STEP = {"train": True, "batch": 32, "seq": 256, "dtype": "float32", "remat": "auto", "host": "auto"}
LIMIT = 46_000_000
"""Bytes of a device with which several policies fit, and others do not."""


def opened(options: Mapping[str, Any], recipe: Mapping[str, Any], *, anew: bool) -> Program:
    return open_source(MODEL, **options)


def counted(patch: pytest.MonkeyPatch, place: str, function: Any) -> Counter[Any]:
    """Count the calls of the function at `place` by the key that `function` returns of their arguments."""
    counts: Counter[Any] = Counter()
    module, _, name = place.rpartition(".")
    original = getattr(__import__(module, fromlist=[name]), name)

    def count(*args: Any, **options: Any) -> Any:
        counts[function(*args, **options)] += 1
        return original(*args, **options)

    patch.setattr(place, count)
    return counts


def test_a_shared_module_gives_the_same_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def programs() -> list[tuple[object, ...]]:
        policies = ({"remat": "none"}, {"remat": "none", "host": "optimizer"}, {"remat": "full,keep=q_proj"})
        traced = [opened({**STEP, "host": "none", **policy}, {}, anew=False) for policy in policies]
        return [(each.fingerprint, each.savable, each.notes, each.stacks, each.model_flops) for each in traced]

    alone = programs()
    built = counted(monkeypatch, "autoshard.program.hf.hf_program.build_model", lambda name, *_: name)
    settled = counted(monkeypatch, "autoshard.program.hf.hf_program._settled", lambda *_: "llama")
    with sharing_results():
        assert programs() == alone
    assert sum(built.values()) == sum(settled.values()) == 1


@pytest.mark.full
def test_each_program_is_traced_and_analysed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = counted(
        monkeypatch, "autoshard.program.hf.hf_program.from_config", lambda _, **o: tuple(sorted(o.items()))
    )
    place = "autoshard.planning.price.analysed_program._analysed"
    analysed = counted(monkeypatch, place, lambda program, *_: program.module)
    built = counted(monkeypatch, "autoshard.program.hf.hf_program.build_model", lambda name, *_: name)
    settled = counted(monkeypatch, "autoshard.program.hf.hf_program._settled", lambda *_: "llama")
    source = NamedSource(MODEL, STEP, opened)
    result = plan_any(source, Options(topology="v5e:2x2", mesh={"data": 4}, memory_limit=LIMIT))
    assert result.plan.recipe is not None
    rows = [row["choices"] for row in result.plan.recipe.tried]
    assert {row["host"] for row in rows} == {"none", "optimizer"} and len({row["remat"] for row in rows}) > 2
    assert len(traced) > 1 and set(traced.values()) == {1}
    assert set(analysed.values()) == {1}
    assert sum(built.values()) == sum(settled.values()) == 1


def test_programs_of_stages_are_traced_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count traces of programs of stages, each of which records the segments of the module."""
    made: list[int] = []

    def by_stage(*_: Any) -> None:
        for number in (1, 2):
            shared("trace", "module", lambda: made.append(number), 1)  # noqa: B023

    dispatch = "autoshard.planning.recipes.plan_dispatch"
    monkeypatch.setattr(f"{dispatch}.is_by_stage", lambda *_: True)
    monkeypatch.setattr(f"{dispatch}._plan_by_stage", by_stage)
    plan_any(NamedSource(MODEL, STEP, opened), Options(topology="v5e:2x2"))
    assert made == [1, 2]
