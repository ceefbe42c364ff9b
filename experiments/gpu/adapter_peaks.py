"""Measured peaks of LoRA on one A100, compared with eager torch's saved tensors and with plans.

    python experiments/gpu/adapter_peaks.py [--only TEXT ...] [--again] [--table]

The runs are litgpt's, without recomputation. One layer is written here as litgpt writes it. Eager torch runs it on the
CPU in bfloat16, and `saved_tensors_hooks` count what it saves. The plan is of transformers' model with the same dims,
which XLA runs.
"""

import dataclasses
import sys
from typing import Any

from experiments.lib.harness import Experiment, Rows, grid, page


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with parallel residuals, and its runs."""

    fields: dict[str, Any]
    """Configuration of transformers."""
    targets: str
    rotary: int
    """Rotated features of a head."""
    has_one_norm: bool
    """True if attention and MLP have one norm in common."""
    parameters: int
    tokens: int
    """Tokens of the longest sequence, where the peak is."""
    peaks: dict[int, float]
    """Measured peak in GB by microbatch."""


COMMON: dict[str, Any] = {"num_attention_heads": 32, "tie_word_embeddings": False, "layer_norm_eps": 1e-5}
PHI = {"model_type": "phi", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24}
PHI |= {"vocab_size": 51200, "partial_rotary_factor": 0.5, "hidden_act": "gelu_pytorch_tanh"} | COMMON
STABLELM = {"model_type": "gpt_neox", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 16}
STABLELM |= {"vocab_size": 50688, "rotary_pct": 0.25, "hidden_act": "gelu", "use_parallel_residual": True} | COMMON

# Lightning-AI/litgpt tutorials/resource-tables.md, 2023-10-20: A100-SXM4-40GB, bf16-true, Alpaca.
MODELS = {
    "phi-1.5": Model(PHI, "q_proj/v_proj", 32, True, 1_418_270_720, 1044, {1: 4.82, 2: 6.76, 4: 10.68}),
    "StableLM 3B": Model(STABLELM, "query_key_value", 32, False, 3_637_321_728, 1034, {1: 9.69, 2: 12.1, 4: 16.92}),
}

SHORT = 64
"""Tokens of the layer that is counted; all that it saves grows with them."""

LOGITS = 4 + 4
"""Bytes of a logit when the backward pass begins: Fabric's float32 copy, which the loop holds, and log-softmax."""


def saved_per_token(model: Model) -> float:
    """Return the bytes for each token that one layer saves in eager torch, as litgpt writes it."""
    import torch
    from torch.nn import functional

    width, heads, inner = (model.fields[k] for k in ("hidden_size", "num_attention_heads", "intermediate_size"))
    size = width // heads

    def weight(*shape: int, trained: bool = False) -> Any:
        return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=trained)

    qkv, out, up, down = weight(3 * width, width), weight(width, width), weight(inner, width), weight(width, inner)
    first, second = weight(16, width, trained=True), weight(2 * width, 8, trained=True)
    scale = weight(width)
    cos = torch.zeros(SHORT, model.rotary)
    index = torch.cat([torch.arange(width), torch.arange(2 * width, 3 * width)])
    constants = {each.untyped_storage().data_ptr() for each in (qkv, out, up, down, first, second, scale, cos, index)}

    def norm(x: Any) -> Any:
        return functional.layer_norm(x, (width,), scale, scale)

    def rotated(x: Any) -> Any:
        turned, half = x[..., : model.rotary], model.rotary // 2
        other = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
        return torch.cat(((turned * cos + other * cos).type_as(x), x[..., model.rotary :]), dim=-1)

    def layer(x: Any) -> Any:
        normed = norm(x)
        inside = functional.linear(torch.native_dropout(normed, 0.05, True)[0], first)
        update = functional.conv1d(inside.transpose(1, 2), second.unsqueeze(-1), groups=2).transpose(1, 2)
        update = x.new_zeros(1, SHORT, 3 * width).index_copy(-1, index, update)
        joined = (functional.linear(normed, qkv) + update * 2.0).view(1, SHORT, heads, 3, size)
        q, k, v = joined.permute(0, 2, 3, 1, 4).unbind(2)
        mixed = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        attended = functional.linear(mixed.transpose(1, 2).reshape(1, SHORT, width), out)
        other = normed if model.has_one_norm else norm(x)
        return functional.linear(functional.gelu(functional.linear(other, up), approximate="tanh"), down) + attended + x

    storages: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = layer(weight(1, SHORT, width, trained=True))
    del result
    return sum(each.nbytes() for place, each in storages.items() if place not in constants) / SHORT


def judge(name: str) -> dict[str, Any]:
    """Count and plan one run."""
    import autoshard
    from autoshard.program.hf.hf_program import from_config

    kind, _, batch = name.rpartition(" x")
    model, size = MODELS[kind], int(batch)
    layers, words = model.fields["num_hidden_layers"], model.fields["vocab_size"]
    a_token = layers * saved_per_token(model) + LOGITS * words
    options: dict[str, Any] = {"batch": size, "seq": model.tokens, "lora": f"r=8,targets={model.targets}"}
    options |= {"param_dtype": "bfloat16", "state_dtype": "bfloat16", "attention": "cudnn", "remat": "none"}
    program = from_config({"_name_or_path": kind, **model.fields}, train=True, **options)
    plan = autoshard.plan(program, topology="a100:1")
    return {
        "measured_gb": model.peaks[size],
        "counted_gb": (2 * model.parameters + size * model.tokens * a_token) / 1e9,
        "planned_gb": plan.prediction.peak_bytes / 1e9,
    }


def table(rows: Rows) -> str:
    """Write the page of all runs."""
    cells = []
    for name, row in rows.items():
        shares = (f"{row[key] / row['measured_gb'] - 1:+.1%}" for key in ("counted_gb", "planned_gb"))
        cells.append([name, *(f"{row[f'{key}_gb']:.2f}" for key in ("measured", "counted", "planned")), *shares])
    return page(
        "# Peaks of LoRA compared with measured ones",
        (
            "One A100, rank 8 on queries and values, bfloat16, no recomputation; GB by microbatch. `counted` is what "
            "eager torch saves in litgpt's code, with the weights. `planned` is the peak of transformers' model under "
            "XLA. Litgpt holds more: the update that `index_copy` copies, queries and keys twice (values are a "
            "view of all three), dropout's mask, and logits in float32 with their log-softmax."
        ),
        grid("run | measured: | counted: | planned: | counted off by: | planned off by:", cells),
    )


def main() -> int:
    names = [f"{kind} x{batch}" for kind, model in MODELS.items() for batch in model.peaks]
    return Experiment(script=__file__, names=names, work=judge, table=table).run()


if __name__ == "__main__":
    sys.exit(main())
