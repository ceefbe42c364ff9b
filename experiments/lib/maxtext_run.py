"""MaxText's own training step under exported settings, on the devices of this process and on one of them.

`python -m experiments.lib.maxtext_run FOLDER ROW.json` prints one line of JSON: the differences of loss and updated
state. FOLDER has MaxText's sources; ROW has a configuration's `fields`, and the file of the export, `code`.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any


BLOCKS = {"llama": "llama2", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "mixtral": "mixtral"}
"""MaxText's name of a decoder by type of model; other types of the table have none in MaxText."""
COMMON = {
    "max_target_length": 64,
    "attention": "dot_product",
    "dtype": "float32",
    "weight_dtype": "float32",
    "hardware": "cpu",
    "scan_layers": True,
    "logits_dot_in_fp32": True,
    "matmul_precision": "highest",
    "learning_rate_schedule_steps": 100,
    "warmup_steps_fraction": 0.0,
    "steps": 100,
}


def settings_of(fields: dict[str, Any], batch: int, devices: int) -> dict[str, Any]:
    """Return MaxText's settings of the dims of a Hugging Face configuration."""
    heads = fields["num_attention_heads"]
    settings = {
        "decoder_block": BLOCKS[fields["model_type"]],
        "base_num_decoder_layers": fields["num_hidden_layers"],
        "base_emb_dim": fields["hidden_size"],
        "base_mlp_dim": fields["intermediate_size"],
        "base_num_query_heads": heads,
        "base_num_kv_heads": fields["num_key_value_heads"],
        "head_dim": fields.get("head_dim", fields["hidden_size"] // heads),
        "vocab_size": fields["vocab_size"],
        "per_device_batch_size": batch / devices,
    }
    if "num_local_experts" in fields:
        settings |= {"num_experts": fields["num_local_experts"], "num_experts_per_tok": 2, "sparse_matmul": False}
        settings |= {"megablox": False, "capacity_factor": -1, "base_moe_mlp_dim": fields["intermediate_size"]}
    return COMMON | settings


def run_step(base: Path, settings: dict[str, Any], devices: int) -> list[Any]:
    """Return the loss and the updated state, as arrays, of one step on so many devices."""
    import jax
    import numpy as np
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig  # pyrefly: ignore[missing-import]
    from maxtext.trainers.pre_train import train, train_compile  # pyrefly: ignore[missing-import]
    from maxtext.utils import maxtext_utils, sharding  # pyrefly: ignore[missing-import]

    from experiments.models import maxtext_step

    given = [f"{key}={value}" for key, value in (maxtext_step.COMMON | settings).items()]
    config = pyconfig.initialize(["train", str(base), *given])
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config, jax.devices()[:devices]), config.mesh_axes)
    args, _, state, _, model = train_compile.get_shaped_inputs(mesh, config)
    parameters, state = sharding.maybe_update_params_sharding_with_opt(config, state)
    batch = sharding.get_input_data_sharding(config, mesh)
    step, ins, outs, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step, batch, state, model, config, parameters
    )
    rules = logical_axis_rules(config.logical_axis_rules)
    compiled = train_compile.jit_and_compile(step, args, {}, mesh, ins, outs, static, (), config, rules)
    random, values = np.random.default_rng(0), []
    for path, leaf in jax.tree_util.tree_flatten_with_path(args)[0]:
        name, dtype = jax.tree_util.keystr(path), np.dtype("uint32") if "key<" in str(leaf.dtype) else leaf.dtype
        if "key<" in str(leaf.dtype):
            value: Any = jax.random.split(jax.random.key(0), leaf.shape)
        elif "segmentation" in name:
            value = np.ones(leaf.shape, dtype)
        elif "position" in name:
            value = np.broadcast_to(np.arange(leaf.shape[-1]), leaf.shape).astype(dtype)
        elif np.issubdtype(dtype, np.floating) and "opt_state" not in name and "optimizer" not in name:
            value = random.normal(scale=0.05, size=leaf.shape).astype(dtype)
        elif np.issubdtype(dtype, np.integer) and ("inputs" in name or "targets" in name):
            value = random.integers(1, 256, leaf.shape).astype(dtype)
        else:
            value = np.zeros(leaf.shape, dtype)
        values.append(value)
    placed = jax.tree.map(
        jax.device_put, jax.tree.unflatten(jax.tree.structure(args), values), compiled.input_shardings[0]
    )
    updated, metrics = compiled(*placed)
    loss = metrics["scalar"]["learning/loss"]
    return [np.asarray(loss), *(np.asarray(x) for x in jax.tree.leaves(updated) if "key<" not in str(x.dtype))]


def main() -> None:
    folder, row = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={row['devices']}"
    from experiments.models.maxtext_step import open_maxtext

    base = open_maxtext(folder)
    import numpy as np

    exported = dict(re.findall(r"^(\w+): (\w+)$", Path(row["code"]).read_text(), re.MULTILINE))
    found = run_step(base, settings_of(row["fields"], row["batch"], row["devices"]) | exported, row["devices"])
    one = {"ici_data_parallelism": 1, "ici_fsdp_parallelism": 1, "dcn_data_parallelism": 1}
    # MaxText multiplies the batch of a device with the devices that there are, used or not.
    wanted = run_step(base, settings_of(row["fields"], row["batch"], row["devices"]) | one, 1)
    differences = [
        float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6)) for a, b in zip(found, wanted, strict=True) if a.size
    ]
    print(json.dumps({"loss": differences[0], "checkpoint": max(differences)}))


if __name__ == "__main__":
    main()
