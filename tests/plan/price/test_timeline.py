"""The timeline runs the step in its predicted time, one thing at a time in each lane, with the predicted peak."""

import itertools
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.plan import Plan, Span, Timeline
from autoshard.plan.price._predict import evaluate
from autoshard.plan.price._timeline import make_timeline
from tests.plan import programs


def decoder(params, batch):
    """A scan of layers with a loss, its gradients and an update: loops forward and backward."""

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
    # What is too short to be kept may be missing, but not more than a little of the step.
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
    """Also where links are what the whole step waits for, as it does for most choices that are made at random."""
    model, rng = programs.model(name, topology, mesh), np.random.default_rng(0)
    for _ in range(4):
        choices = programs.random_choices(model, rng)
        assert make_timeline(model, choices).end_s == pytest.approx(evaluate(model, choices).step_time_s, rel=1e-9)
