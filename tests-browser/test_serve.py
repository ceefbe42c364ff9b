"""The page of ways to serve in a real browser: select one, set limits and prices, and read the flags."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from autoshard.serving import (
    ServingLimits,
    ServingPlan,
    ServingRequests,
    plan_serving,
    serve_page,
    serving_figures,
    vllm_commands,
)


PLAN = plan_serving("hf:llama3-8b", "v6e:2x4", ServingRequests(1000, 500), ServingLimits(token_s=0.030))


@pytest.fixture
def opened(show: Callable[..., Page]) -> Callable[..., Page]:
    def visited(width: int = 1280, color_scheme: str = "light", plan: ServingPlan = PLAN, **prices: float) -> Page:
        return show(serve_page(serving_figures(plan), prices), width, color_scheme)

    return visited


def column(page: Page, number: int) -> list[str]:
    return page.locator(f"#rows tbody tr td:nth-child({number})").all_inner_texts()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_fits_its_window_in_both_schemes(opened: Callable[..., Page], width: int, scheme: str):
    page = opened(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    kept = [each for each in PLAN.points if each.token_s <= 0.030]
    assert page.locator("#plot circle").count() == len(kept)
    assert f"{len(kept)} of {len(PLAN.points)} ways keep the limits" in page.locator("#counted").inner_text()


def test_it_begins_with_the_best_way_and_its_flags(opened: Callable[..., Page]):
    page = opened()
    best = page.locator("#rows tr.best td").all_inner_texts()
    assert best[1] == str(PLAN.best.engine.tensor) and best[3] == str(PLAN.best.batch)
    assert page.locator("#flags code").all_inner_texts() == vllm_commands(PLAN)


def test_limits_leave_out_ways_and_change_what_is_best(opened: Callable[..., Page]):
    page = opened()
    page.locator("#each").fill("5")
    allowed = [each for each in PLAN.points if each.token_s <= 0.005]
    best = max(allowed, key=lambda each: each.tokens_per_s)
    assert page.locator("#plot circle").count() == len(allowed)
    assert page.locator("#rows tr.best td").nth(3).inner_text() == str(best.batch)
    page.locator("#apart").uncheck()
    assert page.locator("#plot circle").count() == sum(not each.prompt_engines for each in allowed)
    page.locator("#gap").fill("4")
    assert page.locator("#plot circle").count() == sum(
        not each.prompt_engines and each.gap_s <= 0.004 for each in allowed
    )
    page.locator("#each").fill("0.001")
    assert column(page, 1) == [] and "loosen a limit" in page.locator("#counted").inner_text()
    assert page.locator("#flags code").count() == 0
    page.locator("#each").fill("-3")  # an invalid limit counts as none
    assert page.locator("#plot circle").count() > 0


def test_prices_and_a_days_tokens_fill_their_columns(opened: Callable[..., Page]):
    page = opened()
    heads = page.locator("#rows th")
    assert "cost of 1M tokens" not in heads.all_inner_texts()
    page.locator("#price").fill("3.6")
    cost = 8 * 3.6 / 3600 / PLAN.best.tokens_per_s * 1e6
    assert float(page.locator("#rows tr.best td").nth(10).inner_text()) == pytest.approx(cost, rel=1e-3)
    page.locator("#daily").fill("10000")
    copies = -(-10_000e6 // (86_400 * PLAN.best.tokens_per_s))
    cells = page.locator("#rows tr.best td").all_inner_texts()
    assert cells[11] == str(int(copies)) and float(cells[12].replace("K", "e3")) == pytest.approx(
        copies * 24 * 8 * 3.6, rel=1e-3
    )


def test_ways_can_be_pointed_at_sorted_and_all_shown(opened: Callable[..., Page]):
    page = opened(v6e=2.7)
    page.locator("#plot circle").first.focus()
    said = page.locator("#pointed").inner_text()
    assert said.startswith("tensor ") and said.endswith("for a million tokens")
    assert page.locator("#plot circle.pointed").count() == 1
    front = len(column(page, 1))
    page.get_by_role("button", name="Show all").click()
    assert len(column(page, 1)) > front
    for _ in range(2):
        page.locator("#rows th button", has_text="tokens/s").click()
    assert page.locator("#rows tbody tr").first.get_attribute("class") == "best"


def test_shorter_answers_are_nearly_as_planned_for_them(opened: Callable[..., Page]):
    page = opened()
    page.locator("#each").fill("")
    page.locator("#output").fill("250")
    page.get_by_role("button", name="Show all").click()
    shorter = plan_serving("hf:llama3-8b", "v6e:2x4", ServingRequests(1000, 250))
    exact = {(each.engine.tensor, each.batch): each for each in shorter.points if not each.prompt_engines}
    compared = 0
    for cells in (row.locator("td").all_inner_texts() for row in page.locator("#rows tbody tr").all()):
        if "+" not in cells[2]:
            each = exact.get((int(cells[1]), int(cells[3])))
            if each is None:  # the limits change the largest batch
                continue
            assert each.token_s * 0.9 <= float(cells[6]) / 1e3 <= each.token_s * 1.05
            compared += 1
    assert compared > 20
    page.locator("#output").fill("501")  # longer than planned: no way is known to fit
    planned = {f"{1e3 * each.token_s:.4g}" for each in PLAN.points}
    assert set(column(page, 7)) <= {str(float(each)).removesuffix(".0") for each in planned}


def test_groups_and_experts_have_columns_where_there_are_any(opened: Callable[..., Page]):
    plan = plan_serving("hf:mixtral-8x7b", "h100:8", ServingRequests(1000, 500))
    page = opened(plan=plan)
    assert page.locator("#rows th").all_inner_texts()[1:5] == ["tensor", "attention", "experts", "engines"]
    best = page.locator("#rows tr.best td").all_inner_texts()
    assert best[1:4] == [str(getattr(plan.best.engine, name)) for name in ("tensor", "attention", "experts")]
    assert page.locator("#flags code").all_inner_texts() == vllm_commands(plan)
    for width in (1280, 400):
        assert opened(width, plan=plan).evaluate("document.documentElement.scrollWidth") <= width
