"""Small programs and their models for the tests of planning."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from autoshard.cost import Topology, make_mesh
from autoshard.planning import Options
from autoshard.planning.plan_builder import PlanResult, make_plan
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups, find_groups
from autoshard.program import Program, trace
from tests.graph import programs as shared
from tests.graph.programs import f32


CASES = [
    ("mixed", "cpu:8", "data=4,model=2"),
    ("wide mlp", "v5e:4x4", "data=4,model=4"),
    ("decoder", "v6e:2x4*2", "data=2,model=8"),
    ("convolutions", "h100:8", "data=4,model=2"),
    ("views", "v5p:2x2x2", "data=4,model=2"),
    ("spectrum", "v5e:2x4", "data=4,model=2"),
    ("kernel gradients", "v5p:2x2x2", "data=4,model=2"),
]
"""Programs, topologies and meshes with all kinds of ops and networks."""


def matmul() -> Program:
    return trace(lambda params, x: jnp.tanh(x @ params), (f32(16, 8), f32(8, 16)), name="matmul")


def two_matmuls() -> Program:
    def fn(params: Any, x: Any) -> Any:
        return jax.nn.relu(x @ params["up"]) @ params["down"]

    return trace(fn, ({"up": f32(16, 64), "down": f32(64, 16)}, f32(8, 16)), name="two matmuls")


def nothing() -> Program:
    """Trace a program in which nothing can be split eight ways."""
    return trace(lambda x, s: (jnp.sin(x) * s, s + 1), (f32(3, 5), f32()), name="nothing")


def mixed() -> Program:
    """Trace a step with integers, a scalar, a key and flags in addition to floats."""

    def step(params: Any, tokens: Any, scale: Any, key: Any, mask: Any) -> Any:
        x = params["table"][tokens] * scale
        x = jnp.where(mask[..., None], x, 0) * jax.random.bernoulli(key, 0.5, (16, 1))
        return (x @ params["out"]).sum(1), scale + 1, tokens + 1

    params = {"table": f32(64, 32), "out": f32(32, 16)}
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    mask = jax.ShapeDtypeStruct((8, 16), jnp.bool_)
    return trace(step, (params, tokens, f32(), key, mask), name="mixed")


def spectrum() -> Program:
    """Trace a Fourier transform, for which CPU devices gather their operand."""
    return trace(lambda params, x: jnp.fft.fft(x @ params).real, (f32(64, 64), f32(16, 64)), name="spectrum")


def kernel_gradients() -> Program:
    """Trace gradients of the kernels of two convolutions, whose images TPU compilers shift."""

    def convolved(images: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(kernels: Any, images: Any) -> Any:
        return jnp.mean(convolved(jax.nn.relu(convolved(images, kernels["first"])), kernels["last"]) ** 2)

    kernels = {"first": f32(3, 3, 3, 128), "last": f32(3, 3, 128, 128)}
    return trace(jax.value_and_grad(loss), (kernels, f32(4, 32, 32, 3)), name="kernel gradients")


def wide_mlp(batch: int = 4096, dim: int = 2048, ffn: int = 8192, layers: int = 2) -> Program:
    """Trace AdamW on an MLP that is large enough for splitting to pay. Nothing is allocated."""
    optimizer = optax.adamw(1e-3)

    def step(params: Any, state: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            h = x
            for layer in p:
                h = h + jax.nn.relu(h @ layer["up"]) @ layer["down"]
            return jnp.mean(h.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def half(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    params = [{"up": half(dim, ffn), "down": half(ffn, dim)} for _ in range(layers)]
    state = jax.eval_shape(optimizer.init, params)
    return trace(step, (params, state, half(batch, dim)), name="wide mlp", donate_argnums=(0, 1))


def grouped_query(batch: int = 8, seq: int = 32, hidden: int = 64, kv: int = 4, group: int = 2) -> Program:
    """Trace SGD on a decoder layer whose attention has `kv` key-value heads, each with `group` query heads."""
    depth = 16

    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            q = (x @ p["q"]).reshape(batch, seq, kv, group, depth)
            k, v = ((x @ p[name]).reshape(batch, seq, kv, depth) for name in "kv")
            scores = jnp.einsum("bskgd,btkd->bkgst", q, k) / depth**0.5
            shares = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores, -1e9))
            h = x + jnp.einsum("bkgst,btkd->bskgd", shares, v).reshape(batch, seq, kv * group * depth) @ p["o"]
            return jnp.mean((h + jax.nn.relu(h @ p["up"]) @ p["down"]) ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, grads), value

    wide, narrow = kv * group * depth, kv * depth
    p = {"q": f32(hidden, wide), "k": f32(hidden, narrow), "v": f32(hidden, narrow), "o": f32(wide, hidden)}
    p |= {"up": f32(hidden, 4 * hidden), "down": f32(4 * hidden, hidden)}
    return trace(step, (p, f32(batch, seq, hidden)), name="grouped query", donate_argnums=(0,))


PROGRAMS: dict[str, Callable[[], Program]] = {
    **shared.PROGRAMS,
    "matmul": matmul,
    "two matmuls": two_matmuls,
    "nothing": nothing,
    "mixed": mixed,
    "spectrum": spectrum,
    "kernel gradients": kernel_gradients,
    "wide mlp": wide_mlp,
}


@functools.cache
def program(name: str) -> Program:
    return PROGRAMS[name]()


def model(name: str, topology: str = "cpu:8", mesh: str = "data=4,model=2", limit: int | None = None) -> Model:
    return _built(name, topology, mesh, limit)


@functools.cache
def _built(name: str, topology: str, mesh: str, limit: int | None) -> Model:
    return model_of(program(name), topology, mesh, limit)


def model_of(source: Program, topology: str, mesh: str, limit: int | None = None) -> Model:
    parsed = Topology.parse(topology)
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in mesh.split(","))}
    return build_model(
        source, analyse_program(source, parsed.backend), make_mesh(parsed, sizes), limit or parsed.usable_bytes
    )


def groups(built: Model) -> Groups:
    return find_groups(built.program, built.graph, built.structure)


def planned(
    name: str, topology: str = "cpu:8", mesh: str | None = "data=4,model=2", limit: int | None = None
) -> PlanResult:
    return _made(name, topology, mesh, limit)


@functools.cache
def _made(name: str, topology: str, mesh: str | None, limit: int | None) -> PlanResult:
    return make_plan(program(name), Options(topology=topology, mesh=mesh, memory_limit=limit, time_limit=20))


def random_choices(built: Model, rng: np.random.Generator) -> NDArray[np.int64]:
    """Choose one alternative per node at random, without forbidden pairs."""
    chosen = np.array([rng.integers(len(node.states)) for node in built.nodes])
    for reshard in built.reshards:
        if reshard.forbidden is not None:
            row = reshard.rows[chosen[reshard.source]]
            chosen[reshard.target] = rng.choice(np.flatnonzero(~reshard.forbidden[row][reshard.columns]))
    return chosen
