"""Graph of a program: it has every op and tensor, and with a plan every second and byte that the plan predicts."""

import dataclasses
import json
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import pytest

import autoshard
from autoshard.cost import HOST
from autoshard.errors import UserError
from autoshard.planning import Options, Plan, ProgramGraph, make_plan, parse_hlo_sharding, save_plan, spec_text
from autoshard.planning.explain.program_graph import Priced
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.price.op_prices import price_ops
from autoshard.planning.price.step_ledger import itemise
from autoshard.planning.space.decision_model import Model
from autoshard.program import Program, trace
from tests.graph.programs import f32
from tests.planning import programs


CASES = [
    ("mixed", "cpu:8", "data=4,model=2"),
    ("wide mlp", "v5e:4x4", "data=4,model=4"),
    ("decoder", "v6e:2x4*2", "data=2,model=8"),
    ("convolutions", "h100:8", "data=4,model=2"),
    ("views", "v5p:2x2x2", "data=4,model=2"),
]


def collectives(made: networkx.MultiDiGraph) -> list[dict[str, Any]]:
    places: list[dict[str, Any]] = [said for _, said in made.nodes(data=True)]
    places += [said for *_, said in made.edges(data=True)]
    return [each for said in places for each in said["collectives"]]


def attention() -> Model:
    """Build the model of grouped-query attention, whose softmax is fused on TPUs."""
    return programs.model_of(programs.grouped_query(), "v5e:2x4", "data=4,model=2")


@pytest.mark.few(3)
@pytest.mark.parametrize("case", [*CASES, None], ids=lambda case: case[0] if case else "attention")
def test_the_parts_of_a_step_add_up_to_its_prediction(case: tuple[str, str, str] | None):
    model = programs.model(*case) if case else attention()
    rng = np.random.default_rng(0)
    for _ in range(5):
        choices = programs.random_choices(model, rng)
        outcome, prices = evaluate(model, choices), price_ops(itemise(model, choices))
        assert sum(prices.compute.values()) == pytest.approx(outcome.compute_s, rel=1e-9)
        host = sum(seconds for (_, what), seconds in outcome.channels.items() if what == HOST)
        assert sum(prices.host.values()) == pytest.approx(host, rel=1e-9)
        ours: Counter[tuple[str, tuple[str, ...], str]] = Counter()
        theirs: Counter[tuple[str, tuple[str, ...], str]] = Counter()
        for each in (c for found in (*prices.inside.values(), *prices.moved.values()) for c in found):
            ours[each.kind, each.axes, each.cause] += each.seconds  # type: ignore[assignment]
        for each in outcome.collectives:
            theirs[each.kind, each.axes, each.cause] += each.seconds  # type: ignore[assignment]
        assert dict(ours) == pytest.approx(dict(theirs), rel=1e-9)


@pytest.mark.parametrize("name", sorted(programs.PROGRAMS))
def test_every_op_and_every_tensor_it_takes_is_there(name: str):
    program = programs.program(name)
    source = program.graph()
    assert isinstance(source, ProgramGraph)
    made, graph = source.to_networkx(), source.reading.graph
    assert networkx.is_directed_acyclic_graph(made)
    kinds = Counter(kind for _, kind in made.nodes(data="kind"))
    assert kinds["argument"] == len(program.arguments) and kinds["result"] == len(program.results)
    assert sum(bool(said["op_class"]) for _, said in made.nodes(data=True)) == len(graph.ops)
    assert all(said["kind"] for _, said in made.nodes(data=True)), "no node is there only because an edge names it"
    for op in graph.ops:
        taken = {key: said["tensor"] for _, _, key, said in made.in_edges(f"op{op.id}", keys=True, data=True)}
        assert taken == dict(enumerate(op.operands))
    flops = sum(flops for _, flops in made.nodes(data="flops"))
    assert flops == pytest.approx(graph.flops, abs=len(graph.ops))
    json.dumps(networkx.node_link_data(made, edges="edges"), allow_nan=False)


def step(params: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(layer, x * x, params["layers"])
    return jax.lax.cond(x[0, 0] > 0, lambda v: v @ params["out"], lambda v: -v, h)


@pytest.fixture(scope="module")
def program() -> Program:
    return trace(step, ({"layers": f32(5, 64, 64), "out": f32(64, 64)}, f32(32, 64)), name="loop and branch")


def test_nodes_and_edges_say_what_they_are(program: Program):
    made = program.graph().to_networkx()
    (square,) = [n for n, said in made.nodes(data=True) if said["kind"] == "multiply"]
    first, second = made.get_edge_data("argument2", square).values()
    assert first["tensor"] == second["tensor"] and first["shape"] == [32, 64] and first["bytes"] == 4 * 32 * 64
    assert first["dims"][0] == "batch" and first["dtype"] == "float32"
    said = made.nodes[square]
    assert said["bytes_read"] == said["bytes_written"] == 4 * 32 * 64, "one tensor that is taken twice is read once"
    assert said["block"] == -1 and said["line"].startswith("test_program_graph.py:")
    assert made.nodes["argument0"]["role"] == "parameter" and made.nodes["argument2"]["role"] == "batch"
    dots = [said for _, said in made.nodes(data=True) if said["kind"] == "dot_general"]
    inside, branch = (next(d for d in dots if (d["block"] >= 0) == in_loop) for in_loop in (True, False))
    assert inside["trips"] == 5 and inside["flops"] == 5 * 2 * 32 * 64 * 64
    assert branch["branch"] >= 0 and branch["trips"] == 0.5 and branch["flops"] == 32 * 64 * 64


def test_a_loop_runs_once_unless_the_next_trips_are_asked_for(program: Program):
    source = program.graph()
    once, again = source.to_networkx(), source.to_networkx(next_trips=True)
    assert networkx.is_directed_acyclic_graph(once) and not networkx.is_directed_acyclic_graph(again)
    back = [(a, b) for a, b, said in again.edges(data=True) if said["back"]]
    assert again.number_of_edges() == once.number_of_edges() + len(back)
    (loop,) = (loop for loop in once.graph["loops"] if not loop["is_branch"])
    assert loop["trips"] == 5 and all(b.startswith(f"loop{loop['loop']}.in") for _, b in back)
    dot = next(n for n, said in once.nodes(data=True) if said["kind"] == "dot_general" and said["block"] >= 0)
    assert "argument2" in networkx.ancestors(once, dot) and "result0" in networkx.descendants(once, dot)


@pytest.fixture(scope="module")
def planned() -> tuple[Program, Plan]:
    return programs.program("wide mlp"), programs.planned("wide mlp", "v5e:4x4", "data=4,model=4").plan


def test_with_a_plan_it_has_the_specs_and_all_of_the_time(planned: tuple[Program, Plan]):
    program, plan = planned
    made = plan.graph(program).to_networkx()
    prediction = plan.prediction
    assert sum(seconds for _, seconds in made.nodes(data="seconds")) == pytest.approx(prediction.compute_s)
    found = collectives(made)
    assert found
    assert sum(each["seconds"] for each in found) == pytest.approx(sum(c.seconds for c in prediction.collectives))
    assert sum(each["exposed_s"] for each in found) == pytest.approx(sum(c.waited_s for c in prediction.collectives))
    wire = sum(c.wire_bytes for c in prediction.collectives)
    assert sum(each["wire_bytes"] for each in found) == pytest.approx(wire, abs=len(found))
    for number, argument in enumerate(program.arguments):
        spec = plan.arguments[argument.name]
        assert made.nodes[f"argument{number}"]["specs"] == [spec_text(spec, argument.shape)]
        for _, _, said in made.out_edges(f"argument{number}", data=True):
            rank = len(argument.shape)
            assert parse_hlo_sharding(said["sharding"], rank, plan.mesh, plan.device_order).axes == spec.axes
            assert said["device_bytes"] * spec.shards(plan.mesh) == said["bytes"]


def test_a_reshard_stands_where_a_value_is_read_in_another_spec(planned: tuple[Program, Plan]):
    program, plan = planned
    made = program.graph(plan).to_networkx()
    gathers = [
        (made.nodes[maker], said)
        for maker, taker, said in made.edges(data=True)
        if made.nodes[taker]["kind"] == "dot_general" and any(c["kind"] == "all-gather" for c in said["collectives"])
    ]
    assert gathers
    for _, said in gathers:
        assert said["taken_as"] and said["taken_as"] != said["spec"]


def test_an_initial_value_of_a_loop_is_resharded_where_it_enters_the_loop():
    def decay(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), params["start"], params["layers"])[0] + x

    shapes = {"layers": f32(5, 64, 64), "start": f32(32, 64)}
    program = trace(decay, (shapes, f32(32, 64)), name="stored start")
    plan = make_plan(program, Options(topology="cpu:8", mesh="data=4,model=2")).plan
    model = programs.model_of(program, "cpu:8", "data=4,model=2")
    (loop,) = model.graph.loops
    (place,) = (k for k, each in enumerate(loop.carries) if model.graph.tensors[each.init].shape == (32, 64))
    rng, entered = np.random.default_rng(0), 0
    for _ in range(5):
        choices = programs.random_choices(model, rng)
        outcome, prices = evaluate(model, choices), price_ops(itemise(model, choices))
        made = dataclasses.replace(program.graph(plan), priced=Priced(plan, model, choices, prices)).to_networkx()
        seconds = sum(each["seconds"] for each in collectives(made))
        assert seconds == pytest.approx(sum(each.seconds for each in outcome.collectives), rel=1e-9)
        (edge,) = [said for _, _, said in made.in_edges(f"loop{loop.id}.in{place}", data=True)]
        entered += len(edge["collectives"])
    assert entered


def test_a_plan_opens_its_own_program(tmp_path):
    (tmp_path / "step.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "program = lambda w, x: jnp.tanh(x @ w), (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2\n"
    )
    plan = autoshard.plan(str(tmp_path / "step.py"), topology="cpu:8", mesh="data=8")
    save_plan(plan, tmp_path / "plan.json")
    made = autoshard.load(tmp_path / "plan.json").graph().to_networkx()
    assert "dot_general" in dict(made.nodes(data="kind")).values() and made.graph["topology"] == "cpu:8"


def test_a_plan_of_another_program_is_refused(planned: tuple[Program, Plan], program: Program):
    with pytest.raises(
        UserError, match=r"the plan \(of wide mlp\) is not for loop and branch: it is another program, it has"
    ):
        program.graph(planned[1])
    with pytest.raises(UserError, match="does not hold the choices that explain it; plan it again"):
        planned[0].graph(dataclasses.replace(planned[1], choices=""))


def test_a_graph_that_is_shown_does_not_fill_the_screen():
    """Print a graph by its program's name: the `repr` of its module may have megabytes."""
    program = programs.program("decoder")
    shown = repr(program.graph())
    assert shown.startswith("ProgramGraph(program=Program(name=") and "OpGraph" not in shown and "MLIR" not in shown
