"""The priced model, the Problem built from it and the evaluation of a choice: three views that must agree."""

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.planning.price.evaluate import evaluate, tensor_spec
from autoshard.planning.price.on_chip_memory import on_chip_room
from autoshard.planning.solve.problem_builder import build_problem, kept_of, least_bytes
from autoshard.planning.solve.time_weights import even_weights, normalise
from autoshard.planning.solve.weight_search import search
from autoshard.planning.space.decision_model import EXPOSED, Channel, Model
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.program import Role, trace
from autoshard.solver import FORBIDDEN
from autoshard.solver import evaluate as evaluate_problem
from tests.graph.programs import f32
from tests.planning import programs as made


CASES = [
    ("mlp", "cpu:8", "data=4,model=2"),
    ("mlp", "v5e:2x4", "data=2,model=4"),
    ("decoder", "v5e:2x4", "data=2,model=4"),
    ("decoder without remat", "cpu:8", "data=8"),
    ("decoding", "v5e:2x4", "a=2,b=2,c=2"),
    ("convolutions", "cpu:8", "data=4,model=2"),
    ("views", "v5p:2x2x2", "data=4,model=2"),
    ("mixed", "cpu:8", "data=4,model=2"),
    ("wide mlp", "v5e:4x4", "data=4,model=4"),
]


def random_weights(model: Model, rng: np.random.Generator) -> dict[Any, float]:
    return normalise({channel: float(rng.random()) for channel in even_weights(model)})


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "topology", "mesh"), CASES)
def test_problem_and_judgement_agree_on_any_choice(name: str, topology: str, mesh: str) -> None:
    limit = 1 << 20  # small: large tensors get copies with memory of their own
    model = made.model(name, topology, mesh, limit)
    rng = np.random.default_rng(0)
    rounding = 0.5e-12 * (len(model.nodes) + len(model.reshards)) + 1e-15
    for _ in range(12):
        weights = random_weights(model, rng)
        problem = build_problem(model, weights, limit)
        choices = made.random_choices(model, rng)
        checked, outcome = evaluate_problem(problem, choices), evaluate(model, choices)
        channels = outcome.channels
        weighted = channels.get(EXPOSED, 0.0) + sum(weights.get(c, 0.0) * s for c, s in channels.items())
        assert checked.cost < FORBIDDEN
        assert checked.cost * 1e-12 == pytest.approx(weighted, abs=rounding)
        assert checked.peak_usage + model.fixed_bytes == outcome.solved_bytes
        on_chip = on_chip_room(model.mesh.topology, outcome.solved_bytes)
        assert outcome.solved_bytes - on_chip <= outcome.peak_bytes == sum(outcome.memory.values())
        assert least_bytes(model, kept_of(model, None)) <= outcome.peak_bytes
        assert checked.cost * 1e-12 <= outcome.step_time_s + rounding, "a weighting bounds the true time from below"


@pytest.mark.parametrize(("name", "topology", "mesh"), CASES[:3])
def test_the_judgement_adds_up(name: str, topology: str, mesh: str) -> None:
    model = made.model(name, topology, mesh, 1 << 20)
    choices = made.random_choices(model, np.random.default_rng(1))
    outcome = evaluate(model, choices)
    exposed = outcome.channels.get(EXPOSED, 0.0)
    mostly = sum(c.seconds for c in outcome.collectives if not c.hidden)
    assert 0.5 * mostly <= exposed <= sum(c.seconds for c in outcome.collectives) + 1e-15
    if model.mesh.topology.backend == "cpu":
        assert exposed == pytest.approx(mostly)
    assert outcome.compute_s + exposed <= outcome.step_time_s + 1e-15
    assert outcome.step_time_s <= outcome.compute_s + outcome.comm_s + 1e-15
    on_wire = sum(c.wire_bytes for c in outcome.collectives)
    assert (on_wire > 0) == (outcome.comm_s > 0)


def test_a_forbidden_pair_is_refused() -> None:
    model = made.model("wide mlp", "v5e:4x4", "data=4,model=4", 1 << 20)
    rng = np.random.default_rng(0)
    choices = made.random_choices(model, rng)
    reshard = next(m for m in model.reshards if m.forbidden is not None)
    row = reshard.rows[choices[reshard.source]]
    assert reshard.forbidden is not None
    choices[reshard.target] = np.flatnonzero(reshard.forbidden[row][reshard.columns])[0]
    with pytest.raises(ValueError, match="a pair of alternatives that is not allowed"):
        evaluate(model, choices)
    problem = build_problem(model, even_weights(model), None)
    assert not evaluate_problem(problem, choices).feasible


def test_a_copy_is_the_tensor_itself_or_another_of_its_own() -> None:
    model = made.model("wide mlp", "v5e:4x4", "data=4,model=4", 1 << 20)
    rng = np.random.default_rng(0)
    assert model.copy_nodes
    for _ in range(5):
        choices = made.random_choices(model, rng)
        for (tensor, *_), number in model.copy_nodes.items():
            copy = model.nodes[number]
            spec = tensor_spec(model, choices, tensor)
            state = copy.states[choices[number]]
            dims = [
                tuple(a for a, d in zip(model.axis_names, state, strict=True) if d == k) for k in range(len(spec.dims))
            ]
            (term,) = copy.memory
            assert (
                (tuple(dims) == spec.dims)
                == (not copy.has_memory[choices[number]])
                == (term.usage[choices[number]] == 0)
            )


@pytest.mark.parametrize(("name", "topology", "mesh"), [CASES[2], CASES[-1]])
def test_a_copy_is_there_from_the_first_op_that_reads_it_to_the_last(name: str, topology: str, mesh: str) -> None:
    model = made.model(name, topology, mesh, 1 << 20)
    large = [number for number in model.copy_nodes.values() if model.nodes[number].memory]
    assert large
    for number in large:
        readers = [reshard.op for reshard in model.reshards if reshard.source == number]
        (term,) = model.nodes[number].memory
        assert (term.start, term.stop) == (min(readers), max(readers) + 1)


def test_what_a_branch_needs_moves_as_often_as_the_branch_runs() -> None:
    """Count each branch of a conditional as equally likely: one of two, and one of three with a nested one of two."""

    def fn(x: Any, w: Any, which: Any) -> Any:
        def inner(x: Any) -> Any:
            return lax.cond(which > 5, lambda x: jnp.tanh(x @ w["sixth"]), lambda x: x, x)

        x = lax.cond(which > 0, lambda x: jnp.tanh(x @ w["half"]), lambda x: x * 2.0, x)
        return lax.switch(which, [lambda x: jnp.sin(x @ w["third"]), inner, lambda x: x], x @ w["whole"])

    weights = {name: f32(64, 64) for name in ("whole", "half", "third", "sixth")}
    source = trace(fn, (f32(64, 64), weights, jax.ShapeDtypeStruct((), jnp.int32)))
    model = made.model_of(source, "cpu:8", "data=4,model=2")
    graph, expected = model.graph, {"whole": 1.0, "half": 1 / 2, "third": 1 / 3, "sixth": 1 / 6}
    for argument, tensor in zip(source.arguments, graph.arguments, strict=True):
        name = argument.name.removeprefix("w.")
        if name in expected:
            moves = [reshard.trips for reshard in model.reshards if reshard.tensor == tensor and reshard.op >= 0]
            assert moves and moves == pytest.approx([expected[name]] * len(moves)), name


@pytest.mark.parametrize("name", ["mlp", "decoder", "mixed", "convolutions"])
def test_arguments_and_results_have_even_alternatives_only(name: str) -> None:
    model = made.model(name, "cpu:8", "data=4,model=2")
    sizes = dict(model.mesh.axes)
    for tensor in {*model.graph.arguments, *model.graph.results}:
        cluster = model.structure.cluster_of[tensor]
        if cluster < 0:
            continue
        node = model.cluster_node[cluster]
        for row in range(len(model.nodes[node].states)):
            choices = np.zeros(len(model.nodes), dtype=np.int64)
            choices[node] = row
            spec = tensor_spec(model, choices, tensor)
            for size, axes in zip(model.graph.tensors[tensor].shape, spec.dims, strict=True):
                assert size % int(np.prod([sizes[a] for a in axes])) == 0


def test_whole_choices_communicate_nothing_and_hold_everything() -> None:
    model = made.model("mlp", "cpu:8", "data=4,model=2")
    choices = np.array([int(np.flatnonzero((n.states == WHOLE).all(axis=1))[0]) for n in model.nodes])
    for reshard in model.reshards:
        if reshard.forbidden is not None:
            row = reshard.rows[choices[reshard.source]]
            open_to = np.flatnonzero(~reshard.forbidden[row][reshard.columns])
            choices[reshard.target] = next(c for c in open_to if (model.nodes[reshard.target].states[c] == WHOLE).all())
    outcome = evaluate(model, choices)
    assert outcome.collectives == () and outcome.comm_s == 0.0
    state = sum(
        model.graph.tensors[t].bytes
        for t, a in zip(model.graph.arguments, model.program.arguments, strict=True)
        if a.role in (Role.PARAMETER, Role.OPTIMIZER_STATE)
    )
    assert outcome.peak_bytes >= state


@pytest.mark.parametrize("factor", [2, 8])
def test_matmuls_split_n_ways_take_an_nth_of_the_time(factor: int) -> None:
    """Use a chip without on-chip residency. With it, small shards may need less than their share."""
    model = made.model("wide mlp", "v4:2x2x4", f"data={16 // factor},model={factor}")
    for op_id, number in model.op_node.items():
        op, node = model.graph.ops[op_id], model.nodes[number]
        if not op.flops:
            continue
        (seconds,) = node.time.values()
        whole = float(seconds[(node.states == WHOLE).all(axis=1)][0])
        split = seconds[(node.states[:, 0] == WHOLE) & (node.states[:, 1] != WHOLE)]
        assert np.all(split >= whole / factor)
        # A thin slice of a matmul is bound by memory traffic as well, all the more if it also computes its operand.
        assert np.all(split <= whole / factor * (1.1 if factor == 2 else 2.1) + 2e-6)


# Search


def brute_force(model: Model, limit: int) -> float:
    """Return the least true step time of all choices within the limit, evaluated all at once."""
    grid = np.indices([len(n.states) for n in model.nodes]).reshape(len(model.nodes), -1)
    channels: dict[Channel, Any] = defaultdict(lambda: np.zeros(grid.shape[1]))
    held = np.zeros((len(model.graph.ops) + 2, grid.shape[1]))
    allowed = np.ones(grid.shape[1], dtype=bool)
    for node, choices in zip(model.nodes, grid, strict=True):
        for channel, seconds in node.time.items():
            channels[channel] += seconds[choices]
        for term in node.memory:
            held[term.start : term.stop] += term.usage[choices]
    for reshard in model.reshards:
        rows, columns = reshard.rows[grid[reshard.source]], reshard.columns[grid[reshard.target]]
        for channel, seconds in reshard.costs.items():
            channels[channel] += seconds[rows, columns] * reshard.trips
        if reshard.forbidden is not None:
            allowed &= ~reshard.forbidden[rows, columns]
    allowed &= held.max(axis=0) + model.fixed_bytes <= limit
    blocks = {block for block, _ in channels if (block, _) != EXPOSED}
    cubes = (np.sum([s**3 for c, s in channels.items() if c[0] == block], axis=0) for block in blocks)
    total = channels[EXPOSED] + sum(np.cbrt(each) for each in cubes)
    assert allowed.any()
    return float(total[allowed].min())


@pytest.mark.parametrize(
    ("name", "topology", "mesh", "limit"),
    [
        ("matmul", "cpu:8", "data=8", 1 << 30),
        ("matmul", "cpu:8", "data=8", 700),
        ("two matmuls", "cpu:8", "data=8", 1 << 30),
        ("two matmuls", "cpu:8", "data=8", 2600),
        ("two matmuls", "v5e:2x4", "data=8", 1 << 30),
        ("two matmuls", "v5e:2x4", "data=8", 12000),
        ("matmul", "cpu:8", "data=4,model=2", 1 << 30),
        ("matmul", "cpu:8", "data=4,model=2", 450),
        ("matmul", "v5e:2x4", "data=2,model=4", 4500),
    ],
)
def test_search_finds_what_trying_everything_finds(name: str, topology: str, mesh: str, limit: int) -> None:
    model = made.model(name, topology, mesh)
    limit += model.fixed_bytes
    best = brute_force(model, limit)
    searched = search(model, [], Limits(limit, 20.0, 0), lambda line: None)
    assert searched.best.outcome.peak_bytes <= limit
    rounding = 0.5e-12 * (len(model.nodes) + len(model.reshards))
    assert searched.bound_s <= best + rounding
    assert searched.best.outcome.step_time_s == pytest.approx(best, abs=rounding)
