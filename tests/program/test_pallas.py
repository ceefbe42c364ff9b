"""Grids of Pallas kernels, as they are parsed."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from autoshard.program.kernels.attention_masks import computed_share, grid_steps, seen_share
from autoshard.program.kernels.flash_attention import KernelBlocks
from autoshard.program.kernels.pallas_rules import PallasCall
from autoshard.program.kernels.splash_attention import splash_attention


def _calls(function: Any, *shapes: tuple[int, ...]) -> list[PallasCall]:
    """Return the kernels of a function of bf16 arrays, in the order in which they run."""
    kernels: list[PallasCall] = []

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                avals = [[v.aval for v in side] for side in (equation.invars, equation.outvars)]
                kernels.append(PallasCall.of(*avals, equation.params))
            else:
                for value in equation.params.values():
                    for each in value if isinstance(value, (tuple, list)) else (value,):
                        inner = getattr(each, "jaxpr", each)
                        if hasattr(inner, "eqns"):
                            walk(inner)

    walk(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)).jaxpr)
    return kernels


@pytest.mark.parametrize("block", [(128, 128), (512, 128), (128, 512)])
def test_masked_blocks_of_splash_attention_are_left_out_for_any_sides(block: tuple[int, int]) -> None:
    def loss(q: Any, k: Any, v: Any) -> Any:
        blocks = KernelBlocks(block, block, block)
        return splash_attention(q, k, v, causal=True, blocks=blocks).astype("float32").sum()

    forward, of_keys, of_queries = _calls(jax.grad(loss, (0, 1, 2)), (1, 1, 2, 1024, 128), *[(1, 1, 1024, 128)] * 2)
    share = computed_share(1024, 1024, True, None, block)
    for call, matmuls in ((forward, 2), (of_queries, 3), (of_keys, 4)):
        assert call.steps == 2 * grid_steps(1024, 1024, True, None, block)
        assert call.flops == matmuls * 2 * 2 * 1024 * 1024 * 128 * share


@pytest.mark.parametrize(("length", "keys"), [(1024, 1024), (256, 1024), (1024, 512)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 100, 600, 2000])
def test_shares_are_those_of_the_masks_of_splash_attention(
    length: int, keys: int, causal: bool, window: int | None
) -> None:
    sides = (None if window is None else window - 1, 0 if causal else None if window is None else window - 1)
    seen = masks.LocalMask((length, keys), sides, keys - length)[:, :]
    assert seen_share(length, keys, causal, window) == pytest.approx(np.mean(seen), abs=1 / min(length, keys))
    for high, wide in ((128, 128), (256, 64), (64, 512)):
        blocks = seen.reshape(length // high, high, keys // wide, wide).any((1, 3))
        assert grid_steps(length, keys, causal, window, (high, wide)) == blocks.sum()
        assert computed_share(length, keys, causal, window, (high, wide)) == blocks.mean()


def test_shares_of_known_shapes() -> None:
    assert seen_share(4096, 4096, True, None) == 0.5
    assert seen_share(1024, 4096, True, None) == 0.875
    assert seen_share(4096, 4096, False, 128) == pytest.approx(0.061, abs=1e-3)


@pytest.mark.parametrize(("length", "padded"), [(1024, 1024), (900, 1024), (4352, 5120)])
def test_splash_attention_without_a_mask_computes_all_blocks_padding_included(length: int, padded: int) -> None:
    def loss(q: Any, k: Any, v: Any) -> Any:
        return splash_attention(q, k, v, causal=False).astype("float32").sum()

    calls = _calls(jax.grad(loss, (0, 1, 2)), (1, 1, 2, length, 128), *[(1, 1, length, 128)] * 2)
    assert [call.flops for call in calls] == [matmuls * 2 * 2 * padded * padded * 128 for matmuls in (2, 5)]
    assert {call.steps for call in calls} == {2 * (padded // 1024) ** 2}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", [(256, 256), (512, 128)])
def test_blocks_that_a_kernel_skips_by_its_place_are_left_out(block: tuple[int, int], causal: bool) -> None:
    q, k = block
    sizes = flash.BlockSizes(
        block_q=q, block_k_major=k, block_k=k, block_b=1,
        block_q_major_dkv=q, block_k_major_dkv=k, block_k_dkv=k, block_q_dkv=q,
        block_k_major_dq=k, block_k_dq=k, block_q_dq=q,
    )  # fmt: skip

    def loss(q: Any, k: Any, v: Any) -> Any:
        return flash.flash_attention(q, k, v, causal=causal, block_sizes=sizes).astype("float32").sum()

    calls = _calls(jax.grad(loss, (0, 1, 2)), *[(2, 2, 1024, 128)] * 3)
    share = computed_share(1024, 1024, causal, None, block)
    # Without a mask, jax's own figure is used, which counts more than matmuls.
    whole = [matmuls * 2 * 4 * 1024 * 1024 * 128 * share for matmuls in (2, 4, 3)]
    assert [call.flops for call in calls] == (whole if causal else pytest.approx(whole, rel=0.01))
    assert {call.steps for call in calls} == {4 * grid_steps(1024, 1024, causal, None, block)}
