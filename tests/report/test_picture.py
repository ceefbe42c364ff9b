"""Pictures of shardings."""

import io
import re

import numpy as np
import pytest
from rich.console import Console

from autoshard.errors import UserError
from autoshard.planning import Spec
from autoshard.report import visualize_sharding, visualize_spec, visualize_tensor_sharding
from autoshard.report.terminal.sharding_pictures import parts_of_string


def drawn(draw, *args, **options) -> list[list[str]]:
    """Return the devices in each cell of the drawing, row by row."""
    out = io.StringIO()
    draw(*args, console=Console(file=out, width=200, color_system=None), **options)
    rows = [re.split("[│┃]", line) for line in out.getvalue().splitlines()]
    cells = [[cell.strip() for cell in row[1:-1]] for row in rows]
    return [row for row in cells if any(row)]


def test_tiled():
    assert drawn(visualize_sharding, "{devices=[2,2]0,1,2,3}") == [["0", "1"], ["2", "3"]]
    assert drawn(visualize_sharding, "{devices=[2,2]<=[2,2]T(1,0)}") == [["0", "2"], ["1", "3"]]


def test_more_tiles_than_elements():
    """Draw every device: those of the empty tiles store no element."""
    placed = parts_of_string("{devices=[4]<=[4]}", (2,))
    assert placed == {((0, 1),): (0,), ((1, 2),): (1,), ((2, 2),): (2, 3)}


def test_partly_replicated():
    assert drawn(visualize_sharding, "{devices=[2,1,2]<=[4] last_tile_dim_replicate}") == [["0,1"], ["2,3"]]


def test_replicated():
    assert drawn(visualize_sharding, "{replicated}") == [["every device"]]


def test_spec_of_a_plan():
    spec = Spec((("model",), (), ("data",)))
    assert drawn(visualize_spec, spec, (4, 3, 8), {"data": 2, "model": 2}) == [["0", "2"], ["1", "3"]]


def test_one_dim():
    assert drawn(visualize_spec, Spec((("data",),)), (8,), {"data": 4}) == [["0"], ["1"], ["2"], ["3"]]


@pytest.mark.heavy
def test_an_array_of_jax():
    import jax

    from autoshard.exec import ensure_devices

    ensure_devices(8)
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("b"))
    array = jax.device_put(jax.numpy.zeros((8, 4)), sharding)
    devices = mesh.devices
    expected = [[",".join(map(str, sorted(d.id for d in devices[:, column])))] for column in range(4)]
    assert drawn(visualize_tensor_sharding, array) == expected


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (lambda: visualize_sharding("{manual}"), "is not a sharding that can be read"),
        (lambda: visualize_sharding("{devices=[2,2,2]<=[8]}"), "split over 3 dims cannot be drawn"),
        (lambda: visualize_sharding("{devices=[2,2]<=[4]}", (4,)), "splits a tensor of 2 dims, but this one has 1"),
        (lambda: visualize_tensor_sharding(np.zeros(3)), "not a ndarray"),
    ],
)
def test_what_cannot_be_drawn(run, sentence: str):
    with pytest.raises(UserError) as error:
        run()
    assert sentence in str(error.value)
