"""What TPU compilers lay out anew after gathering or scattering it."""

import numpy as np

from autoshard.cost import Collectives, Topology, make_mesh
from autoshard.plan._model import Path
from autoshard.plan._overlap import Overlap
from autoshard.plan._paths import PathPrices, relayouts
from autoshard.plan._states import PARTIAL, WHOLE


def path(source: tuple[int, int], target: tuple[int, int], shape: tuple[int, ...] = (512, 1024)) -> Path:
    one, other = np.array([source]), np.array([target])
    return Path(shape, one, one, shape, one, other, 2, 2)


def count(topology: str, *ends: tuple[int, int], shape: tuple[int, ...] = (512, 1024)) -> int:
    mesh = make_mesh(Topology.parse(topology), {"a": 2, "b": 2})
    return int(relayouts(path(*ends, shape=shape), Collectives(mesh))[0, 0])


def test_one_outer_dim_is_gathered_and_scattered_in_place() -> None:
    whole = (WHOLE, WHOLE)
    assert count("v5e:2x2", (0, 0), whole) == count("v5e:2x2", (PARTIAL, PARTIAL), (0, 0)) == 0
    assert count("v5e:2x2", (1, 1), whole) == count("v5e:2x2", (PARTIAL, WHOLE), (1, WHOLE)) == 1
    assert count("v5e:2x2", (0, 1), whole) == count("v5e:2x2", (PARTIAL, PARTIAL), (1, 0)) == 1


def test_what_stays_split_a_vector_and_other_backends_need_none() -> None:
    assert count("v5e:2x2", (0, 1), (WHOLE, 1)) == 0  # only the outer dim is gathered
    assert count("v5e:2x2", (0, 0), (WHOLE, WHOLE), shape=(1024,)) == 0
    assert count("cpu:4", (1, 1), (WHOLE, WHOLE)) == 0


def test_it_takes_an_op_of_the_device() -> None:
    mesh = make_mesh(Topology.parse("v5e:2x2"), {"a": 2, "b": 2})
    prices = PathPrices(Collectives(mesh), {"a": "x", "b": "y"})
    outer, last = (prices.seconds(path((dim, dim), (WHOLE, WHOLE)), Overlap.NONE) for dim in (0, 1))
    assert "compute" not in outer and last.pop("compute") == prices.collectives.calibration.op_overhead_s
    assert last == outer
