"""Specs fixed by name: they hold, other specs are chosen around them, and impossible ones are refused."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import UserError
from autoshard.planning import Options, PlanResult, Spec, make_plan, read_asked, save_plan, spec_text
from autoshard.planning.record.spec import parse_spec_text
from autoshard.planning.space.user_constraints import parse_lines
from autoshard.program import Program, open_source
from tests.planning.programs import two_matmuls


MESH = "data=4,model=2"
UP, DOWN = "model.layers.*.mlp.up_proj.weight", "model.layers.*.mlp.down_proj.weight"


@functools.cache
def llama() -> Program:
    return open_source("hf:llama-tiny", train=True, batch=16, seq=32)


def planned(**asked: Any) -> PlanResult:
    return make_plan(llama(), Options(topology="cpu:8", mesh=MESH, asked=read_asked(**asked)))


@pytest.mark.full
def test_a_pin_covers_the_dims_of_one_layer_and_the_rest_is_chosen() -> None:
    made = planned(pins={"layers.*.mlp.*.weight": "model,None"})
    split = Spec(((), ("model",), ()))
    assert made.plan.arguments[UP] == made.plan.arguments[DOWN] == split
    assert made.plan.results[UP] == split, "updated state keeps the spec of what it replaces"
    assert made.plan.provenance["asked"] == ["--pin layers.*.mlp.*.weight=model,None"]
    assert made.plan.provenance["pinned"][UP] == "--pin layers.*.mlp.*.weight=model,None"
    assert not [name for name in made.plan.provenance["pinned"] if name.startswith("optimizer")]


@pytest.mark.parametrize(
    "spec",
    ["model,None", "[model, -]", (("model",), None), Spec((("model",), ()))],
)
def test_specs_may_be_written_in_many_ways(spec: Any) -> None:
    (pin,) = read_asked({UP: spec}).pins
    assert pin.dims == (("model",), ()) and pin.flag == f"--pin {UP}=model,None"


@pytest.mark.parametrize(
    ("spec", "dims"),
    [
        (P(None, "model"), ((), ("model",))),
        (P("model"), (("model",), ())),
        (P(), ((), ())),
        ("model,...", (("model",), ())),
        (("model", ...), (("model",), ())),
        (P(P.UNCONSTRAINED, "model"), ((), ("model",))),
    ],
)
def test_dims_behind_the_last_entry_of_a_partition_spec_are_whole(spec: Any, dims: Any) -> None:
    plan = autoshard.plan(two_matmuls(), topology="cpu:8", mesh=MESH, pins={"up": spec})
    assert plan.arguments["params.up"] == Spec(dims)
    read = read_asked({"up": spec})
    assert parse_lines([pin.flag for pin in read.pins]) == read, "reports write it so that it is read again"


@pytest.mark.heavy
def test_a_short_spec_of_a_stack_is_that_of_one_layer() -> None:
    assert planned(pins={UP: P("model")}).plan.arguments[UP] == Spec(((), ("model",), ()))


def test_one_name_is_no_list_of_letters() -> None:
    assert read_asked(replicate="up") == read_asked(replicate=["up"])
    plan = autoshard.plan(two_matmuls(), topology="cpu:8", mesh=MESH, replicate="up")
    assert plan.arguments["params.up"] == Spec.replicated(2)


@pytest.mark.parametrize("text", ["64/model x 32", "*/model x *", "4 x 64/model x 32", " 64/model  x  32 "])
def test_what_reports_print_may_be_pinned(text: str) -> None:
    (pin,) = read_asked({UP: text}).pins
    assert pin.dims[-2:] == (("model",), ()) and pin.flag == f"--pin {UP}={text.strip()}"
    assert parse_lines([pin.flag]) == read_asked({UP: text})


def test_both_of_two_pins_of_one_name_are_read_again() -> None:
    asked = read_asked({"up": "model,?"}, replicate=["a=b"], forbid={"x": "data"}, axis_only={"data": "batch"},
                       pin_from={"up": Spec(((), ("data",)))})  # fmt: skip
    assert [pin.dims for pin in asked.pins] == [(("model",), None), ((), ("data",))]
    assert parse_lines(asked.lines) == asked
    assert parse_lines(["--other x", *asked.lines]) == asked


@pytest.mark.parametrize("flag", ["--pin", "--forbid", "--axis-only"])
def test_a_line_without_a_value_is_refused(flag: str) -> None:
    with pytest.raises(UserError, match=f"{flag} up has no `=`"):
        parse_lines([f"{flag} up"])


@pytest.mark.heavy
def test_a_plan_is_what_its_own_printed_specs_pin() -> None:
    free = planned().plan
    printed = {name: spec_text(spec, free.shapes[name]) for name, spec in free.arguments.items() if free.shapes[name]}
    assert planned(pins=printed).plan.arguments == free.arguments


def test_sizes_of_another_tensor_are_refused() -> None:
    with pytest.raises(UserError, match=r"=65/model x 32 is for a dim of 65, but .* has 128 there"):
        planned(pins={UP: "65/model x 32"})


@given(st.lists(st.tuples(st.integers(1, 9), st.lists(st.sampled_from("abc"), unique=True, max_size=2)), max_size=4))
def test_what_is_printed_is_read_again(dims: list[tuple[int, list[str]]]) -> None:
    spec, shape = Spec(tuple(tuple(axes) for _, axes in dims)), [size for size, _ in dims]
    assert parse_spec_text(spec_text(spec, shape)) == tuple(zip(shape, spec.dims, strict=True))


def test_a_dim_may_be_left_free() -> None:
    asked = {UP: "?,data", "lm_head.weight": P(P.UNCONSTRAINED, "data")}
    specs = planned(pins=asked).plan.arguments
    assert specs[UP].dims[0] == () and specs[UP].dims[2] == specs["lm_head.weight"].dims[1] == ("data",)


def test_tensors_may_be_preserved_whole_and_axes_excluded_from_them() -> None:
    plan = planned(replicate=["lm_head.weight"], forbid={"*proj.weight": "data"}).plan
    assert plan.arguments["lm_head.weight"] == Spec.replicated(2)
    for name, spec in plan.arguments.items():
        assert not name.endswith("proj.weight") or "data" not in spec.axes, name


def test_an_axis_may_be_restricted_to_a_dim_group() -> None:
    plan = planned(axis_only={"data": "batch", "model": ["ffn", "vocabulary"]}).plan
    for name, spec in plan.arguments.items():
        if plan.roles[name] != "batch":
            assert "data" not in spec.axes, name
        if "attn" in name:
            assert not spec.axes, name


@pytest.mark.full
def test_pinning_fsdp_is_no_worse_than_the_completed_baseline() -> None:
    free = planned()
    baseline = free.baseline_plans["fsdp"]
    specs = {n: s for n, s in baseline.arguments.items() if baseline.roles[n] == "parameter"}
    made = planned(pins=specs)
    assert {n: made.plan.arguments[n] for n in specs} == specs
    assert made.plan.prediction.step_time_s <= baseline.prediction.step_time_s
    assert made.plan.baselines["fsdp"] == free.plan.baselines["fsdp"], "baselines are completed without the pins"


@pytest.mark.full
def test_another_plan_may_be_pinned(tmp_path: Path) -> None:
    fsdp = planned().baseline_plans["fsdp"]
    save_plan(fsdp, tmp_path / "plan.json")
    plan = autoshard.plan(llama(), topology="cpu:8", mesh=MESH, pin_from=tmp_path / "plan.json")
    for name, role in plan.roles.items():
        assert role != "parameter" or plan.arguments[name] == fsdp.arguments[name]


def test_the_same_pins_give_the_same_plan() -> None:
    options = Options(topology="v5e:2x4", mesh=MESH, asked=read_asked({"up": "data,model"}))
    first, second = (make_plan(two_matmuls(), options) for _ in range(2))
    assert first.plan == second.plan


@pytest.mark.heavy
def test_a_pinned_plan_runs_and_equals_the_unplanned() -> None:
    made = two_matmuls()
    plan = autoshard.plan(made, topology="cpu:8", mesh=MESH, pins={"up": "data,model", "down": "?,data"})
    values = made.make_args(0)  # type: ignore[misc]
    wanted = jax.jit(made.fn)(*values)
    np.testing.assert_allclose(plan.jit(made.fn)(*values), wanted, atol=1e-5 * float(abs(wanted).max()))


@pytest.mark.parametrize(
    "asked, said",
    [
        (
            {"pins": {"layers.*.mlp.up_prj.weight": "model,None"}},
            "--pin layers.*.mlp.up_prj.weight=model,None matches no argument or result of the program; did you mean "
            f"{UP}, ",
        ),
        (
            {"pins": {UP: "expert,None"}},
            f"--pin {UP}=expert,None names the axis `expert`, but the mesh has data=4,model=2: use one of these, or "
            "another --mesh.",
        ),
        (
            {"pins": {UP: "model,model"}},
            f"--pin {UP}=model,model ({UP}) uses the axis `model` twice; an axis can split one dim of a tensor.",
        ),
        (
            {"pins": {"model.norm.weight": "model,None"}},
            "--pin model.norm.weight=model,None has 2 entries, but model.norm.weight of shape [64] has 1 dim: write "
            "an entry for each: None for a whole dim, ? for a free one, or a final ... if all further dims are "
            "whole.",
        ),
        (
            {"pins": {UP: "model"}},
            f"--pin {UP}=model has 1 entry, but {UP} of shape [4, 128, 64] has 2 dims after the 1 of the stack of "
            "layers: write an entry for each: None for a whole dim, ? for a free one, or a final ... if all further",
        ),
        (
            {"pins": {UP: "model,None,None"}},
            f"--pin {UP}=model,None,None cannot hold for {UP}: dim 0 of [4, 128, 64] stays whole (a stack, or cut by "
            "an op).",
        ),
        (
            {"pins": {UP: "model,None", "layers.*.mlp.*.weight": "None,model"}},
            f"--pin layers.*.mlp.*.weight=None,model contradicts --pin {UP}=model,None: leave one of them out.",
        ),
        (
            {"pins": {UP: "model,None"}, "replicate": [UP]},
            f"--replicate {UP} contradicts --pin {UP}=model,None: leave one of them out.",
        ),
        (
            {"pins": {f"optimizer.mu.{UP}": "model,None", f"optimizer.nu.{UP}": "None,model"}},
            f"--pin optimizer.nu.{UP}=None,model contradicts --pin optimizer.mu.{UP}=model,None, since "
            f"optimizer.nu.{UP} and optimizer.mu.{UP} share one spec: leave one of them out.",
        ),
        (
            {"pins": {UP: "data,None"}, "axis_only": {"data": "batch"}},
            f"--axis-only data=batch contradicts --pin {UP}=data,None: leave one of them out.",
        ),
        (
            {"axis_only": {"data": "bach"}},
            "--axis-only data=bach names no dim group of the program; it has batch, ffn, heads, hidden, sequence, "
            "vocabulary.",
        ),
        (
            {"pins": {UP: 3}},
            f"the pin of `{UP}` is 3; write it as reports do ('4096/data x 14336'), or an entry for each dim, as "
            "'model,None': `+` joins axes of one dim, `?` leaves a dim free, and a final `...` leaves all "
            "further dims whole.",
        ),
        ({"pins": {UP: {"model": 1}}}, f"the pin of `{UP}` is {{'model': 1}}; write it as reports do"),
        ({"pins": {UP: (5, None)}}, f"the pin of `{UP}` is (5, None); write it as reports do"),
        ({"pins": {5: "model"}}, "pins is {5: 'model'}; write a dict with names, such as "),
        ({"pins": [UP]}, f"pins is ['{UP}']; write a dict with names, such as "),
        ({"forbid": UP}, f"forbid is '{UP}'; write a dict with names, such as "),
        ({"forbid": {UP: 5}}, f"forbid of `{UP}` is 5; write axes, as a text or in a list."),
        ({"axis_only": {"data": 5}}, "axis_only of `data` is 5; write dim groups, as a text or in a list."),
        ({"replicate": [UP, 5]}, "replicate has 5 among its names of tensors; write them as texts."),
    ],
)  # fmt: skip
def test_what_cannot_hold_is_reported(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        planned(**asked)
    assert str(error.value).startswith(said)


def test_a_dim_that_does_not_divide_is_reported() -> None:
    with pytest.raises(UserError) as error:
        make_plan(llama(), Options(topology="cpu:6", mesh="data=3,model=2", asked=read_asked({UP: "data,None"})))
    assert str(error.value) == (
        f"--pin {UP}=data,None ({UP}) splits dim 1 of [4, 128, 64] over data = 3, which does not divide 128: take axes "
        "whose sizes do, or leave the dim whole."
    )


def test_pins_that_need_too_much_memory_are_reported() -> None:
    with pytest.raises(autoshard.InfeasibleError, match="the least found is .* with these pins, at its peak"):
        autoshard.plan(two_matmuls(), topology="cpu:8", mesh=MESH, memory_limit=4096, replicate=["up", "down"])


def test_a_pin_of_whole_dims_over_several_ranks_names_replicate():
    program = two_matmuls()
    options = {"topology": "cpu:8", "mesh": "data=4,model=2"}
    with pytest.raises(UserError, match=r"`--replicate '\*'` keeps tensors of any rank whole"):
        make_plan(program, Options(**options, asked=read_asked({"*": "None,None,None,None"})))
    with pytest.raises(UserError, match=r"further dims are whole\.$"):
        make_plan(program, Options(**options, asked=read_asked({"*": "data,None,None,None"})))
