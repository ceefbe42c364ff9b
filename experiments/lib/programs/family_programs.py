"""Every family of programs in its small form, by name and mode, for `families.py`."""

from collections.abc import Callable
from typing import Any

from autoshard.program import Program, from_torch, open_source


MESHES = {"8": {"data": 8}, "4x2": {"data": 4, "model": 2}, "2x2x2": {"data": 2, "model": 2, "axis2": 2}}

DECODERS = ("gpt2-tiny", "llama-tiny", "gemma2-tiny", "mixtral-tiny", "deepseek-v3-tiny")
TEXTS = {"bert-tiny": 64, "t5-tiny": 64, "whisper-mini": 32}
"""Sequence length, by configuration."""
IMAGES = ("vit-tiny", "resnet-tiny")
BATCH, SEQ = 16, 128
OPTIMIZERS = {"train": "momentum", "adamw": "adamw"}
"""Optimizer by mode; the state of SGD with momentum after one step equals the gradient."""


def _hf(config: str, **sizes: int) -> Callable[[str], Program]:
    def make(mode: str) -> Program:
        options: dict[str, Any] = {"batch": BATCH, "dtype": "float32", **sizes}
        if mode in OPTIMIZERS:
            options |= {"train": True, "optimizer": OPTIMIZERS[mode]}
        elif mode != "infer":
            options |= {"serve": mode}
        return open_source(f"hf:{config}", **options)

    return make


def _jax(name: str) -> Callable[[str], Program]:
    def make(mode: str) -> Program:
        from experiments.lib.programs import jax_case, jax_decoders, jax_programs

        if name == "decode step":
            return jax_decoders.decode_step()
        if name in jax_programs.MODULES:
            return jax_programs.MODULES[name](mode)
        case = jax_programs.CASES[name]()
        if mode == "infer":
            return jax_case.infer_program(name, case)
        return jax_case.train_program(name, case, mode)

    return make


def _torch(name: str, module: Callable[[], Any], shape: tuple[int, ...], labels: int) -> Callable[[str], Program]:
    def make(mode: str) -> Program:
        import torch

        x = torch.empty(shape, device="meta")
        if mode == "infer":
            return from_torch(module(), x, name=name)
        targets = torch.empty((shape[0], labels), device="meta")
        return from_torch(
            module(),
            x,
            name=name,
            train=True,
            targets=targets,
            optimizer=OPTIMIZERS[mode],
            loss=torch.nn.functional.mse_loss,
        )

    return make


def _torch_mlp() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64)).to("meta")


def _torch_cnn() -> Any:
    from torch import nn

    def block(a: int, b: int) -> list[Any]:
        return [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 32)]
    return nn.Sequential(*block(3, 32), *block(32, 64), *head).to("meta")


STEPS = ("train", "infer")
JAX = (
    *("mlp", "scanned decoder", "remat policy", "nnx module", "equinox module", "state space", "graph network"),
    *("embedding tables", "u-net", "moe einsum", "moe sort", "moe ragged"),
)
PROGRAMS: dict[str, tuple[Callable[[str], Program], tuple[str, ...]]] = {
    **{f"hf:{c}": (_hf(c, seq=SEQ), (*STEPS, "prefill", "decode")) for c in DECODERS},
    **{f"hf:{c}": (_hf(c, seq=n), STEPS) for c, n in TEXTS.items()},
    **{f"hf:{c}": (_hf(c), STEPS) for c in IMAGES},
    **{f"jax {name}": (_jax(name), STEPS) for name in JAX},
    "jax decode step": (_jax("decode step"), ("decode",)),
    "torch mlp": (_torch("mlp", _torch_mlp, (128, 128), 64), STEPS),
    "torch cnn": (_torch("cnn", _torch_cnn, (16, 3, 32, 32), 32), STEPS),
}
"""A function from the mode to the program, and the program's modes, by name."""

for _name in ("hf:gpt2-tiny", "hf:llama-tiny", "jax mlp", "jax scanned decoder"):
    PROGRAMS[_name] = (PROGRAMS[_name][0], (*PROGRAMS[_name][1], "adamw"))


def make(name: str, mode: str) -> Program:
    return PROGRAMS[name][0](mode)
