"""A plan like that of a Llama-3-8B training step, written by hand."""

import dataclasses

import pytest

from autoshard.planning import Collective, HeldTensors, Plan, PlannedOp, Prediction, Span, Spec, Timeline


GIB = 2**30


def prediction(compute: float, hidden: float, exposed: float, peak: float, fits: bool = True, **more) -> Prediction:
    step = compute + exposed
    return Prediction(
        step_time_s=step,
        compute_s=compute,
        hidden_comm_s=hidden,
        exposed_comm_s=exposed,
        mfu=0.62 * 3.2 / step,
        peak_bytes=int(peak * GIB),
        memory={"parameters": int(0.2 * peak * GIB), "activations": int(0.8 * peak * GIB)},
        fits=fits,
        wire_bytes={"data": 4 * GIB, "model": 9 * GIB},
        **more,
    )


def llama_plan() -> Plan:
    layer = "model.layers.*."
    arguments: dict[str, tuple[tuple[int, ...], Spec, str]] = {}
    for kind, prefix in (("parameter", ""), ("optimizer_state", "opt.mu."), ("optimizer_state", "opt.nu.")):
        for name, shape, dims in [
            ("model.embed_tokens.weight", (128256, 4096), (("model",), ("data",))),
            (layer + "self_attn.q_proj.weight", (32, 4096, 4096), ((), ("model",), ("data",))),
            (layer + "self_attn.k_proj.weight", (32, 1024, 4096), ((), ("model",), ("data",))),
            (layer + "self_attn.v_proj.weight", (32, 1024, 4096), ((), ("model",), ("data",))),
            (layer + "self_attn.o_proj.weight", (32, 4096, 4096), ((), ("data",), ("model",))),
            (layer + "mlp.gate_proj.weight", (32, 14336, 4096), ((), ("model",), ("data",))),
            (layer + "mlp.up_proj.weight", (32, 14336, 4096), ((), ("model",), ("data",))),
            (layer + "mlp.down_proj.weight", (32, 4096, 14336), ((), ("data",), ("model",))),
            (layer + "input_layernorm.weight", (32, 4096), ((), ())),
            ("model.norm.weight", (4096,), ((),)),
            ("lm_head.weight", (128256, 4096), (("model",), ("data",))),
        ]:
            arguments[prefix + name] = (shape, Spec(dims), kind)
    arguments["input_ids"] = ((64, 8192), Spec((("data",), ("model",))), "batch")
    chosen = prediction(
        2.91,
        0.84,
        0.31,
        41.0,
        collectives=(
            Collective(
                "all-gather", ("data",), 448, 12 * GIB, 0.52, True, layer + "mlp.up_proj.weight", "model.py:31", 0.0
            ),
            Collective(
                "reduce-scatter",
                ("model",),
                256,
                7 * GIB,
                0.21,
                False,
                "dot_general in mlp.down_proj",
                "lib/nets/mlp.py:7",
                0.15,
            ),
            Collective("all-reduce", ("data", "model"), 6, 3 * GIB, 0.06, False, "loss"),
            Collective("all-to-all", ("model",), 64, GIB, 0.04, False, ""),
        ),
        peak_at="the backward pass of layer 31 (dot_general in mlp.down_proj)",
    )
    return Plan(
        program_name="llama3-8b",
        program_fingerprint="0" * 64,
        topology="v5p:4x8x8",
        mesh={"data": 32, "model": 8},
        device_order=tuple(range(256)),
        memory_limit_bytes=int(95.7 * GIB),
        arguments={name: spec for name, (_, spec, _) in arguments.items()},
        results={name: spec for name, (_, spec, role) in arguments.items() if role != "batch"},
        pins=(),
        prediction=chosen,
        baselines={
            "data parallel": prediction(3.05, 0.9, 0.9, 151.0, fits=False),
            "fsdp": prediction(2.95, 1.4, 0.52, 44.0),
            "tensor parallel": prediction(2.88, 0.1, 2.4, 71.0),
            "fsdp x tp": prediction(2.9, 0.8, 0.61, 46.0),
            "fsdp x tp, sequence": prediction(2.9, 0.8, 0.42, 42.0),
        },
        objective=3_220_000_000_000,
        lower_bound=3_180_000_000_000,
        solver_gap=0.0124,
        plan_gap=0.034,
        words=(
            "batch over data",
            "ffn, heads and vocabulary over model",
            "keys and values gathered over model",
            "parameters and optimizer state also over data",
        ),
        warnings=("`sort` has no sharding rule and is planned as replicated; it takes 0.1 % of the step.",),
        provenance={"autoshard": "0.1.0", "jax": "0.10.2", "seed": 0},
        shapes={name: shape for name, (shape, _, _) in arguments.items()},
        dtypes=dict.fromkeys(arguments, "bfloat16"),
        roles={name: role for name, (_, _, role) in arguments.items()},
        axis_roles={"data": ("batch",), "model": ("ffn", "heads", "vocabulary", "keys and values gathered")},
        timeline=Timeline(
            end_s=3.22,
            spans=(
                Span("jit(step)/jvp(embedding)/gather", "compute", 0.0, 0.11, -1),
                Span("jit(step)/jvp()/while/body/linear/dot_general", "compute", 0.11, 0.9, 0),
                Span("all-gather over data: " + layer + "mlp.up_proj.weight", "data", 0.11, 0.52, 0),
                Span("reduce-scatter over model: jit(step)/while/body/add", "exposed", 1.01, 0.31, 0),
                Span("jit(step)/transpose(jvp())/while/body/linear/dot_general", "compute", 1.32, 1.9, 1),
            ),
            moments_s=(0.0, 0.11, 1.32, 3.22),
            memory={
                "parameters": (int(8.2 * GIB),) * 4,
                "activations": (0, int(20 * GIB), int(32.8 * GIB), 0),
            },
            held=(
                HeldTensors("jit(step)/jvp()/while/body/add", "activations", 32, 19 * GIB, 1, 2),
                HeldTensors("jit(step)/jvp()/while/body/mlp/dot_general", "activations", 1, 13 * GIB, 2, 2),
                HeldTensors(layer + "mlp.up_proj.weight", "parameters", 1, 8 * GIB, 0, 3),
            ),
        ),
        ops=llama_ops(layer),
    )


def llama_ops(layer: str) -> tuple[PlannedOp, ...]:
    """Return ops with 2.91 s of compute and 0.31 s of exposed collectives in all, and the predicted wire bytes."""
    none = PlannedOp("", "", "", "", 12, 0.01, 0.0, 0.0, 0.0, 1e9, 1e9, 0, "memory")
    matmul = dataclasses.replace(none, kind="dot_general", line="lib/nets/mlp.py:7", bound="compute")
    up, down = (f"jit(step)/{each}/while/body/" for each in ("jvp()", "transpose(jvp())"))
    return (
        dataclasses.replace(
            matmul, name=down + "mlp/dot_general", parameter=layer + "mlp.up_proj.weight", times=64,
            compute_s=1.6, sent_s=0.52, flops=6e14, moved_bytes=2e11, wire_bytes=12 * GIB,
        ),
        dataclasses.replace(
            matmul, name=up + "mlp/dot_general", parameter=layer + "mlp.down_proj.weight", times=32,
            compute_s=0.8, sent_s=0.21, waited_s=0.15, flops=3e14, moved_bytes=1e11, wire_bytes=7 * GIB,
        ),
        dataclasses.replace(
            none, name=up + "exp", kind="exponential", line="model.py:31", compute_s=0.5, flops=0.0, moved_bytes=9e11
        ),
        dataclasses.replace(
            none, name="jit(step)/add", kind="add", bound="network", compute_s=0.0, sent_s=0.16, waited_s=0.16,
            flops=0.0, moved_bytes=0.0, wire_bytes=4 * GIB,
        ),
        none,
    )  # fmt: skip


@pytest.fixture
def plan() -> Plan:
    return llama_plan()
