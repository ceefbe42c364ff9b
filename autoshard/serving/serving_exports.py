"""A serving point as shardings in JAX, and as commands of `vllm serve`."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from autoshard.cost import Topology
from autoshard.report.display import clean
from autoshard.serving.serving_layouts import ServingDims, ServingSpecs, serving_specs
from autoshard.serving.serving_model import ServingEngine, ServingPoint
from autoshard.serving.serving_plan import ServingPlan


_DTYPES = {"bf16": "jnp.bfloat16", "fp8": "jnp.float8_e4m3fn", "int8": "jnp.int8"}
"""Dtypes of a serving plan -> expressions in the written file."""
_BODY = '''

def serving_mesh(sizes, devices=None):
    """A mesh of these devices (by default all), its axes laid on their links."""
    devices = jax.devices() if devices is None else devices
    grid = mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
    return Mesh(grid, tuple(sizes))


def sharding(mesh, name, ndim):
    """Of a weight by its name in the model, of `cache.….keys` or `cache.….values`, or of `batch.input_ids`.

    What is stacked layer by layer has its layers in front, and `*` or a slice for their numbers.
    """
    if name.startswith("cache."):
        spec = CACHE[name.split(".")[-1]]
    elif name.startswith("batch."):
        spec = INPUTS[name.removeprefix("batch.")]
    else:
        spec = WEIGHTS[re.sub(r"\\.(\\d+|\\[[^]]*\\])\\.", ".*.", name)]
    return NamedSharding(mesh, P(*[None] * (ndim - len(spec)), *spec))
'''


def jax_shardings(plan: ServingPlan, point: ServingPoint | None = None) -> str:
    """Return the text of a Python file with the shardings of a serving point, by default the best.

    It defines sizes of mesh axes, dtypes, tables of `PartitionSpec`, and functions for meshes and shardings. With
    separate engines for prompts it has a mesh for each kind, and tables for prompts if their splits differ.
    """
    point = plan.best if point is None else point
    decoding = point.engines - point.prompt_engines
    apart = point.prompts is not None
    specs = serving_specs(plan.config, plan.decoder, point.engine, decoding, counted=apart)
    prompts = specs
    if point.prompts is not None:
        prompts = serving_specs(plan.config, plan.decoder, point.prompts, point.prompt_engines, counted=True)
    head = textwrap.wrap(f'"""{_head(plan, point)}', 100)
    lines = [*head, "", "Written by `autoshard serve-plan`; step functions are yours.", '"""', ""]
    lines += ["import re", "", "import jax", "import jax.numpy as jnp", "from jax.experimental import mesh_utils"]
    lines += ["from jax.sharding import Mesh, NamedSharding", "from jax.sharding import PartitionSpec as P", "", ""]
    lines += _sizes(point, specs, prompts)
    lines += [f"WEIGHT_DTYPE = {_DTYPES[plan.asked.weights]}  # of matrices of layers"]
    lines += [f"CACHE_DTYPE = {_DTYPES[plan.asked.cache]}", ""]
    body = _BODY
    lines += _tables("", specs)
    if _split(prompts) != _split(specs):
        lines += ["", "# The same of engines for prompts.", *_tables("PROMPT_", prompts)]
        body = body.replace("sharding(mesh, name, ndim)", "sharding(mesh, name, ndim, prompts=False)")
        for name in ("WEIGHTS", "CACHE", "INPUTS"):
            body = body.replace(f"{name}[", f"(PROMPT_{name} if prompts else {name})[")
        body = body.replace("or of `batch.input_ids`.", "or of `batch.input_ids`; on engines for `prompts` or others.")
    return "\n".join(lines) + "\n" + body


def _split(specs: ServingSpecs) -> tuple[object, ...]:
    """Return the splits of two kinds of engines in a form to compare, without the sizes of axes."""
    return specs.weights, specs.cache, specs.inputs


def _tables(prefix: str, specs: ServingSpecs) -> list[str]:
    """Return the lines that define the tables of weights, cache and inputs, with `prefix` before their names."""
    return [
        *_table(f"{prefix}WEIGHTS", specs.weights, specs.joined),
        "",
        "# Of one layer: sequences, heads, places, and what a head has.",
        *_table(f"{prefix}CACHE", specs.cache),
        "",
        *_table(f"{prefix}INPUTS", specs.inputs),
    ]


def _head(plan: ServingPlan, point: ServingPoint) -> str:
    """Return the first sentence of the written file's docstring: model, topology, engines and sequences of each."""
    text = f"Shardings to serve {clean(plan.config)} on {plan.topology}: "
    if point.prompts is not None:
        text += f"{_engines(point.prompt_engines, point.prompts)} compute prompts, and "
    text += _engines(point.engines - point.prompt_engines, point.engine)
    seats = _counted(point.batch, "sequence")
    return f"{text}{' decode' if point.prompts else ''}; {seats} in an engine.".replace('"""', "")


def _engines(count: int, engine: ServingEngine) -> str:
    """Describe `count` engines of one kind: devices of each, and groups in attention if there are several."""
    text = f"{_counted(count, 'engine')} of {_counted(engine.devices, 'device')}"
    if engine.attention > 1:
        text += f" (in each {engine.attention} groups that have their own sequences and all weights of attention)"
    return text


def _counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _sizes(point: ServingPoint, specs: ServingSpecs, prompts: ServingSpecs) -> list[str]:
    """Return the lines that define the sizes of the mesh axes, of both meshes if prompts have their own engines.

    Engines for prompts have the first devices, engines for decoding the rest.
    """
    if point.prompts is None:
        return [f"SIZES = {_dict(specs.sizes)}", '"""Axes of `serving_mesh(SIZES)`."""', ""]
    devices = point.prompt_engines * point.prompts.devices
    return [
        f"PROMPT_SIZES = {_dict(prompts.sizes)}",
        f'"""Axes of `serving_mesh(PROMPT_SIZES, jax.devices()[:{devices}])`, which computes prompts."""',
        f"DECODE_SIZES = {_dict(specs.sizes)}",
        f'"""Axes of `serving_mesh(DECODE_SIZES, jax.devices()[{devices}:])`, which decodes."""',
        "",
    ]


def _dict(sizes: Mapping[str, int]) -> str:
    """Return the source text of a dict of mesh axes; without axes it has `engine` with size 1."""
    return "{" + ", ".join(f'"{name}": {size}' for name, size in (sizes or {"engine": 1}).items()) + "}"


def _table(name: str, specs: Mapping[str, ServingDims], joined: Mapping[str, str] | None = None) -> list[str]:
    """Return the lines that define one table of `PartitionSpec`s; a comment marks each key that is in `joined`."""
    lines = []
    for key, dims in specs.items():
        parts = (joined or {}).get(key)
        lines.append(f'    "{key}": {_spec(dims)},{f"  # {parts} in turns, not one after the other" if parts else ""}')
    return [f"{name} = {{", *lines, "}"]


def _spec(dims: ServingDims) -> str:
    """Return the source text of a `PartitionSpec` with an entry for each dim, `None` for a whole one."""
    cells = [f'"{axes[0]}"' if len(axes) == 1 else repr(axes).replace("'", '"') if axes else "None" for axes in dims]
    return f"P({', '.join(cells)})" if any(dims) else f"P({', '.join(['None'] * len(dims))})"


_CONNECTORS: Mapping[str, Mapping[str, str]] = {
    "tpu": {"kv_connector": "TPUConnector", "kv_connector_module_path": "tpu_inference.distributed.tpu_connector"},
    "gpu": {"kv_connector": "NixlConnector"},
}
"""vLLM's connectors that send keys and values from one engine to another, by backend."""
_CACHES = {("tpu", "fp8"): "fp8", ("gpu", "fp8"): "fp8", ("gpu", "int8"): "int8_per_token_head"}
"""vLLM's names of the dtypes of keys and values, by backend and our name."""


def vllm_commands(plan: ServingPlan, point: ServingPoint | None = None) -> list[str]:
    """Return the `vllm serve` commands of a serving point, by default the best; their limits are per group.

    With separate engines for prompts there are two: one for those engines, and one for the others. If a command starts
    one of several engines, a comment gives the number of engines to start.
    """
    point = plan.best if point is None else point
    # The limits of a scheduler are per group, since each group has its own scheduler.
    seats = -(-point.batch // point.engine.attention)
    if point.prompts is None:
        # A step has a chunk of prompts in addition to its sequences.
        return [_command(plan, point.engine, point.engines, seats, point.chunk + seats)]
    decoding = point.engines - point.prompt_engines
    return [
        _command(plan, point.prompts, point.prompt_engines, None, point.chunk, "kv_producer"),
        _command(plan, point.engine, decoding, seats, None, "kv_consumer"),
    ]


def _command(
    plan: ServingPlan, engine: ServingEngine, engines: int, seats: int | None, tokens: int | None, role: str = ""
) -> str:
    """Return the `vllm serve` command of one kind of engine.

    - `engines`: number of engines.
    - `seats`: most sequences at once; None to omit the limit.
    - `tokens`: most tokens in a step; None to omit the limit.
    - `role`: role in sending keys and values between engines; empty if there are none to send.
    """
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
    # On GPUs data-parallel copies of a mixture of experts share their experts.
    if engines > 1 and (traits.serves_by_mesh or plan.decoder.experts == 1):
        words.append(f"--data-parallel-size {engines}")
        copies = 1
    words += ["--enable-expert-parallel"] if engine.experts > 1 else []
    words += [f"--max-model-len {asked.input + asked.output}", *sizes, f"--gpu-memory-utilization {plan.memory_share}"]
    cache = _CACHES.get((traits.name, asked.cache))
    words += [f"--kv-cache-dtype {cache}"] if cache else []
    words += [f"--additional-config {_quoted(added)}"] if added else []
    if role:
        words.append(f"--kv-transfer-config {_quoted({**_CONNECTORS.get(traits.name, {}), 'kv_role': role})}")
    return " ".join([*words, f"# {copies} of these"] if copies > 1 else words)


def _quoted(value: Mapping[str, Any]) -> str:
    """Return the JSON of `value` in single quotes for a shell."""
    return f"'{json.dumps(value)}'"


def vllm_notes(plan: ServingPlan) -> list[str]:
    """Return notes on settings that the commands cannot express: weights of int8 on GPUs, caches of int8 on TPUs."""
    asked, traits, notes = plan.asked, Topology.parse(plan.topology).traits, []
    if asked.weights == "int8" and not traits.serves_by_mesh:
        notes.append("MODEL is a checkpoint with weights of int8 (w8a8): vLLM does not make them so on GPUs.")
    if asked.cache == "int8" and traits.serves_by_mesh:
        notes.append("vLLM has no keys and values of int8 on TPUs: fp8 takes as much memory (--cache-dtype fp8).")
    return notes
