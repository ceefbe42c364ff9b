"""What `autoshard solve` does."""

import json
import pathlib
import sys
import time

from ._contest import read_contest, write_beside
from ._solution import Status
from ._solve import Progress, solve


def run_solve(
    path: str,
    time_limit: float = 60.0,
    seed: int = 0,
    threads: int = 2,
    iterations: int | None = None,
    out: str | None = None,
) -> int:
    """Solves a contest file; progress goes to stderr, the choices are the last line of stdout. Returns the exit code.

    The limit includes reading. Exit code 0 with feasible choices, 1 when there are none or none were found. Raises
    `UserError` for a file that cannot be solved.
    """
    began = time.monotonic()
    problem = read_contest(path)
    spent = time.monotonic() - began
    print(f"{spent:8.2f} s  {problem.num_nodes} nodes, {problem.num_edges} edges read", file=sys.stderr)

    def show(moment: Progress) -> None:
        cost = moment.incumbent
        gap = "none" if cost is None else f"{100 * (cost - moment.bound) / max(1, abs(cost)):.4f} %"
        line = f"{moment.elapsed + spent:8.2f} s  incumbent {cost if cost is not None else 'none'}"
        print(f"{line}  bound {moment.bound}  gap {gap}", file=sys.stderr, flush=True)

    left = max(0.05, time_limit - spent)
    answer = solve(problem, time_limit=left, seed=seed, threads=threads, iterations=iterations, progress=show)
    print(f"{time.monotonic() - began:8.2f} s  {answer.status}", file=sys.stderr)
    if answer.status in (Status.INFEASIBLE, Status.UNKNOWN):
        excess, when = answer.stats["excess"], answer.stats["excess_time"]
        print(f"the smallest excess found is {excess} bytes, at time {when}", file=sys.stderr)
    choices = answer.choices.tolist()
    if out is not None:
        record = {
            "choices": choices,
            "cost": answer.cost,
            "lower_bound": answer.lower_bound,
            "status": answer.status.name.lower(),
        }
        write_beside(pathlib.Path(out), (json.dumps(record) + "\n").encode())
    print("[" + ", ".join(map(str, choices)) + "]", flush=True)
    return 0 if answer.status in (Status.OPTIMAL, Status.FEASIBLE) else 1
