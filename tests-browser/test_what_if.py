"""Alternatives in a real browser: select one and compare it with the plan."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from tests.report.conftest import llama_plan
from tests.report.test_what_if import chosen


@pytest.fixture
def beside(visit: Callable[..., Page]) -> Callable[..., Page]:
    def shown(name: str, width: int = 1280, scheme: str = "light") -> Page:
        page = visit(chosen(llama_plan()), width, scheme)
        page.locator("#alternative").select_option(label=name)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        return page

    return shown


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_a_baseline_that_does_not_fit(beside: Callable[..., Page], width: int, scheme: str):
    page = beside("data parallel", width, scheme)
    said = page.locator("#beside").inner_text()
    assert "It takes 3.95 s a step, 22.7 % longer than this plan." in said
    assert "It holds 151.00 GiB of a device, 55.30 GiB too much." in said and "It does not fit" in said
    bars = page.locator("#beside .what").first.locator(".track span:first-child")
    own, other = (bars.nth(n).evaluate("each => parseFloat(each.style.width)") for n in (0, 1))
    assert other == 100 and own == pytest.approx(100 * 3.22 / 3.95, rel=1e-3)


def test_a_recipe_of_another_batch_is_compared_by_element(beside: Callable[..., Page]):
    page = beside("batch 32, remat none")
    assert (
        "1.92 s a step, 20.0 % longer than this plan for each element of a batch."
        in page.locator("#beside").inner_text()
    )


def test_what_is_foreseen_or_bounded_says_so(beside: Callable[..., Page]):
    said = beside("batch 96").locator("#beside").inner_text()
    assert "about 5 s a step, about 55.3 % longer" in said and "foreseen so, and not planned" in said
    said = beside("data=256").locator("#beside").inner_text()
    assert "at least 3.9 s a step, at least 21.1 % longer" in said and "not known" in said


def test_nothing_runs_with_the_first_and_the_repeated_one(beside: Callable[..., Page]):
    page = beside("fsdp")
    page.locator("#alternative").select_option("")
    assert page.locator("#beside").inner_text() == ""
