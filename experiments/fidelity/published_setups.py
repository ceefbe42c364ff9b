"""Five published training setups planned through `hf:` as a user would, beside the step times that were published.

    python experiments/fidelity/published_setups.py [ROW ...] [--again] [--table]

Model, chips, batch, sequence and compiler flags are the run's; mesh, sharding, attention and remat are chosen
(`--remat auto --attention auto`), and beside that are as the run had them, where its source says: FSDP over all chips,
the splash kernel, and the same values sent to the hosts. Nothing is fitted to these rows. Results are kept in
`results/published_setups.json`; a run does what is missing.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from experiments.lib.saved_results import Results, checked_out
from experiments.quality.plan_vs_baselines import run


HERE = Path(__file__).parents[1]
DATA, TABLE = (HERE / "results" / f"published_setups.{end}" for end in ("json", "md"))
LIMIT_S = 600.0
"""Seconds of processor for one plan."""
GIB = 2.0**30

GATHERS = (
    "--xla_tpu_enable_async_collective_fusion=true --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true "
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true "
    "--xla_enable_async_all_gather=true"
)
COPIES = "--xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true"
SPARSECORE = (
    "--xla_sc_disable_megacore_partitioning=true --xla_tpu_enable_all_reduce_offload_tracing=true "
    "--xla_tpu_use_tc_device_shape_on_sc=true --xla_tpu_enable_sparse_core_collective_offload_all_reduce=true "
    "--xla_sc_enable_instruction_fusion=false --xla_sc_disjoint_spmem=false"
)
DENSE, SPARSE = (f"--xla_tpu_scoped_vmem_limit_kib={size}" for size in (98304, 81920))
PROJECTIONS = "q_proj/k_proj/v_proj"
RECIPES = "AI-Hypercomputer/tpu-recipes: training"
ROWS: dict[str, dict[str, Any]] = {
    # flags of layouts and of host transfers are left out, as in published.json
    "llama3.1-8b v6e-256": {
        "config": "llama3.1-8b", "topology": "v6e:16x16", "chips": 256, "batch": 4, "seq": 8192,
        "flags": f"{DENSE} {COPIES} {GATHERS} {SPARSECORE}", "published_s": 4.546,
        "mesh": "data=256", "remat": f"full,offload=input/{PROJECTIONS}/o_proj",
        "source": f"{RECIPES}/trillium/Llama3.1-8B-MaxText/v6e-256",
    },
    "llama3.1-70b v6e-256": {
        "config": "llama3.1-70b", "topology": "v6e:16x16", "chips": 256, "batch": 5, "seq": 8192,
        "flags": f"{DENSE} {COPIES} {GATHERS}", "published_s": 42.656,
        "mesh": "data=256", "remat": f"full,offload=input/{PROJECTIONS}",
        "source": f"{RECIPES}/trillium/Llama3.1-70B-MaxText/v6e-256",
    },
    "llama3.1-405b 2 x v6e-256": {
        "config": "llama3.1-405b", "topology": "v6e:16x16*2", "chips": 512, "batch": 1, "seq": 8192,
        "flags": f"{DENSE} {GATHERS}", "published_s": 54.803,
        "mesh": "data=512", "remat": "full,offload=input",
        "source": f"{RECIPES}/trillium/Llama3.1-405B-MaxText",
    },
    "llama3.1-405b v5p-512": {
        "config": "llama3.1-405b", "topology": "v5p:8x8x8", "chips": 512, "batch": 2, "seq": 8192,
        "flags": "", "published_s": 131.474,  # neither its flags nor what it recomputes are in its source
        "mesh": "data=512", "remat": "full",
        "source": f"{RECIPES}/v5p/Llama3.1-405B-MaxText",
    },
    "mixtral-8x7b v6e-256": {
        "config": "mixtral-8x7b", "topology": "v6e:16x16", "chips": 256, "batch": 12, "seq": 4096,
        "flags": f"{SPARSE} {GATHERS} {COPIES}", "published_s": 13.484,
        "mesh": "data=256", "remat": f"full,offload=input/{PROJECTIONS}/o_proj",
        "source": f"{RECIPES}/trillium/Mixtral-8x7B-MaxText (capacity 1.25)",
    },
}  # fmt: skip
WAYS = ("chosen", "stated")


def planned(row: dict[str, Any], way: str) -> dict[str, Any]:
    """What `autoshard plan` predicts of a setup, with mesh and recipe chosen or as they are stated."""
    options = ["--train", "--batch", str(row["batch"] * row["chips"]), "--seq", str(row["seq"])]
    options += ["--topology", row["topology"]]
    if way == "stated":
        options += ["--mesh", row["mesh"], "--remat", row["remat"], "--attention", "splash"]
    else:
        options += ["--remat", "auto", "--attention", "auto"]
    options += ["--xla-flags", row["flags"]] if row["flags"] else []
    found = run(f"hf:{row['config']}", [*options, "--no-cache"], LIMIT_S)
    kept = {"cpu_s": found["cpu"], "wall_s": found["wall"], "planner_bytes": found["pss"], "code": checked_out()}
    if "error" in found:
        return kept | {"error": found["error"]}
    kept["mesh"] = ", ".join(f"{axis}={n}" for axis, n in found["mesh"].items())
    kept |= {key: found[key] for key in ("step_time_s", "compute_s", "exposed_comm_s", "peak_bytes", "mfu")}
    return kept | {"recipe": (found["recipe"] or {}).get("chosen")}


def table(rows: dict[str, Any]) -> str:
    lines = [
        "# Published setups, planned through `hf:`",
        "",
        "`python experiments/fidelity/published_setups.py`: what `autoshard plan hf:CONFIG` predicts for a published",
        "run's",
        "model, chips, batch, sequence and compiler flags. `chosen`: mesh, sharding, attention and remat are the",
        "planner's, so that it may be faster than the run by being a better plan; `stated`: FSDP over all chips, the",
        "splash kernel and the values sent to the hosts as the run had them (of the 405B on v5p neither flags nor",
        "remat are known: none, and `full`). Nothing was fitted to these rows. Weights and state are in fp32, AdamW,",
        "as in the runs. `code` is the commit that a row was planned with.",
        "",
        "| setup | way | published s | predicted s | error | waits s | GiB | mesh | recipe | CPU s | wall s | GB "
        "| code |",
        "| --- " * 13 + "|",
    ]
    for name, row in ROWS.items():
        for way in (way for way in WAYS if way in rows.get(name, {})):
            found = rows[name][way]
            took = [f"{found['cpu_s']:.0f}", f"{found['wall_s']:.0f}", f"{found['planner_bytes'] / 1e9:.1f}"]
            took.append(found["code"])
            cells = [name, way, f"{row['published_s']:.4g}"]
            if "error" in found:
                cells += [found["error"], *"-----"]
            else:
                cells += [f"{found['step_time_s']:.4g}", f"{found['step_time_s'] / row['published_s'] - 1:+.1%}"]
                cells += [f"{found['exposed_comm_s']:.3g}", f"{found['peak_bytes'] / GIB:.1f}"]
                stated = {"remat": row["remat"], "attention": "splash"}
                recipe = stated if way == "stated" else found["recipe"] or {}
                cells += [found["mesh"], ", ".join(f"{key} {value}" for key, value in recipe.items()) or "not kept"]
            lines.append(f"| {' | '.join([*cells, *took])} |")
    lines += ["", "Sources:", "", *(f"- {name}: {row['source']}" for name, row in ROWS.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default: all; {', '.join(ROWS)}")
    parser.add_argument("--again", action="store_true", help="plan rows that are in the table too")
    parser.add_argument("--table", action="store_true", help="only write the table")
    asked = parser.parse_args()
    if unknown := [name for name in asked.rows if name not in ROWS]:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    results = Results(DATA)
    for way in () if asked.table else reversed(WAYS):
        for name in asked.rows or ROWS:
            if way in results.rows.get(name, {}) and not asked.again:
                continue
            results.keep(name, results.rows.get(name, {}) | {way: planned(ROWS[name], way)})
            print(name, way, results.rows[name][way], file=sys.stderr, flush=True)
            TABLE.write_text(table(results.rows))
    TABLE.write_text(table(results.rows))


if __name__ == "__main__":
    main()
