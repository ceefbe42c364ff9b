"""Bills of plans add up to the prediction for any calibration, and observations change later plans."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost import STEP, Bill, Database, Observation, Topology, compiler_version, load_calibration
from autoshard.errors import UserError
from autoshard.graph import Opaque
from autoshard.planning import Options, explain_plan, make_plan, plan_bills
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.price.prediction import bill_of, mfu
from autoshard.planning.price.step_ledger import itemise
from autoshard.planning.record.plan_files import plan_to_json
from autoshard.program import trace
from tests.graph.programs import f32
from tests.planning import programs


@pytest.mark.parametrize(("name", "topology", "mesh"), programs.CASES)
def test_a_bill_takes_the_step_time_of_its_choices_for_any_figures(name: str, topology: str, mesh: str):
    program = programs.program(name)
    parsed = Topology.parse(topology)
    shipped = load_calibration(parsed.chip)
    other = dataclasses.replace(
        shipped, matmul_efficiency=0.31, memory_efficiency=0.6, op_overhead_s=3e-6, collective_launch_s=2e-5,
        reduction_overlap=0.4, pipelined_overlap=0.2, shared_memory_traffic=1.7,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    model = programs.model(name, topology, mesh)
    again = build_model(program, analyse_program(program, parsed.backend), model.mesh, parsed.usable_bytes, other)
    for _ in range(5):
        choices = programs.random_choices(model, rng)
        bill = bill_of(itemise(model, choices))
        assert bill.seconds(shipped) == pytest.approx(evaluate(model, choices).step_time_s, rel=1e-9)
        assert bill.seconds(other) == pytest.approx(evaluate(again, choices).step_time_s, rel=1e-9)
        assert Bill.from_json(json.loads(json.dumps(bill.to_json()))) == bill


def test_the_bill_of_a_plan_is_what_it_predicts():
    made = programs.planned("wide mlp", "v5e:4x4", "data=4,model=4")
    plans = [made.plan, *made.baseline_plans.values()]
    for plan, bill in zip(plans, plan_bills(programs.program("wide mlp"), plans), strict=True):
        assert bill.seconds(load_calibration("v5e")) == pytest.approx(plan.prediction.step_time_s, rel=1e-9)


@pytest.fixture
def database(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Database:
    monkeypatch.setenv("AUTOSHARD_DATA_DIR", str(tmp_path / "data"))
    return Database(tmp_path / "data")


def slow_memory(database: Database) -> None:
    """Record observations of a machine whose memory is four times slower than the shipped calibration says."""
    plan = make_plan(
        programs.program("mixed"), Options(topology="cpu:8", mesh="data=4,model=2", calibration=False)
    ).plan
    (bill,) = plan_bills(programs.program("mixed"), [plan])
    shipped = load_calibration("cpu")
    slow = dataclasses.replace(shipped, memory_efficiency=shipped.memory_efficiency / 4)
    compiler = compiler_version(Topology.parse("cpu:8"))
    about = {"program": plan.program_fingerprint, "plan": "p", "name": "plan"}
    assert database.add([Observation("cpu:8", compiler, "measure", STEP, about, bill, {"seconds": bill.seconds(slow)})])


def plan_mixed(**options) -> str:
    read = Options(**options, topology="cpu:8", mesh="data=4,model=2")
    return plan_to_json(make_plan(programs.program("mixed"), read).plan)


def test_without_a_database_nothing_changes_and_nothing_is_created(database: Database):
    assert plan_mixed() == plan_mixed(calibration=False)
    assert not database.folder.exists()
    assert "learned" not in json.loads(plan_mixed())["provenance"]


def test_what_was_seen_prices_later_plans_and_stands_in_their_provenance(database: Database):
    before = plan_mixed()
    slow_memory(database)
    after, ignored = plan_mixed(), plan_mixed(calibration=False)
    assert after == plan_mixed(), "the same content gives the same plan"
    assert ignored == before
    said, old = json.loads(after), json.loads(before)
    assert said["prediction"]["step_time_s"] > 1.25 * old["prediction"]["step_time_s"]
    learned = said["provenance"]["learned"]
    assert learned["observations"] == 1 and len(learned["hash"]) == 12
    assert learned["figures"]["memory_efficiency"] < load_calibration("cpu").memory_efficiency
    assert said["provenance"]["calibration"] != old["provenance"]["calibration"]


def test_a_plan_is_explained_with_the_figures_that_it_was_made_with(database: Database, monkeypatch):
    program = programs.program("mixed")
    slow_memory(database)
    plan = make_plan(program, Options(topology="cpu:8", mesh="data=4,model=2")).plan
    monkeypatch.setenv("AUTOSHARD_DATA_DIR", "")
    name = next(iter(plan.arguments))
    (chosen, *_) = explain_plan(plan, name, program).alternatives
    assert chosen.step_time_s == pytest.approx(plan.prediction.step_time_s)


def test_a_plan_without_choices_has_no_bill():
    made = programs.planned("mixed")
    with pytest.raises(UserError, match="does not hold the choices"):
        plan_bills(programs.program("mixed"), [dataclasses.replace(made.plan, choices="")])


def test_mfu_is_a_share_of_the_peak_of_the_dtype_in_which_calls_multiply():
    model = programs.model("wide mlp", "v5e:4x4", "data=4,model=4")
    chip = model.mesh.topology
    ops = tuple(
        dataclasses.replace(op, operands=(), opaque=Opaque("call", op.rule, dtype="int8")) if op.flops else op
        for op in model.graph.ops
    )
    called = dataclasses.replace(model, graph=dataclasses.replace(model.graph, ops=ops))
    before, after = mfu(model, 1.0), mfu(called, 1.0)
    assert before is not None and chip.peak_flops("int8") > chip.peak_flops("bfloat16")
    assert after == pytest.approx(before * chip.peak_flops("bfloat16") / chip.peak_flops("int8"))


def test_mfu_leaves_out_what_the_backward_pass_computes_again():
    width, hidden, layers, tokens = 256, 512, 2, 1024

    def figures(policy: bool) -> float:
        def layer(x, w):
            return x + jax.nn.silu(x @ w["up"]) @ w["down"], None

        def loss(w, x):
            return jnp.mean(jax.lax.scan(jax.checkpoint(layer) if policy else layer, x, w)[0] ** 2)

        weights = {"up": f32(layers, width, hidden), "down": f32(layers, hidden, width)}
        program = trace(jax.value_and_grad(loss), (weights, f32(tokens, width)), name="layers")
        found = make_plan(program, Options(topology="v6e:2x2", mesh="data=4")).plan.prediction
        assert found.mfu is not None
        return found.mfu * found.step_time_s * Topology.parse("v6e:2x2").peak_flops("bfloat16") * 4

    by_hand = 6 * 2 * width * hidden * layers * tokens
    # The first layer's input is an argument, of which nobody asks a gradient: one matmul less.
    assert 0.9 * by_hand < figures(False) <= by_hand
    assert figures(True) == pytest.approx(figures(False))


def test_mfu_counts_the_scores_that_a_causal_mask_keeps():
    batch, seq, heads, size = 8, 256, 4, 64

    def loss(q, k, v):
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=True).astype(jnp.float32))

    each = jax.ShapeDtypeStruct((batch, seq, heads, size), jnp.bfloat16)
    program = trace(jax.grad(loss, (0, 1, 2)), (each, each, each), name="attention")
    found = make_plan(program, Options(topology="v6e:2x2", mesh="data=4")).plan.prediction
    assert found.mfu is not None
    flops = found.mfu * found.step_time_s * Topology.parse("v6e:2x2").peak_flops("bfloat16") * 4
    assert flops == pytest.approx(12 * batch * heads * seq * seq * size / 2, rel=0.01)
