"""Degrees of parallelism as a table, as JSON, and as the configuration of torchtitan or Megatron."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.base.units import GIB
from autoshard.degrees.degree_choice import DegreeChoice, format_degrees, tensor_degrees
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
                "ep": each.run.ep,
                "zero": each.run.zero,
                "micro_batch": each.run.micro_batch,
                "accumulation": each.run.accumulation,
                "recompute": each.run.recompute,
                "step_time_s": each.step.seconds,
                "parts_s": each.step.parts,
                "eager_s": each.step.eager_seconds,
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
    shown = fitting[:_SHOWN]
    # The plan that people try first has a row in any case.
    shown += [each for each in fitting[_SHOWN:] if each.run.tp * each.run.pp * each.run.ep == 1][:1]
    best, fastest = fitting[0], min(fitting, key=lambda each: each.step.seconds)
    shown += [fastest] if fastest not in shown else []
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, header_style="dim")
    table.add_column("plan", no_wrap=True)
    table.add_column("AC", no_wrap=True)
    for column in ("step", "MFU", "GiB", "bubble", "sums", "waits"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in shown:
        parts = each.step.parts
        table.add_row(
            format_degrees(each.run).split(" AC ")[0],
            each.run.recompute,
            f"{each.step.seconds:.4g} s{'*' if each is fastest is not best else ''}",
            f"{100 * each.mfu:.0f} %",
            f"{each.step.peak_bytes / GIB:.1f}",
            f"{100 * parts['bubble'] / each.step.seconds:.0f} %",
            f"{100 * parts['gradients'] / each.step.seconds:.0f} %",
            f"{each.waits}",
        )
    near = sum(each.step.seconds <= fastest.step.seconds * (1 + INDISTINCT) for each in fitting)
    text = (
        f"{len(choices)} plans multiply, {len(fitting)} of them fit, {near} within {100 * INDISTINCT:.0f} % of the "
        "fastest: nine in ten predictions of measured runs on several nodes of A100 were as near. The first of these "
        "waits least often for messages between nodes, which were far slower than priced in one sweep on H100"
    )
    text += (
        "."
        if best is fastest
        else f"; the fastest (*) is {format_degrees(fastest.run)}, which waits {fastest.waits} times."
    )
    limit = f"A GPU holds {best.limit_bytes / GIB:.1f} GiB of tensors. "
    return Group(table, Text(), Text(limit + text, style="dim"), *(Text(each, style="dim") for each in _notes(best)))


def _notes(best: DegreeChoice) -> list[str]:
    """Return sentences on the first plan: its time without a compiler, and degrees that heads of keys rule out."""
    run, step = best.run, best.step.seconds
    notes = [
        f"Kernels are priced one by one, as without torch.compile: all but matmuls and attention take "
        f"{best.step.eager_seconds:.3g} s of the first plan's {step:.4g} s. `autoshard plan` prices a compiled step, "
        "which fuses most of them."
    ]
    island, kv_heads = min(run.topology.num_devices, run.topology.shape[0]), run.decoder.kv_heads
    if island > kv_heads:
        notes.append(
            f"tp is {max(tensor_degrees(run.decoder, run.topology))} at most: {run.framework} splits whole heads of "
            f"keys, of which there are {kv_heads}, and replicates none."
        )
    return notes


def torchtitan_toml(choice: DegreeChoice) -> str:
    """Return the sections of torchtitan's TOML configuration that set these degrees.

    With a pipeline a local batch is all microbatches of a replica, else one of them. The second line states the flags
    of torchtitan 0.3, which reads no file.
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
        *([f"expert_parallel_degree = {run.ep}"] if run.decoder.experts > 1 else []),
        "",
        "[activation_checkpoint]",
        f'mode = "{run.recompute}"',
        *(['selective_ac_option = "op"'] if run.recompute == "selective" else []),
    ]
    lines.insert(
        1, f"# torchtitan 0.3 takes flags: {' '.join(_flags(lines[1:]))} activation-checkpoint:{run.recompute}"
    )
    return "\n".join(lines) + "\n"


def _flags(lines: Sequence[str]) -> list[str]:
    """Return the keys of torchtitan's `training` and `parallelism` sections as command-line flags."""
    flags, section = [], ""
    for line in lines:
        if line.startswith("["):
            section = line.strip("[]")
        elif line and section != "activation_checkpoint":
            key, value = line.split(" = ")
            flags.append(f"--{section}.{key} {value.strip(chr(34))}")
    return flags


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
        *(
            [
                f"--num-experts {decoder.experts}",
                f"--moe-router-topk {decoder.active_experts}",
                f"--moe-ffn-hidden-size {decoder.expert_inner}",
                f"--expert-model-parallel-size {run.ep}",
                "--expert-tensor-parallel-size 1",
                "--moe-token-dispatcher-type alltoall",
                "--moe-grouped-gemm",
            ]
            if decoder.experts > 1
            else []
        ),
        *([] if decoder.head_size * decoder.heads == decoder.width else [f"--kv-channels {decoder.head_size}"]),
        *(["--qk-layernorm"] if decoder.qk_norm else []),
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
