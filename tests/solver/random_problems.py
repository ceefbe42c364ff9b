"""Random small problems, and a brute-force solver as their reference."""

import itertools as it
import random

import numpy as np
from hypothesis import strategies as st

from autoshard.errors import UserError
from autoshard.solver import FORBIDDEN, Problem, Status, evaluate, solve


def make_problem(
    costs: list[list[int]],
    edges: list[tuple[int, int, list[int]]],
    terms: list[tuple[int, int, int, list[int]]] = (),  # type: ignore[assignment]
    limit: int | None = None,
) -> Problem:
    """Build a `Problem` from plain lists; an edge is (node, node, costs), a term is (node, start, stop, usages)."""

    def offsets(rows: list[list[int]]) -> np.ndarray:
        return np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)

    def flat(rows: list[list[int]]) -> np.ndarray:
        return np.array([value for row in rows for value in row], dtype=np.int64)

    edge_costs, usages = [edge[2] for edge in edges], [term[3] for term in terms]
    return Problem(
        node_offsets=offsets(costs),
        node_costs=flat(costs),
        edge_nodes=np.array([edge[:2] for edge in edges], dtype=np.int64).reshape(-1, 2),
        edge_offsets=offsets(edge_costs),
        edge_costs=flat(edge_costs),
        term_nodes=np.array([term[0] for term in terms], dtype=np.int64),
        term_intervals=np.array([term[1:3] for term in terms], dtype=np.int64).reshape(-1, 2),
        term_offsets=offsets(usages),
        term_usages=flat(usages),
        usage_limit=limit,
    )


def brute_force(problem: Problem) -> int | None:
    """Return the least cost of all choices, None if none is feasible. No code is shared with the solver."""
    sizes = np.diff(problem.node_offsets).tolist()
    best = None
    for choices in it.product(*(range(size) for size in sizes)):
        picked = [int(problem.node_costs[problem.node_offsets[n] + c]) for n, c in enumerate(choices)]
        for edge, (a, b) in enumerate(problem.edge_nodes.tolist()):
            picked.append(int(problem.edge_costs[problem.edge_offsets[edge] + choices[a] * sizes[b] + choices[b]]))
        if max(picked) >= FORBIDDEN or sum(picked) >= FORBIDDEN:
            continue
        if problem.usage_limit is not None:
            used: dict[int, int] = {}
            for term, node in enumerate(problem.term_nodes.tolist()):
                usage = int(problem.term_usages[problem.term_offsets[term] + choices[node]])
                for when in range(*problem.term_intervals[term].tolist()):
                    used[when] = used.get(when, 0) + usage
            if max(used.values(), default=0) > problem.usage_limit:
                continue
        if best is None or sum(picked) < best:
            best = sum(picked)
    return best


@st.composite
def problems(draw: st.DrawFn, memory: bool = True, most_nodes: int = 6, negative: bool = False) -> Problem:
    """Draw problems small enough for brute force: any graph, parallel and self edges, forbidden entries, ties."""
    count = draw(st.integers(1, most_nodes))
    sizes = [draw(st.integers(1, 4 if most_nodes <= 6 else 3)) for _ in range(count)]
    low = -5 if negative else 0
    big = draw(st.sampled_from([3, 30, 10**12]))
    cost = st.one_of(st.integers(low, 4), st.integers(low, big), st.just(0))
    sometimes_forbidden = st.one_of(cost, cost, cost, st.just(FORBIDDEN))
    costs = [[draw(sometimes_forbidden if draw(st.booleans()) else cost) for _ in range(size)] for size in sizes]
    edges = []
    for _ in range(draw(st.integers(0, 2 * count))):
        a, b = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
        kind = draw(st.sampled_from(["any", "forbidding", "identity", "sum"]))
        if kind == "identity":
            table = [0 if i % sizes[b] == j % sizes[a] else FORBIDDEN for i in range(sizes[a]) for j in range(sizes[b])]
        elif kind == "sum":
            left, right = [draw(cost) for _ in range(sizes[a])], [draw(cost) for _ in range(sizes[b])]
            table = [i + j for i in left for j in right]
        else:
            entry = cost if kind == "any" else sometimes_forbidden
            table = [draw(entry) for _ in range(sizes[a] * sizes[b])]
        edges.append((a, b, table))
    if not memory:
        return make_problem(costs, edges)
    terms = []
    for _ in range(draw(st.integers(0, 2 * count))):
        node, start = draw(st.integers(0, count - 1)), draw(st.integers(0, 6))
        stop = start + draw(st.integers(0, 5))
        terms.append((node, start, stop, [draw(st.integers(0, 9)) for _ in range(sizes[node])]))
    return make_problem(costs, edges, terms, draw(st.one_of(st.none(), st.integers(1, 30))))


EXTREMES = {
    "far below 0": (-(10**18), -4 * 10**18, -(2**63) + 1, -3 * 10**17, 5, 0),
    "the edge of int64": (-(2**63), 2**63 - 1, FORBIDDEN - 1, FORBIDDEN, FORBIDDEN + 5, 9 * 10**17, 7, 0),
    "just not forbidden": (FORBIDDEN - 1, FORBIDDEN // 2, FORBIDDEN // 3, 10**17, 1, 0),
    "both signs": (-3 * 10**17, 3 * 10**17, -(10**16), 10**15, 3, 0),
}
KINDS = ("plain", "tight memory", "infeasible", "empty intervals", "self and double edges", *EXTREMES)
"""Kinds of `random_problem`; the last are extremes of 64 bits."""
EACH = 223
"""Problems of every kind in `make test`: 2,007 in all."""


def random_problem(kind: str, seed: int) -> Problem:
    """Return the problem of a seed and one of `KINDS`."""
    draw = random.Random(f"{kind} {seed}")
    sizes = [draw.randint(1, 3) for _ in range(draw.randint(1, 6 if kind not in EXTREMES else 5))]
    nodes = range(len(sizes))
    most = draw.choice((3, 30, 10**12))

    def cost() -> int:
        if kind in EXTREMES:
            extreme = draw.random() < 0.6
            return min(2**63 - 1, draw.choice(EXTREMES[kind]) + draw.randint(0, 9)) if extreme else draw.randint(0, 9)
        return FORBIDDEN if draw.random() < 0.1 else draw.randint(-3 if seed % 5 == 0 else 0, most)

    ends = [(draw.choice(nodes), draw.choice(nodes)) for _ in range(draw.randint(0, 2 * len(sizes)))]
    if kind == "self and double edges":
        ends += [(node, node) for node in nodes if draw.random() < 0.7]
        ends += [draw.choice(((a, b), (b, a))) for a, b in ends if draw.random() < 0.7]
    costs = [[cost() for _ in range(size)] for size in sizes]
    edges = [(a, b, [cost() for _ in range(sizes[a] * sizes[b])]) for a, b in ends]
    terms = []
    for _ in range(draw.randint(0, 2 * len(sizes))):
        node, start = draw.choice(nodes), draw.randint(0, 5)
        empty = kind == "empty intervals" and draw.random() < 0.6
        usage = (0, 5, 2**63 - 1, 2**61) if kind in EXTREMES and seed % 2 else range(10)
        usages = [draw.choice((2**63 - 1, 50) if empty else usage) for _ in range(sizes[node])]
        terms.append((node, start, start + (0 if empty else draw.randint(0, 4)), usages))
    if kind in EXTREMES:
        return make_problem(costs, edges, terms, draw.choice((None, 2**63 - 1, 2**60, 5, 20)))
    if kind == "infeasible" and draw.random() < 0.5:
        a, b = draw.choice(nodes), draw.choice(nodes)
        edges.append((a, b, [FORBIDDEN] * (sizes[a] * sizes[b])))
    limit = None if draw.random() < 0.3 else draw.randint(1, 40)
    if kind in ("tight memory", "infeasible"):
        # The least peak of all choices, or one byte above or below it.
        limit = max(1, _least_peak(sizes, terms) + draw.choice((0, 0, 1) if kind == "tight memory" else (-1, -1, 0)))
    return make_problem(costs, edges, terms, limit)


def _least_peak(sizes: list[int], terms: list[tuple[int, int, int, list[int]]]) -> int:
    def peak(choices: tuple[int, ...]) -> int:
        return max(
            (
                sum(usages[choices[node]] for node, start, stop, usages in terms if start <= when < stop)
                for when in range(10)
            ),
        )

    return min(peak(choices) for choices in it.product(*map(range, sizes)))


def judged(problem: Problem) -> str:
    """Return the status that `solve` gives a problem, or `wrong: ...` if brute force disagrees.

    Right ones are `optimal`, `feasible` (not proven optimal), `infeasible`, `none found` (infeasible, but not proven),
    and `refused`.
    """
    best = brute_force(problem)
    try:
        answer = solve(problem, time_limit=20)
    except UserError as error:
        understood = "divide all costs by" in str(error) or "in larger units" in str(error)
        return "refused" if understood else f"wrong: refused with {error}"
    seen = evaluate(problem, answer.choices)
    if answer.cost != seen.cost:
        return f"wrong: the cost is {seen.cost}, not {answer.cost}"
    if seen.feasible != (answer.status in (Status.OPTIMAL, Status.FEASIBLE)):
        return f"wrong: {answer.status}, but the choices are {'' if seen.feasible else 'not '}feasible"
    if best is not None and answer.lower_bound > best:
        return f"wrong: the bound is {answer.lower_bound}, but {best} is possible"
    if answer.status is Status.OPTIMAL:
        return "optimal" if answer.cost == best else f"wrong: {answer.cost} is called optimal, {best} is possible"
    if answer.status is Status.INFEASIBLE:
        return "infeasible" if best is None else f"wrong: called infeasible, {best} is possible"
    if answer.status is Status.UNKNOWN:
        return "none found" if best is None else f"wrong: {answer.status}, {best} is possible"
    return "feasible"
