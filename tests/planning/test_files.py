"""Programs in files get the plan of the traced program, in every file format and without argument names."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.exec import measure
from autoshard.planning import Options, Plan, make_plan
from autoshard.program import Program, open_source, trace
from tests.planning import programs as made


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def momentum() -> Program:
    """Trace a convolution, a norm and two matmuls under SGD with momentum, large enough for splitting to pay."""

    def loss(params: Any, batch: Any) -> Any:
        x = jax.lax.conv_general_dilated(
            batch["x"], params["conv"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x * params["scale"]).reshape(len(x), -1)
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - batch["y"]) ** 2)

    def step(params: Any, moments: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, value

    params = {"conv": f32(3, 3, 4, 8), "scale": f32(8), "up": f32(512, 512), "down": f32(512, 64)}
    batch = {"x": f32(64, 16, 16, 4), "y": f32(64, 64)}
    return trace(
        step, (params, params, batch), name="step", donate_argnums=(0, 1), roles={"moments": "optimizer_state"}
    )


def forward() -> Program:
    def fn(params: Any, ids: Any) -> Any:
        x = params["table"][ids] + params["places"]
        return jnp.tanh(x @ params["up"]) @ params["down"]

    params = {"table": f32(512, 128), "places": f32(16, 128), "up": f32(128, 512), "down": f32(512, 128)}
    return trace(fn, (params, jax.ShapeDtypeStruct((64, 16), jnp.int32)), name="forward")


SOURCES: dict[str, Callable[[], Program]] = {
    "momentum": momentum,
    "forward": forward,
    "decoding": made.PROGRAMS["decoding"],
}


@functools.cache
def program(name: str) -> Program:
    return SOURCES[name]()


def plan(source: Program) -> Plan:
    return make_plan(source, Options(topology="v5e:2x4", mesh={"data": 4, "model": 2})).plan


@functools.cache
def traced_plan(name: str) -> Plan:
    return plan(program(name))


def lowered(source: Program, donate: bool = True) -> Any:
    numbers = source.donate_argnums if donate else ()
    return jax.jit(source.fn, donate_argnums=numbers, keep_unused=True).lower(*source.args)


def named_text(source: Program, path: Path) -> None:
    path.write_text(lowered(source).as_text(debug_info=True))


def bare_text(source: Program, path: Path) -> None:
    path.write_text(lowered(source).as_text())


def undonated_text(source: Program, path: Path) -> None:
    path.write_text(lowered(source, donate=False).as_text())


def bytecode(source: Program, path: Path) -> None:
    with path.open("wb") as file:
        lowered(source).compiler_ir("stablehlo").operation.write_bytecode(file)


def artifact(source: Program, path: Path) -> None:
    jitted = jax.jit(source.fn, donate_argnums=source.donate_argnums)
    path.write_bytes(jax.export.export(jitted)(*source.args).serialize())


def hlo_proto(source: Program, path: Path) -> None:
    path.write_bytes(lowered(source).compiler_ir("hlo").as_serialized_hlo_module_proto())


def hlo_text(source: Program, path: Path) -> None:
    path.write_text(lowered(source).compiler_ir("hlo").as_hlo_text())


WRITERS = [named_text, bare_text, bytecode, artifact, hlo_text]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "write"),
    [(name, write) for name in SOURCES for write in WRITERS] + [("momentum", undonated_text), ("momentum", hlo_proto)],
)
def test_the_plan_is_that_of_the_traced_program(name: str, write: Callable[[Program, Path], None], tmp_path: Path):
    path = tmp_path / ("step.pb" if write is hlo_proto else "step.mlir")
    write(program(name), path)
    read, wanted = open_source(str(path)), program(name)
    assert [a.role for a in read.arguments] == [a.role for a in wanted.arguments]
    assert [a.result for a in read.arguments] == [a.result for a in wanted.arguments]
    ours, theirs = plan(read), traced_plan(name)
    tolerance = 0.02 if write in (hlo_text, hlo_proto) else 1e-9  # XLA's own form of the same program
    assert ours.prediction.step_time_s == pytest.approx(theirs.prediction.step_time_s, rel=tolerance)
    assert set(ours.baselines) == set(theirs.baselines)


@pytest.mark.parametrize("write", [bare_text, hlo_text])
def test_a_file_is_run_and_checked(write: Callable[[Program, Path], None], tmp_path: Path):
    path = tmp_path / "step.mlir"
    write(program("momentum"), path)
    read = open_source(str(path))
    chosen = make_plan(read, Options(topology="cpu:8", mesh={"data": 4, "model": 2})).plan
    measurement = measure(read, chosen, steps=1, warmup=0, check=True)
    assert measurement.check is not None and measurement.check.passed, measurement.check.worst
