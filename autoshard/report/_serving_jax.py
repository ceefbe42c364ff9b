"""A way to serve as shardings in JAX: a file with a mesh, and a `PartitionSpec` for each weight, cache and input."""

import textwrap
from collections.abc import Mapping

from autoshard.cost import ServingEngine, ServingPoint
from autoshard.plan import ServingDims, ServingPlan, ServingSpecs, serving_specs
from autoshard.report._names import clean


_DTYPES = {"bf16": "jnp.bfloat16", "fp8": "jnp.float8_e4m3fn", "int8": "jnp.int8"}
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
    """The text of that file for a way to serve, by default the best."""
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
    return specs.weights, specs.cache, specs.inputs


def _tables(prefix: str, specs: ServingSpecs) -> list[str]:
    return [
        *_table(f"{prefix}WEIGHTS", specs.weights, specs.joined),
        "",
        "# Of one layer: sequences, heads, places, and what a head has.",
        *_table(f"{prefix}CACHE", specs.cache),
        "",
        *_table(f"{prefix}INPUTS", specs.inputs),
    ]


def _head(plan: ServingPlan, point: ServingPoint) -> str:
    text = f"Shardings to serve {clean(plan.config)} on {plan.topology}: "
    if point.prompts is not None:
        text += f"{_engines(point.prompt_engines, point.prompts)} compute prompts, and "
    text += _engines(point.engines - point.prompt_engines, point.engine)
    seats = _counted(point.batch, "sequence")
    return f"{text}{' decode' if point.prompts else ''}; {seats} in an engine.".replace('"""', "")


def _engines(count: int, engine: ServingEngine) -> str:
    text = f"{_counted(count, 'engine')} of {_counted(engine.devices, 'device')}"
    if engine.attention > 1:
        text += f" (in each {engine.attention} groups that have their own sequences and all weights of attention)"
    return text


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _sizes(point: ServingPoint, specs: ServingSpecs, prompts: ServingSpecs) -> list[str]:
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
    return "{" + ", ".join(f'"{name}": {size}' for name, size in (sizes or {"engine": 1}).items()) + "}"


def _table(name: str, specs: Mapping[str, ServingDims], joined: Mapping[str, str] | None = None) -> list[str]:
    lines = []
    for key, dims in specs.items():
        parts = (joined or {}).get(key)
        lines.append(f'    "{key}": {_spec(dims)},{f"  # {parts} in turns, not one after the other" if parts else ""}')
    return [f"{name} = {{", *lines, "}"]


def _spec(dims: ServingDims) -> str:
    cells = [f'"{axes[0]}"' if len(axes) == 1 else repr(axes).replace("'", '"') if axes else "None" for axes in dims]
    return f"P({', '.join(cells)})" if any(dims) else f"P({', '.join(['None'] * len(dims))})"
