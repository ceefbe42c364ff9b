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
    # The side that wastes least streams, in groups of 8 rows.
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


@pytest.mark.parametrize(("size", "published"), [(16384, 950.1e12), (32768, 956.4e12)])
def test_large_matmuls_of_tpu7x(size: int, published: float) -> None:
    """AI-Hypercomputer/tpu-recipes@c8cfe2f6 microbenchmarks/ironwood/README.md, one device."""
    compute = _compute("tpu7x:1x1x1")
    flops = 2.0 * size**3
    busy = compute.op_seconds(flops, 3 * 2 * size**2, efficiency=compute.matmul_efficiency(size, size, size))
    assert flops / float(busy) == pytest.approx(published, rel=0.05)


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
    compute = _compute("h200:1")
    assert np.all(
        compute.matmul_seconds(64, 64, 64, [1, 2, 4]) == compute.matmul_seconds(64, 64, 64) * np.array([1, 2, 4])
    )
