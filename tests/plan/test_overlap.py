"""What hides behind compute."""

import pytest

from autoshard.cost import Collectives, Topology, make_mesh
from autoshard.plan._model import EXPOSED, link_names
from autoshard.plan._overlap import Overlap, hidden_share, lanes


def collectives(topology: str, **sizes: int) -> Collectives:
    return Collectives(make_mesh(Topology.parse(topology), sizes))


POD = collectives("v5e:16x16*2", slice=2, data=16, model=16)
HALF = POD.calibration.pipelined_overlap


@pytest.mark.parametrize(
    ("overlap", "kind", "axes", "expected"),
    [
        (Overlap.PARAMETERS, "all-gather", ("data",), 1.0),
        (Overlap.PARAMETERS, "all-reduce", ("data",), 0.0),
        (Overlap.GRADIENTS, "all-reduce", ("slice",), 0.0),
        (Overlap.GRADIENTS_AT_MATMUL, "reduce-scatter", ("data",), HALF),
        (Overlap.GRADIENTS_AT_MATMUL, "reduce-scatter", ("data", "model"), 0.0),
        (Overlap.MATMUL, "all-gather", ("model",), HALF),
        (Overlap.MATMUL, "all-reduce", ("model",), 0.0),
        (Overlap.MATMUL, "all-gather", ("slice",), 0.0),
        (Overlap.NONE, "all-gather", ("model",), 0.0),
    ],
)
def test_share(overlap: Overlap, kind: str, axes: tuple[str, ...], expected: float) -> None:
    assert hidden_share(POD, overlap, kind, axes) == expected


def test_gpus_reduce_beside_compute_and_cpus_do_nothing_beside_it() -> None:
    assert hidden_share(collectives("h100:8*2", data=16), Overlap.GRADIENTS, "all-reduce", ("data",)) == 1.0
    assert hidden_share(collectives("cpu:8", data=8), Overlap.PARAMETERS, "all-gather", ("data",)) == 0.0


def test_lanes_share_out_all_of_a_collective() -> None:
    names = link_names(POD.mesh)
    assert lanes(POD, names, Overlap.PARAMETERS, "all-gather", ("data",), 3) == {(3, names["data"]): 1.0}
    assert lanes(POD, names, Overlap.NONE, "all-gather", ("data",), 3) == {EXPOSED: 1.0}
    half = lanes(POD, names, Overlap.MATMUL, "all-gather", ("model",), 0)
    assert half == {(0, names["model"]): HALF, EXPOSED: 1.0 - HALF}
