"""Matmuls, memory and rooflines of one device."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost import Calibration, Compute, Topology, shard_bytes


SIZES = st.integers(1, 20_000)


def _compute(text: str, ideal: bool = False) -> Compute:
    topology = Topology.parse(text)
    return Compute(topology, Calibration.ideal(topology.chip) if ideal else None)


@given(st.sampled_from(["v5e:1x1", "v6e:1x1", "tpu7x:1x1x1", "h100:1", "cpu:4"]), SIZES, SIZES, SIZES)
def test_efficiency_is_a_share_and_symmetric(text: str, m: int, n: int, k: int) -> None:
    compute = _compute(text)
    share = float(compute.matmul_efficiency(m, n, k))
    assert 0 < share <= compute.calibration.matmul_efficiency
    if compute.rates is None:  # measured rates of GPUs only approximate it
        assert share == pytest.approx(float(compute.matmul_efficiency(k, m, n)))


@given(SIZES, SIZES, SIZES, st.integers(1, 64))
def test_splitting_a_matmul_never_saves_work(m: int, n: int, k: int, parts: int) -> None:
    compute = _compute("v5e:1x1")
    part = compute.matmul_seconds(-(-m // parts), n, k)
    assert part * parts >= compute.matmul_seconds(m, n, k) * (1 - 1e-9)


def test_padding() -> None:
    v5e, v6e = _compute("v5e:1x1"), _compute("v6e:1x1")
    full = v5e.calibration.matmul_efficiency
    assert v5e.matmul_efficiency(8192, 128, 128) == pytest.approx(full)
    assert v5e.matmul_efficiency(8192, 64, 128) == pytest.approx(full / 2)
    assert v5e.matmul_efficiency(8, 8192, 8192) == pytest.approx(full / 16)
    assert v6e.matmul_efficiency(8192, 128, 256) == pytest.approx(v6e.calibration.matmul_efficiency / 2)
    # The side that wastes least is streamed, in groups of 8 rows.
    assert v5e.matmul_efficiency(136, 128, 256) == pytest.approx(full)
    assert v5e.matmul_efficiency(100_001, 128, 128) == pytest.approx(full * 100_001 / 100_008)


def test_matmul_takes_arrays() -> None:
    compute = _compute("v5p:2x2x1", ideal=True)
    seconds = compute.matmul_seconds([256, 512], 4096, [[1024], [2048]], batch=3)
    assert seconds.shape == (2, 2)
    assert seconds[1, 1] == pytest.approx(2 * 3 * 512 * 4096 * 2048 / 4.59e14)


@pytest.mark.parametrize(
    ("dtype", "peak"), [("bf16", 1.97e14), ("f32", 1.97e14), ("int8", 3.94e14), ("f8E5M2", 1.97e14)]
)
def test_dtypes(dtype: str, peak: float) -> None:
    assert _compute("v5e:1x1", ideal=True).matmul_seconds(1024, 1024, 1024, dtype=dtype) == pytest.approx(
        2 * 1024**3 / peak
    )


def test_roofline_is_the_larger_side() -> None:
    compute = _compute("v5e:1x1", ideal=True)
    times = compute.op_seconds([1.97e14, 1e6, 0, 0], [1e6, 8.19e11, 8.19e11, 0])
    assert times == pytest.approx([1.0, 1.0, 1.0, 0.0])
    assert compute.op_seconds(1.97e14, 0, efficiency=0.5) == pytest.approx(2.0)


def test_small_ops_pay_their_overhead() -> None:
    compute = _compute("v5e:1x1")
    assert compute.op_seconds(1, 1) == pytest.approx(compute.calibration.op_overhead_s, rel=1e-3)
    assert compute.op_seconds(0, 0) == 0


@pytest.mark.parametrize(
    ("size", "published"), [(512, 105.08e12), (1024, 349.7e12), (16384, 950.1e12), (32768, 956.4e12)]
)
def test_matmuls_of_tpu7x(size: int, published: float) -> None:
    """Compare with AI-Hypercomputer/tpu-recipes@c8cfe2f6 microbenchmarks/ironwood/README.md, one device."""
    compute = _compute("tpu7x:1x1x1")
    assert 2.0 * size**3 / float(compute.dot_seconds(size, size, size)) == pytest.approx(published, rel=0.15)


def test_host_and_on_chip_memory() -> None:
    compute = _compute("v5e:4x4", ideal=True)
    assert compute.host_seconds(1.6e10) == pytest.approx(1.0)
    assert compute.memory_seconds(8.19e11, on_chip=True) == pytest.approx(1 / 22)
    assert _compute("tpu7x:1x1x1").host_seconds(1.6e10) == pytest.approx(1.0)


def test_critical_batch() -> None:
    compute = _compute("v5e:1x1", ideal=True)
    assert compute.critical_batch(2**30, 2**30) == pytest.approx(1.97e14 / 8.19e11, rel=1e-6)
    assert compute.critical_batch(64, 64) == float("inf")


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_cpu_devices_take_turns(devices: int) -> None:
    whole = float(_compute("cpu:1").matmul_seconds(512, 512, 512, dtype="f32"))
    assert _compute(f"cpu:{devices}").matmul_seconds(512, 512, 512, dtype="f32") == pytest.approx(whole * devices)


def test_vector_units() -> None:
    compute = _compute("v5e:1x1")
    assert compute.vector_seconds([compute.calibration.vector_flops_per_s]) == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("shape", "itemsize", "splits", "tiled", "size"),
    [
        ((128, 2048), 1, (16, 1), False, 16384),
        ((10, 6), 4, (4, 1), False, 3 * 6 * 4),
        ((), 4, None, False, 4),
        ((1024, 64), 2, None, True, 1024 * 128 * 2),
        ((3, 130), 4, None, True, 4 * 256 * 4),
        ((2, 7, 128), 4, (2, 1, 1), True, 8 * 128 * 4),
        ((5,), 4, None, True, 128 * 4),
        ((16, 16), 0.5, None, False, 128),
    ],
)
def test_shard_bytes(shape: tuple, itemsize: float, splits: tuple | None, tiled: bool, size: int) -> None:
    assert shard_bytes(shape, itemsize, splits, tiled) == size


def test_arrays_of_batches_broadcast() -> None:
    compute = _compute("v5e:1x1")
    assert np.all(
        compute.matmul_seconds(64, 64, 64, [1, 2, 4]) == compute.matmul_seconds(64, 64, 64) * np.array([1, 2, 4])
    )


def test_a_large_matmul_by_itself_is_near_its_matrix_time() -> None:
    v5p = _compute("v5p:2x2x1")
    busy = float(v5p.matmul_seconds(16384, 16384, 16384))
    assert busy < v5p.dot_seconds(16384, 16384, 16384) < 1.03 * busy
    # A chip with 575 FLOPs for each byte of memory bandwidth waits for memory at any size.
    v6e = _compute("v6e:1x1")
    busy = float(v6e.matmul_seconds(16384, 16384, 16384))
    assert 1.2 * busy < v6e.dot_seconds(16384, 16384, 16384) < 2 * busy


def test_a_matmul_of_one_block_overlaps_nothing() -> None:
    v5e = _compute("v5e:1x1")
    alone = float(v5e.dot_seconds(512, 512, 512)) - v5e.calibration.op_overhead_s
    busy, moved = float(v5e.matmul_seconds(512, 512, 512)), float(v5e.memory_seconds(3 * 2 * 512**2))
    assert max(busy, moved) + min(busy, moved) <= alone <= 1.26 * max(busy, moved) + min(busy, moved)


@given(SIZES, SIZES, SIZES)
def test_a_matmul_takes_at_least_its_roofline(m: int, n: int, k: int) -> None:
    compute = _compute("v6e:1x1")
    least = max(float(compute.matmul_seconds(m, n, k)), float(compute.memory_seconds(2.0 * (m * k + k * n + m * n))))
    assert compute.dot_seconds(m, n, k) >= least


def test_attention_kernels() -> None:
    v5p, v6e = _compute("v5p:2x2x1"), _compute("v6e:1x1")
    scores = 1e10
    forward = v5p.attention_seconds(scores, 128, 128, 2, "bf16", 0)
    assert v5p.attention_seconds(scores, 128, 128, 5, "bf16", 0) == pytest.approx(2.5 * forward, rel=1e-3)
    assert forward >= 2 * scores * 128 * 2 / (v5p.topology.peak_flops("bf16"))
    # A head of 128 fills half of a matrix unit of 256, so one of 256 costs the same.
    assert v6e.attention_seconds(scores, 128, 128, 2, "bf16", 0) == v6e.attention_seconds(
        scores, 256, 256, 2, "bf16", 0
    )
    assert v6e.attention_seconds(1.0, 128, 128, 2, "bf16", 1.6e12) > 1.0


@given(SIZES, SIZES, SIZES)
def test_a_cpu_has_a_plain_roofline(m: int, n: int, k: int) -> None:
    compute = _compute("cpu:4")
    moved = float(compute.memory_seconds(2.0 * (m * k + k * n + m * n)))
    least = max(float(compute.matmul_seconds(m, n, k)), moved)
    assert compute.dot_seconds(m, n, k) == pytest.approx(least + compute.calibration.op_overhead_s)


def test_small_matmuls_of_a_cpu_are_slow_without_steps() -> None:
    compute = _compute("cpu:4")
    edge = compute.topology.chip.mxu_edge
    assert compute.matmul_efficiency(edge, 1e9, 1e9) == pytest.approx(compute.calibration.matmul_efficiency / 2)
    sizes = np.arange(1, 200)
    assert np.all(np.diff(compute.matmul_efficiency(sizes, 64, 64)) > 0)


@pytest.mark.parametrize("chip", ["v6e:1x1", "cpu:4"])
def test_what_is_fused_with_a_matmul_is_read_once(chip: str) -> None:
    compute = _compute(chip)
    size, more = 2.0 * 3 * 16384**2, 1e15
    longest = compute.dot_seconds(16384, 16384, 16384, 1, "bf16", size, more)
    twice = compute.dot_seconds(16384, 16384, 16384, 1, "bf16", size, 2 * more)
    assert twice - longest == pytest.approx(float(compute.memory_seconds(more)), rel=0.01)
    assert compute.dot_seconds(16384, 16384, 16384, 1, "bf16", size, 0.0) == compute.dot_seconds(16384, 16384, 16384)


@pytest.mark.parametrize("slices", [2, 4, 32])
def test_compute_over_slices_takes_the_expected_time_of_the_slowest(slices: int) -> None:
    """Compare with the mean of the largest of so many random times."""
    one, many = _compute("v5e:4x4"), _compute(f"v5e:4x4*{slices}")
    spread = one.calibration.slice_spread
    times = np.random.default_rng(0).normal(1.0, spread, (20_000, slices))
    expected = times.max(axis=1).mean()
    assert 0.0 < spread and many.slowest == pytest.approx(expected, abs=0.05 * spread)
    for seconds in (
        lambda compute: compute.matmul_seconds(8192, 8192, 8192),
        lambda compute: compute.memory_seconds(1e9),
        lambda compute: compute.vector_seconds(1e12),
    ):
        assert float(seconds(many)) == pytest.approx(many.slowest * float(seconds(one)))


def test_islands_of_gpus_are_priced_without_a_spread() -> None:
    assert _compute("h100:8*4").slowest == 1.0
