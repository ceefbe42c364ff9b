"""What solves a mixed integer program: HiGHS by its own package, or OR-Tools' MathOpt with the HiGHS that it ships.

HiGHS' own package is taken unless something else is asked for. MathOpt's (9.15) cannot be told to stop and give what it
has found, refuses a cutoff, takes no start for HiGHS, and builds the program anew for each row that is added; but who
wants all solving to go through OR-Tools can have it so. A process can load only one of the two packages: each brings a
HiGHS of another version as a shared library, and the second fails to load (undefined symbols). So neither is loaded
where the user is: see `_exact` and `_worker`.
"""

import dataclasses
import datetime
import enum
import importlib.util
import math
import os
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ._clock import Clock, Due, never
from ._graph import Ints


if TYPE_CHECKING:
    import scipy.sparse

ENGINES = ("highs", "ortools")
ENGINE_VARIABLE = "AUTOSHARD_ENGINE"


def engine_named(name: str | None) -> str:
    """One of `ENGINES`: the one named, else the one in `AUTOSHARD_ENGINE`, else the first.

    Raises: UserError for another name, and for `ortools` where it is not installed.
    """
    found = name or os.environ.get(ENGINE_VARIABLE, "").strip() or ENGINES[0]
    if found not in ENGINES:
        where = "" if name else f" in {ENGINE_VARIABLE}"
        raise UserError(f"the engine {found!r}{where} is not known; exact solves go through {' or '.join(ENGINES)}")
    if found == "ortools" and importlib.util.find_spec("ortools") is None:
        raise UserError("the engine 'ortools' needs OR-Tools, which is not installed: pip install 'autoshard[ortools]'")
    return found


class End(enum.Enum):
    """How a run ended."""

    OPTIMAL = enum.auto()
    INFEASIBLE = enum.auto()
    STOPPED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class MipRun:
    """What a run came to."""

    end: End
    bound: float
    """No values cost less."""
    values: NDArray[np.float64] | None
    """[columns] the best values; None when none were found."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mip:
    """Minimise costs @ x with matrix @ x == right, x in [0, 1], the first `binaries` of them whole."""

    costs: NDArray[np.float64]
    """[columns]"""
    matrix: "scipy.sparse.csr_array"
    """[rows, columns]"""
    right: NDArray[np.float64]
    """[rows]"""
    binaries: int


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What a solve may do."""

    deadline: float
    """By `clock`."""
    clock: Clock
    due: Due
    seed: int
    threads: int
    cutoff: float | None
    """Values that cost more are of no use."""
    nodes: int | None
    """Branchings of a run."""


class MipEngine(Protocol):
    """One program, to which rows may be added between runs."""

    def add_row(self, places: Ints, weights: NDArray[np.float64], most: float) -> None:
        """One more row: weights @ x[places] <= most."""
        ...

    def run(self, left: float) -> MipRun:
        """Solves what is there now, for at most `left` seconds of the clock."""
        ...


class HighsEngine:
    """HiGHS by highspy."""

    def __init__(self, mip: Mip, bounds: Bounds, start: NDArray[np.float64] | None):
        import highspy

        self._package: Any = highspy
        self._wall = bounds.clock is time.monotonic
        self._solver = solver = highspy.Highs()
        for key, value in (
            ("output_flag", False),
            ("random_seed", bounds.seed % 2**31),
            ("threads", bounds.threads),
            ("mip_rel_gap", 0.0),
            ("mip_abs_gap", 1e-7),
            ("mip_feasibility_tolerance", 1e-7),
            ("primal_feasibility_tolerance", 1e-8),
        ):
            solver.setOptionValue(key, value)
        if bounds.cutoff is not None:
            solver.setOptionValue("objective_bound", bounds.cutoff)
        if bounds.nodes is not None:
            solver.setOptionValue("mip_max_nodes", bounds.nodes)
        if not self._wall and math.isfinite(bounds.deadline):
            # HiGHS itself knows no other clock.
            solver.cbMipInterrupt += lambda event: event.interrupt(bounds.due() or bounds.clock() > bounds.deadline)
        elif bounds.due is not never:
            solver.cbMipInterrupt += lambda event: event.interrupt(bounds.due())
        rows, columns = len(mip.right), len(mip.costs)
        lp = highspy.HighsLp()
        lp.num_row_, lp.num_col_ = rows, columns
        lp.col_cost_ = mip.costs
        lp.col_lower_ = np.zeros(columns)
        lp.col_upper_ = np.ones(columns)
        lp.row_lower_ = lp.row_upper_ = mip.right
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = mip.matrix.indptr.astype(np.int32)
        lp.a_matrix_.index_ = mip.matrix.indices.astype(np.int32)
        lp.a_matrix_.value_ = np.asarray(mip.matrix.data, dtype=np.float64)
        whole, free = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        lp.integrality_ = [whole] * mip.binaries + [free] * (columns - mip.binaries)
        solver.passModel(lp)
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = start.tolist()
            solver.setSolution(solution)

    def add_row(self, places: Ints, weights: NDArray[np.float64], most: float) -> None:
        self._solver.addRow(-self._package.kHighsInf, most, len(places), places.astype(np.int32), weights)

    def run(self, left: float) -> MipRun:
        solver = self._solver
        if self._wall:
            # The limit counts from the first run.
            solver.setOptionValue("time_limit", solver.getRunTime() + left)
        solver.run()
        status, info = solver.getModelStatus(), solver.getInfo()
        if status == self._package.HighsModelStatus.kInfeasible:
            return MipRun(End.INFEASIBLE, math.inf, None)
        found = info.primal_solution_status == self._package.SolutionStatus.kSolutionStatusFeasible
        return MipRun(
            End.OPTIMAL if status == self._package.HighsModelStatus.kOptimal else End.STOPPED,
            info.mip_dual_bound,
            np.asarray(solver.getSolution().col_value) if found else None,
        )


class OrToolsEngine:
    """MathOpt's HiGHS. It stops at the limit of its run only; whoever waits for it ends its process."""

    def __init__(self, mip: Mip, bounds: Bounds, start: NDArray[np.float64] | None):
        del start  # MathOpt hands none to HiGHS
        self._mip, self._bounds = mip, bounds
        self._rows: list[tuple[Ints, NDArray[np.float64], float]] = []
        if bounds.cutoff is not None:
            costly = np.flatnonzero(mip.costs)
            self.add_row(costly, mip.costs[costly], bounds.cutoff)

    def add_row(self, places: Ints, weights: NDArray[np.float64], most: float) -> None:
        self._rows.append((places, np.asarray(weights, dtype=np.float64), most))

    def run(self, left: float) -> MipRun:
        from ortools.math_opt.python import mathopt

        limit = None if math.isinf(left) else datetime.timedelta(seconds=left)
        model = mathopt.Model.from_model_proto(self._proto())
        parameters = mathopt.SolveParameters(
            time_limit=limit,
            node_limit=self._bounds.nodes,
            random_seed=self._bounds.seed % 2**31,
            relative_gap_tolerance=0.0,
            absolute_gap_tolerance=1e-7,
        )
        result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return MipRun(End.INFEASIBLE, math.inf, None)
        return MipRun(
            End.OPTIMAL if reason == mathopt.TerminationReason.OPTIMAL else End.STOPPED,
            result.termination.objective_bounds.dual_bound,
            np.array(result.variable_values(list(model.variables()))) if result.solutions else None,
        )

    def _proto(self) -> Any:
        from ortools.math_opt import model_pb2

        mip, found = self._mip, model_pb2.ModelProto()
        columns, rows = len(mip.costs), len(mip.right)
        found.variables.ids.extend(range(columns))
        found.variables.lower_bounds.extend([0.0] * columns)
        found.variables.upper_bounds.extend([1.0] * columns)
        found.variables.integers.extend([True] * mip.binaries + [False] * (columns - mip.binaries))
        costly = np.flatnonzero(mip.costs)
        found.objective.linear_coefficients.ids.extend(costly.tolist())
        found.objective.linear_coefficients.values.extend(mip.costs[costly].tolist())
        matrix = mip.matrix.tocsr()
        matrix.sort_indices()
        each = [(np.repeat(np.arange(rows), np.diff(matrix.indptr)), matrix.indices, matrix.data)]
        each += [(np.full(len(at), rows + k), at, weights) for k, (at, weights, _) in enumerate(self._rows)]
        found.linear_constraints.ids.extend(range(rows + len(self._rows)))
        right, most = mip.right.tolist(), [m for *_, m in self._rows]
        found.linear_constraints.lower_bounds.extend(right + [-math.inf] * len(most))
        found.linear_constraints.upper_bounds.extend(right + most)
        table = found.linear_constraint_matrix
        for field, parts in zip(
            (table.row_ids, table.column_ids, table.coefficients), zip(*each, strict=True), strict=True
        ):
            field.extend(np.concatenate(parts).tolist())
        return found


def mip_engine(name: str, mip: Mip, bounds: Bounds, start: NDArray[np.float64] | None) -> MipEngine:
    """The program in one of `ENGINES`; `start` has [columns] feasible values, if there are any."""
    return {"highs": HighsEngine, "ortools": OrToolsEngine}[name](mip, bounds, start)
