"""Differences between two plans, by place: arguments, values inside the step, communication."""

import dataclasses

import jax
from jax.sharding import AxisType, NamedSharding
from rich.console import Console

import autoshard
from autoshard.planning import Collective, Pin, Plan, Spec
from autoshard.report import difference, difference_figures, difference_report
from tests.planning.programs import two_matmuls


def shown(found: object) -> str:
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(difference_report(found))  # type: ignore[arg-type]
    return " ".join(capture.get().split())


def pinned(plan: Plan, *pins: Pin) -> Plan:
    return dataclasses.replace(plan, pins=pins)


def test_equal_plans_have_no_difference(plan: Plan):
    largest = difference(plan, plan)
    assert largest.is_empty and not largest.inside and not largest.collectives
    assert "The two plans are the same." in shown(largest)


def test_plans_with_other_pins_alone_differ_there(plan: Plan):
    kept = Pin(3, 0, Spec((("data",), ())), name="jit(step)/tanh")
    first = pinned(plan, kept, Pin(5, 0, Spec((("data",), ("model",))), name="jit(step)/dot_general"))
    second = pinned(
        plan,
        kept,
        Pin(5, 0, Spec((("data",), ())), name="jit(step)/dot_general"),
        Pin(5, 0, Spec(((), ("model",))), (9, 1), name="jit(step)/dot_general"),
    )
    largest = difference(first, second)
    assert not largest.specs and not largest.is_empty
    assert [(each.name, each.first, each.second) for each in largest.inside] == [
        ("dot_general", "*/data x */model", "*/data x *"),
        ("dot_general as op 9 takes it", "not pinned", "* x */model"),
    ]
    text = shown(largest)
    assert "2 values inside the step have other specs." in text and "dot_general */data x */model -> */data x *" in text
    assert difference_figures(largest)["inside"][0]["second"] == "*/data x *"


def test_values_inside_are_few_rows_without_the_numbers_of_ops(plan: Plan):
    spec = Spec((("data",),))
    once = [Pin(op, 0, spec, name=f"jit(step)/{name}") for op, name in enumerate(("exp", "log", "sin", "cos", "tan"))]
    used = [Pin(op, 0, spec, (op + 40, 0), name="jit(step)/mul") for op in range(10, 13)]
    text = shown(difference(pinned(plan, *once, *used), pinned(plan)))
    assert "8 values inside the step have other specs. 3 of mul as operands */data -> not pinned" in text
    assert "takes it" not in text and "and 1 more rows, of fewer values; --json lists all" in text


def test_stages_of_one_value_are_one_after_the_other(plan: Plan):
    stages = (Pin(5, 0, Spec((("data",),)), name="add"), Pin(5, 0, Spec((("data", "model"),)), name="add"))
    (each,) = difference(pinned(plan, *stages), plan).inside
    assert (each.first, each.second) == ("*/data then */data/model", "not pinned")


def test_values_of_another_program_are_matched_by_name(plan: Plan):
    pin = Pin(5, 0, Spec((("data",),)), name="add")
    first = pinned(plan, pin, Pin(6, 0, Spec((("data",),)), name="mul"))
    other = dataclasses.replace(pinned(plan, dataclasses.replace(pin, op=70)), program_fingerprint="1" * 64)
    assert [each.name for each in difference(first, other).inside] == ["mul"]


def test_communication_that_differs_is_listed_by_kind_and_axes(plan: Plan):
    more = Collective("all-to-all", ("model",), 3, 1024, 0.5, False, "x", exposed_s=0.25)
    collectives = (*plan.prediction.collectives, more)
    other = dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, collectives=collectives))
    ((kind, axes, before, after),) = difference(plan, other).collectives
    assert (kind, axes) == ("all-to-all", "model")
    assert after.count - before.count == 3 and after.wire_bytes - before.wire_bytes == 1024
    assert "all-to-all over model 64 times, 1.00 GiB" in shown(difference(plan, other))
    (row,) = difference_figures(difference(plan, other))["collectives"]
    assert row["second"]["seconds"] - row["first"]["seconds"] == 0.5


def test_two_real_plans_with_the_same_arguments_show_where_they_differ():
    program, mesh = two_matmuls(), {"data": 4, "model": 2}
    fixed = {"params.up": "None,model", "params.down": "model,None", "x": "data,None"}
    free = autoshard.plan(program, topology="v5e:2x4", mesh=mesh, pins=fixed)
    kept = autoshard.plan(program, topology="v5e:2x4", mesh=mesh, pins=fixed, axis_only={"data": "batch"}, form="jax")
    largest = difference(free, kept)
    assert not largest.specs and largest.inside
    assert all(each.second == "not pinned" for each in largest.inside)


def test_what_moving_the_state_takes_is_reported(plan: Plan):
    state = next(name for name, role in plan.roles.items() if role != "batch" and len(plan.shapes[name]) > 1)
    axis = next(axis for axis, size in plan.mesh.items() if size > 1)
    whole, rows = ({state: Spec(((axes), ())[: len(plan.shapes[state])])} for axes in ((), (axis,)))
    first, second = (dataclasses.replace(plan, arguments=plan.arguments | each) for each in (rows, whole))
    largest = difference(first, second)
    assert largest.state is not None and max(largest.state.received_bytes) > 0
    assert "tensors of state from the first to the second." in shown(largest)
    assert difference_figures(largest)["state"]["names"] == largest.state.names
    back = difference(second, first)
    assert back.state is None and "of state" not in shown(back)  # every device has its part already


def test_names_are_whole_in_a_narrow_terminal(plan: Plan):
    names = [f"state.params.blocks.attn.{part}.kernel" for part in "koqv"]
    rows = tuple((name, "4096/(data,model) x 4096/fsdp", "4096/data x 4096/(model,fsdp)") for name in names)
    console = Console(width=70, color_system=None)
    with console.capture() as capture:
        console.print(difference_report(dataclasses.replace(difference(plan, plan), specs=rows)))
    assert all(name in capture.get() for name in names) and "\N{HORIZONTAL ELLIPSIS}" not in capture.get()


def test_equal_parts_over_axes_of_other_names_are_no_difference(plan: Plan):
    bare = dataclasses.replace(
        plan, pins=(), regions=(), calls=(), roles={"x": "batch"}, shapes={"x": (64, 64)}, dtypes={"x": "float32"}
    )
    bare = dataclasses.replace(bare, prediction=dataclasses.replace(plan.prediction, collectives=()))

    def row(*axes: str, **mesh: int) -> Plan:
        return dataclasses.replace(bare, mesh=mesh, arguments={"x": Spec((axes, ()))})

    def placed(plan: Plan) -> NamedSharding:
        mesh = jax.make_mesh(tuple(plan.mesh.values()), tuple(plan.mesh), (AxisType.Auto,) * len(plan.mesh))
        return NamedSharding(mesh, plan.arguments["x"].partition_spec())

    one = row("data", data=8)
    for other in (row("a", "b", a=4, b=2), row("b", "a", a=4, b=2), row("a", a=4, b=2), row("b", a=4, b=2)):
        # jax.sharding says which device holds which part.
        equal = placed(one).is_equivalent_to(placed(other), 2)
        found = difference(one, other)
        assert (found.renamed, len(found.specs)) == ((1, 0) if equal else (0, 1))
    assert difference(row("b", a=4, b=2), row("c", "d", a=4, c=1, d=2)).renamed == 1


def test_axes_of_another_size_have_it_and_states_follow_their_arguments(plan: Plan):
    roles = {"state.0.w": "parameter", "state.1.mu.w": "optimizer_state", "state.1.nu.w": "optimizer_state"}
    split, whole = Spec((("data",), ())), Spec(((), ()))
    fields = {"roles": roles, "shapes": dict.fromkeys(roles, (64, 64)), "dtypes": dict.fromkeys(roles, "float32")}
    first, second = (
        dataclasses.replace(plan, arguments=dict(zip(roles, specs, strict=True)), **fields)
        for specs in ((split, split, split), (whole, whole, Spec(((), ("data",)))))
    )
    text = shown(difference(first, second))
    assert "and 1 of optimizer state, which follow these" in text and "state.1.mu.w" not in text
    assert "state.0.w 64/data x 64 -> 64 x 64" in text and "state.1.nu.w 64/data x 64 -> 64 x 64/data" in text
    (one, size), (two, other) = plan.mesh.items()
    turned = dataclasses.replace(plan, mesh={one: other, two: size})
    found = difference(plan, turned)
    assert size != other and found.specs
    assert all(f"{one}={size}" in a or f"{two}={other}" in a for _, a, _ in found.specs)
