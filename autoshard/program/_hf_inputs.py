"""What a Hugging Face model is called with, for each kind of task."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from autoshard.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class HfTask:
    """How a model is called: the shapes of its batch, and the call."""

    batch: dict[str, Any]
    """Name -> `jax.ShapeDtypeStruct`, with `labels` when training."""
    call: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Makes the keyword arguments of the module from a batch."""
    seq: int | None
    """The number of tokens in one sequence."""
    tokens: int | None
    """Tokens of a step; None where a model has none (images)."""
    id_limit: int
    """Ids and labels stay below it."""
    notes: tuple[str, ...] = ()


def task_of(
    model: Any, name: str, *, batch: int, seq: int | None, image: int | None, train: bool, dtype: str
) -> HfTask:
    """The task of `model` by its main input: token ids (with a decoder or not), images, or audio features.

    Raises `UserError` for sizes that the model cannot take.
    """
    import jax
    import numpy as np

    config = model.config
    kind = model.main_input_name
    _positive("batch", batch)
    shape = jax.ShapeDtypeStruct
    floats = jax.numpy.dtype(dtype)
    if image is not None and kind != "pixel_values":
        raise UserError(f"--image is for models of images; `{name}` takes `{kind}`.")
    if kind == "pixel_values":
        if seq is not None:
            raise UserError(f"--seq is for models of tokens; `{name}` takes images, whose size --image gives.")
        size = image or getattr(config, "image_size", None) or 224
        _positive("image", size)
        fixed = getattr(config, "image_size", None)
        if fixed and size != fixed:
            raise UserError(f"--image {size} does not fit `{name}`, whose positions are for images of {fixed}.")
        data = {"pixel_values": shape((batch, config.num_channels, size, size), floats)}
        if train:
            data["labels"] = shape((batch,), np.int32)
        return HfTask(data, lambda d: {"pixel_values": d["pixel_values"]}, None, None, int(config.num_labels))

    limit = _positions(config)
    seq = min(limit or 1024, 1024) if seq is None else seq
    _positive("seq", seq)
    notes: list[str] = []
    if limit is not None and seq > limit:
        if _has_position_table(model):
            raise UserError(f"--seq {seq} is longer than the {limit} positions `{name}` has; give at most {limit}.")
        notes.append(f"The sequence of {seq} tokens is longer than the {limit} that `{name}` was trained with.")
    ids = shape((batch, seq), np.int32)
    labels = {"labels": ids} if train else {}
    vocabulary = int(config.get_text_config().vocab_size)
    if kind == "input_features":
        frames = 2 * config.max_source_positions
        data = {
            "input_features": shape((batch, config.num_mel_bins, frames), floats),
            "decoder_input_ids": ids,
            **labels,
        }
        keys = ("input_features", "decoder_input_ids")
    elif config.is_encoder_decoder:
        data = {"input_ids": ids, "decoder_input_ids": ids, **labels}
        keys = ("input_ids", "decoder_input_ids")
    elif kind == "input_ids":
        data, keys = {"input_ids": ids, **labels}, ("input_ids",)
    else:
        raise UserError(f"`{name}` takes `{kind}`, which is not supported; give the module through a Python file.")
    cached = hasattr(config, "use_cache")

    def call(given: Mapping[str, Any]) -> dict[str, Any]:
        return {key: given[key] for key in keys} | ({"use_cache": False} if cached else {})

    sequences = 2 if kind == "input_ids" and len(keys) > 1 else 1
    return HfTask(data, call, seq, batch * seq * sequences, vocabulary, tuple(notes))


def _positive(flag: str, value: Any) -> None:
    if not isinstance(value, int) or value < 1:
        raise UserError(f"--{flag} must be a positive whole number, got {value}.")


def _positions(config: Any) -> int | None:
    text = config.get_text_config()
    for field in ("max_target_positions", "max_position_embeddings", "n_positions"):
        if getattr(text, field, None):
            return int(getattr(text, field))
    return None


def _has_position_table(model: Any) -> bool:
    """True if positions are looked up in a learned table rather than computed."""
    tables = ("wpe", "position_embeddings", "embed_positions")
    return any(name.rsplit(".", 1)[-1] in tables for name, _ in model.named_modules())
