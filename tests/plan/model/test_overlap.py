"""What hides behind compute."""

import pytest

from autoshard.cost import Collectives, Topology, make_mesh
from autoshard.plan.model._model import EXPOSED, link_names
from autoshard.plan.model._overlap import Overlap, hidden_share, lanes


LARGE = 1e15
"""Bytes beside which launches and hops are nothing."""


def collectives(topology: str, **sizes: int) -> Collectives:
    return Collectives(make_mesh(Topology.parse(topology), sizes))


POD = collectives("v5e:16x16*2", slice=2, data=16, model=16)
PIPELINED = POD.calibration.pipelined_overlap
EARLY = POD.calibration.gather_overlap
FAR = POD.calibration.network_overlap


@pytest.mark.parametrize(
    ("overlap", "kind", "axes", "expected"),
    [
        (Overlap.PARAMETERS, "all-gather", ("data",), EARLY),
        (Overlap.PARAMETERS, "all-gather", ("slice",), FAR),
        (Overlap.PARAMETERS, "all-gather", ("slice", "data"), EARLY),
        (Overlap.PARAMETERS, "collective-permute", ("data",), 1.0),
        (Overlap.PARAMETERS, "all-to-all", ("data",), 0.0),
        (Overlap.PARAMETERS, "all-reduce", ("data",), 0.0),
        (Overlap.GRADIENTS, "all-reduce", ("slice",), FAR),
        (Overlap.GRADIENTS_AT_MATMUL, "reduce-scatter", ("slice",), FAR),
        (Overlap.GRADIENTS, "all-reduce", ("data",), 0.0),
        (Overlap.GRADIENTS_AT_MATMUL, "reduce-scatter", ("data",), PIPELINED),
        (Overlap.GRADIENTS_AT_MATMUL, "reduce-scatter", ("data", "model"), 0.0),
        (Overlap.MATMUL, "all-gather", ("model",), PIPELINED),
        (Overlap.MATMUL, "all-reduce", ("model",), 0.0),
        (Overlap.MATMUL, "all-gather", ("slice",), 0.0),
        (Overlap.NONE, "all-gather", ("model",), 0.0),
    ],
)
def test_share(overlap: Overlap, kind: str, axes: tuple[str, ...], expected: float) -> None:
    assert hidden_share(POD, overlap, kind, axes, LARGE) == pytest.approx(expected, rel=1e-6)


def test_launches_and_hops_of_a_pipelined_collective_are_waited_for() -> None:
    least, seconds = (POD.time("all-gather", ("model",), size) for size in (0.0, 4e6))
    share = hidden_share(POD, Overlap.MATMUL, "all-gather", ("model",), 4e6)
    assert share == pytest.approx(float(PIPELINED * (seconds - least) / seconds))
    assert 0.0 < share < PIPELINED
    assert lanes(POD, link_names(POD.mesh), Overlap.MATMUL, "all-gather", ("model",), 1e4, 0) == {EXPOSED: 1.0}


def test_gpus_reduce_beside_compute_and_cpus_do_nothing_beside_it() -> None:
    assert hidden_share(collectives("h100:8*2", data=16), Overlap.GRADIENTS, "all-reduce", ("data",), 8.0) == 1.0
    assert hidden_share(collectives("cpu:8", data=8), Overlap.PARAMETERS, "all-gather", ("data",), 8.0) == 0.0


def test_gathers_are_waited_for_where_the_compiler_makes_them_synchronous() -> None:
    shares = {
        chip: hidden_share(collectives(f"{chip}:4x4", data=16), Overlap.PARAMETERS, "all-gather", ("data",), 8.0)
        for chip in ("v5e", "v6e")
    }
    assert shares["v6e"] == 0.0 < shares["v5e"] < 1.0


def test_lanes_share_out_all_of_a_collective() -> None:
    names = link_names(POD.mesh)
    assert lanes(POD, names, Overlap.PARAMETERS, "collective-permute", ("data",), 8.0, 3) == {(3, names["data"]): 1.0}
    assert lanes(POD, names, Overlap.NONE, "all-gather", ("data",), 8.0, 3) == {EXPOSED: 1.0}
    some = lanes(POD, names, Overlap.MATMUL, "all-gather", ("model",), LARGE, 0)
    assert some == pytest.approx({(0, names["model"]): PIPELINED, EXPOSED: 1.0 - PIPELINED})


def test_an_axis_of_one_device_has_no_links() -> None:
    one = collectives("v5e:4x4", data=1, fsdp=16)
    both, split = (
        lanes(one, link_names(one.mesh), Overlap.PARAMETERS, "all-gather", axes, 8.0, 0)
        for axes in (("data", "fsdp"), ("fsdp",))
    )
    assert both == split and len(both) == 2
    assert set(lanes(one, link_names(one.mesh), Overlap.PARAMETERS, "all-gather", ("data",), 8.0, 0)) <= {EXPOSED}
