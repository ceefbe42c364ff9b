"""The load of links in a real browser: each link has a tooltip with the collectives that use it."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from tests.report.conftest import llama_plan


Visit = Callable[..., Page]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_every_link_of_a_line_is_drawn(visit: Visit, width: int, scheme: str):
    page = visit(llama_plan(), width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#torus svg").count() == 3  # x has 4 chips, y and z have 8, each a ring
    assert page.locator("#torus path").count() == 4 + 8 + 8
    assert page.locator("#torus circle").count() == 4 + 8 + 8


def test_links_can_be_pointed_at_with_mouse_and_keys(visit: Visit):
    page = visit(llama_plan())
    page.locator("#torus").scroll_into_view_if_needed()
    before, after = (page.locator("#torus svg").nth(2).locator("circle").nth(n).bounding_box() for n in (3, 4))
    assert before is not None and after is not None
    page.mouse.move((before["x"] + after["x"] + after["width"]) / 2, before["y"] + before["height"] / 2)
    # Over model: 0.21 + 0.06 + 0.04 of 3.22 s.
    assert page.locator("#link-pointed").inner_text() == (
        "Link z 3 to 4: busy 310 ms of a step (9.6 %) with model, which send 5.64 GiB each way; "
        "compute waits for 250 ms of it"
    )
    page.locator("#torus svg").nth(0).locator("path").first.focus()
    assert "Link x 0 to 1: busy 580 ms of a step (18.0 %) with data" in page.locator("#link-pointed").inner_text()
    assert page.locator("#torus path[tabindex]").count() == 3  # equal links count once
