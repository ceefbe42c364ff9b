"""HLO sharding strings: written as XLA writes them, and read back to the same spec."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import UserError
from autoshard.planning import Spec, hlo_sharding, mesh_split, parse_hlo_sharding


@st.composite
def cases(draw: st.DrawFn) -> tuple[Spec, dict[str, int], list[int] | None]:
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    mesh = {f"a{number}": size for number, size in enumerate(sizes)}
    axes = draw(st.permutations(list(mesh)))
    used = axes[: draw(st.integers(0, len(axes)))]
    rank = draw(st.integers(1, 4))
    dims: list[tuple[str, ...]] = [()] * rank
    for axis in used:
        where = draw(st.integers(0, rank - 1))
        dims[where] += (axis,)
    order = draw(st.none() | st.permutations(range(math.prod(sizes))))
    return Spec(tuple(dims)), mesh, order


@settings(max_examples=200, deadline=None)
@given(cases())
def test_round_trip(case: tuple[Spec, dict[str, int], list[int] | None]):
    spec, mesh, order = case
    text = hlo_sharding(spec, mesh, order)
    parsed = parse_hlo_sharding(text, len(spec.dims), mesh, order)
    assert hlo_sharding(parsed, mesh, order) == text
    assert shards(parsed, mesh, order) == shards(spec, mesh, order)


def shards(spec: Spec, mesh: dict[str, int], order: list[int] | None) -> dict[int, tuple[int, ...]]:
    """Map each device to its shard, by the definition: the major axes of a dim count first."""
    grid = np.asarray(range(math.prod(mesh.values())) if order is None else order).reshape(tuple(mesh.values()))
    held = {}
    for place in np.ndindex(*grid.shape):
        at = dict(zip(mesh, place, strict=True))
        index = []
        for axes in spec.dims:
            number = 0
            for axis in axes:
                number = number * mesh[axis] + at[axis]
            index.append(number)
        held[int(grid[place])] = tuple(index)
    return held


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("{replicated}", ((), ())),
        ("{devices=[4,2]<=[8]}", (("x",), ("y",))),
        ("{devices=[4,2]0,1,2,3,4,5,6,7}", (("x",), ("y",))),
        ("{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}", (("y",), ())),
        ("{devices=[2,1,4]0,6,4,2,1,3,5,7 last_tile_dim_replicate}", (("y",), ())),
        ("{devices=[1,8]<=[8]}", ((), ("x", "y"))),
    ],
)
def test_forms_that_are_read(text: str, dims: tuple[tuple[str, ...], ...]):
    assert parse_hlo_sharding(text, 2, {"x": 4, "y": 2}) == Spec(dims)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{manual}", "'{manual}' is not a sharding that can be read"),
        ("{devices=[8]<=[8]}", "splits a tensor of 1 dims, but this one has 2"),
        ("{devices=[4,2]0,1,2,3,4,5,6,6}", "each must occur once"),
        ("{devices=[4,2]7,6,5,4,3,2,1,0}", "the axes of the mesh (x=4, y=2) cannot express"),
    ],
)
def test_forms_that_are_refused(text: str, sentence: str):
    with pytest.raises(UserError) as error:
        parse_hlo_sharding(text, 2, {"x": 4, "y": 2})
    assert sentence in str(error.value)


def test_dims_mapping():
    mesh = {"x": 4, "y": 2}
    assert mesh_split(3, [1, -1, 0], mesh) == Spec((("y",), (), ("x",)))
    for mapping, sentence in (
        ([0], "has 1 entries for a tensor of 2 dims"),
        ([0, 2], "names axis 2, but the mesh has 2 axes"),
        ([1, 1], "uses an axis twice"),
    ):
        with pytest.raises(UserError) as error:
            mesh_split(2, mapping, mesh)
        assert sentence in str(error.value)
