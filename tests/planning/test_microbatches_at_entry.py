"""Batches that a step reshapes into microbatches under a scan: split where they enter, and exchanged once."""

import functools
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.cost import HOST, Topology
from autoshard.planning import Plan
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.price.step_ledger import itemise
from autoshard.planning.record.plan_parts import WAITS_FOR_HOST
from autoshard.program import Program
from tests.planning.programs import model_of


WIDTH = 4096
"""Values of a row; the batch below has 128 MiB, of which no device should hold copies."""


def accumulated(count: int) -> Any:
    """Return a step of gradient descent whose batch is reshaped from (B) to (count, B / count) and scanned."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - y) ** 2)

    def step(params: Any, x: Any, y: Any) -> Any:
        def body(sums: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, sums, jax.grad(loss)(params, *part)), None

        parts = [v.reshape(count, -1, v.shape[1]) for v in (x, y)]
        grads, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), parts)
        return jax.tree.map(lambda p, g: p - 0.1 * g / count, params, grads)

    return step


def traced(count: int, rows: int = 8192) -> Program:
    def like(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    args = ({"up": like(WIDTH, 512), "down": like(512, 8)}, like(rows, WIDTH), like(rows, 8))
    return autoshard.trace(accumulated(count), args)


@functools.cache
def planned(count: int, rows: int = 8192, pins: tuple[tuple[str, str], ...] = ()) -> Plan:
    """Plan such a step on eight chips in one axis."""
    return autoshard.plan(traced(count, rows), topology="v5e:2x4", mesh="d=8", pins=dict(pins))


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_no_device_holds_the_global_batch(count: int) -> None:
    plan = planned(count)
    held = 8192 * WIDTH * 4 // 8
    assert plan.arguments["x"].axes == ("d",)
    # The batch, and the copy of it in microbatches that the exchange makes.
    assert held <= plan.prediction.memory["batch"] < 1.1 * held
    assert plan.prediction.peak_bytes < 4 * held
    assert {"data_parallel", "fsdp"} <= set(plan.baselines)


@pytest.mark.parametrize(("count", "kinds"), [(8, 1), (16, 1), (4, 2), (2, 2)])
def test_the_batch_is_exchanged_once_before_the_loop(count: int, kinds: int) -> None:
    plan = planned(count, pins=(("x", "d,None"),))
    assert plan.words[0].startswith("batch over d")
    (exchange,) = (c for c in plan.prediction.collectives if c.kind == "all-to-all" and c.cause == "x")
    # Each device sends seven eighths of its eighth, once. Microbatches fewer than devices need a second exchange.
    assert exchange.count == 1
    assert exchange.wire_bytes == kinds * 8192 * WIDTH * 4 // 8 * 7 // 8


def test_copies_of_a_batch_take_the_time_of_their_feeding() -> None:
    whole, split = planned(8, pins=(("x", "None,None"),)), planned(8)
    chip = Topology.parse("v5e:2x4").chip
    copies_s = 8192 * WIDTH * 4 * 7 / 8 / (chip.pcie_bytes_per_s_per_chip / chip.devices_per_chip)
    # Little compute outside of the loop hides it.
    assert whole.prediction.step_time_s > split.prediction.step_time_s
    assert whole.prediction.exposed_comm_s == pytest.approx(copies_s, rel=0.1)
    assert whole.timeline is not None and WAITS_FOR_HOST in {span.name for span in whole.timeline.spans}


def test_the_ledger_has_the_feed() -> None:
    model = model_of(traced(8), "v5e:2x4", "d=8")
    choices = np.zeros(len(model.nodes), dtype=np.int64)
    sums: dict[Any, float] = defaultdict(float)
    for row in itemise(model, choices).rows:
        for channel, seconds in row.channels():
            sums[channel] += seconds
    wanted = {channel: seconds for channel, seconds in evaluate(model, choices).channels.items() if seconds}
    assert (-1, HOST) in wanted
    assert {channel: seconds for channel, seconds in sums.items() if seconds} == pytest.approx(wanted)


def test_a_count_that_does_not_fit_the_devices_gathers_rows_or_splits_columns() -> None:
    plan = planned(3, rows=6144)
    assert plan.arguments["x"].axes == ("d",)
    assert plan.prediction.memory["batch"] < 1.1 * 6144 * WIDTH * 4 / 8
    pinned = planned(3, rows=6144, pins=(("x", "d,None"),))
    assert any(c.kind == "all-gather" and c.cause == "x" for c in pinned.prediction.collectives)


@pytest.mark.parametrize("count", [2, 4, 8, 3])
def test_results_are_those_of_one_device(count: int) -> None:
    keys = jax.random.split(jax.random.key(count), 4)
    up, down, x, y = (
        jax.random.normal(k, shape) for k, shape in zip(keys, [(12, 16), (16, 8), (48, 12), (48, 8)], strict=True)
    )
    step, args = accumulated(count), ({"up": up, "down": down}, x, y)
    plan = autoshard.plan(
        autoshard.trace(step, args), topology="cpu:8", mesh="d=8", pins={"x": "d,None", "y": "d,None"}
    )
    result = plan.jit(step)(*args)
    for want, got in zip(*(jax.tree.leaves(each) for each in (jax.jit(step)(*args), result)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
