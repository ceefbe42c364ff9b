"""Model types of transformers that no code here knows by name, small, planned and run on 8 CPU devices.

    python experiments/models/equality_types.py [--only TEXT ...] [--again] [--table]

A training step of each type is planned with `data=4,model=2`, and compared with the unplanned step of the same values.
The comparison covers loss, momentum (which equals the gradients after one step) and updated parameters, relative to
each tensor's own maximum. Rows are saved in `experiments/results/equality_types.json`, so that a broken run resumes.
Each row has its own process with a time limit.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.lib.harness import Experiment, grid, page
from experiments.lib.programs.tiny_configs import tiny
from experiments.models.families import is_rounding, row_of


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
ROWS = {each: kind for kind, types in KINDS.items() for each in types}


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
                return {"error": str(error).replace(str(path), name)}
            program = open_source(f"hf:{path}", **options)
    return row_of(program, MESH) | {"class": program.name}


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines, equal, rounding = [], 0, 0
    for each, row in rows.items():
        said = REASONS.get(each, "")
        if "max_rel_diff" not in row:
            lines.append([ROWS[each], f"`{each}`", "-", f"{row['error']}. {said}"])
            continue
        equal += row["equal"]
        rounding += is_rounding(row)
        remark = "" if row["equal"] else f"`{row['worst']}`; rounding {row['rounding']:.1e}. {said}"
        lines.append([ROWS[each], f"`{each}`", f"{row['max_rel_diff']:.1e}", remark])
    worst = max((row["max_rel_diff"] for row in rows.values() if row.get("equal")), default=0.0)
    return page(
        "# Model types of transformers on 8 CPU devices, planned against unplanned",
        """
`python experiments/models/equality_types.py`. One training step of a small form of each, mesh `data=4,model=2`,
what the planner chooses. The difference is the largest of any result (loss, momentum, which holds the
gradients, and parameters), of its tensor's own maximum. Rounding: what the unplanned step differs by with
its examples in another order.
""",
        grid("kind | model type | difference | remark", lines),
        f"{len(rows)} of {len(ROWS)} rows: {equal} equal (the worst {worst:.1e}), {rounding} that differ by no more "
        "than rounding does.",
    )


def main() -> int:
    return Experiment(script=__file__, names=ROWS, work=work, table=table, apart=True, limit_s=LIMIT_S).run()


if __name__ == "__main__":
    sys.exit(main())
