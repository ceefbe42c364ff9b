"""Inputs of models other than ids and media: masks that hide nothing, sizes, and inputs of a few models."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from autoshard.program.hf.media_inputs import Media


CLASSES, WORDS = 4, 16
"""Texts of classes for each image, and tokens of each text, for models that detect the classes named in texts."""


@dataclasses.dataclass(frozen=True, slots=True)
class MediaForm:
    """One form in which processors pass the same images and sounds; models differ in the form that they accept."""

    masks: bool = False
    """True if masks and sizes that hide nothing are passed too."""
    images: int = 0
    """Number of dims between the batch and the channels: images of an example, and tiles of an image."""
    bare: bool = False
    """True if the sizes of images are omitted, because with sizes some models request more from a tower than it has."""
    patches: bool = False
    """True if images are passed as patches [B, patches, P P C]."""
    breaks: bool = False
    """True if each row of an image's tokens in the text ends with one more token."""
    pixels: str = ""
    """Further dims of the patches of all images: one (empty), or `CPP`, or `PPC` for merged patches."""


def forms_of(names: set[str], media: Media) -> tuple[MediaForm, ...]:
    """Return the forms of a model's media, the plainest first; `names` are the arguments of its code.

    A model without media has a form without masks and, if it accepts an attention mask, one with masks.
    """
    masks = bool(names & MASKS.keys())
    pixels = media.shapes.get("pixel_values", ())
    dims = (0, 1, 2) if len(pixels) == 4 else (0,)
    if not media.shapes:  # text only
        return (MediaForm(), MediaForm(masks=True)) if "attention_mask" in names else (MediaForm(),)
    forms = [MediaForm(masked, images) for images in dims for masked in ((False, True) if masks else (False,))]
    forms += [MediaForm(bare=True)] if "image_sizes" in media.fixed else []
    if "image_grid_thw" in media.fixed:
        forms += [MediaForm(masks, pixels=each) for each in ("CPP", "PPC")] + [MediaForm(masks, breaks=True)]
    return (*forms, *([MediaForm(patches=True)] if len(pixels) == 4 else []))


def in_form(media: Media, form: MediaForm, names: set[str], config: Any) -> Media:
    """Return a copy of the media in the form, with the model's further inputs for them.

    - `media`: images and sounds as `media_of` returns them.
    - `form`: form to convert them to.
    - `names`: arguments of the model's code.
    - `config`: the model's configuration.
    """
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
    if "classes_structure" in names:  # texts of the classes to detect, and of the task
        batch = next(iter(shapes.values()))[0]
        for name, rows in (("classes", batch * CLASSES), ("tasks", batch)):
            fixed[f"{name}_attention_mask"] = np.ones((rows, WORDS), np.int64)
        fixed["classes_structure"] = np.full(batch, CLASSES, np.int64)
    for name in sorted(names & MASKS.keys()) if form.masks else ():
        mask = MASKS[name](shapes, config)
        if mask is not None and name not in fixed:
            fixed[name] = mask
    tokens = media.tokens
    if form.breaks and tokens is not None:
        tokens += math.isqrt(tokens)
    return dataclasses.replace(media, shapes=shapes, fixed=fixed, tokens=tokens)


def _apart(
    config: Any, form: str, pixels: tuple[int, ...], patch: int, fixed: dict[str, Any]
) -> tuple[tuple[int, ...], Any]:
    """Return the shape of patches [patches, C T P P] with separate dims for channels and sides, and each image's grid.

    `CPP` gives [patches, channels, P, P]. `PPC` gives [merged patches, P, P, channels], with P the side of a merged
    patch.

    - `form`: `CPP`, or `PPC` for patches merged into one.
    - `pixels`: shape of the patches.
    - `patch`: side of a patch in pixels.
    - `fixed`: inputs that follow from sizes, with the grid.
    """
    grid, channels = fixed["image_grid_thw"], pixels[1] // patch**2
    if form == "CPP":
        return (pixels[0], channels, patch, patch), grid
    merge = int(getattr(getattr(config, "vision_config", config), "spatial_merge_size", 1))
    return (pixels[0] // merge**2, merge * patch, merge * patch, channels), grid // [1, merge, merge]


def _places(batch: int, rows: int, columns: int) -> Any:
    """Return the column and row of each of `rows` x `columns` patches, the same for all examples [B, patches, 2]."""
    import numpy as np

    across, down = np.meshgrid(np.arange(columns), np.arange(rows))
    return np.broadcast_to(np.stack([across, down], -1).reshape(1, -1, 2), (batch, rows * columns, 2)).copy()


def _counts(config: Any, dims: int) -> tuple[int, ...]:
    """Return the first `dims` (1 or 2) of: the number of images of an example, the largest number of tiles.

    An example has one image, or two if the model matches them.
    """
    from transformers.models.auto import modeling_auto

    images = 2 if config.model_type in modeling_auto.MODEL_FOR_KEYPOINT_MATCHING_MAPPING_NAMES else 1
    tiles = getattr(getattr(config, "vision_config", config), "max_num_tiles", 1)
    return (images, int(tiles))[:dims]


def _pixels(shapes: dict[str, tuple[int, ...]], config: Any) -> Any:
    """Return a mask of ones [B, images] if images have a dim of their own, else [B, H, W]; None without images."""
    import numpy as np

    shape = shapes.get("pixel_values")
    if shape is None:
        return None
    return np.ones(shape[:2] if len(shape) == 5 else (shape[0], *shape[-2:]), np.bool_)


def _tiles(shapes: dict[str, tuple[int, ...]], config: Any) -> Any:
    """Return a mask of ones [B, images, tiles]; None if images have no tiles."""
    import numpy as np

    shape = shapes.get("pixel_values", ())
    return np.ones(shape[:3], np.int64) if len(shape) == 6 else None


def _ratios(shapes: dict[str, tuple[int, ...]], config: Any) -> Any:
    """Return the number of the first aspect ratio for each image [B, images]; None if images have no tiles."""
    import numpy as np

    shape = shapes.get("pixel_values", ())
    return np.ones(shape[:2], np.int64) if len(shape) == 6 else None


def _grid(shapes: dict[str, tuple[int, ...]], config: Any) -> Any:
    """Return the patches of each image by height and width [B, 2]; None without images or a patch size."""
    import numpy as np

    shape = shapes.get("pixel_values")
    patch = getattr(getattr(config, "vision_config", config), "patch_size", None)
    if shape is None or not isinstance(patch, int):
        return None
    return np.array([[shape[-2] // patch, shape[-1] // patch]] * shape[0], np.int64)


def _size(shapes: dict[str, tuple[int, ...]], config: Any) -> Any:
    """Return height and width of each image [B, 2]; None without images."""
    import numpy as np

    shape = shapes.get("pixel_values")
    return None if shape is None else np.array([shape[-2:]] * shape[0], np.int64)


def _frames(shapes: dict[str, tuple[int, ...]], config: Any) -> Any:
    """Return a mask of ones [B, frames] for spectra; the frames are the dim that is not the bins. None without any."""
    import numpy as np

    shape = shapes.get("input_features")
    if shape is None:
        return None
    bins = {getattr(part, "num_mel_bins", None) for part in (config, getattr(config, "audio_config", None))}
    return np.ones((shape[0], shape[-1] if shape[1] in bins else shape[1]), np.bool_)


def _samples(shapes: dict[str, tuple[int, ...]], config: Any) -> Any:
    """Return a mask of ones [B, T] for samples of sound; None without these."""
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
"""Argument -> function of the media's shapes and the configuration that returns masks or sizes; None for no value."""


def further_data_shapes(
    names: set[str], config: Any, batch: int, seq: int | None
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of a model's further inputs by name: those of ids, and those of floats.

    - `names`: arguments of the model's code.
    - `config`: the model's configuration.
    - `batch`: number of examples.
    - `seq`: tokens of a text; None without a text.
    """
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
    if {"visual_feats", "visual_pos"} <= names:  # features of 36 objects detected in an image
        floats["visual_feats"] = (batch, 36, int(config.visual_feat_dim))
        floats["visual_pos"] = (batch, 36, int(config.visual_pos_dim))
    if {"state", "actions"} <= names:  # a robot's state, its actions, and noise on them
        moves = (batch, int(config.chunk_size), int(config.max_action_dim))
        floats |= {"state": (batch, int(config.max_state_dim)), "actions": moves, "noise": moves, "timestep": (batch,)}
    return ids, floats


def further_text_inputs(names: set[str], config: Any, size: tuple[int, int], masks: bool) -> dict[str, Any]:
    """Return a text model's further inputs for sequences of `size` [B, S], as numpy arrays by name.

    `names` are the arguments of the model's code. With `masks` they include masks that hide no token, and boxes.
    """
    import numpy as np

    batch, seq = size
    fixed: dict[str, Any] = {}
    for name in ("attention_mask", "decoder_attention_mask") if masks else ():
        if name in names:
            fixed[name] = np.ones(size, np.int64)
    if masks and "bbox" in names:  # boxes of the tokens on their page
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
    """Return the shape of ids: [B, S], or [B, S, codes + 1] if a token of the text has several codes of sound."""
    books = getattr(config, "num_codebooks", None) if hasattr(config, "codebook_vocab_size") else None
    return (batch, seq, books + 1) if isinstance(books, int) else (batch, seq)


def decoder_shape(config: Any, batch: int, seq: int) -> tuple[int, ...]:
    """Return the shape of a decoder's ids: [B, S], or [B codes, S] or [B, S, channels] for several codes at once."""
    decoder = getattr(config, "decoder", None) or getattr(config, "decoder_config", None)
    books, channels = getattr(decoder, "num_codebooks", None), getattr(decoder, "num_channels", None)
    if isinstance(books, int):
        return (batch * books, seq)
    return (batch, seq, channels) if isinstance(channels, int) and hasattr(decoder, "vocab_size") else (batch, seq)
