"""The ops of a plan in a real browser: sorted, filtered, selected in table and roofline, linked to tensors."""

import dataclasses
from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from autoshard.planning import PlannedOp
from tests.report.conftest import llama_plan


Visit = Callable[..., Page]


def names(page: Page) -> list[str]:
    return page.locator("#op-table tbody tr td:first-child").all_inner_texts()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_ops_fit_their_window_in_both_schemes(visit: Visit, width: int, scheme: str):
    page = visit(llama_plan(), width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#roofline circle").count() == 3 and len(names(page)) == 5
    assert page.locator("#roofline polyline.roof").count() == 1
    assert "100.0% of the step" in page.locator("#ops").inner_text()


def test_ops_sort_by_each_head(visit: Visit):
    page = visit(llama_plan())
    assert names(page)[0] == "mlp/dot_general (backward, in a loop)"
    page.locator("#op-table").get_by_role("button", name="memory").click()
    assert names(page)[:2] == ["exp (forward, in a loop)", "mlp/dot_general (backward, in a loop)"]
    page.locator("#op-table").get_by_role("button", name="memory").click()
    assert names(page)[-1] == "exp (forward, in a loop)"
    assert page.locator("#op-table th[aria-sort]").inner_text() == "memory"
    page.locator("#op-table").get_by_role("button", name="op", exact=True).click()
    assert names(page) == sorted(names(page))


def test_the_filter_finds_by_name_line_and_bound(visit: Visit):
    page = visit(llama_plan())
    for text, count in (("exponential", 1), ("mlp.py", 2), ("NETWORK", 1), ("no such op", 0)):
        page.get_by_label("Filter").fill(text)
        assert len(names(page)) == count, text
    page.get_by_label("Filter").fill("mlp.py")
    assert page.locator("#op-found").inner_text() == "2 found, 2.55 s together"


def test_long_tables_begin_folded_and_all_can_be_reached(visit: Visit):
    plan = llama_plan()
    many = tuple(
        PlannedOp(f"op {n}", "add", "", "", 1, 1 / (n + 1), 0.0, 0.0, 0.0, 0.0, 1e6, 0, "memory") for n in range(90)
    )
    page = visit(dataclasses.replace(plan, ops=many))
    assert len(names(page)) == 12 and page.locator("#roofline").is_hidden()
    page.get_by_role("button", name="Show all 90").click()
    assert len(names(page)) == 90
    page.get_by_role("button", name="Show the first 12").click()
    page.get_by_label("Filter").fill("op 8")
    assert len(names(page)) == 11  # op 8, and op 80 to 89, folded or not


def test_points_and_rows_are_the_same_ops(visit: Visit):
    page = visit(llama_plan())
    page.locator("#roofline circle").nth(1).hover()
    said = page.locator("#op-pointed").inner_text()
    assert "mlp/dot_general (forward, in a loop)" in said and "waits 150 ms" in said and "bound by compute" in said
    assert "375 TFLOP/s, 81.7 % of peak" in said  # 3e14 FLOPs in 0.8 s, of 459 TFLOP/s
    assert page.locator("#op-table tr.pointed").count() == 1
    page.locator("#op-filter").focus()
    page.locator("#roofline circle").nth(0).focus()
    assert "backward" in page.locator("#op-pointed").inner_text()
    page.locator("#op-table tbody tr").nth(1).hover()
    assert page.locator("#roofline circle.pointed").get_attribute("data-id") == "1"


def test_a_parameter_leads_to_its_tensor(visit: Visit):
    page = visit(llama_plan())
    page.locator("#op-table").get_by_role("button", name="up_proj").click()
    found = page.locator("#tensors tbody tr td:first-child bdi").all_inner_texts()
    assert "up_proj.weight" in found and "q_proj.weight" not in found
