"""Runs of eager frameworks on GPUs, as measured groups state them by degrees and microbatches."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from autoshard.cost import Topology
from autoshard.degrees.gpu_run import GpuRun
from autoshard.errors import UserError
from autoshard.program import config_dims, read_config
from autoshard.program.config_files import bundled
from autoshard.serving import Decoder
from autoshard.validation.pair_dims import whole_number
from autoshard.validation.published_runs import IncompleteError


_FRAMEWORKS = {
    r"torchtitan": "torchtitan",
    r"megatron[- ]?deepspeed": "megatron-deepspeed",
    r"nemo": "nemo",
    r"megatron|mcore": "megatron-core",
    r"nanotron": "nanotron",
}
"""Words in the name of a framework -> name of the `EagerFramework`, the first match."""
_RECOMPUTE = {"none": "none", "no": "none", "full": "full", "selective": "selective", "per-op": "selective"}
"""First words of a row's recomputation -> that of `GpuRun`."""
_ASYNC = re.compile(r"async ?tp", re.I)
_COMPILES = re.compile(r"\bcompiled?\b")


def eager_framework_of(stated: Mapping[str, Any]) -> str:
    """Return the name of the eager framework that a row names; empty for frameworks of XLA and without one."""
    text = str(stated.get("framework", "")).lower()
    name = next((name for words, name in _FRAMEWORKS.items() if re.search(words, text)), "")
    compiled = name == "torchtitan" and _COMPILES.search(str(stated.get("execution", "")))
    return "torchtitan compiled" if compiled else name


def named_dims(model: Mapping[str, Any], assumed: list[str]) -> Mapping[str, Any]:
    """Return a model's dims, with those of the public model that it is named after where it states none.

    Dims that the source states have priority, such as a number of layers. The name is added to `assumed`.
    """
    family = re.sub(r"\.\d+|[\W_]", "", str(model.get("family", "")).lower())
    if "emb" in model or not family:
        return model
    names = {re.sub(r"\.\d+|[\W_]", "", name): name for name in bundled()}
    name = names.get(family)
    dims = config_dims(read_config(name)[1], Decoder) if name else None
    if dims is None:
        return model
    if dims.experts > 1:
        raise IncompleteError(f"the number of dense layers among the {model.get('layers')} of {name} is not stated")
    assumed.append(f"dims of {name}")
    return {
        "emb": dims.width, "mlp": dims.mlp_width, "heads": dims.heads, "kv_heads": dims.kv_heads,
        "head_dim": dims.head_size, "vocab": dims.vocabulary, "layers": dims.layers, "tied_head": dims.tied,
    } | {key: value for key, value in model.items() if key != "family"}  # fmt: skip


def gpu_run(
    stated: Mapping[str, Any], decoder: Decoder, topology: Topology, degrees: Mapping[str, int], framework: str
) -> tuple[GpuRun, tuple[str, ...]]:
    """Return the run that a row on GPUs states, and what had to be assumed.

    - `degrees`: degrees by our keys, 1 if not stated.

    FSDP is ZeRO-3, and ZeRO-2 in a pipeline, where torchtitan keeps the gathered parameters. Raises `IncompleteError`
    for options that are not priced.
    """
    assumed: list[str] = []
    tp, pp, cp = (degrees[key] for key in ("tp", "pp", "cp"))
    dp = topology.num_devices // (tp * pp * cp)
    if dp * tp * pp * cp != topology.num_devices:
        raise IncompleteError(f"tp {tp} x pp {pp} x cp {cp} does not divide the {topology.num_devices} GPUs")
    if degrees["dp"] * degrees["fsdp"] not in (1, dp):
        raise IncompleteError(f"dp={degrees['dp'] * degrees['fsdp']} is stated, but {dp} replicas are left for it")
    micro, count = _microbatches(stated, dp, pp)
    try:
        run = GpuRun(
            decoder, topology, framework, whole_number(stated, "seq"), dp, tp, pp, micro, count,
            _zero(stated, degrees, dp * cp, pp, framework, assumed), _recompute(stated, framework, assumed),
            chunks=whole_number(stated, "virtual_stages", 1) if pp > 1 else 1,
            dtype=_dtype(stated), ep=degrees["ep"], cp=cp,
            async_tp=_ASYNC.search(str(stated.get("execution"))) is not None,
        )  # fmt: skip
    except UserError as error:
        raise IncompleteError(str(error)) from None
    return run, tuple(assumed)


def _microbatches(stated: Mapping[str, Any], dp: int, pp: int) -> tuple[int, int]:
    """Return the sequences of a replica's microbatch, and the number of its microbatches.

    Two of microbatch, number and batch give the third. A batch alone is one microbatch, or one for each stage of a
    pipeline, as frameworks cut it by default. Raises `IncompleteError` if they are not stated, or do not agree.
    """
    micro, count = (whole_number(stated, key) if key in stated else 0 for key in ("micro_batch", "microbatches"))
    count = count or (whole_number(stated, "gradient_accumulation") if "gradient_accumulation" in stated else 0)
    if micro and count:
        return micro, count
    batch = whole_number(stated, "global_batch")
    if batch % dp:
        raise IncompleteError(f"{batch} sequences are not divided by {dp} replicas")
    own = batch // dp
    if not micro and not count:
        count = math.gcd(own, pp)
    micro, count = micro or own // count, count or own // micro
    if micro * count != own:
        raise IncompleteError(f"microbatches of {micro} sequences do not make the {own} of a replica")
    return micro, count


def _zero(
    stated: Mapping[str, Any], degrees: Mapping[str, int], replicas: int, pp: int, framework: str, assumed: list[str]
) -> int:
    """Return the ZeRO stage: stated, or that of the framework, which is added to `assumed`."""
    value = stated.get("zero")
    if value is not None:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 3:
            raise IncompleteError(f"zero={value} is not a ZeRO stage, 0 to 3")
        return value
    if framework.startswith("torchtitan"):
        return 2 if pp > 1 else 3
    if replicas > 1 and framework in ("megatron-core", "nemo"):
        assumed.append("optimizer state split over replicas (ZeRO-1)")
        return 1
    return 0


def _recompute(stated: Mapping[str, Any], framework: str, assumed: list[str]) -> str:
    """Return the recomputation of a row by the name of `GpuRun`; without one none, which is added to `assumed`."""
    if "remat" not in stated:
        assumed.append("no recomputation")
        return "none"
    word = re.split(r"[\s(,:]", str(stated["remat"]).lower())[0]
    if word not in _RECOMPUTE:
        raise IncompleteError(f"remat {stated['remat']!r} is not known")
    if _RECOMPUTE[word] == "selective" and not framework.startswith("torchtitan"):
        raise IncompleteError(f"remat {stated['remat']!r} of {framework} is not rebuilt")
    return _RECOMPUTE[word]


def _dtype(stated: Mapping[str, Any]) -> str:
    """Return the dtype of a row's matmuls, `bf16` or `fp8`.

    Scales for each row are another kernel, whose rate is not known. So are operands of four bits.
    """
    text = str(stated.get("dtype", "bf16")).lower()
    if re.search(r"4-bit|fp4|mxfp|int8|rowwise", text):
        raise IncompleteError(f"dtype {text!r} is not rebuilt")
    return "fp8" if re.search(r"fp8|float8", text) else "bf16"


_POWER_W = {"a100": 400, "h100": 700, "h200": 700, "b200": 1000}
"""Power at which the rates in a chip's file hold, in watts, by NVIDIA's data sheets of SXM boards."""


def gpu_place(place: Topology, hardware: str) -> Topology:
    """Return a topology with the memory and clock of a text such as `H100 96GB HBM2e 2.4TB/s, 500 W power limit`.

    Power grows with the cube of the clock, since the voltage grows with the clock. Matrix rates follow the clock.
    """
    size, rate = re.search(r"(\d+) ?GB\b(?!/s)", hardware), re.search(r"([\d.]+) ?TB/s", hardware)
    limit = re.search(r"(\d+) ?W\b", hardware)
    chip = place.chip
    if size is not None and abs(int(size[1]) * 1e9 / chip.hbm_bytes - 1.0) > 0.1:
        more = int(size[1]) * 2**30 - chip.hbm_bytes
        changed = {"hbm_bytes": chip.hbm_bytes + more, "usable_bytes_per_device": chip.usable_bytes_per_device + more}
        chip = dataclasses.replace(chip, **changed)
    if rate is not None:
        chip = dataclasses.replace(chip, memory_bytes_per_s=float(rate[1]) * 1e12)
    if limit is not None and int(limit[1]) < _POWER_W.get(chip.name, 0):
        clock = (int(limit[1]) / _POWER_W[chip.name]) ** (1 / 3)
        peaks = {dtype: peak * clock for dtype, peak in chip.peak_flops_per_s.items()}
        chip = dataclasses.replace(chip, peak_flops_per_s=peaks, clock_hz=chip.clock_hz * clock)
    return dataclasses.replace(place, chip=chip) if chip is not place.chip else place
