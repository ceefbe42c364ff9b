"""Call arguments of a Hugging Face model for each kind of task."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from autoshard.errors import UserError
from autoshard.program.hf.extra_inputs import (
    decoder_shape,
    forms_of,
    further_data_shapes,
    further_text_inputs,
    in_form,
    text_shape,
)
from autoshard.program.hf.media_inputs import Media, media_of


@dataclasses.dataclass(frozen=True, slots=True)
class HfTask:
    """The shapes of a model's batch, and the way to call the model with it."""

    batch: dict[str, Any]
    """Name -> `jax.ShapeDtypeStruct`, with `labels` when training."""
    call: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Function from a batch to the keyword arguments of the module."""
    seq: int | None
    """The number of tokens in one sequence; None for a model without tokens (images)."""
    tokens: int | None
    """Number of tokens in a step; encoder and decoder tokens both count. None for a model without tokens."""
    id_limit: int
    """Upper bound, exclusive, of ids and labels: the vocabulary, or the number of labels of a model without tokens."""
    notes: tuple[str, ...] = ()
    """Sentences for reports: image tokens, and sequences longer than those of training."""


def tasks_of(
    model: Any, name: str, *, batch: int, seq: int | None, image: int | None, train: bool, dtype: str
) -> tuple[HfTask, ...]:
    """Return the tasks of `model`, the likeliest first: token ids (with a decoder or not), images, sound or series.

    There are several because models differ in the form of their inputs; the later ones are for models on which the
    first does not run. A model of text with images that it does not require has text alone first.

    - `name`: name of the model in errors.
    - `batch`: number of examples.
    - `seq`: tokens of a sequence; None for the configuration's number of positions, at most 1024, or 1024 without one.
    - `image`: pixels of an image's side; None for the configuration's.
    - `train`: True to add `labels`, int32: one for each token, or for each example of a model without tokens.
    - `dtype`: dtype of float inputs.

    Raises `UserError` for sizes that are not positive, and for an image size or `seq` of a model without images or
    tokens. An unsupported main input raises it too, and a `seq` beyond a learned position table. Longer sequences of
    other models get a note.
    """
    import jax

    config = model.config
    names = set(inspect.signature(model.forward).parameters)
    _positive("batch", batch)
    floats = jax.numpy.dtype(dtype)
    kind = _main(model, names)
    vocabulary = _vocabulary(config)
    text = "input_ids" in names and (kind == "input_ids" or vocabulary is not None and _has_towers(config))
    text = text or "input_ids" in _required(model)
    sees = kind != "input_ids" or text and (_has_towers(config) or "pixel_values" in _required(model))
    if image is not None and not (sees and names & {"pixel_values", "pixel_values_videos"}):
        raise UserError(f"--image is for models of images; `{name}` takes `{kind}`.")
    if image is not None:
        _positive("image", image)
    limit = _positions(config)
    length = min(limit or 1024, 1024) if seq is None else seq
    arguments = names - ({"past_values"} if text else set())
    media = media_of(config, arguments, name, batch=batch, image=image, room=length // 2 if text else None)
    media = media or Media({})
    if not text and not media.shapes:
        raise UserError(f"`{name}` takes `{kind}`, which is not supported; give the module through a Python file.")
    given = (text, seq, length, limit)
    seen = [media] if sees else [Media({}), *([media] if "pixel_values" in media.shapes else [])]
    return tuple(
        _task(
            model,
            name,
            in_form(each, form, names, config),
            (*given, form.masks and not each.shapes),
            batch=batch,
            train=train,
            floats=floats,
        )
        for each in seen
        for form in forms_of(names, each)
    )


def _task(
    model: Any,
    name: str,
    media: Media,
    given: tuple[bool, int | None, int, int | None, bool],
    *,
    batch: int,
    train: bool,
    floats: Any,
) -> HfTask:
    """Return the task of one form of inputs; raise `UserError` for an impossible sequence length.

    `given` has five entries:

    - True if the model reads ids.
    - The requested number of tokens, or None.
    - The number of tokens to use.
    - The number of positions of the model, or None.
    - True to pass masks that hide no token.

    `name` is the model's name in errors, `media` are its images, sound or series, and `floats` is the dtype of float
    inputs. `train` adds labels.
    """
    import jax
    import numpy as np

    config, shape = model.config, jax.ShapeDtypeStruct
    names = set(inspect.signature(model.forward).parameters)
    kind = _main(model, names)
    vocabulary = _vocabulary(config)
    text, seq, length, limit, masks = given
    ids, other = further_data_shapes(names, config, batch, length if text else None)
    data = {key: shape(size, floats) for key, size in (media.shapes | other).items()}
    data |= {key: shape(size, np.int32) for key, size in ids.items()}
    decodes = bool(config.is_encoder_decoder) and "decoder_input_ids" in names
    if not text and not decodes:
        if seq is not None:
            raise UserError(f"--seq is for models of tokens; `{name}` takes {_TAKES.get(kind, f'`{kind}`')}.")
        keys = tuple(data)
        if train:
            data["labels"] = shape((batch,), np.int32)
        plain = _always(names, config, None, train)
        return HfTask(
            data,
            lambda d: {key: d[key] for key in keys} | media.fixed | plain,
            None,
            None,
            int(vocabulary or getattr(config, "num_labels", 2)),
        )

    seq = length
    _positive("seq", seq)
    notes: list[str] = []
    if limit is not None and seq > limit:
        if _has_position_table(model):
            raise UserError(f"--seq {seq} is longer than the {limit} positions `{name}` has; give at most {limit}.")
        notes.append(f"The sequence of {seq} tokens is longer than the {limit} that `{name}` was trained with.")
    texts = {"input_ids": text_shape(config, batch, seq)} if text else {}
    texts |= {"decoder_input_ids": decoder_shape(config, batch, seq)} if decodes else {}
    data |= {key: shape(size, np.int32) for key, size in texts.items()}
    if train:
        data["labels"] = shape((batch, seq), np.int32)
    keys = tuple(each for each in data if each != "labels")
    token = _image_token(config) if text and "pixel_values" in data else None
    places = 0 if token is None or media.tokens is None else min(media.tokens, seq - 1)
    if places:
        notes.append(f"The first {places} tokens of each sequence are those of its image.")
    plain = _always(names, config, seq, train) | further_text_inputs(names, config, (batch, seq), masks)
    if places and "mm_token_type_ids" in names:
        kinds = np.zeros((batch, seq), np.int64)
        kinds[:, :places] = 1
        plain["mm_token_type_ids"] = kinds

    def call(given: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {key: given[key] for key in keys} | media.fixed | plain
        if places:
            arguments["input_ids"] = _with_image(arguments["input_ids"], places, token)
        return arguments

    codes = getattr(config, "codebook_vocab_size", None)
    if codes is not None and len(texts.get("input_ids", ())) == 3:  # codes of sound next to tokens
        vocabulary = min(int(vocabulary or codes), int(codes))
    sequences = 2 if len(texts) > 1 else 1
    return HfTask(data, call, seq, batch * seq * sequences, int(vocabulary or 2), tuple(notes))


_TAKES = {
    "pixel_values": "images, whose size --image gives",
    "pixel_values_videos": "videos, whose size its configuration gives",
    "input_values": "sound",
    "input_features": "spectra of sound",
}
"""Main input -> the words for it in the error of an unusable `--seq`."""


def _main(model: Any, names: set[str]) -> str:
    """Return the main input that the class declares, or else the first known one among `names`.

    A declaration counts if it is an argument, and known unless no argument is known. Without any known argument, the
    result is the alphabetically first one, or `nothing`.
    """
    known = ("input_ids", "pixel_values", "input_features", "input_values", "flattened_patches", "past_values")
    declared = model.main_input_name
    declared = declared[0] if isinstance(declared, (list, tuple)) else declared
    if declared in names and (declared in known or declared in _TAKES or not names & set(known)):
        return str(declared)
    return next((each for each in known if each in names), next(iter(sorted(names)), "nothing"))


def _required(model: Any) -> set[str]:
    """Return the arguments of a model that have no default."""
    given = inspect.signature(model.forward).parameters.values()
    return {each.name for each in given if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD}


def _always(names: set[str], config: Any, seq: int | None, train: bool) -> dict[str, Any]:
    """Return the arguments that are equal for every batch: `use_cache=False`, and `return_loss=True` when training.

    Each is present only if the model takes it. A `use_cache` that `kwargs` pass on needs a model with tokens (`seq`).
    """
    caches = hasattr(config, "use_cache") or hasattr(_text(config), "use_cache") and "kwargs" in names
    arguments = {"use_cache": False} if "use_cache" in names or caches and seq else {}
    return arguments | ({"return_loss": True} if train and "return_loss" in names else {})


def _text(config: Any, decoder: bool | None = None) -> Any:
    """Return the configuration of the text; of several, as for an encoder and a decoder tower, that of the decoder.

    `decoder` is the argument of `get_text_config`. If nothing fits, the result is `config`.
    """
    try:
        return config.get_text_config(decoder=decoder)
    except ValueError:
        candidates = [getattr(config, key, None) for key in ("decoder", "text_encoder", "text_config")]
        return next((part for part in candidates if part is not None), config)


def _has_towers(config: Any) -> bool:
    """Return True if a model has a vision or audio tower in addition to its text model.

    A configuration without fields for towers counts by its image token.
    """
    parts = [config, getattr(config, "vlm_config", None)]
    towers = ("vision_config", "audio_config")
    there = any(hasattr(part, key) for part in parts for key in towers)
    keys = towers if there else ("image_token_id", "image_token_index")  # towers may be left out
    return any(getattr(part, key, None) is not None for part in parts for key in keys)


def _vocabulary(config: Any) -> int | None:
    """Return the vocabulary size of a configuration, its text part or its decoder; None if none states one."""
    for part in (config, _text(config), _text(config, decoder=True)):
        value = getattr(part, "vocab_size", None) or getattr(part, "text_vocab_size", None)
        if isinstance(value, int):
            return value
    return None


def _image_token(config: Any) -> int | None:
    """Return the id of the token that stands for a part of an image; None without one."""
    for field in ("image_token_id", "image_token_index"):
        if isinstance(getattr(config, field, None), int):
            return int(getattr(config, field))
    return None


def _with_image(ids: Any, places: int, token: int | None) -> Any:
    """Return ids [B, S] with the image token at the first `places` positions."""
    import jax
    import jax.numpy as jnp

    place = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    return jnp.where(place < places, jnp.asarray(token, ids.dtype), ids)


def _positive(flag: str, value: Any) -> None:
    """Raise `UserError` unless the value of `--flag` is an integer of at least 1."""
    if not isinstance(value, int) or value < 1:
        raise UserError(f"--{flag} must be a positive whole number, got {value}.")


def _positions(config: Any) -> int | None:
    """Return the number of positions of the text model, from the first field that has one; None without."""
    text = _text(config)
    for field in ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(text, field, None)
        if isinstance(value, (int, float)) and value > 0:
            return int(value)
    return None


def _has_position_table(model: Any) -> bool:
    """Return True if positions are looked up in a learned table rather than computed, by the names of submodules."""
    tables = ("wpe", "position_embedding", "position_embeddings", "embed_positions")
    return any(name.rsplit(".", 1)[-1] in tables for name, _ in model.named_modules())
