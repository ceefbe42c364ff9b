"""Measured rates of GPUs: tables, interpolation between their points, and networks between islands."""

import dataclasses
import itertools
import json
import math
import pathlib

import numpy as np
import pytest

from autoshard.cost import Calibration, Collectives, Compute, Kind, Topology, load_chip, make_mesh
from autoshard.cost.gpu_measurements import (
    IslandNetwork,
    between_seconds,
    is_measured,
    island_curve,
    matmul_rates,
    network_constants,
)


TABLES = json.loads((pathlib.Path(load_chip.__code__.co_filename).parent / "measured/gpu.json").read_text())


def _prices(topology: str, **mesh: int) -> Collectives:
    return Collectives(make_mesh(Topology.parse(topology), mesh))


@pytest.mark.parametrize("chip", sorted(TABLES["chips"]))
def test_prices_go_through_what_was_measured(chip: str) -> None:
    for kind, groups in TABLES["chips"][chip]["collectives"].items():
        for devices, entry in groups.items():
            assert entry["tables"]
            prices = _prices(f"{chip}:{devices}", x=int(devices))
            sizes, seconds = np.array(entry["points"]).T
            assert prices.time(kind, ("x",), sizes) == pytest.approx(seconds, rel=1e-6)


def test_between_sizes_and_beyond_them() -> None:
    prices = _prices("h100:8", x=8)
    first, between, second = (
        float(prices.time("all-gather", ("x",), 2.0**power)) for power in (25, math.log2(3 * 2**24), 26)
    )
    assert between == pytest.approx((first + second) / 2, rel=1e-6)
    launch = float(prices.time("all-gather", ("x",), 0.0))
    assert 5e-6 < launch == float(prices.time("all-gather", ("x",), 200.0)) < 2e-5
    large = float(prices.time("all-gather", ("x",), 2.0**36))
    assert float(prices.time("all-gather", ("x",), 2.0**38)) == pytest.approx(4 * large, rel=1e-6)


def test_between_sizes_of_groups() -> None:
    four, six, eight = (island_curve("h100", "all-gather", devices)[20] for devices in (4, 6, 8))
    assert four < six < eight
    assert island_curve("gb200", "all-reduce", 72)[-1] < 2 * island_curve("gb200", "all-reduce", 8)[-1]


def test_rates_between_measured_matmuls_are_geometric_means() -> None:
    rates = matmul_rates(load_chip("h100"))
    assert rates is not None and rates.share == 1.0
    for low, high in itertools.pairwise(float(size) for size in rates.sizes if size >= 512):
        ends = [float(rates.shares_of_best(size, 4096.0, 4096.0, 1.0)) for size in (low, high)]
        between = float(rates.shares_of_best(math.sqrt(low * high), 4096.0, 4096.0, 1.0))
        assert between == pytest.approx(math.sqrt(ends[0] * ends[1]), rel=1e-9)


def test_two_sources_agree_on_large_collectives_of_eight() -> None:
    """Compare the prices with NCCL sweeps of 512 MiB on 8 H100: gather 383 GB/s, sum 254, exchange 363."""
    prices = _prices("h100:8", x=8)
    size = 512 * 2.0**20
    for kind, rate in (("all-gather", 383e9), ("all-reduce", 254e9), ("all-to-all", 363e9)):
        assert size / float(prices.time(kind, ("x",), size)) == pytest.approx(rate, rel=0.02)


def test_only_gpus_are_measured_and_peaks_alone_can_be_asked_for() -> None:
    assert not is_measured("v5e") and not is_measured("cpu") and is_measured("gb200")
    topology = Topology.parse("h100:8")
    ideal = Collectives(make_mesh(topology, {"x": 8}), Calibration.ideal("h100"))
    assert not ideal.measured and _prices("h100:8", x=8).measured
    assert ideal.curves_of_groups("all-gather").shape == (2, 0)
    assert matmul_rates(load_chip("v5e")) is None and Compute(topology, Calibration.ideal("h100")).rates is None


@pytest.mark.parametrize("kind", ["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"])
def test_between_islands_the_slower_of_cards_and_links_binds(kind: Kind) -> None:
    inside, whole = _prices("h100:8", x=8), _prices("h100:8*4", x=32)
    network = IslandNetwork(network_constants("h100"), 0.5 * 50e9, 31e-6)
    for size in (1e3, 1e6, 1e9):
        cards = float(between_seconds(kind, 4, 8, size, network))
        found = float(whole.time(kind, ("x",), size))
        assert found == pytest.approx(max(cards, float(inside.time(kind, ("x",), size))), rel=0.02)


def test_a_ring_on_the_cards_by_hand() -> None:
    network = IslandNetwork(network_constants("h100"), 40e9, 30e-6)
    part = 32e9 / 32
    step = 30e-6 + part / 4194304 * 6e-6 + part / 40e9
    assert between_seconds("all-gather", 4, 8, 32e9, network) == pytest.approx(45e-6 + 31 / 8 * step)
    assert between_seconds("all-reduce", 4, 8, 32e9, network) <= 45e-6 + 2 * 31 / 8 * step
    # A tree is two levels deep; a ring would go around 31 / 8 times, twice.
    assert between_seconds("all-reduce", 4, 8, 8.0, network) == pytest.approx(45e-6 + 2 * (2 * 36e-6 + 6e-6), rel=1e-3)


def test_matmuls_by_shape() -> None:
    compute = Compute(Topology.parse("h100:1"))
    best = TABLES["chips"]["h100"]["matmuls"]
    row = best["tflops"][0][4][4][4]
    flops = 2 * 4096.0**3
    sustained = compute.calibration.matmul_efficiency * 990 / max(np.ravel(best["tflops"]))
    assert flops / compute.matmul_seconds(4096, 4096, 4096) == pytest.approx(sustained * row * 1e12, rel=1e-3)
    small, large = (float(compute.matmul_efficiency(n, n, n)) for n in (256, 4096))
    assert small < 0.02 and 0.7 < large < 0.82
    assert compute.matmul_seconds(16, 4096, 4096) == pytest.approx(compute.matmul_seconds(64, 4096, 4096))
    assert compute.dot_seconds(1, 8, 8) == compute.calibration.op_overhead_s
    assert large <= compute.matmul_efficiency(8192, 8192, 8192) <= compute.calibration.matmul_efficiency
    # An A100 reaches its peak rate with smaller matmuls than an H100.
    other = Compute(Topology.parse("a100:1"))
    assert other.matmul_efficiency(512, 512, 512) > compute.matmul_efficiency(512, 512, 512)


def test_shapes_beyond_the_table_are_priced_by_their_tiles() -> None:
    """Leave the largest sizes out of the table, and price them from the others."""
    rates = matmul_rates(load_chip("h100"))
    assert rates is not None
    known = len(rates.sizes) - 1
    fewer = dataclasses.replace(
        rates, batches=rates.batches[:2], sizes=rates.sizes[:known], logs=rates.logs[:2, :known, :known, :known]
    )
    off = []
    for place, log in np.ndenumerate(rates.logs):
        if place[0] < 2 and max(place[1:]) < known:
            continue
        m, n, k = (rates.sizes[at] for at in place[1:])
        priced = float(fewer.shares_of_best(m, n, k, rates.batches[place[0]])) * 2 ** fewer.logs.max()
        off.append(abs(priced / 2**log - 1.0))
    # Rates that stay constant beyond the table's edge are 29 % off in the median.
    assert len(off) == 247 and np.median(off) < 0.06 and np.quantile(off, 0.9) < 0.3


def test_tall_and_long_matmuls_keep_all_processors_busy() -> None:
    compute = Compute(Topology.parse("h100:1"))
    large = float(compute.matmul_efficiency(8192, 8192, 8192))
    few = float(compute.matmul_efficiency(4096, 256, 1024))
    assert few < 0.4 * large < float(compute.matmul_efficiency(1 << 18, 256, 1024))
    assert compute.matmul_efficiency(768, 512, 1 << 20) > 0.9 * large


def test_domains_of_gb200() -> None:
    topology = Topology.parse("gb200:72*4")
    assert (topology.num_devices, topology.num_hosts) == (288, 72)
    assert topology.physical_axes[1].size == 72
