"""A plan in a notebook: the table, the figures and the cell agree with the plan."""

import dataclasses
import importlib

import matplotlib
import numpy as np
import pytest

from autoshard import UserError
from autoshard.planning import Plan, Spec


matplotlib.use("agg")


def test_the_table_has_a_row_for_every_argument(plan: Plan):
    frame = plan.to_frame()
    assert list(frame.index) == list(plan.arguments)
    row = frame.loc["model.layers.*.mlp.up_proj.weight"]
    assert row["spec"] == "32 x 14336/model x 4096/data"
    assert row["shards"] == 256
    assert row["bytes"] == 2 * 32 * 14336 * 4096
    assert row["device_bytes"] == row["bytes"] / 256
    assert row["comm_s"] == 0.52
    assert frame["role"].value_counts().to_dict() == {"parameter": 11, "optimizer_state": 22, "batch": 1}


def test_the_time_figure_draws_the_plan_first_and_to_scale(plan: Plan):
    (axes,) = plan.plot_time().axes
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["this plan", "fsdp x tp, sequence"]
    compute, exposed, hidden = axes.patches[:3]
    assert compute.get_width() == pytest.approx(plan.prediction.compute_s)
    assert exposed.get_width() == pytest.approx(plan.prediction.exposed_comm_s)
    assert exposed.get_x() == pytest.approx(plan.prediction.compute_s)
    assert hidden.get_width() == pytest.approx(plan.prediction.hidden_comm_s)
    assert "151" not in "".join(text.get_text() for text in axes.texts)
    assert "3.95 s, does not fit" in [text.get_text() for text in axes.texts]


def test_the_memory_figure_adds_up_to_the_peak(plan: Plan):
    (axes,) = plan.plot_memory().axes
    assert sum(patch.get_width() for patch in axes.patches) == pytest.approx(41.0)
    assert {text.get_text() for text in axes.texts} == {"activations 32.80 GiB", "parameters 8.20 GiB", "limit"}


@pytest.mark.parametrize(("name", "parts"), [("lm_head.weight", 256), ("model.norm.weight", 1)])
def test_the_sharding_figure_colours_each_device_by_its_part(plan: Plan, name: str, parts: int):
    figure = plan.plot_sharding(name)
    panels = [cell.images[0].get_array() for cell in figure.axes if cell.images]
    assert [panel.shape for panel in panels] == [(8, 8)] * 4
    assert len(np.unique(np.stack(panels))) == parts
    assert figure.axes[3].get_title() == "x 3"


def test_the_sharding_figure_follows_the_device_order(plan: Plan):
    spec = Spec((("data",), ()))
    order = tuple(reversed(range(256)))
    turned = dataclasses.replace(plan, arguments=plan.arguments | {"lm_head.weight": spec}, device_order=order)
    panels = np.stack([cell.images[0].get_array() for cell in turned.plot_sharding("lm_head.weight").axes])
    assert panels.ravel().tolist() == [31 - device // 8 for device in range(256)]


def test_a_wrong_name_gets_near_ones(plan: Plan):
    with pytest.raises(UserError, match=r"no argument 'lm_head.wieght'; did you mean lm_head.weight"):
        plan.plot_sharding("lm_head.wieght")


def test_a_missing_package_says_what_to_install(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(UserError, match=r"pandas is not installed: pip install 'autoshard\[notebook\]'\."):
        plan.to_frame()


def test_the_cell_shows_the_verdict_and_escapes_names(plan: Plan):
    html = plan._repr_html_()
    assert "<b>Fits</b>: 41.00 GiB of 95.70 GiB a device." in html
    assert html.count("<tr>") == 2 + len(plan.baselines)
    assert "<script>" not in dataclasses.replace(plan, program_name="<script>")._repr_html_()
