"""Forty exports, executed: eight decoders in five forms, compared with the unplanned training step.

`python experiments/correctness/exported_steps.py` plans each model by FSDP and tensor parallelism on `data=2,model=2`.
It runs the code of each export: torch's forms on four processes over gloo, `jax` on four CPU devices. Rows are saved in
`results/exported_steps.json`; the table is `results/exported_steps.md`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.lib.harness import ROOT, Experiment, grid, page, plain


MESH = {"data": 2, "model": 2}
FORMS = ("jax", "dtensor", "fsdp2", "torchtitan", "transformers")
NEWEST = str(ROOT / ".venv-newest" / "bin" / "python")
"""Python with torch 2.13, which transformers needs for FSDP with tensor parallelism; `make test-newest` makes it."""
ALLOWED = 1e-3
"""Largest difference, relative to the largest value of a tensor, or to the learning rate in a checkpoint."""
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
}
_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj", "qkv_proj", "fc1", "c_attn", "c_fc")
_ROWS = ("o_proj", "out_proj", "down_proj", "fc2", "c_proj")


def pins_of(program: Any, model: str) -> dict[str, str]:
    """Return pins of a program: layers split by columns and rows over `model`, the rest of each over `data`."""
    pins = {}
    for argument in program.arguments:
        shape = argument.shape
        if argument.role.value == "batch":
            pins[argument.name] = ",".join(["data", *["None"] * (len(shape) - 1)])
        stacked = "*" in argument.name
        name = argument.name.removesuffix(".weight").rpartition(".")[2]
        if argument.role.value != "parameter" or len(shape) != 2 + stacked or name not in (*_COLUMNS, *_ROWS):
            continue
        dims = ["model", "data"] if (name in _COLUMNS) != (model == "gpt2") else ["data", "model"]
        pins[argument.name] = ",".join([*["None"] * stacked, *dims])
    return pins


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
    plan = autoshard.plan(program, topology="cpu:4", mesh=MESH, pins=pins_of(program, model))
    path = folder / f"{model}.plan.json"
    plan.save(path)
    rows: dict[str, dict[str, Any]] = {}
    for form in FORMS:
        row = rows[form] = {"fields": MODELS[model], "plan": str(path), "form": form, "refused": ""}
        try:
            export = make_export(plan, form, program)
        except UserError as error:
            row["refused"] = str(error)
            try:
                export = make_export(plan, form, program, force=True)
            except UserError:
                continue
        row["code"] = str(folder / f"{model}_{form}.py")
        Path(row["code"]).write_text(export.text)
        planned = plan.prediction
        row["plan_s"], row["plan_bytes"] = planned.step_time_s, sum(each.wire_bytes for each in planned.collectives)
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


def run_jax(row: dict[str, Any], program: Any) -> dict[str, Any]:
    """Return the figures of the `jax` export's code on four devices of this process."""
    import jax
    import numpy as np

    import autoshard
    from autoshard.exec.hlo.compiled_collectives import plan_mesh, read_collectives, wire_by_axis

    plan = autoshard.load(row["plan"])
    args = program.make_args(0)
    names: dict[str, Any] = {}
    exec(Path(row["code"]).read_text(), names)  # noqa: S102
    step = names["jit"](program.fn, args, names["make_mesh"](jax.devices()[:4]))
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
    with tempfile.TemporaryDirectory() as made:
        program, rows = exported(model, Path(made))
        for forms, python in ((("dtensor", "fsdp2", "torchtitan"), sys.executable), (("transformers",), NEWEST)):
            written = [form for form in forms if "code" in rows[form]]
            for form, figures in zip(written, run_torch([rows[f] for f in written], Path(made), python), strict=True):
                rows[form] |= figures
        if "code" in rows["jax"]:
            rows["jax"] |= run_jax(rows["jax"], program)
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
        failed = row.get("error", "differs" if "loss" in row else "not written")
        verdict = "equal" if is_equal(row) else plain(failed)[:90]
        lines.append([model, form, 3 if row["refused"] else 0, ratio, sent, foreseen, *figures, verdict])
    ran, equal = sum("loss" in row for _, _, row in flat), sum(is_equal(row) for _, _, row in flat)
    return page(
        "# Exports, executed",
        f"""
`python experiments/correctness/exported_steps.py`: decoders by FSDP and tensor parallelism on {MESH}, float32, batch 8,
64 tokens; `transformers` with torch 2.13, other forms with 2.9. *Exit* is the exit code of `autoshard export`: 3 if the
form cannot hold the plan; the code was then written with `--force`. *Step* is the form's predicted step over the
plan's. *Sent* is what one device puts on the wire in a step, in KiB, beside what is predicted of the form. Differences
are from the unplanned step: loss, norm of clipping, gradients, and a checkpoint of whole tensors after one step (in
learning rates). Of {len(flat)}
exports, {ran} ran and {equal} are equal.
""",
        grid(
            "model | form | exit: | step: | sent: | foreseen: | loss: | norm: | gradients: | checkpoint: | end", lines
        ),
    )


def main() -> int:
    return Experiment(script=__file__, names=list(MODELS), work=work, table=table).run()


if __name__ == "__main__":
    sys.exit(main())
