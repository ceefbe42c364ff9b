"""Model types of transformers that no code here knows by name, small, planned and run on 8 CPU devices.

    python experiments/models/equality_types.py [--only TEXT] [--again] [--table]

A training step of each type is planned with `data=4,model=2`, and compared with the unplanned step of the same values.
The comparison covers loss, momentum (which equals the gradients after one step) and updated parameters, relative to
each tensor's own maximum. Rows are saved in `experiments/results/equality_types.json`, so that a broken run resumes.
Each row has its own process with a time limit.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.lib.programs.tiny_configs import tiny  # noqa: E402
from experiments.lib.saved_results import Results, checked_out  # noqa: E402
from experiments.models.families import is_rounding, row_of  # noqa: E402


HERE = Path(__file__).parents[1]
RESULTS = HERE / "results" / "equality_types.json"
TABLE = HERE / "results" / "equality_types.md"

DEVICES, BATCH, SEQ, LIMIT_S = 8, 8, 32, 420
MESH = {"data": 4, "model": 2}
KINDS = {
    "text": ("roformer", "ministral", "xlm", "deberta-v2"),
    "experts": ("qwen3_moe", "gpt_oss", "hunyuan_v1_moe", "axk1", "hy_v4"),
    "state-space": ("mamba", "falcon_mamba", "mamba2"),
    "hybrid": ("qwen3_next", "jamba"),
    "two towers": ("clip", "siglip"),
    "vision": ("segformer", "rt_detr_v2", "dinov2"),
    "vision and language": ("llava", "qwen2_vl", "idefics2", "mllama", "kosmos-2", "aria", "cohere_compass"),
    "sound": ("wav2vec2", "voxtral", "audioflamingo3"),
    "encoder and decoder": ("musicgen", "t5gemma", "instructblipvideo"),
    "action": ("pi0",),
}
REASONS = {
    "hy_v4": "The gradient of its one scale is 6e-7, a sum that nearly cancels of terms a hundred times as large, and "
    "off by 1.5e-10.",
    "rt_detr_v2": "Planned after 35 s of the processor; XLA's compiler for CPUs was not done with the planned step "
    "after ten minutes of it.",
    "t5gemma": "Cross attention is nearly uniform at the initial values: this gradient is 4e-5 of the largest one, and "
    "the difference under 2e-9 of that one, below what fp32 resolves.",
}
"""Examined reason of a model type's difference, by model type."""
ROWS = [(kind, each) for kind, types in KINDS.items() for each in types]


def work(name: str) -> dict[str, Any]:
    """Compute one row of the table."""
    from autoshard import UserError
    from autoshard.exec import ensure_devices
    from autoshard.program import open_source

    ensure_devices(DEVICES)
    options: dict[str, Any] = {"train": True, "batch": BATCH, "dtype": "float32", "optimizer": "momentum"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.json"
        path.write_text(json.dumps(tiny(name, 0), default=str))
        try:
            program = open_source(f"hf:{path}", seq=SEQ, **options)
        except UserError as error:
            if "--seq " not in str(error):
                return {"error": str(error).replace(str(path), name), "code": checked_out()}
            program = open_source(f"hf:{path}", **options)
    return row_of(program, MESH) | {"class": program.name, "code": checked_out()}


def table(rows: dict[str, dict[str, Any]]) -> str:
    known = [(kind, each, rows[each]) for kind, each in ROWS if each in rows]
    lines = [
        "# Model types of transformers on 8 CPU devices, planned against unplanned",
        "",
        "`python experiments/models/equality_types.py`. One training step of a small form of each, mesh",
        "`data=4,model=2`,",
        "what the planner chooses. The difference is the largest of any result (loss, momentum, which holds the",
        "gradients, and parameters), of its tensor's own maximum. Rounding: what the unplanned step differs by with",
        "its examples in another order.",
        "",
        "| kind | model type | difference | remark |",
        "| --- | --- | --- | --- |",
    ]
    equal = rounding = 0
    for kind, each, row in known:
        if "max_rel_diff" not in row:
            lines.append(f"| {kind} | `{each}` | - | {row['error']}. {REASONS.get(each, '')} |")
            continue
        equal += row["equal"]
        rounding += is_rounding(row)
        remark = "" if row["equal"] else f"`{row['worst']}`; rounding {row['rounding']:.1e}. {REASONS.get(each, '')}"
        lines.append(f"| {kind} | `{each}` | {row['max_rel_diff']:.1e} | {remark} |")
    worst = max((row["max_rel_diff"] for _, _, row in known if row.get("equal")), default=0.0)
    lines += [
        "",
        f"{len(known)} of {len(ROWS)} rows: {equal} equal (the worst {worst:.1e}), {rounding} that differ by no more "
        "than rounding does.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="types whose name contains it; several, with commas, in that order"
    )
    parser.add_argument("--again", action="store_true", help="also rows that are there")
    parser.add_argument("--table", action="store_true", help="only write the table of what is known")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        print(json.dumps(work(asked.worker)))
        return
    results = Results(RESULTS)
    named = [each for text in asked.only.split(",") for _, each in ROWS if text in each]
    for each in () if asked.table else dict.fromkeys(named):
        if each in results.rows and not asked.again:
            continue
        command = [sys.executable, __file__, "--worker", each]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            busy = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
            error = f"not run within {LIMIT_S} s ({busy:.0f} s of processor time)"
            results.keep(each, {"error": error, "code": checked_out()})
        else:
            if done.returncode:
                print(f"{each}: FAILED {done.stderr[-800:]}", flush=True)
                continue
            results.keep(each, json.loads(done.stdout.splitlines()[-1]))
        print(each, {k: results.rows[each].get(k) for k in ("max_rel_diff", "worst", "error")}, flush=True)
        TABLE.write_text(table(results.rows))
    TABLE.write_text(table(results.rows))


if __name__ == "__main__":
    main()
