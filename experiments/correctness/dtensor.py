"""Modules of transformers under a plan as DTensors, compared with the same modules on one process: a table.

`python experiments/correctness/dtensor.py` plans every family for training and for inference, and runs it on eight
processes over gloo. Rows are saved in `results/dtensor.json`; the table is `results/dtensor.md`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from experiments.lib.harness import ROOT, Experiment, grid, page


MESH = {"data": 2, "model": 4}
ALLOWED = 1e-4
"""Largest difference of a loss, an output, a gradient or an update, relative to the largest value of the tensor."""

_WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
_WORDS = {"vocab_size": 256, "max_position_embeddings": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4}
    | _WIDTHS
    | _WORDS,
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 8}
    | {"vocab_size": 256, "n_positions": 128},
    "mixtral": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 4}
    | {"num_local_experts": 4}
    | _WIDTHS
    | _WORDS,
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_ff": 128, "d_kv": 8}
    | {"num_layers": 2, "num_heads": 8, "vocab_size": 256, "decoder_start_token_id": 0},
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"]} | _WIDTHS | _WORDS,
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, "patch_size": 8}
    | {"id2label": {str(number): str(number) for number in range(16)}}
    | _WIDTHS,
}
CALLS = {
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
}
"""Name in a plan of each collective of torch."""


def plan_row(family: str, train: bool, folder: Path) -> dict[str, Any]:
    """Plan a family's configuration, save the plan, and return its path with the predicted collectives."""
    import autoshard

    config = folder / f"{family}.json"
    config.write_text(json.dumps(FAMILIES[family]))
    options = {"train": train, "batch": 8, "dtype": "float32"} | ({} if family == "vit" else {"seq": 64})
    # Inference pins its parameters to the specs of training: otherwise so small a model would replicate them.
    pinned: dict[str, Any] = {} if train else {"pin_from": folder / f"{family}-True.json"}
    plan = autoshard.plan(f"hf:{config}", topology="cpu:8", mesh=MESH, program_options=options, **pinned)
    path = folder / f"{family}-{train}.json"
    plan.save(path)
    planned = Counter[str]()
    wire_bytes = 0
    for each in plan.prediction.collectives:
        planned[each.kind] += each.count
        wire_bytes += each.wire_bytes
    words = "; ".join(plan.words)
    known = {"fields": FAMILIES[family], "plan": str(path), "train": train, "words": words}
    return known | {"planned": dict(planned), "planned_bytes": wire_bytes}


def run_rows(rows: list[dict[str, Any]], folder: Path, timeout_s: float = 600.0) -> list[dict[str, Any]]:
    """Return the result of each row.

    Raises `RuntimeError` with the processes' output if one of them failed.
    """
    file = folder / "rows.json"
    file.write_text(json.dumps(rows))
    process = subprocess.run(
        [sys.executable, "-m", "experiments.lib.dtensor_run", str(file)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
    )
    records = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    if len(records) < len(rows) or any("error" in each for each in records):
        raise RuntimeError(f"{[each.get('error') for each in records]}\n{process.stderr[-3000:]}")
    return records


def work(name: str) -> dict[str, Any]:
    """Compute one row of the table."""
    family, step = name.split()
    with tempfile.TemporaryDirectory() as made:
        # Inference needs the plan of training, of which it takes the specs of its parameters.
        trained = plan_row(family, True, Path(made))
        row = trained if step == "training" else plan_row(family, False, Path(made))
        (ran,) = run_rows([row], Path(made))
    planned = {key: row[key] for key in ("words", "planned", "planned_bytes")}
    return planned | {key: value for key, value in ran.items() if not key.endswith("_s")}


def table(rows: dict[str, Any]) -> str:
    lines, notes = [], []
    for name, row in rows.items():
        family, step = name.split()
        worst = row.get("loss", row.get("output"))
        further = [f"{row[key]:.1e}" if key in row else "" for key in ("gradients", "updates")]
        calls = ", ".join(f"{n} {CALLS.get(kind, kind)}" for kind, n in sorted(row["calls"].items()))
        planned = ", ".join(f"{n} {kind}" for kind, n in sorted(row["planned"].items()))
        shares = [f"{row[key]:.0%}" for key in ("split_share", "held_share")]
        sent = [f"{row[key] / 1024:.0f} KiB" for key in ("wire_bytes", "planned_bytes")]
        lines.append([family, step, row["words"], f"{worst:.1e}", *further, *shares, calls, planned, *sent])
        notes += [f"- {family}, {step}: {note}" for note in row["notes"]]
    return page(
        "# Modules under a plan, as DTensors",
        f"""
`python experiments/correctness/dtensor.py`: eight processes over gloo, mesh {MESH}, float32. Differences \
are the
largest of any value, relative to the largest of its tensor; updates are those of one AdamW step, where the
gradient is not next to nothing. *Split* is the share of parameters that are split, *held* what one process
holds of all; inference has its parameters as the plan for training does. Calls are those of one step after
the first, with the optimizer's, beside the plan's predicted collectives, and *sent* is what one process puts
on the wire for them beside what is predicted of a device. Values between layers are placed as planned; the
backward pass is DTensor's own, so kinds and counts need not agree.
""",
        grid(
            "family | step | plan | loss or output: | gradients: | updates: | split: | held: | calls | planned | sent: "
            "| planned:",
            lines,
        ),
        ["Run whole on every device:", "", *notes] if notes else "",
    )


def main() -> int:
    names = sorted(f"{family} {step}" for family in FAMILIES for step in ("training", "inference"))
    return Experiment(script=__file__, names=names, work=work, table=table).run()


if __name__ == "__main__":
    sys.exit(main())
