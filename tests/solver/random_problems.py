"""Random small problems and the brute force that judges them."""

import itertools as it

import numpy as np
from hypothesis import strategies as st

from autoshard.solver import FORBIDDEN, Problem


def make_problem(
    costs: list[list[int]],
    edges: list[tuple[int, int, list[int]]],
    terms: list[tuple[int, int, int, list[int]]] = (),  # type: ignore[assignment]
    limit: int | None = None,
) -> Problem:
    """A `Problem` from plain lists; an edge is (node, node, costs), a term is (node, start, stop, usages)."""

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
    """Least cost over all choices, None when none is feasible; sums written out, nothing shared with the solver."""
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
    """Problems small enough for brute force: any shape of graph, parallel and self edges, forbidden entries, ties."""
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
