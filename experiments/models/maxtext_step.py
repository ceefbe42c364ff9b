"""MaxText's own training step, planned, and compiled by MaxText itself with the settings that the plan exports.

    python experiments/models/maxtext_step.py [--maxtext FOLDER] [--only TEXT ...] [--again] [--table]

MaxText's `train_step` is traced from its own configuration over abstract state, on a mesh of one CPU device, where its
sharding constraints have no effect. The plan within the limits of its settings (`form="maxtext"`) is exported.
MaxText's `train_compile` compiles the same configuration with these settings for the TPU topology, with libtpu and no
TPU. Bytes on the wire of each device and its memory are then read from both.

MaxText requires Python 3.12. With another version unpack its wheel (0.2.4 goes with jax 0.10.2) and pass its folder.
Missing imports for storage, monitoring and data, which compute nothing, are replaced by mocks. Its libraries of kernels
and numbers (aqtp, qwix, tokamax, einshape, omegaconf, typeguard 2.13.3) are real.

Results are saved by row in `experiments/results/maxtext_step.json`.
"""

import importlib.util
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from experiments.lib.foreign_library import apart, find, foreign_parser, is_missing
from experiments.lib.harness import Experiment, Rows, grid, page


os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

SMALL = {"base_num_decoder_layers": 4, "base_emb_dim": 1024, "base_mlp_dim": 4096, "head_dim": 128}
HEADS = {"base_num_query_heads": 8, "base_num_kv_heads": 8}
WIDE = {"base_num_decoder_layers": 4, "base_emb_dim": 4096, "base_mlp_dim": 14336, "head_dim": 128}
WIDE_HEADS = {"base_num_query_heads": 32, "base_num_kv_heads": 8}

ROWS: dict[str, dict[str, Any]] = {
    "1024 wide, 64 sequences": {"config": SMALL | HEADS, "batch": 64},
    "1024 wide, 16 sequences": {"config": SMALL | HEADS, "batch": 16},
    "4096 wide, 16 sequences": {"config": WIDE | WIDE_HEADS, "batch": 16},
    "4096 wide, 8 sequences": {"config": WIDE | WIDE_HEADS, "batch": 8},
}
TOPOLOGY, CHIPS, SLICE, MESH = "v5e:4x4", 16, "v5e-16", {"data": 4, "model": 4}
COMMON = {
    "max_target_length": 1024,
    "remat_policy": "full",
    "attention": "dot_product",
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "run_name": "row",
    "base_output_directory": "unused",
}
STOOD_IN = (
    "pathwaysutils google.cloud google.genai google.api_core tensorflow tensorflow_datasets tensorflow_text grain "
    "ml_goodput_measurement tensorboardX cloud_accelerator_diagnostics cloud_tpu_diagnostics jetstream datasets "
    "opentelemetry mlperf_logging wandb google_cloud_mldiagnostics gcsfs array_record sentencepiece tiktoken drjax "
    "seqio tensorboard clu tunix transformer_engine"
).split()
"""Packages of storage, monitoring and data."""
NEW_SYNTAX = ("maxtext.kernels.mhc", "maxtext.common.grain_utility", "maxtext.input_pipeline")
"""Modules of MaxText that these configurations do not use: written for Python 3.12, or over those packages."""


def open_maxtext(folder: Path | None) -> Path:
    """Make MaxText importable; return the path of its default configuration file."""
    find(folder, STOOD_IN, () if folder is None else NEW_SYNTAX)
    spec = importlib.util.find_spec("maxtext")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit(f"there is no MaxText in {folder}.")
    return Path(next(iter(spec.submodule_search_locations))) / "configs" / "base.yml"


def inputs(base: Path, settings: dict[str, Any], compiled_for: str = "") -> tuple[Any, Any, Any, Any]:
    """Return MaxText's configuration, its mesh, its step and the shapes of its arguments, as `train_compile` makes
    them.
    """
    import jax
    from maxtext.configs import pyconfig  # pyrefly: ignore[missing-import]
    from maxtext.trainers.pre_train import train, train_compile  # pyrefly: ignore[missing-import]
    from maxtext.utils import maxtext_utils, sharding  # pyrefly: ignore[missing-import]

    where = (
        {"compile_topology": compiled_for, "compile_topology_num_slices": 1} if compiled_for else {"hardware": "cpu"}
    )
    given = [f"{key}={value}" for key, value in (COMMON | settings | where).items()]
    config = pyconfig.initialize(["train", str(base), *given])
    if compiled_for:
        mesh = train_compile.get_topology_mesh(config)
    else:
        mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config, jax.devices()[:1]), config.mesh_axes)
    args, _, state, _, model = train_compile.get_shaped_inputs(mesh, config)
    parameters, state = sharding.maybe_update_params_sharding_with_opt(config, state)
    batch = sharding.get_input_data_sharding(config, mesh)
    step = maxtext_utils.get_functional_train_with_signature(train.train_step, batch, state, model, config, parameters)
    return config, mesh, step, args


def plan_row(folder: Path | None, row: dict[str, Any], send: Any) -> None:
    """Trace, plan and export; `send` gets the figures and the settings."""
    base = open_maxtext(folder)

    import jax
    from flax.core.spmd import logical_axis_rules

    import autoshard
    from autoshard.exports import export_plan

    config, mesh, (step, *_), args = inputs(base, row["config"] | {"per_device_batch_size": row["batch"]})
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    start = time.process_time()
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        program = autoshard.trace(step, shapes, name="MaxText", donate_argnums=0)
    free = autoshard.plan(program, topology=TOPOLOGY, mesh=MESH)
    plan = autoshard.plan(program, topology=TOPOLOGY, mesh=MESH, form="maxtext")
    text = export_plan(plan, "maxtext", program)
    settings = dict(re.findall(r"^((?:ici|dcn)_\w+): (\d+)$", text, re.MULTILINE))
    send.send(
        {
            "planning_cpu_s": time.process_time() - start,
            "free_step_s": free.prediction.step_time_s,
            "step_s": plan.prediction.step_time_s,
            "peak": plan.prediction.peak_bytes,
            "wire": sum(plan.prediction.wire_bytes.values()),
            "settings": settings,
        }
    )


def compile_row(folder: Path | None, row: dict[str, Any], settings: dict[str, str], send: Any) -> None:
    """Run MaxText's own ahead-of-time compilation with these settings, and send bytes on the wire and memory."""
    base = open_maxtext(folder)

    from flax.core.spmd import logical_axis_rules
    from maxtext.trainers.pre_train import train_compile  # pyrefly: ignore[missing-import]

    from autoshard.cost import Topology, make_mesh
    from autoshard.exec import read_collectives, wire_by_axis

    given = row["config"] | settings | {"per_device_batch_size": row["batch"] / CHIPS}
    config, mesh, (step, ins, outs, static, donated), args = inputs(base, given, SLICE)
    rules = logical_axis_rules(config.logical_axis_rules)
    executable = train_compile.jit_and_compile(step, args, {}, mesh, ins, outs, static, donated, config, rules)
    memory = executable.memory_analysis()
    whole = make_mesh(Topology.parse(TOPOLOGY), {"all": CHIPS})
    send.send(
        {
            "compiled_wire": sum(wire_by_axis(read_collectives(executable.as_text(), whole)).values()),
            "compiled_peak": memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes,
        }
    )


def table(rows: Rows) -> str:
    lines = []
    for name, row in rows.items():
        cells = [name, ", ".join(f"`{key}={value}`" for key, value in row["settings"].items()) or "none"]
        cells += [f"{row[key] * 1e3:.1f} ms" for key in ("free_step_s", "step_s")]
        for what in ("wire", "peak"):
            own, compiled = row[what], row[f"compiled_{what}"]
            cells += [f"{own / 2**20:.0f} MiB", f"{compiled / 2**20:.0f} MiB ({compiled / own - 1:+.1%})"]
        lines.append([*cells, f"{row['planning_cpu_s']:.0f} s"])
    return page(
        "# MaxText's own step under the settings of a plan",
        f"""
MaxText's `train_step`, planned for {TOPOLOGY} within what its settings hold, exported, and compiled by
MaxText's `train_compile` with them. `python experiments/models/maxtext_step.py` makes this table again.
""",
        grid(
            "model | settings | step predicted, any plan | step predicted, settings | wire predicted | wire compiled | "
            "memory predicted | memory compiled | planning, processor",
            lines,
        ),
    )


def main() -> int:
    given = foreign_parser("MaxText").parse_args()
    if is_missing("MaxText", given):
        return 0

    def work(name: str) -> dict[str, Any]:
        planned = apart(plan_row, given.folder, ROWS[name])
        compiled = apart(compile_row, given.folder, ROWS[name], planned["settings"])
        return planned | compiled

    return Experiment(script=__file__, names=ROWS, work=work, table=table).run(given)


if __name__ == "__main__":
    sys.exit(main())
