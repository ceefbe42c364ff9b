"""A way to serve as commands of `vllm serve`, on GPUs and (with its plugin for TPUs) on TPUs."""

import json
from collections.abc import Mapping
from typing import Any

from autoshard.cost import MEMORY_SHARE, ServingEngine, ServingPoint, Topology
from autoshard.plan import ServingPlan


_CONNECTORS: Mapping[str, Mapping[str, str]] = {
    "tpu": {"kv_connector": "TPUConnector", "kv_connector_module_path": "tpu_inference.distributed.tpu_connector"},
    "gpu": {"kv_connector": "NixlConnector"},
}
"""What brings keys and values from one engine to another."""
_CACHES = {("tpu", "fp8"): "fp8", ("gpu", "fp8"): "fp8", ("gpu", "int8"): "int8_per_token_head"}
"""vLLM's names of dtypes of keys and values."""


def vllm_commands(plan: ServingPlan, point: ServingPoint | None = None) -> list[str]:
    """The commands that serve so (by default as the best way does); where prompts are computed apart two, of those
    engines and of the others. A comment says how many of each to start where one command is one engine."""
    point = plan.best if point is None else point
    # Limits of a scheduler are those of one group, each of which has its own.
    seats = -(-point.batch // point.engine.attention)
    if point.prompts is None:
        # A step has its sequences beside a chunk of prompts.
        return [_command(plan, point.engine, point.engines, seats, point.chunk + seats)]
    decoding = point.engines - point.prompt_engines
    return [
        _command(plan, point.prompts, point.prompt_engines, None, point.chunk, "kv_producer"),
        _command(plan, point.engine, decoding, seats, None, "kv_consumer"),
    ]


def _command(
    plan: ServingPlan, engine: ServingEngine, engines: int, seats: int | None, tokens: int | None, role: str = ""
) -> str:
    asked, traits = plan.asked, Topology.parse(plan.topology).traits
    groups, grouped = engine.attention, engine.attention > 1
    sizes = [f"--max-num-seqs {seats}"] if seats is not None else []
    sizes += [f"--max-num-batched-tokens {tokens}"] if tokens is not None else []
    added: dict[str, Any] = {}
    words, copies = ["vllm serve MODEL"], engines
    if traits.serves_by_mesh:
        words.append(f"--tensor-parallel-size {engine.devices}")
        if grouped:
            words.insert(0, "NEW_MODEL_DESIGN=1")
            added["sharding"] = {"sharding_strategy": {"enable_dp_attention": True, "attn_dp_size": groups}}
        if asked.weights != "bf16":
            added["quantization"] = f"{asked.weights}_default.yaml"
    else:
        words.append(f"--tensor-parallel-size {engine.tensor}")
        words += [f"--data-parallel-size {groups}"] if grouped else []
        words += ["--quantization fp8"] if asked.weights == "fp8" else []
    # On GPUs data parallel copies of a mixture share their experts.
    if engines > 1 and (traits.serves_by_mesh or plan.decoder.experts == 1):
        words.append(f"--data-parallel-size {engines}")
        copies = 1
    words += ["--enable-expert-parallel"] if engine.experts > 1 else []
    words += [f"--max-model-len {asked.input + asked.output}", *sizes, f"--gpu-memory-utilization {MEMORY_SHARE}"]
    cache = _CACHES.get((traits.name, asked.cache))
    words += [f"--kv-cache-dtype {cache}"] if cache else []
    words += [f"--additional-config {_quoted(added)}"] if added else []
    if role:
        words.append(f"--kv-transfer-config {_quoted({**_CONNECTORS.get(traits.name, {}), 'kv_role': role})}")
    return " ".join([*words, f"# {copies} of these"] if copies > 1 else words)


def _quoted(value: Mapping[str, Any]) -> str:
    return f"'{json.dumps(value)}'"


def vllm_notes(plan: ServingPlan) -> list[str]:
    """What the commands cannot say."""
    asked, traits, notes = plan.asked, Topology.parse(plan.topology).traits, []
    if asked.weights == "int8" and not traits.serves_by_mesh:
        notes.append("MODEL is a checkpoint with weights of int8 (w8a8): vLLM does not make them so on GPUs.")
    if asked.cache == "int8" and traits.serves_by_mesh:
        notes.append("vLLM has no keys and values of int8 on TPUs: fp8 takes as much memory (--cache-dtype fp8).")
    return notes
