"""A picture of a plan's page, as the docs show it: `python experiments/lib/picture.py PLAN.json PICTURE.jpg`.

`make readme` runs it. The script needs Debian's Chromium, as `make test-browser` does.
"""

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import autoshard
from autoshard.report import html_report


WIDTH, HEIGHT = 1240, 1560


def main() -> None:
    plan, picture = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "report.html"
        page_file.write_text(html_report(autoshard.load(plan)), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(page_file.as_uri())
        page.screenshot(path=picture, type="jpeg", quality=70)
        browser.close()


if __name__ == "__main__":
    main()
