"""Planned steps under JAX's explicit meshes: types of results equal those of `jax.jit`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.exec.apply.calls_on_shards import on_mesh


def explicit(*axes: tuple[str, int]) -> Mesh:
    names, sizes = zip(*axes, strict=True)
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Explicit,) * len(axes))


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden = jnp.tanh(x @ w)
    return w - 0.1 * (x.T @ hidden), jnp.sum(hidden, 1)


def arrays(**specs: P) -> list[Any]:
    values = np.random.default_rng(0).standard_normal((2, 32, 32), dtype=np.float32)
    return [jax.device_put(value, spec) for value, spec in zip(values, specs.values(), strict=True)]


@pytest.mark.parametrize("as_shapes", [False, True])
def test_a_loop_has_the_types_of_jit(as_shapes: bool) -> None:
    with jax.set_mesh(explicit(("a", 2), ("d", 4))):
        w, x = arrays(w=P(None, "a"), x=P("d", None))
        jitted = jax.jit(lambda w, x: (w * 2 + jnp.float32(1), jnp.tanh(x) * 3))
        shapes = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding), (w, x))
        plan = autoshard.plan(autoshard.trace(jitted, shapes if as_shapes else (w, x)), topology="cpu:8")
        assert plan.mesh == {"a": 2, "d": 4}, "that of the types"
        planned = plan.jit(jitted)
        mine, own = (w, x), (w, x)
        for _ in range(2):
            mine, own = planned(*mine), jitted(*own)
            assert [jax.typeof(each) for each in mine] == [jax.typeof(each) for each in own]
            mine, own = ((each[0] + w, each[1] - x) for each in (mine, own))
        for one, other in zip(mine, own, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
            assert one.sharding.is_equivalent_to(other.sharding, 2)
        untyped = planned(*map(np.asarray, (w, x)))[0]
        np.testing.assert_allclose(untyped, jitted(w, x)[0], rtol=1e-5)
        assert untyped.sharding.mesh.abstract_mesh.explicit_axes == ("a", "d"), "of the context"


def test_a_mesh_around_the_call_leaves_arrays_without_types_as_they_are() -> None:
    step = lambda w, x: (w - x.T @ jnp.tanh(x @ w), jnp.tanh(x @ w).sum())  # noqa: E731
    w, x = np.random.default_rng(0).standard_normal((2, 32, 32), dtype=np.float32)
    plan = autoshard.plan(autoshard.trace(step, (w, x)), topology="cpu:8", mesh={"a": 2, "d": 4})
    wanted = jax.jit(step)(w, x)
    with jax.set_mesh(explicit(("a", 2), ("d", 4))):
        found = plan.jit(step)(w, x)
        program = autoshard.trace(jax.jit(lambda w: jnp.tanh(w) + 1), (jax.device_put(w, P("a")),))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    assert any("under `jax.set_mesh` of a mesh with explicit axes" in note for note in program.notes)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("mesh", [{"d": 8}, {"data": 8}, {"data": 4, "model": 2}])
def test_a_plan_without_types_of_its_own_gives_types_too(inside: bool, mesh: dict[str, int]) -> None:
    """Trace outside of the mesh, or ignore its types: the plan then has axes of its own."""
    wanted = step(*arrays(w=None, x=None))
    free = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 2
    user = explicit(("d", 8))
    axes = tuple(mesh)
    pins = {"w": (None, axes), "x": (axes, None)}
    if inside:
        with jax.set_mesh(user):
            plan = autoshard.plan(
                autoshard.trace(step, free), topology="cpu:8", mesh=mesh, pins=pins, ignore_constraints=True
            )
    else:
        plan = autoshard.plan(autoshard.trace(step, free), topology="cpu:8", mesh=mesh, pins=pins)
    with jax.set_mesh(user):
        w, x = arrays(w=P(None, "d"), x=P("d", None))
        updated, sums = plan.jit(step)(w, x)
        assert str(jax.typeof(updated)) == "float32[32,32@d]" and jax.typeof(updated + w) == jax.typeof(w)
        np.testing.assert_allclose(updated, wanted[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(sums, wanted[1], rtol=1e-4, atol=1e-5)
    typed = plan.jit(step)(w, x)[0]
    assert jax.typeof(typed + w) == jax.typeof(w), "types of arguments are enough"


def descent(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def typed(user: Mesh) -> list[jax.Array]:
    specs = P(None, "b"), P("a")
    return [
        jax.device_put(each, NamedSharding(user, spec))
        for each, spec in zip(arrays(w=None, x=None), specs, strict=True)
    ]


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize(("topology", "sizes"), [("v6e:2x4", (4, 2)), ("cpu:8", (2, 4))])
def test_a_mesh_of_the_users_may_have_another_order_or_sizes(kind: Any, topology: str, sizes: tuple[int, int]) -> None:
    """Plan for a torus, which orders devices another way, or for other sizes of the axes in the types."""
    user = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    wanted = descent(*arrays(w=None, x=None))
    with jax.set_mesh(user):
        program = autoshard.trace(descent, typed(user))
        plan = autoshard.plan(program, topology=topology, mesh=dict(zip(("a", "b"), sizes, strict=True)))
        assert topology.startswith("cpu") or plan.device_order != tuple(range(8))
        run = plan.jit(descent)
        for _ in range(2):
            np.testing.assert_allclose(run(*typed(user)), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mesh", [{"a": 2, "b": 4}, {"d": 8}])
def test_types_of_arguments_that_are_ignored_leave_the_program_the_same(mesh: dict[str, int]) -> None:
    user, wanted = explicit(("a", 4), ("b", 2)), descent(*arrays(w=None, x=None))
    with jax.set_mesh(user):
        program = autoshard.trace(descent, typed(user))
        plan = autoshard.plan(program, topology="cpu:8", mesh=mesh, ignore_constraints=True)
        np.testing.assert_allclose(plan.jit(descent)(*typed(user)), wanted, rtol=1e-4, atol=1e-5)


SPECS = [P(), P("a"), P(None, "b"), P("b", "a"), P(("a", "b")), P(("b", "a")), P(None, ("a", "b")), P("b", "c")]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("user", [(("z", 2), ("y", 2), ("x", 2)), (("z", 8),)])
def test_the_other_spec_places_shards_alike(spec: P, user: Any) -> None:
    planned, mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3), explicit(*user)
    value = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(planned, spec))
    (found,) = on_mesh([value], mesh)
    assert found.sharding.is_equivalent_to(value.sharding, 2)
    assert (found.sharding.mesh == mesh) == (len(user) == 3 or spec == P()), "one axis of eight has no halves"
    for one, other in zip(found.addressable_shards, value.addressable_shards, strict=True):
        assert one.data.unsafe_buffer_pointer() == other.data.unsafe_buffer_pointer()
