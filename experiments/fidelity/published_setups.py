"""Five published training setups, planned through `hf:` as a user would, compared with the published step times.

    python experiments/fidelity/published_setups.py [--only TEXT ...] [--again] [--table]

Model, chips, batch, sequence and compiler flags are the run's. In the first way the planner chooses mesh, sharding,
attention and remat (`--remat auto --attention auto`). In the second way these are as the source states them: FSDP over
all chips, the splash kernel, and the same values offloaded to the hosts. Nothing is fitted to these rows. Results are
saved in `results/published_setups.json`; a run computes the missing ones.
"""

import sys
from typing import Any

from experiments.lib.harness import Experiment, grid, page
from experiments.lib.plan_command import run


LIMIT_S = 600.0
"""Processor seconds for one plan."""
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
    # Flags of layouts and of host transfers are left out, as in published.json.
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
        "flags": "", "published_s": 131.474,  # its source states neither flags nor remat
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
WAYS = {f"{name} {way}": (name, way) for name in ROWS for way in ("chosen", "stated")}


def planned(key: str) -> dict[str, Any]:
    """Return the prediction of `autoshard plan` for a setup, with mesh and recipe chosen or as the source states
    them.
    """
    name, way = WAYS[key]
    row = ROWS[name]
    options = ["--train", "--batch", str(row["batch"] * row["chips"]), "--seq", str(row["seq"])]
    options += ["--topology", row["topology"]]
    if way == "stated":
        options += ["--mesh", row["mesh"], "--remat", row["remat"], "--attention", "splash"]
    else:
        options += ["--remat", "auto", "--attention", "auto"]
    options += ["--xla-flags", row["flags"]] if row["flags"] else []
    answer = run(f"hf:{row['config']}", [*options, "--no-cache"], LIMIT_S)
    figures = {"cpu_s": answer["cpu"], "wall_s": answer["wall"], "planner_bytes": answer["pss"]}
    if "error" in answer:
        return figures | {"error": answer["error"]}
    figures["mesh"] = ", ".join(f"{axis}={n}" for axis, n in answer["mesh"].items())
    figures |= {key: answer[key] for key in ("step_time_s", "compute_s", "exposed_comm_s", "peak_bytes", "mfu")}
    return figures | {"recipe": (answer["recipe"] or {}).get("chosen")}


def table(rows: dict[str, Any]) -> str:
    lines = []
    for key, figures in rows.items():
        name, way = WAYS[key]
        row = ROWS[name]
        took = [f"{figures['cpu_s']:.0f}", f"{figures['wall_s']:.0f}", f"{figures['planner_bytes'] / 1e9:.1f}"]
        cells = [name, way, f"{row['published_s']:.4g}"]
        if "error" in figures:
            cells += [figures["error"], *"-----"]
        else:
            cells += [f"{figures['step_time_s']:.4g}", f"{figures['step_time_s'] / row['published_s'] - 1:+.1%}"]
            cells += [f"{figures['exposed_comm_s']:.3g}", f"{figures['peak_bytes'] / GIB:.1f}"]
            stated = {"remat": row["remat"], "attention": "splash"}
            recipe = stated if way == "stated" else figures["recipe"] or {}
            cells += [figures["mesh"], ", ".join(f"{key} {value}" for key, value in recipe.items()) or "not kept"]
        lines.append([*cells, *took, figures["code"]])
    return page(
        "# Published setups, planned through `hf:`",
        """
`python experiments/fidelity/published_setups.py`: what `autoshard plan hf:CONFIG` predicts for a published run's
model, chips, batch, sequence and compiler flags. `chosen`: mesh, sharding, attention and remat are the
planner's, so that it may be faster than the run by being a better plan; `stated`: FSDP over all chips, the
splash kernel and the values sent to the hosts as the run had them (of the 405B on v5p neither flags nor
remat are known: none, and `full`). Nothing was fitted to these rows. Weights and state are in fp32, AdamW,
as in the runs. `code` is the commit that a row was planned with.
""",
        grid(
            "setup | way | published s | predicted s | error | waits s | GiB | mesh | recipe | CPU s | wall s | GB "
            "| code",
            lines,
        ),
        "Sources:",
        [f"- {name}: {row['source']}" for name, row in ROWS.items()],
    )


if __name__ == "__main__":
    sys.exit(Experiment(script=__file__, names=WAYS, work=planned, table=table).run())
