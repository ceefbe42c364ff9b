"""Programs lowered for the platform of their topology: priced as they run there, and equal on every host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoshard
from autoshard import mlir
from autoshard.errors import UserError
from autoshard.graph import read_graph
from autoshard.program import Program, lowered_for


KEY = jax.eval_shape(lambda: jax.random.key(0))
TOPOLOGIES = {"cpu": "cpu:8", "cuda": "h100:8", "tpu": "v5e:2x4"}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def dropout(w, x, key):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), jnp.tanh(x @ w), 0.0)


def solve(x, b):
    factor = jnp.linalg.cholesky(x @ x.T + jnp.eye(len(x)))
    return jax.scipy.linalg.solve_triangular(factor, b, lower=True)


def pooled(x):
    sides = (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
    return jax.grad(lambda x: jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, *sides) ** 2))(x)


PROGRAMS = {
    "dropout": (dropout, (f32(256, 256), f32(512, 256), KEY)),
    "noise": (lambda x, key: x + jax.random.normal(key, x.shape), (f32(512, 256), KEY)),
    "categorical": (lambda x, key: jax.random.categorical(key, x), (f32(64, 1024), KEY)),
    "qr": (lambda x: jnp.linalg.qr(x), (f32(256, 128),)),
    "eigh": (lambda x: jnp.linalg.eigh(x + x.T), (f32(128, 128),)),
    "cholesky": (solve, (f32(128, 128), f32(128, 128))),
    "lu": (lambda x, b: jnp.linalg.solve(x, b), (f32(128, 128), f32(128, 128))),
    "svd": (lambda x: jnp.linalg.svd(x)[1], (f32(128, 128),)),
    "max-pool": (pooled, (f32(8, 32, 32, 8),)),
    "approximate top": (lambda x: lax.approx_max_k(x, 8), (f32(64, 8192),)),
    "cumulative sum": (lambda x: jnp.cumsum(x, 0), (f32(512, 64),)),
    "layer": (lambda x, w: jnp.tanh(x @ w), (f32(512, 64), f32(64, 64))),
}


@functools.cache
def traced(name: str) -> Program:
    return autoshard.trace(*PROGRAMS[name])


def lowered_by_jax(name: str, platform: str) -> str:
    fn, args = PROGRAMS[name]
    lowered = jax.jit(fn, keep_unused=True).trace(*args).lower(lowering_platforms=(platform,))
    return mlir.structure_hash(mlir.inline_calls(lowered.compiler_ir("stablehlo")))


@pytest.mark.parametrize("platform", TOPOLOGIES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_plans_are_of_the_program_that_jax_lowers_for_their_devices(name: str, platform: str):
    program = traced(name)
    plan = autoshard.plan(program, topology=TOPOLOGIES[platform])
    assert plan.module_hash == lowered_by_jax(name, platform)
    assert plan.program_fingerprint == program.fingerprint
    assert lowered_for(program, platform) is lowered_for(program, platform)


@pytest.mark.parametrize(("name", "topology"), [("dropout", "v5e:2x4"), ("noise", "h100:8"), ("max-pool", "v5e:2x4")])
def test_plans_of_accelerators_are_rehearsed_with_the_accelerators_program(name: str, topology: str):
    fn, args = PROGRAMS[name]
    draw = np.random.default_rng(0)
    given = [jax.random.key(1) if arg is KEY else jnp.asarray(draw.normal(size=arg.shape), arg.dtype) for arg in args]
    plan = autoshard.plan(traced(name), topology=topology)
    np.testing.assert_allclose(plan.jit(fn)(*given), jax.jit(fn)(*given), rtol=1e-5, atol=1e-5)


def test_a_program_that_cannot_be_rehearsed_here_is_refused_with_the_calls():
    plan = autoshard.plan(traced("qr"), topology="v5e:2x4")
    with pytest.raises(UserError, match=r"calls of `ProductOfElementaryHouseholderReflectors`, `Qr`; cpu devices"):
        plan.lower(*PROGRAMS["qr"][:1], *PROGRAMS["qr"][1])


def test_random_bits_are_no_loop_on_accelerators():
    """Compare the platforms: JAX lowers the rounds of threefry to a loop for CPUs only."""
    program = traced("noise")
    loops = {platform: len(read_graph(lowered_for(program, platform).module).loops) for platform in TOPOLOGIES}
    assert loops["cpu"] > 0 == loops["cuda"] == loops["tpu"]


def test_a_product_that_no_cpu_computes_is_planned():
    def product(x, w):
        return lax.dot(x, w, precision=lax.DotAlgorithmPreset.TF32_TF32_F32)

    args = f32(512, 512), f32(512, 512)
    plan = autoshard.plan(autoshard.trace(product, args), topology="h100:8")
    assert plan.prediction.step_time_s > 0
    with pytest.raises(UserError, match="TF32_TF32_F32.*not supported by dot_general on CPU"):
        plan.lower(product, *args)


def called(x):
    return jax.pure_callback(np.sin, x, x)


def printed(x):
    jax.debug.print("sum {}", x.sum())
    return 2.0 * x


@pytest.mark.parametrize("fn", [called, printed])
def test_what_has_one_lowering_is_planned_with_it_and_says_so(fn):
    program = autoshard.trace(fn, (f32(64, 64),))
    assert program.platform == "cpu"
    on_tpu = lowered_for(program, "tpu")
    assert (on_tpu.module, on_tpu.platform) == (program.module, "cpu")
    assert lowered_for(on_tpu, "tpu") is on_tpu
    assert "as JAX lowers it for cpu" in on_tpu.notes[-1]


def test_a_lack_of_memory_is_not_remembered_as_a_missing_lowering(monkeypatch: pytest.MonkeyPatch):
    program = autoshard.trace(*PROGRAMS["layer"])

    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Traced, "lower", fails)
        with pytest.raises(MemoryError):
            lowered_for(program, "tpu")
    again = lowered_for(program, "tpu")
    assert again.platform == "tpu" and again.notes == program.notes


@pytest.mark.parametrize(
    ("name", "flops"),
    [("qr", 2 * (2 * 256 * 128**2 - 2 * 128**3 / 3)), ("eigh", 9 * 128**3), ("lu", 2 * 128**3 / 3 + 2 * 128**3)],
)
def test_factorisations_count_their_flops(name: str, flops: float):
    """Count the FLOPs of cuSOLVER's calls; solving with both factors is n^2 for each column and factor."""
    graph = read_graph(lowered_for(traced(name), "cuda").module)
    assert graph.flops == pytest.approx(flops, rel=0.02)


def test_calls_of_unknown_work_are_named():
    def called(x):
        return jax.ffi.ffi_call("my_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    plan = autoshard.plan(autoshard.trace(called, (f32(64, 64),)), topology="v5e:2x4")
    assert any("`my_kernel`" in line and "states no work" in line for line in plan.warnings)
