"""Compiled prices of reshard paths against those by numpy.

Other tests compare the prices by numpy with the partitioner's programs.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from autoshard.cost import Collectives, Topology, make_mesh
from autoshard.planning.price.reshard_paths import PathPrices
from autoshard.planning.space.decision_model import Path, link_names
from autoshard.planning.space.overlap import Overlap
from autoshard.planning.xla import transition_kernels
from autoshard.planning.xla.axis_assignments import PARTIAL, WHOLE, Emitted, States


MESHES = [
    ("v5e:4x4", {"data": 4, "model": 4}),
    ("v5e:8x8", {"data": 64}),
    ("v5p:4x4x4", {"data": 8, "fsdp": 4, "model": 2}),
    ("v5p:4x4x4", {"data": 32, "model": 2}),
    ("v6e:4x4*2", {"slice": 2, "data": 4, "model": 4}),
    ("h100:8*2", {"data": 4, "model": 4}),
    ("cpu:8", {"a": 2, "b": 2, "c": 2}),
]


def random_states(rng: np.random.Generator, axes: int, values: list[int]) -> States:
    """Return about sixty different states of so many axes."""
    every = np.array(list(itertools.product(values, repeat=axes)), dtype=np.int64)
    return every[rng.permutation(len(every))[:60]]


def random_path(rng: np.random.Generator, axes: int) -> Path:
    rank = int(rng.integers(0, 5))
    dims = list(range(rank))
    factors = tuple(int(n) for n in rng.choice([1, 24, 128, 1000, 4096, 65536], rank))
    source = random_states(rng, axes, [WHOLE, *dims, *(PARTIAL - d for d in range(2))])
    target = random_states(rng, axes, [WHOLE, *dims])
    held = random_states(rng, axes, [WHOLE, *dims])[: len(source)]
    held = held[rng.integers(0, len(held), len(source))]
    kept = held if rng.random() < 0.5 else np.where(rng.random(held.shape) < 0.3, WHOLE, held)
    item = int(rng.choice([1, 2, 4]))
    collected, stacked, sliced, at_once = (bool(rng.random() < 0.2) for _ in range(4))
    whole = (Emitted.SCATTER, Emitted.STAGED) if sliced else (Emitted.STAGED,) if at_once else ()
    return Path(factors, held, kept, factors, source, target, item, max(item, 4), collected, stacked, whole)


@pytest.mark.parametrize(("topology", "sizes"), MESHES)
def test_kernels_give_the_same_floats_in_the_same_order(topology: str, sizes: dict[str, int]) -> None:
    mesh = make_mesh(Topology.parse(topology), sizes)
    prices = PathPrices(Collectives(mesh), link_names(mesh))
    rng = np.random.default_rng(0)
    seen: set[str] = set()
    for overlap in [*Overlap] * 5:
        path = random_path(rng, len(sizes))
        plain, compiled = prices.plain(path, overlap), prices.compiled(path, overlap)
        assert list(plain) == list(compiled)
        for name in plain:
            assert plain[name].tobytes() == compiled[name].tobytes(), (name, overlap, path)
        seen |= set(plain)
    assert "exposed" in seen and (len(seen) > 1 or topology == "cpu:8")


def test_early_gathers_come_before_the_rest_in_both() -> None:
    mesh = make_mesh(Topology.parse("v5p:2x2x2"), {"data": 4, "model": 2})
    prices = PathPrices(Collectives(mesh), link_names(mesh))
    held, kept = np.array([[0, 1], [0, 0], [1, WHOLE]]), np.array([[0, WHOLE], [0, 0], [WHOLE, WHOLE]])
    target = random_states(np.random.default_rng(1), 2, [WHOLE, 0, 1])
    path = Path((64, 512), held, kept, (64, 512), kept, target, 2, 4)
    plain, compiled = prices.plain(path, Overlap.PARAMETERS), prices.compiled(path, Overlap.PARAMETERS)
    assert list(plain) == list(compiled) and all((plain[k] == compiled[k]).all() for k in plain)
    stays = [int(np.flatnonzero((target == row).all(axis=1))[0]) for row in kept]
    total = sum(plain.values(), np.zeros((3, len(target))))
    assert total[0, stays[0]] > 0 and total[1, stays[1]] == 0 and total[2, stays[2]] > 0


def test_equal_pairs_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh(Topology.parse("v5p:4x4x4"), {"data": 8, "fsdp": 4, "model": 2})
    prices = PathPrices(Collectives(mesh), link_names(mesh))
    path = random_path(np.random.default_rng(3), 3)
    priced: list[int] = []
    charge = transition_kernels.charge_pairs

    def counted(*given: Any) -> None:
        priced.append(len(given[4].source) * len(given[4].target))
        charge(*given)

    monkeypatch.setattr(transition_kernels, "charge_pairs", counted)
    once = prices.compiled(path, Overlap.MATMUL)
    rows, columns = np.repeat(np.arange(len(path.source)), 3), np.tile(np.arange(len(path.target)), 2)
    ends = {"source_dims": path.source_dims[rows], "passed_dims": path.passed_dims[rows], "source": path.source[rows]}
    more = prices.compiled(dataclasses.replace(path, **ends, target=path.target[columns]), Overlap.MATMUL)
    assert priced == [len(path.source) * len(path.target)] * 2
    assert list(more) == list(once) and all((more[k] == once[k][rows[:, None], columns]).all() for k in once)
