"""Exact solves of whole problems, in a process that is kept for the next one.

Never in the user's own, which may have loaded the other of the two packages that bring a HiGHS (see `_mip_engines`),
and which a solve would hold up.
"""

import atexit
import dataclasses
import math
import os
import time

from ._apart import Apart, serve
from ._clock import Clock, Due, processor_seconds
from ._graph import Graph
from ._mip import MipResult, solve_mip


@dataclasses.dataclass(frozen=True, slots=True)
class Exact:
    """What `solve_mip` is to do."""

    graph: Graph
    deadline: float
    """By `clock`."""
    clock: Clock
    seed: int
    cutoff: float | None
    times: list[int]
    nodes: int | None
    engine: str
    """One of `ENGINES`."""


_HANDED: tuple[Clock, ...] = (time.monotonic, processor_seconds)
"""Clocks that tell in another process what they tell here."""
_HURRY_S = 1.0
"""Seconds in which HiGHS should stop once it is told to; it looks now and then only."""
_idle: list[tuple[int, str, Apart]] = []
"""(the process that started it, the engine it has loaded, one that has nothing to do); hardly ever more than one."""


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
    process, fit = _take(job.engine), False
    try:
        process.give([sent])
        while not process.done():
            # A clock that only this process knows is looked at here.
            if (due() or (own and job.clock() > job.deadline)) and not process.hurry(_HURRY_S):
                return None
            process.wait(0.1)
        result = process.answer()
        fit = not _idle
        return result
    finally:
        if fit:
            _idle.append((os.getpid(), job.engine, process))
        else:
            process.end()


def _take(engine: str) -> Apart:
    """One that waits for work and has loaded no other engine, or else a new one."""
    if not _idle:
        return Apart(__name__)
    owner, loaded, process = _idle.pop()
    # After a fork it answers to the process that started it.
    if owner != os.getpid():
        return Apart(__name__)
    if loaded != engine:
        process.end()
        return Apart(__name__)
    return process


@atexit.register
def _end() -> None:
    while _idle:
        owner, _, process = _idle.pop()
        if owner == os.getpid():
            process.end()


def _do(job: Exact, due: Due) -> MipResult:
    began = job.clock() if job.clock is processor_seconds else 0.0
    return solve_mip(
        job.graph,
        deadline=began + job.deadline,
        clock=job.clock,
        seed=job.seed,
        threads=1,
        cutoff=job.cutoff,
        times=job.times,
        nodes=job.nodes,
        due=due,
        engine=job.engine,
    )


def main() -> None:
    """The process."""
    serve(_do)
