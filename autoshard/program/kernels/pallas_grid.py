"""The blocks of a Pallas kernel as functions of its grid, and the kernel's use of its place in the grid.

Index maps are read as functions of one grid dim. Forms such as `h`, `h // 4` and `2 * h + 1` are recognised by their
values, regardless of how they are written. An index from a table of prefetched scalars (a mask's) may be any block.
"""

import dataclasses
import enum
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class GridRange(enum.StrEnum):
    """Pattern of a tensor's blocks over the steps of one period."""

    EACH = "each"
    """Each step has its own block."""
    SAME = "same"
    """All steps have the same block."""
    MIXED = "mixed"
    """Neither."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockPattern:
    """Pattern of a tensor's blocks along one grid dim."""

    dim: int
    """Dim of the tensor whose blocks advance evenly from period to period; -1 if each period has the same blocks."""
    period: int
    """Number of consecutive grid steps in a period."""
    within: GridRange
    """Pattern of the blocks over the steps of one period."""

    def inside(self, group: int) -> GridRange:
        """Return the pattern within a group of steps that is a multiple of the period.

        It is `MIXED` for a longer group unless the period is one step, or all steps have the same blocks.
        """
        fits = self.period in (1, group) if self.dim >= 0 else self.period == 1 or self.within is GridRange.SAME
        return self.within if fits else GridRange.MIXED


INDEPENDENT = BlockPattern(-1, 1, GridRange.SAME)
"""Pattern of a tensor whose blocks do not depend on the grid dim."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlaceUse:
    """A kernel's use of its place in the grid."""

    steps: frozenset[int]
    """Grid dims whose place or extent the kernel uses in an unknown way."""
    periods: dict[int, frozenset[int]]
    """Grid dim -> periods within which the kernel uses the place."""
    ends: dict[int, frozenset[int]]
    """Grid dim -> periods (the whole dim for the place itself) whose first and last step alone matter."""


Tables = dict[int, list[tuple[Any, ...] | None]]
"""Table (by number) -> indices of every look-up: grid dims and integers, or None if unknown."""


def follow(
    jaxpr: Any, variable: Any, grid: Sequence[Any], blocks: int | None
) -> dict[int, "tuple[int, GridRange] | None"]:
    """Map the grid dim that one output of an index map depends on to (period, within), or None if unknown.

    The result is empty if it depends on none. If it depends on several, each maps to None.

    - `jaxpr`, `variable`: the index map and its output.
    - `grid`: extents of the grid dims.
    - `blocks`: number of blocks of the tensor's dim; None if they are no plain blocks.

    The period is negative if each period has the same blocks.
    """
    reached = reach(jaxpr, variable, len(grid))
    (dim,) = reached if len(reached) == 1 else (-1,)
    if dim < 0 or blocks is None or not isinstance(grid[dim], int):
        return dict.fromkeys(reached)
    values = np.arange(grid[dim]) if variable is jaxpr.invars[dim] else _values(jaxpr, variable, dim, grid[dim])
    return {dim: None if values is None else _pattern(values, blocks)}


def _pattern(values: NDArray[np.int64], blocks: int) -> tuple[int, GridRange] | None:
    """Return (period, within) of block numbers over one grid dim, or None if they have no such pattern.

    The shortest period counts, which must be shorter than the dim. Either each period has the next
    `period * blocks / steps` of the tensor's `blocks`, or all have the same ones: then the period is negative.
    """
    count = len(values)
    for period in (c for c in range(1, count) if count % c == 0):
        first, more = values[:period], values[period:] - values[:-period]
        within = GridRange.EACH if period == 1 else GridRange.SAME if (first == first[0]).all() else GridRange.MIXED
        if period * blocks % count == 0:
            stride = period * blocks // count
            if stride and (more == stride).all() and first.min() >= 0 and first.max() < stride:
                return period, within
        if not more.any():
            return -period, GridRange.SAME if period == 1 else within
    return None


def reach(jaxpr: Any, variable: Any, dims: int, through: bool = False) -> set[int]:
    """Return the numbers of the first `dims` inputs that `variable` depends on.

    With `through`, also those that only index a table.
    """
    reached: set[int] = set()
    inputs = {each: number for number, each in enumerate(jaxpr.invars[:dims])}
    for each in _behind(jaxpr, variable, through):
        if each in inputs:
            reached.add(inputs[each])
    return reached


def _behind(jaxpr: Any, variable: Any, through: bool = False) -> Iterator[Any]:
    """Yield a variable and all variables that it is computed from; operands of look-ups only with `through`."""
    makers = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
    waiting, seen = [variable], set()
    while waiting:
        each = waiting.pop()
        if hasattr(each, "val") or each in seen:
            continue
        seen.add(each)
        yield each
        if each in makers and (through or makers[each].primitive.name != "get"):
            waiting.extend(makers[each].invars)


def _values(jaxpr: Any, variable: Any, dim: int, size: int) -> NDArray[np.int64] | None:
    """Return an output's values over grid dim `dim`, the only one that it uses; None if they depend on a table."""
    import jax

    behind = set(_behind(jaxpr, variable))
    equations = [e for e in jaxpr.eqns if any(out in behind for out in e.outvars)]
    if any(e.primitive.name == "get" for e in equations):
        return None
    core = importlib.import_module("jax._src.core")
    info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    part = jaxpr.replace(invars=[jaxpr.invars[dim]], outvars=[variable], eqns=equations, debug_info=info)
    with jax.ensure_compile_time_eval():
        steps = np.arange(size, dtype=np.int32)
        return np.asarray(jax.vmap(lambda step: core.eval_jaxpr(part, (), step)[0])(steps)).astype(np.int64)


def map_tables(jaxpr: Any, dims: int, found: Tables) -> None:
    """Add the look-ups of an index map to `found`; its first `dims` inputs are the grid dims, the others tables."""
    own = {each: number for number, each in enumerate(jaxpr.invars[:dims])}
    for equation in jaxpr.eqns:
        _look_up(equation, {each: number for number, each in enumerate(jaxpr.invars[dims:])}, own, found)


def place_use(jaxpr: Any, own: Sequence[int], grid: Sequence[Any], tables: int, found: Tables) -> PlaceUse:
    """Return a kernel's use of its place in the grid.

    - `own`: grid dim of each of the kernel's own axes, which exclude the dims that vmap added.
    - `grid`: extents of the grid dims.
    - `tables`: number of leading operands that are tables.
    - `found`: receives the look-ups in these tables.
    """
    reader = _IndexReader(own, grid, {each: number for number, each in enumerate(jaxpr.invars[:tables])}, found)
    reader.read(jaxpr, {}, True)
    frozen = [{dim: frozenset(each) for dim, each in uses.items()} for uses in (reader.periods, reader.ends)]
    return PlaceUse(frozenset(reader.steps), *frozen)


class _IndexReader:
    """A traversal of a kernel that tracks its places in the grid to their uses."""

    def __init__(self, own: Sequence[int], grid: Sequence[Any], tables: dict[Any, int], found: Tables) -> None:
        """Store the arguments of `place_use`, with `tables` as variable -> number, and begin with no uses."""
        self.own, self.grid, self.tables, self.found = own, grid, tables, found
        self.steps: set[int] = set()
        self.periods: dict[int, set[int]] = {}
        self.ends: dict[int, set[int]] = {}

    def read(self, jaxpr: Any, places: dict[Any, Any], top: bool) -> None:
        """Traverse a jaxpr and record the uses of places.

        `places` maps variables to a place, as (grid dim, period or 0), or to an integer that was passed in. `top` is
        True for the kernel's own jaxpr.
        """
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name == "program_id":
                places[equation.outvars[0]] = (self.own[equation.params["axis"]], 0)
                continue
            if name == "num_programs":
                self.steps.add(self.own[equation.params["axis"]])
                continue
            here = {v: places[v] for v in _variables(equation) if isinstance(places.get(v), tuple)}
            if name == "get" and _look_up(
                equation, self.tables, {v: p[0] for v, p in here.items() if not p[1]}, self.found
            ):
                self.spend(p for p in here.values() if p[1])
            elif name == "convert_element_type" and here:
                places[equation.outvars[0]] = here[equation.invars[0]]
            elif name == "rem" and here:
                self.remainder(equation, places)
            elif name == "eq" and here:
                self.compare(equation, places, top)
            elif name in ("cond", "pjit", "jit", "closed_call"):
                self.enter(equation, places)
            else:
                self.spend(here.values())
                for inner in inner_jaxprs(equation):
                    self.read(inner, {}, False)

    def spend(self, places: Any) -> None:
        """Record places that are used in an unknown way: within a period, or in the whole dim for period 0."""
        for dim, period in places:
            if period:
                self.periods.setdefault(dim, set()).add(period)
            else:
                self.steps.add(dim)

    def remainder(self, equation: Any, places: dict[Any, Any]) -> None:
        """Track `place % divisor` as a place within a period if the divisor divides the grid dim."""
        place, divisor = places.get(_key(equation.invars[0])), _integer(equation.invars[1], places)
        dim, period = place if isinstance(place, tuple) else (-1, 0)
        size = self.grid[dim]
        if dim < 0 or period or not divisor or not isinstance(size, int) or size % divisor:
            self.spend(p for p in (places.get(_key(v)) for v in equation.invars) if isinstance(p, tuple))
        else:
            places[equation.outvars[0]] = (dim, divisor)

    def compare(self, equation: Any, places: dict[Any, Any], top: bool) -> None:
        """Record a comparison with a literal for the first or last step of a period, in the kernel's own jaxpr.

        Any other comparison is an unknown use.
        """
        place, value = places.get(_key(equation.invars[0])), _integer(equation.invars[1], places)
        dim, period = place if isinstance(place, tuple) else (-1, 0)
        size = period or self.grid[dim]
        literal = top and dim >= 0 and hasattr(equation.invars[1], "val")
        if literal and isinstance(size, int) and value in (0, size - 1):
            self.ends.setdefault(dim, set()).add(size)
        else:
            self.spend(p for p in (places.get(_key(v)) for v in equation.invars) if isinstance(p, tuple))

    def enter(self, equation: Any, places: dict[Any, Any]) -> None:
        """Traverse the jaxprs of a call or a conditional with the places that are passed in.

        A condition that is a place itself, a table that is passed in, and a place that is returned are unknown uses.
        """
        chosen = equation.primitive.name == "cond"
        passed = equation.invars[1:] if chosen else equation.invars
        if chosen:
            self.spend(p for p in (places.get(_key(equation.invars[0])),) if isinstance(p, tuple))
        for inner in inner_jaxprs(equation):
            given: dict[Any, Any] = {}
            for outer, variable in zip(passed, inner.invars, strict=True):
                if _key(outer) in self.tables:
                    self.found.setdefault(self.tables[outer], []).append(None)
                known = places.get(_key(outer), _integer(outer, places))
                if known is not None:
                    given[variable] = known
            self.read(inner, given, False)
            for variable in inner.outvars:  # results of the inner jaxpr are not tracked
                if isinstance(given.get(_key(variable)), tuple):
                    self.spend([given[variable]])


def _look_up(equation: Any, tables: dict[Any, int], places: dict[Any, int], found: Tables) -> bool:
    """Record an equation's use of tables in `found`; return True if it is a look-up with known indices.

    Known indices are places, recorded as `("grid", dim)`, and integers. Any other use is recorded as None.
    """
    import jax

    used = [v for v in _variables(equation) if v in tables]
    if equation.primitive.name != "get" or not used or equation.invars[0] is not used[0]:
        for each in used:
            found.setdefault(tables[each], []).append(None)
        return False
    transforms = jax.tree.unflatten(equation.params["tree"], equation.invars[1:])
    indices = transforms[0].indices if len(transforms) == 1 and hasattr(transforms[0], "indices") else ()
    known = [("grid", places[i]) if _key(i) in places else getattr(i, "val", i) for i in indices]
    plain = bool(known) and all(isinstance(k, (tuple, int, np.integer)) for k in known)
    found.setdefault(tables[used[0]], []).append(tuple(known) if plain else None)
    return plain


def _variables(equation: Any) -> list[Any]:
    """Return the inputs of an equation that are no literals."""
    return [v for v in equation.invars if not hasattr(v, "val")]


def _key(variable: Any) -> Any:
    """Return the variable as a key of dicts; None for literals, which have no hash."""
    return None if hasattr(variable, "val") or not hasattr(variable, "aval") else variable


def _integer(variable: Any, places: dict[Any, Any]) -> int | None:
    """Return the value of a literal or passed integer, or None."""
    value = getattr(variable, "val", None) if _key(variable) is None else places.get(variable)
    return int(value) if isinstance(value, (int, np.integer, np.ndarray)) and np.ndim(value) == 0 else None


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Yield the open jaxprs among an equation's parameters, also in tuples and lists, without those inside them."""
    for value in equation.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(each, "jaxpr", each)
            if hasattr(inner, "eqns"):
                yield inner


def table_along(
    lookups: Sequence[tuple[Any, ...] | None], dim: int, shape: Sequence[int], size: int
) -> BlockPattern | None:
    """Return the pattern of a table along a grid dim of that size; None if it differs between look-ups.

    A table is independent of the dim if no look-up has the dim as index; unknown look-ups read the whole table. None is
    also the result if the dim of the table that the grid dim indexes has another extent.

    - `lookups`: indices of every look-up in the table.
    - `dim`, `size`: the grid dim and its extent.
    - `shape`: shape of the table.
    """
    positions: set[int] = set()
    for indices in lookups:
        if indices is None:
            positions.update((-1, -2))
            continue
        at = [d for d, index in enumerate(indices) if index == ("grid", dim)]
        positions.update(at or [-1])
    if positions == {-1}:
        return INDEPENDENT
    if len(positions) > 1:
        return INDEPENDENT if positions == {-1, -2} else None
    (d,) = positions
    return BlockPattern(d, 1, GridRange.EACH) if shape[d] == size else None


# Kernels on parts of their grid.


def with_tables(jaxpr: Any, first: int, shapes: dict[int, tuple[int, ...]]) -> Any:
    """Return the jaxpr with other shapes of its tables, which are inputs from number `first` on.

    `shapes` maps the number of a table to its new shape; other tables keep theirs.
    """
    core = importlib.import_module("jax._src.core")
    new = {}
    for number, shape in shapes.items():
        old = jaxpr.invars[first + number]
        inner = old.aval.inner_aval.update(shape=shape)
        new[old] = core.Var(old.aval.update(inner_aval=inner))

    def put(variables: Sequence[Any]) -> list[Any]:
        return [v if _key(v) is None else new.get(v, v) for v in variables]

    steps = [e.replace(invars=put(e.invars)) if new.keys() & set(_variables(e)) else e for e in jaxpr.eqns]
    return jaxpr.replace(invars=put(jaxpr.invars), eqns=steps)


def with_ends(jaxpr: Any, own: Sequence[int], sizes: dict[int, tuple[int, int]]) -> Any:
    """Return the kernel with shorter periods along some grid dims: divisors and last steps are replaced.

    - `own`: grid dim of each of the kernel's own axes.
    - `sizes`: grid dim -> (steps of one period, steps in the new kernel).
    """
    core = importlib.import_module("jax._src.core")
    places: dict[Any, int] = {}
    changed = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        dim = next((places[v] for v in _variables(equation) if v in places), -1)
        if name == "program_id" and own[equation.params["axis"]] in sizes:
            places[equation.outvars[0]] = own[equation.params["axis"]]
        elif dim >= 0 and name in ("convert_element_type", "rem"):
            places[equation.outvars[0]] = dim
        if dim >= 0 and name in ("rem", "eq"):
            old, new = sizes[dim]
            second = equation.invars[1]
            swap = {old: new} if name == "rem" else {old - 1: new - 1}
            value = swap.get(int(second.val), int(second.val))
            literal = core.Literal(second.aval.dtype.type(value), second.aval)
            equation = equation.replace(invars=[equation.invars[0], literal])
        changed.append(equation)
    return jaxpr.replace(eqns=changed)
