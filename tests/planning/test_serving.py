"""Splits of a key-value cache's dims, as the search chooses them."""

import functools

import pytest

from autoshard.planning import Options, Plan, make_plan
from autoshard.program import open_source


BATCH, HEADS, LENGTH = 1, 2, 3
"""Dims of a stacked cache [layers, batch, heads, length, size]."""


@functools.cache
def decoding(batch: int, cache: int, mesh: str) -> Plan:
    """Plan Llama with 4 key heads, which use a part of an axis of 8. Caches are 64 MiB a device if split evenly."""
    program = open_source("hf:llama-tiny", serve="decode", batch=batch, cache=cache, seq=128)
    return make_plan(program, Options(topology="v5e:2x4", mesh=mesh, memory_limit=90 << 20)).plan


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("batch", "cache", "mesh", "split"),
    [
        (1, 1048576, "data=8", {HEADS: ("data(4 of 8)",), LENGTH: ("data(2 of 8)",)}),
        (64, 16384, "data=8", {BATCH: ("data",)}),
        (4, 262144, "data=4,model=2", {BATCH: ("data",), HEADS: ("model",)}),
    ],
)
def test_the_dim_of_the_cache_that_pays_is_split(batch: int, cache: int, mesh: str, split: dict[int, tuple[str, ...]]):
    plan = decoding(batch, cache, mesh)
    for part in ("keys", "values"):
        name = f"cache.model.layers.*.{part}"
        assert {dim: axes for dim, axes in enumerate(plan.arguments[name].dims) if axes} == split
        assert plan.results[name] == plan.arguments[name]


def test_the_cache_is_counted_once():
    plan = decoding(1, 1048576, "data=8")
    cache = 2 * 4 * 4 * 1048576 * 8 * 2 // 8
    assert cache < plan.prediction.peak_bytes < 2 * cache
