"""FFTs whose batch is split: they stay on their devices, on every backend."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.exec import compile_plan, measure
from autoshard.planning import Options, make_plan, read_asked
from autoshard.program import Program, trace


PLUGIN = pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="no CUDA plugin")
S = jax.ShapeDtypeStruct


def spectral(batch: int, side: int) -> Program:
    """Trace the gradient of a layer that weighs the modes of images."""

    def loss(weights: jax.Array, images: jax.Array) -> jax.Array:
        modes = jnp.fft.rfft2(images, axes=(1, 2)) * weights
        return jnp.square(jnp.fft.irfft2(modes, s=(side, side), axes=(1, 2))).sum()

    def make_args(seed: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(seed)
        weights = random.normal(size=(side, side // 2 + 1, 4)) + 1j
        return weights.astype("complex64"), random.normal(size=(batch, side, side, 4)).astype("float32")

    shapes = S((side, side // 2 + 1, 4), jnp.complex64), S((batch, side, side, 4), jnp.float32)
    return trace(jax.grad(loss), shapes, make_args=make_args)


@pytest.mark.parametrize("mesh", ["data=8", "data=4,model=2"])
def test_a_split_batch_of_ffts_computes_the_same_and_moves_gradients_alone(mesh: str) -> None:
    program = spectral(16, 16)
    pinned = make_plan(program, Options(topology="cpu:8", mesh=mesh, asked=read_asked({"images": "data,-,-,-"}))).plan
    assert len(pinned.regions) >= 2
    measurement = measure(program, pinned, steps=1, warmup=1, check=True)
    assert not measurement.failed
    gradient = 16 * 9 * 4 * 8
    assert sum(measurement.wire_compiled.values()) <= 4 * gradient


@pytest.mark.parametrize(
    "topology", [pytest.param("h100:8", marks=PLUGIN), pytest.param("v5e:2x4", marks=pytest.mark.full)]
)
def test_compilers_gather_no_batch_of_ffts(topology: str) -> None:
    program = spectral(256, 32)
    plan = make_plan(
        program, Options(topology=topology, mesh="data=8", asked=read_asked({"images": "data,-,-,-"}))
    ).plan
    compilation = compile_plan(program, plan, 300.0)
    images = 256 * 32 * 32 * 4 * 4
    assert 0 < sum(compilation.wire_compiled.values()) < images // 8


@pytest.mark.parametrize("length", [pytest.param(256, marks=pytest.mark.full), 1024])
def test_ffts_of_tpus_are_priced_as_the_products_that_they_run_as(length: int) -> None:
    """Price FFTs within a third of the compiler's schedule. Their bytes alone would need a tenth of its time."""
    program = trace(lambda x: jnp.abs(jnp.fft.fft(x)), (S(((1 << 23) // length, length), jnp.float32),))
    plan = make_plan(program, Options(topology="v5e:1x1", mesh="data=1")).plan
    compilation = compile_plan(program, plan, 300.0, quick=True)
    assert compilation.estimate is not None
    assert compilation.step_time_predicted_s == pytest.approx(compilation.estimate.step_time_s, rel=0.35)
