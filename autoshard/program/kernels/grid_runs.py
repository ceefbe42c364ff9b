"""Matmul FLOPs of a Pallas kernel over its grid, without the steps that the kernel skips.

Kernels skip blocks by conditions on their place in the grid: a causal mask excludes the blocks above the diagonal.
Conditions that depend on the place alone are computed for the whole grid at once, with one array dim for each grid dim.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.program.kernels.pallas_grid import inner_jaxprs


_Known = dict[Any, NDArray[Any]]
"""Value of each known variable at every step, with one array dim per grid dim (size 1 if independent)."""

_COMPUTED: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "sign": np.sign,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "rem": np.fmod,
    "div": lambda a, b: np.trunc(a / b).astype(np.result_type(a)),
    "select_n": lambda which, *cases: np.choose(np.asarray(which, dtype=np.int64), cases),
}
"""Primitives for computations on places, and their numpy counterparts."""

_CALLS = ("jit", "pjit", "closed_call")
"""Primitives that run an inner jaxpr once on their operands."""


def step_products(jaxpr: Any, grid: Sequence[Any]) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return matmul FLOPs of one grid step by dtype, once if every branch runs, and once as the mean over the grid.

    `grid` are the kernel's own grid dims. A branch with an unknown condition counts as run. A loop of known length
    counts with every iteration, any other loop with one. Values from outside of a loop are unknown in its body.
    """
    reader = _Reader(grid)
    reader.read(jaxpr, {}, np.ones((1,) * len(grid), dtype=bool), 1)
    return reader.every, reader.mean


class _Reader:
    """A traversal of a kernel that adds up the FLOPs of its matmuls."""

    def __init__(self, grid: Sequence[Any]) -> None:
        """Store the extents of the grid, and begin with no FLOPs by dtype: `every`, `mean`."""
        self.grid = grid
        self.every: defaultdict[str, float] = defaultdict(float)
        self.mean: defaultdict[str, float] = defaultdict(float)

    def read(self, jaxpr: Any, known: _Known, runs: NDArray[np.bool_], turns: int) -> None:
        """Add the matmul FLOPs of `jaxpr`, and the values of its variables that follow from the place to `known`.

        - `known`: values of variables that follow from the place in the grid.
        - `runs`: steps at which the jaxpr runs.
        - `turns`: number of runs in each of these steps.
        """
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name == "dot_general":
                dtype, flops = _product(equation)
                self.every[dtype] += turns * flops
                self.mean[dtype] += turns * flops * float(runs.mean())
            elif name == "program_id":
                self.place(equation, known)
            elif name == "cond":
                self.branch(equation, known, runs, turns)
            elif name in _CALLS:
                for inner in inner_jaxprs(equation):
                    given = _passed(equation.invars, inner.invars, known)
                    self.read(inner, given, runs, turns)
                    known.update(_passed(inner.outvars, equation.outvars, given))
            elif name in _COMPUTED or name == "convert_element_type":
                _compute(equation, known)
            else:
                length = equation.params["length"] if name == "scan" else 1
                for inner in inner_jaxprs(equation):
                    self.read(inner, {}, runs, turns * length)

    def place(self, equation: Any, known: _Known) -> None:
        """Record the values of a `program_id` in `known`, if the size of its grid dim is known."""
        axis = equation.params["axis"]
        if isinstance(self.grid[axis], int):
            shape = [-1 if dim == axis else 1 for dim in range(len(self.grid))]
            known[equation.outvars[0]] = np.arange(self.grid[axis]).reshape(shape)

    def branch(self, equation: Any, known: _Known, runs: NDArray[np.bool_], turns: int) -> None:
        """Traverse the branches of a conditional, each with the steps at which it runs.

        If the condition is unknown, each runs at every step of `runs`.
        """
        chosen = _value(equation.invars[0], known)
        for number, inner in enumerate(inner_jaxprs(equation)):
            here = runs if chosen is None else runs & (chosen.astype(np.int64) == number)
            self.read(inner, _passed(equation.invars[1:], inner.invars, known), here, turns)


def _product(equation: Any) -> tuple[str, int]:
    """Return the wider operand dtype of a matmul (the left one's if equal), and the matmul's FLOPs."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, right = (v.aval for v in equation.invars[:2])
    wider = max(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
    return wider.name, 2 * int(np.prod(equation.outvars[0].aval.shape)) * int(
        np.prod([left.shape[d] for d in contracted])
    )


def _value(variable: Any, known: _Known) -> NDArray[Any] | None:
    """Return the value of a scalar literal or known variable, or None."""
    if hasattr(variable, "val"):
        return np.asarray(variable.val) if np.ndim(variable.val) == 0 else None
    return known.get(variable)


def _passed(outer: Sequence[Any], inner: Sequence[Any], known: _Known) -> _Known:
    """Return the known values of `inner` variables, which have the values of the `outer` ones."""
    values = [(into, _value(of, known)) for of, into in zip(outer, inner, strict=True)]
    return {into: value for into, value in values if value is not None}


def _compute(equation: Any, known: _Known) -> None:
    """Add the scalar result of an equation to `known` if all its operands are known."""
    values = [_value(each, known) for each in equation.invars]
    if any(each is None for each in values) or equation.outvars[0].aval.shape:
        return
    if equation.primitive.name == "convert_element_type":
        known[equation.outvars[0]] = np.asarray(values[0]).astype(equation.params["new_dtype"])
    else:
        known[equation.outvars[0]] = np.asarray(_COMPUTED[equation.primitive.name](*values))
