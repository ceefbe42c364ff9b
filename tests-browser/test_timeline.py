"""The timeline in a real browser: selected with mouse and keys, zoomed and moved."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from tests.report.conftest import llama_plan


Visit = Callable[..., Page]
ROW, TITLE = 22, 16
"""Pixels of the picture, as in its script."""


def said(page: Page) -> str:
    return page.locator("#time-note").inner_text()


def point(page: Page, share: float, row: int) -> None:
    """Move the mouse to a fraction of the width."""
    box = page.locator("#time").bounding_box()
    assert box is not None
    page.locator("#time").hover(position={"x": share * box["width"], "y": row * (ROW + TITLE) + TITLE + ROW / 2})


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_each_piece_of_work_can_be_pointed_at(visit: Visit, width: int, scheme: str):
    page = visit(llama_plan(), width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    point(page, 1.15 / 3.22, 0)
    assert said(page) == (
        "reduce-scatter over model: add (in a loop): 310 ms from 1.01 s on "
        "(compute, and what it waits for; compute waits)"
    )
    point(page, 0.3 / 3.22, 1)
    assert "all-gather over data: model.layers.*.mlp.up_proj.weight: 520 ms from 110 ms on (link data, loop 0)" == said(
        page
    )


def test_keys_walk_in_time_and_between_rows(visit: Visit):
    page = visit(llama_plan())
    page.locator("#time").focus()
    for key, found in (
        ("ArrowRight", "gather"), ("ArrowRight", "linear matmul"), ("ArrowDown", "all-gather over data"),
        ("ArrowUp", "linear matmul"), ("End", "linear matmul (backward"), ("Home", "gather"),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert found in said(page), key


def test_coming_closer_spreads_what_is_in_the_middle(visit: Visit):
    page = visit(llama_plan())
    point(page, 0.34, 0)
    assert "reduce-scatter" in said(page)
    for _ in range(2):
        page.get_by_role("button", name="Closer").click()
    # A quarter of the step, from 1.21 s to 2.01 s: at 0.34 of it, the backward pass runs.
    point(page, 0.34, 0)
    assert "backward" in said(page)
    page.mouse.down()
    box = page.locator("#time").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + TITLE + ROW / 2, steps=5)
    page.mouse.up()
    point(page, 0.5, 0)  # moved by more than half of the width: 1.21 s earlier
    assert "reduce-scatter" in said(page)
    page.get_by_role("button", name="Whole step").click()
    point(page, 0.01, 0)
    assert said(page).startswith("embedding gather")
