"""Exports, executed: decoders in the forms of today's frameworks, compared with the unplanned training step.

`python experiments/correctness/exported_steps.py` plans each model by FSDP and tensor parallelism on `data=2,model=2`.
It runs the code of each export: torch's forms on processes over gloo, those of JAX on CPU devices. `MAXTEXT` names a
Python and a folder of MaxText's sources; without them its rows say so. Rows are saved in
`results/exported_steps.json`; the table is `results/exported_steps.md`.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.lib.harness import ROOT, Experiment, grid, page, plain


MESH = {"data": 2, "model": 2}
FORMS = ("jax", "flax", "dtensor", "fsdp2", "torchtitan", "transformers", "accelerate", "maxtext", "keras")
MAXTEXT = os.environ.get("MAXTEXT", "").split(":")
"""Python that has MaxText's dependencies, and the folder of its sources, as `MAXTEXT=PYTHON:FOLDER`."""
KERAS = "decoder of Keras layers"
"""A decoder of Keras's own layers, which the `keras` form is for."""
NEWEST = str(ROOT / ".venv-newest" / "bin" / "python")
"""Python with torch 2.13, which transformers needs for FSDP with tensor parallelism; `make test-newest` makes it."""
ALLOWED = 1e-3
"""Largest difference, relative to the largest value of a tensor, or to the learning rate in a checkpoint."""
ONE_HEAD = "gemma with 1 head of keys"
"""A model with fewer heads of keys than devices, and an embedding that the pins split and its head shares."""
_DIMS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
_DIMS |= {"num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 128}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | _DIMS,
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]} | _DIMS,
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8} | _DIMS,
    "gemma": {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "head_dim": 8} | _DIMS,
    "phi3": {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]} | _DIMS | _IDS,
    "opt": {"model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": 64, "ffn_dim": 128}
    | {"num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 256, "max_position_embeddings": 128}
    | {"word_embed_proj_dim": 64, "dropout": 0.0}
    | _IDS,
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 8}
    | {"vocab_size": 256, "n_positions": 128, "bos_token_id": 1, "eos_token_id": 2},
    "mixtral": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4} | _DIMS,
    ONE_HEAD: {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "head_dim": 8}
    | _DIMS
    | {"num_key_value_heads": 1},
}
MESHES = {ONE_HEAD: {"model": 8}}
"""Meshes of models that are not planned on `MESH`."""
_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj", "qkv_proj", "fc1", "c_attn", "c_fc")
_ROWS = ("o_proj", "out_proj", "down_proj", "fc2", "c_proj")


def pins_of(program: Any, model: str) -> dict[str, str]:
    """Return pins of a program: layers split by columns and rows over `model`, the rest of each over `data`."""
    pins: dict[str, str] = {}
    for argument in program.arguments:
        shape = argument.shape
        if argument.role.value == "batch":
            pins[argument.name] = ",".join(["data", *["None"] * (len(shape) - 1)])
        stacked = "*" in argument.name
        name = argument.name.removesuffix(".weight").rpartition(".")[2]
        if model == ONE_HEAD and argument.role.value == "parameter" and name == "embed_tokens":
            pins[argument.name] = "model,None"
        if argument.role.value != "parameter" or len(shape) != 2 + stacked or name not in (*_COLUMNS, *_ROWS):
            continue
        dims = ["model", "data"] if (name in _COLUMNS) != (model == "gpt2") else ["data", "model"]
        pins[argument.name] = ",".join([*["None"] * stacked, *dims])
    axes = MESHES.get(model, MESH)
    return {name: ",".join(part if part in axes else "None" for part in spec.split(",")) for name, spec in pins.items()}


def exported(model: str, folder: Path) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Plan a model and write its exports to the folder; return the program, and a row for each form.

    `refused` is the sentence with which the command refuses the export, empty for none. The code is written all the
    same where the form can hold a part of the plan.
    """
    import autoshard
    from autoshard.errors import UserError
    from autoshard.exports import make_export
    from autoshard.program import open_source

    config = folder / f"{model}.json"
    config.write_text(json.dumps(MODELS[model]))
    program = open_source(f"hf:{config}", train=True, batch=8, seq=64, dtype="float32")
    mesh = MESHES.get(model, MESH)
    devices = math.prod(mesh.values())
    plan = autoshard.plan(program, topology=f"cpu:{devices}", mesh=mesh, pins=pins_of(program, model))
    path = folder / f"{model}.plan.json"
    plan.save(path)
    rows: dict[str, dict[str, Any]] = {}
    for form in FORMS:
        if form == "keras":  # its paths are those of Keras's own variables
            continue
        row: dict[str, Any] = {"fields": MODELS[model], "plan": str(path), "form": form, "refused": ""}
        rows[form] = row
        planned = plan
        try:
            export = make_export(plan, form, program)
        except UserError as error:
            row["refused"] = str(error)
            try:
                export = make_export(plan, form, program, force=True)
            except UserError:
                planned = autoshard.plan(program, topology=f"cpu:{devices}", mesh=mesh, form=form)
                try:
                    export = make_export(planned, form, program)
                except UserError as unwritten:
                    row["unwritten"] = str(unwritten)
                    continue
                row |= {"within": True, "plan": str(folder / f"{model}_{form}.plan.json")}
                planned.save(row["plan"])
        row["code"] = str(folder / f"{model}_{form}.{'yaml' if form == 'accelerate' else 'py'}")
        Path(row["code"]).write_text(export.text)
        row["plan_s"] = planned.prediction.step_time_s
        row["plan_bytes"] = sum(each.wire_bytes for each in planned.prediction.collectives)
        if export.prediction is not None:
            row["step_s"] = export.prediction.step_time_s
            row["foreseen_bytes"] = sum(each.wire_bytes for each in export.prediction.collectives)
    return program, rows


def run_torch(
    rows: list[dict[str, Any]], folder: Path, python: str = sys.executable, timeout_s: float = 600.0
) -> list[dict[str, Any]]:
    """Return the figures of each export's code on four processes. Raise `RuntimeError` if one prints none."""
    file = folder / "rows.json"
    file.write_text(json.dumps(rows))
    process = subprocess.run(
        [python, "-m", "experiments.lib.exported_run", str(file)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
    )
    records = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    if len(records) < len(rows):
        raise RuntimeError(process.stderr[-3000:])
    return records


def run_maxtext(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the figures of MaxText's own step under exported settings, against its step on one device."""
    from experiments.lib.maxtext_run import BLOCKS

    if row["fields"]["model_type"] not in BLOCKS:
        return {"error": "MaxText has no such decoder"}
    if len(MAXTEXT) < 2:
        return {"error": "MaxText is not here"}
    file = folder / "maxtext.json"
    file.write_text(json.dumps(row | {"batch": 8, "devices": math.prod(MESHES.get(row["model"], MESH).values())}))
    process = subprocess.run(
        [MAXTEXT[0], "-m", "experiments.lib.maxtext_run", MAXTEXT[1], str(file)],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": process.stderr.strip().rpartition("\n")[2][:300]}


def keras_decoder() -> Any:
    """Make a Keras model of two decoder layers, compiled for training."""
    import keras

    layers = keras.layers
    inputs = keras.Input((64,), dtype="int32")
    x = layers.Embedding(256, 64)(inputs)
    for _ in range(2):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(8, 8)(h, h, use_causal_mask=True)
        h = layers.LayerNormalization()(x)
        x = x + layers.Dense(64)(layers.Dense(128, activation="gelu")(h))
    model = keras.Model(inputs, layers.Dense(256)(layers.LayerNormalization()(x)))
    model.compile(keras.optimizers.AdamW(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def keras_rows() -> dict[str, dict[str, Any]]:
    """Plan the Keras decoder, and return the row of its export: two batches of training, under it and on one device."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import jax
    import keras
    import numpy as np

    import autoshard
    from autoshard.exports import make_export
    from autoshard.program import from_keras

    ids = jax.ShapeDtypeStruct((8, 64), "int32")
    program = from_keras(keras_decoder, ids, ids)
    pins = {}
    for argument in program.arguments:
        rank, name = len(argument.shape), argument.name
        if argument.role.value == "parameter" and name.endswith("kernel") and rank > 1:
            rows = "output" in name or argument.shape[0] == 128
            dims = ["model", *["None"] * (rank - 2), "data"] if rows else ["data", "model", *["None"] * (rank - 2)]
            pins[name] = ",".join(dims)
        elif argument.role.value == "batch":
            pins[name] = ",".join(["data", *["None"] * (rank - 1)])
    plan = autoshard.plan(program, topology="cpu:4", mesh=MESH, pins=pins)
    row: dict[str, Any] = {"refused": "", "plan_s": plan.prediction.step_time_s}
    try:
        export = make_export(plan, "keras", program)
    except autoshard.UserError as error:
        row["refused"] = str(error)
        export = make_export(plan, "keras", program, force=True)
    if export.prediction is not None:
        row["step_s"] = export.prediction.step_time_s
    names: dict[str, Any] = {}
    exec(export.text, names)  # noqa: S102
    random = np.random.default_rng(0)
    batches = [random.integers(0, 256, (2, 8, 64)).astype("int32") for _ in range(2)]

    def trained(distribution: Any) -> tuple[list[float], list[Any]]:
        keras.utils.clear_session()  # it forgets the distribution
        keras.distribution.set_distribution(distribution)
        keras.utils.set_random_seed(0)
        model = keras_decoder()
        names["check"](model)
        if distribution is not None and all(each.value.sharding.is_fully_replicated for each in model.variables):
            raise RuntimeError("Keras has split nothing")
        losses = [float(model.train_on_batch(x, y)) for x, y in batches]
        return losses, [np.asarray(each.value) for each in model.trainable_variables]

    wanted, alone = trained(None)
    found, values = trained(names["distribution"](keras.distribution.list_devices()[:4]))
    keras.distribution.set_distribution(None)
    row["loss"] = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
    # Two steps of AdamW move a value by at most about two learning rates.
    row["checkpoint"] = max(float(np.quantile(np.abs(a - b), 0.99)) / 1e-2 for a, b in zip(values, alone, strict=True))
    return {"keras": row}


def flax_step(row: dict[str, Any], program: Any, names: dict[str, Any]) -> Any:
    """Return the jitted step under the `flax` export: specs that Flax makes of logical names and rules.

    Optimizer state has the spec of its parameter, as where it is made of it. Results are split like the arguments that
    they replace.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import autoshard
    from autoshard.planning import FORMS, expressible_specs

    plan = autoshard.load(row["plan"])
    own = names["partition_specs"]() | names["partition_specs"](names["INPUT_AXES"])
    state = expressible_specs(FORMS["flax"], plan.arguments, plan.shapes, plan.roles, plan.mesh)
    devices = jax.devices()[: math.prod(plan.mesh.values())]
    mesh = jax.make_mesh(tuple(names["MESH"].values()), tuple(names["MESH"]), devices=devices)
    specs = []
    for argument in program.arguments:
        spec = own.get(argument.name)
        if spec is None:
            spec = (state[argument.name] or plan.arguments[argument.name]).partition_spec()
        specs.append(NamedSharding(mesh, PartitionSpec(*spec)))
    args = program.make_args(0)
    results = [None if each.argument is None else specs[each.argument] for each in program.results]
    shape = jax.tree.structure(jax.eval_shape(program.fn, *args))
    in_shardings = jax.tree.unflatten(jax.tree.structure(args), specs)
    return jax.jit(program.fn, in_shardings=in_shardings, out_shardings=jax.tree.unflatten(shape, results))


def run_jax(row: dict[str, Any], program: Any) -> dict[str, Any]:
    """Return the figures of the code of a `jax` or `flax` export on devices of this process."""
    import jax
    import numpy as np

    import autoshard
    from autoshard.exec.hlo.compiled_collectives import plan_mesh, read_collectives, wire_by_axis

    plan = autoshard.load(row["plan"])
    args = program.make_args(0)
    names: dict[str, Any] = {}
    exec(Path(row["code"]).read_text(), names)  # noqa: S102
    if row["form"] == "flax":
        step = flax_step(row, program, names)
    else:
        step = names["jit"](program.fn, args, names["make_mesh"](jax.devices()[: math.prod(plan.mesh.values())]))
    compiled = step.lower(*args).compile()
    wanted, found = (jax.tree.leaves(run(*args)) for run in (jax.jit(program.fn), step))
    differences = []
    for own, alone in zip(found, wanted, strict=True):
        a, b = np.asarray(own, dtype=np.float64), np.asarray(alone, dtype=np.float64)
        differences.append(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6)))
    return {
        "loss": differences[-1],
        "checkpoint": max(differences),
        "wire_bytes": float(sum(wire_by_axis(read_collectives(compiled.as_text(), plan_mesh(plan))).values())),
    }


def work(model: str) -> dict[str, Any]:
    """Return the figures of all exports of one model, by form."""
    from autoshard.exec import ensure_devices

    ensure_devices(8)
    if model == KERAS:
        return keras_rows()
    with tempfile.TemporaryDirectory() as made:
        program, rows = exported(model, Path(made))
        eager = ("dtensor", "fsdp2", "torchtitan", "accelerate")
        for forms, python in ((eager, sys.executable), (("transformers",), NEWEST)):
            written = [form for form in forms if "code" in rows[form]]
            for form, figures in zip(written, run_torch([rows[f] for f in written], Path(made), python), strict=True):
                rows[form] |= figures
        if "code" in rows["maxtext"]:
            rows["maxtext"] |= run_maxtext(rows["maxtext"] | {"model": model}, Path(made))
        for form in ("jax", "flax"):
            if "code" in rows[form]:
                rows[form] |= run_jax(rows[form], program)
    inner = ("fields", "plan", "code", "form")
    return {form: {key: value for key, value in row.items() if key not in inner} for form, row in rows.items()}


_DIFFERENCES = ("loss", "norm", "gradients", "checkpoint")


def is_equal(row: dict[str, Any]) -> bool:
    """Return True if an export ran, and every difference from the unplanned step is rounding."""
    return "loss" in row and all(row[key] < ALLOWED for key in _DIFFERENCES if key in row)


def table(rows: dict[str, Any]) -> str:
    lines = []
    flat = [(model, form, row[form]) for model, row in rows.items() for form in FORMS if form in row]
    for model, form, row in flat:
        figures = [f"{row[key]:.0e}" if key in row else "" for key in _DIFFERENCES]
        ratio = f"{row['step_s'] / row['plan_s']:.2f}" if "step_s" in row else ""
        sent, foreseen = (f"{row[key] / 1024:.0f}" if key in row else "" for key in ("wire_bytes", "foreseen_bytes"))
        failed = row.get("error", "differs" if "loss" in row else row.get("unwritten", "not written"))
        verdict = "equal" + ", planned for it" * row.get("within", False) if is_equal(row) else plain(failed)[:90]
        lines.append([model, form, 3 if row["refused"] else 0, ratio, sent, foreseen, *figures, verdict])
    ran, equal = sum("loss" in row for _, _, row in flat), sum(is_equal(row) for _, _, row in flat)
    return page(
        "# Exports, executed",
        f"""
`python experiments/correctness/exported_steps.py`: decoders by FSDP and tensor parallelism on {MESH}, or on eight
processes of tensor parallelism ({ONE_HEAD}), float32, batch 8, 64 tokens; `transformers` with torch 2.13, other forms
with 2.9. *Exit* is the exit code of `autoshard export`: 3 if the form cannot hold the plan; the code was then written
with `--force`, or, where even that is refused, from a plan that was made `--for` the form. *Step* is the form's
predicted step over the plan's. *Sent* is what one device puts on the wire in a step, in KiB, beside what is predicted
of the form. Differences are from the unplanned step: loss, norm of clipping, gradients, and a checkpoint of whole
tensors after one step (in learning rates; of `maxtext` and `jax` relative, of `keras` the 99th percentile after two).
`maxtext` is MaxText's own step of its own decoder under the exported settings. `accelerate` reads its file as
`accelerate launch` does, and FSDP is turned on by hand, because Accelerate does so on accelerators alone. Of
{len(flat)}
exports, {ran} ran and {equal} are equal.
""",
        grid(
            "model | form | exit: | step: | sent: | foreseen: | loss: | norm: | gradients: | checkpoint: | end", lines
        ),
    )


def main() -> int:
    return Experiment(script=__file__, names=[*MODELS, KERAS], work=work, table=table).run()


if __name__ == "__main__":
    sys.exit(main())
