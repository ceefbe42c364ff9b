"""Architectures without code of their own here: the values of transformers' modules, from their configurations."""

import json

import numpy as np
import pytest
from hf_reference import close

from autoshard.errors import UserError
from autoshard.program import open_source


BATCH, SEQ = 2, 12
COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
DECODER = COMMON | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT_OSS = DECODER | EXPERTS | {"num_local_experts": 4, "sliding_window": 4}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION |= {"image_size": 16, "patch_size": 8}
MODELS = {
    "gpt_oss": ("GptOssForCausalLM", GPT_OSS | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", DECODER | EXPERTS | {"num_experts": 4}),
    "bloom": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}),
    "falcon": ("FalconForCausalLM", COMMON | {"alibi": True, "new_decoder_architecture": False}),
    "mpt": ("MptForCausalLM", {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 96, "max_seq_len": 64}),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        DECODER | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "llama4_text": (
        "Llama4ForCausalLM",
        DECODER
        | {"intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 4}
        | {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "moe_layers": [1]},
    ),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        COMMON
        | {"intermediate_size": 48, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
    ),
    "clip": (
        "CLIPModel",
        {
            "text_config": VISION | {"vocab_size": 96, "max_position_embeddings": 16, "eos_token_id": 2},
            "vision_config": VISION,
            "projection_dim": 16,
        },
    ),
}
RECURRENT = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
RECURRENT |= {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 24}
MODELS |= {
    "mamba": ("MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 4}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        DECODER
        | EXPERTS
        | RECURRENT
        | {"num_hidden_layers": 3, "num_experts": 4}
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    ),
    "roformer": ("RoFormerForCausalLM", COMMON | {"intermediate_size": 48, "is_decoder": True}),
    "jetmoe": (
        "JetMoeForCausalLM",
        COMMON
        | {"num_key_value_heads": 2, "kv_channels": 8, "intermediate_size": 48, "num_local_experts": 4}
        | {"num_experts_per_tok": 2},
    ),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        COMMON
        | {"num_layers": 1, "num_key_value_heads": 4, "head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        | {"v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24}
        | {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2},
    ),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
        | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "vocab_size": 96, "num_experts": 4}
        | {"expert_capacity": 4, "pad_token_id": 0, "decoder_start_token_id": 0},
    ),
    "hy_v4": (
        "HYV4ForCausalLM",
        DECODER
        | EXPERTS
        | {"q_lora_rank": 16, "kv_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 16, "qk_rope_head_dim": 8}
        | {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "num_experts": 4, "index_topk": 64},
    ),
}
QUICK = ("gpt_oss", "bloom", "clip")


def written(kind, folder, **more):
    architecture, fields = MODELS[kind]
    path = folder / f"{kind}.json"
    path.write_text(json.dumps({"model_type": kind, "architectures": [architecture], **fields, **more}))
    return path


def eager(kind):
    """Build the transformers module with weights and its own attention and experts."""
    import torch
    import transformers

    architecture, fields = MODELS[kind]
    config = transformers.AutoConfig.for_model(kind, **fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the usual initial values hide a swapped or missing weight
            parameter.copy_(0.2 * torch.randn_like(parameter) + (parameter.ndim < 2))
    return model


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "kind", [each if each in QUICK else pytest.param(each, marks=pytest.mark.full) for each in MODELS]
)
def test_forward_equals_the_eager_module(kind, tmp_path):
    import jax
    import torch

    from autoshard.program.torch.torch_function import TorchFunction

    model = eager(kind)
    experts = {"experts": "slots:all"} if "experts" in str(MODELS[kind]) else {}
    program = open_source(f"hf:{written(kind, tmp_path)}", batch=BATCH, seq=SEQ, dtype="fp32", **experts)
    function = TorchFunction(model)
    args = program.make_args(0)
    own = function.values()
    params = own if own.keys() == args[0].keys() else unstacked(own, args[0])
    given = {k: torch.tensor(v).long() if v.dtype.kind == "i" else torch.tensor(v) for k, v in args[1].items()}
    more = {"use_cache": False} if hasattr(model.config, "use_cache") and kind != "clip" else {}
    with torch.no_grad():
        out = model(**given, **more)
    result = jax.jit(program.fn)(params, args[1], *([function.buffer_values()] if len(args) > 2 else []))
    if kind == "clip":
        close(result["logits_per_image"], out.logits_per_image.numpy(), 1e-4)
    else:
        close(result, out.logits.numpy(), 1e-4)


@pytest.mark.parametrize("kind", [pytest.param(each, marks=pytest.mark.full) for each in ("jetmoe", "longcat_flash")])
def test_gradients_equal_those_of_the_eager_module(kind, tmp_path):
    import jax
    import torch

    from autoshard.program.torch.torch_function import TorchFunction

    model = eager(kind)
    source = f"hf:{written(kind, tmp_path)}"
    program = open_source(source, batch=BATCH, seq=SEQ, dtype="fp32", experts="slots:all")
    function = TorchFunction(model)
    shapes, batch, *extra = program.make_args(0)
    ids = torch.tensor(batch["input_ids"]).long()
    own, buffers = function.values(), [function.buffer_values()] * len(extra)
    params = own if own.keys() == shapes.keys() else unstacked(own, shapes)
    out = model(input_ids=ids, use_cache=False).logits
    share = np.random.default_rng(2).standard_normal(out.shape).astype(np.float32)
    (out * torch.tensor(share)).sum().backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    wanted = function.values()
    wanted = wanted if wanted.keys() == params.keys() else unstacked(wanted, params)
    result = jax.jit(jax.grad(lambda p: (program.fn(p, batch, *buffers) * share).sum()))(params)
    for name in wanted:
        close(result[name], wanted[name], 2e-4)


def test_a_model_that_compares_its_inputs_is_trained_on_its_own_loss(tmp_path):
    import jax
    import torch

    from autoshard.program.torch.torch_function import TorchFunction

    model = eager("clip")
    program = open_source(f"hf:{written('clip', tmp_path)}", batch=BATCH, seq=SEQ, dtype="fp32", train=True)
    args = program.make_args(0)
    batch = args[2]
    assert "labels" not in batch
    function = TorchFunction(model)
    own = function.values()
    params = own if own.keys() == args[0].keys() else unstacked(own, args[0])
    given = {k: torch.tensor(v).long() if v.dtype.kind == "i" else torch.tensor(v) for k, v in batch.items()}
    result = jax.jit(program.fn)(params, args[1], batch, *([function.buffer_values()] if len(args) > 3 else []))
    close(result[-1], model(**given, return_loss=True).loss.detach().numpy(), 1e-5)


def unstacked(own, wanted):
    """Split stacked parameters into those of single layers, where the program is not scanned."""
    layers = {}
    for name, value in own.items():
        for i in range(len(value)) if "*" in name else ():
            layers[name.replace("*", str(i))] = value[i]
        if "*" not in name:
            layers[name] = value
    assert layers.keys() == wanted.keys()
    return layers


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "kind",
    [
        *("bloom", "mamba"),
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in ("gpt_oss", "falcon", "mpt", "qwen3_next", "roformer", "hy_v4")
        ),
    ],
)
def test_decoding_equals_the_full_pass(kind, tmp_path):
    import jax

    source = f"hf:{written(kind, tmp_path)}"
    options = {"batch": BATCH, "dtype": "fp32"} | ({"experts": "slots:all"} if "experts" in str(MODELS[kind]) else {})
    full = open_source(source, seq=SEQ, **options)
    decode = open_source(source, seq=SEQ, serve="decode", **options)
    params, batch, *extra = full.make_args(0)
    rng = np.random.default_rng(3)
    params = {k: v + rng.standard_normal(v.shape, np.float32) * 0.1 for k, v in params.items()}
    expected = np.asarray(jax.jit(full.fn)(params, batch, *extra))
    cache = jax.tree.map(np.zeros_like, decode.make_args(0)[1])  # the state before the first token
    held = params if params.keys() == decode.make_args(0)[0].keys() else unstacked(params, decode.make_args(0)[0])
    step = jax.jit(decode.fn)
    for position in range(SEQ):
        given = {"input_ids": batch["input_ids"][:, position : position + 1], "position": np.int32(position)}
        cache, logits = step(held, cache, given, *extra)
        close(logits, expected[:, position], 2e-5)


def test_sinks_are_one_more_key_without_a_value():
    import jax.numpy as jnp

    from autoshard.program.kernels.dot_attention import attend

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, heads, 5, 8)), jnp.float32) for heads in (4, 2, 2))
    sinks = jnp.asarray(rng.standard_normal(4), jnp.float32)
    found = attend(q, k, v, causal=True, sinks=sinks)
    scores = np.einsum("bhsd,bhtd->bhst", q, np.repeat(k, 2, 1)) * 8**-0.5
    scores = np.where(np.tril(np.ones((5, 5), bool)), scores, -np.inf)
    scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (2, 4, 5, 1))], -1)
    shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    close(found, np.einsum("bhst,bhtd->bshd", shares[..., :-1], np.repeat(v, 2, 1)), 1e-5)
    each = jnp.broadcast_to(sinks[None, :, None, None], (2, 4, 5, 1)) * jnp.arange(5)[:, None]  # sinks for each query
    close(attend(q, k, v, causal=True, sinks=each)[:, 1], found[:, 1], 1e-5)
    assert abs(attend(q, k, v, causal=True, sinks=each) - found).max() > 1e-3


def test_sorted_experts_have_their_biases(tmp_path):
    """Compare both lossless forms on experts with biases and gates of their own."""
    import jax

    source = f"hf:{written('gpt_oss', tmp_path, num_hidden_layers=1, layer_types=['full_attention'])}"
    found = []
    for experts in ("slots:all", "sorted:2"):
        program = open_source(source, batch=BATCH, seq=SEQ, dtype="fp32", experts=experts)
        params, batch, *extra = program.make_args(0)
        rng = np.random.default_rng(3)
        params = {k: v + rng.standard_normal(v.shape, np.float32) * 0.2 for k, v in params.items()}
        found.append(np.asarray(jax.jit(program.fn)(params, batch, *extra)))
    close(found[1], found[0], 2e-5)


def test_rows_and_elements_are_scattered_as_torch_does():
    import jax
    import torch

    from autoshard.program.torch_ops.indexed_writes import masked_scatter

    rng = np.random.default_rng(1)
    x, source = rng.standard_normal((2, 3, 4)), rng.standard_normal((6, 4))
    rows = rng.random((2, 3, 1)) < 0.5
    for mask in (rows, rng.random((2, 3, 4)) < 0.5):
        expected = torch.tensor(x).masked_scatter(torch.tensor(mask), torch.tensor(source))
        close(jax.jit(masked_scatter)(x, mask, source), expected.numpy(), 1e-6)
    close(jax.jit(masked_scatter)(x, np.zeros_like(rows), source[:0]), x, 1e-6)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model_type": "qwen3moe"}, "has no model type `qwen3moe`; .* or use `qwen3_moe`"),
        ({"model_type": "clip", "architectures": ["ClipModel"]}, "no `ClipModel` for model type `clip`; .*CLIPModel"),
        ({"model_type": "clip", "text_config": {"hidden_size": 30}}, "cannot be built: .*not a multiple of the number"),
    ],
)
def test_sentences(fields, sentence, tmp_path):
    (tmp_path / "it.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=sentence):
        open_source(f"hf:{tmp_path / 'it.json'}", batch=2)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("gpt-sw3", "GPT2LMHeadModel"),  # implemented by another model's code
        ("internlm3", "LlamaForCausalLM"),  # another model's code, and its own configuration
        ("musicgen", "MusicgenForConditionalGeneration"),  # the likelier class includes only the decoder
    ],
)
def test_the_class_is_one_that_takes_the_configuration(kind, wanted):
    from autoshard.program.hf.hf_model import _config_class, _model_class

    assert _model_class("it", kind, _config_class("it", kind), None).__name__ == wanted


def test_a_class_of_a_part_is_built_from_that_part():
    from autoshard.program.hf.hf_model import build_model

    part = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 96}
    model = build_model(
        "it", {"model_type": "musicgen", "architectures": ["MusicgenForCausalLM"], "decoder": part}, "float32"
    )
    assert model.config.model_type == "musicgen_decoder"
    assert model.config.hidden_size == 32


def test_floats_that_json_has_not_are_read_as_transformers_writes_them():
    from transformers import Mamba2Config

    from autoshard.program.hf.hf_model import config_fields

    saved = json.loads(Mamba2Config(time_step_limit=(0.0, float("inf"))).to_json_string(use_diff=False))
    assert config_fields(Mamba2Config, saved)["time_step_limit"] == [0.0, float("inf")]


def test_constructors_are_those_of_torch():
    """Compare constructors of tensors: their default dtypes, sizes by name, and bounds with a constant difference."""
    import jax
    import torch

    from autoshard.program.torch.module_patches import lowered_environment

    env = lowered_environment()

    def made(start):
        first = env.j2t_iso(start)
        with env:
            found = (
                torch.full((2, 3), 1),
                torch.full((2,), True),
                torch.full((2,), 0.5),
                torch.ones(size=(2, 3), dtype=int),
                torch.zeros(3, 2),
                torch.arange(first, first + 3),
            )
            return env.t2j_iso(found)

    found = jax.jit(made)(np.int32(4))
    wanted = (
        torch.full((2, 3), 1),
        torch.full((2,), True),
        torch.full((2,), 0.5),
        torch.ones(size=(2, 3), dtype=int),
        torch.zeros(3, 2),
        torch.arange(4, 7),
    )
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype.kind == theirs.numpy().dtype.kind
        close(mine, theirs.numpy())


@pytest.mark.parametrize(("mode", "method"), [("bicubic", "cubic"), ("bilinear", "linear")])
def test_images_are_resized_as_torch_does(mode, method):
    import torch

    from autoshard.program.torch_ops.layer_lowerings import resizing

    x = np.random.default_rng(0).standard_normal((2, 3, 16, 12), np.float32)
    for size in ((5, 7), (20, 30)):
        wanted = torch.nn.functional.interpolate(torch.tensor(x), size=size, mode=mode, antialias=True)
        close(resizing(method)(x, size), wanted.numpy())


def test_a_mask_that_hides_nothing_is_left_out():
    import jax
    import torch

    from autoshard.program.hf.hf_attention import hf_mask
    from autoshard.program.torch_ops.torchax_environment import environment

    every, some = torch.ones(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert hf_mask(attention_mask=every) is None
    assert hf_mask(attention_mask=some) is some

    def traced(mask):
        given = environment().j2t_iso(mask)
        assert hf_mask(attention_mask=given) is given
        return mask

    jax.eval_shape(traced, jax.ShapeDtypeStruct((2, 3), np.int32))


def test_what_layers_add_to_the_places_of_an_image():
    """Add image features to hidden states under the mask of their positions, as Qwen3-VL does, with unknown values."""
    import jax
    import torch
    from torch import nn

    from autoshard.program import from_torch

    class Adding(nn.Module):
        def get_image_features(self, features):
            return features

        def forward(self, ids, hidden, features):
            mask = ids == 7
            hidden = hidden.clone()
            local = hidden[mask, :].clone() + self.get_image_features(features)
            hidden[mask, :] = local
            return hidden * 2

    rng = np.random.default_rng(0)
    hidden, features = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 5), (3, 5)))
    ids = np.array([[7, 0, 7, 0], [1, 7, 0, 0]], np.int32)
    empty = tuple(torch.tensor(each).to("meta") for each in (ids, hidden, features))
    program = from_torch(Adding(), empty)
    result = jax.jit(program.fn)({}, {"ids": ids, "hidden": hidden, "features": features})
    wanted = Adding()(*(torch.tensor(each) for each in (ids, hidden, features)))
    close(jax.tree.leaves(result)[0], wanted.numpy())


def test_images_of_zeros_are_not_looked_for():
    """Drop all-zero images as Idefics2 does: their number must not depend on values."""
    import jax
    import torch
    from torch import nn

    from autoshard.program import from_torch

    class Seeing(nn.Module):
        def get_image_features(self, pixels):
            real = (pixels == 0.0).sum(dim=(-1, -2, -3)) != pixels.shape[1:].numel()
            return pixels[real].contiguous().mean((-1, -2)).split(real.view(2, -1).sum(dim=1).tolist())

        def forward(self, pixels):
            return torch.stack(self.get_image_features(pixels))

    x = np.random.default_rng(0).standard_normal((4, 3, 5, 5), np.float32)
    program = from_torch(Seeing(), torch.empty(4, 3, 5, 5, device="meta"))
    close(jax.tree.leaves(jax.jit(program.fn)({}, {"pixels": x}))[0], Seeing()(torch.tensor(x)).numpy())


def test_results_that_transformers_remembers_are_made_again():
    """Clear transformers' caches, which would contain tracers of another trace."""
    import torch
    from transformers.pytorch_utils import compile_compatible_method_lru_cache

    from autoshard.program.torch.module_patches import canonical_modules

    made = []

    @compile_compatible_method_lru_cache(maxsize=4)
    def positions(size):
        made.append(size)
        return torch.zeros(size)

    positions(2)
    with canonical_modules():
        positions(2)
    positions(2)
    assert made == [2, 2]


def test_bounds_and_size_of_what_is_drawn_may_come_by_name():
    import jax
    import torch
    from torch import nn

    from autoshard.program import from_torch

    class Drawing(nn.Module):
        def forward(self, x):
            return x + torch.randint(low=4, high=5, size=(3,)) + torch.randint(3, (3,)) * 0

    program = from_torch(Drawing(), torch.empty(3, device="meta"))
    x = np.arange(3, dtype=np.float32)
    assert jax.tree.leaves(jax.jit(program.fn)({}, {"x": x}))[0].tolist() == [4, 5, 6]
