"""Exact solves of whole problems, in a process that is kept for the next one.

Never in the user's own: a run that is stopped can only be ended with its process (see `_mathopt`), and OR-Tools takes
longer to import than most solves need.
"""

import atexit
import dataclasses
import math
import os
import time

from autoshard.solver.job_process import Apart, Clock, Due, processor_seconds, serve
from autoshard.solver.mip_rows import MipResult, solve_mip
from autoshard.solver.residual_graph import Graph


@dataclasses.dataclass(frozen=True, slots=True)
class Exact:
    """What `solve_mip` is to do."""

    graph: Graph
    deadline: float
    """When the solve has to end, in seconds of `clock`."""
    clock: Clock
    seed: int
    cutoff: float | None
    times: list[int]
    nodes: int | None


_HANDED: tuple[Clock, ...] = (time.monotonic, processor_seconds)
"""Clocks that tell in another process what they tell here."""
_HURRY_S = 1.0
"""Seconds in which the answer as it stands should be here once it is asked for."""
_idle: list[tuple[int, Apart]] = []
"""(the process that started it, one that has nothing to do); hardly ever more than one."""


def solve_apart(job: Exact, due: Due) -> MipResult | None:
    """What `solve_mip` comes to, waited for until `due` (then as it stands); None when it does not stand yet."""
    if due():
        return None
    own = job.clock not in _HANDED
    # The way back to the problem stays here.
    sent = dataclasses.replace(job, graph=dataclasses.replace(job.graph, undo=[]))
    if own:
        sent = dataclasses.replace(sent, clock=time.monotonic, deadline=math.inf)
    elif job.clock is processor_seconds:
        # Every process has its own; the one on the wall is the same in all.
        sent = dataclasses.replace(sent, deadline=job.deadline - job.clock())
    process, fit = _take(), False
    try:
        process.give([sent])
        while not process.done():
            # A clock that only this process knows is looked at here.
            if (due() or (own and job.clock() > job.deadline)) and not process.hurry(_HURRY_S):
                return None
            process.wait(0.1)
        result: MipResult = process.answer()
        fit = not (_idle or result.stopped)
        return result
    finally:
        if fit:
            _idle.append((os.getpid(), process))
        else:
            process.end()


def _take() -> Apart:
    """One that waits for work, or else a new one."""
    try:
        owner, process = _idle.pop()
    except IndexError:
        return Apart(__name__)
    # After a fork it answers to the process that started it.
    return process if owner == os.getpid() else Apart(__name__)


@atexit.register
def _end() -> None:
    while _idle:
        owner, process = _idle.pop()
        if owner == os.getpid():
            process.end()


def _do(job: Exact, due: Due) -> MipResult:
    began = job.clock() if job.clock is processor_seconds else 0.0
    return solve_mip(
        job.graph,
        deadline=began + job.deadline,
        clock=job.clock,
        seed=job.seed,
        cutoff=job.cutoff,
        times=job.times,
        nodes=job.nodes,
        due=due,
    )


def main() -> None:
    """The process."""
    serve(_do)
