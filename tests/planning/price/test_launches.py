"""Launch cost of fusions, in addition to the bytes that they move."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost import Topology, make_mesh
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.space.decision_model import Model
from autoshard.program import trace


TRIPS = 5


def model_of(topology: str) -> Model:
    """Build a model of a reduction before a loop and one in each trip. The loop's counter runs on the scalar core."""

    def run(x: Any, rows: Any) -> Any:
        def body(carried: Any, row: Any) -> Any:
            return carried * 0.5 + jnp.sin(row), None

        return jax.lax.scan(body, jnp.cos(x), rows)[0]

    given = jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((TRIPS, 64, 128), jnp.float32)
    program, parsed = trace(run, given), Topology.parse(topology)
    mesh = make_mesh(parsed, {"data": parsed.num_devices})
    return build_model(program, analyse_program(program, parsed.backend), mesh, parsed.usable_bytes)


@pytest.mark.parametrize("topology", ["v5e:1x1", "h100:1"])
def test_every_fusion_is_started_in_every_trip(topology: str):
    model = model_of(topology)
    (loop,) = model.graph.loops
    counts = {-1: 0.0, loop.id: 0.0}
    for node in model.nodes:
        for block, count in node.launches.items():
            counts[block] += count
    assert counts == {-1: 1.0, loop.id: TRIPS}
    node = next(n for n in model.nodes if n.launches.get(loop.id))
    overhead = model.compute.calibration.op_overhead_s
    bare = build_again(model, overhead=0.0)
    assert float(node.time[loop.id, "compute"][0] - bare) == pytest.approx(TRIPS * overhead)


def build_again(model: Model, overhead: float) -> float:
    """Return the seconds of the loop's compute with another launch overhead."""
    figures = dataclasses.replace(model.compute.calibration, op_overhead_s=overhead)
    reading = analyse_program(model.program, model.mesh.topology.backend)
    again = build_model(model.program, reading, model.mesh, 1 << 40, figures)
    (loop,) = again.graph.loops
    return sum(float(n.time[loop.id, "compute"][0]) for n in again.nodes if (loop.id, "compute") in n.time)


def test_threads_of_a_cpu_start_at_once():
    assert not any(node.launches for node in model_of("cpu:1").nodes)
