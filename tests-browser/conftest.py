"""Headless Chromium, with pages that may not use the network."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from autoshard.planning import Plan
from autoshard.report import html_report


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # No sandbox: continuous integration runs as root, where Chromium refuses one. The pages are our own.
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """`show(text)` opens a page of that text; any error on the page fails the test at its end."""
    wrong: list[str] = []
    contexts = []

    def shown(text: str, width: int = 1240, color_scheme: str = "light") -> Page:
        file = tmp_path / "page.html"
        file.write_text(text, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=color_scheme)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("request", lambda request: None if request.url == file.as_uri() else wrong.append(request.url[:200]))
        page.goto(file.as_uri())
        return page

    yield shown
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def visit(show: Callable[..., Page]) -> Callable[..., Page]:
    """`visit(plan, **options)` opens the plan's page."""

    def visited(plan: Plan, width: int = 1240, color_scheme: str = "light", **report) -> Page:
        return show(html_report(plan, **report), width, color_scheme)

    return visited
