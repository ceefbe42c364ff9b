"""Published TPU training runs, rebuilt, planned as they were run, compiled and timed from the compiler's schedule.

    python experiments/compile_fidelity.py [ROW ...] [--time-limit S] [--out experiments/results/compile_fidelity.json]

Every row is one run whose model, batch and sharding are published (see `source`). The plan is the baseline of that
name, completed by the planner, or our own (`ours`), whose step is then not the published one (`as_published` false);
nothing is fitted to these rows. Columns: peak memory and bytes on the wire predicted
against compiled, step time published against predicted and estimated.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")


@dataclasses.dataclass(frozen=True)
class Row:
    """One published run."""

    name: str
    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    sequences: int
    topology: str
    mesh: dict[str, int]
    baseline: str
    remat: str
    tflops: float
    """Published model TFLOP/s of one chip, attention counted without causality."""
    source: str
    head_dim: int = 128

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": self.dim,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.seq,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "attention_bias": False,
            "tie_word_embeddings": False,
        }

    @property
    def flops(self) -> float:
        """Model FLOPs of one step as the source counts them."""
        attention = self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        weights = self.layers * (attention + 3 * self.dim * self.ffn) + self.dim * self.vocab
        tokens = self.sequences * self.seq
        return tokens * (6.0 * weights + 12.0 * self.layers * self.heads * self.head_dim * self.seq)


_MAXTEXT = "AI-Hypercomputer/maxtext@e591f30c:src/maxtext/configs/tpu"
_V4, _V5E, _V5P = f"{_MAXTEXT}/v4", f"{_MAXTEXT}/v5e", f"{_MAXTEXT}/v5p"
_V6E = "AI-Hypercomputer/tpu-recipes@c8cfe2f6:training/trillium"
_TWO, _TWO_64 = {"slice": 2, "data": 256}, {"slice": 2, "data": 64}
_16_8, _64_8 = {"data": 16, "model": 8}, {"data": 64, "model": 8}

ROWS = (
    Row("16b-v5e", 32, 4096, 28672, 64, 64, 32000, 2048, 1536, "v5e:16x16", {"data": 256}, "fsdp", "full", 120, _V5E),
    Row("64b-v5e", 64, 8192, 28672, 64, 64, 32000, 2048, 512, "v5e:16x16", {"data": 256}, "fsdp", "full", 118, _V5E),
    Row("32b-v5e*2", 32, 8192, 28672, 64, 64, 32000, 2048, 2048, "v5e:16x16*2", _TWO, "ours", "full", 128, _V5E),
    Row("128b-v5p", 64, 8192, 57344, 128, 128, 32000, 2048, 128, "v5p:4x4x8", _16_8, "fsdp_tp", "dots", 315, _V5P),
    Row("256b-v5p", 64, 16384, 57344, 128, 128, 32000, 2048, 512, "v5p:8x8x8", _64_8, "fsdp_tp", "dots", 308, _V5P),
    # Ungated in the source: two matrices of 49152 are three of 32768.
    Row(
        "175b-v6e", 96, 12288, 32768, 96, 96, 50304, 2048, 768, "v6e:16x16", {"data": 256}, "fsdp", "full", 384.9, _V6E
    ),
    # Ungated too: two matrices of 24576 are three of 16384; 16 sequences of 1024 tokens a chip.
    Row("22b-v4*2", 48, 6144, 16384, 24, 24, 32768, 1024, 2048, "v4:4x4x4*2", _TWO_64, "ours", "full", 152, _V4, 256),
)
"""Runs with a sequence short enough that attention needs no fused kernel."""


def run(row: Row, time_limit: float) -> dict[str, Any]:
    """Plan, compile and compare one row."""
    from autoshard.cost import Topology
    from autoshard.exec import compile_plan
    from autoshard.plan import make_plan
    from autoshard.program import open_source

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{row.name}.json"
        path.write_text(json.dumps(row.config))
        program = open_source(f"hf:{path}", train=True, batch=row.sequences, seq=row.seq, remat=row.remat)
    began = time.monotonic()
    made = make_plan(program, topology=row.topology, mesh=row.mesh)
    plan_s = time.monotonic() - began
    plan = made.baseline_plans.get(row.baseline) or made.plan
    chips = Topology.parse(row.topology).num_chips
    published = row.flops / (chips * row.tflops * 1e12)
    report = compile_plan(program, plan, time_limit)
    estimated = report.estimate.step_time_s if report.estimate else None
    return {
        "row": row.name,
        "plan": row.baseline if row.baseline in made.baseline_plans else "ours",
        "as_published": row.baseline in made.baseline_plans,
        "known_baselines": sorted(made.baseline_plans),
        "topology": row.topology,
        "verdict": report.verdict.value,
        "peak_bytes": {"predicted": report.peak_predicted, "compiled": report.peak_compiled},
        "wire_bytes": {
            axis: {"predicted": report.wire_predicted.get(axis, 0), "compiled": report.wire_compiled.get(axis, 0)}
            for axis in sorted({*report.wire_predicted, *report.wire_compiled})
        },
        "step_time_s": {
            "published": published,
            "predicted": plan.prediction.step_time_s,
            "estimated": estimated,
            "error": estimated / published - 1 if estimated else None,
        },
        "time": dataclasses.asdict(report.estimate) if report.estimate else None,
        "model_flops_ratio": report.model_flops_ratio,
        "unforeseen": [dataclasses.asdict(u) for u in report.unforeseen],
        "plan_s": plan_s,
        "compile_s": report.compile_s,
        "source": row.source,
    }


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        f"{'row':<11} {'plan':<9} {'verdict':<9} {'peak GiB pred/comp':>19} {'wire pred/comp':>15} "
        f"{'published s':>12} {'predicted':>10} {'estimated':>10} {'error':>7}"
    ]
    for result in results:
        times, peak = result["step_time_s"], result["peak_bytes"]
        wire = [sum(axis[key] for axis in result["wire_bytes"].values()) for key in ("predicted", "compiled")]
        ratio = f"{wire[0] / wire[1]:.2f}" if wire[1] else "-"
        estimated = f"{times['estimated']:.2f}" if times["estimated"] else "-"
        error = f"{times['error']:+.0%}" if times["error"] is not None else "-"
        lines.append(
            f"{result['row']:<11} {result['plan']:<9} {result['verdict'][:9]:<9} "
            f"{peak['predicted'] / 2**30:>9.1f} {(peak['compiled'] or 0) / 2**30:>9.1f} {ratio:>15} "
            f"{times['published']:>12.2f} {times['predicted']:>10.2f} {estimated:>10} {error:>7}"
        )
    return "\n".join(lines)


def main() -> int:
    from autoshard import UserError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"rows to run (default: all): {', '.join(r.name for r in ROWS)}")
    parser.add_argument("--time-limit", type=float, default=900.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "compile_fidelity.json")
    arguments = parser.parse_args()
    args_rows = arguments.rows or [row.name for row in ROWS]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    results = {result["row"]: result for result in known}
    for row in ROWS:
        if row.name in args_rows:
            try:
                results[row.name] = run(row, arguments.time_limit)
            except UserError as error:
                print(f"{row.name}: {error}", flush=True)
                continue
            scratch = arguments.out.with_suffix(".part")
            scratch.write_text(json.dumps(list(results.values()), indent=1) + "\n")
            os.replace(scratch, arguments.out)
            print(table([results[row.name]]), flush=True)
    print(table(list(results.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
