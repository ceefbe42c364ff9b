"""Which ops stand alone between loops: what their weight sends has no compute to run beside.

XLA's scheduler moves an asynchronous collective among the ops of its own computation, never into a loop, and loops that
communicate themselves do not run beside one either. A decoder's head stands between the loop over its layers forward
and that backward, with no matmul of another weight beside it: the gather of its weight begins where the first loop
ends and is waited for at once, and the sum of its gradient ends the step or stops it before the second loop. Compiled
for v5p with asynchronous gathers and sums, a head of 256128 x 2048 waits for both (`experiments/pair_estimates.py`:
Gemma with kept weights). Layers outside of a loop hide what they send behind one another.
"""

import bisect
from collections import defaultdict
from collections.abc import Set

from autoshard.graph import OpGraph, Structure


def alone_between_loops(graph: OpGraph, structure: Structure, read: Set[int], written: Set[int]) -> frozenset[int]:
    """Ops of blocks that hold loops of matmuls, where matmuls between two such loops have at most one weight.

    Not those behind the last loop, unless there is a matmul among them: they update weights, one beside another.

    `read` and `written` are clusters of weights as they are stored, and as the step leaves them.
    """
    ends = defaultdict(list)
    works = [0] * len(graph.loops)
    for op in graph.ops:
        loop = op.loop if op.flops else -1
        while loop >= 0 and not works[loop]:
            works[loop] = 1
            loop = graph.loops[loop].parent
    for loop, record in enumerate(graph.loops):
        if works[loop] and not record.branches:
            ends[record.parent].append(record.stop)
    for stops in ends.values():
        stops.sort()
    parts: dict[tuple[int, int], list[int]] = defaultdict(list)
    for op in graph.ops:
        if op.loop in ends:
            parts[op.loop, bisect.bisect_right(ends[op.loop], op.id)].append(op.id)
    found: list[int] = []
    for (block, part), ops in parts.items():
        busy = [graph.ops[op] for op in ops if graph.ops[op].flops]
        if not busy and part == len(ends[block]):
            continue  # the updates of all weights, which run beside what the others send
        reads = {structure.cluster_of[t] for op in busy for t in op.operands} & read
        writes = {structure.cluster_of[t] for op in busy for t in op.results} & written
        if len(reads) <= 1 and len(writes) <= 1:
            found += ops
    return frozenset(found)
