"""Groups of arguments that several commands share: the program, limits, meshes, and constraints of the user."""

import argparse
from pathlib import Path

from autoshard.cli.option_values import (
    experts,
    factor,
    gib,
    lora,
    loss_chunks,
    numbers,
    or_auto,
    padding,
    pair,
    positive,
    remat,
    remats,
    roles,
    sampling,
    schedule,
    seconds_or_none,
    texts,
    whole,
    xla_flags,
)


def add_program(parser: argparse.ArgumentParser, several: bool = False, auto: bool = False) -> None:
    """Add the argument `PROGRAM`, `--entry`, `--roles`, `--rules`, and the options of hf:CONFIG (None if not given).

    - `several`: batches and remat variants are lists.
    - `auto`: batches, remat variants, microbatches, stages, schedules and experts accept `auto`, which leaves the
      choice to the planner.
    """
    chosen = or_auto if auto else lambda parse: parse
    best = "; auto: the fastest" if auto else ""
    parser.add_argument("program", metavar="PROGRAM", help="model.py, step.mlir or hf:CONFIG, see below")
    parser.add_argument("--entry", default="program", metavar="NAME", help="name in model.py (default: program)")
    parser.add_argument(
        "--roles",
        type=roles,
        metavar="NAME=ROLE,...",
        help="roles of arguments that a file does not state: parameter, optimizer_state, batch or other, by name, "
        "start of names, or arg0-arg7",
    )
    parser.add_argument(
        "--rules", metavar="RULES.py", type=Path, help="calls autoshard.register_rule for custom calls of the program"
    )
    group = parser.add_argument_group("for hf:CONFIG")
    mode = group.add_mutually_exclusive_group()
    mode.add_argument("--train", action="store_true", default=None, help="a training step: loss, backward, optimizer")
    mode.add_argument("--infer", action="store_false", dest="train", default=None, help="a forward pass")
    sequences = "sequences in one step, over all devices (default: 8)" + best
    if several:
        group.add_argument("--batch", type=chosen(numbers), metavar="N,N,...", help=sequences)
    else:
        group.add_argument("--batch", type=chosen(positive), metavar="N", help=sequences)
    length = "tokens of one sequence (default: the model's context, at most 1024)"
    group.add_argument("--seq", type=positive, metavar="N", help=length)
    group.add_argument("--image", type=positive, metavar="N", help="pixels of one side, for models of images")
    group.add_argument("--dtype", metavar="DTYPE", help="dtype of the computation (default: bfloat16; a file: its own)")
    group.add_argument("--param-dtype", metavar="DTYPE", help="dtype of parameters (default: float32 in training)")
    group.add_argument("--state-dtype", metavar="DTYPE", help="dtype of the optimizer's state (default: float32)")
    again = "recomputation in the backward pass: none, dots, full, full,keep=q_proj,offload=input (by value), "
    again += "or full:20+none for the first 20 layers alone"
    if several:
        group.add_argument("--remat", type=chosen(remats), metavar="R,R,...", help=again + best)
    else:
        group.add_argument("--remat", type=chosen(remat), metavar="R", help=again + best)
    group.add_argument("--optimizer", metavar="NAME", help="adamw (default), sgd, momentum, lion, adafactor, muon")
    group.add_argument(
        "--attention",
        choices=("plain", "splash", "cached", "cudnn", "auto"),
        help="plain: scores in memory; splash: JAX's TPU kernel; cached: a kernel over a key-value cache; cudnn: the "
        "kernel of GPUs; auto (the default): kernels wherever they apply and save time",
    )
    group.add_argument(
        "--exchange",
        choices=("auto", "gather", "heads", "ring"),
        help="exchange of queries with keys and values of a split sequence: gather, by heads, or around a ring" + best,
    )
    group.add_argument(
        "--microbatches",
        type=chosen(positive),
        metavar="N",
        help="parts of the batch that are computed one after the other; their gradients are averaged" + best,
    )
    group.add_argument(
        "--gradient-groups",
        type=chosen(positive),
        metavar="N",
        help="parts of the batch that keep gradients of their own through all microbatches, and sum them once a step"
        + ("; auto: those of the devices that hold examples, if that is faster" if auto else ""),
    )
    group.add_argument(
        "--stages",
        type=chosen(positive),
        metavar="N",
        help="stages of a pipeline of repeated layers; default of --microbatches: the same number (also for "
        "autoshard.stack in JAX programs)" + best,
    )
    group.add_argument(
        "--schedule",
        type=chosen(schedule),
        metavar="S",
        help="schedule of a pipeline: gpipe (the default), circular:2 (two chunks of layers a stage) or circular (a "
        "chunk for each layer); with a program for each stage, of torch modules or marked JAX steps: 1f1b, or "
        "interleaved:2 (two chunks); zero-bubble for JAX" + best,
    )
    group.add_argument(
        "--host",
        choices=("none", "optimizer", "auto") if auto else ("none", "optimizer"),
        help="state in the hosts' memory between steps: none (the default), or optimizer, updated a layer at a time "
        "(also of functions in files)" + best,
    )
    group.add_argument(
        "--lora",
        type=lora,
        metavar="r=R,...",
        help="with --train: low-rank adapters of frozen weights, r=16,alpha=32,targets=q_proj/v_proj (default: "
        "alpha is twice the rank; all linear layers but output heads); base=int8, int4 or nf4 stores their weights "
        "in 8 or 4 bits",
    )
    group.add_argument(
        "--pad",
        type=chosen(padding),
        metavar="N",
        help="with --train: add zeros until N divides the vocabulary, or vocabulary=128,heads=8,width=256, so that "
        "more devices can split them; loss and updates stay the same" + best,
    )
    group.add_argument(
        "--loss-chunks",
        type=loss_chunks,
        metavar="N",
        help="with --train: compute logits and loss in N chunks of the vocabulary, or tokens=4,vocabulary=8, so that "
        "all logits are never in memory; the backward pass computes them again",
    )
    group.add_argument(
        "--quantize",
        choices=("int8", "fp8", "none", *(["auto"] if auto else [])),
        help="with --train: multiply the linear layers of repeated layers in 8 bits, in both passes, with a scale for "
        "each row; for chips that multiply these faster (default: none)" + best,
    )
    group.add_argument("--serve", choices=("prefill", "decode"), help="a step of serving, with a key-value cache")
    group.add_argument("--cache", type=positive, metavar="N", help="tokens in the cache (default: --seq)")
    group.add_argument(
        "--sample",
        type=sampling,
        metavar="S",
        help="with --serve: return tokens in place of logits, greedy or any of temperature=0.8,top_k=50,top_p=0.9",
    )
    group.add_argument(
        "--experts",
        type=chosen(experts),
        metavar="E",
        help="dispatch of tokens to experts: slots (einsums, the default; slots:all drops none), sorted, or sorted:8 "
        "or ragged:8 for experts in 8 groups" + ("; auto: the fastest that drops none" if auto else ""),
    )
    group.add_argument(
        "--capacity-factor",
        type=factor,
        metavar="X",
        help="slots of an expert over its mean number of tokens (default: 1.25), or rows of a group (default: for all)",
    )
    group.add_argument(
        "--imbalance",
        type=factor,
        metavar="X",
        help="the busiest device has X times the mean number of tokens for its experts (default: 1; for experts in "
        "groups)",
    )


def add_estimated(parser: argparse.ArgumentParser) -> None:
    """Add `PROGRAM`, the list `--topology` and the options from which closed formulas price a decoder's step."""
    parser.add_argument("program", metavar="PROGRAM", help="hf:CONFIG")
    parser.add_argument(
        "--topology", required=True, type=texts, metavar="T,T,...", help="names or patterns: v5p-256, 'v6e:*' ..."
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--train", action="store_true", default=None, help="a training step: loss, backward, optimizer")
    mode.add_argument("--infer", action="store_false", dest="train", default=None, help="a forward pass")
    parser.add_argument("--serve", choices=("prefill", "decode"), help="a step of serving, with a key-value cache")
    parser.add_argument("--batch", type=positive, metavar="N", help="sequences in a step (default: one for a device)")
    parser.add_argument("--seq", type=positive, metavar="N", help="tokens of one sequence")
    parser.add_argument("--cache", type=positive, metavar="N", help="tokens in the cache (default: --seq)")
    parser.add_argument("--remat", type=remat, metavar="R", help="none, dots or full (default: one column for each)")
    parser.add_argument("--param-dtype", metavar="DTYPE", help="dtype of parameters (default: float32 in training)")
    parser.add_argument("--state-dtype", metavar="DTYPE", help="dtype of the optimizer's state (default: float32)")


def add_reinforcement(parser: argparse.ArgumentParser) -> None:
    """Add `PROGRAM`, `--topology` and the numbers of a step of reinforcement learning."""
    parser.add_argument("program", metavar="PROGRAM", help="hf:CONFIG of a decoder")
    parser.add_argument("--topology", required=True, metavar="CHIP:SHAPE", help="all chips: h100:8*4, v5p:4x4x8 ...")
    parser.add_argument(
        "--sequences", required=True, type=positive, metavar="N", help="answers that a step samples and trains"
    )
    parser.add_argument("--prompt", required=True, type=positive, metavar="N", help="tokens of a prompt")
    parser.add_argument("--answer", required=True, type=positive, metavar="N", help="tokens of an answer, on the mean")
    parser.add_argument("--longest", type=positive, metavar="N", help="tokens of the longest (default: --answer)")
    parser.add_argument("--answers", type=positive, default=1, metavar="N", help="answers of each prompt (default: 1)")
    parser.add_argument(
        "--updates", type=positive, default=1, metavar="N", help="updates of weights in a step (default: 1)"
    )
    parser.add_argument(
        "--scores", type=whole, default=1, metavar="N", help="the trainer's forward passes over samples (default: 1)"
    )
    parser.add_argument("--reference", action="store_true", help="score with the weights of a reference model too")
    parser.add_argument(
        "--staleness",
        type=whole,
        default=1,
        metavar="N",
        help="most updates by which samples are older than what they train; 0 for on-policy (default: 1)",
    )
    stored = {"choices": ("bf16", "fp8", "int8"), "default": "bf16"}
    parser.add_argument("--weights", **stored, help="dtype of the sampler's weights (default: bf16)")
    parser.add_argument("--cache-dtype", **stored, help="dtype of keys and values (default: bf16)")
    parser.add_argument(
        "--framework",
        choices=("torchtitan", "megatron-core"),
        default="",
        help="framework of trainers on GPUs (default: torchtitan)",
    )


def add_output(
    parser: argparse.ArgumentParser,
    *flags: str,
    metavar: str,
    help: str,
    group: argparse._ActionsContainer | None = None,
    force: str = "write over a file that the command reads as well",
    place: bool = False,
) -> None:
    """Add flags that name a file to write, and `--force` once for all such flags of a command.

    The parser's default `writes` maps each flag to its attribute; `places` lists the attributes that may be folders.

    - `flags`: names of the flag; errors use the last one.
    - `group`: group of the help that shows the flag; None for that of the parser.
    - `force`: help text of `--force`.
    - `place`: the output may be a folder.
    """
    action = (group or parser).add_argument(*flags, metavar=metavar, type=Path, help=help)
    writes = parser.get_default("writes") or {}
    if not writes:
        parser.add_argument("--force", action="store_true", help=force)
    places = parser.get_default("places") or ()
    parser.set_defaults(writes={**writes, flags[-1]: action.dest}, places=(*places, action.dest) if place else places)


def add_planning(parser: argparse.ArgumentParser, required: bool, problem: bool = True) -> None:
    """Add the options of planning: `--topology`, limits, compiler flags, and the user's constraints.

    - `required`: the command refuses to run without `--topology`.
    - `problem`: the command makes one Problem for each plan, which `--save-problem` writes.
    """
    group = parser.add_argument_group("planning")
    group.add_argument("--topology", required=required, metavar="CHIP:SHAPE", help="v5p:4x8x8, v6e:16x16*2, cpu:8 ...")
    add_limits(group)
    add_flags(group)
    if problem:
        text = "write the Problem, in the contest's format"
        add_output(parser, "--save-problem", metavar="P.json.gz", help=text, group=group)
    fixed = parser.add_argument_group("specs that you fix; the rest is chosen for them (docs/constraints.md)")
    for flag, form, text in (
        ("--pin", "NAME=SPEC", "the spec of tensors by name or pattern: '*.mlp.*.weight=model,None'"),
        ("--forbid", "NAME=AXIS", "an axis that may not split these tensors"),
        ("--axis-only", "AXIS=GROUP", "an axis that may split this dim group only: data=batch"),
    ):
        fixed.add_argument(flag, action="append", default=[], type=pair(form), metavar=form, help=text)
    fixed.add_argument("--replicate", action="append", default=[], metavar="NAME", help="tensors that stay whole")
    fixed.add_argument(
        "--ignore-constraints",
        action="store_true",
        help="remove the program's own constraints (with_sharding_constraint, shardings of arguments; not shard_map)",
    )
    fixed.add_argument("--pin-from", metavar="PLAN.json", type=Path, help="the parameters' specs of another plan")


def add_flags(group: argparse._ActionsContainer) -> None:
    """Add `--xla-flags`: the compiler flags of the step, or the name of a set of them."""
    group.add_argument(
        "--xla-flags",
        type=xla_flags,
        metavar='SET|"--xla_A=B ..."',
        help="compiler flags of the step (default: those of LIBTPU_INIT_ARGS), or a set of them (default, async, "
        "sparsecore); prices follow them",
    )


def add_candidates(parser: argparse.ArgumentParser) -> None:
    """Add `--candidates`: the most plans to offer, by default 1."""
    parser.add_argument(
        "--candidates",
        type=positive,
        default=1,
        metavar="N",
        help="offer up to N plans that really differ, ours the first (default: 1)",
    )


def add_limits(group: argparse._ActionsContainer) -> None:
    """Add `--mesh`, `--memory-limit`, `--time-limit`, `--seed`, `--no-refine-axes` and `--no-calibration`."""
    group.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="axes and sizes, major first (default: XLA_AUTO_SPMD_MESH, else auto, which searches the best)",
    )
    group.add_argument("--memory-limit", type=gib, metavar="GiB", help="memory of one device (default: the chip's)")
    limit = "processor seconds for each solve (default: 60), whose work is bounded separately; inf is allowed"
    group.add_argument("--time-limit", type=seconds_or_none, default=60.0, metavar="S", help=limit)
    group.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of randomised searches (default: 0)")
    group.add_argument(
        "--no-refine-axes",
        dest="refine_axes",
        action="store_false",
        help="keep axes whole where a dim could use a part of one (8 heads on an axis of 16)",
    )
    group.add_argument(
        "--no-calibration",
        dest="calibration",
        action="store_false",
        help="price with the shipped figures, not with those that `autoshard refine` learned (in AUTOSHARD_DATA_DIR)",
    )


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add `--no-cache`, which turns off the disk cache of traces; `cached` is False then."""
    parser.add_argument(
        "--no-cache",
        dest="cached",
        action="store_false",
        help="trace the program again (AUTOSHARD_CACHE_DIR stores traces)",
    )
