"""Relayouts that compilers insert around gathers and scatters."""

import numpy as np
import pytest

from autoshard.cost import Collectives, Topology, make_mesh
from autoshard.planning.price.reshard_paths import PathPrices, relayouts
from autoshard.planning.space.decision_model import Path
from autoshard.planning.space.overlap import Overlap
from autoshard.planning.xla.axis_assignments import PARTIAL, WHOLE


def path(source: tuple[int, int], target: tuple[int, int], shape: tuple[int, ...] = (512, 1024)) -> Path:
    one, other = np.array([source]), np.array([target])
    return Path(shape, one, one, shape, one, other, 2, 2)


def count(topology: str, *ends: tuple[int, int], shape: tuple[int, ...] = (512, 1024)) -> int:
    mesh = make_mesh(Topology.parse(topology), {"a": 2, "b": 2})
    return int(relayouts(path(*ends, shape=shape), Collectives(mesh)).ops[0, 0])


def copied(*ends: tuple[int, int], shape: tuple[int, ...] = (512, 1024)) -> float:
    """Return the bytes of two-byte elements that a CPU device writes in another order."""
    mesh = make_mesh(Topology.parse("cpu:8"), {"a": 2, "b": 4})
    return float(relayouts(path(*ends, shape=shape), Collectives(mesh)).size[0, 0])


def test_one_outer_dim_is_gathered_and_scattered_in_place() -> None:
    whole = (WHOLE, WHOLE)
    assert count("v5e:2x2", (0, 0), whole) == count("v5e:2x2", (PARTIAL, PARTIAL), (0, 0)) == 0
    assert count("v5e:2x2", (1, 1), whole) == count("v5e:2x2", (PARTIAL, WHOLE), (1, WHOLE)) == 1
    assert count("v5e:2x2", (0, 1), whole) == count("v5e:2x2", (PARTIAL, PARTIAL), (1, 0)) == 1


def test_what_stays_split_a_vector_and_other_backends_need_none() -> None:
    assert count("v5e:2x2", (0, 1), (WHOLE, 1)) == 0  # only the outer dim is gathered
    assert count("v5e:2x2", (0, 0), (WHOLE, WHOLE), shape=(1024,)) == 0
    assert count("cpu:4", (1, 1), (WHOLE, WHOLE)) == 0


def test_cpu_devices_copy_shards_and_whole_around_a_gather_of_an_inner_dim() -> None:
    whole, size = (WHOLE, WHOLE), 2 * 512 * 1024
    assert copied((0, 0), whole) == copied((0, WHOLE), whole) == copied(whole, whole) == copied(whole, (1, 0)) == 0
    assert copied((1, 1), whole) == size / 8 + size
    assert copied((0, 1), whole) == (size / 8 + size / 2)  # the last dim first, then the outermost
    assert copied((0, 1), (0, WHOLE)) == size / 8 + size / 2
    assert copied((1, 1), (1, WHOLE)) == size / 8 + size / 2
    assert copied((1, 1), whole, shape=(1, 1024)) == 0  # the rows of one have nothing between them
    assert copied((1, 0), whole, shape=(4, 1024)) == 0, "the outer dim has one element as long as it is split"


def test_cpu_devices_take_the_time_of_the_copies() -> None:
    prices = Collectives(make_mesh(Topology.parse("cpu:8"), {"a": 2, "b": 4}))
    outer, inner = (PathPrices(prices, {}).seconds(path((dim, dim), (WHOLE, WHOLE)), Overlap.NONE) for dim in (0, 1))
    rate = prices.mesh.topology.memory_bytes_per_s * prices.calibration.memory_efficiency
    took = copied((1, 1), (WHOLE, WHOLE)) * prices.calibration.relayout_traffic / rate
    assert "compute" not in outer and inner.pop("compute") == pytest.approx(took)
    assert inner == outer


def test_it_takes_an_op_of_the_device() -> None:
    mesh = make_mesh(Topology.parse("v5e:2x2"), {"a": 2, "b": 2})
    prices = PathPrices(Collectives(mesh), {"a": "x", "b": "y"})
    outer, last = (prices.seconds(path((dim, dim), (WHOLE, WHOLE)), Overlap.NONE) for dim in (0, 1))
    assert "compute" not in outer and last.pop("compute") == prices.collectives.calibration.op_overhead_s
    assert last == outer
