"""`hf:CONFIG`: a Hugging Face architecture from its configuration alone, without weights and without the network."""

import importlib
import logging
from typing import Any

from autoshard.errors import UserError
from autoshard.program import _meta, _train
from autoshard.program._config import read_config
from autoshard.program._program import Program
from autoshard.program._torch import TrainOptions, check_remat, torch_program
from autoshard.program._torch_function import TorchFunction, probe


_NOT_FIELDS = {"architectures", "model_type", "torch_dtype", "dtype", "transformers_version"}

_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "f32": "float32", "bfloat16": "bfloat16"} | {
    "float32": "float32",
    "float16": "float16",
}


def from_config(
    config: str,
    *,
    train: bool | None = None,
    infer: bool | None = None,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    param_dtype: str | None = None,
    state_dtype: str | None = None,
    remat: str | None = None,
    optimizer: str | None = None,
    capacity_factor: float | None = None,
    scan: bool = True,
) -> Program:
    """One training step, or one forward pass, of the model that `config` names.

    `batch` sequences (8) of `seq` tokens (the model's context, at most 1024 if not given). `dtype` is the compute dtype
    (bfloat16). Training stores parameters and optimizer moments in float32 unless `param_dtype` or `state_dtype` say
    otherwise; inference stores parameters in `dtype`. `remat`: `none`, `dots` or `full`. `optimizer`: `adamw` or `sgd`.
    `capacity_factor`: slots of an expert over its mean number of tokens, for mixtures of experts (1.25).

    Raises `UserError` for a configuration or an option that cannot be used.
    """
    import jax
    import numpy as np

    name, fields = read_config(config)
    if train and infer:
        raise UserError("--train and --infer exclude each other; give one of them.")
    training = bool(train)
    compute = _dtype(dtype or "bfloat16", "dtype")
    stored = _dtype(param_dtype, "param_dtype") if param_dtype else ("float32" if training else compute)
    moments = _dtype(state_dtype or "float32", "state_dtype")
    remat = remat or "none"
    check_remat(remat)
    batch = 8 if batch is None else batch
    model = build_model(name, fields, compute)
    limit = _context(model.config)
    seq = min(limit or 1024, 1024) if seq is None else seq
    for flag, value in (("batch", batch), ("seq", seq)):
        if not isinstance(value, int) or value < 1:
            raise UserError(f"--{flag} must be a positive whole number, got {value}.")
    notes: list[str] = []
    if limit is not None and seq > limit:
        if _has_position_table(model):
            raise UserError(f"--seq {seq} is longer than the {limit} positions `{name}` has; give at most {limit}.")
        notes.append(f"The sequence of {seq} tokens is longer than the {limit} that `{name}` was trained with.")

    function = TorchFunction(model, compute_dtype=compute if compute != stored else None, remat=remat, scan=scan)
    function.capacity_factor = capacity_factor
    ids = jax.ShapeDtypeStruct((batch, seq), np.int32)
    data = {"input_ids": ids, "labels": ids} if training else {"input_ids": ids}

    def logits(params: Any, inputs: Any, *buffers: Any) -> Any:
        out = function(
            params, (), {"input_ids": inputs["input_ids"], "use_cache": False}, buffers[0] if buffers else None
        )
        return out["logits"]

    def loss(params: Any, inputs: Any, *buffers: Any) -> Any:
        return _train.token_loss(logits(params, inputs, *buffers), inputs["labels"])

    run = loss if training else logits
    function.settle(lambda: probe(function, run, data, name))
    return torch_program(
        function,
        run,
        data,
        name=f"{name} {'training' if training else 'inference'}",
        train=TrainOptions(optimizer or "adamw", stored, moments) if training else None,
        param_dtype=stored,
        id_limit=int(model.config.get_text_config().vocab_size),
        tokens=batch * seq,
        notes=notes,
    )


def build_model(name: str, fields: dict[str, Any], dtype: str) -> Any:
    """The torch module of a configuration, weights on the meta device, in evaluation mode."""
    import torch

    _quiet()
    kind = fields["model_type"].replace("-", "_")
    package = f"transformers.models.{kind}"
    try:
        importlib.import_module(f"{package}.configuration_{kind}")
        modeling = importlib.import_module(f"{package}.modeling_{kind}")
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("transformers"):
            raise UserError(
                f"`{name}`: the installed transformers has no model type `{fields['model_type']}`; "
                "check `model_type` in the configuration."
            ) from None
        raise
    architecture = (fields.get("architectures") or [_default_architecture(modeling)])[0]
    if not architecture or not hasattr(modeling, architecture):
        raise UserError(f"`{name}`: transformers offers no `{architecture}` for model type `{fields['model_type']}`.")
    model_class = getattr(modeling, architecture)
    from autoshard.program._attention import register_hf

    register_hf()
    known = {key: value for key, value in fields.items() if not key.startswith("_") and key not in _NOT_FIELDS}
    before = torch.get_default_dtype()
    try:
        config = model_class.config_class(**known)
        config._attn_implementation = "autoshard"
        torch.set_default_dtype(getattr(torch, dtype))
        model = _meta.build(lambda: model_class(config))
    except UserError:
        raise
    except Exception as error:  # whatever a hand-written configuration makes the model's own code raise
        lines = str(error).strip().splitlines()
        raise UserError(
            f"`{name}` cannot be built: {type(error).__name__}: {lines[0] if lines else ''}".rstrip() + "."
        ) from error
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def _default_architecture(modeling: Any) -> str:
    names = [n for n in getattr(modeling, "__all__", []) if n.endswith(("ForCausalLM", "LMHeadModel"))]
    return names[0] if names else ""


def _context(config: Any) -> int | None:
    text = config.get_text_config()
    return getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)


def _has_position_table(model: Any) -> bool:
    """True if positions are looked up in a learned table rather than computed."""
    return any(
        name.rsplit(".", 1)[-1] in ("wpe", "position_embeddings", "embed_positions")
        for name, _ in model.named_modules()
    )


def _dtype(text: str, flag: str) -> str:
    if text not in _DTYPES:
        raise UserError(f"--{flag.replace('_', '-')} `{text}` is not supported; use bfloat16, float32 or float16.")
    return _DTYPES[text]


def _quiet() -> None:
    """transformers logs advice about kernels and weights that does not apply to a model without weights."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
