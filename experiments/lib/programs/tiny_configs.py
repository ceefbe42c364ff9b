"""A small configuration of every model type of the installed transformers, by rules on the names of fields.

Layers, widths, heads, vocabularies and positions are reduced in the class's default configuration and its nested ones.
Some classes fit no rules. Less is then reduced, and in the end nothing, since planning needs no weights.
"""

import copy
import re
from typing import Any


LAYERS = re.compile(
    r"^(num_(hidden_)?layers|n_layers?|(encoder|decoder|text|vision|audio|num_encoder|num_decoder)_layers|num_\w*layers"
    r"|\w*_num_hidden_layers|depth|n_block|num_blocks)$"
)
KEPT_LAYERS = re.compile(
    r"conv|feat_extract|first|dense|head|mlp|adapter|upsampl|kv_shared|mtp|predict|nextn|dropped|downsam"
)
WIDTHS = {"hidden_size": 64, "lru_width": 64, "d_model": 64, "n_embd": 64, "embed_dim": 64, "dim": 64, "hidden_dim": 64}
WIDTHS |= {"intermediate_size": 128, "d_ff": 128, "ffn_dim": 128, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
WIDTHS |= {"n_inner": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "ffn_hidden_size": 128}
WIDTHS |= {"num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4}
WIDTHS |= {"decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16, "projection_dim": 64}
WIDTHS |= {"num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
WIDTHS |= {"num_experts_per_token": 2, "num_expert_group": 2, "moe_topk": 2}
WIDTHS |= {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
WIDTHS |= {"n_group": 2, "topk_group": 1}
VOCABULARY = 512
LONG, SMALL = [[[7, 1], [1, 1], [3, 0]], [[5, 1], [1, 1], [2, 0]], [[3, 1], [1, 1], [1, 0]]], [1, 1, 0]
STAGES: dict[str, Any] = {"out_features": ["stage1", "stage2", "stage3", "stage4"], "out_indices": [1, 2, 3, 4]}
STAGES["block_configs"] = [  # kernel, channels in and out, stride; stages halve both sides
    [[3, 96, 96, 1, True]],
    [[3, 96, 96, 2, False]],
    [[3, 96, 192, 2, False], [3, 192, 192, 1, True]],
    [[3, 192, 384, 2, False]],
]
BLOCKS = dict(zip(("longratio", "midratio", "shortratio"), LONG, strict=True))
BLOCKS = {f"vertical_long_to_small_conv_{key}": value for key, value in BLOCKS.items()} | {
    f"{name}_{key}": [[flip[0][::-1], flip[1], flip[2][::-1]], [[max(each)] * 2 for each in flip]][square]
    for square, name in enumerate(("horizontal_small_to_long_conv", "symmetric_conv_long"))
    for key, flip in BLOCKS.items()
}
BLOCKS |= {"reduce_channel": SMALL, "return_channel": SMALL}
LAST: dict[str, Any] = {"out_features": ["stage1", "stage2"], "out_indices": [1, 2]}
INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16}
INDEXER |= {"indexer_budget": 32, "indexer_compress_ratio": 4}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "nemotron": {"num_key_value_heads": 2},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "granite4_vision": {"downsample_rate": "4/8", "deepstack_layer_map": [[-2, 0], [-1, 1]]}
    | {"spatial_target_layers": [0, 1, 0, 1], "vision_config": {"image_size": 336, "patch_size": 42}},
    "sapiens2": {
        "head_config": {"upsample_out_channels": [64, 64], "conv_out_channels": [64]}
        | {"scale_conv_out_channels": [64], "scale_final_hidden_sizes": [64]}
    },
    "pp_ocrv6_medium_det": {"backbone_config": STAGES, "kernel_list": [3, 2, 2], "scale_factor_list": [1, 2, 4, 8]}
    | {"intraclass_block_config": BLOCKS},
    "pp_ocrv6_small_det": {"backbone_config": STAGES, "layer_list_out_channels": [96, 96, 192, 384]},
    "perception_lm": {
        "vision_config": {"architecture": "vit_pe_core_large_patch14_336"}
        | {"model_args": {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": [224, 224], "global_pool": ""}}
    },
    "edgetam": {"vision_config": {"backbone_config": {"architecture": "repvit_m1"}}},
    "hunyuan_vl": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2, 2]}}
    },
    "smolvlm": {"vision_config": {"patch_size": 16}},
    "lw_detr": {"projector_scale_factors": [1.0], "projector_in_channels": [256], "num_feature_levels": 1}
    | {"backbone_config": {"image_size": 512, "window_block_indices": [0]} | LAST},
    "depth_pro": {"intermediate_hook_ids": [1, 0]},
    "rf_detr": {"backbone_config": {"image_size": 560}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}}
    | {"vision_config": {"sam_config": {"downsample_channels": [128, 64]}, "encoder_config": {"hidden_size": 64}}},
    "nemo_speechlm": {
        "audio_config": {
            "asr_config": {"num_key_value_heads": 4},
            "diarization_config": {"audio_config": {"num_key_value_heads": 4}},
        }
    },
    "llama4": {
        "vision_config": {"hidden_size": 64, "intermediate_size": 256}
        | {"projector_input_dim": 64, "projector_output_dim": 64, "vision_output_dim": 64}
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "hy_v4_vl": {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}}},
    "emu3": {"vq_config": {"base_channels": 32, "hidden_size": 128}},
    "glm5_next": {"text_config": {"num_key_value_heads": 4}},
    "align": {"projection_dim": 640},
    "mllama": {"vision_config": {"image_size": 224}},
    "grounding-dino": {"backbone_config": {"num_hidden_layers": 4}},
    "dbrx": {"attn_config": {"rope_theta": 5e5}},
    "pp_ocrv5_server_det": {"backbone_config": STAGES, "kernel_list": [3, 2, 2], "scale_factor_list": [1, 2, 4, 8]}
    | {"intraclass_block_config": BLOCKS},
    "step3p7": {"text_config": {"sliding_window": 16}},
    "qwen3_omni_moe": {
        "talker_config": {"text_config": {"shared_expert_intermediate_size": 64}, "spatial_merge_size": 2}
    },
}
"""Fields of a model type whose class defaults are missing or inconsistent, with the values of checkpoints."""
POSITIONS = {"max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "n_ctx"}


def tiny(kind: str, rung: int, causal: bool = False) -> dict[str, Any]:
    """Return the fields of a configuration file of model type `kind`.

    Rung 0 reduces most, rung 1 layers and vocabulary, rung 2 nothing. `causal` is True if the class is a decoder.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[kind]
    fields = config_class().to_dict()
    made = _cut(fields, rung) | _needed(fields, causal)
    _even(made)
    return _with(made, CHECKPOINTS.get(kind, {})) | {"model_type": kind}


def _match(made: dict[str, Any], fields: dict[str, Any]) -> None:
    """Restore equal widths of two parts after the parts are reduced."""
    parts = {key: value for key, value in fields.items() if isinstance(value, dict) and key.endswith("_config")}
    wide = {key: part["hidden_size"] for key, part in parts.items() if isinstance(part.get("hidden_size"), int)}
    for key, part in (("", fields), *parts.items()):
        held = made[key] if key else made
        for field, value in part.items():
            if not field.endswith("_hidden_size") or not isinstance(value, int):
                continue
            named = field.removesuffix("_hidden_size") + "_config"
            others = [named, *(each for each in wide if each not in (named, key))]
            other = next((each for each in others if wide.get(each) == value), None)
            if field == "out_hidden_size" and key:
                other = "text_config" if "text_config" in wide else None
            vision = wide.get("vision_config")
            if other is not None:
                held[field] = made[other]["hidden_size"]
            elif not key and field == "out_hidden_size" and vision and value % vision == 0:  # several patches
                held[field] = made["vision_config"]["hidden_size"] * (value // vision)


def _even(made: dict[str, Any]) -> None:
    """Make the patches on a side divisible by the patches that are joined into one, if the defaults are
    inconsistent.
    """
    vision = made.get("vision_config", made)
    image, patch = vision.get("image_size"), vision.get("patch_size")
    factors = ("scale_factor", "pixel_shuffle_factor", "downsample_factor")
    joined = [each for key in factors if isinstance(each := made.get(key), int) and each > 1]
    if joined and isinstance(image, int) and isinstance(patch, int) and image // patch % joined[0]:
        vision["image_size"] = patch * joined[0] * max(1, image // patch // joined[0])


def _with(fields: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Replace fields, and those of nested configurations, by `more`."""
    nested = {
        key: value for key, value in more.items() if isinstance(value, dict) and isinstance(fields.get(key), dict)
    }
    return fields | more | {key: _with(fields[key], value) for key, value in nested.items()}


def _needed(fields: dict[str, Any], causal: bool) -> dict[str, Any]:
    """Return fields that every checkpoint has, but no default; `causal` is True if the class is a decoder."""
    needed: dict[str, Any] = {}
    if "vocab_size" in fields and fields["vocab_size"] is None:
        needed["vocab_size"] = 32
    if "mask_token_id" in fields and fields["mask_token_id"] is None and fields.get("pad_token_id") is None:
        needed |= {"pad_token_id": 1, "mask_token_id": 2}
    if "vocabulary_map" in fields and fields["vocabulary_map"] is None:
        needed["vocabulary_map"] = {"<image>": 9, "<|extra_200|>": 10, "IMGIMGAZ": 11, "<|visual token 000000|>": 12}
    if fields.get("default_language") is None and fields.get("languages"):
        needed["default_language"] = fields["languages"][0]
    if isinstance(fields.get("projector_patch_to_query_dict"), dict):  # one entry for the actual number of patches
        vision = fields["vision_config"]
        needed["projector_patch_to_query_dict"] = {str((vision["image_size"] // vision["patch_size"]) ** 2): 16}
    if fields.get("class_thresholds", 0) is None:
        count = len(fields.get("id2label") or "01")
        needed |= {"class_thresholds": [0.5] * count, "class_order": list(range(count))}
    for key in fields:  # placeholder tokens of images, audio and video
        if re.fullmatch(r"(image|audio|video)_token_(id|index)", key) and fields[key] is None:
            needed[key] = 7
    if causal and fields.get("is_decoder") is False and not fields.get("is_encoder_decoder"):
        needed["is_decoder"] = True
    return needed


def _cut(fields: dict[str, Any], rung: int) -> dict[str, Any]:
    made = copy.deepcopy(fields)
    for key in ("architectures", "_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        made.pop(key, None)
    for key, value in fields.items():
        if isinstance(value, dict) and (key.endswith("_config") or key in ("encoder", "decoder", "generator")):
            made[key] = _cut(value, rung) | ({"model_type": value["model_type"]} if value.get("model_type") else {})
    if rung == 2:
        return made
    layers = _layers(fields)
    for key, value in fields.items():
        if key == "depth_coefficient":
            made[key] = 1.0
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if LAYERS.match(key) and not KEPT_LAYERS.search(key):
            made[key] = min(value, layers)
        elif key == "vocab_size" and value > VOCABULARY:
            made[key] = VOCABULARY
        elif key in POSITIONS and value > 128 and rung == 0:
            made[key] = 128
        elif key == "context_length" and rung == 0:
            made[key] = min(value, 512)
        elif key == "frames_per_clip":
            made[key] = min(value, 8)
        elif key == "hidden_dim" and "width_coefficient" in fields:
            continue  # the computed width of the last stage
        elif key == "hidden_size" and "embed_dim_per_stage" in fields:
            continue  # the listed width of the first stage
        elif key in WIDTHS and rung == 0:
            made[key] = min(value, WIDTHS[key])
        elif key == "image_size" and value > 1024 and isinstance(fields.get("patch_size"), int):
            made[key] = 16 * fields["patch_size"]
    heads = made.get("num_attention_heads")
    if "head_dim" in fields and fields["head_dim"] is None and isinstance(heads, int) and "hidden_size" in made:
        made["head_dim"] = made["hidden_size"] // heads
    if rung == 0 and {"head_dim", "qk_rope_head_dim"} <= made.keys() and made["qk_rope_head_dim"]:
        share = (fields.get("rope_parameters") or {}).get("partial_rotary_factor") or 1
        made["head_dim"] = int(made["qk_rope_head_dim"] / share)  # keeps the rotary part's share of the head
    if isinstance(fields.get("layer_types"), list) and fields.get("rope_parameters") == {}:
        made["rope_parameters"] = {each: {"rope_type": "default", "rope_theta": 1e4} for each in fields["layer_types"]}
    if "num_experts_per_tok" in fields and fields["num_experts_per_tok"] is None:
        made["num_experts_per_tok"] = 2
    if isinstance(fields.get("layer_types"), list):
        made["layer_types"] = fields["layer_types"][:layers]
    for key, value in fields.items():  # other lists with an entry for each layer
        depth = fields.get("num_hidden_layers", fields.get("num_layers"))
        if isinstance(value, list) and isinstance(depth, int) and len(value) == depth and key != "layer_types":
            made[key] = value[:layers]
    for key, value in fields.items():  # lists of layers
        if (
            re.search(
                r"^(intermediate_layers_indices|cross_attention_layers|deepstack_visual_indexes|global_attn_indexes)$",
                key,
            )
            and value
        ):
            made[key] = sorted({min(each, layers - 1) for each in value})
    for key in ("num_key_value_heads_per_layer",):
        if isinstance(made.get(key), list) and isinstance(heads, int):
            made[key] = [min(each, heads) for each in made[key]]
    if isinstance(fields.get("attention_types"), list):  # kinds with their repetitions
        made["attention_types"] = [[kinds, layers // len(kinds)] for kinds, _ in fields["attention_types"]]
    if isinstance(fields.get("per_layer_config"), dict):  # only for the remaining layers
        depth = int(made.get("num_hidden_layers", layers))
        made["per_layer_config"] = {k: v for k, v in fields["per_layer_config"].items() if int(k) < depth}
    wide = made.get("hidden_size")
    if rung == 0 and {"expand", "head_dim", "num_heads", "state_size"} <= fields.keys():  # heads fill the width
        made["num_heads"] = wide * fields["expand"] // made["head_dim"]
    if rung == 0 and {"mamba_expand", "mamba_d_head", "mamba_n_heads"} <= fields.keys():
        made |= {"mamba_d_head": 16, "mamba_n_heads": wide * fields["mamba_expand"] // 16}
    if fields.get("num_kv_shared_layers") and layers < fields.get("num_hidden_layers", 0):
        made["num_kv_shared_layers"] = 0
    if "vision_output_dim" in fields and "intermediate_layers_indices" in fields:
        made["vision_output_dim"] = made["hidden_size"] * (1 + len(made["intermediate_layers_indices"]))
    if (
        len(fields.get("out_features") or ()) == 1
        and f"stage{fields.get('num_hidden_layers')}" in fields["out_features"]
    ):
        for key in ("stage_names", "out_features", "out_indices"):  # the last layer has another number now
            made.pop(key)
    _match(made, fields)
    for key in ("vision_feature_layer", "vision_feature_layers"):  # layers counted from the last
        if isinstance(made.get(key), list) and isinstance(vision := made.get("vision_config"), dict):
            depth = int(vision.get("num_hidden_layers", layers))
            made[key] = [max(-depth, min(each, depth - 1)) for each in made[key]]
    vision, places = fields.get("vision_config"), fields.get("mm_tokens_per_image")
    if places and isinstance(vision, dict) and "image_size" in vision:  # at most one for each patch
        side = vision["image_size"] // vision["patch_size"]
        made["mm_tokens_per_image"] = places if side**2 >= places else (side // 2) ** 2
    high = VOCABULARY - 1
    for key, value in fields.items():
        if re.search(r"_(token_id|token_index|token)$", key) and isinstance(value, int) and value >= VOCABULARY:
            made[key], high = high, high - 1
    return made


def _layers(fields: dict[str, Any]) -> int:
    """Return enough layers for one of each kind, from two to six."""
    kinds = fields.get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        return 2
    return min(6, max(2, *(kinds.index(each) + 1 for each in set(kinds))))
