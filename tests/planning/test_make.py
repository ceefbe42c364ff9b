"""From a program to a plan: its content, refused inputs, and determinism."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.sparse

import autoshard
from autoshard import mlir
from autoshard.errors import InfeasibleError, UserError
from autoshard.planning import Options, Plan, Running, Spec, make_plan
from autoshard.planning.price.evaluate import evaluate, tensor_spec
from autoshard.planning.solve.problem_builder import build_problem
from autoshard.planning.solve.time_weights import even_weights
from autoshard.program import from_torch, trace
from autoshard.solver import FORBIDDEN, solve
from tests.graph.programs import f32
from tests.planning import programs as made


PLANS = [
    ("mlp", "cpu:8", "data=4,model=2"),
    ("mlp", "cpu:8", "data=8"),
    ("decoder", "cpu:8", "data=4,model=2"),
    ("decoding", "v5e:2x4", "data=2,model=4"),
    ("mixed", "cpu:8", "data=4,model=2"),
    ("convolutions", "cpu:8", "data=8"),
    ("wide mlp", "v5e:4x4", "data=4,model=4"),
    ("wide mlp", "v5p:2x2x2", "a=2,b=2,c=2"),
    ("nothing", "cpu:1", "data=1"),
]


def every(result: Any) -> list[Plan]:
    return [result.plan, *result.baseline_plans.values()]


@pytest.fixture(params=PLANS, ids=lambda case: " ".join(case))
def result(request: pytest.FixtureRequest) -> Any:
    return request.param[0], made.planned(*request.param)


@pytest.mark.few(2)
def test_every_argument_and_result_has_a_spec_that_splits_it_evenly(result: Any) -> None:
    program = made.program(result[0])
    for plan in every(result[1]):
        assert list(plan.arguments) == [a.name for a in program.arguments]
        assert list(plan.results) == [r.name for r in program.results]
        for item, spec in [
            *zip(program.arguments, plan.arguments.values(), strict=True),
            *zip(program.results, plan.results.values(), strict=True),
        ]:
            assert len(spec.dims) == len(item.shape)
            assert len(set(spec.axes)) == len(spec.axes)
            for size, axes in zip(item.shape, spec.dims, strict=True):
                assert size % math.prod(plan.mesh[a] for a in axes) == 0


def test_updated_state_has_the_spec_of_the_state_it_replaces(result: Any) -> None:
    program = made.program(result[0])
    for plan in every(result[1]):
        for item in program.results:
            if item.argument is not None:
                assert plan.results[item.name] == plan.arguments[program.arguments[item.argument].name]


def test_pins_name_values_of_the_module(result: Any) -> None:
    program = made.program(result[0])
    module = mlir.inline_calls(mlir.parse_module(program.module))
    ops = mlir.number_ops(module)
    for plan in every(result[1]):
        assert plan.module_hash == mlir.structure_hash(module)
        for pin in plan.pins:
            assert set(pin.spec.axes) <= set(plan.mesh)
            if pin.operand is not None:
                user, position = pin.operand
                assert len(ops[user].operands[position].type.shape) == len(pin.spec.dims)
            elif pin.op >= 0 and pin.index < len(ops[pin.op].results):
                assert len(ops[pin.op].results[pin.index].type.shape) == len(pin.spec.dims)
            else:
                assert ops[pin.op].name == "stablehlo.while" or pin.op == -1
    mlir.insert_pins(module, "mesh", result[1].plan.mesh, result[1].plan.pins)
    assert module.operation.verify()


def test_predictions_are_consistent(result: Any) -> None:
    for plan in every(result[1]):
        p = plan.prediction
        assert p.step_time_s == pytest.approx(p.compute_s + p.exposed_comm_s)
        assert sum(p.memory.values()) == p.peak_bytes
        assert p.fits == (p.peak_bytes <= plan.memory_limit_bytes)
        assert sum(p.wire_bytes.values()) == pytest.approx(sum(c.wire_bytes for c in p.collectives), abs=64)
        assert set(p.wire_bytes) == set(plan.mesh)
        assert p.mfu is None or 0 < p.mfu < 1
        assert all(c.count > 0 and c.seconds > 0 and c.wire_bytes > 0 for c in p.collectives)
    assert result[1].plan.baselines == {name: b.prediction for name, b in result[1].baseline_plans.items()}


def test_the_timeline_takes_the_predicted_time_and_peaks_at_the_predicted_memory(result: Any) -> None:
    for plan in every(result[1]):
        assert plan.timeline is not None
        assert plan.timeline.end_s == pytest.approx(plan.prediction.step_time_s, rel=1e-6)
        totals = [sum(held) for held in zip(*plan.timeline.memory.values(), strict=True)]
        assert max(totals, default=0) == plan.prediction.peak_bytes
        assert all(
            0 <= s.start_s and s.start_s + s.seconds <= plan.timeline.end_s * (1 + 1e-9) for s in plan.timeline.spans
        )


def test_specs_of_arguments_are_those_of_the_chosen_alternatives() -> None:
    model = made.model("mlp")
    problem = build_problem(model, even_weights(model), None)
    choices = solve(problem, time_limit=10).choices
    plan = made.planned("mlp").plan
    cost = evaluate(model, choices).step_time_s
    assert plan.prediction.step_time_s == pytest.approx(cost, abs=1e-10), "without overlap one weighting is exact"
    for name, tensor in zip(plan.arguments, model.graph.arguments, strict=True):
        assert len(tensor_spec(model, choices, tensor).dims) == len(plan.shapes[name])


# Meshes


def test_meshes_come_from_the_argument_the_environment_or_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    program = made.program("matmul")
    monkeypatch.delenv("XLA_AUTO_SPMD_MESH", raising=False)
    assert make_plan(program, Options(topology="cpu:8")).plan.meshes[0].verdict == "chosen"
    monkeypatch.setenv("XLA_AUTO_SPMD_MESH", "2,4")
    assert make_plan(program, Options(topology="cpu:8")).plan.mesh == {"data": 2, "model": 4}
    assert make_plan(program, Options(topology="cpu:8", mesh="auto")).plan.meshes
    assert make_plan(program, Options(topology="cpu:8", mesh={"x": 4, "y": 2})).plan.mesh == {"x": 4, "y": 2}
    assert make_plan(program, Options(topology="cpu:8", mesh="a=2,b=2,c=2")).plan.mesh == {"a": 2, "b": 2, "c": 2}


def test_the_environments_mesh_must_multiply_to_the_devices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_AUTO_SPMD_MESH", "4,4")
    with pytest.raises(UserError, match="16") as caught:
        make_plan(made.program("matmul"), Options(topology="cpu:8"))
    assert "8" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"mesh": "data=4,model=4"}, "mesh data=4 x model=4 = 16, but cpu:8 has 8 devices; they must be equal"),
        ({"mesh": {"data": 3}}, "mesh data=3 = 3, but cpu:8 has 8 devices"),
        ({"topology": "cpu:0"}, "cpu has no shape 0"),
        ({"topology": "v5q:4x4"}, "v5q"),
        ({"mesh": {"a,b": 8}}, "the mesh has an axis called 'a,b': call it by a letter or _, then letters, digits"),
        ({"mesh": {"a+b": 4, "c": 2}}, "the mesh has an axis called 'a+b'"),
        ({"mesh": {"": 8}}, "the mesh has an axis called ''"),
        ({"mesh": {"?": 8}}, "the mesh has an axis called '?'"),
        ({"mesh": "none=8"}, "the mesh has an axis called 'none'"),
        ({"mesh": {5: 8}}, "mesh axis 5=8 is not a name with a whole number"),
        ({"memory_limit": 0}, "the memory limit is 0 bytes; it must be more than 0"),
    ],
)
def test_bad_input_is_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        make_plan(made.program("matmul"), Options(**{"topology": "cpu:8", **arguments}))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_batch_that_no_axis_divides_stays_whole_with_a_warning() -> None:
    odd = trace(lambda params, x: x @ params, (f32(16, 8), f32(7, 16)), name="odd")
    plan = make_plan(odd, Options(topology="cpu:8", mesh="data=4,model=2")).plan
    assert not any("no mesh axis" in line for line in plan.warnings), "its features can be split"
    prime = trace(lambda params, x: x @ params, (f32(13, 8), f32(7, 13)), name="prime")
    plan = make_plan(prime, Options(topology="cpu:8", mesh="data=4,model=2")).plan
    assert plan.arguments["x"] == Spec.replicated(2)
    assert plan.warnings[0] == (
        "no mesh axis (data=4,model=2) divides a dim of the batch argument x of shape [7, 13]: it is whole on every "
        "device. A batch that is a multiple of 4 can be split."
    )


def decode(params: Any, token: Any) -> Any:
    hidden = params["embed"][token]
    return (hidden + jax.nn.relu(hidden @ params["up"]) @ params["down"]) @ params["embed"].T


@pytest.mark.parametrize("mesh", ["model=8", None])
def test_one_token_is_planned_with_split_weights(mesh: str | None) -> None:
    """Compare the pins with tensor parallelism by hand, and the results with those of one device."""
    weights = {"embed": f32(320, 64), "up": f32(64, 256), "down": f32(256, 64)}
    one = trace(decode, (weights, jax.ShapeDtypeStruct((1, 1), jnp.int32)), name="one token")
    axis = "model" if mesh else "data"
    pins = {"embed": f"{axis},None", "up": f"None,{axis}", "down": f"{axis},None"}
    plan = autoshard.plan(one, topology="cpu:8", mesh=mesh or {axis: 8}, pins=pins)
    values = one.make_args(0)  # type: ignore[misc]
    np.testing.assert_allclose(plan.jit(decode)(*values), jax.jit(decode)(*values), rtol=1e-4, atol=1e-5)
    free = autoshard.plan(one, topology="cpu:8", mesh=mesh)
    np.testing.assert_allclose(free.jit(decode)(*values), jax.jit(decode)(*values), rtol=1e-4, atol=1e-5)
    assert not any("no mesh axis" in line for line in plan.warnings), "no other batch of one can be split"


def test_one_device_needs_no_divisible_batch() -> None:
    plan = made.planned("nothing", "cpu:1", "data=1").plan
    assert plan.prediction.collectives == () and plan.device_order == (0,)


def test_a_program_with_nothing_to_split_is_replicated() -> None:
    tiny = trace(lambda params, s: (params * s, s + 1), (f32(3, 5), f32()), name="tiny")
    plan = make_plan(tiny, Options(topology="cpu:8", mesh="data=4,model=2")).plan
    assert all(spec.axes == () for spec in (*plan.arguments.values(), *plan.results.values()))
    assert plan.words == ("nothing over data and model: its devices repeat the same work",) or plan.words == (
        "everything on every device",
    )
    assert plan.prediction.collectives == ()


def test_integers_scalars_keys_and_flags_are_planned() -> None:
    plan = made.planned("mixed").plan
    assert plan.dtypes == {
        "params.out": "float32",
        "params.table": "float32",
        "tokens": "int32",
        "scale": "float32",
        "key": "uint32",
        "mask": "bool",
    }
    assert plan.arguments["scale"].dims == ()
    assert plan.arguments["key"].axes == ()


# Memory


def test_a_limit_that_binds_is_preserved() -> None:
    free = made.planned("wide mlp", "cpu:8", "data=4,model=2").plan
    limit = free.prediction.peak_bytes * 9 // 10
    bound = made.planned("wide mlp", "cpu:8", "data=4,model=2", limit).plan
    assert bound.prediction.peak_bytes <= limit < free.prediction.peak_bytes
    assert bound.prediction.step_time_s >= free.prediction.step_time_s
    assert bound.memory_limit_bytes == limit


def test_no_plan_within_the_limit_says_what_would_help() -> None:
    with pytest.raises(InfeasibleError) as caught:
        make_plan(
            made.program("mlp"), Options(topology="cpu:8", mesh="data=4,model=2", memory_limit=4000, time_limit=10)
        )
    text = str(caught.value)
    assert text.startswith("no plan fits into 3.91 KiB per device: the least found is ")
    assert "at its peak in " in text and text.endswith("would help.") and "\n" not in text
    least = float(text.partition("the least found is ")[2].partition(" KiB")[0])
    plan = make_plan(
        made.program("mlp"),
        Options(topology="cpu:8", mesh="data=4,model=2", memory_limit=int(least * 1024 * 1.02), time_limit=10),
    ).plan
    assert 4000 < plan.prediction.peak_bytes <= least * 1024 * 1.02, "the least found can be planned"


def test_tight_memory_is_a_warning() -> None:
    peak = made.planned("mlp", "cpu:8", "data=4,model=2").plan.prediction.peak_bytes
    plan = made.planned("mlp", "cpu:8", "data=4,model=2", peak + 1).plan
    assert any(line.startswith("memory is tight: ") for line in plan.warnings)


def test_loops_without_a_count_are_a_warning() -> None:
    import jax
    import jax.numpy as jnp

    program = trace(
        lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: jnp.tanh(x @ x.T @ x), x),
        (f32(8, 8),),
        name="until",
    )
    plan = make_plan(program, Options(topology="cpu:8")).plan
    assert "a loop's number of trips cannot be read from the program: it is counted once." in plan.warnings


def test_ops_without_a_rule_are_a_warning_with_their_share() -> None:
    import jax
    import jax.numpy as jnp

    program = trace(
        lambda x: jax.lax.rng_uniform(jnp.float32(0), jnp.float32(1), (16, 16)) @ x, (f32(16, 16),), name="noise"
    )
    (line,) = make_plan(program, Options(topology="cpu:8")).plan.warnings
    assert line.startswith("rng ") and "has no sharding rule: every device repeats it whole (" in line
    assert line.endswith("% of the step).")


@pytest.mark.parametrize("topology", ["cpu:8", "v5e:2x2"])
def test_a_step_of_nothing_has_no_shares(topology: str) -> None:
    import jax
    import jax.numpy as jnp

    program = trace(lambda x: jax.lax.rng_uniform(jnp.float32(0), jnp.float32(1), x.shape) + x, (f32(0, 16),))
    plan = make_plan(program, Options(topology=topology)).plan
    assert [each.share for each in plan.unruled] == [0.0] and plan.plan_gap == 0.0


# The Problem


def independent_optimum(path: Path) -> int:
    """Return the least cost of a contest file, read and solved as a plain 0/1 program without code of ours."""
    raw = json.loads(gzip.decompress(path.read_bytes()))["problem"]
    nodes, edges = raw["nodes"], raw["edges"]
    sizes = [len(costs) for costs in nodes["costs"]]
    starts = np.cumsum([0, *sizes])
    cost = [c for costs in nodes["costs"] for c in costs]
    rows: list[tuple[dict[int, int], float, float]] = []
    for node, size in enumerate(sizes):
        rows.append(({int(starts[node]) + k: 1 for k in range(size)}, 1, 1))
    for (a, b), costs in zip(edges["nodes"], edges["costs"], strict=True):
        # One variable for each pair. Its sums over either end equal that end's choice.
        first = len(cost)
        cost += costs
        for i in range(sizes[a]):
            pairs = {first + i * sizes[b] + j: 1 for j in range(sizes[b])}
            rows.append((pairs | {int(starts[a]) + i: -1}, 0, 0))
        for j in range(sizes[b]):
            pairs = {first + i * sizes[b] + j: 1 for i in range(sizes[a])}
            rows.append((pairs | {int(starts[b]) + j: -1}, 0, 0))
    for moment in {start for start, stop in nodes["intervals"] if start < stop} if "usage_limit" in raw else ():
        held = {
            int(starts[node]) + k: usage
            for node, (usages, (start, stop)) in enumerate(zip(nodes["usages"], nodes["intervals"], strict=True))
            if start <= moment < stop
            for k, usage in enumerate(usages)
        }
        rows.append((held, 0, raw["usage_limit"]))
    matrix = scipy.sparse.lil_array((len(rows), len(cost)))
    for number, (entries, _, _) in enumerate(rows):
        for column, value in entries.items():
            matrix[number, column] = value
    upper = np.array([0 if c >= FORBIDDEN else 1 for c in cost])
    price = np.array([0 if c >= FORBIDDEN else c for c in cost], dtype=float)
    found = scipy.optimize.milp(
        price,
        integrality=np.ones(len(cost)),
        bounds=scipy.optimize.Bounds(np.zeros(len(cost)), upper),
        constraints=scipy.optimize.LinearConstraint(
            matrix.tocsr(), np.array([r[1] for r in rows]), np.array([r[2] for r in rows])
        ),
        options={"mip_rel_gap": 0.0, "time_limit": 60},
    )
    assert found.status == 0, found.message
    chosen = np.rint(found.x).astype(int)
    return sum(c for c, x in zip(cost, chosen.tolist(), strict=True) if x)


@pytest.mark.parametrize("limit", [None, pytest.param(2600, marks=pytest.mark.full)])
def test_the_saved_problem_has_the_plans_objective_for_another_solver(tmp_path: Path, limit: int | None) -> None:
    path = tmp_path / "problem.json.gz"
    plan = make_plan(
        made.program("two matmuls"),
        Options(topology="cpu:8", mesh="data=4,model=2", memory_limit=limit, time_limit=20),
        Running(save_problem=path),
    ).plan
    assert plan.solver_gap == 0.0
    assert plan.objective == plan.lower_bound == independent_optimum(path)
    assert plan.objective * 1e-12 == pytest.approx(plan.prediction.step_time_s, abs=1e-10), "nothing overlaps on CPU"


def test_an_infeasible_plan_saves_no_problem(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError):
        make_plan(
            made.program("matmul"),
            Options(topology="cpu:8", memory_limit=10, time_limit=5),
            Running(save_problem=tmp_path / "p.json"),
        )
    assert list(tmp_path.iterdir()) == []


# The call


def test_the_room_is_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_AUTO_SPMD_MESH", raising=False)
    lines: list[str] = []
    plan = autoshard.plan(made.program("matmul"), topology="cpu:8", mesh={"data": 8}, progress=lines.append)
    assert isinstance(plan, Plan) and plan.mesh == {"data": 8}
    assert len(lines) >= 4 and lines[0] == "reading the program's ops and their sharding rules"
    assert np.prod(list(plan.mesh.values())) == len(plan.device_order)


def test_plans_of_baselines_are_written_when_asked_for_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoshard.planning.explain import write_plan

    written = []
    original = write_plan.Writer.write

    def write(self: write_plan.Writer, each: Any, *more: Any) -> Any:
        written.append(each.name)
        return original(self, each, *more)

    monkeypatch.setattr(write_plan.Writer, "write", write)
    result = make_plan(made.program("mlp"), Options(topology="cpu:8", mesh="data=4,model=2"))
    assert written == ["plan"] and list(result.baseline_plans) == list(result.plan.baselines)
    name, prediction = next(iter(result.plan.baselines.items()))
    assert result.baseline_plans[name] is result.baseline_plans[name]
    assert result.baseline_plans[name].prediction == prediction
    assert len(written) == 2


def test_losses_over_a_vocabulary_in_float32_are_planned_for_tpus() -> None:
    import torch
    import transformers

    ids = torch.zeros(4, 32, dtype=torch.long)
    pair = torch.nn.Sequential(torch.nn.Embedding(512, 64), torch.nn.Linear(64, 512, bias=False))
    fields = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    config = transformers.LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, **fields)
    llama = transformers.LlamaForCausalLM(config)
    programs = [
        from_torch(
            pair,
            ids,
            train=True,
            loss=lambda out, labels: torch.nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten()),
            targets=ids,
        ),
        from_torch(llama, (), kwargs={"input_ids": ids, "labels": ids}, train=True, loss=lambda out: out["loss"]),
    ]
    for program in programs:
        plan = autoshard.plan(program, topology="v5e:2x4", mesh={"data": 8})
        assert plan.prediction.fits and list(plan.arguments) == [a.name for a in program.arguments]
