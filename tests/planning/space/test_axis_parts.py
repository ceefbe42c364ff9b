"""Axes in two parts: when they are cut, the dims that use them, and their names."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.cost import Topology, make_mesh
from autoshard.planning import Options, Plan, axis_words, load_plan, mesh_words, read_asked
from autoshard.planning.plan_builder import make_plan
from autoshard.planning.price.analysed_program import analyse_program
from autoshard.planning.record.spec import Spec, original_mesh, part_names
from autoshard.planning.space.derived_axes import find_axis_parts
from autoshard.program import Program
from tests.planning.programs import grouped_query, program


def planned(source: Program, mesh: str, **options: Any) -> Plan:
    return make_plan(source, Options(**options, topology="cpu:8", mesh=mesh, time_limit=20)).plan


# Names


def test_parts_are_named_after_their_axis() -> None:
    assert part_names("model", (8, 2)) == ("model(8 of 16)", "model(2 of 16)")
    assert part_names("model", (2, 2)) == ("model(2 of 4, outer)", "model(2 of 4, inner)")


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (("model(8 of 16)", "model(2 of 16)"), ("model",)),
        (("data", "model(8 of 16)"), ("data", "model(8 of 16)")),
        (("model(2 of 4, outer)", "model(2 of 4, inner)"), ("model",)),
        (("data(2 of 4, outer)", "model(2 of 4, inner)"), ("data(2 of 4, outer)", "model(2 of 4, inner)")),
        ((), ()),
    ],
)
def test_both_parts_are_the_axis(axes: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert axis_words(axes) == words
    assert str(Spec((axes, ()))) == f"[{'x'.join(words) or '-'}, -]"


def test_a_mesh_is_written_as_it_was_asked_for() -> None:
    mesh = {"data": 16, "model(8 of 16)": 8, "model(2 of 16)": 2}
    assert original_mesh(mesh) == {"data": 16, "model": 16}
    assert mesh_words(mesh) == "data=16, model=16 as 8x2"
    assert mesh_words({"data": 4}) == "data=4"


# When


def found(source: Program, topology: str, **sizes: int) -> tuple[str, ...] | None:
    read = analyse_program(source, "tpu")
    groups = read.groups
    parts = find_axis_parts(read.graph, read.structure, groups, make_mesh(Topology.parse(topology), sizes))
    return None if parts is None else parts.mesh.names


def test_heads_ask_the_last_axis_and_a_batch_the_first() -> None:
    assert found(grouped_query(kv=4), "v5e:8x8", data=8, model=8) == ("data", "model(4 of 8)", "model(2 of 8)")
    small = grouped_query(batch=4, kv=8)
    assert found(small, "v5e:8x8", data=8, model=8) == ("data(4 of 8)", "data(2 of 8)", "model")


def test_an_axis_that_divides_every_dim_stays_whole() -> None:
    assert found(grouped_query(kv=4), "v5e:4x4", data=4, model=4) is None
    assert found(program("wide mlp"), "v5e:4x4", data=4, model=4) is None


def test_a_mesh_with_a_cut_axis_is_not_cut_again() -> None:
    """Start from the mesh of a plan, as a recipe that follows another one does, where both dims ask for a cut."""
    source, sizes = grouped_query(batch=4, kv=4), {"model(4 of 8)": 4, "model(2 of 8)": 2}
    assert found(source, "v5e:8x8", data=8, model=8) is not None
    assert found(source, "v5e:8x8", data=8, **sizes) is None


def test_parts_lie_one_inside_the_other() -> None:
    source = grouped_query(kv=4)
    read = analyse_program(source, "tpu")
    groups = read.groups
    mesh = make_mesh(Topology.parse("cpu:8"), {"model": 8})
    parts = find_axis_parts(read.graph, read.structure, groups, mesh)
    assert parts is not None
    assert parts.mesh.sizes == (4, 2)
    assert parts.mesh.device_order == mesh.device_order


# The plan


@pytest.fixture(scope="module")
def refined() -> Plan:
    return planned(grouped_query(kv=4), "data=1,model=8")


def test_heads_use_half_of_the_axis(refined: Plan) -> None:
    assert list(refined.mesh) == ["data", "model(4 of 8)", "model(2 of 8)"]
    assert refined.original_mesh == {"data": 1, "model": 8}
    assert "model(4 of 8)" in refined.arguments["p.k"].axes
    assert any("model(4 of 8)" in line for line in refined.words)
    assert any(line.endswith("over model") for line in refined.words)


def test_it_is_faster_than_with_whole_axes(refined: Plan) -> None:
    whole = planned(grouped_query(kv=4), "data=1,model=8", refine_axes=False)
    assert whole.mesh == whole.original_mesh == {"data": 1, "model": 8}
    assert refined.prediction.step_time_s < whole.prediction.step_time_s
    assert refined.baselines == whole.baselines


def test_a_refined_plan_is_saved_whole(refined: Plan, tmp_path: Any) -> None:
    refined.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == refined


def test_pins_name_the_axis() -> None:
    plan = planned(grouped_query(kv=4), "data=1,model=8", asked=read_asked({"p.up": "model,None"}))
    assert axis_words(plan.arguments["p.up"].dims[0]) == ("model",)
    assert plan.arguments["p.up"].dims[1] == ()


def test_a_program_that_names_axes_keeps_them() -> None:
    def step(p: Any, x: Any) -> Any:
        mesh = jax.sharding.AbstractMesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
        return jnp.tanh(x @ jax.lax.with_sharding_constraint(p, spec)).reshape(4, 8, 64)

    shapes = jax.ShapeDtypeStruct((32, 64), jnp.float32), jax.ShapeDtypeStruct((32, 32), jnp.float32)
    assert planned(autoshard.trace(step, shapes), "model=8").mesh == {"model": 8}
