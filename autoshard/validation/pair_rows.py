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

from autoshard.base.files import read_json
from autoshard.base.units import GIB
from autoshard.cost import Topology, read_flags
from autoshard.errors import UserError
from autoshard.program import SAVABLE, SAVED, KernelBlocks
from autoshard.validation.pair_dims import DIMS, stated_decoder, whole_number
from autoshard.validation.pair_options import OPTIONS, STAGED, staged, stated_topology
from autoshard.validation.published_runs import IncompleteError, Run, stack_axis, stream_on_width
from autoshard.validation.serving_rows import ServingRun, read_serving


PAIRS = pathlib.Path(__file__).with_name("pairs.json")
"""Groups shipped with the project; each names its source."""

_GROUP_KEYS = {"group", "model", "hardware", "chips", "rows"}
_DEGREES = ("dp", "fsdp", "tp", "ep", "cp", "pp", "tp_transpose", "fsdp_or_dp")
_HOW = {"trainer", "shard_mode"}
"""Keys of a plan that say how one plan was written or driven."""
_UNCHANGED = {
    *("shard_mode", "trainer", "scan", "model", "seq", "per_device_batch"),
    *("global_batch", "remat", "xla_flags", "xla", "attention", "fused_attention_bwd", "dtype", "execution"),
    *("gradient_accumulation", "mesh", "optimizer", "offload"),
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
    """The choices without how they were said or measured (`trainer`, `shard_mode`): rows that share it are one
    plan."""
    run: Run | None
    """The training that ran, to be rebuilt; None if that is not possible."""
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
    serving: ServingRun | None = None
    """The steps of serving that ran in place of a training."""


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
        document = read_json(file)
    except OSError as error:
        raise UserError(f"pairs file {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"pairs file {file} is not JSON: {error}") from error
    groups = document.get("groups") if isinstance(document, dict) else document
    if not isinstance(groups, list) or not groups:
        raise UserError(f"pairs file {file} holds no list of groups")
    found = tuple(_group(_whole(each, groups), f"{file}, group {number}") for number, each in enumerate(groups))
    wanted = tuple(only)
    kept = tuple(group for group in found if not wanted or any(text in group.group for text in wanted))
    if not kept:
        raise UserError(f"no group of {file} is called {' or '.join(wanted)}")
    return kept


def _whole(given: Any, groups: list[Any]) -> Any:
    """A group with the hardware of another one that its own text names: `TPU, 4 chips (see depth-and-scan-axis)`."""
    named = re.search(r"\bsee ([\w-]+)", str(given.get("hardware", ""))) if isinstance(given, dict) else None
    if named is None:
        return given
    others = [each for each in groups if isinstance(each, dict) and named[1] in str(each.get("group", ""))]
    texts = {str(each.get("hardware", "")) for each in others if each is not given}
    return given | {"hardware": texts.pop()} if len(texts) == 1 else given


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
        rows=tuple(_row(_shared(given), row, f"{origin}, row {number}") for number, row in enumerate(given["rows"])),
        on_tpu="tpu" in hardware.lower(),
    )


def _shared(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """A group whose rows that name no sequence have that of the others, where these all have one."""
    plans = [row["plan"] for row in given["rows"] if isinstance(row["plan"], dict)]
    lengths = {json.dumps(plan["seq"]) for plan in plans if "seq" in plan}
    fixed = given["fixed"] if isinstance(given.get("fixed"), dict) else {}
    if len(lengths) != 1 or "seq" in fixed:
        return given
    return {**given, "fixed": {**fixed, "seq": json.loads(lengths.pop())}}


def _row(group: Mapping[str, Any], row: Mapping[str, Any], origin: str) -> MeasuredPlan:
    plan = row["plan"] if isinstance(row["plan"], dict) else {"plan": row["plan"]}
    words = {key: f"{key}={value}" for key, value in plan.items()}
    choice = " ".join(text for key, text in words.items() if key not in _HOW)
    bare = MeasuredPlan(" ".join(words.values()) or "-", choice or "-", None)
    try:
        _check_measured(row, origin)
        run = read_serving(group, plan) if "phase" in plan else _run(group, plan)
    except (IncompleteError, UserError) as error:
        return dataclasses.replace(bare, skipped=str(error))
    except (KeyError, TypeError, ValueError) as error:
        return dataclasses.replace(bare, skipped=f"{origin} holds a value of another kind than is expected: {error}")
    on_device = group.get("order_metric") == "device_s"
    found = _measured(bare, row, run, on_device)
    return (
        dataclasses.replace(found, serving=run) if isinstance(run, ServingRun) else dataclasses.replace(found, run=run)
    )


def _check_measured(row: Mapping[str, Any], origin: str) -> None:
    for key in (
        "step_time_s",
        "latency_s",
        "device_s",
        "tokens_per_s_per_chip",
        "peak_memory_gib",
        "needed_gib",
        "limit_gib",
        "mfu",
    ):
        value = row.get(key)
        if value is not None and not (isinstance(value, int | float) and not isinstance(value, bool) and value > 0):
            raise UserError(f"{origin}: {key} is {value!r}, expected a number above 0")


def _measured(bare: MeasuredPlan, row: Mapping[str, Any], run: Run | ServingRun, on_device: bool) -> MeasuredPlan:
    """With `on_device` times are those of the devices alone, by which the source orders its rows: what a host does
    between steps is not the plan's. A row that does not state it ran, but has no time to compare."""
    tokens, chips = run.batch * run.seq, run.topology.num_chips
    step, rate = row.get("step_time_s", row.get("latency_s")), row.get("tokens_per_s_per_chip")
    if step is None and rate is not None:
        step = tokens / (rate * chips)
    ran = step is not None
    if on_device:
        step = row.get("device_s")
    oom = bool(row.get("oom"))
    peak = row.get("needed_gib") if oom else row.get("peak_memory_gib")
    return dataclasses.replace(
        bare,
        step_s=step,
        token_s=None if step is None else step / tokens,
        peak_bytes=None if peak is None else round(peak * GIB),
        fits=False if oom else True if ran else None,
    )


def _run(group: Mapping[str, Any], plan: Mapping[str, Any]) -> Run:
    fixed = group.get("fixed") if isinstance(group.get("fixed"), dict) else {}
    assert isinstance(fixed, dict)
    said = {**fixed, **plan}
    unknown = sorted(set(plan) - _UNCHANGED - set(_DEGREES) - set(DIMS) - set(_SAVES) - OPTIONS.keys() - STAGED)
    if unknown:
        raise IncompleteError(f"{unknown[0]}={plan[unknown[0]]} is not rebuilt")
    assumed: list[str] = []
    topology = stated_topology(group, assumed)
    decoder = stated_decoder(group["model"], said)
    if isinstance(group["model"], dict) and group["model"].get("mtp_layers"):
        decoder = dataclasses.replace(decoder, ahead=whole_number(group["model"], "mtp_layers"))
    degrees = _degrees(said, topology)
    batch = _batch(plan if "per_device_batch" in plan or "global_batch" in plan else said, topology)
    seq = whole_number(said, "seq")
    remat, saves, offloads = _remat(said, plan)
    attention = str(said.get("attention", ""))
    flash = bool(re.search(r"splash|flash|auto", attention)) or not attention
    if flash and not attention:
        assumed.append("a kernel for attention")
    dtypes = _dtypes(said, assumed)
    run = Run(
        decoder, topology, degrees["dp"], degrees["fsdp"], degrees["tp"], batch, seq, remat, saves, flash,
        _blocks(said, assumed), _flags(group, said), 0.0, tuple(assumed), **dtypes,
        offloads=offloads, experts=degrees["ep"], context=degrees["cp"],
        stack_axis=stack_axis(str(said.get("framework", ""))),
        stream_on_width=stream_on_width(str(said.get("framework", ""))),
    )  # fmt: skip
    for key, change in OPTIONS.items():
        if key in said:
            run = change(run, said[key])
    return staged(run, said, degrees["pp"])


def _degrees(said: Mapping[str, Any], topology: Topology) -> dict[str, int]:
    mesh = dict(re.findall(r"(\w+)=(\d+)", str(said.get("mesh", ""))))
    found = {key: int(mesh.get(key) or whole_number(said, key, 1)) for key in _DEGREES}
    if found["fsdp_or_dp"] > 1:
        found["fsdp"] *= found["fsdp_or_dp"]
    if found["tp_transpose"] > 1:
        raise IncompleteError(f"tp_transpose={found['tp_transpose']} is not rebuilt")
    used = ("dp", "fsdp", "tp", "ep", "cp", "pp")
    product = math.prod(found[key] for key in used)
    if product != topology.num_devices:
        stated = ", ".join(f"{key}={found[key]}" for key in used if found[key] > 1) or "no degree"
        raise IncompleteError(f"{stated} make {product} devices, but {topology.name} has {topology.num_devices}")
    return found


def _batch(said: Mapping[str, Any], topology: Topology) -> int:
    """Sequences of a step."""
    if "per_device_batch" in said:
        return int(_positive(said, "per_device_batch") * topology.num_devices)
    return whole_number(said, "global_batch")


def _positive(said: Mapping[str, Any], key: str) -> float:
    value = said[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise IncompleteError(f"{key} is {value!r}, not a number above 0")
    return float(value)


def _remat(said: Mapping[str, Any], plan: Mapping[str, Any]) -> tuple[str, tuple[str, ...] | None, tuple[str, ...]]:
    """Rematerialisation by our name, what a layer keeps where a row lists it, and what of that on its host.

    A row's own plan may say of single values where they are kept (`out_proj=device`), or which go to the host
    (`offload`), beside what its `remat` says.
    """
    text = str(said.get("remat", "full")).strip()
    listed = dict(re.findall(r"(\w+)\s*=\s*(device|offload|remat)", text))
    single = {key: str(plan[key]) for key in _SAVES if key in plan} | dict.fromkeys(_offloaded(plan), "offload")
    word = "full" if listed else re.split(r"[\s(,:]", text.lower())[0]
    if word in ("checkpoint", "scan"):
        word = "full"  # each layer is recomputed from its input
    if word not in SAVED and word != "none":
        raise IncompleteError(f"remat {text!r} is not known")
    if not listed and not single:
        return word, None, ()
    if word == "none":
        raise IncompleteError(f"remat {text!r} keeps everything where it is")
    places = {name: "device" for name in SAVED[word]} | {_SAVES.get(k, k): v for k, v in (listed | single).items()}
    unknown = sorted(name for name, where in places.items() if where != "remat" and name not in (*SAVABLE, "input"))
    if unknown or not set(places.values()) <= {"device", "offload", "remat"}:
        raise IncompleteError(f"remat {text!r} with {single or 'nothing'} beside it keeps a value that is not rebuilt")
    away = tuple(name for name, where in places.items() if where == "offload")
    kept = tuple(name for name, where in places.items() if where != "remat" and name != "input")
    return "full", kept, away


def _offloaded(plan: Mapping[str, Any]) -> list[str]:
    """Values by MaxText's names that a row's plan sends to the host."""
    text = str(plan.get("offload") or "none")
    if text in ("none", "no"):
        return []
    if "layer input" in text:
        return ["decoder_layer_input"]
    found = {name: [k for k in _SAVES if k == name or k.startswith(f"{name}_")] for name in re.findall(r"\w+", text)}
    if not all(found.values()):
        raise IncompleteError(f"offload={text} is not rebuilt")
    return [key for keys in found.values() for key in keys]


def _dtypes(said: Mapping[str, Any], assumed: list[str]) -> dict[str, Any]:
    """Optimizer and dtypes as `Run` has them; by default AdamW and bf16 compute on f32 parameters and moments."""
    text, rule = (str(said.get(key, "")).lower() for key in ("dtype", "optimizer"))
    if re.search(r"fp8|float8|int8|nvfp4|mxfp", text):
        raise IncompleteError(f"dtype {text!r} is not rebuilt")
    found: dict[str, Any] = {}
    if re.match(r"(f32|fp32|float32) compute", text):
        found["compute"] = "float32"
    if re.search(r"bf16 (parameters|weights|params)", text):
        found["weights"] = "bfloat16"
    if re.search(r"(moments?|state)\b.*bf16|bf16 (moments?|state)", rule):
        found["state"] = "bfloat16"
    elif re.search(r"\bmu\b.*bf16", rule):
        found["state"] = ("bfloat16", "float32")  # MaxText's mu_dtype is that of the first moments alone
    if re.search(r"\bgrad(ient)?s?\b.*bf16", rule):
        found["gradients"] = "bfloat16"
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
    text = str(said.get("attention", "")) + " " + str(said.get("attention_blocks", ""))
    own = (size for size, methods in re.findall(r"(\d+) \(([\w, -]+)\)", text) if str(said.get("cp_method")) in methods)
    sizes = re.search(r"blocks (\d+)", next((f"blocks {size}" for size in own), text))
    # Tokamax has one backward kernel only, which makes all gradients.
    fused = bool(said.get("fused_attention_bwd")) or "tokamax" in text
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
