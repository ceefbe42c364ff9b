"""Decoders with experts that are built from their dims: against a plain mixture, and against the closed form."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.errors import UserError
from autoshard.graph import read_graph
from autoshard.program import Program, Role, decoder_program
from autoshard.program.moe.decoder_experts import Routing, expert_shapes, routed
from autoshard.serving import Decoder


DIMS = Decoder(
    3, 32, 80, 4, 2, 8, 64, experts=4, active_experts=2, expert_width=48, shared_experts=1, dense_layers=1, qk_norm=True
)


def step(**options: Any) -> Program:
    return decoder_program(DIMS, batch=4, seq=16, attention="plain", **options)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("routing", "changes"),
    [
        ("dropless", {"gated": False}),
        ("capacity", {}),
        ("sorted:2", {"shared_experts": 0, "dense_layers": 0}),
        *(
            pytest.param(routing, changes, marks=pytest.mark.full)
            for routing, changes in [
                *(("dropless", changes) for changes in ({}, {"shared_experts": 0, "dense_layers": 0})),
                *(("capacity", changes) for changes in ({"gated": False}, {"shared_experts": 0, "dense_layers": 0})),
                *(("sorted", changes) for changes in ({}, {"gated": False}, {"shared_experts": 0, "dense_layers": 0})),
                *(("sorted:2", changes) for changes in ({}, {"gated": False})),
            ]
        ),
    ],
)
def test_parameters_and_model_flops_are_those_of_the_closed_form(changes: dict, routing: str) -> None:
    dims = dataclasses.replace(DIMS, **changes)
    program = decoder_program(dims, batch=4, seq=16, routing=routing)
    parameters = [a for a in program.arguments if a.role is Role.PARAMETER]
    assert sum(int(np.prod(a.shape)) for a in parameters) == dims.params
    assert program.model_flops == pytest.approx(dims.train_flops(64, 16))


@pytest.mark.full
def test_both_routings_compute_the_rows_of_active_experts() -> None:
    flops = {routing: read_graph(step(routing=routing).module).flops for routing in ("dropless", "capacity")}
    every = read_graph(step(routing="capacity", capacity_factor=2.0).module).flops
    # Twice the slots: two sparse layers, four passes over 128 rows (one recomputed, for the router's gradient too).
    assert every - flops["capacity"] == pytest.approx(2 * 2 * 128 * 32 * 48 * (4 * 3), rel=0.02)
    assert flops["dropless"] == pytest.approx(flops["capacity"], rel=0.02)


def values() -> tuple[dict[str, Any], Any]:
    random = np.random.default_rng(0)
    weights = {k: jnp.asarray(random.normal(size=s) / 6, jnp.float32) for k, s in expert_shapes(DIMS).items()}
    return weights, jnp.asarray(random.normal(size=(4, 16, 32)), jnp.float32)


def plain(weights: dict[str, Any], x: Any) -> Any:
    """Compute every token by every expert, weighted."""
    scores = jax.nn.softmax(x @ weights["router.weight"])
    best = jnp.where(scores >= jnp.sort(scores)[..., -2:-1], scores, 0.0)
    share = best / best.sum(-1, keepdims=True)
    up = jnp.einsum("bsd,edf->besf", x, weights["experts.up_proj.weight"])
    gate = jnp.einsum("bsd,edf->besf", x, weights["experts.gate_proj.weight"])
    out = jnp.einsum("besf,efd,bse->bsd", jax.nn.silu(gate) * up, weights["experts.down_proj.weight"], share)
    shared = jax.nn.silu(x @ weights["shared.gate_proj.weight"]) * (x @ weights["shared.up_proj.weight"])
    return out + shared @ weights["shared.down_proj.weight"]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("routing", "factor"),
    [("dropless", 1.0), ("capacity", 2.0), ("sorted", 1.0), ("sorted:2", 1.0), ("sorted:4", 1.0), ("ragged:2", 1.0)],
)
def test_values_and_gradients_are_those_of_a_plain_mixture(routing: str, factor: float) -> None:
    weights, x = values()

    def total(made: Any, *given: Any) -> Any:
        return (made(*given) * jnp.cos(jnp.arange(32.0))).sum()

    def gradients(made: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda w, v: total(made, w, v), (0, 1)))

    found, wanted = gradients(lambda w, v: routed(DIMS, v, w, Routing(routing, factor))), gradients(plain)
    for mine, theirs in zip(jax.tree.leaves(found(weights, x)), jax.tree.leaves(wanted(weights, x)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-4)


def test_tokens_beyond_the_slots_are_dropped() -> None:
    weights, x = values()
    same = jnp.broadcast_to(x[:1, :1], x.shape)  # all tokens of one sequence choose the same two experts: 8 slots each
    lone = {k: jnp.zeros_like(v) if k.startswith("shared") else v for k, v in weights.items()}
    result = np.asarray(jax.jit(lambda x, w: routed(DIMS, x, w, Routing("capacity")))(same, lone))
    np.testing.assert_allclose(result[:, :8], jax.jit(plain)(lone, same)[:, :8], rtol=1e-4, atol=1e-5)
    assert not result[:, 8:].any() and result[:, :8].any()


def trained(program: Program) -> tuple[Any, float]:
    """Return the parameters after one step, and the loss."""
    random = np.random.default_rng(1)
    params, state, batch = program.args

    def drawn(leaf: Any) -> Any:
        if leaf.dtype == jnp.int32:
            return jnp.asarray(random.integers(0, 64, leaf.shape), jnp.int32)
        return jnp.asarray(random.normal(size=leaf.shape) / 6, jnp.float32)

    params = jax.tree.map(drawn, params)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    new, _, loss = jax.jit(program.fn)(params, state, jax.tree.map(drawn, batch))
    return new, float(loss)


def test_microbatches_give_the_step_of_the_whole_batch() -> None:
    # Slots for every token: none is dropped in any batch.
    options: dict[str, Any] = {
        "compute_dtype": "float32", "optimizer": "sgd", "routing": "capacity", "capacity_factor": 2.0
    }  # fmt: skip
    made = [step(accumulation=n, **options) for n in (1, 2)]
    whole, parts = map(trained, made)
    assert parts[1] == pytest.approx(whole[1], rel=1e-5)
    for mine, theirs in zip(jax.tree.leaves(parts[0]), jax.tree.leaves(whole[0]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert made[1].model_flops == made[0].model_flops


def test_moments_and_offloads() -> None:
    moments = [a for a in step(moments="bfloat16").arguments if a.name.startswith("optimizer") and len(a.shape) > 1]
    assert moments and all(a.dtype == "bfloat16" for a in moments)
    kinds = [op.kind for op in read_graph(step(offloads=("input",)).module).ops]
    assert "to_host" in kinds and "to_device" in kinds
    assert "to_host" not in [op.kind for op in read_graph(step().module).ops]


def test_bad_settings_are_named() -> None:
    with pytest.raises(UserError, match="routing 'some' is not known; known are dropless, capacity, kernels, sorted, "):
        step(routing="some")
    with pytest.raises(UserError, match="4 experts do not divide into the 3 groups of 'sorted:3'"):
        step(routing="sorted:3")
    with pytest.raises(UserError, match="a batch of 4 sequences does not divide into 3 microbatches"):
        step(accumulation=3)
    with pytest.raises(UserError, match="a decoder layer has no value 'heads' to offload"):
        step(offloads=("heads",))
    with pytest.raises(UserError, match="with remat 'none' nothing can be offloaded"):
        step(offloads=("input",), remat="none")
    with pytest.raises(UserError, match="5 of 4 experts"):
        decoder_program(dataclasses.replace(DIMS, active_experts=5), batch=4, seq=16)
