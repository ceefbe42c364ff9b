"""The page contains the plan's own numbers, needs no other files, and is safe with any name."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from autoshard.cost import Topology, make_mesh
from autoshard.planning import MeshTried, Plan, Spec, load_plan, save_plan
from autoshard.report import html_report
from autoshard.report.figures import recipe_line
from autoshard.report.terminal.explanation_report import step_limits


class Page(HTMLParser):
    """Contents of a page that the tests compare."""

    VOID = ("meta", "link", "input", "br", "wbr")

    def __init__(self, text: str):
        super().__init__()
        self.figures: dict[str, list[str]] = {}
        self.tags: dict[str, int] = {}
        self.links: list[str] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.links += [value or "" for key, value in attrs if key in ("src", "href", "action")]
        assert not [key for key in given if key.startswith("on")], "no inline handlers"
        if tag == "data":
            self.figures.setdefault(given["data-key"] or "", []).append(given["value"] or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.text += " " if tag in ("td", "th", "p", "li") else ""

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.text += data


def value_at(saved: dict[str, Any], key: str) -> Any:
    """Return the value of a key such as `baselines.fsdp x tp.step_time_s`. Names of baselines may contain dots."""
    if key.startswith("baselines."):
        name, _, field = key.removeprefix("baselines.").rpartition(".")
        return saved["baselines"][name][field]
    value = saved
    for part in key.split("."):
        value = value[part]
    return value


def test_the_numbers_on_the_page_are_those_of_the_plan_file(plan: Plan, tmp_path: Path):
    save_plan(plan, tmp_path / "plan.json")
    saved = json.loads((tmp_path / "plan.json").read_text())
    page = Page(html_report(load_plan(tmp_path / "plan.json")))
    assert len(page.figures) > 30
    for key, values in page.figures.items():
        assert {float(value) for value in values} == {float(value_at(saved, key))}, key
    expected = {
        "prediction.step_time_s",
        "prediction.peak_bytes",
        "plan_gap",
        "objective",
        "prediction.memory.activations",
    }
    expected |= {f"baselines.{name}.step_time_s" for name in plan.baselines}
    assert expected <= set(page.figures)


def test_the_page_needs_nothing_from_anywhere(plan: Plan):
    text = html_report(plan)
    assert Page(text).links == ["data:,"]
    assert not re.search(r"https?://|@import|url\(", text)
    assert "default-src 'none'" in text


def test_every_tensor_is_in_the_page_with_its_spec(plan: Plan):
    data = json.loads(Page(html_report(plan)).scripts[0])
    specs = {}

    def walk(nodes: list[dict[str, Any]]) -> None:
        for node in nodes:
            if "children" in node:
                assert node["device"] == sum(child["device"] for child in node["children"])
                walk(node["children"])
            else:
                specs[node["name"]] = (tuple(node["shape"]), Spec.from_json(node["dims"]))

    walk(data["trees"])
    assert specs == {name: (plan.shapes[name], plan.arguments[name]) for name in plan.arguments}
    assert [tree["label"] for tree in data["trees"]] == ["parameters", "optimizer state", "batch"]
    assert [axis["size"] for axis in data["physical"]] == [4, 8, 8]


def test_a_stacked_block_says_how_many_layers_it_holds(plan: Plan):
    data = json.loads(Page(html_report(plan)).scripts[0])
    (model,) = (node for node in data["trees"][0]["children"] if node["label"] == "model")
    (layers,) = (node for node in model["children"] if node["label"] == "layers")
    assert [(node["label"], node["repeats"]) for node in layers["children"]] == [("*", 32)]


def unrolled(plan: Plan, layers: int, odd: int | None = None) -> Plan:
    """Return the plan with a list of layers in place of a stack; layer `odd` splits nothing."""
    arguments, shapes, dtypes, roles = {}, {}, {}, {}
    for name, spec in plan.arguments.items():
        for layer in range(layers) if "*" in name else (None,):
            new = name if layer is None else name.replace("*", str(layer))
            arguments[new] = Spec.replicated(len(spec.dims)) if layer is not None and layer == odd else spec
            shapes[new], dtypes[new], roles[new] = plan.shapes[name], plan.dtypes[name], plan.roles[name]
    return dataclasses.replace(plan, arguments=arguments, shapes=shapes, dtypes=dtypes, roles=roles)


@pytest.mark.parametrize(
    ("odd", "labels"),
    [(None, [("0–11", 12)]), (0, [("0", 1), ("1–11", 11)]), (5, [("0–4", 5), ("5", 1), ("6–11", 6)])],
)
def test_repeated_layers_are_folded_where_they_are_split_alike(plan: Plan, odd: int | None, labels: list):
    page = Page(html_report(unrolled(plan, 12, odd)))
    (model,) = (node for node in json.loads(page.scripts[0])["trees"][0]["children"] if node["label"] == "model")
    (layers,) = (node for node in model["children"] if node["label"] == "layers")
    assert [(node["label"], node["repeats"]) for node in layers["children"]] == labels


def test_a_very_large_plan_stays_small(plan: Plan):
    # 126 layers, unrolled, with optimizer state: as many tensors as an unstacked 405B model.
    assert len(html_report(unrolled(plan, 126)).encode()) < 3 * 2**20


def test_what_a_baseline_lacks_is_reported(plan: Plan):
    text = " ".join(Page(html_report(plan)).text.split())
    assert (
        "It does not fit: it needs 151.00 GiB a device, of which activations take 120.80 GiB, 55.30 GiB too much."
        in text
    )
    assert "It is 64.0% slower, chiefly by 2.09 s more exposed communication." in text


def test_only_the_costliest_collectives_are_listed(plan: Plan):
    (first, *_) = plan.prediction.collectives
    many = tuple(dataclasses.replace(first, seconds=n / 1024, count=n) for n in range(150))
    prediction = dataclasses.replace(plan.prediction, collectives=many)
    page = Page(html_report(dataclasses.replace(plan, prediction=prediction)))
    text = " ".join(page.text.split())
    assert "The costliest 100 are listed; 50 more take 1.2 s together." in text
    assert "146 ms" in text


def test_a_collective_says_what_causes_it_where_and_what_of_it_is_exposed(plan: Plan):
    text = html_report(plan)
    rows = re.findall(r"<tr><td><i class=.*?</tr>", text)
    assert len(rows) == 4
    cells = [[re.sub("<.*?>|\u200b", "", cell) for cell in re.findall(r"<td.*?</td>", row)] for row in rows]
    assert cells[0] == [
        "all-gather", "data", "model.layers.*.mlp.up_proj.weight", "model.py:31", "448", "12.00 GiB", "520 ms",
        "hidden",
    ]  # fmt: skip
    assert cells[1][2:4] == ["dot_general in mlp.down_proj", "mlp.py:7"] and cells[1][6:] == ["210 ms", "150 ms"]
    assert 'title="lib/nets/mlp.py:7"' in rows[1]
    assert cells[2][7] == "60 ms"  # a plan of an older version, without exposed times: all of it counts


def test_the_bar_and_the_sentence_show_what_is_exposed_and_no_more(plan: Plan):
    text = " ".join(Page(html_report(plan)).text.split())
    assert (
        "exposed: reduce-scatter over model 150 ms, all-reduce over data, model 60 ms, all-to-all over model 40 ms"
        in text
    )
    assert "the costliest is reduce-scatter over model, 150 ms for dot_general in mlp.down_proj" in text


def test_the_costliest_collectives_of_all_layers_are_named_together(plan: Plan):
    first = plan.prediction.collectives[0]
    names = [f"params.layers.{n}.{w}" for n in range(4) for w in ("w1", "wk")]

    def limits(seconds: dict[str, float]) -> str:
        rows = tuple(
            dataclasses.replace(first, cause=name, exposed_s=seconds[name[-2:]], hidden=False) for name in names
        )
        return " ".join(
            step_limits(dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, collectives=rows)))
        )

    assert "1.2 s, chiefly for params.layers.*.w1." in limits({"w1": 0.2, "wk": 0.1})
    assert "1.2 s, chiefly for params.layers.*.wk." in limits({"w1": 0.1, "wk": 0.2})
    names.extend(f"params.layers.{n}.w2" for n in range(4))
    assert "1.6 s, 40% of it for params.layers.*.w1." in limits({"w1": 0.16, "wk": 0.12, "w2": 0.12})
    names[:] = names[:1]
    assert "200 ms for params.layers.0.w1." in limits({"w1": 0.2})


def test_what_no_collective_exposes_is_waiting_for_links(plan: Plan):
    (first, *_) = plan.prediction.collectives
    prediction = dataclasses.replace(plan.prediction, collectives=(dataclasses.replace(first, exposed_s=0.1),))
    text = " ".join(Page(html_report(dataclasses.replace(plan, prediction=prediction))).text.split())
    words = "waiting for links that are busy for longer than concurrent compute"
    assert f"exposed: {first.kind} over data 100 ms, {words} 210 ms" in text
    assert "other exposed communication 60 ms" in " ".join(Page(html_report(plan)).text.split())


def test_it_says_which_mesh_axis_lies_where(plan: Plan):
    words = "data=32 on x(4, ring) + y(8, ring); model=8 on z(8, ring)"
    order = make_mesh(Topology.parse(plan.topology), plan.mesh).device_order
    assert words in html_report(dataclasses.replace(plan, device_order=order))
    assert words not in html_report(dataclasses.replace(plan, device_order=order[::-1]))  # ordered by hand


def test_memory_timeline_and_tensors_come_before_other_meshes(plan: Plan):
    meshes = tuple(MeshTried(mesh, "", 3.22, None, "chosen") for mesh in ("data=32,model=8", "data=64,model=4"))
    page = html_report(dataclasses.replace(plan, meshes=meshes))
    order = ["h-words", "h-ops", "h-memory", "h-timeline", "h-tensors", "h-what-if", "h-meshes", "h-provenance"]
    places = [page.index(f'<h2 id="{name}">') for name in order]
    assert places == sorted(places)
    assert f"recipe: <bdi>{recipe_line(plan)}</bdi>" in page


def test_a_billion_tokens_have_their_hours(plan: Plan):
    counted = html_report(dataclasses.replace(plan, provenance=plan.provenance | {"tokens": 524288}))
    # 256 devices take 3.22 s for the tokens of a step: 1e9 / 524288 * 3.22 / 3600 * 256 hours.
    assert "163 k tokens/s" in counted and "a billion tokens take 437 hours of a device" in counted
    assert "a billion tokens" not in html_report(plan)


def test_hopeless_meshes_are_folded_away(plan: Plan):
    step = plan.prediction.step_time_s
    rows = [("data=32,model=8", step), ("data=64,model=4", 1.9 * step), ("data=256", 38 * step), ("model=256", None)]
    meshes = tuple(MeshTried(mesh, "", seconds, None, "slower") for mesh, seconds in rows)
    shown, _, folded = html_report(dataclasses.replace(plan, meshes=meshes)).partition('<details id="far-meshes">')
    assert "2 more that take over twice as long or have no plan" in folded
    assert [f"<bdi>{mesh.replace(',', ', ')}</bdi></td>" in shown for mesh, _ in rows] == [True, True, False, False]
    assert all(f"<bdi>{mesh}</bdi></td>" in folded for mesh in ("data=256", "model=256"))


def test_another_plan_is_compared(plan: Plan):
    renamed = {"data": ("rows",), "model": ("columns", "lanes")}
    other = dataclasses.replace(
        plan,
        mesh={"rows": 32, "columns": 4, "lanes": 2},
        arguments={
            name: Spec(tuple(tuple(over for axis in axes for over in renamed[axis]) for axes in spec.dims))
            for name, spec in plan.arguments.items()
        }
        | {"lm_head.weight": Spec((("rows",), ()))},
        pins=(),
        prediction=dataclasses.replace(plan.baselines["fsdp"], collectives=()),
    )
    text = " ".join(Page(html_report(plan, compare=other)).text.split())
    assert "1 of 34 common arguments are split differently" in text
    split = sum(bool(spec.axes) for name, spec in plan.arguments.items() if name != "lm_head.weight")
    assert split > 10 and f"{split} are split into the same parts over axes of other names." in text
    assert "lm_head.weight 128256/model x 4096/data 128256/rows x 4096" in text
    assert "step time 3.22 s 3.47 s" in text
    bars = html_report(plan, compare=other).partition('<div class="bars">')[2].partition("</section>")[0]
    names = re.findall(r'<span class="name"><bdi>(.*?)</bdi>', bars)
    assert names[:2] == ["this plan", f"compared: {plan.program_name} on rows=32, columns=4, lanes=2"]
    assert len(names) == 2 + len(plan.baselines)


def test_a_measurement_follows_the_plan(plan: Plan):
    measured = {
        "step_time_s": 3.542,
        "max_rel_diff": 2e-7,
        "collectives": {
            "wire_bytes": {
                "data": {"predicted": 2**30, "compiled": 2**29},
                "model": {"predicted": 2**31, "compiled": 2**31},
            }
        },
    }
    text = " ".join(Page(html_report(plan, measured=measured)).text.split())
    assert "step time (measured is 1.10 of predicted) 3.22 s 3.54 s" in text
    assert "on the wire over data, as compiled 1.00 GiB 512.00 MiB" in text


HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "\"'><b>",
    "‮reversed",
    "w" * 5000,
    "<!--",
    "{{ 7*7 }}",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_does_no_harm(plan: Plan, name: str):
    plain = Page(html_report(plan))
    (own, *_) = plan.arguments

    def renamed(table: dict[str, Any]) -> dict[str, Any]:
        return {name if key == own else key: value for key, value in table.items()}

    collectives = tuple(dataclasses.replace(c, cause=name, line=name) for c in plan.prediction.collectives)
    hostile = dataclasses.replace(
        plan,
        program_name=name,
        arguments=renamed(plan.arguments),
        shapes=renamed(plan.shapes),
        dtypes=renamed(plan.dtypes),
        roles=renamed(plan.roles),
        words=(name,) * len(plan.words),
        warnings=(name,),
        provenance={name: name, "b": 1, "c": 2},
        prediction=dataclasses.replace(plan.prediction, collectives=collectives, peak_at=name),
    )
    page = Page(html_report(hostile, compare=hostile))
    expected = Page(html_report(plan, compare=plan)).tags
    assert page.tags == expected
    assert len(page.scripts) == len(plain.scripts)
    assert name.replace("‮", "\N{REPLACEMENT CHARACTER}")[:30] in page.text
    assert name in [json.loads(f'"{text}"') for text in re.findall(r'"name":"((?:[^"\\]|\\.)*)"', page.scripts[0])]
