"""Reasons for which architectures of transformers were refused, each in its smallest form."""

import inspect

import jax
import numpy as np
import pytest
import torch
from hf_reference import close
from torch import nn

from autoshard.program import from_torch


def both(module, *given):
    """Return the results of a module and of its program."""
    empty = tuple(torch.tensor(each).to("meta") for each in given)
    program = from_torch(module, empty)
    params, batch, *buffers = program.make_args(0)
    params = {key: value.detach().numpy() for key, value in module.named_parameters()}
    names = list(inspect.signature(module.forward).parameters)
    assert batch.keys() == set(names)
    result = jax.jit(program.fn)(params, dict(zip(names, given, strict=True)), *buffers)
    with torch.no_grad():
        wanted = module(*(torch.tensor(each) for each in given))
    return program, jax.tree.leaves(result), jax.tree.leaves(wanted)


def test_linear_of_one_row_and_indices_of_32_bits():
    class Scores(nn.Module):
        def forward(self, x, row):
            best = x.argsort(-1)
            return nn.functional.linear(x, row), torch.take_along_dim(x, best, dim=1), x.take_along_dim(best, 1)

    x, row = np.random.default_rng(0).standard_normal((3, 4), np.float32), np.arange(4, dtype=np.float32)
    _, found, wanted = both(Scores(), x, row)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs.numpy(), 1e-6)


def test_values_of_buffers_that_decide_what_is_computed():
    """Read a buffer while tracing: EoMT masks attention only in layers whose probability is not zero, by a buffer."""

    class Scheduled(nn.Module):
        def __init__(self):
            super().__init__()
            self.probability = nn.Buffer(torch.tensor([0.0, 1.0]))
            self.shift = nn.Buffer(torch.ones(3))

        def forward(self, x):
            for step in range(2):
                x = x * 3 if self.probability[step] > 0 else x - self.shift
            return x

    program, found, wanted = both(Scheduled(), np.arange(6, dtype=np.float32).reshape(2, 3))
    close(found[0], wanted[0].numpy())
    assert any("depend on values of its buffers: `probability` and 1 more" in note for note in program.notes)


def test_what_is_written_into_known_values_is_known(monkeypatch):
    """Track a write into a known value: Longformer writes into a slice of a large mask, and then tests it."""
    from autoshard.program.torch_ops import torchax_environment

    monkeypatch.setattr(torchax_environment, "_FOLDED_ELEMENTS", 4)

    class Marking(nn.Module):
        def forward(self, x):
            mask = torch.zeros(2, 3, x.shape[-1])
            mask[mask == 5] = 7.0
            part = mask[:, 0, :]
            part[part == 0] = 2.0
            return x * 2 if part.min().item() == 2 and mask.max().item() == 2 else x

    _, found, wanted = both(Marking(), np.arange(6, dtype=np.float32).reshape(2, 3))
    close(found[0], wanted[0].numpy())


def test_of_parts_that_take_turns_the_first_is_planned():
    from autoshard.program.hf.hf_model import runnable_part

    class Part(nn.Module):
        from_pretrained = None

        def forward(self, x):
            return x

    class Second(Part):
        pass

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.first, self.second = nn.LayerNorm(2), Part(), Second()

    whole = Whole()
    part, said = runnable_part(whole)
    assert part is whole.first
    assert "`Part`. `architectures` may name another: Second." in said[0]
    assert runnable_part(part) == (part, ())
    assert runnable_part(nn.Module())[1] == ()


@pytest.mark.full
def test_experts_of_dbrx_equal_their_own():
    from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
    from transformers.models.dbrx.modeling_dbrx import DbrxExperts

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            config = DbrxFFNConfig(hidden_size=8, ffn_hidden_size=6, moe_num_experts=4, moe_top_k=2)
            config.hidden_size = 8
            self.experts = DbrxExperts(config)
            for each in self.experts.parameters():
                nn.init.normal_(each)

        def forward(self, x, chosen, share):
            return self.experts(x, chosen, share)

    rng = np.random.default_rng(0)
    x, share = rng.standard_normal((2, 3, 8), np.float32), rng.random((6, 2), np.float32)
    chosen = np.array([[0, 1], [2, 3], [1, 2], [3, 0], [1, 3], [2, 0]])
    _, found, wanted = both(Experts(), x, chosen, share)
    close(found[0], wanted[0].numpy(), 1e-5)


@pytest.mark.parametrize(("rope", "refused"), [(0, False), (8, True)])
def test_heads_that_positions_do_not_turn_may_be_none(rope, refused):
    from autoshard.errors import UserError
    from autoshard.program.config_files import read_config

    fields = {"model_type": "glm5_next", "text_config": {"head_dim": 0, "qk_rope_head_dim": rope}}
    if refused:
        with pytest.raises(UserError, match="head_dim is '0'"):
            read_config(fields)
    else:
        read_config(fields)


class Rows(nn.Module):
    """Branches under masks: Granite adds features to hidden states, Higgs has a branch for each kind of token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, ids, hidden, features):
        mask = ids == 7
        hidden = hidden.masked_scatter(mask.unsqueeze(-1), (hidden[mask] + features).view(-1))
        hidden = hidden.masked_scatter(~mask[..., None], self.norm(hidden[~mask]).to(hidden.dtype))
        rows = hidden[ids == 7]
        rows = torch.nn.functional.silu(self.up(rows)) * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1)
        hidden[mask] += rows
        other = torch.zeros_like(hidden)
        other[(ids * 2).flip(-1) == 14] = rows - hidden[mask]
        return hidden, other


def test_rows_under_a_mask_are_computed_with():
    rng = np.random.default_rng(0)
    hidden, features = (rng.standard_normal(shape, np.float32) for shape in ((2, 5, 4), (3, 4)))
    ids = np.array([[7, 0, 7, 0, 1], [1, 7, 0, 0, 2]])
    _, found, wanted = both(Rows(), ids, hidden, features)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs.numpy(), 1e-5)


def test_masks_that_are_known_to_be_the_same_take_their_rows_as_they_lie():
    from autoshard.program.torch_ops.indexed_writes import is_same

    seen = []

    def traced(ids):
        mask = ids == 7
        seen.extend([is_same(mask, mask[..., None]), is_same(~mask, (~mask).reshape(-1)), is_same(mask, ~mask)])
        return mask

    jax.eval_shape(traced, jax.ShapeDtypeStruct((2, 3), np.int32))
    assert seen == [True, True, False]


def test_rows_under_a_mask_are_not_mixed():
    from autoshard.errors import UserError

    class Mixing(nn.Module):
        def forward(self, x):
            return x[x[:, 0] > 0].mean(0)

    with pytest.raises(UserError, match="asks for the values of a tensor"):
        from_torch(Mixing(), torch.empty(3, 4, device="meta"))


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_means_over_windows_are_those_of_torch(ceil, counted):
    """Average over windows larger than the image, as EfficientNet does."""
    from autoshard.program.torch_ops.pooling import avg_pool

    x = np.random.default_rng(0).standard_normal((2, 3, 7, 9), np.float32)
    options = {"ceil_mode": ceil, "count_include_pad": counted}
    for kernel, stride, padding in ((3, 2, 1), ((2, 4), (2, 3), 0), (5, 5, 2), (2, 1, 0)):
        wanted = torch.nn.functional.avg_pool2d(torch.tensor(x), kernel, stride, padding, **options)
        pair = [each if isinstance(each, tuple) else (each, each) for each in (kernel, stride, padding)]
        close(avg_pool(2, x, *pair, ceil, counted), wanted.numpy(), 1e-6)
    if ceil:
        wanted = torch.nn.functional.avg_pool2d(torch.tensor(x), 50, ceil_mode=True, count_include_pad=counted)
        close(avg_pool(2, x, (50, 50), (), (0, 0), True, counted), wanted.numpy(), 1e-6)
    wanted = torch.nn.functional.avg_pool1d(torch.tensor(x[0]), 3, 2, 1, ceil, counted)
    close(avg_pool(1, x[0], (3,), (2,), (1,), ceil, counted), wanted.numpy(), 1e-6)
    gradient = jax.jit(jax.grad(lambda y: (avg_pool(2, y, (3, 3), (2, 2), (1, 1), ceil, counted) ** 2).sum()))(x)
    given = torch.tensor(x, requires_grad=True)
    (torch.nn.functional.avg_pool2d(given, 3, 2, 1, **options) ** 2).sum().backward()
    close(gradient, given.grad.numpy(), 1e-5)


def test_a_view_of_one_element_is_written_without_its_value():
    """Write a slice of frequencies into another as Qwen3.5 does. When one token is decoded, it has one element."""

    class Writing(nn.Module):
        def forward(self, x):
            first = x[0]
            first[..., slice(1, 3, 3)] = x[1, ..., slice(1, 3, 3)]
            return torch.cat((first, first), -1)

    x = np.arange(8, dtype=np.float32).reshape(2, 1, 1, 4)
    _, found, wanted = both(Writing(), x)
    close(found[0], wanted[0].numpy())


def test_rows_of_an_image_may_end_with_a_place_of_their_own():
    from autoshard.program.hf.extra_inputs import MediaForm, forms_of, in_form
    from autoshard.program.hf.media_inputs import Media

    media = Media({"pixel_values": (100, 12)}, {"image_grid_thw": np.array([[1, 10, 10]])}, 25)
    assert MediaForm(breaks=True) in forms_of({"pixel_values", "image_grid_thw"}, media)
    assert in_form(media, MediaForm(breaks=True), set(), None).tokens == 30
    assert in_form(media, MediaForm(), set(), None).tokens == 25


def test_sizes_of_media_are_those_of_nested_configurations():
    from types import SimpleNamespace as Config

    from autoshard.program.hf.media_inputs import media_of

    inner = Config(model_type="inner", num_mel_bins=128, max_source_positions=50)
    sound = media_of(
        Config(model_type="outer", audio_config=Config(asr_config=inner)),
        {"input_features"},
        "it",
        batch=2,
        image=None,
        room=None,
    )
    assert sound is not None
    assert sound.shapes == {"input_features": (2, 128, 100)}
    pointed = Config(model_type="outer", vision_config={}, prompt_encoder_config=Config(image_size=64))
    seen = media_of(pointed, {"pixel_values"}, "it", batch=2, image=None, room=None)
    assert seen is not None
    assert seen.shapes["pixel_values"] == (2, 3, 64, 64)
    windows = Config(model_type="outer", num_mel_bins=80, n_window=30)
    heard = media_of(windows, {"input_features"}, "it", batch=2, image=None, room=None)
    assert heard is not None
    assert heard.shapes["input_features"] == (2, 80, 960)  # windows of 60 whole frames


def test_masks_that_code_cuts_have_all_their_dims():
    """Build masks with all four dims: Pix2Struct cuts its padding masks to the present keys in the fourth dim."""
    from transformers import masking_utils
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.pix2struct.configuration_pix2struct import Pix2StructTextConfig

    from autoshard.program.hf.hf_attention import hf_mask

    some = torch.tensor([[1, 1, 0], [1, 1, 1]])
    sizes = {"batch_size": 2, "q_length": 3, "kv_length": 3, "mask_function": masking_utils.causal_mask_function}
    import transformers.models.pix2struct.modeling_pix2struct  # noqa: F401  # whose text says so

    cut = hf_mask(attention_mask=some, config=Pix2StructTextConfig(), **sizes)
    assert cut.shape == (2, 1, 3, 3)
    assert hf_mask(attention_mask=some, config=LlamaConfig(), **sizes) is some
