"""Pruning of a network's alternatives: the optimum is never pruned."""

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import brute_force, make_problem, problems

from autoshard.solver import FORBIDDEN, Link, Network, Problem, Term, evaluate, prune
from autoshard.solver.search import pruning as module


def network(problem: Problem) -> Network:
    """Convert a problem to a network whose tables store equal rows and columns once, one of them scaled."""
    sizes = np.diff(problem.node_offsets)
    costs = np.split(problem.node_costs.astype(np.float64), problem.node_offsets[1:-1])
    links = []
    for edge, (a, b) in enumerate(problem.edge_nodes.tolist()):
        whole = problem.edge_costs[problem.edge_offsets[edge] : problem.edge_offsets[edge + 1]]
        table = whole.reshape(sizes[a], sizes[b]).astype(np.float64)
        less, rows = np.unique(table, axis=0, return_inverse=True)
        least, columns = np.unique(less, axis=1, return_inverse=True)
        least = np.where(least >= FORBIDDEN, float(FORBIDDEN), least / 4)
        links.append(Link(a, b, rows.ravel(), columns.ravel(), least, 4.0))
    terms = [
        Term(
            int(node), int(start), int(stop), problem.term_usages[problem.term_offsets[t] : problem.term_offsets[t + 1]]
        )
        for t, (node, (start, stop)) in enumerate(zip(problem.term_nodes, problem.term_intervals, strict=True))
        if start < stop
    ]
    return Network(costs, links, terms, problem.usage_limit)


def restricted(problem: Problem, kept: tuple[np.ndarray, ...]) -> Problem:
    """Forbid all alternatives except those in `kept`."""
    costs = problem.node_costs.copy()
    for node, mine in enumerate(kept):
        low, high = problem.node_offsets[node : node + 2]
        costs[np.setdiff1d(np.arange(low, high), low + mine)] = FORBIDDEN
    return make_problem(
        [part.tolist() for part in np.split(costs, problem.node_offsets[1:-1])],
        [
            (a, b, problem.edge_costs[problem.edge_offsets[e] : problem.edge_offsets[e + 1]].tolist())
            for e, (a, b) in enumerate(problem.edge_nodes.tolist())
        ],
        [
            (node, *span, problem.term_usages[problem.term_offsets[t] : problem.term_offsets[t + 1]].tolist())
            for t, (node, span) in enumerate(
                zip(problem.term_nodes.tolist(), problem.term_intervals.tolist(), strict=True)
            )
        ],
        problem.usage_limit,
    )


@settings(max_examples=150, deadline=None)
@given(problems(most_nodes=5))
def test_the_optimum_is_preserved(problem: Problem) -> None:
    narrowed = prune(network(problem))
    best = brute_force(problem)
    assert narrowed.complete
    assert all(len(mine) for mine in narrowed.alternatives)
    if best is None:
        assert narrowed.choices is None
        return
    assert narrowed.bound <= best + 1e-6 * abs(best) + 1e-3
    assert brute_force(restricted(problem, narrowed.alternatives)) == best
    if narrowed.choices is not None:
        assert evaluate(problem, narrowed.choices).feasible
        assert all(choice in mine for choice, mine in zip(narrowed.choices, narrowed.alternatives, strict=True))


@settings(max_examples=100, deadline=None)
@given(problems(most_nodes=5), st.floats(-0.2, 0.4))
def test_what_costs_less_than_enough_is_preserved(problem: Problem, above: float) -> None:
    best = brute_force(problem)
    if best is None:
        return
    enough = best + above * max(1, abs(best))
    narrowed = prune(network(problem), enough=enough)
    assert narrowed.complete and all(len(mine) for mine in narrowed.alternatives)
    assert narrowed.bound <= best + 1e-6 * abs(best) + 1e-3
    if best < enough:
        assert brute_force(restricted(problem, narrowed.alternatives)) == best


def test_useless_choices_are_pruned_although_no_better_ones_are_known() -> None:
    """Limit memory so that the choices which message passing decodes do not fit."""
    random = np.random.default_rng(0)
    count, wide = 12, 40
    costs = random.integers(0, 10**6, (count, wide)).tolist()
    edges = [(n, n + 1, random.integers(0, 10**6, wide * wide).tolist()) for n in range(count - 1)]
    terms = [(n, 0, 1, random.integers(1, 100, wide).tolist()) for n in range(count)]
    tight = network(make_problem(costs, edges, terms, 120))
    alone = prune(tight)
    assert alone.choices is None and sum(map(len, alone.alternatives)) == count * wide
    told = prune(tight, enough=1.05 * alone.bound)
    assert sum(map(len, told.alternatives)) < 0.3 * count * wide


def test_most_of_a_chain_goes() -> None:
    random = np.random.default_rng(0)
    count, wide = 12, 40
    costs = random.integers(0, 10**6, (count, wide)).tolist()
    edges = [(n, n + 1, random.integers(0, 10**6, wide * wide).tolist()) for n in range(count - 1)]
    problem = make_problem(costs, edges)
    narrowed = prune(network(problem))
    assert narrowed.complete and narrowed.choices is not None
    assert sum(map(len, narrowed.alternatives)) < 0.2 * count * wide
    assert evaluate(problem, narrowed.choices).cost <= narrowed.bound * (1 + 1e-6)


def test_messages_of_like_costs_are_a_bound_to_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    count, wide = 40, 5
    costs = random.integers(1000, 2000, (count, wide)).tolist()
    pairs = [(a, b) for a in range(count) for b in (a + 1, a + 3, a + 8) if b < count]
    problem = make_problem(costs, [(a, b, random.integers(0, 1000, wide * wide).tolist()) for a, b in pairs])
    whole = network(problem)
    first = prune(whole)
    assert first.messages is not None and first.choices is not None
    monkeypatch.setattr(module, "_SWEEPS", 1)
    anew, again = (prune(whole, start=start, enough=0.0) for start in (None, first.messages))
    assert 1.01 * anew.bound < first.bound <= again.bound <= evaluate(problem, first.choices).cost


@settings(max_examples=60, deadline=None)
@given(problems(most_nodes=5), st.randoms())
def test_flat_arrays_hold_what_is_left(problem: Problem, random: Random) -> None:
    from autoshard.solver.packed_network import Packer
    from autoshard.solver.search.message_kernels import entry

    whole = network(problem)
    packer = Packer(whole)
    kept = [sorted(random.sample(range(len(cost)), random.randint(1, len(cost)))) for cost in whole.costs]
    flat = packer.pack(np.concatenate([np.array(k) + at for k, at in zip(kept, packer.whole_at[:-1], strict=True)]))
    for node, mine in enumerate(kept):
        low, high = flat.node_at[node : node + 2]
        own = [link for link in whole.links if link.first == link.second == node]
        alone = [link.scale * link.table[link.rows[mine], link.columns[mine]] for link in own]
        assert flat.cost[low:high].tolist() == sum(alone, whole.costs[node][mine]).tolist()
        theirs = sorted((t for t in whole.terms if t.node == node), key=lambda term: (term.start, term.stop))
        terms = range(flat.term_at[node], flat.term_at[node + 1])
        held = [flat.usages[flat.usage_at[t] : flat.usage_at[t] + len(mine)].tolist() for t in terms]
        assert held == ([t.usage[mine].tolist() for t in theirs] if whole.usage_limit is not None else [])
        edges = range(flat.near_at[node], flat.near_at[node + 1])
        around = [link for link in whole.links if node in (link.first, link.second) and link.first != link.second]
        around.sort(key=lambda link: link.first + link.second - node)  # links with equal ends stay in their order
        assert [int(flat.near[edge]) for edge in edges] == [link.first + link.second - node for link in around]
        for edge, link in zip(edges, around, strict=True):
            other = kept[flat.near[edge]]
            for a, b in itertools.product(range(len(mine)), range(len(other))):
                one, two = (mine[a], other[b]) if link.first == node else (other[b], mine[a])
                assert entry(flat, edge, a, b) == link.scale * link.table[link.rows[one], link.columns[two]]
