"""What models are given beside ids and media: masks of all that is there, sizes, and what only some of them ask for."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from autoshard.program.hf.media_inputs import Media


CLASSES, WORDS = 4, 16
"""Texts of classes for each image, and tokens of each, of models that look for what texts name."""


@dataclasses.dataclass(frozen=True, slots=True)
class MediaForm:
    """One way in which processors hand over the same images and sounds; models differ in which they take."""

    masks: bool = False
    """Whether masks and sizes say that all of the media are there."""
    images: int = 0
    """Dims before the channels of images, beside that of the batch: images of an example, and tiles of an image."""
    bare: bool = False
    """Whether the sizes of images are left out: some towers are asked for more than they have where sizes are given."""
    patches: bool = False
    """Whether images come as patches [B, patches, P P C]."""
    breaks: bool = False
    """Whether each row of an image's places in the text ends with one more."""
    pixels: str = ""
    """What dims patches of all images in one dim have beside it: one (``), `CPP` or `PPC` of patches that are merged
    into one."""


def forms_of(names: set[str], media: Media) -> tuple[MediaForm, ...]:
    """The forms of a model's media, the plainest first; `names` are the arguments of its code."""
    masks = bool(names & MASKS.keys())
    pixels = media.shapes.get("pixel_values", ())
    dims = (0, 1, 2) if len(pixels) == 4 else (0,)
    if not media.shapes:  # of a text alone
        return (MediaForm(), MediaForm(masks=True)) if "attention_mask" in names else (MediaForm(),)
    found = [MediaForm(masked, images) for images in dims for masked in ((False, True) if masks else (False,))]
    found += [MediaForm(bare=True)] if "image_sizes" in media.fixed else []
    if "image_grid_thw" in media.fixed:
        found += [MediaForm(masks, pixels=each) for each in ("CPP", "PPC")] + [MediaForm(masks, breaks=True)]
    return (*found, *([MediaForm(patches=True)] if len(pixels) == 4 else []))


def in_form(media: Media, form: MediaForm, names: set[str], config: Any) -> Media:
    """The media as the form has them, with what the model takes beside them."""
    import numpy as np

    shapes = dict(media.shapes)
    pixels = shapes.get("pixel_values")
    if pixels is not None and form.images:
        shapes["pixel_values"] = (pixels[0], *_counts(config, form.images), *pixels[1:])
    fixed = {key: value for key, value in media.fixed.items() if not (form.bare and key == "image_sizes")}
    patch = getattr(config, "patch_size", None) or getattr(getattr(config, "vision_config", None), "patch_size", None)
    if pixels is not None and form.patches and isinstance(patch, int):
        rows, columns = pixels[-2] // patch, pixels[-1] // patch
        shapes["pixel_values"] = (pixels[0], rows * columns, pixels[1] * patch * patch)
        if "image_position_ids" in names:
            fixed["image_position_ids"] = _places(pixels[0], rows, columns)
    if pixels is not None and form.pixels and isinstance(patch, int):
        shapes["pixel_values"], fixed["image_grid_thw"] = _apart(config, form.pixels, pixels, patch, fixed)
    if "classes_structure" in names:  # texts of the classes that are looked for, and of the task
        batch = next(iter(shapes.values()))[0]
        for name, rows in (("classes", batch * CLASSES), ("tasks", batch)):
            fixed[f"{name}_attention_mask"] = np.ones((rows, WORDS), np.int64)
        fixed["classes_structure"] = np.full(batch, CLASSES, np.int64)
    for name in sorted(names & MASKS.keys()) if form.masks else ():
        made = MASKS[name](shapes, config)
        if made is not None and name not in fixed:
            fixed[name] = made
    tokens = media.tokens
    if form.breaks and tokens is not None:
        tokens += math.isqrt(tokens)
    return dataclasses.replace(media, shapes=shapes, fixed=fixed, tokens=tokens)


def _apart(
    config: Any, form: str, pixels: tuple[int, ...], patch: int, fixed: dict[str, Any]
) -> tuple[tuple[int, ...], Any]:
    """Patches [patches, C T P P] with channels and sides in dims of their own, and how many each image has."""
    grid, channels = fixed["image_grid_thw"], pixels[1] // patch**2
    if form == "CPP":
        return (pixels[0], channels, patch, patch), grid
    merge = int(getattr(getattr(config, "vision_config", config), "spatial_merge_size", 1))
    return (pixels[0] // merge**2, merge * patch, merge * patch, channels), grid // [1, merge, merge]


def _places(batch: int, rows: int, columns: int) -> Any:
    """Column and row of each patch [B, patches, 2]."""
    import numpy as np

    across, down = np.meshgrid(np.arange(columns), np.arange(rows))
    return np.broadcast_to(np.stack([across, down], -1).reshape(1, -1, 2), (batch, rows * columns, 2)).copy()


def _counts(config: Any, dims: int) -> tuple[int, ...]:
    """One image for each example, or two where a model matches them; and as many tiles as it can have at most."""
    from transformers.models.auto import modeling_auto

    images = 2 if config.model_type in modeling_auto.MODEL_FOR_KEYPOINT_MATCHING_MAPPING_NAMES else 1
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


def beside_data(
    names: set[str], config: Any, batch: int, seq: int | None
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes of other data that a model takes: ids, and floats; `seq` tokens of a text, if it reads one."""
    ids: dict[str, tuple[int, ...]] = {}
    if seq is not None and "qformer_input_ids" in names:
        ids["qformer_input_ids"] = (batch, seq)
    if "task_inputs" in names:
        ids["task_inputs"] = (batch, int(getattr(config, "task_seq_len", 77)))
    if "classes_structure" in names:
        ids |= {"classes_input_ids": (batch * CLASSES, WORDS), "tasks_input_ids": (batch, WORDS)}
    floats: dict[str, tuple[int, ...]] = {}
    if "high_res_pixel_values" in names:
        side = int(config.high_res_vision_config.image_size)
        floats["high_res_pixel_values"] = (batch, 3, side, side)
    if {"visual_feats", "visual_pos"} <= names:  # of so many objects that were found in an image
        floats["visual_feats"] = (batch, 36, int(config.visual_feat_dim))
        floats["visual_pos"] = (batch, 36, int(config.visual_pos_dim))
    if {"state", "actions"} <= names:  # where what acts is, what it did, and the noise on it
        moves = (batch, int(config.chunk_size), int(config.max_action_dim))
        floats |= {"state": (batch, int(config.max_state_dim)), "actions": moves, "noise": moves, "timestep": (batch,)}
    return ids, floats


def beside_text(names: set[str], config: Any, size: tuple[int, int], masks: bool) -> dict[str, Any]:
    """What a model of text wants to know of its sequences of `size` [B, S], as numpy arrays; `masks`: that all of
    their tokens are there."""
    import numpy as np

    batch, seq = size
    fixed: dict[str, Any] = {}
    for name in ("attention_mask", "decoder_attention_mask") if masks else ():
        if name in names:
            fixed[name] = np.ones(size, np.int64)
    if masks and "bbox" in names:  # where each token stands on its page
        fixed["bbox"] = np.zeros((batch, seq, 4), np.float32)
    if "question_positions" in names:
        fixed["question_positions"] = np.zeros((batch, 1), np.int64)
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
    return fixed


def text_shape(config: Any, batch: int, seq: int) -> tuple[int, ...]:
    """The shape of ids: where several codes of sound go with each token of a text, all of them lie in a last dim."""
    books = getattr(config, "num_codebooks", None) if hasattr(config, "codebook_vocab_size") else None
    return (batch, seq, books + 1) if isinstance(books, int) else (batch, seq)


def decoder_shape(config: Any, batch: int, seq: int) -> tuple[int, ...]:
    """The shape of a decoder's ids: of one that writes several codes at once they lie in the batch or in a last dim."""
    decoder = getattr(config, "decoder", None) or getattr(config, "decoder_config", None)
    books, channels = getattr(decoder, "num_codebooks", None), getattr(decoder, "num_channels", None)
    if isinstance(books, int):
        return (batch * books, seq)
    return (batch, seq, channels) if isinstance(channels, int) and hasattr(decoder, "vocab_size") else (batch, seq)
