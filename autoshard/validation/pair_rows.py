"""Reader of measured groups: one model under several plans, with each plan's run and measurements.

A group states the dims of its model, its chips, the options that are equal in all rows (`fixed`), and its rows. Each
row has a `plan`: mesh degrees and other options. A row that cannot be rebuilt states the reason and does not stop the
others.
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
"""Groups that are shipped with the project; each names its source."""

_GROUP_KEYS = {"group", "model", "hardware", "chips", "rows"}
"""Keys that a group must have."""
_DEGREES = ("dp", "fsdp", "tp", "ep", "cp", "pp", "tp_transpose", "fsdp_or_dp")
"""Keys of a plan, or names in its `mesh`, for parallel degrees."""
_HOW = {"trainer", "shard_mode"}
"""Keys of a plan for the way in which it was written or run, which do not distinguish plans."""
_UNCHANGED = {
    *("shard_mode", "trainer", "scan", "model", "seq", "per_device_batch"),
    *("global_batch", "remat", "xla_flags", "xla", "attention", "fused_attention_bwd", "dtype", "execution"),
    *("gradient_accumulation", "mesh", "optimizer", "offload"),
}
"""Keys of a plan with a reader of their own, or without influence on the price."""
_TORCHPRIME = {
    "flash": KernelBlocks((2048, 512), (2048, 512), (2048, 512)),
    "splash": KernelBlocks((2048, 2048), (2048, 2048), (2048, 2048), fused=True),
}
"""Blocks of torchprime's kernels, from its attention module and torch_xla.experimental.splash_attention."""
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
"""MaxText's names of values -> our names; the input of a layer is saved under every policy."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """One row of a group: a plan and its measurements."""

    plan: str
    """The row's options, as `key=value` in the order of the source."""
    choice: str
    """The options without `trainer` and `shard_mode`; rows with equal `choice` measure one plan several times."""
    run: Run | None
    """The training run, for rebuilding it; None if that is impossible."""
    skipped: str = ""
    """Reason why the row cannot be rebuilt; empty otherwise."""
    step_s: float | None = None
    """Seconds of a step; None if the row has no time, for instance because it ran out of memory."""
    token_s: float | None = None
    """Seconds of the whole machine for each token, for comparing rows with different batches; None without a time."""
    peak_bytes: int | None = None
    """Peak memory of one device, or the memory that a failed plan needed; None if it is not stated."""
    fits: bool | None = None
    """True if the plan ran, False if it ran out of memory, None if neither is stated."""
    serving: ServingRun | None = None
    """The serving steps that ran in place of a training run; None for training, and if they cannot be rebuilt."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredGroup:
    """One model on one set of chips under several plans, or several workloads under one plan."""

    group: str
    """Name of the group of rows."""
    source: str
    """Publication or repository of the measurements."""
    hardware: str
    """Chips as the source states them."""
    compares_plans: bool
    """True if the plan differs between rows, False if the workload does."""
    rows: tuple[MeasuredPlan, ...]
    on_tpu: bool = True
    """True if the hardware's text names a TPU."""


def read_groups(path: str | pathlib.Path | None = None, only: Iterable[str] = ()) -> tuple[MeasuredGroup, ...]:
    """Read the groups of a file (default: the shipped file).

    Groups whose names contain none of the texts in `only` are left out. For a row that cannot be rebuilt,
    `MeasuredPlan.skipped` is the reason. Raises: `UserError` for a file that cannot be read, for a group of another
    form, and if `only` leaves no group.
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
    parsed = tuple(_group(_whole(each, groups), f"{file}, group {number}") for number, each in enumerate(groups))
    wanted = tuple(only)
    selected = tuple(group for group in parsed if not wanted or any(text in group.group for text in wanted))
    if not selected:
        raise UserError(f"no group of {file} is called {' or '.join(wanted)}")
    return selected


def _whole(given: Any, groups: list[Any]) -> Any:
    """Return a group with the hardware of another group that its own text refers to.

    Such a text is `TPU, 4 chips (see depth-and-scan-axis)`. The group stays unchanged unless exactly one such hardware
    is found.
    """
    named = re.search(r"\bsee ([\w-]+)", str(given.get("hardware", ""))) if isinstance(given, dict) else None
    if named is None:
        return given
    others = [each for each in groups if isinstance(each, dict) and named[1] in str(each.get("group", ""))]
    texts = {str(each.get("hardware", "")) for each in others if each is not given}
    return given | {"hardware": texts.pop()} if len(texts) == 1 else given


def _group(given: Any, origin: str) -> MeasuredGroup:
    """Parse a group; `origin` is the file and number for error messages.

    Raises `UserError` for missing keys and for rows of another form. A row that cannot be rebuilt raises nothing.
    """
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
    """Return a group in which rows without a sequence length have that of the others, if it is the same in all of
    them.

    A group whose `fixed` has a length stays unchanged.
    """
    plans = [row["plan"] for row in given["rows"] if isinstance(row["plan"], dict)]
    lengths = {json.dumps(plan["seq"]) for plan in plans if "seq" in plan}
    fixed = given["fixed"] if isinstance(given.get("fixed"), dict) else {}
    if len(lengths) != 1 or "seq" in fixed:
        return given
    return {**given, "fixed": {**fixed, "seq": json.loads(lengths.pop())}}


def _row(group: Mapping[str, Any], row: Mapping[str, Any], origin: str) -> MeasuredPlan:
    """Parse a row of a group; `origin` is the group and number for error messages.

    A row that cannot be rebuilt, or has a wrong value, is returned without run and measurements, with the reason in
    `skipped`.
    """
    plan = row["plan"] if isinstance(row["plan"], dict) else {"plan": row["plan"]}
    texts = {key: f"{key}={value}" for key, value in plan.items()}
    choice = " ".join(text for key, text in texts.items() if key not in _HOW)
    bare = MeasuredPlan(" ".join(texts.values()) or "-", choice or "-", None)
    try:
        _check_measured(row, origin)
        run = read_serving(group, plan) if "phase" in plan else _run(group, plan)
    except (IncompleteError, UserError) as error:
        return dataclasses.replace(bare, skipped=str(error))
    except (KeyError, TypeError, ValueError) as error:
        return dataclasses.replace(bare, skipped=f"{origin} holds a value of another kind than is expected: {error}")
    on_device = group.get("order_metric") == "device_s"
    measured = _measured(bare, row, run, on_device)
    return (
        dataclasses.replace(measured, serving=run)
        if isinstance(run, ServingRun)
        else dataclasses.replace(measured, run=run)
    )


def _check_measured(row: Mapping[str, Any], origin: str) -> None:
    """Raise `UserError` if a stated measurement is not a number above 0."""
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
    """Return the row with its measurements; a step time may follow from the tokens per second of a chip.

    With `on_device` the time is that of the devices alone, by which the source orders its rows. The host's work between
    steps is no property of the plan. A row without that time counts as run, but has no time to compare.
    """
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
    """Return the training run that a group and a row's plan state; the plan has priority over the group's `fixed`.

    Raises `IncompleteError` for a value that is missing or not rebuilt.
    """
    fixed = group.get("fixed") if isinstance(group.get("fixed"), dict) else {}
    assert isinstance(fixed, dict)
    stated = {**fixed, **plan}
    unknown = sorted(set(plan) - _UNCHANGED - set(_DEGREES) - set(DIMS) - set(_SAVES) - OPTIONS.keys() - STAGED)
    if unknown:
        raise IncompleteError(f"{unknown[0]}={plan[unknown[0]]} is not rebuilt")
    assumed: list[str] = []
    topology = stated_topology(group, assumed)
    decoder = stated_decoder(group["model"], stated)
    if isinstance(group["model"], dict) and group["model"].get("mtp_layers"):
        decoder = dataclasses.replace(decoder, ahead=whole_number(group["model"], "mtp_layers"))
    degrees = _degrees(stated, topology)
    batch = _batch(plan if "per_device_batch" in plan or "global_batch" in plan else stated, topology)
    seq = whole_number(stated, "seq")
    remat, saves, offloads = _remat(stated, plan)
    attention = str(stated.get("attention", ""))
    flash = bool(re.search(r"splash|flash|auto", attention)) or not attention
    if flash and not attention:
        assumed.append("a kernel for attention")
    dtypes = _dtypes(stated, assumed)
    run = Run(
        decoder, topology, degrees["dp"], degrees["fsdp"], degrees["tp"], batch, seq, remat, saves, flash,
        _blocks(stated, assumed), _flags(group, stated), 0.0, tuple(assumed), **dtypes,
        offloads=offloads, experts=degrees["ep"], context=degrees["cp"],
        stack_axis=stack_axis(str(stated.get("framework", ""))),
        stream_on_width=stream_on_width(str(stated.get("framework", ""))),
    )  # fmt: skip
    for key, change in OPTIONS.items():
        if key in stated:
            run = change(run, stated[key])
    return staged(run, stated, degrees["pp"])


def _degrees(said: Mapping[str, Any], topology: Topology) -> dict[str, int]:
    """Return the parallel degrees of a plan by key, from its `mesh` or from keys of their own, 1 if not stated.

    `fsdp_or_dp` counts as `fsdp`. Raises `IncompleteError` if their product is not the topology's devices.
    """
    mesh = dict(re.findall(r"(\w+)=(\d+)", str(said.get("mesh", ""))))
    degrees = {key: int(mesh.get(key) or whole_number(said, key, 1)) for key in _DEGREES}
    if degrees["fsdp_or_dp"] > 1:
        degrees["fsdp"] *= degrees["fsdp_or_dp"]
    if degrees["tp_transpose"] > 1:
        raise IncompleteError(f"tp_transpose={degrees['tp_transpose']} is not rebuilt")
    used = ("dp", "fsdp", "tp", "ep", "cp", "pp")
    product = math.prod(degrees[key] for key in used)
    if product != topology.num_devices:
        stated = ", ".join(f"{key}={degrees[key]}" for key in used if degrees[key] > 1) or "no degree"
        raise IncompleteError(f"{stated} make {product} devices, but {topology.name} has {topology.num_devices}")
    return degrees


def _batch(said: Mapping[str, Any], topology: Topology) -> int:
    """Return the number of sequences of a step on all devices, from `per_device_batch`, else from `global_batch`."""
    if "per_device_batch" in said:
        return int(_positive(said, "per_device_batch") * topology.num_devices)
    return whole_number(said, "global_batch")


def _positive(said: Mapping[str, Any], key: str) -> float:
    """Return a stated number above 0. Raises: IncompleteError for any other value."""
    value = said[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise IncompleteError(f"{key} is {value!r}, not a number above 0")
    return float(value)


def _remat(said: Mapping[str, Any], plan: Mapping[str, Any]) -> tuple[str, tuple[str, ...] | None, tuple[str, ...]]:
    """Return the remat policy by our name, the values that a layer saves, and those of them that are offloaded.

    The saved values are None if the policy implies them. A row's plan may also state the place of single values
    (`out_proj=device`), or the values that are sent to the host (`offload`).
    """
    text = str(said.get("remat", "full")).strip()
    named = dict(re.findall(r"(\w+)\s*=\s*(device|offload|remat)", text))
    single = {key: str(plan[key]) for key in _SAVES if key in plan} | dict.fromkeys(_offloaded(plan), "offload")
    word = "full" if named else re.split(r"[\s(,:]", text.lower())[0]
    if word in ("checkpoint", "scan"):
        word = "full"  # each layer is recomputed from its input
    if word not in SAVED and word != "none":
        raise IncompleteError(f"remat {text!r} is not known")
    if not named and not single:
        return word, None, ()
    if word == "none":
        raise IncompleteError(f"remat {text!r} keeps everything where it is")
    places = {name: "device" for name in SAVED[word]} | {_SAVES.get(k, k): v for k, v in (named | single).items()}
    unknown = sorted(name for name, where in places.items() if where != "remat" and name not in (*SAVABLE, "input"))
    if unknown or not set(places.values()) <= {"device", "offload", "remat"}:
        raise IncompleteError(f"remat {text!r} with {single or 'nothing'} saves a value that is not rebuilt")
    offloaded = tuple(name for name, where in places.items() if where == "offload")
    saved = tuple(name for name, where in places.items() if where != "remat" and name != "input")
    return "full", saved, offloaded


def _offloaded(plan: Mapping[str, Any]) -> list[str]:
    """List the values, by MaxText's names, that a row's plan sends to the host by `offload`; empty without it.

    Raises `IncompleteError` for an unknown name.
    """
    text = str(plan.get("offload") or "none")
    if text in ("none", "no"):
        return []
    if "layer input" in text:
        return ["decoder_layer_input"]
    matches = {name: [k for k in _SAVES if k == name or k.startswith(f"{name}_")] for name in re.findall(r"\w+", text)}
    if not all(matches.values()):
        raise IncompleteError(f"offload={text} is not rebuilt")
    return [key for keys in matches.values() for key in keys]


def _dtypes(said: Mapping[str, Any], assumed: list[str]) -> dict[str, Any]:
    """Return the optimizer and the dtypes as arguments of `Run`, without those that are `Run`'s defaults.

    The default is AdamW, with bf16 compute and f32 parameters and moments. SGD replaces Adafactor, which is added to
    `assumed`. Raises `IncompleteError` for 8-bit and 4-bit dtypes and other optimizers.
    """
    text, rule = (str(said.get(key, "")).lower() for key in ("dtype", "optimizer"))
    if re.search(r"fp8|float8|int8|nvfp4|mxfp", text):
        raise IncompleteError(f"dtype {text!r} is not rebuilt")
    dtypes: dict[str, Any] = {}
    if re.match(r"(f32|fp32|float32) compute", text):
        dtypes["compute"] = "float32"
    if re.search(r"bf16 (parameters|weights|params)", text):
        dtypes["weights"] = "bfloat16"
    if re.search(r"(moments?|state)\b.*bf16|bf16 (moments?|state)", rule):
        dtypes["state"] = "bfloat16"
    elif re.search(r"\bmu\b.*bf16", rule):
        dtypes["state"] = ("bfloat16", "float32")  # MaxText's mu_dtype is the dtype of the first moments only
    if re.search(r"\bgrad(ient)?s?\b.*bf16", rule):
        dtypes["gradients"] = "bfloat16"
    name = re.split(r"[\s,(]", rule)[0] or "adamw"
    if name not in ("adamw", "adam", "mu", "adafactor", "sgd"):
        raise IncompleteError(f"the optimizer {name!r} is not rebuilt")
    if name in ("adafactor", "sgd"):
        dtypes["optimizer"] = "sgd"
    if name == "adafactor":
        assumed.append("SGD for Adafactor, whose factored moments are small relative to the parameters")
    return dtypes


def _blocks(said: Mapping[str, Any], assumed: list[str]) -> KernelBlocks:
    """Return the blocks of the attention kernels: stated ones, else torchprime's for torch_xla, else the defaults.

    Torchprime's are added to `assumed`. A stated size may depend on the plan's `cp_method`.
    """
    if "torch_xla" in str(said.get("framework", "")) and "blocks" not in str(said.get("attention", "")):
        assumed.append("the blocks that torchprime gives its kernels")
        return _TORCHPRIME["splash" if "splash" in str(said.get("attention", "")) else "flash"]
    text = str(said.get("attention", "")) + " " + str(said.get("attention_blocks", ""))
    own = (size for size, methods in re.findall(r"(\d+) \(([\w, -]+)\)", text) if str(said.get("cp_method")) in methods)
    sizes = re.search(r"blocks (\d+)", next((f"blocks {size}" for size in own), text))
    # Tokamax has one backward kernel, which computes all gradients.
    fused = bool(said.get("fused_attention_bwd")) or "tokamax" in text
    if sizes is None:
        return KernelBlocks(fused=fused)
    pair = (int(sizes[1]), int(sizes[1]))
    return KernelBlocks(pair, pair, pair, fused)


def _flags(group: Mapping[str, Any], said: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the compiler flags of a row; empty for the compiler's defaults and if none are stated.

    A text in `xla_flags` names one of the group's `flag_sets`. Raises `IncompleteError` if flags differ by row and are
    not stated.
    """
    given = said.get("xla_flags")
    sets = group.get("flag_sets") or {}
    if isinstance(given, str) and given in sets:
        given = sets[given]
    if isinstance(given, str) and not given.startswith("--"):
        if given.startswith("per row"):
            raise IncompleteError("the row's compiler flags are not stated")
        given = None  # the compiler's defaults, or no flags are stated
    extra = said.get("xla")
    more = [f"--xla_tpu_{extra}"] if isinstance(extra, str) and "=" in extra else []
    return read_flags([*read_flags(given), *more])
