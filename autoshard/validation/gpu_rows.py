"""Readers of files with measured runs on GPUs, one reader for each form of file."""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from autoshard.base.files import read_json
from autoshard.cost import Topology, chip_names
from autoshard.degrees.gpu_run import GpuRun, gpu_topology
from autoshard.errors import UserError
from autoshard.program import config_dims, read_config
from autoshard.program.config_files import bundled
from autoshard.serving import Decoder


@dataclasses.dataclass(frozen=True, slots=True)
class GpuRow:
    """One measured run on GPUs, with the run's description for rebuilding it."""

    table: str
    """Name of the table in which errors are summed up."""
    problem: str
    """Model and number of GPUs; plans of one problem are compared."""
    source: str
    """Publication or repository of the measurement."""
    label: str
    """Degrees and other options of the plan as text."""
    run: GpuRun | None
    """Description of the run; None if it cannot be rebuilt."""
    measured_s: float | None
    """Measured seconds of a step; None if the plan did not run."""
    measured_bytes: float | None
    """Measured peak memory of a GPU; None if it is not stated."""
    fits: bool | None
    """True if the plan ran; None if the source does not state it."""
    skipped: str = ""
    """Reason why the run cannot be rebuilt; empty otherwise."""


def read_gpu_rows(path: str | pathlib.Path) -> tuple[GpuRow, ...]:
    """Read the rows of a JSON file in one of the known forms.

    Raises: UserError for a file that cannot be read, of another form, without rows, or with a row that lacks a required
    value.
    """
    file = pathlib.Path(path)
    try:
        document = read_json(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from error
    rows = rows_of_document(document, str(file))
    if not rows:
        raise UserError(f"{file} holds no measured runs on GPUs: {_FORMS}")
    return rows


_FORMS = (
    "expected `models` and `rows` (a sweep, or rounds of MLPerf), `single` and `multi` with `columns` and `rows`, "
    "or lists such as `llm_foundry` and `megatron_sc21`"
)


def is_gpu_document(document: Any) -> bool:
    """Return True if a document's keys are those of a form that `rows_of_document` reads; rows are not examined."""
    return isinstance(document, dict) and bool(
        {"models", "rows"} <= document.keys()
        or {"single", "multi"} & document.keys()
        or {"llm_foundry", "megatron_sc21"} & document.keys()
    )


def names_gpu_rows(name: str) -> bool:
    """Return True if the value of `--pairs` names a shipped table of runs on GPUs, or a file of such runs.

    False for a file that cannot be read.
    """
    if name in ("ultrascale", "vtrain"):
        return True
    try:
        return is_gpu_document(read_json(name))
    except (OSError, ValueError):
        return False  # the reader of pairs reports the error


def rows_of_document(document: Any, origin: str) -> tuple[GpuRow, ...] | None:
    """Read the rows of a document of a known form; return None for another form.

    Raises: UserError for a row that lacks a required value.
    """
    if not is_gpu_document(document):
        return None
    try:
        if "models" in document:
            rounds = any("benchmark" in row for row in _dicts(document))
            return tuple(_rounds(document) if rounds else _sweep(document))
        if "single" in document or "multi" in document:
            return tuple(_validation_rows(document))
        return (*_fsdp_rows(document), *_megatron_rows(document))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{origin} has a row that cannot be read: {type(error).__name__} {error}") from error


def _made(names: tuple[str, str, str, str], measured: Mapping[str, Any], **stated: Any) -> GpuRow:
    """Return a row with the run that `stated` describes, or with the reason why there is no such run.

    - `names`: table, problem, source and label of the row.
    - `measured`: measured fields of `GpuRow`.
    - `stated`: arguments of `GpuRun`.
    """
    try:
        run, skipped = GpuRun(**stated), ""
    except UserError as error:
        run, skipped = None, str(error)
    return GpuRow(*names, run, skipped=skipped, **measured)


def _dicts(table: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a table as mappings from the names of its columns.

    Rows that are lists have their names in `columns`, in order. Without `rows` nothing is yielded.
    """
    for row in table.get("rows", ()):
        yield row if isinstance(row, Mapping) else dict(zip(table["columns"], row, strict=True))


def _sweep(document: Mapping[str, Any]) -> Iterator[GpuRow]:
    """Yield runs of nanotron on H100, without recomputation. Defaults: sequences of 4096 tokens, vocabulary of 131072.

    Seconds of a step follow from the measured tokens per second; a run that did not fit has none.
    """
    for row in _dicts(document):
        dims = document["models"][row["model"]]
        decoder = Decoder(
            layers=dims["layers"],
            width=dims["d_model"],
            mlp_width=dims["mlp"],
            heads=dims["heads"],
            kv_heads=dims["kv"],
            head_size=dims["d_model"] // dims["heads"],
            vocabulary=dims.get("vocab", 131072),
            # The 1B and 3B models tie the embedding table to the head. The cost model ignores the tie under a pipeline.
            tied=row["model"] in ("1B", "3B"),
        )
        keys = {"dp": row["dp"], "tp": row["tp"], "pp": row["pp"], "zero": row["zero"]}
        label = f"dp{row['dp']} tp{row['tp']} pp{row['pp']} zero{row['zero']} micro {row['micro_batch']}"
        memory, rate = row.get("mem_GB"), row.get("tok_s")
        tokens = row["dp"] * row["micro_batch"] * row["grad_accum"] * dims.get("seq", 4096)
        problem = f"{row['model']} on {row['nodes']} x 8 H100"
        yield _made(
            (f"{row['nodes']} node{'s' if row['nodes'] > 1 else ''}", problem, str(document.get("source", "")), label),
            {
                "measured_s": tokens / rate if row["fits"] and rate else None,
                "measured_bytes": memory * 2.0**30 if memory else None,
                "fits": bool(row["fits"]),
            },
            decoder=decoder,
            topology=gpu_topology("h100", 8 * row["nodes"]),
            framework="nanotron",
            seq=dims.get("seq", 4096),
            **keys,
            micro_batch=row["micro_batch"],
            accumulation=row["grad_accum"],
            recompute="none",
            stated_batch=row.get("global_batch", 0),
        )


def _gpt(layers: int, width: int, heads: int, mlp_width: int, vocabulary: int) -> Decoder:
    """Return a decoder as GPT's: one matrix for embedding and head, as many key heads as query heads, ungated MLPs."""
    return Decoder(layers, width, mlp_width, heads, heads, width // heads, vocabulary, gated=False, tied=True)


def _with_cards(topology: Topology, bytes_per_s: float) -> Topology:
    """Return the topology with a network rate of `bytes_per_s` for each GPU."""
    return dataclasses.replace(
        topology, chip=dataclasses.replace(topology.chip, network_bytes_per_s_per_chip=bytes_per_s)
    )


def _validation_rows(document: Mapping[str, Any]) -> Iterator[GpuRow]:
    """Yield runs of Megatron-DeepSpeed on A100, of one node and then of several; all ran, with full recomputation."""
    for table in ("single", "multi"):
        nodes = "one node" if table == "single" else "several nodes"
        for row in _dicts(document.get(table, {})):
            width, micro = row["hidden size"], row["micro batch"]
            keys = {
                "dp": row["data parallelism"],
                "tp": row["tensor parallelism"],
                "pp": row["pipeline parallelism"],
            }
            gpus, layers = row["# GPUs"], row["# layers"]
            problem = f"{layers} layers of {width} on {gpus} A100, {row['global batch']} x {row['sequence length']}"
            label = f"dp{keys['dp']} tp{keys['tp']} pp{keys['pp']} micro {micro}"
            yield _made(
                (nodes, problem, str(document.get("source", "")), label),
                {"measured_s": row["iteration time (ms)"] / 1e3, "measured_bytes": None, "fits": True},
                decoder=_gpt(layers, width, row["attention heads"], 4 * width, 51200),
                # A node of eight GPUs has four cards of 200 Gb/s.
                topology=_with_cards(gpu_topology("a100", gpus), 12.5e9),
                framework="megatron-deepspeed",
                seq=row["sequence length"],
                **keys,
                micro_batch=micro,
                accumulation=max(1, row["global batch"] // (keys["dp"] * micro)),
                stated_batch=row["global batch"],
                zero=0,
                recompute="full",
                dtype="f16",
            )


_LENT = {"h100_80gb": "h100", "a100_80gb": "a100"}
"""Chip names of llm-foundry's table -> names of our chip files."""


def _fsdp_rows(document: Mapping[str, Any]) -> Iterator[GpuRow]:
    """Yield runs of llm-foundry's MPT models under FSDP; those in 8-bit floats or on unknown chips are skipped."""
    for row in document.get("llm_foundry", ()):
        label = f"{row['model']} {row['seq']} micro {row['micro_batch']} {row['sharding']} remat {row['remat']}"
        names = (
            f"llm-foundry, {row['chip']}",
            f"{row['model']} of {row['seq']} on {row['chips']} {row['chip']}",
            row["source"],
            label,
        )
        measured = {"measured_s": row["step_s"], "measured_bytes": None, "fits": True}
        if row["chip"] not in _LENT or row["dtype"] == "amp_fp8":
            why = "8-bit floats" if row["dtype"] == "amp_fp8" else f"no chip file for {row['chip']}"
            yield GpuRow(*names, None, skipped=why, **measured)
            continue
        width = row["d_model"]
        yield _made(
            names,
            measured,
            decoder=_gpt(row["layers"], width, row["heads"], row["ffn_mult"] * width, row["vocab"]),
            topology=gpu_topology(_LENT[row["chip"]], row["chips"]),
            framework="fsdp",
            seq=row["seq"],
            dp=row["chips"],
            tp=1,
            pp=1,
            micro_batch=row["micro_batch"],
            accumulation=row["grad_accum"],
            zero={"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}[row["sharding"]],
            recompute=row["remat"],
            reduced_bytes=2 if row["mp_mode"] == "PURE" else 4,
        )


def _megatron_rows(document: Mapping[str, Any]) -> Iterator[GpuRow]:
    """Yield runs of Megatron on A100 (arXiv 2104.04473). Rows that state no microbatch cannot be rebuilt."""
    for row in document.get("megatron_sc21", ()):
        label = f"{row['params_b']}B {row.get('scheme', 'PTD-P')} micro {row.get('micro_batch', '?')}"
        names = (row.get("scheme", "PTD-P"), f"{row['params_b']}B on {row['chips']} A100", row["source"], label)
        measured = {"measured_s": row["step_s"], "measured_bytes": None, "fits": True}
        if "micro_batch" not in row:
            yield GpuRow(*names, None, skipped="states no microbatch", **measured)
            continue
        width, sharded = row["d_model"], row["scheme"] == "ZeRO-3"
        heads, tp = {12288: 96, 20480: 128}[width], 1 if sharded else 8
        pp = 1 if sharded else row["model_parallel"] // 8
        dp = row["chips"] // (tp * pp)
        yield _made(
            names,
            measured,
            decoder=_gpt(row["layers"], width, heads, 4 * width, 51200),
            topology=gpu_topology("a100", row["chips"]),
            framework="megatron",
            seq=row["seq"],
            dp=dp,
            tp=tp,
            pp=pp,
            micro_batch=row["micro_batch"],
            accumulation=max(1, row["global_batch"] // (dp * row["micro_batch"])),
            zero=3 if sharded else 0,
            recompute="full",
            dtype="f16",
        )


_DIMS = re.compile(r"(\d+) layers, width (\d+), (\d+) heads of (\d+), MLP (\d+)( ungated)?, vocabulary (\d+)")
"""Dims in the text of a model, which is ungated only as stated."""
_LLAMA = re.compile(r"Llama ([\d.]+) (\d+)B")
"""Name of a public model in a text; generations 2 and 3 of one size have the same layers, but other vocabularies."""
_RANK = re.compile(r"LoRA rank (\d+)")


def _rounds(document: Mapping[str, Any]) -> Iterator[GpuRow]:
    """Yield rounds of MLPerf Training by NeMo on Megatron; runs on unknown chips or with 4-bit matmuls are skipped.

    Optimizer state is split over replicas (the distributed optimizer). Nothing is computed again, as in the
    submissions' configurations. A model's text states its dims, or names a public model.
    """
    for row in _dicts(document):
        text, gpus = document["models"][row["benchmark"]], row["nodes"] * row["gpus_a_node"]
        label = f"dp{row['dp']} tp{row['tp']} pp{row['pp']} cp{row['cp']} micro {row['micro_batch']}"
        label += f" x {row['microbatches']}" + (f" virtual {row['virtual_stages']}" if row["virtual_stages"] else "")
        problem = f"{row['benchmark']} on {gpus} {row['chip']}, batch {row['global_batch']}"
        names = (row["benchmark"], problem, f"{row['round']} {row['system']}", label)
        measured = {"measured_s": row["step_s_median"], "measured_bytes": None, "fits": True}
        why = _not_priced(row)
        if why:
            yield GpuRow(*names, None, skipped=why, **measured)
            continue
        rank = _RANK.search(text)
        yield _made(
            names,
            measured,
            decoder=_named_decoder(text),
            topology=gpu_topology(row["chip"], gpus),
            framework="nemo",
            seq=row["sequence"],
            dp=row["dp"],
            tp=row["tp"],
            pp=row["pp"],
            cp=row["cp"],
            micro_batch=row["micro_batch"],
            accumulation=row["microbatches"],
            stated_batch=row["global_batch"],
            chunks=row["virtual_stages"] or 1,
            zero=1,
            recompute="none",
            dtype="fp8" if "fp8" in row["precision"] else "bf16",
            adapter_rank=int(rank[1]) if rank else 0,
        )


def _not_priced(row: Mapping[str, Any]) -> str:
    """Return the reason for which a round cannot be priced; empty if it can."""
    if row["chip"] not in chip_names():
        return f"no chip file for {row['chip']}"
    return "4-bit matmuls" if "4-bit" in row["precision"] else ""


def _named_decoder(text: str) -> Decoder:
    """Return the decoder of a model's text. Raises `ValueError` for a text without dims and without a known model."""
    stated, named = _DIMS.search(text), _LLAMA.search(text)
    if stated is not None:
        layers, width, heads, size, mlp, vocabulary = (int(stated[n]) for n in (1, 2, 3, 4, 5, 7))
        return Decoder(
            layers, width, mlp, heads, heads, size, vocabulary, gated=stated[6] is None, tied=stated[6] is not None
        )
    name = "" if named is None else f"llama{'3' if named[1] == '2' else named[1]}-{named[2]}b"
    decoder = config_dims(read_config(name)[1], Decoder) if name in bundled() else None
    if decoder is None:
        raise ValueError(f"a model without dims: {text!r}")
    return decoder if named is None or named[1] != "2" else dataclasses.replace(decoder, vocabulary=32000)
