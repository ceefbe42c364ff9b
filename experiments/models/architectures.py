"""Well-known checkpoints of 36 architectures at their real sizes: is a training step planned, and a step of decoding?

    python experiments/models/architectures.py [--only TEXT ...] [--again] [--refused] [--table]

Transformers' own class makes each configuration (sizes in `data/architectures.json`). `autoshard plan hf:CONFIG --train
--remat full` plans it on v5p:4x4x4 with a searched mesh, in a process of its own with a time limit. Decoders are
planned again with `--serve decode`.

Rows are saved in results/architectures.json. A run computes the missing rows, `--refused` the refused rows too.
"""

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.lib.harness import ROOT, Experiment, grid, own_parser, page
from experiments.lib.plan_command import run


SIZES: dict[str, Any] = json.loads((ROOT / "experiments" / "data" / "architectures.json").read_text())
ROWS = {
    f"{name} {mode}": (name, mode)
    for name, size in SIZES.items()
    for mode in ("train", *(["decode"] if size.get("decoder") else []))
}
TOPOLOGY = "v5p:4x4x4"
LIMIT_S = 600.0
"""Processor seconds for one plan."""
GIB = 2.0**30


def planned(row_name: str) -> dict[str, Any]:
    """Plan one checkpoint, and return the plan's figures with the time and memory of planning."""
    name, mode = ROWS[row_name]
    size = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        config, plan = Path(folder) / f"{name}.json", Path(folder) / "plan.json"
        config.write_text(json.dumps(configuration(size)))
        options = ["--train", "--remat", "full"] if mode == "train" else ["--serve", "decode"]
        for flag in ("batch", "seq", "image"):
            options += [f"--{flag}", str(size[flag])] if flag in size else []
        options += ["--topology", TOPOLOGY, "--no-cache", "--out", str(plan)]
        answer = run(f"hf:{config}", options, LIMIT_S)
        row = {"cpu_s": round(answer["cpu"], 1), "wall_s": round(answer["wall"], 1), "planner_bytes": answer["pss"]}
        if "error" in answer:
            return row | {"error": answer["error"].replace(str(config), name)}
        return row | {
            "parameters": parameters_of(plan),
            "mesh": ", ".join(f"{axis}={count}" for axis, count in answer["mesh"].items()),
            **{key: answer[key] for key in ("step_time_s", "peak_bytes", "mfu", "plan_gap")},
        }


def configuration(size: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the configuration file, as transformers writes them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[size["model_type"]](**size["fields"])
    return json.loads(config.to_json_string(use_diff=False)) | {"model_type": size["model_type"]}


def parameters_of(plan: Path) -> int:
    arguments = json.loads(plan.read_text())["arguments"]
    return sum(math.prod(each["shape"]) for each in arguments if each["role"] == "parameter")


def table(rows: dict[str, Any]) -> str:
    lines: dict[str, list[list[str]]] = {"train": [], "decode": []}
    counts = []
    for row_name, row in rows.items():
        name, mode = ROWS[row_name]
        lines[mode].append(line(name, SIZES[name], row))
    for mode, what in (("train", "a training step"), ("decode", "a step of decoding")):
        tried = [row for name, row in rows.items() if ROWS[name][1] == mode]
        counts.append(f"{what} is planned for {sum('error' not in row for row in tried)} of {len(tried)}")
    heads = "checkpoint | model type | parameters | batch x seq | step ms | GiB | MFU | mesh | CPU s | wall s | GB"
    return page(
        "# Well-known checkpoints at their real sizes",
        f"""
`python experiments/models/architectures.py`: `hf:CONFIG` on {TOPOLOGY}, the mesh searched for; training with
`--remat full` and attention as transformers writes it (scores in memory), decoding one token for every
sequence after a cache of `seq` tokens. `CPU s` and `GB` (pages that processes share counted once) are what
planning took, nothing cached, on two cores that others used too.
""",
        f"Of those tried, {' and '.join(counts)}.",
        grid(heads, lines["train"]),
        "Decoding with a cache:",
        grid(heads, lines["decode"]),
    )


def line(name: str, size: dict[str, Any], row: dict[str, Any]) -> list[str]:
    shape = " x ".join(str(size[key]) for key in ("batch", "seq", "image") if key in size)
    took = [f"{row['cpu_s']:.0f}", f"{row['wall_s']:.0f}", f"{row['planner_bytes'] / 1e9:.1f}"]
    cells = [name, f"`{size['model_type']}`"]
    if "error" in row:
        return [*cells, "-", shape, row["error"].replace("|", "\\|").replace("<", "&lt;"), "-", "-", "-", *took]
    cells += [f"{row['parameters'] / 1e9:.2f}B", shape, f"{row['step_time_s'] * 1e3:.4g}"]
    return [*cells, f"{row['peak_bytes'] / GIB:.1f}", f"{row['mfu']:.1%}", row["mesh"], *took]


def main() -> int:
    parser = own_parser()
    parser.add_argument("--refused", action="store_true", help="also what was refused")
    given = parser.parse_args()
    return Experiment(
        script=__file__,
        names=ROWS,
        work=planned,
        table=table,
        is_open=lambda row: given.refused and "error" in row,
    ).run(given)


if __name__ == "__main__":
    sys.exit(main())
