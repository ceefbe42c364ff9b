"""Bills and observations written by hand, for tests of the database and of the fit."""

from typing import Any

from autoshard.cost import STEP, Bill, Charge, Observation, Topology, make_mesh


def bill(
    matmul: float = 0.0,
    traffic: float = 0.0,
    reduced: float = 0.0,
    launches: float = 0.0,
    topology: str = "cpu:8",
    gathered: float = 0.0,
) -> Bill:
    """Build the bill of a step.

    - `matmul`: number of cubic products of edge 256.
    - `traffic`: bytes of memory traffic.
    - `reduced`: bytes of each of `launches` all-reduces.
    - `gathered`: bytes of each of `launches` all-gathers.
    """
    mesh = make_mesh(Topology.parse(topology), {"data": Topology.parse(topology).num_devices})
    edge = 256.0
    charges = [
        Charge("dot", (("dtype", "f32"),), (edge, edge, edge, 1.0, 3 * 4 * edge**2), -1, matmul),
        Charge("stream", (), (traffic,), -1, 1.0),
        Charge("all-reduce", (("axes", ("data",)),), (reduced,), -1, launches, ("reduction_overlap",)),
        Charge("all-gather", (("axes", ("data",)),), (gathered,), -1, launches, ("gather_overlap",)),
    ]
    return Bill.of(mesh, [charge for charge in charges if charge.count and any(charge.amounts)])


def observation(one: Bill, seconds: float, name: str = "", compiler: str = "made up", **more: Any) -> Observation:
    """Build the observation of a measured step."""
    about = {"program": "p", "plan": name, "name": name}
    fields: dict[str, Any] = {"judge": "measure", "op": STEP, "seen": {"seconds": seconds}} | more
    return Observation(topology=one.topology, compiler=compiler, about=about, bill=one, **fields)
