"""Small programs and plans written by hand for the tests of `exec`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import mlir
from autoshard.planning import Pin, Plan, Prediction, Spec
from autoshard.program import Program, trace


def spec(text: str) -> Spec:
    """Parse `"data,-,model+data"` as a Spec. The empty text is the spec of a scalar."""
    parts = [part.strip() for part in text.split(",")] if text else []
    return Spec(tuple(() if part == "-" else tuple(part.split("+")) for part in parts))


def prediction(wire_bytes: Mapping[str, int] | None = None) -> Prediction:
    return Prediction(1e-3, 1e-3, 0.0, 0.0, None, 1, {}, True, dict(wire_bytes or {}))


def handmade(
    program: Program,
    mesh: dict[str, int],
    arguments: Mapping[str, str],
    results: Mapping[str, str] | None = None,
    pins: tuple[Pin, ...] = (),
    topology: str = "cpu:8",
    device_order: tuple[int, ...] | None = None,
) -> Plan:
    """Build a plan with these specs. Unnamed tensors are replicated, and updated state has its argument's spec."""
    specs = {
        a.name: spec(arguments[a.name]) if a.name in arguments else Spec.replicated(len(a.shape))
        for a in program.arguments
    }
    out = {}
    for result in program.results:
        if results and result.name in results:
            out[result.name] = spec(results[result.name])
        elif result.argument is not None:
            out[result.name] = specs[program.arguments[result.argument].name]
        else:
            out[result.name] = Spec.replicated(len(result.shape))
    return Plan(
        program_name=program.name,
        program_fingerprint=program.fingerprint,
        topology=topology,
        mesh=mesh,
        device_order=device_order or tuple(range(int(np.prod(list(mesh.values()))))),
        memory_limit_bytes=1 << 30,
        arguments=specs,
        results=out,
        pins=pins,
        prediction=prediction(),
        baselines={},
        objective=0,
        lower_bound=0,
        solver_gap=0.0,
        plan_gap=0.0,
        words=(),
        warnings=(),
        provenance={"versions": {"jax": jax.__version__}},
        shapes={a.name: a.shape for a in program.arguments},
        dtypes={a.name: a.dtype for a in program.arguments},
        roles={a.name: a.role.value for a in program.arguments},
        module_hash=module_hash(program),
    )


def module_hash(program: Program) -> str:
    return mlir.structure_hash(inlined(program))


def inlined(program: Program) -> Any:
    return mlir.inline_calls(mlir.parse_module(program.module))


def numbers(program: Program, kind: str) -> list[int]:
    """List the numbers of the ops of one kind (`dot_general`, ...)."""
    return [i for i, op in enumerate(mlir.number_ops(inlined(program))) if op.name.endswith("." + kind)]


def assert_close(found: Any, wanted: Any, relative: float) -> None:
    """Compare all leaves; `relative` is the largest difference allowed, as a share of the tensor's own maximum."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        b = np.asarray(b)
        np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=relative * max(float(np.abs(b).max()), 1e-30))


def mlp_loss(params: dict[str, Any], x: Any, y: Any) -> Any:
    h = jax.nn.relu(x @ params["up"])
    return jnp.mean((h @ params["down"] - y) ** 2)


def sgd(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp() -> Program:
    """Trace one SGD step of a two-layer MLP: params.up [32, 64], params.down [64, 32], x and y [16, 32]."""
    params = {"down": f32(64, 32), "up": f32(32, 64)}
    return trace(sgd(mlp_loss), (params, f32(16, 32), f32(16, 32)), name="mlp", donate_argnums=(0,))


LAYERS, BATCH, SEQ, DIM, HEADS, FFN = 3, 8, 16, 32, 4, 64


def decoder_layer(x: Any, p: dict[str, Any]) -> Any:
    qkv = jnp.einsum("bsd,dthk->tbshk", x, p["qkv"])
    scores = jnp.einsum("bshk,bthk->bhst", qkv[0], qkv[1]) * (DIM // HEADS) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), scores, -1e9)
    mixed = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores, axis=-1), qkv[2])
    x = x + jnp.einsum("bshk,hkd->bsd", mixed, p["out"])
    return x + jax.nn.gelu(x @ p["up"], approximate=False) @ p["down"]


def decoder_loss(params: Any, tokens: Any) -> Any:
    x = params["table"][tokens]
    x, _ = jax.lax.scan(lambda c, p: (jax.checkpoint(decoder_layer)(c, p), None), x, params["layers"])
    logits = x @ params["table"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.roll(tokens, -1, 1)[..., None], axis=-1)
    return -jnp.mean(picked)


def decoder() -> Program:
    """Trace one SGD step of a scanned, rematerialised decoder."""
    k = DIM // HEADS
    layers = {
        "qkv": f32(LAYERS, DIM, 3, HEADS, k),
        "out": f32(LAYERS, HEADS, k, DIM),
        "up": f32(LAYERS, DIM, FFN),
        "down": f32(LAYERS, FFN, DIM),
    }
    params = {"layers": layers, "table": f32(128, DIM)}
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    return trace(sgd(decoder_loss), (params, tokens), name="decoder", donate_argnums=(0,))


MEGATRON = {
    "arg1": "data,-",
    "params.table": "model,-",
    "params.layers.qkv": "-,-,-,model,-",
    "params.layers.out": "-,model,-,-",
    "params.layers.up": "-,-,model",
    "params.layers.down": "-,model,-",
}
"""Tensor parallelism over `model`, data parallelism over `data`, for `decoder`."""
