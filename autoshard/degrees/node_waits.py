"""Messages between nodes that a step waits for in sequence: a risk that predicted times do not show.

A priced message takes as long as its bytes take on an idle network. A message that a step waits for also waits for a
late sender, and for other traffic on its way. Among plans with indistinguishable predictions, the plan with the fewest
such waits is therefore chosen. The rule contains no rate.

Evidence: docs/compiler_behaviour.md, "Waits between nodes".
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from autoshard.degrees.gpu_run import GpuRun


INDISTINCT = 0.21
"""Relative error of predicted steps that nine in ten of vTrain's runs on several nodes stay below."""

Plan = TypeVar("Plan")
"""Type of the plans that `steadiest` compares."""


def waits(run: GpuRun) -> int:
    """Return the number of messages between islands that a step waits for in sequence; 0 within one island.

    Ranks of a tensor-parallel group are adjacent, replicas next, and stages outermost, as frameworks lay them out.
    """
    island = run.topology.shape[0]
    if run.topology.num_devices <= island:
        return 0
    ticks = run.accumulation * run.chunks + run.pp - 1
    layers = -(-run.decoder.layers // run.pp)
    messages = 2 * ticks if run.pp > 1 else 0  # forward and back
    if run.tp > island:
        # Each layer has two blocks with two passes, each with a gather and a scatter, or with one all-reduce.
        messages += (8 if run.eager.sequence_parallel else 4) * layers * ticks
    if run.ep > island:
        messages += 4 * layers * ticks  # rows to their experts and back, forward and backward
    # ZeRO 0 sums in two phases, 1 scatters and gathers. 2 scatters for each microbatch and gathers once. 3 gathers a
    # layer forward and backward and scatters its gradients, for each microbatch.
    if run.dp > 1 and run.dp * run.tp > island:
        messages += {0: 2, 1: 2, 2: run.accumulation + 1, 3: 3 * layers * run.accumulation}[run.zero]
    return messages


def steadiest(plans: Sequence[Plan], seconds: Callable[[Plan], float], run: Callable[[Plan], GpuRun]) -> Plan:
    """Return the plan that waits least, then the fastest, of the plans within `INDISTINCT` of the least seconds.

    Among equals the first one is returned. `plans` has at least one.

    - `seconds`, `run`: functions that return the predicted seconds and the run of a plan.
    """
    least = min(map(seconds, plans))
    near = [each for each in plans if seconds(each) <= least * (1.0 + INDISTINCT)]
    return min(near, key=lambda each: (waits(run(each)), seconds(each)))
