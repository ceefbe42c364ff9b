"""Messages between nodes that a step waits for in turn: what a prediction of times alone does not see of a network.

A priced message takes what its bytes take on a network that does nothing else. Each that is waited for also waits for
whoever is late at its other end, and for whatever else is on the way. Of nanotron's runs on 4 to 64 nodes, some that
hand microbatches from node to node took up to a hundred times what their work and bytes take, while plans beside them
took what is priced. So of plans whose predictions are too near to be told apart, the one that waits least often is
taken. The rule holds no rate; that it is needed was seen in that table.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from autoshard.degrees.gpu_run import GpuRun


INDISTINCT = 0.21
"""Nine in ten predicted steps of vTrain's runs on several nodes are nearer to the measured ones than this share."""

Plan = TypeVar("Plan")


def waits(run: GpuRun) -> int:
    """How many messages between islands a step waits for one after the other.

    Ranks of a tensor-parallel group lie side by side, replicas next, and stages outermost, as frameworks have them.
    """
    island = run.topology.shape[0]
    if run.topology.num_devices <= island:
        return 0
    ticks = run.accumulation * run.chunks + run.pp - 1
    layers = -(-run.decoder.layers // run.pp)
    found = 2 * ticks if run.pp > 1 else 0  # forward and back
    if run.tp > island:
        found += (8 if run.eager.sequence_parallel else 4) * layers * ticks
    if run.dp > 1 and run.dp * run.tp > island:
        found += {0: 2, 1: 2, 2: run.accumulation + 1, 3: 3 * layers * run.accumulation}[run.zero]
    return found


def steadiest(plans: Sequence[Plan], seconds: Callable[[Plan], float], run: Callable[[Plan], GpuRun]) -> Plan:
    """Of plans whose seconds cannot be told from the least, the one that waits least often, and then the fastest."""
    least = min(map(seconds, plans))
    near = [each for each in plans if seconds(each) <= least * (1.0 + INDISTINCT)]
    return min(near, key=lambda each: (waits(run(each)), seconds(each)))
