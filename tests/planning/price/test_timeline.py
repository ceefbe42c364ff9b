"""Timeline of a step: it ends at the predicted time, has one interval at a time in each lane, and the predicted
peak.
"""

import itertools
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.planning import WAITS_FOR_HOST, Plan, Span, Timeline
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.price.step_ledger import itemise
from autoshard.planning.price.step_timeline import make_timeline
from tests.graph.programs import f32
from tests.planning import programs


def decoder(params, batch):
    """Compute a step of scanned layers with loss, gradients and update: a forward and a backward loop."""

    def loss(params):
        def layer(x, w):
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        x, _ = jax.lax.scan(layer, batch @ params["in"], params["layers"])
        return jnp.mean((x @ params["out"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16)


PARAMS = {
    "in": shape(2048, 2048),
    "layers": {"up": shape(6, 2048, 8192), "down": shape(6, 8192, 2048)},
    "out": shape(2048, 2048),
}


@pytest.fixture(scope="module", params=[("v5e:4x4", "data=16"), ("v5e:4x4", "data=4,model=4"), ("cpu:8", "data=8")])
def plan(request: pytest.FixtureRequest) -> Plan:
    topology, mesh = request.param
    program = autoshard.trace(decoder, (PARAMS, shape(8192, 2048)))
    return autoshard.plan(program, topology=topology, mesh=mesh)


@pytest.fixture
def timeline(plan: Plan) -> Timeline:
    assert plan.timeline is not None
    return plan.timeline


def test_it_ends_when_the_step_is_predicted_to_end(plan: Plan, timeline: Timeline):
    assert timeline.end_s == pytest.approx(plan.prediction.step_time_s, rel=1e-9)
    assert all(
        0 <= span.start_s and span.start_s + span.seconds <= timeline.end_s * 1.000001 for span in timeline.spans
    )


def test_compute_and_exposed_communication_take_turns(plan: Plan, timeline: Timeline):
    lanes: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        lanes[("compute", 0) if span.lane in ("compute", "exposed") else (span.lane, span.block)].append(span)
    for spans in lanes.values():
        for a, b in itertools.pairwise(sorted(spans, key=lambda span: span.start_s)):
            assert a.start_s + a.seconds <= b.start_s * (1 + 1e-9) + 1e-15
    assert {lane for lane, _ in lanes} <= {"compute", *plan.mesh}


def test_the_lanes_add_up_to_the_prediction(plan: Plan, timeline: Timeline):
    spent: dict[str, float] = defaultdict(float)
    for span in timeline.spans:
        spent[span.lane] += span.seconds
    # Intervals that are too short for the timeline may be missing, but only a small part of the step.
    assert spent["exposed"] == pytest.approx(plan.prediction.exposed_comm_s, abs=0.01 * timeline.end_s)
    assert spent["compute"] == pytest.approx(plan.prediction.compute_s, abs=0.01 * timeline.end_s)


def test_memory_reaches_the_predicted_peak_and_is_never_negative(plan: Plan, timeline: Timeline):
    totals = [sum(column) for column in zip(*timeline.memory.values(), strict=True)]
    assert len(totals) == len(timeline.moments_s)
    assert max(totals) == plan.prediction.peak_bytes
    assert min(size for sizes in timeline.memory.values() for size in sizes) >= 0
    assert list(timeline.moments_s) == sorted(timeline.moments_s)
    at = totals.index(max(totals))
    assert {kind: sizes[at] for kind, sizes in timeline.memory.items() if sizes[at]} == plan.prediction.memory


@pytest.mark.parametrize(("name", "topology", "mesh"), programs.CASES)
def test_any_choices_end_when_they_are_judged_to_end(name: str, topology: str, mesh: str):
    """Compare the ends for random choices, most of which leave the whole step waiting for the links."""
    model, rng = programs.model(name, topology, mesh), np.random.default_rng(0)
    for _ in range(4):
        choices = programs.random_choices(model, rng)
        timeline = make_timeline(itemise(model, choices))
        assert timeline.end_s == pytest.approx(evaluate(model, choices).step_time_s, rel=1e-9)


def sums_again():
    """Trace a loop that reads an argument in every trip and produces nothing of its shape."""

    def again(x, m):
        return jax.lax.fori_loop(0, 4, lambda i, h: h * 0.5 + m.sum(0), jnp.tanh(x) @ m)

    return autoshard.trace(again, (f32(1024, 2048), f32(2048, 2048)))


@pytest.mark.parametrize(("name", "topology", "mesh"), [*programs.CASES, ("sums", "v5e:2x2", "data=4")])
def test_a_loop_is_drawn_in_one_piece(name: str, topology: str, mesh: str):
    built = programs.model_of(sums_again(), topology, mesh) if name == "sums" else None
    model, rng = built or programs.model(name, topology, mesh), np.random.default_rng(0)
    for _ in range(4):
        spans = make_timeline(itemise(model, programs.random_choices(model, rng))).spans
        spans = sorted((s for s in spans if s.lane in ("compute", "exposed")), key=lambda s: s.start_s)
        pieces = [block for block, _ in itertools.groupby(span.block for span in spans) if block >= 0]
        assert sorted(pieces) == [loop.id for loop in model.graph.loops]


def test_operands_are_moved_before_an_op_runs_and_its_results_after():
    program = autoshard.trace(lambda p, x: (jnp.tanh(x @ p), jnp.sin(x)), (shape(16, 8), shape(8, 16)))
    model, rng = programs.model_of(program, "cpu:8", "data=4,model=2"), np.random.default_rng(0)
    (dot,) = (model.nodes[number].name for op, number in model.op_node.items() if op == 0)
    before, after = 0, 0
    for _ in range(20):
        spans = make_timeline(itemise(model, programs.random_choices(model, rng))).spans
        # The compute on the loop's results has its name too.
        op = max((span for span in spans if span.name == dot), key=lambda span: span.seconds)
        for span in spans:
            _, _, cause = span.name.partition(": ")
            if cause in ("p", "x"):
                assert span.start_s < op.start_s + op.seconds / 2
                before += 1
            elif cause == dot:
                assert span.start_s > op.start_s + op.seconds / 2
                after += 1
    assert before > 10 and after > 10


def test_what_waits_for_the_host_is_named_so():
    def away(x, w):
        there = jax.device_put(x @ w, jax.memory.Space.Host)
        return jax.device_put(there, jax.memory.Space.Device) + 1

    program = autoshard.trace(away, (shape(4096, 4096), shape(4096, 4096)))
    timeline = autoshard.plan(program, topology="v5e:2x2", mesh="data=4").timeline
    assert timeline is not None
    assert [span.name for span in timeline.spans if span.name.startswith("waiting")] == [WAITS_FOR_HOST]
