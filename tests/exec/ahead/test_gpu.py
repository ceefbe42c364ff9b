"""The GPU compiler as referee, without a GPU: its description of the chip, and its verdicts on plans."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost import Collectives, Database, Topology, compiler_version, load_chip
from autoshard.errors import UserError
from autoshard.exec import CompileReport, Verdict, compile_lines, compile_plan, refine
from autoshard.exec.ahead import compile_targets as room
from autoshard.exec.ahead.compile_targets import gpu_target
from autoshard.exec.hlo.compiled_collectives import plan_mesh, read_collectives
from autoshard.exec.hlo.hlo_text import parse_hlo
from autoshard.exec.hlo.instruction_work import Reader
from autoshard.planning import Options, make_plan, read_asked
from autoshard.planning.price.analysed_program import analyse_program, reprice
from autoshard.planning.price.evaluate import evaluate
from autoshard.program import Program, config_program, trace
from autoshard.report.terminal.explanation_report import step_limits


NEEDS_PLUGIN = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="JAX's CUDA plugin is not installed"
)
FIELDS = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "bos_token_id": None,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048, "eos_token_id": None,
}  # fmt: skip


def llama(batch: int = 16) -> Program:
    return config_program(FIELDS, train=True, batch=batch, seq=512, attention="cudnn")


def compiled(program: Program, topology: str, mesh: str) -> CompileReport:
    return compile_plan(program, make_plan(program, Options(topology=topology, mesh=mesh)).plan, 300.0)


@NEEDS_PLUGIN
@pytest.mark.parametrize(
    ("topology", "mesh"),
    [("h100:8", "data=4,model=2"), pytest.param("a100:8*2", "data=16", marks=pytest.mark.full)],
)
def test_a_step_is_compiled_as_planned_with_no_gpu(topology: str, mesh: str) -> None:
    found = compiled(llama(), topology, mesh)
    assert found.verdict is Verdict.FITS and found.peak_compiled is not None and found.hlo
    assert found.peak_predicted == pytest.approx(found.peak_compiled, rel=0.15)
    assert found.wire_compiled.keys() >= {axis for axis, size in found.wire_predicted.items() if size}
    for axis, size in found.wire_predicted.items():
        assert found.wire_compiled[axis] == pytest.approx(size, rel=0.05)
    # cuDNN's attention and Triton's matmuls are counted.
    assert found.flops is not None and found.flops.ratio == pytest.approx(1.0, abs=0.03)
    assert found.estimate is not None and found.estimate.unknown_trips == 0


@NEEDS_PLUGIN
@pytest.mark.full
def test_a_plan_for_a_framework_that_gathers_is_compiled_as_planned() -> None:
    """Send what is foreseen; without pins, hidden values are split like weights, and 40 times as much is sent."""
    program = config_program(FIELDS, train=True, batch=16, seq=512, remat="dots", microbatches=2)
    plan = make_plan(program, Options(topology="h100:8", mesh="data=8", form="fsdp2")).plan
    found = compile_plan(program, plan, 300.0)
    assert found.wire_predicted["data"] > 0
    assert found.wire_compiled == pytest.approx(found.wire_predicted, rel=0.05)


@NEEDS_PLUGIN
@pytest.mark.parametrize("result", [("a", "b"), pytest.param((("a", "b"), None), marks=pytest.mark.full)])
def test_a_sum_is_scattered_along_one_dim_only(result: tuple[object, object]) -> None:
    program = trace(lambda x, y: x.T @ y, (jax.ShapeDtypeStruct((16384, 2048), jnp.bfloat16),) * 2, name="gradient")
    asked = read_asked({"x": (("a", "b"), None), "y": (("a", "b"), None), "*result*": result})
    plan = make_plan(program, Options(topology="h100:8", mesh="a=2,b=4", asked=asked)).plan
    found = compile_plan(program, plan, 300.0)
    (summed,) = plan.prediction.collectives
    assert summed.kind == ("all-reduce" if result[1] else "reduce-scatter")
    assert sum(found.wire_compiled.values()) == pytest.approx(summed.wire_bytes, rel=0.01)


def small_layers(stacked: bool) -> Program:
    """Trace a training step of layers with several small weights each, in a stack or one after the other."""
    layers, width = 4, 512
    shapes = {"scale": (width,), "down": (width, 64), "up": (64, width), "bias": (width,)}

    def layer(x: jax.Array, own: dict[str, jax.Array]) -> jax.Array:
        return x + jnp.tanh((x * own["scale"]) @ own["down"]) @ own["up"] + own["bias"]

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        if stacked:
            x, _ = jax.lax.scan(lambda x, own: (layer(x, own), None), x, weights)
        else:
            for own in weights:
                x = layer(x, own)
        return jnp.square(x.astype(jnp.float32)).mean()

    def step(weights: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    def arrays(*leading: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: jax.ShapeDtypeStruct((*leading, *shape), jnp.bfloat16) for name, shape in shapes.items()}

    weights = arrays(layers) if stacked else [arrays() for _ in range(layers)]
    return trace(
        step,
        (weights, jax.ShapeDtypeStruct((65536, width), jnp.bfloat16)),
        donate_argnums=0,
        training=True,
        name="small",
    )


@NEEDS_PLUGIN
@pytest.mark.parametrize(
    ("stacked", "form"),
    [(True, "data_parallel"), (False, "fsdp")]
    + [pytest.param(*each, marks=pytest.mark.full) for each in ((False, "data_parallel"), (True, "fsdp"))],
)
def test_small_collectives_of_a_block_take_as_long_as_those_that_the_compiler_makes_of_them(
    stacked: bool, form: str
) -> None:
    program = small_layers(stacked)
    plan = make_plan(program, Options(topology="h100:8*8", mesh="data=64")).baseline_plans[form]
    found = compile_plan(program, plan, 300.0)
    assert found.hlo
    mesh = plan_mesh(plan)
    prices = Collectives(mesh)
    compiled_s = sum(
        each.count * float(prices.time(each.kind, each.axes, each.size_bytes))
        for each in read_collectives(found.hlo, mesh)
        if each.size_bytes > 64  # the loss, of one number, is no part of the step
    )
    assert sum(each.seconds for each in plan.prediction.collectives) == pytest.approx(compiled_s, rel=0.35)


def layers(number: int, width: int, rows: int, stacked: bool) -> Program:
    """Trace a training step of square layers, in a stack of pairs or one after the other."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        if stacked:
            x, _ = jax.lax.scan(lambda x, pair: (jnp.tanh(jnp.tanh(x @ pair[0]) @ pair[1]), None), x, weights)
        else:
            for weight in weights:
                x = jnp.tanh(x @ weight)
        return jnp.square(x.astype(jnp.float32)).mean()

    def step(weights: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    weights = (array(number, width, width),) * 2 if stacked else [array(width, width)] * number
    return trace(step, (weights, array(rows, width)), donate_argnums=0, training=True, name="layers")


@NEEDS_PLUGIN
@pytest.mark.parametrize(
    ("program", "topology", "mesh"),
    [((4, 1024, 65536, False), "h100:8", "data=8"), ((8, 4096, 262144, True), "h100:8*8", "data=64")]
    + [
        pytest.param(*each, marks=pytest.mark.full)
        for each in (
            ((8, 4096, 65536, True), "h100:8*8", "data=64"),
            ((8, 4096, 131072, True), "h100:8*8", "a=8,b=8"),
            ((8, 4096, 32768, True), "h100:8", "data=8"),
        )
    ],
)
def test_communication_is_exposed_where_the_schedule_waits_for_it(
    program: tuple[int, int, int, bool], topology: str, mesh: str
) -> None:
    step = layers(*program)
    plan = make_plan(step, Options(topology=topology, mesh=mesh)).baseline_plans["fsdp"]
    schedule = compile_plan(step, plan, 300.0).estimate
    assert schedule is not None
    assert plan.prediction.step_time_s == pytest.approx(schedule.step_time_s, rel=0.13)
    assert plan.prediction.exposed_comm_s == pytest.approx(schedule.exposed_comm_s, abs=0.1 * schedule.step_time_s)
    assert plan.timeline is not None
    assert plan.timeline.end_s == pytest.approx(plan.prediction.step_time_s, rel=1e-6)
    if topology == "h100:8*8":
        assert any("compute covers in part" in line for line in step_limits(plan))


def test_a_framework_that_runs_the_step_op_by_op_has_collectives_in_flight_together() -> None:
    program = config_program(FIELDS, train=True, batch=64, seq=512)
    plan = make_plan(program, Options(topology="h100:8*8", mesh="data=64", form="fsdp2")).plan
    model, choices = reprice(plan, program, analyse_program(program, Topology.parse(plan.topology)))
    assert plan.origin.eager and model.eager and not model.one_in_flight
    compiled = evaluate(dataclasses.replace(model, eager=False), choices)
    assert compiled.step_time_s > plan.prediction.step_time_s


@NEEDS_PLUGIN
@pytest.mark.full
def test_plans_for_gpus_are_judged_by_their_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_DATA_DIR", str(tmp_path))

    def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.square(jnp.tanh(x @ weights[0]) @ weights[1]).sum()

    shapes = (512, 2048), (2048, 512), (1024, 512)
    arrays = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    program = trace(lambda w, v, x: jax.grad(loss)((w, v), x), arrays, name="mlp")
    result = refine(program, topology="h100:8", mesh="data=4,model=2", plans=2, rounds=1)
    assert result.judge == "compile" and len(result.judged) == 2
    for each in result.judged:
        assert each.seen.verdict == Verdict.FITS.value and not each.seen.failed
        assert each.seen.seconds
        # larger than its arguments
        assert each.seen.peak_bytes and each.seen.peak_bytes > sum(2 * m * n for m, n in shapes) // 8
    place = Topology.parse("h100:8")
    kept = Database(tmp_path).read(place.name, compiler_version(place))
    assert [one.judge for one in kept] == ["compile"] * 2 and "jax-cuda12-pjrt" in kept[0].compiler


@NEEDS_PLUGIN
def test_what_does_not_fit_is_reported_though_the_compiler_knows_no_limit() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.fft.fft(x.astype(jnp.complex64)).real @ x.T

    program = trace(f, (jax.ShapeDtypeStruct((131072, 65536), jnp.float32),), name="wide")
    plan = make_plan(program, Options(topology="h200:1", mesh="data=1", memory_limit=4000 << 30)).plan
    compilation = compile_plan(program, plan, 300.0)
    limit = Topology.parse("h200:1").usable_bytes
    assert compilation.verdict is Verdict.DOES_NOT_FIT and compilation.available_bytes == limit
    assert compilation.peak_compiled is not None and compilation.over_bytes == compilation.peak_compiled - limit > 0
    assert "does not fit, by" in compile_lines(compilation)[0]


def test_every_gpu_is_described_by_its_own_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: object())
    for name in ("a100", "h100", "h200", "b200", "gb200"):
        chip = load_chip(name)
        target = gpu_target(Topology.make(chip, chip.small_shapes[-1]))
        text = target.options["target_config"]
        figures = dict(line.split(": ") for line in text.splitlines() if line.startswith("  ") and "{" not in line)
        # Drivers report up to 7 % more or less than the 80 or 141 GB of the data sheets.
        assert int(figures["  device_memory_size"]) == pytest.approx(chip.hbm_bytes, rel=0.08)
        assert int(figures["  memory_bandwidth"]) == pytest.approx(chip.memory_bytes_per_s, rel=0.05)
    islands = gpu_target(Topology.parse("h100:8*4"))
    assert islands.options["topology"] == "1x4x8" and islands.environment["JAX_PLATFORMS"] == "cpu"


def test_without_the_plugin_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs JAX's CUDA plugin.*pip install 'autoshard\[cuda\]'"):
        gpu_target(Topology.parse("h100:8"))


CUDNN = """HloModule attention, is_scheduled=true

ENTRY %main (q: bf16[2,8,256,64], k: bf16[2,4,256,64]) -> bf16[2,8,256,64] {
  %q = bf16[2,8,256,64]{3,2,1,0} parameter(0)
  %k = bf16[2,4,256,64]{3,2,1,0} parameter(1)
  %call = (bf16[2,8,256,64]{3,2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmaxWAY", \
backend_config={"cudnn_fmha_backend_config": {"mask_type": "MASK"}}
  ROOT %out = bf16[2,8,256,64]{3,2,1,0} get-tuple-element(%call), index=0
}
"""


@pytest.mark.parametrize(
    ("way", "mask", "matmuls"), [("", "NO_MASK", 2), ("", "CAUSAL", 1), ("Backward", "PADDING_CAUSAL", 2.5)]
)
def test_attention_of_cudnn_is_read_from_its_call(way: str, mask: str, matmuls: float) -> None:
    module = parse_hlo(CUDNN.replace("WAY", way).replace('MASK"', f'{mask}"'))
    entry = module.computations[module.entry]
    work = Reader(module).work(entry, entry.by_name["call"])
    assert work.kernel is not None and work.kernel.head == 64
    assert work.flops == matmuls * 2 * 2 * 8 * 256 * 256 * 64


def test_attention_of_cudnn_counts_positions_where_its_first_matmul_has_them() -> None:
    text = CUDNN.replace("2,8,256,64", "2,256,8,64").replace("2,4,256,64", "2,256,4,64").replace("WAY", "")
    dims = '"bmm1_dot_dimension_numbers": {"lhs_batch_dimensions": ["0", "2"], "rhs_batch_dimensions": ["0", "2"]}'
    module = parse_hlo(text.replace('"mask_type": "MASK"', dims))
    entry = module.computations[module.entry]
    assert Reader(module).work(entry, entry.by_name["call"]).flops == 2 * 2 * 2 * 8 * 256 * 256 * 64


SOLVE = """HloModule solve, is_scheduled=true

ENTRY %main (a: f32[3,64,64], b: f32[3,64,16]) -> f32[3,64,16] {
  %a = f32[3,64,64]{2,1,0} parameter(0)
  %b = f32[3,64,16]{2,1,0} parameter(1)
  %call = (f32[3,64,16]{2,1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$triangularSolve"
  ROOT %out = f32[3,64,16]{2,1,0} get-tuple-element(%call), index=0
}
"""


def test_a_triangular_solve_of_cublas_is_a_product_of_its_matrices() -> None:
    module = parse_hlo(SOLVE)
    entry = module.computations[module.entry]
    assert Reader(module).work(entry, entry.by_name["call"]).flops == 2 * 3 * 64 * 64 * 16


CUBLAS = """HloModule products, is_scheduled=true

ENTRY %main (a: bf16[4,32,64], b: bf16[4,64,16]) -> bf16[4,32,16] {
  %a = bf16[4,32,64]{2,1,0} parameter(0)
  %b = bf16[4,64,16]{2,1,0} parameter(1)
  %call = (bf16[4,32,16]{2,1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],\
"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}
  ROOT %out = bf16[4,32,16]{2,1,0} get-tuple-element(%call), index=0
}
"""
CONVOLUTIONS = """HloModule convolutions, is_scheduled=true

ENTRY %main (x: f32[2,8,10,10], k: f32[16,8,3,3], y: f32[2,16,8,8]) -> f32[2,16,8,8] {
  %x = f32[2,8,10,10]{3,2,1,0} parameter(0)
  %k = f32[16,8,3,3]{3,2,1,0} parameter(1)
  %y = f32[2,16,8,8]{3,2,1,0} parameter(2)
  %one = (f32[2,16,8,8]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=3x3}, dim_labels=bf01_oi01->bf01, \
custom_call_target="__cudnn$convForward"
  %two = (f32[2,8,10,10]{3,2,1,0}, u8[0]{0}) custom-call(%y, %k), window={size=3x3}, dim_labels=bf01_oi01->bf01, \
custom_call_target="__cudnn$convBackwardInput"
  %three = (f32[16,8,3,3]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), window={size=3x3}, dim_labels=bf01_oi01->bf01, \
custom_call_target="__cudnn$convBackwardFilter"
  ROOT %out = f32[2,16,8,8]{3,2,1,0} get-tuple-element(%one), index=0
}
"""


def test_matmuls_and_convolutions_of_libraries_are_counted() -> None:
    module = parse_hlo(CUBLAS)
    entry = module.computations[module.entry]
    (found,) = Reader(module).work(entry, entry.by_name["call"]).matmuls
    assert (found.m, found.n, found.k, found.flops) == (32, 16, 64, 2.0 * 4 * 32 * 16 * 64)
    module = parse_hlo(CONVOLUTIONS)
    entry = module.computations[module.entry]
    works = [Reader(module).work(entry, entry.by_name[name]).flops for name in ("one", "two", "three")]
    assert works == [2.0 * 2 * 8 * 8 * 16 * 8 * 9] * 3
