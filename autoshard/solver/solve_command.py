"""Implementation of the command `autoshard solve`."""

import json
import os
import pathlib
import signal
import sys
import threading
import time

from autoshard.errors import UserError
from autoshard.solver.contest import read_contest, write_beside
from autoshard.solver.solution import Status
from autoshard.solver.solve_problem import Progress, solve


def run_solve(
    path: str,
    time_limit: float = 60.0,
    seed: int = 0,
    threads: int = 2,
    iterations: int | None = None,
    out: str | None = None,
    as_json: bool = False,
) -> int:
    """Solve a contest file and return the exit code; progress goes to stderr, the choices are the last line of stdout.

    With `as_json` stdout gets one object instead: the choices, their cost, the bound and more. `out` names a file that
    receives choices, cost, bound and status as JSON. The other arguments are those of `solve`.

    The limit counts from the start of the process, so it includes reading. Once the file is read, SIGINT and SIGTERM
    end the search; the best choices so far are then printed, with exit code 0. Otherwise the code is 0 with feasible
    choices, and 1 if there are none or none were found.

    Raises `UserError` for a file that cannot be solved, or a time limit that is not positive.
    """
    if not time_limit > 0:
        raise UserError(f"the time limit is {time_limit:g} s; it must be more than 0")
    began = time.monotonic() - _age()
    problem = read_contest(path)
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
    print(f"{time.monotonic() - began:8.2f} s  {problem.num_nodes} nodes, {problem.num_edges} edges", file=sys.stderr)

    def show(moment: Progress) -> None:
        """Print one line to stderr: seconds since the start, incumbent, bound and gap."""
        cost = moment.incumbent
        gap = "none" if cost is None else f"{100 * (cost - moment.bound) / max(1, abs(cost)):.4f} %"
        line = f"{time.monotonic() - began:8.2f} s  incumbent {cost if cost is not None else 'none'}"
        print(f"{line}  bound {moment.bound}  gap {gap}", file=sys.stderr, flush=True)

    # Time left after reading, minus a reserve to check and print the answer and to end the process.
    left = max(0.05, time_limit - (time.monotonic() - began) - min(1.0, 0.1 * time_limit))
    answer = solve(
        problem, time_limit=left, seed=seed, threads=threads, iterations=iterations, progress=show, stop=stop
    )
    print(f"{time.monotonic() - began:8.2f} s  {answer.status}", file=sys.stderr)
    feasible = answer.status in (Status.OPTIMAL, Status.FEASIBLE)
    if not feasible:
        excess, when = answer.stats["excess"], answer.stats["excess_time"]
        print(f"the smallest excess found is {excess} bytes, at time {when}", file=sys.stderr)
    choices = answer.choices.tolist()
    record = {
        "choices": choices,
        "cost": answer.cost,
        "lower_bound": answer.lower_bound,
        "status": answer.status.name.lower(),
    }
    if out is not None:
        write_beside(pathlib.Path(out), (json.dumps(record) + "\n").encode())
    if as_json:
        figures = {
            "gap": (answer.cost - answer.lower_bound) / max(1, abs(answer.cost)) if feasible else None,
            "nodes": problem.num_nodes,
            "edges": problem.num_edges,
            "usage_limit": problem.usage_limit,
            "peak_usage": int(answer.stats["peak_usage"]),
            "wall_s": round(time.monotonic() - began, 3),
        }
        print(json.dumps({**record, **figures}), flush=True)
    else:
        print("[" + ", ".join(map(str, choices)) + "]", flush=True)
    return 0 if feasible or stop.is_set() else 1


def _age() -> float:
    """Return the seconds since this process started, or 0 if the system does not report them."""
    try:
        fields = pathlib.Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        started = float(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, float(pathlib.Path("/proc/uptime").read_text().split()[0]) - started)
    except (OSError, IndexError, ValueError):
        return 0.0
