"""Memory and time of sorts and cumulative ops, compared with the compilers' own programs."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.exec import compile_plan
from autoshard.planning import Options, make_plan
from autoshard.program import trace


PLUGIN = pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="no CUDA plugin")
GPU, TPU = pytest.param("h100:1", marks=PLUGIN), "v5e:1x1"
OPS: dict[str, Callable[[Any], Any]] = {
    "sort": lambda x: jnp.sort(x, -1),
    "argsort": lambda x: jnp.argsort(x, -1),
    "top_k": lambda x: jax.lax.top_k(x, 64)[0],
    "cumsum": lambda x: jnp.cumsum(x, -1),
    "cumsum over rows": lambda x: jnp.cumsum(x, 0),
}


def compiled(name: str, topology: str) -> Any:
    program = trace(OPS[name], (jax.ShapeDtypeStruct((8192, 4096), jnp.float32),))
    return compile_plan(program, make_plan(program, Options(topology=topology, mesh="data=1")).plan, 300.0)


@pytest.mark.few(1)
@pytest.mark.parametrize("topology", [GPU, TPU])
@pytest.mark.parametrize(
    "name", [pytest.param("sort", marks=pytest.mark.full), "argsort", pytest.param("top_k", marks=pytest.mark.full)]
)
def test_sorts_hold_what_they_work_on(name: str, topology: str) -> None:
    found = compiled(name, topology)
    assert found.peak_predicted == pytest.approx(found.peak_compiled, rel=0.03)


@pytest.mark.parametrize("name", ["cumsum", pytest.param("cumsum over rows", marks=pytest.mark.full)])
@pytest.mark.full
def test_cumulative_ops_of_tpus_go_through_copies(name: str) -> None:
    found = compiled(name, TPU)
    assert found.peak_predicted == pytest.approx(found.peak_compiled, rel=0.03)
    assert found.estimate is not None
    assert found.step_time_predicted_s == pytest.approx(found.estimate.step_time_s, rel=0.1)
