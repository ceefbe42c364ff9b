"""Attention by jax's splash kernel, and a batch in microbatches: equal results, and refusals of the impossible."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

from autoshard.errors import UserError
from autoshard.exec.apply.exported_step import jax_export
from autoshard.graph import read_graph
from autoshard.planning import Options, make_plan, settled_options
from autoshard.program import Program, from_torch, open_source, trace
from autoshard.program.kernels import splash_attention
from autoshard.program.kernels.dot_attention import attend
from autoshard.program.kernels.flash_attention import KernelBlocks


class Attention(nn.Module):
    """`heads` query heads over `kv_heads` heads of keys and values, with projections."""

    def __init__(self, heads: int, kv_heads: int, size: int, causal: bool, mask: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size, self.causal, self.mask = heads, kv_heads, size, causal, mask
        width = heads * size
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, kv_heads * size), nn.Linear(width, kv_heads * size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            made(x).view(batch, length, count, self.size).transpose(1, 2)
            for made, count in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril() if self.mask else None
        mixed = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal, enable_gqa=self.heads != self.kv_heads
        )
        return self.o(mixed.transpose(1, 2).reshape(batch, length, self.heads * self.size))


def step(module: Attention, length: int, **options: Any) -> Program:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, length, module.heads * module.size, generator=generator)
    return from_torch(module, (inputs,), train=True, loss=lambda y: (y**2).sum(), optimizer="sgd", **options)


def ran(program: Program) -> tuple[dict[str, np.ndarray], float]:
    """Return the changes of the parameters, and the loss."""
    args = program.make_args(0)
    before = jax.tree.map(np.asarray, args[0])
    out = jax.jit(program.fn)(*args)
    return {name: np.asarray(out[0][name]) - value for name, value in before.items()}, float(out[-1])


def same(found: Program, wanted: Program, tolerance: float) -> None:
    moved, loss = ran(wanted)
    also, again = ran(found)
    assert again == pytest.approx(loss, rel=1e-5)
    largest = max(float(np.abs(change).max()) for change in moved.values())
    assert largest > 1e-4, "the step moves nothing, so nothing is compared"
    for name, change in moved.items():
        assert np.abs(also[name] - change).max() <= tolerance * max(float(np.abs(change).max()), 1e-3 * largest), name


def has_kernel(program: Program) -> bool:
    return "pallas_call" in str(jax.make_jaxpr(program.fn)(*program.args))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "causal", "length"),
    [(4, 2, 64, True, 256), (2, 2, 32, False, 128), (4, 2, 32, True, 100), (2, 2, 32, False, 197)],
)
def test_the_kernel_computes_what_scores_in_memory_do(
    heads: int, kv_heads: int, size: int, causal: bool, length: int
) -> None:
    torch.manual_seed(0)
    module = Attention(heads, kv_heads, size, causal)
    plain, splash = step(module, length), step(module, length, attention="splash")
    assert has_kernel(splash) and not has_kernel(plain)
    assert splash.notes == plain.notes
    same(splash, plain, 1e-4)


def test_windows_and_softcaps_are_the_kernels_too() -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, heads, 256, 64)).astype(np.float32) for heads in (4, 2, 2))
    for more in ({"window": 96}, {"window": 128, "softcap": 20.0, "scale": 0.2}, {"softcap": 5.0}):
        plain = attend(q, k, v, causal=True, **more)
        with splash_attention.attention_kernel("splash", []):
            kernel = attend(q, k, v, causal=True, **more)
        assert np.abs(plain - kernel).max() <= 1e-5 * np.abs(plain).max(), more


@pytest.mark.few(1)
@pytest.mark.parametrize(("queries", "keys"), [(197, 230), (300, 300), (384, 384)])
@pytest.mark.parametrize("more", [{"causal": True}, {"causal": False}, {"causal": False, "window": 50}])
def test_sequences_that_no_block_divides_are_padded(queries: int, keys: int, more: dict[str, Any]) -> None:
    """Compare with scores in memory: no query attends to padding, and no padding has a gradient."""
    random = np.random.default_rng(0)
    shapes = ((1, 4, queries, 32), (1, 2, keys, 32), (1, 2, keys, 32), (1, queries, 4, 32))
    q, k, v, weights = (random.standard_normal(shape).astype(np.float32) for shape in shapes)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (attend(q, k, v, **more) * weights).sum()

    wanted = jax.value_and_grad(loss, (0, 1, 2))(q, k, v)
    with splash_attention.attention_kernel("splash", []):
        results = jax.value_and_grad(loss, (0, 1, 2))(q, k, v)
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(results), strict=True):
        assert np.abs(one - other).max() <= 2e-5 * np.abs(one).max()


@pytest.mark.few(1)
@pytest.mark.parametrize("blocks", [((512, 128), (128, 512)), ((128, 256), (256, 128))])
def test_blocks_that_are_given_are_padded_to_as_well(blocks: tuple[tuple[int, int], tuple[int, int]]) -> None:
    random = np.random.default_rng(0)
    q, k, v = (
        random.standard_normal(shape).astype(np.float32) for shape in ((1, 2, 1, 640, 32), *[(1, 2, 640, 32)] * 2)
    )

    def loss(q: Any, k: Any, v: Any) -> Any:
        given = KernelBlocks(*blocks, blocks[0])
        return (splash_attention.splash_attention(q, k, v, causal=True, blocks=given) ** 2).sum()

    def plain(q: Any, k: Any, v: Any) -> Any:
        return (attend(q[:, :, 0], k, v, causal=True) ** 2).sum()

    wanted, found = (jax.value_and_grad(each, (0, 1, 2))(q, k, v) for each in (plain, loss))
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert np.abs(one - other).max() <= 2e-5 * np.abs(one).max()


def test_padding_takes_less_than_smaller_blocks_and_scores_in_memory() -> None:
    """Pad to blocks: 4,352 tokens, 17 blocks of 256, need no more time than 4,608, which are 9 blocks of 512."""

    def seconds(length: int) -> float:
        program = step(Attention(8, 8, 128, False), length, attention="auto")
        assert has_kernel(program) and not program.notes
        return make_plan(program, Options(topology="v6e:1x1", time_limit=10)).plan.prediction.step_time_s

    assert seconds(4352) < seconds(4608) < 1.2 * seconds(4352)
    assert splash_attention.no_gain(577, 577, False, None, 64) == ""
    left = step(Attention(2, 2, 32, True), 100, attention="auto")
    assert not has_kernel(left)
    assert any("An attention stays plain: 100 queries of 100 keys take longer padded" in note for note in left.notes)


def test_what_the_kernel_cannot_take_is_reported() -> None:
    module = Attention(2, 2, 32, False, mask=True)
    with pytest.raises(UserError, match="attention `splash` cannot be: its scores have a bias or a mask"):
        step(module, 128, attention="splash")
    left = step(module, 128, attention="auto")
    assert not has_kernel(left) and any("An attention stays plain: its scores have a bias" in n for n in left.notes)
    with pytest.raises(UserError, match="attention `flash` is not known; use plain, splash, cached, cudnn or auto"):
        step(module, 128, attention="flash")


def test_blocks_are_small_where_a_window_leaves_little() -> None:
    assert splash_attention.block_of(8192, 8192, True, None, 128) >= 512
    assert splash_attention.block_of(8192, 8192, True, 256, 1024) < splash_attention.block_of(
        8192, 8192, True, None, 1024
    )
    assert splash_attention.block_of(384, 384, True, None, 128) == 512, (
        "one step on padding takes less than six without"
    )


def test_work_is_that_of_the_blocks_that_a_mask_leaves() -> None:
    """Count computed blocks: causal scores in 2 x 2 blocks need three, for any split of a block of keys.

    A fused backward kernel multiplies them five times. For gathered keys there are two kernels, which multiply seven
    times.
    """
    q, k = (jax.ShapeDtypeStruct((1, *dims, 2048, 128), "bfloat16") for dims in ((1, 2), (1,)))

    def loss(q: Any, k: Any) -> Any:
        return splash_attention.splash_attention(q, k, k, causal=True).astype("float32").sum()

    def flops() -> dict[str, float]:
        graph = read_graph(trace(jax.grad(loss), (q, k), name="kernel").module)
        return {op.opaque.target.split("_")[2]: op.flops for op in graph.ops if op.opaque is not None}

    product = 2 * 2 * 2048 * 2048 * 128 * 3 // 4
    assert flops() == {"fwd": 2 * product, "dkv": 5 * product}
    with splash_attention.attention_kernel("splash", [], "gather"):
        assert flops() == {"fwd": 2 * product, "dkv": 4 * product, "dq": 3 * product}


def test_gradients_are_made_by_one_kernel_unless_it_would_hold_many_parts() -> None:
    def fused(length: int, window: int | None = None) -> bool:
        return splash_attention.blocks_of(length, length, True, window, 128).fused

    assert fused(2048) and fused(8192)
    assert not fused(32768) and not fused(8192, 1024)


def test_accelerators_prefer_their_kernel_and_cpus_do_not() -> None:
    assert settled_options({}, "v5e:2x4") == {"preferred": {"attention": "auto"}}
    assert settled_options({"attention": "plain"}, "v5e:2x4")["attention"] == "plain"
    assert settled_options({"attention": "auto"}, "cpu:8") == {"attention": "plain", "preferred": {}}
    assert settled_options({}, "h100:8") == {"preferred": {"attention": "auto:cudnn"}}
    chosen = open_source("hf:llama-tiny", batch=8, seq=128, **settled_options({}, "v5e:2x4"))
    assert has_kernel(chosen) and chosen.source is not None and chosen.source["preferred"] == {"attention": "auto"}
    assert not has_kernel(open_source("hf:llama-tiny", batch=8, seq=128, **settled_options({}, "cpu:8")))


def test_a_program_for_tpus_holds_the_kernel_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"train": True, "batch": 8, "seq": 128, "attention": "splash"}
    program = open_source("hf:llama-tiny", **options)
    plan = make_plan(program, Options(topology="v5e:2x2", mesh="data=2,model=2", time_limit=20)).plan
    assert any(call.name.startswith("splash_mqa_fwd") for call in plan.calls)
    assert b"tpu_custom_call" in jax_export(plan, program)
    monkeypatch.setattr(splash_attention, "interpreted", lambda: False)  # traced as on a TPU host
    assert open_source("hf:llama-tiny", **options).fingerprint == program.fingerprint


def test_microbatches_compute_the_same_step() -> None:
    torch.manual_seed(0)
    module = Attention(2, 2, 32, True)
    inputs = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"train": True, "loss": lambda y: (y**2).mean() * 1e4, "optimizer": "sgd"}
    whole = from_torch(module, (inputs,), **options)
    parts = from_torch(module, (inputs,), **options, microbatches=4)
    assert parts.model_flops == whole.model_flops
    same(parts, whole, 1e-4)
    apart = from_torch(module, (inputs,), **options, microbatches=2, gradient_groups=2)
    assert apart.model_flops == whole.model_flops
    same(apart, whole, 1e-4)
    sentence = "4 gradient groups of each of 2 microbatches do not divide the batch: `.*` has 4 examples"
    with pytest.raises(UserError, match=sentence):
        from_torch(module, (inputs,), **options, microbatches=2, gradient_groups=4)
    with pytest.raises(UserError, match="0 gradient groups cannot be"):
        from_torch(module, (inputs,), **options, gradient_groups=0)
    with pytest.raises(UserError, match=r"3 microbatches do not divide the batch: `.*` has 4 examples"):
        from_torch(module, (inputs,), **options, microbatches=3)
    normed = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    with pytest.raises(UserError, match="buffers that every call changes .*, so 2 microbatches would train"):
        from_torch(normed, (torch.randn(4, 3, 8, 8),), train=True, microbatches=2)
    with pytest.raises(UserError, match="--microbatches is for training steps"):
        open_source("hf:llama-tiny", batch=8, seq=16, microbatches=2)
    with pytest.raises(UserError, match="--gradient-groups is for training steps"):
        open_source("hf:llama-tiny", batch=8, seq=16, gradient_groups=2)
