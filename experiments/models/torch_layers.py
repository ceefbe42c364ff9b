"""Models of transformers whose layers differ, share weights, are frozen or carry adapters, compared with eager torch.

    python experiments/models/torch_layers.py [--only TEXT ...] [--again]

Each model is small, in float32, with random weights on the host. `from_torch` turns it into a training step. Its loss,
the gradient of every parameter and the buffers are compared with eager torch, from the same weights and ids. Layers
with the same computation are scanned, and the table has their number. Rows are saved in `results/torch_layers.json`.
The exit code is 1 if any model differs.
"""

import dataclasses
import importlib
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from autoshard.errors import UserError
from experiments.lib.harness import Experiment, grid, page, plain
from experiments.lib.programs.tiny_configs import tiny


if __name__ == "__main__":
    # Importers of this module may start processes that need PyTorch's backends.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

BATCH, SEQ, LAYERS = 2, 16, 4

ALIKE = ("llama", "mistral", "phi3", "gpt_neox", "gptj", "olmo2", "starcoder2", "stablelm", "bloom", "opt", "falcon")
"""Models whose layers use their number at most for a cache."""
NUMBERED = (
    "gpt2",
    "qwen2",
    "qwen3",
    "codegen",
    "diffllama",
    "smollm3",
    "glm4",
    "granite",
    "exaone4",
    "helium",
    "arcee",
)
"""Models whose layers may compute by their number."""
ALTERNATING = ("gemma2", "gemma3_text", "cohere2", "gpt_neo", "gpt_oss", "olmo3", "llama4_text", "vaultgemma", "lfm2")
"""Models whose kinds of attention alternate."""
SPARSE = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "glm4_moe",
    "olmoe",
    "dots1",
)
"""Models with experts, from some layer on or in every other layer."""
MIXED = ("mamba", "mamba2", "jamba", "bamba", "falcon_h1", "recurrent_gemma", "zamba2")
"""Models with state spaces, some with attention between them or with a block that layers share."""
SHALLOW = {"falcon_h1", "zamba2"}
"""Models whose fields fit no other number of layers than the reduced one."""
FIELDS: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 2]],
        "num_layers": LAYERS,
        "attention_layers": ["global", "local"] * 2,
    },
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "deepseek_v2": {"first_k_dense_replace": 1, "num_key_value_heads": 4},
    "deepseek_v3": {"first_k_dense_replace": 1, "num_key_value_heads": 4},
    "glm4_moe": {"first_k_dense_replace": 1},
    "qwen2_moe": {"decoder_sparse_step": 2},
    "qwen3_moe": {"mlp_only_layers": [1]},
}


def frozen_first(model: Any) -> None:
    """Freeze the embedding and the first half of the layers."""
    for name, parameter in model.named_parameters():
        number = next((int(part) for part in name.split(".") if part.isdecimal()), -1)
        parameter.requires_grad_("embed" not in name and "wte" not in name and not 0 <= number < LAYERS // 2)


def frozen_last(model: Any) -> None:
    """Freeze the last layer and every bias."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{LAYERS - 1}." not in name and not name.endswith("bias"))


def norms_alone(model: Any) -> None:
    """Train norms and freeze all other parameters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "ln_" in name)


def attention_of_some(model: Any) -> None:
    """Freeze the attention of every other layer."""
    for name, parameter in model.named_parameters():
        odd = any(f".{number}." in name for number in range(1, LAYERS, 2))
        parameter.requires_grad_(not ("attn" in name and odd))


FROZEN = {each.__name__: each for each in (frozen_first, frozen_last, norms_alone, attention_of_some)}


def adapters() -> dict[str, Callable[[], Any]]:
    """Return configurations of PEFT by name."""
    peft: Any = importlib.import_module("peft")

    projections = ["q_proj", "v_proj"]
    lora: dict[str, Any] = {"r": 4, "target_modules": projections, "init_lora_weights": False}
    return {
        "LoRA": lambda: peft.LoraConfig(**lora),
        "LoRA, every linear layer": lambda: peft.LoraConfig(**lora | {"target_modules": "all-linear"}),
        "LoRA, patterns of ranks": lambda: peft.LoraConfig(**lora, rank_pattern={"layers.1.self_attn.q_proj": 2}),
        "LoRA, patterns of scales": lambda: peft.LoraConfig(**lora, alpha_pattern={"layers.2.self_attn.v_proj": 32}),
        "LoRA, some layers": lambda: peft.LoraConfig(**lora, layers_to_transform=[1, 3]),
        "LoRA, whole modules beside it": lambda: peft.LoraConfig(**lora, modules_to_save=["lm_head"]),
        "rsLoRA": lambda: peft.LoraConfig(**lora, use_rslora=True),
        "DoRA": lambda: peft.LoraConfig(**lora, use_dora=True),
        "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], init_weights=False, vera_dropout=0.0),
        "IA3": lambda: peft.IA3Config(target_modules=projections, feedforward_modules=[], init_ia3_weights=False),
        "LN tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
        "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=projections, init_weights=False),
        "LoKr": lambda: peft.LoKrConfig(r=4, target_modules=projections, init_weights=False),
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One model: its type, and its frozen parts or adapters."""

    group: str
    kind: str
    change: str = ""

    @property
    def name(self) -> str:
        """Label of the row."""
        return f"{self.kind}, {self.change}" if self.change else self.kind


def rows() -> list[Row]:
    """List all models."""
    groups = {"alike": ALIKE, "numbered": NUMBERED, "alternating": ALTERNATING, "experts": SPARSE, "mixed": MIXED}
    plain = [Row(group, kind) for group, kinds in groups.items() for kind in kinds]
    frozen = [Row("frozen", kind, change) for kind in ("llama", "gpt2") for change in FROZEN]
    return [*plain, *frozen, *(Row("adapters", "llama", name) for name in adapters())]


def build(row: Row) -> Any:
    """Build the model of a row on the host."""
    import torch
    import transformers

    plain = tiny(row.kind, 0, causal=True)
    deep = {key: LAYERS for key in plain if key in ("num_hidden_layers", "n_layer", "num_layers") and plain[key] == 2}
    derived = {"layer_types", "mlp_layer_types"} if deep else set()
    deeper = {key: value for key, value in plain.items() if key not in derived} | deep | FIELDS.get(row.kind, {})
    fields = plain | FIELDS.get(row.kind, {}) if row.kind in SHALLOW else deeper
    config = transformers.AutoConfig.for_model(fields.pop("model_type", row.kind), **fields)
    config.use_cache = False
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    if row.group == "frozen":
        FROZEN[row.change](model)
    elif row.group == "adapters":
        peft: Any = importlib.import_module("peft")
        model = peft.get_peft_model(model, adapters()[row.change]())
    with torch.no_grad():
        for parameter in model.parameters():  # constant initial biases and scales would hide errors
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def loss(out: Any, targets: Any) -> Any:
    """Return the mean cross entropy of the tokens."""
    import torch

    return torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten())


def work(row: Row) -> dict[str, Any]:
    """Trace the model of a row and compare it."""
    import jax
    import torch

    from autoshard.exec.run.eager_check import check_eager
    from autoshard.program import from_torch

    start = time.process_time()
    model = build(row)
    ids, targets = (torch.randint(0, 256, (BATCH, SEQ)) for _ in range(2))
    try:
        program = from_torch(model, (), {"input_ids": ids}, train=True, loss=loss, targets=targets)
        check = check_eager(program)
    except UserError as error:
        return {"status": "refused", "text": str(error)}
    finally:
        jax.clear_caches()
    worst = check.worst
    if check.skipped or worst is None:
        return {"status": "not compared", "text": check.skipped}
    notes = [note for note in program.notes if "not scanned" in note]
    return {
        "status": "equal" if check.agrees else "differs",
        "gradients": check.compared.get("gradient", 0),
        "worst": worst.rel_diff,
        "at": f"{worst.kind} {worst.name}",
        "scanned": sum(len(program.weights[name]) > 1 for name in program.weights) > 0,
        "stacks": list(program.stacks),
        "text": " ".join(notes),
        "seconds": time.process_time() - start,
    }


def attempt(name: str) -> dict[str, Any]:
    """Compare the model of a name; an error is a row too."""
    warnings.simplefilter("ignore")
    try:
        return work(next(row for row in rows() if row.name == name))
    except Exception as error:
        return {"status": "raised", "text": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Write the rows as Markdown."""
    groups = {row.name: row.group for row in rows()}
    equal = sum(result["status"] == "equal" for result in found.values())
    lines = []
    for name, result in found.items():
        worst = f"{result['worst']:.1e} ({result['at']})" if "worst" in result else ""
        stacks = ", ".join(map(str, result.get("stacks", ())))
        cells = (groups[name], name, result["status"], result.get("gradients", ""), worst, stacks, result["text"])
        lines.append(map(plain, cells))
    return page(
        "# Layers of real models against eager torch",
        f"{equal} of {len(found)} models of transformers give the loss, gradients and buffers of eager torch.",
        grid("kind | model | result | gradients | largest difference | stacks of layers | remark", lines),
    )


def main() -> int:
    return Experiment(
        script=__file__,
        names=[row.name for row in rows()],
        work=attempt,
        table=table,
        is_wrong=lambda row: row["status"] in ("differs", "raised"),
    ).run()


if __name__ == "__main__":
    sys.exit(main())
