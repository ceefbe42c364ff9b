"""Exact solves of whole problems in a child process, which is reused for the next solve.

A stopped run ends only with its process (see `mathopt`), so it must not run in the user's process. OR-Tools also needs
longer to import than most solves take.
"""

import atexit
import dataclasses
import math
import os
import time

from autoshard.solver.clocks import Clock, Due, processor_seconds
from autoshard.solver.mip_rows import MipResult, solve_mip
from autoshard.solver.residual_graph import Graph
from autoshard.solver.solver_process import SolverProcess


@dataclasses.dataclass(frozen=True, slots=True)
class Exact:
    """Arguments of one `solve_mip` in the child process."""

    graph: Graph
    deadline: float
    """Time at which the solve must end, in seconds of `clock`."""
    clock: Clock
    seed: int
    cutoff: float | None
    """Cost from which choices are of no use; None for no cutoff."""
    times: list[int]
    """Compressed times whose memory rows are present from the start."""
    nodes: int | None
    """Most branchings; None for no limit."""


_HANDED: tuple[Clock, ...] = (time.monotonic, processor_seconds)
"""Clocks that work in another process too."""
_HURRY_S = 1.0
"""Seconds within which the current answer should arrive once it is requested."""
_idle: list[tuple[int, SolverProcess]] = []
"""(id of the process that started it, idle child process) pairs; rarely more than one."""


def solve_in_process(job: Exact, due: Due) -> MipResult | None:
    """Run `solve_mip` in a child process and wait for its result until `due`.

    At `due`, or past the deadline of a clock that another process cannot use, the current result is requested. Return
    None if none arrives within `_HURRY_S`, or if it is `due` before the start. A process whose run did not end is
    terminated, others are reused.
    """
    if due():
        return None
    own = job.clock not in _HANDED
    # The undo steps are not needed in the child process.
    sent = dataclasses.replace(job, graph=dataclasses.replace(job.graph, undo=[]))
    if own:
        sent = dataclasses.replace(sent, clock=time.monotonic, deadline=math.inf)
    elif job.clock is processor_seconds:
        # Processor time differs between processes, so the child receives the remaining seconds. The wall clock is
        # common.
        sent = dataclasses.replace(sent, deadline=job.deadline - job.clock())
    process, fit = _take(), False
    try:
        process.start(_do, sent)
        while not process.done():
            # A clock that the child process cannot use is checked here.
            if (due() or (own and job.clock() > job.deadline)) and not process.request_current_answer(_HURRY_S):
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


def _take() -> SolverProcess:
    """Return an idle child process that this process started, or start a new one."""
    try:
        owner, process = _idle.pop()
    except IndexError:
        return SolverProcess(__name__)
    # After a fork, a child process still belongs to the process that started it.
    return process if owner == os.getpid() else SolverProcess(__name__)


@atexit.register
def _end() -> None:
    """Terminate the idle child processes of this process."""
    while _idle:
        owner, process = _idle.pop()
        if owner == os.getpid():
            process.end()


def _do(job: Exact, due: Due) -> MipResult:
    """Run one job in the child process; a deadline in processor seconds counts from the start of the job."""
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
