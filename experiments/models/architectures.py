"""Well-known checkpoints of 36 architectures at their real sizes: is a training step planned, and a step of decoding?

    python experiments/models/architectures.py [ROW ...] [--again] [--refused] [--table]

Transformers' own class makes each configuration (sizes in `data/architectures.json`). `autoshard plan hf:CONFIG --train
--remat full` plans it on v5p:4x4x4 with a searched mesh, in a process of its own with a time limit. Decoders are
planned again with `--serve decode`.

Rows are saved in results/architectures.json. A run computes the missing rows, `--refused` the refused rows too, and
`--again` all named rows. `--table` only writes the table, results/architectures.md.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.lib.saved_results import Results, checked_out  # noqa: E402
from experiments.quality.plan_vs_baselines import run  # noqa: E402


HERE = Path(__file__).parents[1]
SIZES = HERE / "data" / "architectures.json"
DATA, TABLE = HERE / "results" / "architectures.json", HERE / "results" / "architectures.md"
TOPOLOGY = "v5p:4x4x4"
LIMIT_S = 600.0
"""Processor seconds for one plan."""
GIB = 2.0**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="checkpoints (default: all)")
    parser.add_argument("--again", action="store_true", help="also what is in the table")
    parser.add_argument("--refused", action="store_true", help="also what was refused")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--mode", choices=("train", "decode"), help="only this step (default: both)")
    asked = parser.parse_args()
    sizes: dict[str, Any] = json.loads(SIZES.read_text())
    if unknown := [name for name in asked.rows if name not in sizes]:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(sizes)}")
    results = Results(DATA)
    for name in () if asked.table else asked.rows or sizes:
        for mode in modes_of(sizes[name]):
            if asked.mode not in (None, mode):
                continue
            known = results.rows.get(name, {}).get(mode)
            if known is not None and not asked.again and not (asked.refused and "error" in known):
                continue
            figures = planned(name, sizes[name], mode)
            results = Results(DATA)  # another run may have written rows since
            results.keep(name, results.rows.get(name, {}) | {mode: figures})
            print(name, mode, figures, file=sys.stderr, flush=True)
            TABLE.write_text(table(sizes, results.rows))
    TABLE.write_text(table(sizes, results.rows))


def modes_of(size: dict[str, Any]) -> tuple[str, ...]:
    return ("train", "decode") if size.get("decoder") else ("train",)


def planned(name: str, size: dict[str, Any], mode: str) -> dict[str, Any]:
    """Plan one checkpoint, and return the plan's figures with the time and memory of planning."""
    with tempfile.TemporaryDirectory() as folder:
        config, plan = Path(folder) / f"{name}.json", Path(folder) / "plan.json"
        config.write_text(json.dumps(configuration(size)))
        options = ["--train", "--remat", "full"] if mode == "train" else ["--serve", "decode"]
        for flag in ("batch", "seq", "image"):
            options += [f"--{flag}", str(size[flag])] if flag in size else []
        options += ["--topology", TOPOLOGY, "--no-cache", "--out", str(plan)]
        answer = run(f"hf:{config}", options, LIMIT_S)
        row = {"cpu_s": round(answer["cpu"], 1), "wall_s": round(answer["wall"], 1), "planner_bytes": answer["pss"]}
        row["code"] = checked_out()
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


def table(sizes: dict[str, Any], rows: dict[str, Any]) -> str:
    known = {name: rows[name] for name in sizes if name in rows}
    counts = []
    for mode, what in (("train", "a training step"), ("decode", "a step of decoding")):
        tried = [row[mode] for row in known.values() if mode in row]
        counts.append(f"{what} is planned for {sum('error' not in row for row in tried)} of {len(tried)}")
    lines = [
        "# Well-known checkpoints at their real sizes",
        "",
        f"`python experiments/models/architectures.py`: `hf:CONFIG` on {TOPOLOGY}, the mesh searched for; training",
        "with",
        "`--remat full` and attention as transformers writes it (scores in memory), decoding one token for every",
        "sequence after a cache of `seq` tokens. `CPU s` and `GB` (pages that processes share counted once) are what",
        "planning took, nothing cached, on two cores that others used too.",
        "",
        f"Of those tried, {' and '.join(counts)}.",
        "",
        "| checkpoint | model type | parameters | batch x seq | step ms | GiB | MFU | mesh | CPU s | wall s | GB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [line(name, sizes[name], row["train"]) for name, row in known.items() if "train" in row]
    lines += [
        "",
        "Decoding with a cache:",
        "",
        "| checkpoint | model type | parameters | batch x seq | step ms | GiB | MFU | mesh | CPU s | wall s | GB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [line(name, sizes[name], row["decode"]) for name, row in known.items() if "decode" in row]
    return "\n".join(lines) + "\n"


def line(name: str, size: dict[str, Any], row: dict[str, Any]) -> str:
    shape = " x ".join(str(size[key]) for key in ("batch", "seq", "image") if key in size)
    took = [f"{row['cpu_s']:.0f}", f"{row['wall_s']:.0f}", f"{row['planner_bytes'] / 1e9:.1f}"]
    cells = [name, f"`{size['model_type']}`"]
    if "error" in row:
        said = row["error"].replace("|", "\\|").replace("<", "&lt;")
        return f"| {' | '.join([*cells, '-', shape, said, '-', '-', '-', *took])} |"
    cells += [f"{row['parameters'] / 1e9:.2f}B", shape, f"{row['step_time_s'] * 1e3:.4g}"]
    cells += [f"{row['peak_bytes'] / GIB:.1f}", f"{row['mfu']:.1%}"]
    cells.append(row["mesh"])
    return f"| {' | '.join([*cells, *took])} |"


if __name__ == "__main__":
    main()
