"""The memory chart in a real browser: the live tensors at the pointed position, by mouse and keys."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from autoshard.base.units import format_bytes
from tests.report.conftest import llama_plan


GIB = 2**30
Visit = Callable[..., Page]


def held(page: Page) -> list[tuple[str, str, str]]:
    """Return (tensor, bytes, kind) of every row."""
    rows = page.locator("#held tbody tr")
    cells = [rows.nth(n).locator("td").all_inner_texts() for n in range(rows.count())]
    return [(row[0], row[1], row[3]) for row in cells]


@pytest.mark.parametrize("width", [1280, 400])
def test_it_begins_at_the_peak_and_adds_up_to_it(visit: Visit, width: int):
    page = visit(llama_plan(), width)
    assert held(page) == [
        ("add (forward, in a loop)", "19.00 GiB", "activations"),
        ("mlp/dot_general (forward, in a loop)", "13.00 GiB", "activations"),
        ("model.layers.*.mlp.up_proj.weight", "8.00 GiB", "parameters"),
        ("all others", format_bytes(int(32.8 * GIB) - 32 * GIB), "activations"),
        ("all others", format_bytes(int(8.2 * GIB) - 8 * GIB), "parameters"),
    ]
    assert page.locator("#held-note").inner_text() == "41.00 GiB at moment 3 of 4, 1.32 s into the step"


def test_pointing_shows_what_is_stored_there_and_a_click_holds_it(visit: Visit):
    page = visit(llama_plan())
    chart = page.locator("#memory-chart")
    box = chart.bounding_box()
    assert box is not None
    chart.hover(position={"x": 2, "y": 100})
    assert [row[0] for row in held(page)] == ["model.layers.*.mlp.up_proj.weight", "all others"]
    chart.hover(position={"x": box["width"] / 3, "y": 100})
    assert held(page)[0][:2] == ("add (forward, in a loop)", "19.00 GiB")
    chart.click(position={"x": box["width"] / 3, "y": 100})
    chart.hover(position={"x": 2, "y": 100})
    assert "moment 2 of 4" in page.locator("#held-note").inner_text()
    chart.click(position={"x": 2, "y": 100})
    assert "moment 1 of 4" in page.locator("#held-note").inner_text()


def test_keys_walk_through_the_moments(visit: Visit):
    page = visit(llama_plan(), color_scheme="dark")
    chart = page.locator("#memory-chart")
    chart.focus()
    for key, moment in (("Home", 1), ("ArrowLeft", 1), ("ArrowRight", 2), ("End", 4), ("PageDown", 3)):
        page.keyboard.press(key)
        assert chart.get_attribute("aria-valuenow") == str(moment), key
    assert f"moment {moment} of 4" in str(chart.get_attribute("aria-valuetext"))
