"""Measured serving of decoders on GPUs and TPUs, compared with `autoshard.serving.serving_point`.

    python experiments/fidelity/serving_points.py [SERVING.json [SERVING_TPU.json]]

The default files are those of `../shared/data/measured/`. The script writes the table `results/serving_points.md`.
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from autoshard.cost import Topology
from autoshard.serving import Decoder, ServingEngine, ServingPoint, ServingRequests, serving_point


ROOT = Path(__file__).parents[2]
MEASURED = ROOT.parent / "shared" / "data" / "measured"
TABLE = Path(__file__).parents[1] / "results" / "serving_points.md"
MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": Decoder(32, 4096, 14336, 32, 8, 128, 128256),
    "Qwen/Qwen3-32B": Decoder(64, 5120, 25600, 64, 8, 128, 151936, qk_norm=True),
}
"""Dims of the models, as in their configurations."""
LLAMA_70B = Decoder(80, 8192, 28672, 64, 8, 128, 128256)
CHIPS = {"h100_sxm": "h100", "h200_sxm": "h200", "gb200": "gb200"}
CHUNK = 512
"""Most tokens in a step of the run on TPUs."""
SAME = 0.03
"""Margin within which a degree's measured time counts as the best too."""

HEAD = """# Serving, measured and priced

`python experiments/fidelity/serving_points.py`. Time per output token of `autoshard.serving.serving_point` (closed
form, by the figures that plans are priced by) beside measured points; nothing was fitted to them. Ratio: priced over
measured.

The last column is of whole requests, from their arrival to their last token, for each token of their answers: what a
scheduler counts to the first token or to the others makes no difference there.

| system | model | weights | framework | rows | median ratio | median off | within 12 % | whole requests: off (ratio) |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def point(row: dict) -> ServingPoint | None:
    """Return the priced point of a row; None for weights of four bits, for which no chip file has a rate."""
    quantised = row.get("gemm_quant_mode")
    if quantised == "nvfp4":
        return None
    asked = ServingRequests(row["isl"], row["osl"], "fp8" if quantised else "bf16")
    topology = Topology.parse(f"{CHIPS[row['system']]}:{row['tp_size']}")
    return serving_point(MODELS[row["model_path"]], topology, asked, ServingEngine(row["tp_size"]), row["batch_size"])


def priced(row: dict) -> float | None:
    """Return the priced seconds per output token."""
    price = point(row)
    return None if price is None else price.token_s


def whole(row: dict) -> float:
    """Return the priced over the measured time of a whole request."""
    price = point(row)
    assert price is not None
    ours = price.prompt_s + row["osl"] * price.token_s
    return 1e3 * ours / (row["silicon_ttft_ms"] + (row["osl"] - 1) * row["silicon_tpot_ms"])


def gpu_lines(rows: list[dict]) -> tuple[list[str], list[float]]:
    groups: dict[tuple, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        seconds = priced(row)
        if seconds is not None:
            weights = row.get("gemm_quant_mode") or "bf16"
            key = (row["system"], row["model_path"].split("/")[1], weights, row["backend"])
            groups[key].append((1e3 * seconds / row["silicon_tpot_ms"], whole(row)))
    lines, all_ratios = [], []
    for key, pairs in sorted(groups.items()):
        ratios, wholes = [each for each, _ in pairs], [each for _, each in pairs]
        off = [abs(ratio - 1) for ratio in ratios]
        near = sum(each <= 0.12 for each in off) / len(off)
        cells = [*key, str(len(ratios)), f"{statistics.median(ratios):.2f}", f"{statistics.median(off):.1%}"]
        away = statistics.median(abs(each - 1) for each in wholes)
        cells += [f"{near:.0%}", f"{away:.1%} ({statistics.median(wholes):.2f})"]
        lines.append(f"| {' | '.join(cells)} |")
        all_ratios += ratios
    return lines, all_ratios


def degrees(rows: list[dict]) -> tuple[int, int, int]:
    """Count groups that differ only in the tensor degree, and those in which our degree is the measured best.

    The second count is for the degree of least time per token. The third is for the degree of most tokens for each GPU.
    """
    groups: dict[tuple, dict[int, tuple[float, float]]] = defaultdict(dict)
    for row in rows:
        seconds = priced(row)
        if seconds is not None:
            names = ("model_path", "system", "backend", "gemm_quant_mode", "isl", "osl", "batch_size")
            groups[tuple(row.get(name) for name in names)][row["tp_size"]] = (row["silicon_tpot_ms"] / 1e3, seconds)
    counted = latency = each_gpu = 0
    for by_degree in groups.values():
        if len(by_degree) < 2:
            continue
        counted += 1
        for weight in (0, 1):
            costs = {tp: [seconds * tp**weight for seconds in pair] for tp, pair in by_degree.items()}
            ours = min(costs, key=lambda tp: costs[tp][1])
            right = costs[ours][0] <= (1 + SAME) * min(measured for measured, _ in costs.values())
            latency, each_gpu = latency + (right and not weight), each_gpu + (right and bool(weight))
    return counted, latency, each_gpu


def largest_is_best(rows: list[dict]) -> float:
    """Return the share of these groups in which the largest degree has the least measured time per token."""
    groups: dict[tuple, dict[int, float]] = defaultdict(dict)
    for row in rows:
        names = ("model_path", "system", "backend", "gemm_quant_mode", "isl", "osl", "batch_size")
        groups[tuple(row.get(name) for name in names)][row["tp_size"]] = row["silicon_tpot_ms"]
    several = [by_degree for by_degree in groups.values() if len(by_degree) > 1]
    return sum(by_degree[max(by_degree)] <= (1 + SAME) * min(by_degree.values()) for by_degree in several) / len(
        several
    )


def tpu_lines(data: dict) -> list[str]:
    lines = []
    for row in data["serving_trillium"]["rows"]:
        place, asked = Topology.parse("v6e:2x4"), ServingRequests(1000, 1000)
        point = serving_point(LLAMA_70B, place, asked, ServingEngine(8), row["concurrency"], CHUNK - row["concurrency"])
        ours = 1e3 * point.token_s
        theirs = row["mean_tpot_ms"]
        lines.append(f"| {row['concurrency']} | {theirs:.1f} | {ours:.1f} | {ours / theirs:.2f} |")
    return lines


def main() -> int:
    gpu, tpu = (Path(each) for each in [*sys.argv[1:], MEASURED / "serving.json", MEASURED / "serving_tpu.json"][:2])
    rows = json.loads(gpu.read_text())["rows"]
    lines, ratios = gpu_lines(rows)
    off = statistics.median(abs(ratio - 1) for ratio in ratios)
    counted, latency, each_gpu = degrees(rows)
    text = HEAD + "\n".join(lines)
    text += f"\n\n{len(ratios)} of {len(rows)} rows are priced (weights of four bits are not): {off:.1%} off in the"
    text += (
        f" median.\n\nOf {counted} groups that differ in the tensor degree alone, the degree with the least time per"
    )
    text += f" token that we choose is the measured best, or within {SAME:.0%} of it, in {latency / counted:.0%};"
    text += f" the one with most tokens for each GPU in {each_gpu / counted:.0%}."
    text += f" The largest degree has the least measured time in {largest_is_best(rows):.0%}.\n\n"
    text += "Llama-3.3-70B in bf16 on v6e-8, tensor degree 8, 1000 tokens in and out, vLLM:\n\n"
    text += "| concurrency | measured, ms | priced, ms | ratio |\n| --- | --- | --- | --- |\n"
    TABLE.write_text(text + "\n".join(tpu_lines(json.loads(tpu.read_text()))) + "\n")
    print(TABLE.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
