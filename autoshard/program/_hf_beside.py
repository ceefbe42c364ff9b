"""What models are given beside ids and media: masks of all that is there, sizes, and what only some of them ask for."""

import dataclasses
from collections.abc import Callable
from typing import Any

from autoshard.program._hf_media import Media


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """One way in which processors hand over the same images and sounds; models differ in which they take."""

    masks: bool = False
    """Whether masks and sizes say that all of the media are there."""
    images: int = 0
    """Dims before the channels of images, beside that of the batch: images of an example, and tiles of an image."""


def forms_of(names: set[str], media: Media) -> tuple[Form, ...]:
    """The forms of a model's media, the plainest first; `names` are the arguments of its code."""
    masks = bool(names & MASKS.keys())
    pixels = media.shapes.get("pixel_values", ())
    dims = (0, 1, 2) if len(pixels) == 4 else (0,)
    if not media.shapes:
        return (Form(),)
    return tuple(Form(masked, images) for images in dims for masked in ((False, True) if masks else (False,)))


def in_form(media: Media, form: Form, names: set[str], config: Any) -> Media:
    """The media as the form has them, with what the model takes beside them."""
    shapes = dict(media.shapes)
    pixels = shapes.get("pixel_values")
    if pixels is not None and form.images:
        shapes["pixel_values"] = (pixels[0], *_counts(config, form.images), *pixels[1:])
    fixed = dict(media.fixed)
    for name in sorted(names & MASKS.keys()) if form.masks else ():
        made = MASKS[name](shapes, config)
        if made is not None and name not in fixed:
            fixed[name] = made
    return dataclasses.replace(media, shapes=shapes, fixed=fixed)


def _counts(config: Any, dims: int) -> tuple[int, ...]:
    """One image for each example, or two where a model matches them; and as many tiles as it can have at most."""
    images = 2 if hasattr(config, "keypoint_detector_config") else 1
    tiles = getattr(getattr(config, "vision_config", config), "max_num_tiles", 1)
    return (images, int(tiles))[:dims]


def _pixels(shapes: dict[str, tuple[int, ...]], config: Any) -> Any:
    """[B, images] of images in a dim of their own, or [B, H, W]."""
    import numpy as np

    shape = shapes.get("pixel_values")
    if shape is None:
        return None
    return np.ones(shape[:2] if len(shape) == 5 else (shape[0], *shape[-2:]), np.bool_)


def _tiles(shapes: dict[str, tuple[int, ...]], config: Any) -> Any:
    """[B, images, tiles]."""
    import numpy as np

    shape = shapes.get("pixel_values", ())
    return np.ones(shape[:3], np.int64) if len(shape) == 6 else None


def _ratios(shapes: dict[str, tuple[int, ...]], config: Any) -> Any:
    """The first ratio of height to width that there is for each image [B, images]."""
    import numpy as np

    shape = shapes.get("pixel_values", ())
    return np.ones(shape[:2], np.int64) if len(shape) == 6 else None


def _grid(shapes: dict[str, tuple[int, ...]], config: Any) -> Any:
    """Patches of each image, by height and width [B, 2]."""
    import numpy as np

    shape = shapes.get("pixel_values")
    patch = getattr(getattr(config, "vision_config", config), "patch_size", None)
    if shape is None or not isinstance(patch, int):
        return None
    return np.array([[shape[-2] // patch, shape[-1] // patch]] * shape[0], np.int64)


def _size(shapes: dict[str, tuple[int, ...]], config: Any) -> Any:
    """Height and width of each image [B, 2]."""
    import numpy as np

    shape = shapes.get("pixel_values")
    return None if shape is None else np.array([shape[-2:]] * shape[0], np.int64)


def _frames(shapes: dict[str, tuple[int, ...]], config: Any) -> Any:
    """[B, frames] of spectra."""
    import numpy as np

    shape = shapes.get("input_features")
    if shape is None:
        return None
    bins = {getattr(part, "num_mel_bins", None) for part in (config, getattr(config, "audio_config", None))}
    return np.ones((shape[0], shape[-1] if shape[1] in bins else shape[1]), np.bool_)


def _samples(shapes: dict[str, tuple[int, ...]], config: Any) -> Any:
    """[B, T] of samples."""
    import numpy as np

    shape = shapes.get("input_values")
    return None if shape is None else np.ones((shape[0], shape[-1]), np.bool_)


MASKS: dict[str, Callable[[dict[str, tuple[int, ...]], Any], Any]] = {
    "pixel_attention_mask": _pixels,
    "pixel_mask": _pixels,
    "aspect_ratio_mask": _tiles,
    "aspect_ratio_ids": _ratios,
    "target_sizes": _grid,
    "image_sizes": _size,
    "input_features_mask": _frames,
    "feature_attention_mask": _frames,
    "padding_mask": _samples,
}
"""What says that all of the media are there, from their shapes and the configuration; None where it says nothing."""


def beside_ids(names: set[str], config: Any, batch: int, seq: int) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Shapes of other ids that a model of text reads, and what it wants to know of its sequences, as numpy arrays."""
    import numpy as np

    ids = {key: (batch, seq) for key in ("qformer_input_ids",) if key in names}
    fixed: dict[str, Any] = {}
    if "lengths" in names:
        fixed["lengths"] = np.full(batch, seq, np.int64)
    if "lang_ids" in names:
        fixed["lang_ids"] = np.zeros(batch, np.int64)
    if "image_attention_mask" in names and hasattr(config, "cross_layer_interval"):  # every token sees the one image
        fixed["image_attention_mask"] = np.ones((batch, seq, 1), np.int64)
    if "image_embeds_position_mask" in names:
        places = np.zeros((batch, seq), np.bool_)
        places[:, : int(getattr(config, "latent_query_num", 0))] = True
        fixed["image_embeds_position_mask"] = places
    return ids, fixed


def beside_actions(names: set[str], config: Any, batch: int) -> dict[str, tuple[int, ...]]:
    """Shapes of what a model that acts is given and asked for: where it is, what it did, and the noise on it."""
    if not {"state", "actions"} <= names:
        return {}
    moves = (batch, int(config.chunk_size), int(config.max_action_dim))
    return {"state": (batch, int(config.max_state_dim)), "actions": moves, "noise": moves, "timestep": (batch,)}


def decoder_shape(config: Any, batch: int, seq: int) -> tuple[int, ...]:
    """The shape of a decoder's ids: of one that writes several codes at once they lie in the batch or in a last dim."""
    decoder = getattr(config, "decoder", None) or getattr(config, "decoder_config", None)
    books, channels = getattr(decoder, "num_codebooks", None), getattr(decoder, "num_channels", None)
    if isinstance(books, int):
        return (batch * books, seq)
    return (batch, seq, channels) if isinstance(channels, int) and hasattr(decoder, "vocab_size") else (batch, seq)
