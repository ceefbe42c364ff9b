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
from autoshard.cost import Topology
from autoshard.degrees.gpu_run import GpuRun
from autoshard.errors import UserError
from autoshard.validation.pair_dims import DIMS, stated_decoder, whole_number
from autoshard.validation.pair_gpu_runs import eager_framework_of, gpu_place, gpu_run, named_dims
from autoshard.validation.pair_keys import (
    BATCHES,
    TRANSLATED,
    canonical,
    gaps,
    group_options,
    is_label,
    tensor_places,
    with_arguments,
)
from autoshard.validation.pair_options import OPTIONS, STAGED, staged, stated_topology
from autoshard.validation.pair_settings import SAVES, stated_blocks, stated_dtypes, stated_flags, stated_remat
from autoshard.validation.published_runs import (
    IncompleteError,
    Run,
    parse_run,
    read_rows,
    source_group,
    stack_axis,
    stream_on_width,
)
from autoshard.validation.serving_rows import ServingRun, read_serving


PAIRS = pathlib.Path(__file__).with_name("pairs.json")
"""Groups that are shipped with the project; each names its source."""

_GROUP_KEYS = {"group", "model", "hardware", "chips", "rows"}
"""Keys that a group must have."""
_DEGREES = ("dp", "fsdp", "tp", "ep", "cp", "pp", "tp_transpose", "fsdp_or_dp")
"""Keys of a plan, or names in its `mesh`, for parallel degrees."""
_HOW = {"trainer", "shard_mode"}
"""Keys of a plan for the way in which it was written or run, which do not distinguish plans."""
_PLACE = ("chips", "slices", "topology", "hardware", "devices")
"""Keys for the machine, which a row may state for itself."""
_UNCHANGED = {
    *("model", "framework", "seq", "remat", "xla_flags", "xla", "attention", "attention_blocks", "dtype", "execution"),
    *("fused_attention_bwd", "mesh", "optimizer", "offload"),
}
"""Keys of a plan with a reader of their own."""


_GPU = ("zero", "micro_batch", "virtual_stages")
"""Keys that only runs of eager frameworks on GPUs state."""
KEYS = frozenset({*_UNCHANGED, *_PLACE, *BATCHES, *_DEGREES, *DIMS, *SAVES, *OPTIONS, *STAGED, *_GPU, "phase", "ffn"})
"""Keys of a plan that readers know; other keys are labels, or the row is refused."""


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
    gpu: GpuRun | None = None
    """The run of an eager framework on GPUs in place of a compiled one; None otherwise."""
    assumed: tuple[str, ...] = ()
    """Choices that the source leaves open, and options of `--assume` that were used."""
    note: str = ""
    """Labels of the row, `key=value`, and its own note: texts without influence on the price."""
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


def read_groups(
    path: str | pathlib.Path | None = None, only: Iterable[str] = (), assume: Mapping[str, Any] | None = None
) -> tuple[MeasuredGroup, ...]:
    """Read the groups of a file (default: the shipped file).

    Groups whose names contain none of the texts in `only` are left out. For a row that cannot be rebuilt,
    `MeasuredPlan.skipped` is the reason. A row that cannot be rebuilt as stated is read again with the options in
    `assume`, as far as it does not state them. Raises: `UserError` for a file that cannot be read, for a group of
    another form, and if `only` leaves no group.
    """
    file = PAIRS if path is None else pathlib.Path(path)
    try:
        document = read_json(file)
    except OSError as error:
        raise UserError(f"pairs file {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"pairs file {file} is not JSON: {error}") from error
    groups = _listed_groups(document)
    if not isinstance(groups, list) or not groups:
        raise UserError(f"pairs file {file} holds no list of groups")
    given = canonical(assume or {})
    published = isinstance(groups[0], dict) and "metric" in groups[0]
    parsed = (
        _published_groups(read_rows(file, []))
        if published
        else tuple(_group(_whole(each, groups), f"{file}, group {number}", given) for number, each in enumerate(groups))
    )
    wanted = tuple(only)
    selected = tuple(group for group in parsed if not wanted or any(text in group.group for text in wanted))
    if not selected:
        raise UserError(f"no group of {file} is called {' or '.join(wanted)}")
    return selected


def _listed_groups(document: Any) -> Any:
    """Return the groups of a document: listed, or made of its rounds of MLPerf on TPUs, a group for each row."""
    if not isinstance(document, dict) or "gpt3_model" not in document:
        return document.get("groups") if isinstance(document, dict) else document
    models = {"gpt3": document["gpt3_model"], "stable_diffusion": {"family": "a U-Net of Stable Diffusion"}}
    tables = {table: document.get(table, ()) for table in models}
    pipelines = document.get("pipelines_on_tpu")
    tables["gpt3 pipeline"] = pipelines.get("rows", ()) if isinstance(pipelines, dict) else ()
    return [_round(models.get(table, models["gpt3"]), row) for table, rows in tables.items() for row in rows]


def _round(model: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of MLPerf on TPUs as a group: the model's options, and matmuls of 8 bits as its dtype."""
    keys = ("mesh", "sequences_a_chip", "global_batch", "remat", "framework", "attention", "xla_flags", "microbatches")
    plan = {key: row[key] for key in keys if key in row and (key != "xla_flags" or "--" in str(row[key]))}
    plan |= {"dtype": row["matmuls"]} if "matmuls" in row else {}
    step = row.get("step_s_estimate", row.get("step_s_median"))
    return {
        "group": row.get("id", ""),
        "source": row.get("source", ""),
        "model": {"family": "gpt3", **model},
        "hardware": f"TPU {row.get('chip')}",
        "fixed": {"seq": model.get("sequence"), "optimizer": "adam"},
        "rows": [{"plan": plan} | ({} if step is None else {"step_time_s": step})],
        **{key: row[key] for key in ("chips", "slices", "topology") if key in row},
    }


def _published_groups(rows: Iterable[Mapping[str, Any]]) -> tuple[MeasuredGroup, ...]:
    """Return published runs, in the form of `validate --data`, as groups of workloads, one for each source."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(source_group(row["source"]), []).append(row)
    return tuple(
        MeasuredGroup(source, own[0]["source"], str(own[0].get("tpu") or own[0].get("gpu") or ""), False,
                      tuple(map(_published, own)), any(row.get("tpu") for row in own))
        for source, own in groups.items()
    )  # fmt: skip


def _published(row: Mapping[str, Any]) -> MeasuredPlan:
    """Return a published run as a row of a group; one that cannot be rebuilt has the reason in `skipped`."""
    bare = MeasuredPlan(row["id"], row["id"], None)
    try:
        run = parse_run(row)
    except (IncompleteError, UserError) as error:
        return dataclasses.replace(bare, skipped=str(error))
    if not isinstance(run, Run):
        return dataclasses.replace(bare, skipped="a matmul is no step")
    token_s = run.step_s / (run.batch * run.seq)
    return dataclasses.replace(bare, run=run, step_s=run.step_s, token_s=token_s, fits=True, assumed=run.assumed)


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


def _group(given: Any, origin: str, assume: Mapping[str, Any]) -> MeasuredGroup:
    """Parse a group; `origin` is the file and number for error messages, `assume` fills gaps of its rows.

    Raises `UserError` for missing keys and for rows of another form. A row that cannot be rebuilt raises nothing.
    """
    if not isinstance(given, dict) or not given.keys() >= _GROUP_KEYS:
        missing = sorted(_GROUP_KEYS - given.keys()) if isinstance(given, dict) else sorted(_GROUP_KEYS)
        raise UserError(f"{origin} of the measured pairs misses {', '.join(missing)}")
    origin = str(given["group"])
    if not isinstance(given["rows"], list) or not all(isinstance(r, dict) and "plan" in r for r in given["rows"]):
        raise UserError(f"group {origin}: rows are {str(given['rows'])[:60]!r}, expected a list of objects with a plan")
    hardware = str(given["hardware"])
    rows = enumerate(given["rows"])
    return MeasuredGroup(
        group=origin,
        source=str(given.get("source", "")),
        hardware=hardware,
        compares_plans=not str(given.get("kind", "plan")).startswith("workload"),
        rows=tuple(_row(given, row, f"{origin}, row {number}", assume) for number, row in rows),
        on_tpu="tpu" in hardware.lower(),
    )


def _shared(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that all rows of a group share.

    If all rows that state a sequence length state the same, and the group states none, the other rows share it.
    """
    fixed = group_options(given)
    plans = [canonical(row["plan"]) for row in given["rows"]]
    lengths = {json.dumps(plan["seq"]) for plan in plans if "seq" in plan}
    return {"seq": json.loads(lengths.pop()), **fixed} if len(lengths) == 1 else fixed


def _row(group: Mapping[str, Any], row: Mapping[str, Any], origin: str, assume: Mapping[str, Any]) -> MeasuredPlan:
    """Parse a row of a group; `origin` is the group and number for error messages.

    A row that cannot be rebuilt, or has a wrong value, is returned without run and measurements, with the reason in
    `skipped`. If `assume` has options that the row lacks, the row is read again with them.
    """
    plan = row["plan"] if isinstance(row["plan"], dict) else {"plan": row["plan"]}
    texts = {key: f"{key}={value}" for key, value in plan.items()}
    bare = MeasuredPlan(" ".join(texts.values()) or "-", "-", None)
    try:
        _check_measured(row, origin)
        own, fixed = canonical(plan), _shared(group)
        labels = {key for key in own if key not in KEYS and is_label(key, own[key])} | _HOW
        note = ", ".join(
            [*(f"{k}={own[k]}" for k in own if k in labels), *([str(row["note"])] if "note" in row else [])]
        )
        choice = " ".join(f"{key}={value}" for key, value in own.items() if key not in labels)
        bare = dataclasses.replace(bare, note=note, choice=choice or "-")
        options = {key: value for key, value in own.items() if key not in labels}
        try:
            run, assumed = _stated_run(group, fixed, options, {})
        except (IncompleteError, UserError):
            more = gaps(assume, {**fixed, **options})
            if not more:
                raise
            run, assumed = _stated_run(group, fixed, options, more)
    except (IncompleteError, UserError) as error:
        return dataclasses.replace(bare, skipped=str(error))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return dataclasses.replace(bare, skipped=f"{origin} holds a value of another kind than is expected: {error}")
    on_device = group.get("order_metric") == "device_s"
    kind = "serving" if isinstance(run, ServingRun) else "gpu" if isinstance(run, GpuRun) else "run"
    stated: dict[str, Any] = {kind: run}
    return dataclasses.replace(_measured(bare, row, run, on_device), assumed=assumed, **stated)


def _stated_run(
    group: Mapping[str, Any], fixed: Mapping[str, Any], own: Mapping[str, Any], assume: Mapping[str, Any]
) -> tuple[Run | ServingRun | GpuRun, tuple[str, ...]]:
    """Return the run that a row states, with the options `assume` for what it does not state, and all assumptions.

    - `fixed`, `own`: options of the group and of the row, by our keys.
    """
    if "phase" in own:
        renamed = {key if key != "global_batch" else "batch": value for key, value in {**own, **assume}.items()}
        serving = read_serving({**group, "fixed": fixed}, renamed)
        return serving, serving.assumed
    run, assumed = _run(group, {**assume, **fixed}, own)
    return run, (*assumed, *(f"{key}={value} (--assume)" for key, value in assume.items()))


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


def _measured(
    bare: MeasuredPlan, row: Mapping[str, Any], run: Run | ServingRun | GpuRun, on_device: bool
) -> MeasuredPlan:
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


def _run(
    group: Mapping[str, Any], fixed: Mapping[str, Any], plan: Mapping[str, Any]
) -> tuple[Run | GpuRun, tuple[str, ...]]:
    """Return the training run that a group and a row's plan state, and what had to be assumed.

    The plan has priority over the group's `fixed`.

    Raises `IncompleteError` for a value that is missing or not rebuilt.
    """
    assumed: list[str] = []
    own_batch = [key for key in BATCHES if key in plan]
    if own_batch:  # the batch of the plan replaces that of the group, whose key may be another
        fixed = {key: value for key, value in fixed.items() if key not in BATCHES}
    stated = {**fixed, **plan}
    for options in (plan, fixed):
        unknown = sorted(key for key in options if key not in KEYS and not TRANSLATED.fullmatch(key))
        unknown = [key for key in unknown if key not in tensor_places(options) and not is_label(key, options[key])]
        if unknown:
            raise IncompleteError(f"{unknown[0]}={options[unknown[0]]} is not rebuilt")
    topology = stated_topology(_machine(group, stated), assumed)
    stated = with_arguments(stated, topology.num_devices, topology.slices)
    if not isinstance(group["model"], dict):
        raise IncompleteError("the model's dims are not stated")
    dims = named_dims(canonical(group["model"]), assumed)
    decoder = stated_decoder(dims, stated)
    if dims.get("mtp_layers"):
        decoder = dataclasses.replace(decoder, ahead=whole_number(dims, "mtp_layers"))
    degrees = _degrees(stated)
    eager = eager_framework_of(stated)
    if eager and topology.traits.described:
        gpu, more = gpu_run(stated, decoder, gpu_place(topology, str(group["hardware"])), degrees, eager)
        return gpu, (*assumed, *more)
    _check_degrees(degrees, topology)
    seq = whole_number(stated, "seq")
    batch = _batch(stated, topology, seq)
    if "remat" not in stated:
        assumed.append("remat full")
    remat, saves, offloads = stated_remat(stated, plan)
    attention = str(stated.get("attention", ""))
    flash = bool(re.search(r"splash|flash|auto", attention)) or not attention
    if flash and not attention:
        assumed.append("a kernel for attention")
    dtypes = stated_dtypes(stated, assumed)
    run = Run(
        decoder, topology, degrees["dp"], degrees["fsdp"], degrees["tp"], batch, seq, remat, saves, flash,
        stated_blocks(stated, assumed), stated_flags(group, stated), 0.0, tuple(assumed), **dtypes,
        offloads=offloads, experts=degrees["ep"], context=degrees["cp"],
        stack_axis=stack_axis(str(stated.get("framework", ""))),
        stream_on_width=stream_on_width(str(stated.get("framework", ""))),
    )  # fmt: skip
    for key, change in OPTIONS.items():
        if key in stated:
            run = change(run, stated[key])
    run = staged(run, stated, degrees["pp"])
    return run, run.assumed


def _machine(group: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a group for its machine, with the values that a row, or the group's options, state instead."""
    machine = {key: group[key] for key in _PLACE if key in group}
    return machine | {key: value for key, value in canonical(stated).items() if key in _PLACE}


def _degrees(said: Mapping[str, Any]) -> dict[str, int]:
    """Return the parallel degrees of a plan by key, from its `mesh` or from keys of their own, 1 if not stated.

    `fsdp_or_dp` counts as `fsdp`.
    """
    mesh = dict(re.findall(r"(\w+)=(\d+)", str(said.get("mesh", ""))))
    degrees = {key: int(mesh.get(key) or whole_number(said, key, 1)) for key in _DEGREES}
    degrees["fsdp"] *= degrees["fsdp_or_dp"]
    return degrees


def _check_degrees(degrees: Mapping[str, int], topology: Topology) -> None:
    """Raise `IncompleteError` for a degree that is not rebuilt, and if the product is not the topology's devices."""
    if degrees["tp_transpose"] > 1:
        raise IncompleteError(f"tp_transpose={degrees['tp_transpose']} is not rebuilt")
    used = ("dp", "fsdp", "tp", "ep", "cp", "pp")
    product = math.prod(degrees[key] for key in used)
    if product != topology.num_devices:
        stated = ", ".join(f"{key}={degrees[key]}" for key in used if degrees[key] > 1) or "no degree"
        raise IncompleteError(f"{stated} make {product} devices, but {topology.name} has {topology.num_devices}")


def _batch(said: Mapping[str, Any], topology: Topology, seq: int) -> int:
    """Return the number of sequences of a step on all devices, from the first of `BATCHES` that is stated.

    Raises `IncompleteError` without any, and for a batch that is not a whole number of sequences.
    """
    key = next((key for key in BATCHES if key in said), "global_batch")
    if key == "global_batch":
        return whole_number(said, key)
    units = {"device": topology.num_devices, "chip": topology.num_chips, "step": 1}
    count = _positive(said, key) * next(number for unit, number in units.items() if unit in key)
    sequences = count / seq if key.startswith("tokens") else count
    if abs(sequences - round(sequences)) > 1e-6 * sequences or round(sequences) < 1:
        raise IncompleteError(f"{key}={said[key]} is {sequences:.4g} sequences of {seq} tokens on {topology.name}")
    return round(sequences)


def _positive(said: Mapping[str, Any], key: str) -> float:
    """Return a stated number above 0, also if it is stated as text. Raises: IncompleteError for any other value."""
    value = said[key]
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value):
        value = float(value)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise IncompleteError(f"{key} is {value!r}, not a number above 0")
    return float(value)
