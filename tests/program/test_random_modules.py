"""Random torch modules: the traced step computes the values of eager torch, and the user's module is unchanged.

Fourteen modules, and eighty in full; `experiments/correctness/random_modules.py` traces three hundred.
"""

import pytest
import torch

from tests.random_module_runs import cut_down, run, run_planned
from tests.random_modules import WORDS, Recipe, build, random_recipe


SEEDS = [*range(14), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(14, 80))]
REFUSED: list[str] = []
"""Modules that were refused in this process."""


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_traced_module_computes_what_eager_torch_does(seed: int):
    recipe = random_recipe(seed)
    outcome = run(recipe)
    if outcome.kind == "refused":
        REFUSED.append(f"{recipe}: {outcome.text}")
    elif outcome.kind != "equal":
        smaller, why = cut_down(recipe, outcome)
        pytest.fail(f"{smaller} {why.kind}: {why.text} (of {recipe}: {outcome.text})")
    assert len(REFUSED) <= 4, REFUSED


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [0, 32, pytest.param(47, marks=pytest.mark.full)])
def test_a_planned_module_computes_what_the_unplanned_one_does(seed: int):
    assert run_planned(random_recipe(seed)) == "split"


def test_a_module_is_the_same_for_its_seed_alone():
    assert random_recipe(7) == random_recipe(7) != random_recipe(8)
    first, second = (build(random_recipe(7)).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_random_modules_have_every_feature():
    recipes = [random_recipe(seed) for seed in range(600)]
    for name, words in WORDS.items():
        assert {getattr(recipe, name) for recipe in recipes} >= set(words), name


def test_a_wrong_trace_is_found(monkeypatch):
    """Break the trace on purpose, which the check must find: layers that scale by a number use the first layer's."""
    from tests import random_modules

    kept = random_modules.Layer._placed
    monkeypatch.setattr(random_modules.Layer, "_placed", lambda self, y: kept(self, y) * (2 if _traced(y) else 1))
    outcome = run(Recipe(0))
    assert outcome.kind == "differs" and "gradient" in outcome.text


def _traced(tensor: object) -> bool:
    return hasattr(tensor, "_elem")
