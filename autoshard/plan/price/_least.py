"""The least time that any plan of a program takes, whatever it splits: its arithmetic on all devices at once."""

from autoshard.cost import Calibration, Topology
from autoshard.graph import OpGraph, is_sum


def least_seconds(graph: OpGraph, topology: Topology, calibration: Calibration) -> float:
    """Seconds of one step below which no plan on the topology is priced.

    Every matmul, convolution and kernel is divided among all devices and runs at the calibrated share of their peak.
    What stands in regions that the program splits by hand is left out.
    """
    seconds = 0.0
    for op in graph.ops:
        if not op.flops or op.rule is None or op.manual:
            continue
        if op.kind == "dot_general" and is_sum(op.rule):
            continue
        dtype = (op.opaque.dtype if op.opaque else "") or graph.tensors[op.operands[0]].dtype
        seconds += op.flops * graph.trips(op.loop) / topology.peak_flops(dtype)
    return seconds / (calibration.matmul_efficiency * topology.num_devices)
