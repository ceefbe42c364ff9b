"""The page of a sweep in a real browser: select a row, filter, and change the assumptions."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from autoshard.report import html_report, sweep_page
from tests.report.conftest import llama_plan
from tests.report.test_sweep import PRICES, ROWS


@pytest.fixture
def opened(show: Callable[..., Page]) -> Callable[..., Page]:
    def visited(width: int = 1240, color_scheme: str = "light", prices: dict[str, float] = PRICES) -> Page:
        return show(sweep_page(ROWS, prices, 15e12), width, color_scheme)

    return visited


def topologies(page: Page) -> list[str]:
    return page.locator("#rows tbody tr td:nth-child(2)").all_inner_texts()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1240, 390])
def test_it_fits_its_window_in_both_schemes(opened: Callable[..., Page], width: int, scheme: str):
    page = opened(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#plot circle").count() == 3
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert ink != paper
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


def test_plans_can_be_pointed_at_with_mouse_and_keys(opened: Callable[..., Page]):
    page = opened()
    page.locator("#plot circle").nth(1).hover()
    said = page.locator("#pointed").inner_text()
    assert "v6e:16x16*4" in said and "batch 1024" in said and "2.0 GiB left" in said
    page.locator("#least-left").focus()
    page.locator("#plot circle").nth(0).focus()
    assert "v5p:8x8x16" in page.locator("#pointed").inner_text()
    assert page.locator("#rows tr.pointed td").nth(1).inner_text() == "v5p:8x8x16"


def test_prices_and_tokens_change_what_is_best(opened: Callable[..., Page]):
    page = opened()
    assert "cheapest: v5e:16x16" in page.locator("#counted").inner_text()
    cost = page.locator("#rows tr.best td").nth(9)
    before = cost.inner_text()
    page.locator("#tokens").fill("30000")
    assert page.locator("#rows tr.best td").nth(8).inner_text() == "3643"  # days, twice those of 15 T tokens
    assert cost.inner_text() != before
    page.locator("[data-chip=v5e]").fill("9")
    assert "cheapest: v6e:16x16*4" in page.locator("#counted").inner_text()
    page.locator("[data-chip=v6e]").fill("")
    assert "not every chip has a price" in page.locator("#counted").inner_text()
    assert page.locator("#plot-title").inner_text() == "Chips over days"
    page.locator("[data-chip=v6e]").fill("-3")  # an invalid price counts as none
    assert "not every chip has a price" in page.locator("#counted").inner_text()


def test_filters_leave_out_rows_of_table_and_plot(opened: Callable[..., Page]):
    page = opened()
    page.locator("#most-chips").fill("300")
    assert topologies(page) == ["v5e:16x16"] and page.locator("#plot circle").count() == 1
    page.locator("#most-chips").fill("")
    page.locator("[data-shown=v5p]").uncheck()
    assert sorted(topologies(page)) == ["v5e:16x16", "v6e:16x16*4"]
    page.locator("#least-left").fill("3")
    assert topologies(page) == [] and "loosen a filter" in page.locator("#counted").inner_text()
    page.locator("#least-left").fill("")
    page.locator("#most-cost").fill("15000000")
    assert topologies(page) == ["v5e:16x16"]


def test_the_table_sorts_by_its_heads(opened: Callable[..., Page]):
    page = opened()
    assert topologies(page) == ["v5p:8x8x16", "v6e:16x16*4", "v5e:16x16"]
    page.locator("#rows th button").nth(1).click()
    assert topologies(page)[0] == "v5e:16x16"
    page.locator("#rows th button").nth(1).click()
    assert topologies(page)[-1] == "v5e:16x16"
    assert page.locator("#rows th[aria-sort]").inner_text() == "chips"


def test_what_has_no_plan_says_why(opened: Callable[..., Page]):
    page = opened()
    assert "v5e:4x4: it does not fit" in page.get_by_role("region", name="Without a plan").inner_text()


def test_a_row_leads_to_the_page_of_its_plan(browser: Browser, tmp_path: Path):
    rows = [dataclasses.replace(ROWS[0], plan="a.plan.json"), ROWS[1]]
    (tmp_path / "sweep-plans").mkdir()
    (tmp_path / "sweep-plans" / "a #1.plan.html").write_text(html_report(llama_plan()), encoding="utf-8")
    text = sweep_page(rows, PRICES, 15e12, {"a.plan.json": "sweep-plans/a #1.plan.html"})
    (tmp_path / "sweep.html").write_text(text, encoding="utf-8")
    page = browser.new_page()
    try:
        page.goto((tmp_path / "sweep.html").as_uri())
        assert page.locator("#rows a").count() == 1
        assert page.locator("#rows a").get_attribute("href") == "./sweep-plans/a%20%231.plan.html"
        page.locator("#plot circle").first.focus()
        assert page.locator("#pointed a").inner_text() == "a.plan.json"
        page.locator("#rows a").click()
        assert page.locator("h1").inner_text() == "llama3-8b"
        page.go_back()
        assert page.locator("#rows a").inner_text() == ROWS[0].topology
    finally:
        page.close()
