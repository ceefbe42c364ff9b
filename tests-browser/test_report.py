"""The report in a real browser: sort, search, fold, hover, keys, dark, narrow, print."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

import autoshard
from autoshard.planning import Plan, Spec, save_plan
from autoshard.program import open_source
from autoshard.report import html_report
from tests.report.conftest import llama_plan
from tests.report.test_html import HOSTILE, unrolled, value_at


def moe_plan() -> Plan:
    """Return a plan with experts over `expert`, on three axes and two slices."""
    base = llama_plan()
    arguments = {
        "layers.*.moe.router.weight": ((24, 64, 2048), Spec(((), (), ()))),
        "layers.*.moe.experts.up": ((24, 64, 8192, 2048), Spec(((), ("expert",), (), ("data",)))),
        "layers.*.moe.experts.down": ((24, 64, 2048, 8192), Spec(((), ("expert",), ("data",), ()))),
        "layers.*.attention.qkv": ((24, 6144, 2048), Spec(((), ("model",), ("data", "expert")))),
    }
    return dataclasses.replace(
        base,
        program_name="moe",
        topology="v5e:16x16*2",
        mesh={"data": 16, "expert": 8, "model": 4},
        device_order=tuple(range(512)),
        arguments={name: spec for name, (_, spec) in arguments.items()},
        shapes={name: shape for name, (shape, _) in arguments.items()},
        dtypes=dict.fromkeys(arguments, "bfloat16"),
        roles=dict.fromkeys(arguments, "parameter"),
    )


def convnet_plan() -> Plan:
    """Return a plan of many small layers, hardly split, on one axis of one machine."""
    base = llama_plan()
    names = [f"stage{s}.block{b}.conv{c}.kernel" for s in range(4) for b in range(6) for c in range(3)]
    shapes: dict[str, tuple[int, ...]] = {
        name: (3, 3, 64 << (index // 18), 64 << (index // 18)) for index, name in enumerate(names)
    }
    return dataclasses.replace(
        base,
        program_name="resnet",
        topology="h100:8",
        mesh={"data": 8},
        device_order=tuple(range(8)),
        arguments={name: Spec(((), (), (), ("data",) if shapes[name][3] >= 512 else ())) for name in names},
        shapes=shapes,
        dtypes=dict.fromkeys(names, "float32"),
        roles=dict.fromkeys(names, "parameter"),
    )


HAND_WRITTEN = {"moe": moe_plan, "convnet": convnet_plan, "unrolled": lambda: unrolled(llama_plan(), 126)}

REAL: dict[str, tuple[dict[str, Any], str, str]] = {
    "llama3-8b": ({"train": True, "remat": "full", "batch": 64, "seq": 8192}, "v5p:4x8x8", "data=32,model=8"),
    "mixtral-8x7b": ({"train": False, "batch": 32, "seq": 2048}, "v5e:8x8", "data=8,model=8"),
    "resnet-50": ({"train": True, "batch": 256}, "v5e:4x4", "data=16"),
}
"""Plans of a dense decoder, experts, and a convnet."""

Visit = Callable[..., Page]


@functools.cache
def planned(name: str) -> Plan:
    if name in HAND_WRITTEN:
        return HAND_WRITTEN[name]()
    options, topology, mesh = REAL[name]
    return autoshard.plan(open_source(f"hf:{name}", **options), topology=topology, mesh=mesh)


def rows(page: Page) -> list[str]:
    return page.locator("#tensors tbody tr td:first-child bdi").all_inner_texts()


@pytest.mark.parametrize("name", [*HAND_WRITTEN, *REAL])
def test_the_page_opens_small_in_every_width_without_sideways_scrolling(visit: Visit, name: str):
    assert len(html_report(planned(name)).encode()) < 3 * 2**20
    for width in (1240, 640):
        page = visit(planned(name), width=width)
        # Counted, not timed: a page with few nodes is painted at once on any machine.
        assert page.evaluate("document.querySelectorAll('*').length") < 2800
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert 2 < len(rows(page)) < 40


@pytest.mark.parametrize("name", REAL)
def test_a_real_plan_can_be_searched_unfolded_pointed_at_and_printed(visit: Visit, name: str):
    plan = planned(name)
    page = visit(plan, color_scheme="dark")
    page.get_by_role("button", name="Unfold all").click()
    page.locator("#tensors").get_by_role("button", name="a device holds").click()
    some = next(name for name, spec in plan.arguments.items() if spec.axes)
    page.get_by_label("Search").fill(some)
    page.locator("#tensors tbody tr").last.hover()
    assert " parts on " in page.locator("#devices-note").inner_text()
    for bar in page.locator("details.bar summary").all():
        bar.click()
    assert len(page.pdf()) > 20_000
    figures = dict(page.eval_on_selector_all("data", "all => all.map(d => [d.dataset.key, d.value])"))
    assert float(figures["prediction.peak_bytes"]) == plan.prediction.peak_bytes
    assert float(figures["prediction.step_time_s"]) == plan.prediction.step_time_s


def test_the_numbers_in_the_browser_are_those_of_the_plan_file(visit: Visit, tmp_path: Path):
    plan = llama_plan()
    save_plan(plan, tmp_path / "plan.json")
    saved = json.loads((tmp_path / "plan.json").read_text())
    figures = visit(plan).eval_on_selector_all("data", "all => all.map(d => [d.dataset.key, d.value])")
    assert len(figures) > 30
    for key, value in figures:
        assert float(value) == float(value_at(saved, key)), key


def test_search_shows_what_matches_and_nothing_else(visit: Visit):
    page = visit(unrolled(llama_plan(), 12, odd=5))
    page.get_by_label("Search").fill("UP_PROJ")
    leaves = [text for text in rows(page) if "." in text]
    assert set(leaves) == {"up_proj.weight"}
    assert page.locator("#found").inner_text() == f"{len(leaves)} found"
    page.get_by_label("Search").fill("no such tensor")
    assert rows(page) == []
    page.get_by_label("Search").fill("")
    assert "parameters" in rows(page)


def test_folding_by_button_click_and_key(visit: Visit):
    page = visit(llama_plan())
    page.get_by_role("button", name="Fold all", exact=True).click()
    assert rows(page) == ["parameters", "optimizer state", "batch"]
    page.locator("#tensors tbody tr").first.click()
    assert rows(page)[:3] == ["parameters", "model", "lm_head.weight"]
    assert page.locator("#tensors tbody tr").first.get_attribute("aria-expanded") == "true"
    page.keyboard.press("ArrowLeft")
    assert len(rows(page)) == 3
    for key, count in [("ArrowRight", 5), ("Enter", 3), (" ", 5)]:
        page.keyboard.press(key)
        assert len(rows(page)) == count, key
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.querySelector('bdi').textContent") == "lm_head.weight"
    page.get_by_role("button", name="Unfold all").click()
    assert len(rows(page)) > 40


def test_sorting_both_tables(visit: Visit):
    page = visit(convnet_plan())
    page.get_by_role("button", name="Unfold all").click()
    page.get_by_role("button", name="whole", exact=True).click()
    values = page.eval_on_selector_all(
        "#tensors tbody tr[aria-level='2'] td.n:nth-child(3)", "cells => cells.map(c => Number(c.dataset.value))"
    )
    assert values == sorted(values, reverse=True)
    assert len(values) == 4
    page = visit(llama_plan())
    column = page.locator("#collectives tbody td:nth-child(5)")
    page.locator("#collectives").get_by_role("button", name="times").click()
    assert column.all_inner_texts() == ["448", "256", "64", "6"]
    page.locator("#collectives").get_by_role("button", name="times").click()
    assert column.all_inner_texts() == ["6", "64", "256", "448"]


def test_long_lists_of_collectives_unfold_and_sort_as_a_whole(visit: Visit):
    plan = llama_plan()
    (first, *_) = plan.prediction.collectives
    many = tuple(dataclasses.replace(first, seconds=(50 - n) / 1024, count=n) for n in range(50))
    page = visit(dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, collectives=many)))
    shown = page.locator("#collectives tbody tr:visible")
    assert shown.count() == 20
    page.locator("#collectives").get_by_role("button", name="times").click()
    assert shown.first.locator("td").nth(4).inner_text() == "49"
    page.get_by_role("button", name="Show all 50").click()
    assert shown.count() == 50
    page.get_by_role("button", name="Show the first 20").click()
    assert shown.count() == 20


def colors(page: Page, canvas: str = "#devices") -> int:
    """Count the clearly different painted colours. Edges between cells blend a few more, on few pixels."""
    return page.evaluate(
        """(selector) => {
            const canvas = document.querySelector(selector);
            const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', {willReadFrequently: true});
            copy.drawImage(canvas, 0, 0);
            const {data} = copy.getImageData(0, 20, canvas.width, canvas.height - 20);
            const seen = new Map();
            for (let i = 0; i < data.length; i += 4)
                if (data[i + 3] === 255) { const k = data.slice(i, i + 3).join(); seen.set(k, (seen.get(k) || 0) + 1); }
            return [...seen.values()].filter((count) => count > 60).length;
        }""",
        canvas,
    )


def test_pointing_at_a_tensor_colours_the_devices_by_what_they_hold(visit: Visit):
    page = visit(llama_plan())
    assert colors(page) == 32  # the first view is by `data`
    page.get_by_role("button", name="model (8)").click()
    assert colors(page) == 8
    page.locator("#tensors tr", has_text="norm.weight").last.hover()
    assert page.locator("#devices-note").inner_text() == "Every device holds all of norm.weight."
    assert colors(page) == 1
    page.get_by_label("Search").fill("input_ids")
    page.locator("#tensors tr", has_text="input_ids").hover()
    assert page.locator("#devices-note").inner_text().startswith("input_ids: 256 parts on 256 devices;")
    assert (
        "down dim 0 (64) in 32 by data; across dim 1 (8192) in 8 by model" in page.locator("#tensor-note").inner_text()
    )


def test_pointing_at_a_device_tells_where_it_is_and_what_it_holds(visit: Visit):
    page = visit(llama_plan())
    page.get_by_label("Search").fill("input_ids")
    page.locator("#tensors tr", has_text="input_ids").hover()
    page.locator("#tensors tr", has_text="input_ids").click()
    page.locator("#devices").hover(position={"x": 3, "y": 20})
    assert page.locator("#devices-note").inner_text() == (
        "Device 0 (x 0, y 0, z 0): data 0, model 0; it holds [0:2, 0:1024]"
    )


def test_why_not_a_baseline_unfolds(visit: Visit):
    page = visit(llama_plan())
    row = page.locator("details.bar", has_text="data parallel")
    assert not row.locator(".why").is_visible()
    row.locator("summary").click()
    assert "It does not fit: it needs 151.00 GiB a device" in row.locator(".why").inner_text()


def test_dark_and_light_differ_and_both_can_be_read(visit: Visit):
    def contrast(page: Page) -> float:
        def luminance(css: str) -> float:
            channels = [int(c) / 255 for c in re.findall(r"\d+", css)[:3]]
            linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

        worst = 99.0
        for selector in ("body", ".note", ".warnings", ".card p", ".axes", ".fit"):
            ink, paper = page.evaluate(
                """(selector) => {
                    let element = document.querySelector(selector);
                    const ink = getComputedStyle(element).color;
                    const paper = () => getComputedStyle(element).backgroundColor;
                    while (paper() === 'rgba(0, 0, 0, 0)') element = element.parentElement;
                    return [ink, paper()];
                }""",
                selector,
            )
            a, b = sorted((luminance(ink), luminance(paper)))
            worst = min(worst, (b + 0.05) / (a + 0.05))
        return worst

    light, dark = visit(llama_plan()), visit(llama_plan(), color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert light.evaluate(background) == "rgb(255, 255, 255)"
    assert dark.evaluate(background) == "rgb(18, 22, 29)"
    assert contrast(light) > 4.5  # WCAG 2.1, level AA
    assert contrast(dark) > 4.5


def test_it_prints_on_white_without_tools(visit: Visit):
    page = visit(llama_plan(), color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for selector in (".warnings", ".card", ".track"):
        color = page.evaluate("s => getComputedStyle(document.querySelector(s)).backgroundColor", selector)
        assert min(map(int, re.findall(r"\d+", color)[:3])) > 200, selector
    assert not page.get_by_label("Search").is_visible()
    assert len(page.pdf()) > 20_000


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_only_text(visit: Visit, name: str):
    plan = llama_plan()
    (own, *_) = plan.arguments

    def renamed(table: dict) -> dict:
        return {name if key == own else key: value for key, value in table.items()}

    page = visit(
        dataclasses.replace(
            plan,
            program_name=name,
            arguments=renamed(plan.arguments),
            shapes=renamed(plan.shapes),
            dtypes=renamed(plan.dtypes),
            roles=renamed(plan.roles),
        )
    )
    page.get_by_role("button", name="Unfold all").click()
    assert page.locator("img, b >> text=/^$/").count() == 0
    assert page.evaluate("document.scripts.length") == 2
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("h1").inner_text()[:20] == name.replace("‮", "\N{REPLACEMENT CHARACTER}")[:20]
