"""Published recipes of reinforcement learning, priced with their own degrees and with those that we choose.

    python experiments/gpu/rl_recipes.py

It reads `data/rl_recipes.json`, and writes `results/rl_recipes.md`.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from autoshard.cost import Topology
from autoshard.degrees import GpuRun, price_forward, price_step
from autoshard.errors import UserError
from autoshard.reinforcement import (
    ChipPart,
    RlModel,
    RlWorkload,
    Trainer,
    eager_stages,
    plan_rl,
    predict_move,
    rl_model,
    samplers,
    whole_part,
)


ROOT = Path(__file__).parents[1]
TABLE = ROOT / "results" / "rl_recipes.md"
HEAD = """# Published recipes of reinforcement learning

`python experiments/gpu/rl_recipes.py`, which reads `experiments/data/rl_recipes.json`. Nothing was fitted to them.

## Steps

Steps of NeMo-RL on H100: GRPO with 32 answers of each prompt, bf16, Megatron. Prompts follow from the tokens a second
of the source. Old log-probabilities and those of a reference are two forward passes. Microbatches hold at most as many
tokens as the longest sequence. Ratio: predicted over published.

Predicted with the source's own degrees:

| step | source | GPUs | published s | sample | score | train | predicted s | ratio |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
CHOSEN = """
Chosen by `rl-plan`, with samples as old as the source's. Ratio: predicted over predicted with the source's degrees. It
may be above 1, since `degrees` prefers trainers that wait less often for other nodes, and since it leaves memory free.

| step | its sampler | its trainer | our GPUs, sampling + training | sampler | trainer | s | ratio |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
MOVES = """
## Moves of weights

Least: what `rl-plan` counts in a step. Broadcast: whole tensors from one device, which it prints too.

| model | GPUs | trainer | sampler | least s | broadcast s | published s |
| --- | --- | --- | --- | --- | --- | --- |
"""
SHARES = """
## Shares

An asynchronous recipe that states its share of the GPUs, but no mean length of answers. Prompts of 1000 tokens are
assumed, and the longest answer is the recipe's.

| model | mean of answers | its GPUs, sampling + training | layout | ours | sampler | trainer | order, steps behind |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def gpus(count: int) -> Topology:
    """Return so many H100 in nodes of eight."""
    return Topology.parse(f"h100:{min(8, count)}" + (f"*{count // 8}" if count > 8 else ""))


def its_run(row: dict[str, Any], model: RlModel, topology: Topology, work: RlWorkload) -> GpuRun:
    """Return the trainer's run of a source, with microbatches of at most as many tokens as the longest sequence."""
    tp, pp, cp = row["tp"], row["pp"], row.get("cp", 1)
    dp = topology.num_devices // (tp * pp * cp)
    each = work.sequences // work.updates // dp
    most = max(1, (work.prompt + work.longest) // work.length)
    micro = max(n for n in range(1, most + 1) if each % n == 0)
    return GpuRun(
        model.decoder, topology, "megatron-core", work.length, dp, tp, pp, micro, each // micro, row.get("zero", 1),
        row.get("recompute", "none"), ep=row.get("ep", 1), cp=cp,
    )  # fmt: skip


def its_trainer(run: GpuRun) -> Trainer:
    """Return a trainer with the weights of a run; its seconds and bytes are left out."""
    return Trainer(run.topology, {}, "", 0.0, 0.0, 0.0, 0.0, 0.0, run.batch, eager_stages(run), run.framework)


def priced(row: dict[str, Any], model: RlModel, work: RlWorkload) -> tuple[float, float, float]:
    """Return the seconds of samples, scores and training with the degrees of the source."""
    sampling = gpus(row["sampling"] or row["gpus"])
    training = gpus(row["gpus"] - row["sampling"])
    (own,) = [
        each
        for each in samplers(model, sampling, work)
        if (each.engine.tensor, each.engine.attention, each.engine.experts) == (row["sampler_tp"], 1, 1)
    ]
    run = its_run(row, model, training, work)
    return (
        own.seconds,
        work.scores * work.updates * price_forward(run),
        work.updates * price_step(run).seconds,
    )


def workload(row: dict[str, Any]) -> RlWorkload:
    return RlWorkload(
        row["sequences"], row["prompt"], row["answer"], row["length"] - row["prompt"], 32,
        row["sequences"] // row["update"], 2, 0, 1 if row["sampling"] else 0, framework="megatron-core",
    )  # fmt: skip


def steps(document: dict[str, Any], names: dict[str, str]) -> str:
    """Return both tables of steps."""
    first, second, ratios = "", "", []
    for row in document["steps"]:
        work = workload(row)
        model = rl_model(names[row["model"]], work)
        sample, score, train = priced(row, model, work)
        ours = max(sample, score + train) if row["sampling"] else sample + score + train
        ratios.append(ours / row["step_s"])
        published = row.get("phases", ["", "", "", ""])
        cells = [
            f"{seconds:.1f}" + (f" (published {stated})" if stated else "")
            for seconds, stated in zip((sample, score, train), published, strict=False)
        ]
        first += f"| {row['name']} | {row['source']} | {row['gpus']} | {row['step_s']} | {' | '.join(cells)} | "
        first += f"{ours:.1f} | {ours / row['step_s']:.2f} |\n"
        degrees = f"tp{row['tp']} pp{row['pp']}" + (f" ep{row['ep']}" if "ep" in row else "")
        second += f"| {row['name']} | tp{row['sampler_tp']} | {degrees} | "
        try:
            best = plan_rl(names[row["model"]], gpus(row["gpus"]).name, work).ways[0]
        except UserError as error:
            second += f"{error} | | | | |\n"
            continue
        parts = [each.topology.num_devices for each in (best.sampler, best.trainer)]
        share = f"all {parts[0]}" if best.colocated else f"{parts[0]} + {parts[1]}"
        engine = best.sampler.engine
        sampler = f"tp{engine.tensor}" + (f" x {engine.attention}" if engine.attention > 1 else "")
        sampler += f" ep{engine.experts}" if engine.experts > 1 else ""
        second += f"{share} | {sampler} | {best.trainer.words} | {best.step_s:.1f} | {best.step_s / ours:.2f} |\n"
    note = f"\nRatios from {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}.\n"
    return HEAD + first + note + CHOSEN + second


def moves(document: dict[str, Any], names: dict[str, str]) -> str:
    """Return the table of moves."""
    lines = ""
    for row in document["moves"]:
        work = RlWorkload(256, 100, 100, 100)
        model = rl_model(names[row["model"]], work)
        whole = gpus(row["gpus"])
        half = row["gpus"] if row.get("colocated") else row["gpus"] // 2
        part = gpus(half)
        run = its_run(row, model, part, work)
        (sampler,) = [
            each
            for each in samplers(model, part, work)
            if (each.engine.tensor, each.engine.attention, each.engine.experts) == (row["sampler_tp"], 1, 1)
        ]
        training, sampling = (
            (whole_part(whole), whole_part(whole))
            if row.get("colocated")
            else (ChipPart(part, range(half)), ChipPart(part, range(half, 2 * half)))
        )
        found = predict_move(model, whole, (its_trainer(run), sampler), (training, sampling), "bf16")
        low, high = row["seconds"]
        published = f"{low}" if low == high else f"{low} to {high}"
        degrees = f"tp{row['tp']} pp{row['pp']}" + (f" ep{row['ep']}" if "ep" in row else " ZeRO-3")
        lines += f"| {row['model']} | {row['gpus']} | {degrees} | tp{row['sampler_tp']} | {found.seconds:.3f} | "
        lines += f"{found.broadcast_s:.2f} | {published} ({row['source']}) |\n"
    return MOVES + lines


def shares(document: dict[str, Any], names: dict[str, str]) -> str:
    """Return the table of shares."""
    lines = ""
    for row in document["shares"]:
        for mean in row["means"]:
            work = RlWorkload(
                row["sequences"], row["prompt"], mean, row["longest"], row["answers"], staleness=row["staleness"],
                framework="megatron-core",
            )  # fmt: skip
            best = plan_rl(names[row["model"]], gpus(row["gpus"]).name, work).ways[0]
            sampling, training = (each.topology.num_devices for each in (best.sampler, best.trainer))
            lines += f"| {row['model']} | {mean} | {row['sampling']} + {row['gpus'] - row['sampling']} | "
            lines += f"tp{row['sampler_tp']}; tp{row['tp']} pp{row['pp']} | {sampling} + {training} | "
            lines += f"tp{best.sampler.engine.tensor} | {best.trainer.words} | {best.mode}, {best.staleness} |\n"
    return SHARES + lines


def main() -> None:
    document = json.loads((ROOT / "data" / "rl_recipes.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        names = {}
        for name, fields in document["models"].items():
            path = Path(folder, f"{name}.json")
            path.write_text(json.dumps(fields))
            names[name] = f"hf:{path}"
        names |= {name: f"hf:{name}" for name in ("llama3.1-8b", "llama3.1-70b", "qwen2.5-7b")}
        text = steps(document, names) + moves(document, names) + shares(document, names)
    text += "\n## Sources\n\n" + "".join(f"- {name}: {where}.\n" for name, where in document["sources"].items())
    text += "\n## Not comparable\n\n" + "".join(f"- {each}.\n" for each in document["not_comparable"])
    TABLE.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
