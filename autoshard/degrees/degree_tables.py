"""Degrees of parallelism as a table, as JSON, and as the configuration of torchtitan or Megatron."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.base.units import GIB
from autoshard.degrees.degree_choice import DegreeChoice, format_degrees
from autoshard.degrees.node_waits import INDISTINCT


# Most plans in the table.
_SHOWN = 8


def degree_figures(choices: Sequence[DegreeChoice]) -> dict[str, Any]:
    """Return the JSON object of `autoshard degrees --json`: plans in seconds and GiB, the recommended one first."""
    return {
        "plans": [
            {
                "dp": each.run.dp,
                "tp": each.run.tp,
                "pp": each.run.pp,
                "zero": each.run.zero,
                "micro_batch": each.run.micro_batch,
                "accumulation": each.run.accumulation,
                "recompute": each.run.recompute,
                "step_time_s": each.step.seconds,
                "parts_s": each.step.parts,
                "mfu": each.mfu,
                "waits": each.waits,
                "peak_gib": each.step.peak_bytes / GIB,
                "limit_gib": each.limit_bytes / GIB,
                "fits": each.fits,
            }
            for each in choices
        ]
    }


def degree_report(choices: Sequence[DegreeChoice]) -> RenderableType:
    """Return a table of the recommended plan and the fastest plans that fit, up to `_SHOWN`, and the uncertainty.

    The first of `choices` fits and is the recommended one, as `choose_degrees` returns them.
    """
    fitting = [each for each in choices if each.fits]
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("plan", no_wrap=True)
    for column in ("step", "MFU", "GiB", "bubble", "sums", "waits"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in fitting[:_SHOWN]:
        parts = each.step.parts
        table.add_row(
            format_degrees(each.run),
            f"{each.step.seconds:.4g} s",
            f"{100 * each.mfu:.1f} %",
            f"{each.step.peak_bytes / GIB:.1f}",
            f"{100 * parts['bubble'] / each.step.seconds:.1f} %",
            f"{100 * parts['gradients'] / each.step.seconds:.1f} %",
            f"{each.waits}",
        )
    best, fastest = fitting[0], min(fitting, key=lambda each: each.step.seconds)
    near = sum(each.step.seconds <= fastest.step.seconds * (1 + INDISTINCT) for each in fitting)
    text = (
        f"{len(choices)} plans multiply, {len(fitting)} of them fit, {near} within {100 * INDISTINCT:.0f} % of the "
        "fastest: nine in ten predictions of measured runs on several nodes of A100 were as near. The first of these "
        "waits least often for messages between nodes, which were far slower than priced in one sweep on H100"
    )
    text += (
        "."
        if best is fastest
        else f"; the fastest is {format_degrees(fastest.run)}, which waits {fastest.waits} times."
    )
    limit = f"A GPU holds {best.limit_bytes / GIB:.1f} GiB of tensors. "
    return Group(table, Text(), Text(limit + text, style="dim"))


def torchtitan_toml(choice: DegreeChoice) -> str:
    """Return the sections of torchtitan's TOML configuration that set these degrees.

    With a pipeline a local batch is all microbatches of a replica, else one of them.
    """
    run = choice.run
    local = run.micro_batch * (run.accumulation if run.pp > 1 else 1)
    pipeline = [
        'pipeline_parallel_schedule = "1F1B"',
        f"pipeline_parallel_microbatch_size = {run.micro_batch}",
    ]
    lines = [
        f"# {format_degrees(run)}: {choice.step.seconds:.4g} s a step predicted on {run.topology.name}",
        "[training]",
        f"local_batch_size = {local}",
        f"global_batch_size = {run.batch}",
        f"seq_len = {run.seq}",
        "",
        "[parallelism]",
        "data_parallel_replicate_degree = 1",
        f"data_parallel_shard_degree = {run.dp}",
        f'fsdp_reshard_after_forward = "{"always" if run.zero == 3 else "never"}"',
        f"tensor_parallel_degree = {run.tp}",
        f"pipeline_parallel_degree = {run.pp}",
        *(pipeline if run.pp > 1 else []),
        "context_parallel_degree = 1",
        "",
        "[activation_checkpoint]",
        f'mode = "{run.recompute}"',
    ]
    return "\n".join(lines) + "\n"


def megatron_arguments(choice: DegreeChoice) -> str:
    """Return the arguments of Megatron's `pretrain_gpt.py` that set these degrees and the decoder's dims, by line."""
    run, decoder = choice.run, choice.run.decoder
    lines = [
        f"--tensor-model-parallel-size {run.tp}",
        *(["--sequence-parallel"] if run.tp > 1 else []),
        f"--pipeline-model-parallel-size {run.pp}",
        f"--micro-batch-size {run.micro_batch}",
        f"--global-batch-size {run.batch}",
        *(["--use-distributed-optimizer"] if run.zero else []),
        "--overlap-grad-reduce",
        *(
            ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
            if run.recompute == "full"
            else []
        ),
        f"--num-layers {decoder.layers}",
        f"--hidden-size {decoder.width}",
        f"--ffn-hidden-size {decoder.mlp_width}",
        f"--num-attention-heads {decoder.heads}",
        "--group-query-attention",
        f"--num-query-groups {decoder.kv_heads}",
        f"--seq-length {run.seq}",
        f"--max-position-embeddings {run.seq}",
        "--swiglu",
        "--normalization RMSNorm",
        "--position-embedding-type rope",
        "--disable-bias-linear",
        *([] if decoder.tied else ["--untie-embeddings-and-output-weights"]),
        "--bf16",
    ]
    return "\n".join(lines) + "\n"


DEGREE_FORMS = {"torchtitan": torchtitan_toml, "megatron-core": megatron_arguments}
"""Framework -> the function that writes a choice as its configuration."""
