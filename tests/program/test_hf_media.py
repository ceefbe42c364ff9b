"""Inputs of models in addition to ids, in the shapes that their configurations and processors define."""

import pytest


def test_spectra_have_the_frames_that_a_nested_tower_wants():
    from transformers import VoxtralConfig

    from autoshard.program.hf.media_inputs import media_of

    config = VoxtralConfig(audio_config={"max_source_positions": 20, "num_mel_bins": 16})
    media = media_of(config, {"input_ids", "input_features"}, "it", batch=2, image=None, room=8)
    assert media is not None
    assert media.shapes == {"input_features": (2, 16, 40)}


@pytest.mark.parametrize(
    ("kind", "names", "shapes", "fixed"),
    [
        ("llava_next", {"image_sizes"}, (2, 3, 3, 28, 28), {"image_sizes": (28, 56)}),
        ("mistral3", {"image_sizes"}, (2, 3, 28, 28), {"image_sizes": (28, 28)}),
        ("siglip2", {"spatial_shapes", "pixel_attention_mask"}, (2, 9, 3 * 14**2), {"spatial_shapes": (3, 3)}),
    ],
)
def test_images_come_with_their_sizes(kind, names, shapes, fixed):
    import transformers

    from autoshard.program.hf.media_inputs import media_of

    vision = {"image_size": 28, "patch_size": 14, "num_patches": 9}
    more = {"image_grid_pinpoints": [[28, 56], [56, 56]]} if kind == "llava_next" else {}
    towers = {"clip_vision_model": "llava_next", "pixtral": "mistral3", "siglip2_vision_model": "siglip2"}
    tower = next(each for each, of in towers.items() if of == kind)
    config = transformers.AutoConfig.for_model(kind, vision_config={"model_type": tower, **vision}, **more)
    media = media_of(config, {"pixel_values", *names}, "it", batch=2, image=None, room=None)
    assert media is not None
    assert media.shapes == {"pixel_values": shapes}
    for key, size in fixed.items():
        assert media.fixed[key].tolist() == [list(size)] * 2


@pytest.mark.parametrize(
    ("kind", "names", "form", "shapes", "fixed"),
    [
        ("idefics2", {"pixel_attention_mask"}, {"images": 1, "masks": True}, (2, 1, 3, 28, 28), {}),
        ("mllama", {"aspect_ratio_ids", "aspect_ratio_mask"}, {"images": 2, "masks": True}, (2, 1, 4, 3, 28, 28), {}),
        ("lightglue", set(), {"images": 1}, (2, 2, 3, 28, 28), {}),
        ("fuyu", set(), {"patches": True}, (2, 4, 3 * 14**2), {}),
    ],
)
def test_images_come_in_the_forms_of_processors(kind, names, form, shapes, fixed):
    import transformers

    from autoshard.program.hf.extra_inputs import MediaForm, forms_of, in_form
    from autoshard.program.hf.media_inputs import Media

    more = {"patch_size": 14} if kind == "fuyu" else {}
    config = transformers.AutoConfig.for_model(kind, **more)
    media = Media({"pixel_values": (2, 3, 28, 28)})
    assert MediaForm(**form) in forms_of(names, media)
    assert forms_of(names, media)[0] == MediaForm()
    arrays = in_form(media, MediaForm(**form), names, config)
    assert arrays.shapes["pixel_values"] == shapes
    assert arrays.fixed.keys() == names
    for mask in arrays.fixed.values():
        assert mask.all() and mask.shape == shapes[: mask.ndim]


@pytest.mark.parametrize(
    ("kind", "more", "shape", "grid"),
    [
        ("kimi_k25", {"pixels": "CPP"}, (32, 3, 14, 14), (1, 4, 4)),
        ("qwen2_vl", {"pixels": "PPC"}, (8, 28, 28, 6), (1, 2, 2)),
    ],
)
def test_patches_come_in_the_forms_of_processors(kind, more, shape, grid):
    import transformers

    from autoshard.program.hf.extra_inputs import MediaForm, forms_of, in_form
    from autoshard.program.hf.media_inputs import media_of

    names = {"input_ids", "pixel_values", "image_grid_thw"}
    config = transformers.AutoConfig.for_model(kind)
    media = media_of(config, names, "it", batch=2, image=None, room=4)
    assert media is not None
    assert MediaForm(**more) in [*forms_of(names, media)]
    shapes = in_form(media, MediaForm(**more), names, config)
    assert shapes.shapes["pixel_values"] == shape
    assert shapes.fixed["image_grid_thw"].tolist() == [list(grid)] * 2


def test_patches_of_all_images_come_side_by_side():
    from transformers import AutoConfig

    from autoshard.program.hf.media_inputs import media_of

    config = AutoConfig.for_model("minicpmv4_6")
    names = {"input_ids", "pixel_values", "target_sizes"}
    media = media_of(config, names, "it", batch=2, image=None, room=4)
    assert media is not None
    patch = config.vision_config.patch_size
    assert media.shapes == {"pixel_values": (1, 3, patch, 2 * 64 * patch)}
    assert media.fixed["target_sizes"].tolist() == [[8, 8]] * 2
    assert media.tokens == 4


@pytest.mark.parametrize(
    ("kind", "fields", "name", "shape"),
    [
        ("fun_asr_nano_encoder", {"num_mel_bins": 10, "num_stacked_frames": 3}, "input_features", (2, 1000, 30)),
        ("timesfm", {"context_length": 32}, "past_values", (2, 32)),
        ("depth_pro", {}, "pixel_values", (2, 3, 1536, 1536)),
    ],
)
def test_media_have_the_shapes_that_fields_say(kind, fields, name, shape):
    from transformers import AutoConfig

    from autoshard.program.hf.media_inputs import media_of

    media = media_of(AutoConfig.for_model(kind, **fields), {name}, "it", batch=2, image=None, room=None)
    assert media is not None
    assert media.shapes[name] == shape
