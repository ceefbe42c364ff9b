"""Training steps that are built from a decoder's dims."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from autoshard.errors import UserError
from autoshard.graph import read_graph
from autoshard.program import SAVED, DecoderDims, Program, Role, decoder_program
from autoshard.program.kernels.dot_attention import attend
from autoshard.program.kernels.flash_attention import KernelBlocks
from autoshard.program.kernels.splash_attention import splash_attention
from autoshard.serving import Decoder


DIMS = DecoderDims(4, 64, 160, 4, 2, 16, 128)
CLOSED = Decoder(4, 64, 160, 4, 2, 16, 128)


def step(**options) -> Program:
    return decoder_program(DIMS, batch=2, seq=32, **options)


def matmul_flops(program: Program) -> float:
    """Return the FLOPs of the program's dots and attention kernels, with the loops' trips."""
    return read_graph(program.module).flops


@pytest.mark.parametrize(
    "changes", [{}, {"gated": False}, {"tied": True}, {"tied": True, "gated": False}, {"ahead": 2}]
)
def test_parameters_and_model_flops_are_those_of_the_closed_form(changes: dict) -> None:
    program = decoder_program(dataclasses.replace(DIMS, **changes), batch=2, seq=32)
    closed = dataclasses.replace(CLOSED, **changes)
    parameters = [a for a in program.arguments if a.role is Role.PARAMETER]
    total = 0
    for argument in parameters:
        count = 1
        for size in argument.shape:
            count *= size
        total += count
    assert total == closed.params
    assert program.model_flops == pytest.approx(closed.train_flops(64, 32))
    assert program.tokens == 64 and program.training
    assert all(a.dtype == "float32" for a in parameters)


def test_layers_are_stacked_under_one_name() -> None:
    names = {a.name: a.shape for a in step().arguments if a.role is Role.PARAMETER}
    stacked = {name: shape for name, shape in names.items() if "layers" in name}
    assert all(name.startswith("layers.*.") and shape[0] == DIMS.layers for name, shape in stacked.items())
    assert stacked["layers.*.mlp.up_proj.weight"] == (4, 64, 160)


@pytest.mark.full
def test_what_is_recomputed_follows_from_what_is_saved() -> None:
    flops = {remat: matmul_flops(step(remat=remat)) for remat in ("none", *SAVED)}
    assert flops["none"] < flops["minimal"] < flops["save_dot_except_mlp"] < flops["qkv_proj_offloaded"]
    assert flops["qkv_proj_offloaded"] < flops["full"]
    assert flops["custom"] == flops["save_dot_except_mlp"]
    layers = 4 * (CLOSED.attention_params + CLOSED.mlp_params)
    # Full remat: every matmul of a layer runs twice forward, except the last one, whose result the backward pass never
    # reads.
    again = 2.0 * 64 * (layers - 4 * 64 * 160) + 64 * CLOSED.attention_flops_per_token(32, causal=False)
    assert flops["full"] - flops["none"] == pytest.approx(again)


def test_a_flash_kernel_computes_scores_again_but_only_blocks_that_are_seen() -> None:
    kernel, plain = (
        matmul_flops(decoder_program(DIMS, batch=2, seq=1024, remat="none", attention=kind))
        for kind in ("flash", "plain")
    )
    forward = 2048 * CLOSED.attention_flops_per_token(1024, causal=False)
    # Three of 2 x 2 blocks; two matmuls forward, seven backward instead of two and four.
    assert plain - kernel == pytest.approx(3.0 * forward - 0.75 * (1.0 + 3.5) * forward)
    assert step(attention="plain").model_flops == pytest.approx(CLOSED.train_flops(64, 32))


def test_splash_attention_skips_what_is_masked() -> None:
    dims = dataclasses.replace(DIMS, head_size=128)
    steps = {a: decoder_program(dims, batch=2, seq=2048, remat="none", attention=a) for a in ("flash", "splash")}
    assert steps["flash"].model_flops == steps["splash"].model_flops
    kernels = [op for op in read_graph(steps["splash"].module).ops if op.opaque is not None]
    assert sorted(op.opaque.target.partition("_no_")[0] for op in kernels if op.opaque) == [
        "splash_mqa_dkv",
        "splash_mqa_dq",
        "splash_mqa_fwd_residuals",
    ]
    # Ten of 4 x 4 blocks of 512, those up to the diagonal. Two, four and three matmuls over them.
    scores = 2 * 4 * 2048 * 2048 * 10 / 16
    assert sum(op.flops for op in kernels) == pytest.approx((2 + 4 + 3) * 2 * 128 * scores)


def test_splash_attention_takes_the_blocks_it_is_given() -> None:
    dims = dataclasses.replace(DIMS, head_size=128)
    blocks = KernelBlocks((2048, 1024), (1024, 2048), (512, 512), fused=True)
    program = decoder_program(dims, batch=2, seq=2048, remat="none", attention="splash", blocks=blocks)
    kernels = [op for op in read_graph(program.module).ops if op.opaque is not None]
    assert sorted(op.opaque.target.partition("_no_")[0] for op in kernels if op.opaque) == [
        "splash_mqa_dkv",
        "splash_mqa_fwd_residuals",
    ]
    forward, backward = sorted(op.flops for op in kernels)
    # Two matmuls over both blocks forward. One backward kernel runs five over both of its own.
    assert forward == pytest.approx(2 * 2 * 128 * 2 * 4 * 2048 * 2048)
    assert backward == pytest.approx(2.5 * forward)


@pytest.mark.parametrize(("saves", "times"), [((), 2), (("context",), 1)])
def test_what_splash_attention_made_is_not_made_again_where_it_is_saved(saves: tuple[str, ...], times: int) -> None:
    """Save the result and its row sums, which the backward pass reads too. The kernel then runs once."""
    dims = dataclasses.replace(DIMS, head_size=128)
    program = decoder_program(dims, batch=2, seq=512, saves=saves, attention="splash")
    graph = read_graph(program.module)
    kernels = [op.opaque.target for op in graph.ops if op.opaque is not None]
    assert sum("fwd" in target for target in kernels) == times
    stacks = [graph.tensors[c.update].shape for loop in graph.loops for c in loop.carries]
    heads = dims.heads * dims.head_size * 2 * 512
    assert sum(math.prod(shape) == dims.layers * heads for shape in stacks) == (0 if times == 2 else 1)


def test_splash_attention_is_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *args, **options: real(*args, **options | {"interpret": True}))
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.normal(size=(1, 2, 2, 256, 128)), jnp.float32)
    key, value = (jnp.asarray(rng.normal(size=(1, 2, 256, 128)), jnp.float32) for _ in range(2))
    for window in (None, 100):
        found = splash_attention(query, key, value, causal=True, window=window)
        wanted = attend(query.reshape(1, 4, 256, 128), key, value, causal=True, window=window)
        np.testing.assert_allclose(
            np.asarray(found).reshape(1, 4, 256, 128), np.asarray(wanted).transpose(0, 2, 1, 3), atol=2e-5
        )


def test_local_layers_see_a_window() -> None:
    local = decoder_program(dataclasses.replace(DIMS, window=8, global_every=2), batch=2, seq=32)
    everywhere = step()
    assert local.model_flops is not None and everywhere.model_flops is not None
    assert local.model_flops < everywhere.model_flops
    names = [a.name for a in local.arguments if a.role is Role.PARAMETER]
    assert "layers.0.*.attn.q_proj.weight" in names and "layers.1.*.attn.q_proj.weight" in names
    shapes = {a.name: a.shape for a in local.arguments}
    assert shapes["layers.1.*.mlp.up_proj.weight"] == (2, 64, 160)


def test_what_is_saved_can_be_named() -> None:
    assert matmul_flops(step(remat="custom", saves=())) == matmul_flops(step(remat="full"))
    assert matmul_flops(step(saves=("query", "key", "value"))) == matmul_flops(step(remat="save_qkv_proj"))
    with pytest.raises(UserError, match="a decoder layer has no value 'heads' to save; it has query, key, value, out"):
        step(saves=("heads",))


def test_bad_settings_are_named() -> None:
    with pytest.raises(UserError, match="remat 'some' is not known; known are none, full, minimal"):
        step(remat="some")
    with pytest.raises(UserError, match="attention 'dense' is not known; known are flash, splash, plain"):
        step(attention="dense")
    with pytest.raises(UserError, match="4 layers in groups of 3, 4 heads in groups of 2 key-value heads"):
        decoder_program(dataclasses.replace(DIMS, global_every=3), batch=2, seq=32)


def values(program: Program) -> tuple:
    """Draw random parameters and tokens, and zero moments, in the step's shapes."""
    random = np.random.default_rng(0)

    def made(leaf):
        if leaf.dtype == np.int32:
            return random.integers(0, DIMS.vocabulary, leaf.shape, np.int32)
        return (0.05 * random.standard_normal(leaf.shape)).astype(leaf.dtype)

    params, state, batch = program.args
    return (
        jax.tree.map(made, params),
        jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state),
        jax.tree.map(made, batch),
    )


def stepped(program: Program, params: dict, state: object, batch: dict) -> tuple[dict, float]:
    new, _, loss = jax.jit(program.fn)(params, state, batch)
    return new, float(loss)


def test_gradients_that_are_gradient_groups_are_the_same() -> None:
    small = {"batch": 8, "attention": "plain", "optimizer": "sgd", "compute_dtype": "float32"}
    at_once = decoder_program(DIMS, seq=32, **small)
    given = values(at_once)
    wanted, loss = stepped(at_once, *given)
    late = decoder_program(DIMS, seq=32, **small, accumulation=2, gradient_groups=4)
    found, same = stepped(late, *given)
    assert same == pytest.approx(loss, rel=1e-6)
    moved = 0.0
    for name, value in wanted.items():
        change = np.abs(value - given[0][name]).max()
        moved = max(moved, change)
        assert np.abs(found[name] - value).max() <= 1e-4 * change + 1e-9, name
    assert moved > 1e-6
    with pytest.raises(UserError, match="a microbatch of 4 sequences does not divide into 3 groups"):
        decoder_program(DIMS, seq=32, **small, accumulation=2, gradient_groups=3)


def test_a_fused_projection_computes_the_same() -> None:
    apart = dataclasses.replace(DIMS, kv_heads=4)
    small = {"batch": 2, "seq": 32, "attention": "plain", "optimizer": "sgd", "compute_dtype": "float32"}
    separate, fused = (decoder_program(dims, **small) for dims in (apart, dataclasses.replace(apart, fused_qkv=True)))
    assert fused.model_flops == separate.model_flops
    params, state, batch = values(separate)

    def joined(tree: dict) -> dict:
        """Return the parameters with the three projections of a layer as one."""
        names = [f"layers.*.attn.{part}_proj.weight" for part in ("q", "k", "v")]
        parts = [tree[names[0]][:, :, :, 0], tree[names[1]], tree[names[2]]]
        rest = {name: value for name, value in tree.items() if name not in names}
        return rest | {"layers.*.attn.qkv_proj.weight": np.stack(parts, axis=2)}

    wanted, loss = stepped(separate, params, state, batch)
    found, same = stepped(fused, joined(params), state, batch)
    assert same == pytest.approx(loss, rel=1e-6)
    before, after = joined(params), joined(wanted)
    for name, value in found.items():
        change = np.abs(after[name] - before[name]).max()
        assert np.abs(value - after[name]).max() <= 1e-4 * change + 1e-9, name
    with pytest.raises(UserError, match="a fused projection has as many key-value heads as heads"):
        decoder_program(dataclasses.replace(DIMS, fused_qkv=True), **small)


def test_layers_that_are_not_scanned_compute_the_same() -> None:
    dims = dataclasses.replace(DIMS, window=8, global_every=2)
    small = {"batch": 2, "seq": 32, "attention": "plain", "optimizer": "sgd", "compute_dtype": "float32"}
    scanned, unrolled = decoder_program(dims, **small), decoder_program(dims, **small, scanned=False)
    assert unrolled.model_flops == scanned.model_flops
    params, state, batch = values(scanned)

    def apart(tree: dict) -> dict:
        found = {}
        for name, value in tree.items():
            for number in range(2 if "*" in name else 1):
                found[name.replace("*", str(number))] = value[number] if "*" in name else value
        return found

    wanted, loss = stepped(scanned, params, state, batch)
    found, same = stepped(unrolled, apart(params), state, batch)
    assert same == pytest.approx(loss, rel=1e-6) and found.keys() == apart(params).keys()
    for name, value in apart(wanted).items():
        assert np.abs(found[name] - value).max() <= 1e-6, name
