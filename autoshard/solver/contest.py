"""Reader and writer of the contest's JSON format (google/iopddl), so that any other solver can check ours.

The form is `{"problem": {"name", "nodes": {"intervals", "costs", "usages"}, "edges": {"nodes", "costs"},
"usage_limit"}}`. Intervals are half open, edge costs row-major over the endpoints' alternatives, and duplicate edges
add up.
"""

import contextlib
import gzip
import itertools as it
import json
import os
import pathlib
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from autoshard.base.files import MOST_DATA_BYTES, parse_json, read_bytes, write_whole
from autoshard.errors import UserError
from autoshard.solver.problem import FORBIDDEN, Problem
from autoshard.solver.problem_check import validate


def read_contest(path: str | os.PathLike[str]) -> Problem:
    """Read the `Problem` in a contest file, gzip or not; raises `UserError` with the place of the first mistake."""
    name = os.fspath(path)
    try:
        raw = read_bytes(name, MOST_DATA_BYTES)
    except OSError as error:
        raise UserError(f"cannot read the problem {name}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{name} is a gzip file that is cut off or damaged; write it again") from None
    try:
        data = parse_json(raw, MOST_DATA_BYTES, orjson.loads)
    except ValueError as error:
        raise UserError(f"{name} is not JSON ({error}); a contest problem is a JSON object") from None
    del raw
    try:
        return _build(data)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def _build(data: Any) -> Problem:
    """Build a problem from parsed contest JSON; raises `UserError` for malformed data.

    Every node has one memory term; an absent or empty interval becomes [0, 0). An absent usage limit is None.
    """
    problem = _get(data, "problem", dict, "the file")
    nodes = _get(problem, "nodes", dict, "problem")
    edges = _get(problem, "edges", dict, "problem")
    costs = _get(nodes, "costs", list, "problem.nodes")
    usages = _get(nodes, "usages", list, "problem.nodes")
    intervals = _get(nodes, "intervals", list, "problem.nodes")
    edge_nodes = _get(edges, "nodes", list, "problem.edges")
    edge_costs = _get(edges, "costs", list, "problem.edges")
    if not costs:
        raise UserError("the problem has no nodes; at least one node with one alternative is needed")
    for key, values in (("usages", usages), ("intervals", intervals)):
        if len(values) != len(costs):
            raise UserError(
                f"problem.nodes.{key} has {len(values)} entries for {len(costs)} nodes; one per node is needed"
            )
    if len(edge_nodes) != len(edge_costs):
        raise UserError(f"problem.edges names {len(edge_nodes)} edges but has {len(edge_costs)} lists of costs")
    limit = problem.get("usage_limit")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit >= 2**63):
        raise UserError(f"problem.usage_limit is {limit!r}; it must be a 64-bit whole number, or absent for no limit")
    node_offsets, node_costs = _ragged(costs, "node", "costs")
    edge_offsets, flat_edges = _ragged(edge_costs, "edge", "costs")
    usage_offsets, flat_usages = _ragged(usages, "node", "usages")
    result = Problem(
        node_offsets=node_offsets,
        node_costs=node_costs,
        edge_nodes=_pairs(edge_nodes, "edge", "nodes"),
        edge_offsets=edge_offsets,
        edge_costs=flat_edges,
        term_nodes=np.arange(len(costs)),
        term_intervals=_pairs([[0, 0] if not span else span for span in intervals], "node", "interval"),
        term_offsets=usage_offsets,
        term_usages=flat_usages,
        usage_limit=limit,
    )
    validate(result)
    return result


def _get(data: Any, key: str, kind: type, where: str) -> Any:
    """Return `data[key]`; raises `UserError` if it is missing or not of type `kind`, which is dict or list.

    `where` names `data` in the message.
    """
    words = {dict: "an object", list: "a list"}
    if not isinstance(data, dict) or key not in data:
        raise UserError(f"{where} has no key {key!r}; a contest problem needs it")
    if not isinstance(data[key], kind):
        raise UserError(f"{key!r} in {where} is {type(data[key]).__name__}; it must be {words[kind]}")
    return data[key]


def _ragged(rows: list[Any], kind: str, what: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return offsets [rows + 1] and flat values of a list of lists; raises `UserError` for other values.

    `kind` (node, edge) and `what` (costs, usages) name the place in the message.
    """
    for number, row in enumerate(rows):
        if not isinstance(row, list):
            raise UserError(f"{kind} {number} has {what} {row!r}; a list of whole numbers is needed")
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return offsets, _integers(rows, int(offsets[-1]), kind, what)


def _pairs(rows: list[Any], kind: str, what: str) -> NDArray[np.int64]:
    """Return a list of pairs of integers as an array [n, 2]; raises `UserError`, like `_ragged`, for other values."""
    for number, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != 2:
            raise UserError(f"{kind} {number} has the {what} {row!r}; a pair of whole numbers is needed")
    return _integers(rows, 2 * len(rows), kind, what).reshape(-1, 2)


_AT_ONCE = 1 << 20
"""Integers converted by one call of C code; Python handles signals between two calls."""


def _integers(rows: list[Any], count: int, kind: str, what: str) -> NDArray[np.int64]:
    """Return the integers of a list of lists, `count` in all, as a flat array.

    Raises `UserError` for booleans, floats and other values, and for integers beyond 64 bits.
    """
    values, result = it.chain.from_iterable(rows), np.empty(count, dtype=np.int64)
    with contextlib.suppress(OverflowError):
        for start in range(0, count + 1, _AT_ONCE):
            some = list(it.islice(values, _AT_ONCE))
            # numpy truncates floats silently, so the types are checked first, in a C loop.
            if not set(map(type, some)) <= {int}:
                break
            result[start : start + len(some)] = some
        else:
            return result
    for number, row in enumerate(rows):
        for value in row:
            # A parser may return an integer of more than 64 bits as a float.
            if type(value) in (int, float) and not -(2**63) <= value < 2**63:
                raise UserError(f"{kind} {number} has {value} among its {what}, which does not fit in 64 bits")
            if type(value) is not int:
                raise UserError(f"{kind} {number} has {value!r} among its {what}; only whole numbers are allowed")
    raise AssertionError("a value was refused and then not found")


def write_contest(problem: Problem, path: str | os.PathLike[str], name: str = "problem") -> None:
    """Write `problem` in the contest's format, with gzip when `path` ends in `.gz`; equal problems give equal bytes.

    `name` is the problem's name in the file. The format allows one memory term for each node. Further terms become
    satellite nodes with one alternative for each distinct usage. An edge ties a satellite to its node: its cost is 0
    where the usages agree and `FORBIDDEN` elsewhere. The first `num_nodes` choices of a solution of the file solve
    `problem` at the same cost.

    Raises `UserError` if the problem is malformed or the file cannot be written.
    """
    validate(problem)
    count = problem.num_nodes
    costs = _rows(problem.node_costs, problem.node_offsets)
    edge_nodes = problem.edge_nodes.tolist()
    edge_costs = _rows(problem.edge_costs, problem.edge_offsets)
    intervals: list[list[int]] = [[0, 0] for _ in range(count)]
    usages = [[0] * len(row) for row in costs]
    has_term = [False] * count
    for term, usage in enumerate(_rows(problem.term_usages, problem.term_offsets)):
        node = int(problem.term_nodes[term])
        span = problem.term_intervals[term].tolist()
        if not has_term[node]:
            has_term[node], intervals[node], usages[node] = True, span, usage
            continue
        levels = sorted(set(usage))
        edge_nodes.append([node, len(costs)])
        edge_costs.append([0 if level == value else FORBIDDEN for value in usage for level in levels])
        costs.append([0] * len(levels))
        intervals.append(span)
        usages.append(levels)
    body: dict[str, Any] = {
        "name": name,
        "nodes": {"intervals": intervals, "costs": costs, "usages": usages},
        "edges": {"nodes": edge_nodes, "costs": edge_costs},
    }
    if problem.usage_limit is not None:
        body["usage_limit"] = problem.usage_limit
    text = json.dumps({"problem": body}, separators=(",", ":")).encode()
    target = pathlib.Path(path)
    if target.suffix == ".gz":
        text = gzip.compress(text, mtime=0)
    write_beside(target, text)


def write_beside(target: pathlib.Path, content: bytes) -> None:
    """Write or replace the file `target` atomically; raises `UserError` if it cannot be written."""
    try:
        write_whole(target, content)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from None


def _rows(flat: NDArray[np.int64], offsets: NDArray[np.int64]) -> list[list[int]]:
    """Split a flat array at its offsets into lists."""
    values, cuts = flat.tolist(), offsets.tolist()
    return [values[a:b] for a, b in it.pairwise(cuts)]
