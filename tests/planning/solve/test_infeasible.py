"""Advice of a refusal: it names changes that help, and none that the program or the plan has already."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost import Topology, make_mesh
from autoshard.errors import InfeasibleError
from autoshard.planning import Options, make_plan, read_asked
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.solve import infeasible
from autoshard.planning.solve.infeasible import _advice
from autoshard.planning.solve.mesh_solve import Terms
from autoshard.planning.space.decision_model import Model
from autoshard.program import Program, open_source, trace


def refusal(program: Program, limit: int, topology: str = "v5e:2x2", **asked: Any) -> str:
    """Return the advice of the error: the text after the last semicolon."""
    with pytest.raises(InfeasibleError) as caught:
        make_plan(program, Options(**asked, topology=topology, mesh="data=4", memory_limit=limit, time_limit=2))
    text = str(caught.value)
    assert text.endswith(" would help.")
    return text.rpartition("; ")[2]


def advice(kind: str, **options: Any) -> str:
    """Return the advice for a training step of a known model in which `kind` needs most of the memory."""
    program = open_source("hf:gpt2-tiny", train=True, batch=8, seq=16, **options)
    mesh = make_mesh(Topology.parse("v5e:2x2"), {"data": 4})
    model = build_model(program, analyse_program(program, "tpu"), mesh, 1 << 20)
    return _advice(model, kind, 1 << 20, False)


def step(batch: int, again: bool = False) -> Program:
    """Trace a step whose activations need most of the memory: 2 x 64 MiB, and a small weight."""

    def layers(w: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w)

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum((jax.checkpoint(layers) if again else layers)(w, x))

    def fn(params: Any, x: Any) -> Any:
        return params - jax.grad(loss)(params, x)

    args = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((batch, 65536, 256), jnp.float32)
    return trace(fn, args, name="step", training=True)


def test_a_smaller_batch_is_proposed_where_there_is_a_smaller_one() -> None:
    assert "a smaller batch" in refusal(step(4), 1 << 20)
    assert "a smaller batch" not in refusal(step(1), 1 << 20)


def test_recomputing_is_proposed_to_those_that_do_not() -> None:
    assert "recomputing activations in the backward pass" in refusal(step(4), 1 << 20)
    assert "recomputing" not in refusal(step(4, again=True), 1 << 20)


def test_flags_that_were_given_are_not_proposed() -> None:
    plain, full = advice("activations"), advice("activations", remat="full")
    assert "--remat full" in plain and "a smaller batch" in plain and "more devices" in plain
    assert "--remat" not in full and "more devices" in full


@pytest.mark.full
def test_state_and_parameters_in_fewer_bits() -> None:
    assert "--state-dtype bfloat16" in advice("optimizer_state")
    assert "--state-dtype" not in advice("optimizer_state", state_dtype="bfloat16")
    assert "--host optimizer" in advice("optimizer_state")
    assert "--host" not in advice("optimizer_state", host="optimizer")
    assert "--param-dtype bfloat16" in advice("parameters")
    assert "--param-dtype" not in advice("parameters", param_dtype="bfloat16")


def test_a_limit_below_the_chips_own_and_pins_can_be_given_up() -> None:
    said = refusal(step(4), 1 << 20, asked=read_asked({"params": "-,-"}))
    assert "fewer pins" in said and "a higher memory limit (a device has " in said
    assert "fewer pins" not in refusal(step(4), 1 << 20)


def test_the_least_is_no_more_than_a_baseline_needs_where_the_solver_finds_no_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leave the solver no time, as a large model may. The weights are nearly all bytes, and FSDP splits them."""

    def whole(model: Model, weights: object, terms: Terms) -> Any:
        unsplit = [np.flatnonzero((node.states < 0).all(axis=1))[-1] for node in model.nodes]
        return SimpleNamespace(choices=np.array(unsplit), solution=SimpleNamespace(gap=math.inf))

    def train(weights: Any, x: Any) -> Any:
        grads = jax.grad(lambda weights: jnp.sum(functools.reduce(lambda x, w: jnp.tanh(x @ w), weights, x)))(weights)
        return [w - g for w, g in zip(weights, grads, strict=True)]

    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 6
    program = trace(train, (weights, jax.ShapeDtypeStruct((8, 1024), jnp.float32)), donate_argnums=0, training=True)
    monkeypatch.setattr(infeasible, "solve_within", whole)
    with pytest.raises(InfeasibleError) as caught:
        make_plan(program, Options(topology="v5e:2x2", mesh="data=4", memory_limit=1 << 20, time_limit=2))
    least = float(str(caught.value).partition("the least found is ")[2].partition(" MiB")[0])
    assert 6 * 4 / 4 < least < 6 * 4, "MiB of weights alone, split over four devices and whole"


def test_a_program_without_ops_is_refused_in_a_sentence_too() -> None:
    identity = trace(lambda x: x, (jax.ShapeDtypeStruct((1024, 1024), jnp.float32),))
    assert "more devices" in refusal(identity, 1 << 10)


def attention(kernel: bool = False) -> Program:
    """Trace two layers of attention; each stores 8 x 4 x 512 x 512 scores in four bytes without the kernel."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        for _ in range(2):
            if kernel:
                q = q + jnp.tanh(k) * v
            else:
                scores = jnp.einsum("bshc,bthc->bhst", q, k)
                q = jnp.einsum("bhst,bthc->bshc", jax.nn.softmax(scores.astype(jnp.bfloat16)), v)
        return jnp.sum(q)

    each = jax.ShapeDtypeStruct((8, 512, 4, 64), jnp.float32)
    return trace(jax.grad(fn, argnums=(0, 1, 2)), (each, each, each), name="attention")


@pytest.mark.parametrize(("topology", "kernel"), [("v5e:2x2", "splash_attention"), ("h100:4", "cudnn")])
def test_scores_in_memory_are_named_with_the_kernel_that_stores_none(topology: str, kernel: str) -> None:
    text = refusal(attention(), 1 << 20, topology)
    assert kernel in text and "for the attention at test_infeasible.py:" in text
    # Two layers of 32 MiB, on four devices.
    assert "need at least 16.00 MiB of each device" in text
    assert "kernel" not in refusal(attention(), 1 << 20, "cpu:4")
    assert "kernel" not in refusal(attention(kernel=True), 1 << 20, topology)


def test_scores_of_jaxs_own_attention_are_named_too() -> None:
    """Find scores whose dims are moved between the matmul and the softmax."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(jax.nn.dot_product_attention(jax.nn.dot_product_attention(q, k, v), k, v))

    each = jax.ShapeDtypeStruct((8, 2048, 4, 64), jnp.float32)
    text = refusal(trace(jax.grad(fn, argnums=(0, 1, 2)), (each, each, each)), 1 << 20)
    kernel = (
        "splash_attention with block_sizes of 1024, block_kv_compute of 512) for the attention at test_infeasible.py:"
    )
    assert kernel in text
