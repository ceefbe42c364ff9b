"""Programs of every family at a size that eight devices of one small machine run in about a tenth of a second."""

import functools
from collections.abc import Callable
from typing import Any

from autoshard.program import Program
from experiments.lib.programs import jax_decoders, jax_programs
from experiments.lib.programs.compile_programs import hf, llama, mixtral
from experiments.lib.programs.jax_case import Case, dense, f32, infer_program, layers, squares, train_program


DECODER = llama(2, 256, 704, 8, 4, 1024, head_dim=32)
WIDE = llama(1, 512, 1408, 8, 4, 1024, head_dim=64)
EXPERTS = mixtral(2, 256, 512, 8, 4, 8, 1024)
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 256,
    "d_ff": 1024,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "d_kv": 64,
    "vocab_size": 2048,
    "feed_forward_proj": "relu",
    "relative_attention_num_buckets": 32,
    "layer_norm_epsilon": 1e-6,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "n_positions": 512,
}
VIT = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_act": "gelu",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "image_size": 64,
    "patch_size": 8,
    "num_channels": 3,
    "layer_norm_eps": 1e-12,
    "qkv_bias": True,
    "num_labels": 16,
}
RESNET = {
    "model_type": "resnet",
    "architectures": ["ResNetForImageClassification"],
    "embedding_size": 32,
    "hidden_sizes": [64, 128],
    "depths": [2, 2],
    "layer_type": "bottleneck",
    "hidden_act": "relu",
    "downsample_in_first_stage": False,
    "num_channels": 3,
    "num_labels": 16,
}


def mlp() -> Case:
    """Make wide matmuls on few examples: parameters are larger than activations."""

    def forward(params: Any, batch: Any) -> Any:
        return dense(params, batch["x"])

    return Case(layers([512, 1024, 1024, 512]), {"x": f32(256, 512), "y": f32(256, 512)}, forward, squares(forward))


def deep_mlp() -> Case:
    """Make narrow matmuls on many examples: activations are larger than parameters."""

    def forward(params: Any, batch: Any) -> Any:
        return dense(params, batch["x"])

    return Case(layers([256] * 7), {"x": f32(4096, 256), "y": f32(4096, 256)}, forward, squares(forward))


def _hf(config: dict[str, Any], train: bool, **options: Any) -> Callable[[], Program]:
    mode = {"train": True, "optimizer": "adamw"} if train else {"infer": True}
    return hf(config, dtype="float32", **mode, **options)


def _case(name: str, case: Callable[[], Case], mode: str) -> Callable[[], Program]:
    if mode == "infer":
        return lambda: infer_program(name, case())
    return lambda: train_program(name, case(), mode)


PROGRAMS: dict[str, tuple[str, Callable[[], Program]]] = {
    "decoder, train": ("decoder", _hf(DECODER, True, batch=16, seq=128)),
    "decoder, long, train": ("decoder", _hf(DECODER, True, batch=8, seq=256)),
    "decoder, wide, train": ("decoder", _hf(WIDE, True, batch=8, seq=16)),
    "decoder, infer": ("decoder", _hf(DECODER, False, batch=16, seq=256)),
    "jax decoder, train": ("scanned decoder", _case("scanned decoder", lambda: jax_decoders.decoder(True), "adamw")),
    "experts, train": ("experts", _hf(EXPERTS, True, batch=8, seq=64)),
    "experts, infer": ("experts", _hf(EXPERTS, False, batch=16, seq=64)),
    "T5, train": ("encoder-decoder", _hf(T5, True, batch=16, seq=64)),
    "ViT, train": ("ViT", _hf(VIT, True, batch=16)),
    "ViT, infer": ("ViT", _hf(VIT, False, batch=32)),
    "ResNet, train": ("convnet", _hf(RESNET, True, batch=16)),
    "U-Net, train": ("convnet", _case("u-net", jax_programs.unet, "train")),
    "recurrence, train": (
        "recurrence",
        _case("recurrence", functools.partial(jax_programs.state_space, 256, 512), "train"),
    ),
    "recurrence, infer": (
        "recurrence",
        _case("recurrence", functools.partial(jax_programs.state_space, 256, 512), "infer"),
    ),
    "MLP, train": ("MLP", _case("mlp", mlp, "adamw")),
    "deep MLP, train": ("MLP", _case("deep mlp", deep_mlp, "train")),
    "deep MLP, infer": ("MLP", _case("deep mlp", deep_mlp, "infer")),
}
"""Family, and a function that builds the program, by name."""
