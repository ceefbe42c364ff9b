"""Media inputs of models: images, videos, sound and series, in the shapes that their configurations give."""

import dataclasses
import math
from typing import Any

from autoshard.errors import UserError


SECOND = 16_000
"""Samples in a second of sound for speech models."""


@dataclasses.dataclass(frozen=True, slots=True)
class Media:
    """Media inputs of one batch by name."""

    shapes: dict[str, tuple[int, ...]]
    """Shapes of the float inputs that are data."""
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Inputs that follow from sizes alone, as numpy arrays."""
    tokens: int | None = None
    """Number of tokens that an image has in a text, if the text has a token for images."""


def media_of(
    config: Any, names: set[str], name: str, *, batch: int, image: int | None, room: int | None
) -> Media | None:
    """Return the images, sound or series among a model's inputs `names`; None if it has none.

    - `config`: the model's configuration.
    - `name`: name of the model in errors.
    - `batch`: number of examples.
    - `image`: pixels of an image's side; None for the configuration's.
    - `room`: most tokens of a text for an image that has one for each patch; None without a text.

    Raises `UserError` for a size of images that its positions do not fit.
    """
    import numpy as np

    if {"pixel_values", "image_grid_thw"} <= names:
        media = _patches(config, batch, image, room)
        if "image_merge_sizes" in names:
            media.fixed["image_merge_sizes"] = np.full(batch, _merge(config), np.int64)
        return media
    if {"input_ids", "pixel_values", "target_sizes"} <= names:
        return _packed_row(config, batch, image, room)
    if {"pixel_values", "spatial_shapes"} <= names:
        return _shaped_patches(config, batch, image)
    for key, build in (
        ("flattened_patches", _flattened),
        ("pixel_values", _images),
        ("pixel_values_videos", _videos),
        ("input_features", _features),
        ("input_values", _sound),
        ("past_values", _series),
    ):
        samples = "input_values" in names and hasattr(getattr(config, "encoder", None), "conv_dim")
        if key in names and not (key == "input_features" and samples):
            return build(config, names, name, batch, image, room)
    return None


def _first(config: Any, *fields: str, default: Any = None) -> Any:
    """Return the first of the fields that is not None in the configuration or one of its towers', else `default`.

    The configuration itself is searched for all fields first, then the parts in the order of `_parts`.
    """
    for part in _parts(config):
        for field in fields:
            value = getattr(part, field, None)
            if value is not None:
                return value
    return default


def _parts(config: Any) -> list[Any]:
    """Return the configuration, the nested ones of its towers, and those within these."""
    towers = ("vision_config", "image_encoder", "backbone_config", "encoder_config", "audio_config", "speech_config")
    configs = [config] + [part for key in towers if (part := getattr(config, key, None)) is not None]
    encoder = getattr(config, "encoder", None)
    configs += [encoder] if hasattr(encoder, "model_type") else []
    within = [part for each in configs[1:] for part in getattr(each, "__dict__", {}).values()]
    within = [part for part in within if hasattr(part, "model_type")]
    prompt = getattr(config, "prompt_encoder_config", None)  # for models that are prompted with points of an image
    return [*configs, *within, *([] if prompt is None else [prompt])]


def _size(config: Any, name: str, image: int | None) -> tuple[int, int]:
    """Return height and width of images in pixels: the configuration's, else `image`, else 224.

    Raises `UserError`, with `name` as the model's name, if `image` differs from a fixed size.
    """
    fixed = _first(config, "image_size", "crop_size")
    ratios = getattr(config, "scaled_images_ratios", None)  # smaller copies, whose patches are images
    if ratios and isinstance(getattr(config, "patch_size", None), int):
        fixed = int(config.patch_size / min(ratios))
    if isinstance(fixed, (list, tuple)):
        high, wide = (int(fixed[0]), int(fixed[-1]))
    elif isinstance(fixed, dict):
        high, wide = int(fixed.get("height", 224)), int(fixed.get("width", 224))
    else:
        high = wide = int(fixed or image or 224)
    if image is not None and fixed and (high, wide) != (image, image):
        raise UserError(f"--image {image} does not fit `{name}`, whose positions are for images of {high}.")
    return high, wide


def _channels(config: Any) -> int:
    """Return the number of channels of images, by default 3."""
    value = _first(config, "num_channels", "in_channels", "in_chans", "num_input_channels", default=3)
    return int(value) if isinstance(value, int) else 3


def _images(config: Any, names: set[str], name: str, batch: int, image: int | None, room: int | None) -> Media:
    """Return images [B, C, H, W], with frames or tiles before C if the configuration has a number of them.

    Sizes of images are added if the model accepts them. Tokens are the configuration's, else the number of patches;
    None without a patch size.
    """
    import numpy as np

    size, channels = _size(config, name, image), _channels(config)
    frames = getattr(config, "num_frames", None) if "input_ids" not in names else None
    fixed: dict[str, Any] = {}
    pinpoints = _first(config, "image_grid_pinpoints")
    if "image_sizes" in names and pinpoints and not frames:  # tiles of a larger image, and a small copy of it
        high, wide = (int(each) for each in pinpoints[0])
        frames = (high // size[0]) * (wide // size[1]) + 1
        fixed["image_sizes"] = np.array([[high, wide]] * batch, np.int64)
    elif "image_sizes" in names:
        fixed["image_sizes"] = np.array([size] * batch, np.int64)
    shape = (batch, *((int(frames),) if frames else ()), channels, *size)
    patch = _first(config, "patch_size")
    tokens = _first(config, "mm_tokens_per_image", "image_seq_length", "image_seq_len")
    if tokens is None and isinstance(patch, int):
        tokens = (size[0] // patch) * (size[1] // patch)
    return Media({"pixel_values": shape}, fixed, None if tokens is None else int(tokens))


def _patches(config: Any, batch: int, image: int | None, room: int | None) -> Media:
    """Return patches of all images in one dim [B patches, C T P P], and each image's time, height and width in patches.

    Images are squares of `image` pixels, or else of at most 224 pixels and `room` tokens (16 a side without a text).
    """
    import numpy as np

    patch = int(_first(config, "patch_size", default=14))
    merge = _merge(config)
    most = 16 if room is None else max(1, math.isqrt(room))
    side = max(1, image // (patch * merge) if image else min(most, 224 // (patch * merge))) * merge
    deep = int(_first(config, "temporal_patch_size", "patch_temporal", default=1))
    vision = getattr(config, "vision_config", config)
    channels = int(getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or 3)
    return Media(
        {"pixel_values": (batch * side * side, channels * deep * patch * patch)},
        {"image_grid_thw": np.array([[1, side, side]] * batch, np.int64)},
        (side // merge) ** 2,
    )


def _merge(config: Any) -> int:
    """Return the number of patches along a side that are merged into one token, by default 2."""
    return int(_first(config, "spatial_merge_size", "merge_size", default=2))


def _packed_row(config: Any, batch: int, image: int | None, room: int | None) -> Media:
    """Return patches of all images in one image [1, C, P, patches P], and each image's rows and columns.

    Images are squares of at most `image` pixels (224 by default), the configuration's size, and `room` tokens.
    """
    import numpy as np

    patch = int(_first(config, "patch_size", default=14))
    most = min((image or 224) // patch, int(_first(config, "image_size", default=224)) // patch)
    side = max(1, min(most // 4, math.isqrt(room or 16))) * 4  # patches are merged twice, two by two
    return Media(
        {"pixel_values": (1, _channels(config), patch, batch * side * side * patch)},
        {"target_sizes": np.array([[side, side]] * batch, np.int64)},
        (side // 4) ** 2,
    )


def _shaped_patches(config: Any, batch: int, image: int | None) -> Media:
    """Return patches of each image [B, patches, C P P], a mask that hides none, and each image's rows and columns.

    Images are squares of `image` pixels, or else of as many patches as the configuration has.
    """
    import numpy as np

    patch = int(_first(config, "patch_size", default=16))
    most = _first(config, "num_patches", "max_num_patches", default=256)
    side = image // patch if image else math.isqrt(int(most))
    merge = int(_first(config, "downsample_factor", default=1))
    side = max(1, side // merge) * merge
    fixed = {
        "pixel_attention_mask": np.ones((batch, side * side), np.int32),
        "spatial_shapes": np.array([[side, side]] * batch, np.int64),
    }
    return Media({"pixel_values": (batch, side * side, _channels(config) * patch**2)}, fixed, (side // merge) ** 2)


def _flattened(config: Any, names: set[str], name: str, batch: int, image: int | None, room: int | None) -> Media:
    """Return patches of each image with their row and column [B, patches, 2 + P P C], by default 256 patches."""
    vision = getattr(config, "vision_config", config)
    patches = int(getattr(vision, "seq_len", None) or getattr(vision, "max_num_patches", None) or 256)
    return Media({"flattened_patches": (batch, patches, 2 + int(vision.patch_embed_hidden_size))})


def _videos(config: Any, names: set[str], name: str, batch: int, image: int | None, room: int | None) -> Media:
    """Return videos [B, frames, C, H, W], by default of 16 frames."""
    frames = int(_first(config, "frames_per_clip", "num_frames", default=16))
    return Media({"pixel_values_videos": (batch, frames, _channels(config), *_size(config, name, image))})


def _features(config: Any, names: set[str], name: str, batch: int, image: int | None, room: int | None) -> Media:
    """Return spectra: [B, bins, frames] if positions are counted in frames, else [B, frames, bins].

    Frames follow from the tokens of the text, from the positions, or from a window; without these there are 1000. CLAP
    has images of spectra [B, 1, frames, bins].
    """
    bins = _first(
        config,
        "num_mel_bins",
        "input_feat_per_channel",
        "feature_projection_input_dim",
        "input_dim",
        "n_mels",
        default=80,
    )
    kind = str(config.model_type)
    stacked = 4 if kind.startswith("granite_speech5") else 1  # differences of frames too, and two frames in one
    bins = int(bins) * int(_first(config, "num_stacked_frames", default=stacked))
    places = _first(config, "max_source_positions", "max_position_embeddings")
    each = getattr(config, "audio_length_per_tok", None)
    if room and each:  # each token stands for this many frames
        return Media({"input_features": (batch, int(bins), 2 * room * int(each))})
    for part in _parts(config):
        if hasattr(part, "num_mel_bins") and (hasattr(part, "max_source_positions") or hasattr(part, "n_window")):
            frames = 2 * int(getattr(part, "max_source_positions", 500))
            window = 2 * int(getattr(part, "n_window", None) or 1)  # frames of a window, if there are any
            return Media({"input_features": (batch, int(bins), max(1, frames // window) * window)})
    if kind.startswith("clap"):
        audio = getattr(config, "audio_config", config)
        return Media({"input_features": (batch, 1, int(audio.spec_size) * 4, int(audio.num_mel_bins))})
    frames = min(1000, int(places or 1000))
    return Media({"input_features": (batch, frames, int(bins))})


def _sound(config: Any, names: set[str], name: str, batch: int, image: int | None, room: int | None) -> Media:
    """Return one second of samples [B, T], for codecs and several channels [B, channels, T].

    A configuration with bins and a longest length has spectra [B, length, bins] instead.
    """
    bins = getattr(config, "num_mel_bins", None)
    if bins and getattr(config, "max_length", None):
        return Media({"input_values": (batch, int(config.max_length), int(bins))})
    channels = _first(config, "audio_channels")
    codec = "padding_mask" in names or hasattr(config, "codebook_size") and hasattr(config, "upsampling_ratios")
    if channels or codec:
        return Media({"input_values": (batch, int(channels or 1), SECOND)})
    return Media({"input_values": (batch, SECOND)})


def _series(config: Any, names: set[str], name: str, batch: int, image: int | None, room: int | None) -> Media:
    """Return past values [B, T, C], or [B, T] of one column without channels, and their known features.

    T is the context and the longest lag. A model with time features also has a mask, future values and future features.
    """
    lags = max(getattr(config, "lags_sequence", None) or [0])
    length = int(_first(config, "context_length", "prediction_length", default=64)) + lags
    columns = int(getattr(config, "num_input_channels", None) or getattr(config, "input_size", None) or 1)
    single = bool(lags) or hasattr(config, "horizon_length")
    shapes: dict[str, tuple[int, ...]] = {
        "past_values": (batch, length, columns) if columns > 1 or not single else (batch, length)
    }
    if "past_time_features" in names:
        known = int(getattr(config, "num_time_features", 0) or 0)
        horizon = int(getattr(config, "prediction_length", None) or 1)
        shapes |= {
            "past_time_features": (batch, length, known),
            "past_observed_mask": shapes["past_values"],
            "future_values": (batch, horizon, *shapes["past_values"][2:]),
            "future_time_features": (batch, horizon, known),
        }
    return Media(shapes)
