"""Measured groups of one model under several plans, as data: what each row ran, and what was measured of it.

A group names a model by its dims, chips, what was the same for all rows (`fixed`) and, for each row, a `plan`: mesh
degrees and whatever else was chosen. A row that cannot be rebuilt says why; the other rows go on.
"""

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from autoshard.cost import Chip, Decoder, Topology, chip_names, load_chip, read_flags
from autoshard.errors import UserError
from autoshard.plan.published._pair_options import OPTIONS
from autoshard.plan.published._published import LOCAL_WINDOWS, IncompleteError, Run, made_of, slice_shape, stack_axis
from autoshard.program import SAVABLE, SAVED, KernelBlocks, LatentDims
from autoshard.units import GIB


PAIRS = pathlib.Path(__file__).with_name("pairs.json")
"""Groups shipped with the project; each names its source."""

_GROUP_KEYS = {"group", "model", "hardware", "chips", "rows"}
_FAMILIES = ("llama", "mistral", "mixtral", "qwen", "gemma", "deepseek", "hunyuan", "gpt3", "fuji", "palm", "grug")
_DIMS = {
    "layers": "layers",
    "emb": "width",
    "mlp": "mlp_width",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "head_dim": "head_size",
    "vocab": "vocabulary",
}
_DEGREES = ("dp", "fsdp", "tp", "ep", "cp", "pp", "tp_transpose", "fsdp_or_dp")
_HOW = {"trainer", "shard_mode", "deferred_grad_allreduce"}
"""Keys of a plan that say how one plan was written or driven."""
_UNCHANGED = {
    *("shard_mode", "trainer", "scan_layers", "scan", "deferred_grad_allreduce", "model", "seq", "per_device_batch"),
    *("global_batch", "remat", "xla_flags", "xla", "attention", "fused_attention_bwd", "dtype", "execution"),
    *("gradient_accumulation", "mesh", "optimizer"),
}
"""Keys of a plan that are read by themselves, or that change nothing of what is priced."""
_TORCHPRIME = {
    "flash": KernelBlocks((2048, 512), (2048, 512), (2048, 512)),
    "splash": KernelBlocks((2048, 2048), (2048, 2048), (2048, 2048), fused=True),
}
"""Blocks of the kernels that torchprime calls: of its attention module, and torch_xla.experimental.splash_attention."""
_SAVES: dict[str, str] = {
    "decoder_layer_input": "input",
    "query_proj": "query",
    "key_proj": "key",
    "value_proj": "value",
    "out_proj": "out",
    "context": "context",
    "mlpwi_0": "gate",
    "mlpwi_1": "up",
    "mlpwo": "down",
}
"""MaxText's names of values -> ours; the input of a layer is kept whatever is said."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """One row of a group: a plan, and what was measured of it."""

    plan: str
    """The row's choices, as `key=value` in the order of the source."""
    choice: str
    """The same without how it was said or measured (`trainer`, `shard_mode`): rows that share it are one plan."""
    run: Run | None
    """What ran, to be rebuilt; None if that is not possible."""
    skipped: str = ""
    """Why it cannot be rebuilt; empty if it can."""
    step_s: float | None = None
    """Seconds of a step; None where the row has no time, as when it ran out of memory."""
    token_s: float | None = None
    """Seconds of the whole machine for each token, by which rows of different batches compare; None without a time."""
    peak_bytes: int | None = None
    """Peak memory of one device, or what a device would have needed; None where it is not stated."""
    fits: bool | None = None
    """Whether the plan ran; False if it ran out of memory, None if nobody says."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredGroup:
    """One model on one set of chips under several plans (or several workloads under one plan)."""

    group: str
    source: str
    hardware: str
    compares_plans: bool
    """False if the plan is the same in all rows and the workload differs."""
    rows: tuple[MeasuredPlan, ...]
    on_tpu: bool = True


def read_groups(path: str | pathlib.Path | None = None, only: Iterable[str] = ()) -> tuple[MeasuredGroup, ...]:
    """The groups of a file (default: the shipped one), those alone whose names contain one of the texts in `only`.

    A row that cannot be rebuilt says why in `MeasuredPlan.skipped`. Raises: `UserError` for a file that cannot be read,
    for a group of another form, and where `only` leaves none.
    """
    file = PAIRS if path is None else pathlib.Path(path)
    try:
        document = json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"pairs file {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"pairs file {file} is not JSON: {error}") from error
    groups = document.get("groups") if isinstance(document, dict) else document
    if not isinstance(groups, list) or not groups:
        raise UserError(f"pairs file {file} holds no list of groups")
    found = tuple(_group(each, f"{file}, group {number}") for number, each in enumerate(groups))
    wanted = tuple(only)
    kept = tuple(group for group in found if not wanted or any(text in group.group for text in wanted))
    if not kept:
        raise UserError(f"no group of {file} is called {' or '.join(wanted)}")
    return kept


def _group(given: Any, origin: str) -> MeasuredGroup:
    if not isinstance(given, dict) or not given.keys() >= _GROUP_KEYS:
        missing = sorted(_GROUP_KEYS - given.keys()) if isinstance(given, dict) else sorted(_GROUP_KEYS)
        raise UserError(f"{origin} of the measured pairs misses {', '.join(missing)}")
    origin = str(given["group"])
    if not isinstance(given["rows"], list) or not all(isinstance(r, dict) and "plan" in r for r in given["rows"]):
        raise UserError(f"group {origin}: rows are {str(given['rows'])[:60]!r}, expected a list of objects with a plan")
    hardware = str(given["hardware"])
    return MeasuredGroup(
        group=origin,
        source=str(given.get("source", "")),
        hardware=hardware,
        compares_plans=not str(given.get("kind", "plan")).startswith("workload"),
        rows=tuple(_row(given, row, f"{origin}, row {number}") for number, row in enumerate(given["rows"])),
        on_tpu="tpu" in hardware.lower(),
    )


def _row(group: Mapping[str, Any], row: Mapping[str, Any], origin: str) -> MeasuredPlan:
    plan = row["plan"] if isinstance(row["plan"], dict) else {"plan": row["plan"]}
    words = {key: f"{key}={value}" for key, value in plan.items()}
    choice = " ".join(text for key, text in words.items() if key not in _HOW)
    bare = MeasuredPlan(" ".join(words.values()) or "-", choice or "-", None)
    try:
        _check_measured(row, origin)
        run = _run(group, plan)
    except (IncompleteError, UserError) as error:
        return dataclasses.replace(bare, skipped=str(error))
    except (KeyError, TypeError, ValueError) as error:
        return dataclasses.replace(bare, skipped=f"{origin} holds a value of another kind than is expected: {error}")
    return dataclasses.replace(_measured(bare, row, run), run=run)


def _check_measured(row: Mapping[str, Any], origin: str) -> None:
    for key in ("step_time_s", "tokens_per_s_per_chip", "peak_memory_gib", "needed_gib", "limit_gib", "mfu"):
        value = row.get(key)
        if value is not None and not (isinstance(value, int | float) and not isinstance(value, bool) and value > 0):
            raise UserError(f"{origin}: {key} is {value!r}, expected a number above 0")


def _measured(bare: MeasuredPlan, row: Mapping[str, Any], run: Run) -> MeasuredPlan:
    tokens, chips = run.batch * run.seq, run.topology.num_chips
    step, rate = row.get("step_time_s"), row.get("tokens_per_s_per_chip")
    if step is None and rate is not None:
        step = tokens / (rate * chips)
    oom = bool(row.get("oom"))
    peak = row.get("needed_gib") if oom else row.get("peak_memory_gib")
    return dataclasses.replace(
        bare,
        step_s=step,
        token_s=None if step is None else step / tokens,
        peak_bytes=None if peak is None else round(peak * GIB),
        fits=False if oom else True if step is not None else None,
    )


def _run(group: Mapping[str, Any], plan: Mapping[str, Any]) -> Run:
    fixed = group.get("fixed") if isinstance(group.get("fixed"), dict) else {}
    assert isinstance(fixed, dict)
    said = {**fixed, **plan}
    unknown = sorted(set(plan) - _UNCHANGED - set(_DEGREES) - set(_DIMS) - OPTIONS.keys())
    if unknown:
        raise IncompleteError(f"{unknown[0]}={plan[unknown[0]]} is not rebuilt")
    assumed: list[str] = []
    topology = _topology(group, assumed)
    decoder = _decoder(group["model"], said)
    if isinstance(group["model"], dict) and group["model"].get("mtp_layers"):
        further = _number(group["model"], "mtp_layers")
        decoder = dataclasses.replace(decoder, layers=decoder.layers + further)
        assumed.append(f"{further} layer more for the tokens after next, without a head of its own")
    degrees = _degrees(said, topology)
    batch = _batch(plan if "per_device_batch" in plan or "global_batch" in plan else said, topology)
    seq = _number(said, "seq")
    remat, saves, offloads = _remat(said)
    attention = str(said.get("attention", ""))
    flash = bool(re.search(r"splash|flash|auto", attention)) or not attention
    if flash and not attention:
        assumed.append("a kernel for attention")
    dtypes = _dtypes(said, assumed)
    run = Run(
        decoder, topology, degrees["dp"], degrees["fsdp"], degrees["tp"], batch, seq, remat, saves, flash,
        _blocks(said, assumed), _flags(group, said), 0.0, tuple(assumed), **dtypes,
        offloads=offloads, stack_axis=stack_axis(str(said.get("framework", ""))),
    )  # fmt: skip
    for key, change in OPTIONS.items():
        if key in said:
            run = change(run, said[key])
    return run


def _topology(group: Mapping[str, Any], assumed: list[str]) -> Topology:
    chip = _chip(group)
    if not str(group["chips"]).isdigit():
        raise IncompleteError(f"the number of chips is not stated ({group['chips']})")
    count = int(group["chips"])
    text = str(group.get("topology", ""))
    shapes = [s for s in re.findall(r"\b\d+(?:x\d+)+\b", text) if math.prod(map(int, s.split("x"))) == count]
    if not shapes:
        shapes = [slice_shape(chip, count) or str(count)]
        assumed.append(f"topology {shapes[0]}")
    found = made_of(chip, shapes[0])
    if found.num_chips != count:
        raise IncompleteError(f"{count} chips are stated, but {found.name} has {found.num_chips}")
    return found


def _chip(group: Mapping[str, Any]) -> Chip:
    """The chip that the hardware's text names; the one called likely where it names two."""
    words = re.findall(r"[a-z]+\d+[a-z]*", str(group["hardware"]).lower())
    known = {alias: name for name in chip_names() for alias in (name, *load_chip(name).aliases)}
    found = [known[word] for word in words if word in known]
    if not found:
        raise IncompleteError(
            f"the chip of {str(group['hardware'])[:60]!r} is not known ({', '.join(chip_names())} are)"
        )
    return load_chip(found[-1] if "likely" in str(group["hardware"]) else found[0])


def _decoder(model: Any, said: Mapping[str, Any]) -> Decoder:
    if not isinstance(model, dict):
        raise IncompleteError("the model's dims are not stated")
    dims = {**model, **{key: said[key] for key in _DIMS if key in said}}
    family = str(dims.get("family", "llama")).lower()
    if not family.startswith(_FAMILIES):
        raise IncompleteError(f"the model family {dims['family']!r} is not known ({', '.join(_FAMILIES)} are)")
    if dims.get("parallel_block"):
        raise IncompleteError("attention and MLP side by side are not rebuilt")
    sizes: dict[str, Any] = {}
    latent = _latent(dims)
    if latent is not None:
        dims = {"kv_heads": dims.get("heads"), "head_dim": latent.head_size} | dims
    for key, name in _DIMS.items():
        value = dims.get(key)
        if key == "mlp" and value is None:
            value = dims.get("moe_mlp")  # no layer is dense
        if key == "head_dim" and value is None and {"emb", "heads"} <= dims.keys():
            value = dims["emb"] // dims["heads"]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise IncompleteError(f"the model's {key} is not stated ({value})")
        sizes[name] = value
    if "emb" in said and "emb" in model and said["emb"] > model["emb"] and "mlp" not in said:
        raise IncompleteError(f"the MLP's width at emb {said['emb']} is not stated")
    name = next((each for each in LOCAL_WINDOWS if family.startswith(each)), None)
    window, every = LOCAL_WINDOWS[name] if name else (None, 1)
    if "pair" in str(model.get("note", "")) or model.get("layers_a_block") == 2:
        sizes["layers"] *= 2  # a block of a local and a global layer counts as one there
    if sizes["layers"] % every:
        raise IncompleteError(f"{sizes['layers']} layers are not whole groups of {every}")
    tied = bool(dims.get("tied_head", family.startswith("gemma")))
    return Decoder(**sizes, **_experts(dims), tied=tied, window=window, global_every=every, latent=latent)


_LATENT = {
    "key_rank": ("kv_lora_rank", "kv_lora"),
    "plain": ("qk_nope", "nope"),
    "turned": ("qk_rope", "rope"),
    "value": ("v_head", "v"),
    "query_rank": ("q_lora_rank", "q_lora"),
}
"""Sizes of latent attention -> a row's key for it, and the word before it in a row's `attention`."""


def _latent(dims: Mapping[str, Any]) -> LatentDims | None:
    """Sizes of latent attention, stated each by itself or in a text; None for plain attention."""
    text = str(dims.get("attention", ""))
    if "MLA" not in text:
        return None
    found: dict[str, int] = {}
    for name, (key, word) in _LATENT.items():
        listed = re.search(rf"\b{word} (\d+)", text)
        if dims.get(key) or listed:
            found[name] = _number(dims, key) if dims.get(key) else int(listed[1])  # type: ignore[index]
        elif name != "query_rank":
            raise IncompleteError(f"the {key} of latent attention is not stated")
    return LatentDims(**found)


def _experts(dims: Mapping[str, Any]) -> dict[str, Any]:
    """Dims of a mixture of experts; empty for a dense model."""
    if _number(dims, "experts", 1) == 1:
        return {}
    if not dims.get("top_k"):
        raise IncompleteError("how many experts see a token is not stated")
    counts = {key: _number(dims, key) if dims.get(key) else 0 for key in ("shared_experts", "first_dense_layers")}
    return {
        "experts": _number(dims, "experts"),
        "active_experts": _number(dims, "top_k"),
        "expert_width": _number(dims, "moe_mlp" if dims.get("moe_mlp") else "mlp"),
        "shared_experts": counts["shared_experts"],
        "dense_layers": counts["first_dense_layers"],
        "qk_norm": bool(dims.get("qk_norm")),
    }


def _degrees(said: Mapping[str, Any], topology: Topology) -> dict[str, int]:
    mesh = dict(re.findall(r"(\w+)=(\d+)", str(said.get("mesh", ""))))
    found = {key: int(mesh.get(key) or _number(said, key, 1)) for key in _DEGREES}
    if found["fsdp_or_dp"] > 1:
        found["fsdp"] *= found["fsdp_or_dp"]
    for key in ("cp", "pp", "ep", "tp_transpose"):
        if found[key] > 1:
            raise IncompleteError(f"{key}={found[key]} is not rebuilt")
    product = found["dp"] * found["fsdp"] * found["tp"]
    if product != topology.num_devices:
        stated = ", ".join(f"{key}={found[key]}" for key in ("dp", "fsdp", "tp") if found[key] > 1) or "no degree"
        raise IncompleteError(f"{stated} make {product} devices, but {topology.name} has {topology.num_devices}")
    return found


def _batch(said: Mapping[str, Any], topology: Topology) -> int:
    """Sequences of a step."""
    if "per_device_batch" in said:
        return int(_positive(said, "per_device_batch") * topology.num_devices)
    return _number(said, "global_batch")


def _positive(said: Mapping[str, Any], key: str) -> float:
    value = said[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise IncompleteError(f"{key} is {value!r}, not a number above 0")
    return float(value)


def _number(said: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = said.get(key, default)
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise IncompleteError(f"{key} is not stated ({value})" if key not in said else f"{key} is {value!r}")
    return value


def _remat(said: Mapping[str, Any]) -> tuple[str, tuple[str, ...] | None, tuple[str, ...]]:
    """Rematerialisation by our name, what a layer keeps where a row lists it, and what of that on its host."""
    text = str(said.get("remat", "full")).strip()
    listed = dict(re.findall(r"(\w+)\s*=\s*(device|offload|remat)", text))
    if listed:
        here = tuple(str(_SAVES.get(key, key)) for key, where in listed.items() if where == "device")
        away = tuple(str(_SAVES.get(key, key)) for key, where in listed.items() if where == "offload")
        if not {*here, *away} <= {*SAVABLE, "input"}:
            raise IncompleteError(f"remat {text!r} keeps a value that is not rebuilt")
        return "full", tuple(name for name in (*here, *away) if name != "input"), away
    word = re.split(r"[\s(,:]", text.lower())[0]
    if word in ("checkpoint", "scan"):
        return "full", None, ()  # each layer is recomputed from its input
    if word not in SAVED and word != "none":
        raise IncompleteError(f"remat {text!r} is not known")
    return word, None, ()


def _dtypes(said: Mapping[str, Any], assumed: list[str]) -> dict[str, Any]:
    """Optimizer and dtypes as `Run` has them; by default AdamW and bf16 compute on f32 parameters and moments."""
    text, rule = (str(said.get(key, "")).lower() for key in ("dtype", "optimizer"))
    if re.search(r"fp8|float8|int8|nvfp4|mxfp", text):
        raise IncompleteError(f"dtype {text!r} is not rebuilt")
    found: dict[str, str] = {}
    if re.match(r"(f32|fp32|float32) compute", text):
        found["compute"] = "float32"
    if re.search(r"bf16 (parameters|weights|params)", text):
        found["weights"] = "bfloat16"
    if re.search(r"(mu|moments?|state)\b.*bf16|bf16 (moments?|state)", rule):
        found["state"] = "bfloat16"
    name = re.split(r"[\s,(]", rule)[0] or "adamw"
    if name not in ("adamw", "adam", "mu", "adafactor", "sgd"):
        raise IncompleteError(f"the optimizer {name!r} is not rebuilt")
    if name in ("adafactor", "sgd"):
        found["optimizer"] = "sgd"
    if name == "adafactor":
        assumed.append("SGD for Adafactor, whose factored moments are small beside the parameters")
    return found


def _blocks(said: Mapping[str, Any], assumed: list[str]) -> KernelBlocks:
    if "torch_xla" in str(said.get("framework", "")) and "blocks" not in str(said.get("attention", "")):
        assumed.append("the blocks that torchprime gives its kernels")
        return _TORCHPRIME["splash" if "splash" in str(said.get("attention", "")) else "flash"]
    sizes = re.search(r"blocks (\d+)", str(said.get("attention", "")) + " " + str(said.get("attention_blocks", "")))
    fused = bool(said.get("fused_attention_bwd"))
    if sizes is None:
        return KernelBlocks(fused=fused)
    pair = (int(sizes[1]), int(sizes[1]))
    return KernelBlocks(pair, pair, pair, fused)


def _flags(group: Mapping[str, Any], said: Mapping[str, Any]) -> tuple[str, ...]:
    given = said.get("xla_flags")
    sets = group.get("flag_sets") or {}
    if isinstance(given, str) and given in sets:
        given = sets[given]
    if isinstance(given, str) and not given.startswith("--"):
        if given.startswith("per row"):
            raise IncompleteError("the row's compiler flags are not stated")
        given = None  # the compiler's defaults, or nothing is said
    extra = said.get("xla")
    more = [f"--xla_tpu_{extra}"] if isinstance(extra, str) and "=" in extra else []
    return read_flags([*(given or ()), *more])
