"""A mixed integer program in arrays, minimised with HiGHS through OR-Tools' MathOpt.

HiGHS ignores MathOpt's interrupters and uses the wall clock only. A stopped run therefore continues in the background
until its process ends. Its solutions and bound so far are read from HiGHS's solution file and log.
"""

import ctypes
import dataclasses
import datetime
import math
import os
import re
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from autoshard.base.on_thread import OnThread
from autoshard.solver.clocks import Due


if TYPE_CHECKING:
    from ortools.math_opt.python import mathopt


_LONG_S = 1e9
"""Seconds from which a limit counts as none."""
_BOUND = re.compile(r"^ [A-Za-z ](?: +\d+){3} +[\d.]+% +([-+.\de]+) ")
"""Pattern of the bound in a line of HiGHS's progress table."""


@dataclasses.dataclass(frozen=True, slots=True)
class Minimum:
    """Result of a minimisation."""

    values: np.ndarray | None
    """[variables] the best values found; None if there are none."""
    bound: float
    """Lower bound on the cost; minus infinity when nothing is known."""
    infeasible: bool
    """True if no values satisfy all rows and cost less than the cutoff; the bound is then infinite."""
    finished: bool
    """True if optimality or infeasibility was proven."""
    stopped: bool
    """True if the run continues in the background, so that its process should be terminated."""


class IntegerProgram:
    """Program over variables from 0 to 1, the first `binaries` of them integer; rows may be added at any time.

    It minimises the sum of `costs` [variables] times the variables.
    """

    def __init__(self, costs: np.ndarray, binaries: int):
        from ortools.math_opt import model_pb2

        self.size = len(costs)
        self._proto = model_pb2.ModelProto()
        variables = self._proto.variables
        variables.ids.extend(range(self.size))
        variables.lower_bounds.extend([0.0] * self.size)
        variables.upper_bounds.extend([1.0] * self.size)
        variables.integers.extend([True] * binaries + [False] * (self.size - binaries))
        priced = np.flatnonzero(costs)
        self._proto.objective.linear_coefficients.ids.extend(priced.tolist())
        self._proto.objective.linear_coefficients.values.extend(costs[priced].tolist())

    def add(
        self, lower: np.ndarray, upper: np.ndarray, rows: np.ndarray, columns: np.ndarray, values: np.ndarray
    ) -> None:
        """Add rows with values between `lower` and `upper`.

        - `lower`, `upper`: limits, [new rows].
        - `rows`, `columns`, `values`: matrix entries in any order, [entries]; `rows` counts the new rows from 0.
        """
        below, entries = self._proto.linear_constraints, self._proto.linear_constraint_matrix
        first = len(below.ids)
        below.ids.extend(range(first, first + len(lower)))
        below.lower_bounds.extend(lower.tolist())
        below.upper_bounds.extend(upper.tolist())
        order = np.lexsort((columns, rows))
        entries.row_ids.extend((first + rows[order]).tolist())
        entries.column_ids.extend(columns[order].tolist())
        entries.coefficients.extend(values[order].astype(np.float64).tolist())

    def minimise(
        self,
        *,
        seed: int,
        seconds: float,
        cutoff: float | None,
        nodes: int | None,
        start: np.ndarray | None,
        due: Due,
    ) -> Minimum:
        """Solve the program until proven, or until a limit; return the best values and bound so far.

        - `seed`: seed of the solver's random choices.
        - `seconds`: wall time; infinite for no limit.
        - `cutoff`: cost from which values are of no use; None for no cutoff.
        - `nodes`: most branchings; None for no limit.
        - `start`: feasible values to start from, [variables]; None without any.
        - `due`: returns True when the run must be left; it then continues in the background (`stopped`).

        If HiGHS fails, the result has its values and bound so far.
        """
        from ortools.math_opt.python import errors, mathopt

        model = mathopt.Model.from_model_proto(self._proto)
        hints = []
        if start is not None:
            hints = [mathopt.SolutionHint(dict(zip(model.variables(), start.tolist(), strict=True)))]
        # Variables that the solver does not report are zero.
        reported = mathopt.VariableFilter(skip_zero_values=True)
        asking = mathopt.ModelSolveParameters(variable_values_filter=reported, solution_hints=hints)
        log = _Log()
        # An unnamed file disappears with the process, even after a crash.
        with tempfile.TemporaryFile() as file:
            options = _options(seed, seconds, cutoff, nodes, f"/dev/fd/{file.fileno()}")
            run = OnThread(
                lambda: mathopt.solve(model, mathopt.SolverType.HIGHS, params=options, model_params=asking, msg_cb=log)
            )
            stopped = False
            try:
                result = run.result(due)
                stopped = result is None
            except errors.InternalMathOptError:
                # HiGHS failed, for example for numerical reasons.
                result = None
            if result is None:
                return Minimum(_last(file.fileno(), self.size), log.bound, False, False, stopped)
        return self._read(result)

    def _read(self, result: "mathopt.SolveResult") -> Minimum:
        """Convert MathOpt's result; an infeasible or possibly unbounded program counts as infeasible."""
        from ortools.math_opt.python.mathopt import TerminationReason

        ended = result.termination
        # All variables are bounded, so the program cannot be unbounded.
        if ended.reason in (TerminationReason.INFEASIBLE, TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return Minimum(None, math.inf, True, True, False)
        values = None
        if result.has_primal_feasible_solution():
            values = np.zeros(self.size)
            for variable, value in result.variable_values().items():
                values[variable.id] = value
        finished = ended.reason is TerminationReason.OPTIMAL
        return Minimum(values, ended.objective_bounds.dual_bound, False, finished, False)


def _options(
    seed: int, seconds: float, cutoff: float | None, nodes: int | None, solutions: str
) -> "mathopt.SolveParameters":
    """Build the solver options for one thread and a gap of at most 1e-7 in cost.

    HiGHS writes its solutions to the path `solutions`. The other arguments are those of `minimise`; 1e9 seconds or more
    set no time limit.
    """
    from ortools.math_opt.python import mathopt
    from ortools.math_opt.solvers import highs_pb2

    doubles = {
        "mip_feasibility_tolerance": 1e-7,
        "primal_feasibility_tolerance": 1e-8,
        "mip_min_logging_interval": 0.2,
    }
    if cutoff is not None:
        doubles["objective_bound"] = cutoff
    return mathopt.SolveParameters(
        random_seed=seed % 2**31,
        relative_gap_tolerance=0.0,
        absolute_gap_tolerance=1e-7,
        node_limit=nodes,
        time_limit=datetime.timedelta(seconds=seconds) if seconds < _LONG_S else None,
        highs=highs_pb2.HighsOptionsProto(
            int_options={"threads": 1},
            double_options=doubles,
            bool_options={"mip_improving_solution_report_sparse": True},
            string_options={"mip_improving_solution_file": solutions},
        ),
    )


def _last(file: int, size: int) -> np.ndarray | None:
    """Return the last complete solution [size] in the file that HiGHS writes; None when there is none yet.

    `file` is its descriptor, `size` the number of variables; variables that are not in the file are 0.
    """
    ctypes.CDLL(None).fflush(None)
    text = os.pread(file, os.fstat(file).st_size, 0).decode()
    solution = None
    # The file may end in the middle of a solution.
    for part in text[: text.rfind("\n") + 1].split("# Columns -")[1:]:
        count, *lines = part.splitlines()
        pairs = [line.split() for line in lines[: int(count)]]
        if len(pairs) == int(count):
            solution = np.zeros(size)
            solution[[int(pair[-1]) for pair in pairs]] = [float(pair[-2]) for pair in pairs]
    return solution


class _Log:
    """Receiver of HiGHS's log, which records the best bound in it."""

    def __init__(self) -> None:
        self.bound = -math.inf
        """Largest bound logged so far, less its possible rounding error; minus infinity before the first."""

    def __call__(self, lines: Sequence[str]) -> None:
        """Raise `bound` to the bounds in lines of the progress table; skip other lines."""
        for line in lines:
            if match := _BOUND.match(line):
                bound = float(match[1])
                # HiGHS prints at least nine digits, so subtract the possible rounding error.
                self.bound = max(self.bound, bound - 1e-8 * abs(bound))
