"""Small models of six families, with batches and losses, for runs under PyTorch/XLA."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A model with fresh weights, a maker of batches on the host, and the loss of a batch."""

    model: Any
    batch: Callable[[], tuple[Any, ...]]
    loss: Callable[..., Any]


VOCABULARY = 256


def mlp() -> Case:
    import torch

    layers = [torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)]
    return Case(
        torch.nn.Sequential(*layers),
        lambda: (torch.randn(64, 256), torch.randn(64, 256)),
        lambda model, x, y: torch.nn.functional.mse_loss(model(x), y),
    )


def cnn() -> Case:
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 16),
    )
    return Case(
        model,
        lambda: (torch.randn(16, 3, 16, 16), torch.randint(0, 16, (16,))),
        lambda model, x, y: nn.functional.cross_entropy(model(x), y),
    )


def _tokens() -> tuple[Any, ...]:
    import torch

    return (torch.randint(0, VOCABULARY, (8, 32)),)


def _language_loss(model: Any, ids: Any) -> Any:
    return model(input_ids=ids, labels=ids).loss


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return Case(GPT2LMHeadModel(config), _tokens, _language_loss)


_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    return Case(LlamaForCausalLM(LlamaConfig(**_DECODER)), _tokens, _language_loss)


def mixtral() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(MixtralConfig(**_DECODER, num_local_experts=4))
    model.set_experts_implementation("batched_mm")  # other implementations have data-dependent shapes
    return Case(model, _tokens, _language_loss)


def vit() -> Case:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8
    )
    config.num_labels = 16
    return Case(
        ViTForImageClassification(config),
        lambda: (torch.randn(16, 3, 32, 32), torch.randint(0, 16, (16,))),
        lambda model, x, y: model(pixel_values=x, labels=y).loss,
    )


MODELS: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "cnn": cnn,
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
    "mixtral": mixtral,
}


def optimizer(name: str, parameters: Any) -> Any:
    """Make an optimizer: `momentum` (SGD) or `adamw`."""
    import torch

    if name == "momentum":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-3)
