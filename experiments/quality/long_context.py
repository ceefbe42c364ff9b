"""Llama-8B on 64k tokens a sequence, grouped query heads in jax's splash kernel: our plan compared with plans by hand.

    python experiments/quality/long_context.py [--layers N] [--topology T] [--mesh AXES] [--time-limit S]

The TPU compiler compiles every plan with no TPU present, and the step is timed from its schedule. There are two plans
by hand. The first is FSDP x tensor parallelism with the sequence split between matmuls. Keys and values are repeated
for every query head, so that the heads divide. The second is context parallelism: the queries' sequence is split, and
keys and values are gathered.

Compiled programs are stored under `build/long_context`. The table is `experiments/results/long_context.md`.
"""

import argparse
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")  # jax reads this variable at import
import jax
import jax.numpy as jnp
import optax
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from autoshard.base.units import format_bytes, format_seconds
from autoshard.exec.ahead.compile_plans import report
from autoshard.planning import Options, Plan, make_plan, read_asked
from autoshard.program import Program, Role, trace
from experiments.lib.saved_results import compiled


TABLE = Path(__file__).parents[1] / "results" / "long_context.md"
WIDTH, MLP, HEADS, KV_HEADS, HEAD, VOCABULARY = 4096, 14336, 32, 8, 128, 128256


@functools.cache
def kernel(heads: int, length: int) -> Any:
    """Make jax's splash kernel; cached, since it reads every block of the mask."""
    block = min(512, length)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((length, length))] * heads)
    with jax.ensure_compile_time_eval():
        return splash_attention_kernel.make_splash_mha_single_device(mask, block_sizes=sizes)


def attention(query: Any, key: Any, value: Any) -> Any:
    """Compute causal attention of [B, H, S, D] over [B, K, S, D] twice; H / K query heads share a head of keys."""
    return jax.vmap(kernel(*query.shape[1:3]))(query * query.shape[3] ** -0.5, key, value)


def layer(x: Any, weights: dict[str, Any], repeated: bool) -> Any:
    w = {name: each.astype(jnp.bfloat16) for name, each in weights.items()}
    normed = norm(x, w["norm"])
    query, key, value = (jnp.einsum("bsd,dhe->bhse", normed, w[name]) for name in ("query", "key", "value"))
    query, key = rotated(query), rotated(key)
    if repeated:
        key, value = (jnp.repeat(each, HEADS // KV_HEADS, axis=1) for each in (key, value))
    x = x + jnp.einsum("bhse,hed->bsd", attention(query, key, value), w["out"])
    normed = norm(x, w["mlp_norm"])
    gate, up = (jnp.einsum("bsd,df->bsf", normed, w[name]) for name in ("gate", "up"))
    return x + jnp.einsum("bsf,fd->bsd", jax.nn.silu(gate) * up, w["down"])


def norm(x: Any, weight: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype) * weight


def rotated(x: Any) -> Any:
    """Apply the rotary embedding to [B, H, S, D]."""
    half = x.shape[-1] // 2
    place = jax.lax.broadcasted_iota(jnp.float32, (x.shape[2], half), 0)
    angle = place * jnp.exp(jax.lax.broadcasted_iota(jnp.float32, (x.shape[2], half), 1) * (-jnp.log(5e5) / half))
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def loss(params: Any, batch: Any, repeated: bool) -> Any:
    x = jnp.take(params["embedding"].astype(jnp.bfloat16), batch["ids"], axis=0)
    run = jax.checkpoint(functools.partial(layer, repeated=repeated))
    x, _ = jax.lax.scan(lambda x, weights: (run(x, weights), None), x, params["layers"])
    logits = jnp.einsum(
        "bsd,dv->bsv", norm(x, params["norm"].astype(jnp.bfloat16)), params["head"].astype(jnp.bfloat16)
    )
    logits = logits.astype(jnp.float32)
    picked = jnp.sum(jnp.where(jnp.arange(VOCABULARY) == batch["labels"][..., None], logits, 0.0), -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def program(layers: int, batch: int, seq: int, repeated: bool = False) -> Program:
    """Trace one training step; if `repeated`, keys and values are repeated for every query head."""

    def f32(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {
        "embedding": f32(VOCABULARY, WIDTH),
        "head": f32(WIDTH, VOCABULARY),
        "layers": {
            "down": f32(layers, MLP, WIDTH),
            "gate": f32(layers, WIDTH, MLP),
            "key": f32(layers, WIDTH, KV_HEADS, HEAD),
            "mlp_norm": f32(layers, WIDTH),
            "norm": f32(layers, WIDTH),
            "out": f32(layers, HEADS, HEAD, WIDTH),
            "query": f32(layers, WIDTH, HEADS, HEAD),
            "up": f32(layers, WIDTH, MLP),
            "value": f32(layers, WIDTH, KV_HEADS, HEAD),
        },
        "norm": f32(WIDTH),
    }
    optimizer = optax.adamw(1e-4)
    ids = jax.ShapeDtypeStruct((batch, seq), jnp.int32)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch, repeated)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def role(name: str) -> Role | None:
        return {"params": Role.PARAMETER, "batch": Role.BATCH}.get(name.partition(".")[0].partition("[")[0])

    args = (params, jax.eval_shape(optimizer.init, params), {"ids": ids, "labels": ids})
    return trace(
        step, args, name="long_context", donate_argnums=(0, 1), training=True, tokens=batch * seq,
        arg_names=("params", "optimizer", "batch"),
        roles=role,
    )  # fmt: skip


def plans(args: argparse.Namespace) -> Iterator[tuple[str, Program, Plan]]:
    """Yield name, program and plan, ours first."""
    grouped = program(args.layers, args.batch, args.seq)
    by_hand = "data=4,model=16"
    common: dict[str, Any] = {"topology": args.topology, "time_limit": args.time_limit}
    yield "ours", grouped, make_plan(grouped, Options(**common, mesh=args.mesh)).plan
    repeated = program(args.layers, args.batch, args.seq, repeated=True)
    tensor = make_plan(repeated, Options(**common, mesh=by_hand)).baseline_plans["fsdp_tp_sp"]
    yield "FSDP 4 x tensor parallelism 16, sequence split, keys and values repeated", repeated, tensor
    sequence = read_asked(axis_only={"model": ["sequence"]})
    context = make_plan(grouped, Options(**common, mesh=by_hand, asked=sequence))
    yield "context parallelism over 16", grouped, context.plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=65536)
    parser.add_argument("--topology", default="v5p:4x4x4")
    parser.add_argument("--mesh", default="data=4,model=16")
    parser.add_argument("--time-limit", type=float, default=60.0)
    args = parser.parse_args()
    lines = [
        "# 64k tokens a sequence",
        "",
        f"Llama-8B's layer ({args.layers} of them, scanned), {args.batch} sequences of {args.seq} tokens on "
        f"{args.topology}, our mesh {args.mesh}; made by `python experiments/quality/long_context.py`. `estimate` is "
        "of the "
        "TPU compiler's schedule, `slowdown` against ours.",
        "",
        "| plan | predicted | estimate | slowdown | compute | exposed | peak |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    ours = 0.0
    for name, made, plan in plans(args):
        judgement = report(made, plan, compiled("long_context", made, plan, 1800.0))
        timed = judgement.estimate
        assert timed is not None, f"{name} does not fit"
        ours = ours or timed.step_time_s
        lines.append(
            f"| {name} | {format_seconds(plan.prediction.step_time_s)} | {format_seconds(timed.step_time_s)} | "
            f"{timed.step_time_s / ours:.3f} | {format_seconds(timed.compute_s)} | "
            f"{format_seconds(timed.exposed_comm_s)} | {format_bytes(judgement.peak_compiled or 0)} |"
        )
        print(lines[-1], flush=True)
        for warning in plan.warnings:
            print("   ", warning, flush=True)
        TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
