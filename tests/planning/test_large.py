"""Planning time grows linearly with the program, not quadratically, counted in executed lines of our code."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.cost import Topology, load_calibration, make_mesh
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.price.evaluate import evaluate
from autoshard.program import Program, trace


PACKAGE = str(Path(autoshard.__file__).parent)
FEW, MANY = 8, 32


def step_of(depth: int) -> Program:
    """Trace a step of an unrolled network of `depth` layers with weights, biases and momenta."""
    shape = jax.ShapeDtypeStruct
    params = [{"w": shape((128, 128), "float32"), "b": shape((128,), "float32")} for _ in range(depth)]

    def loss(params: Any, x: Any) -> Any:
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean(x * x)

    def step(params: Any, momenta: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(params, x)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momenta), momenta

    return trace(step, (params, params, shape((256, 128), "float32")), name="deep", training=True)


def lines_in(work: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """Return the result of `work`, and the number of lines that each room of the package ran for it."""
    ran: Counter[str] = Counter()

    def inside(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            ran[frame.f_code.co_filename[len(PACKAGE) :].split("/")[1]] += 1
        return inside

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return inside if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        return work(), ran
    finally:
        sys.settrace(before)


@pytest.mark.full
def test_work_grows_with_a_program_and_not_with_its_square() -> None:
    topology = Topology.parse("v5p:2x2x2")
    mesh = make_mesh(topology, {"data": 4, "model": 2})
    limit, figures = topology.usable_bytes, load_calibration(topology.chip)
    counted: dict[str, list[int]] = {}

    def count(phase: str, work: Callable[[], Any]) -> Any:
        made, ran = lines_in(work)
        counted.setdefault(phase, []).append(ran.total())
        return made

    for depth in (FEW, MANY):
        program = count("trace", lambda depth=depth: step_of(depth))
        reading = count("read", lambda program=program: analyse_program(program, "tpu"))
        model = count("price", lambda p=program, r=reading: build_model(p, r, mesh, limit, figures))
        count("evaluate", lambda model=model: evaluate(model, np.zeros(len(model.nodes), dtype=np.int64)))
    for phase, (few, many) in counted.items():
        assert few > 500 and many < 1.03 * few * MANY / FEW, (phase, few, many)
