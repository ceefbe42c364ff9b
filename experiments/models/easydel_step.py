"""EasyDeL's own training step, planned, and compiled on the plan's mesh under the exported rules.

    python experiments/models/easydel_step.py [--easydel FOLDER] [--only TEXT ...] [--again] [--table]

EasyDeL's `training_step` over an `EasyDeLState` is traced on a mesh of one device, where its own constraints have no
effect. It is planned for eight CPU devices on axes with EasyDeL's names. EasyDeL's own `match_partition_rules` reads
the exported rules. Its step is then compiled on a mesh of `fsdp=4, tp=2` with the resulting specs and its own
constraints. Bytes on the wire are read from the program.

EasyDeL 0.3.0 pins versions that this environment lacks (transformers 5.5, flax 0.12.3). Install it to a folder, `pip
install --no-deps --target FOLDER easydel==0.3.0 eformer==0.0.99.12 ejkernel==0.0.78 ml-collections plum-dispatch
mergedeep tblib contextlib2 braceexpand chex toolz beartype einops msgspec`, and pass the folder. Missing imports for
storage, monitoring and data are replaced by mocks.

Results are saved by row in `experiments/results/easydel_step.json`.
"""

import functools
import os
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

from experiments.lib.foreign_library import apart, find, foreign_parser, is_missing
from experiments.lib.harness import Experiment, Rows, grid, page


MESH = {"fsdp": 4, "tp": 2}
BATCH, SEQ = 16, 64
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
ROWS: dict[str, dict[str, Any]] = {
    "Llama": {"model": "Llama", "limit": 1.0},
    "Llama, less memory": {"model": "Llama", "limit": 0.7},
    "Qwen3": {"model": "Qwen3", "limit": 1.0},
}
STOOD_IN = (
    "google.cloud google.api_core google.auth tensorflow grain datasets wandb fastapi uvicorn uvloop gcsfs zstandard "
    "partial_json_parser googleapiclient zmq grafanalib sentencepiece torchvision tensorboard tensorboardX lm_eval "
    "openai trackio cloudpickle pyarrow"
).split()
"""Packages of storage, monitoring, serving and data."""


def open_easydel(folder: Path | None, devices: int) -> Any:
    """Import EasyDeL with that many devices."""
    import pandas as pandas  # before the mocks hide missing packages

    find(folder, STOOD_IN)
    warnings.simplefilter("ignore")
    import easydel  # pyrefly: ignore[missing-import]

    # EasyDeL sets flags of GPUs, which this jaxlib does not know.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    if folder is not None:
        # Only the step is imported: the packages above it import trainers and libraries of data.
        for name in ("easydel.trainers", "easydel.trainers.trainer"):
            module = types.ModuleType(name)
            module.__path__ = [str(folder / name.replace(".", "/"))]
            sys.modules[name] = module
    return easydel


def inputs(easydel: Any, row: dict[str, Any], dims: tuple[int, ...]) -> tuple[Any, Any, Any, Any]:
    """Return the mesh, the step, an abstract state and an abstract batch."""
    import jax
    import jax.numpy as jnp
    import optax
    from easydel.infra.loss_utils import LossConfig  # pyrefly: ignore[missing-import]
    from easydel.trainers.trainer._fn import training_step  # pyrefly: ignore[missing-import]
    from flax import nnx

    config = getattr(easydel, f"{row['model']}Config")(**SMALL, sharding_axis_dims=dims, attn_mechanism="vanilla")
    with config.mesh:
        kind = getattr(easydel, f"{row['model']}ForCausalLM")
        model = kind(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
        state = model.to_state().init_tx(optax.adamw(1e-3))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x, state)
    batch = {name: jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32) for name in ("attention_mask", "input_ids", "labels")}
    spec = jax.sharding.PartitionSpec() if dims == (1,) * 5 else jax.sharding.PartitionSpec(("dp", "fsdp"))
    step = functools.partial(
        training_step, loss_config=LossConfig(), learning_rate_fn=lambda _: 1e-3, partition_spec=spec
    )
    return config.mesh, step, shapes, batch


def plan_row(folder: Path | None, row: dict[str, Any], send: Any) -> None:
    """Trace, plan and export; `send` gets the figures and the rules."""
    easydel = open_easydel(folder, 1)

    import autoshard
    from autoshard.exports import make_export

    mesh, step, state, batch = inputs(easydel, row, (1, 1, 1, 1, 1))
    start = time.process_time()
    with mesh:
        program = autoshard.trace(step, (state, batch), name="EasyDeL", arg_names=("state", "batch"))
    given: dict[str, Any] = {"topology": "cpu:8", "mesh": MESH, "pins": {"batch.*": "fsdp,-"}}
    free = autoshard.plan(program, **given)
    limit: dict[str, Any] = (
        {} if row["limit"] == 1.0 else {"memory_limit": int(row["limit"] * free.prediction.peak_bytes)}
    )
    plan = autoshard.plan(program, **given, **limit)
    made = make_export(plan, "rules", program)
    assert made.prediction is not None
    send.send(
        {
            "planning_cpu_s": time.process_time() - start,
            "step_s": plan.prediction.step_time_s,
            "wire": sum(plan.prediction.wire_bytes.values()),
            "rules_wire": sum(made.prediction.wire_bytes.values()),
            "words": list(plan.words),
            "text": made.text,
            "specs": {
                name: [list(axes) for axes in spec.dims]
                for name, spec in plan.arguments.items()
                if plan.roles[name] == "parameter"
            },
        }
    )


def compile_row(folder: Path | None, row: dict[str, Any], planned: dict[str, Any], send: Any) -> None:
    """Match the rules with EasyDeL, compile its step under them, and send the bytes on the wire."""
    easydel = open_easydel(folder, 8)
    import jax
    from eformer.escale import match_partition_rules  # pyrefly: ignore[missing-import]
    from jax.sharding import NamedSharding, PartitionSpec

    from autoshard.cost import Topology, make_mesh
    from autoshard.exec import read_collectives, wire_by_axis

    mesh, step, state, batch = inputs(easydel, row, (1, MESH["fsdp"], 1, MESH["tp"], 1))
    namespace: dict[str, Any] = {}
    exec(planned["text"], namespace)
    rules = [*namespace["RULES"], (".*", PartitionSpec())]
    # EasyDeL's `shard_model(partition_rules=...)` does the same.
    specs = match_partition_rules(state.model._get_partition_rules(rules), state)
    matched = {
        ".".join(str(getattr(key, "key", getattr(key, "name", ""))) for key in path): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(
            specs.graphstate, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
    }
    wrong = []
    for name, dims in planned["specs"].items():
        wanted = [tuple(axes) for axes in dims]
        spec = next(spec for own, spec in matched.items() if own.removesuffix(".value") == name.split(".", 2)[2])
        given = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]
        if given + [()] * (len(wanted) - len(given)) != wanted:
            wrong.append(name)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    inputs_at = NamedSharding(mesh, PartitionSpec("fsdp"))
    with mesh:
        run = jax.jit(step, in_shardings=(places, inputs_at), out_shardings=(places, None))
        text = run.lower(state, batch).compile().as_text() or ""
    wire = wire_by_axis(read_collectives(text, make_mesh(Topology.parse("cpu:8"), MESH)))
    send.send({"specs_that_differ": wrong, "compiled_wire": sum(wire.values()), "rules": len(namespace["RULES"])})


def table(rows: Rows) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in MESH.items())
    lines = []
    for name, row in rows.items():
        whole, held, compiled = (row[key] / 2**20 for key in ("wire", "rules_wire", "compiled_wire"))
        cells = [f"{name}: {'; '.join(row['words'])}", f"{len(row['specs_that_differ'])} of {row['parameters']}"]
        cells += [f"{row['rules']}", f"{whole:.1f} MiB", f"{held:.1f} MiB"]
        lines.append([*cells, f"{compiled:.1f} MiB ({compiled / held - 1:+.1%})", f"{row['planning_cpu_s']:.0f} s"])
    return page(
        "# EasyDeL's own step under the rules of a plan",
        f"""
EasyDeL's `training_step`, planned for `cpu:8` with {mesh}, exported as `rules`, matched by EasyDeL's own
`match_partition_rules`, and compiled on its mesh with these specs and its own constraints of what is
computed. `python experiments/models/easydel_step.py` makes this table again.
""",
        grid(
            "model | parameters whose specs differ | rules | wire predicted, the plan whole | the rules and XLA's "
            "propagation | wire compiled by EasyDeL | planning, processor",
            lines,
        ),
    )


def main() -> int:
    given = foreign_parser("EasyDeL").parse_args()
    if is_missing("EasyDeL", given):
        return 0

    def work(name: str) -> dict[str, Any]:
        planned = apart(plan_row, given.folder, ROWS[name])
        compiled = apart(compile_row, given.folder, ROWS[name], planned)
        figures = {key: value for key, value in planned.items() if key not in ("text", "specs")}
        return figures | compiled | {"parameters": len(planned["specs"])}

    return Experiment(script=__file__, names=ROWS, work=work, table=table).run(given)


if __name__ == "__main__":
    sys.exit(main())
