"""Tables of reshard paths that recipes share: the same prices, and no more memory than is allowed."""

import pickle

import numpy as np

from autoshard.cost import Topology, make_mesh
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.price.reshard_paths import PathTables
from tests.planning import programs as made


def test_prices_are_the_same_with_tables_of_another_program() -> None:
    topology = Topology.parse("v5e:2x4")
    mesh, tables = make_mesh(topology, {"data": 2, "model": 4}), PathTables(1 << 30)
    for name in ("mlp", "wide mlp", "mlp"):
        program = made.program(name)
        reading = analyse_program(program, topology.backend)
        plain = build_model(program, reading, mesh, topology.usable_bytes)
        shared = build_model(program, reading, mesh, topology.usable_bytes, tables=tables)
        assert len(plain.reshards) == len(shared.reshards)
        for mine, theirs in zip(shared.reshards, plain.reshards, strict=True):
            assert list(mine.costs) == list(theirs.costs)
            for channel, table in mine.costs.items():
                np.testing.assert_array_equal(table, theirs.costs[channel])
    assert tables.of(mesh) and not pickle.loads(pickle.dumps(tables)).of(mesh)


def test_the_oldest_tables_go_first() -> None:
    topology = Topology.parse("v5e:2x4")
    first, second = (make_mesh(topology, {"data": data, "model": 8 // data}) for data in (2, 4))
    tables = PathTables(100)
    tables.of(first)["path",] = {"ici": np.zeros(10)}
    tables.of(second)["path",] = {"ici": np.zeros(10)}
    tables.trim()
    assert not tables.of(first) and tables.of(second)
