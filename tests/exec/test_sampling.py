"""Tokens sampled from a split vocabulary: as on one device, with the predicted bytes, and without whole logits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autoshard
from autoshard import sample_tokens
from autoshard.exec import plan_mesh, read_collectives, wire_by_axis
from autoshard.program import trace
from autoshard.program.config_files import read_config
from autoshard.program.hf.hf_program import from_config
from tests.exec.planned_programs import f32


WIDTH, VOCABULARY = 8, 65536
LIMIT = 1 << 20
"""Bytes in which three rows of logits fit once, and not twice."""
KEY = jax.random.key(3)

SAMPLERS: dict[str, Callable[[Any, Any], Any]] = {
    "plain argmax": lambda logits, key: jnp.argmax(logits, axis=-1),
    "greedy": lambda logits, key: sample_tokens(logits, temperature=0),
    "categorical": lambda logits, key: sample_tokens(logits, key, temperature=0.8),
    "top-k": lambda logits, key: sample_tokens(logits, key, top_k=50),
    "top-k and top-p": lambda logits, key: sample_tokens(logits, key, top_k=50, top_p=0.9),
    "top-p": lambda logits, key: sample_tokens(logits, key, top_p=0.9),
}


def given(rows: int) -> tuple[Any, Any, Any]:
    """Return states whose logits have many ties, a head, and a key."""
    rng = np.random.default_rng(1)
    hidden = rng.integers(-1, 2, size=(rows, WIDTH)).astype(np.float32)
    head = rng.integers(-1, 2, size=(WIDTH, VOCABULARY)).astype(np.float32) / 2
    return hidden, head, KEY


@pytest.mark.few(6)
@pytest.mark.parametrize("mesh", ["model=8", "data=2,model=4"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_planned_sampler_equals_one_device_and_sends_the_predicted_bytes(name: str, mesh: str):
    def step(hidden: Any, head: Any, key: Any) -> Any:
        return SAMPLERS[name](hidden @ head, key)

    rows = 3  # no axis splits it, so that the vocabulary stays split
    args = (f32(rows, WIDTH), f32(WIDTH, VOCABULARY), jax.eval_shape(lambda: KEY))
    pins = {"head": "-,model" if mesh == "model=8" else "-,data+model"}
    options = {"topology": "cpu:8", "mesh": mesh, "pins": pins, "memory_limit": LIMIT}
    plan = autoshard.plan(trace(step, args, name=name), **options)
    compiled = plan.lower(step, *args).compile()
    wire = wire_by_axis(read_collectives(compiled.as_text(), plan_mesh(plan)))
    assert set(wire) == set(plan.prediction.wire_bytes)
    for axis, size in plan.prediction.wire_bytes.items():
        assert wire[axis] == pytest.approx(size, rel=0.05)
    # The best of every shard or fewer bytes; whole logits would be rows * VOCABULARY * 4 * 7 / 8.
    assert sum(wire.values()) <= 2 * 4 * rows * 50 * 7 < rows * VOCABULARY * 4 * 7 / 8 / 4
    values = given(rows)
    found = compiled(*jax.device_put(values, plan.in_shardings))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(jax.jit(step)(*values)))


def test_the_best_of_split_rows_are_not_exchanged_as_whole_logits():
    """Split the rows of the result, too: each device takes its rows of the combined best, not of all logits."""
    step, args = (lambda hidden, head: jnp.argmax(hidden @ head, axis=-1)), (f32(16, WIDTH), f32(WIDTH, VOCABULARY))
    pins = {"head": "-,model", "result": "model"}
    plan = autoshard.plan(trace(step, args, name="argmax"), topology="cpu:8", mesh="model=8", pins=pins)
    compiled = plan.lower(step, *args).compile()
    wire = wire_by_axis(read_collectives(compiled.as_text(), plan_mesh(plan)))
    assert wire == plan.prediction.wire_bytes == {"model": 2 * 4 * 16 * 7}


@pytest.mark.few(1)
@pytest.mark.parametrize("sample", ["greedy", "top_k=20,top_p=0.9", "top_p=0.9"])
def test_a_planned_decode_step_returns_the_tokens_of_one_device(sample: str):
    fields = read_config("llama-tiny")[1] | {"vocab_size": VOCABULARY}
    program = from_config(fields, batch=3, seq=16, serve="decode", dtype="fp32", sample=sample)
    pins = {"lm_head.weight": "model,-"}
    plan = autoshard.plan(program, topology="cpu:8", mesh="model=8", pins=pins)
    compiled = plan.lower(program.fn, *program.args).compile()
    wire = wire_by_axis(read_collectives(compiled.as_text(), plan_mesh(plan)))
    assert 0 < sum(wire.values()) < 3 * VOCABULARY * 4 * 7 / 8 / 2, "whole logits are not exchanged"
    for axis, size in plan.prediction.wire_bytes.items():
        assert wire.get(axis, 0) == pytest.approx(size, rel=0.05)
    values = program.make_args(0)
    placed = jax.device_put(values, jax.tree.unflatten(jax.tree.structure(values), jax.tree.leaves(plan.in_shardings)))
    wanted = jax.jit(program.fn)(*values)[1]
    np.testing.assert_array_equal(np.asarray(compiled(*placed)[1]), np.asarray(wanted))


@pytest.mark.parametrize("topology", ["v5e:2x4", pytest.param("h100:8", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["plain top-k", "top-k"])
def test_compilers_for_chips_send_the_best_of_each_shard(name: str, topology: str):
    def step(hidden: Any, head: Any, key: Any) -> Any:
        logits = (hidden @ head).astype(jnp.float32)
        return jax.lax.top_k(logits, 50) if name == "plain top-k" else sample_tokens(logits, key, top_k=50)

    rows, best = 4, 50
    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 8), (8, 1 << 24)))
    program = trace(step, (*shapes, jax.eval_shape(lambda: KEY)), name=name)
    pins = {"head": "-,model", "hidden": "-,-"}
    plan = autoshard.plan(program, topology=topology, mesh="model=8", pins=pins)
    report = autoshard.compile(program, plan, quick=True)
    assert report.wire_compiled == plan.prediction.wire_bytes == {"model": 2 * 4 * rows * best * 7}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_plain_jit_on_split_logits_equals_one_device(name: str):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    hidden, head, key = given(4)
    logits = hidden @ head
    split = jax.device_put(logits, NamedSharding(mesh, PartitionSpec("data", "model")))
    step = jax.jit(SAMPLERS[name])
    np.testing.assert_array_equal(np.asarray(step(split, key)), np.asarray(step(logits, key)))
