"""Any torch module: names, roles, losses, buffers, dtypes, lowerings, refusals."""

import re

import jax
import numpy as np
import pytest
import torch
from hf_reference import close
from torch import nn
from torch_modules import Chain, meta, run_module

from autoshard.errors import UserError
from autoshard.program import Role, from_torch
from autoshard.program.hf.hf_program import from_config
from autoshard.program.torch.step_options import ModuleOptions


@pytest.mark.parametrize("train", [False, True])
def test_float_inputs_are_computed_in_the_compute_dtype(train):
    inputs = {"x": torch.randn(3, 8), "shift": torch.randn(8)}

    def loss(output, wanted):
        assert str(output.dtype) == "torch.bfloat16" and str(wanted.dtype) == "torch.float32", "targets stay"
        return ((output.float() - wanted) ** 2).mean()

    options = {"train": True, "loss": loss, "targets": torch.randn(3, 8)} if train else {}
    program = from_torch(Chain(3).eval(), (), inputs, dtype="bfloat16", **options)
    given = {a.name: a.dtype for a in program.arguments if a.role is Role.BATCH}
    assert given["batch.x"] == given["batch.shift"] == "float32", "what is fed is as the examples are"
    if not train:
        assert [r.dtype for r in program.results] == ["bfloat16"]
        kept = from_torch(Chain(3).eval(), (), inputs, dtype="bfloat16", cast_inputs=False)
        assert [r.dtype for r in kept.results] == ["float32"]
    text = str(jax.make_jaxpr(program.fn)(*program.args))
    assert "dot_general" in text and "f32[3,8] = dot_general" not in text


def test_default_loss_is_named_in_the_notes():
    program = from_torch(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to("meta"), meta(2, 4), train=True)
    assert program.notes == ("No loss was given: the step minimises the mean of squares of the first output.",)
    assert program.training and program.results[-1].shape == ()


def test_dropout_is_off_and_reported():
    program = from_torch(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to("meta"), meta(2, 4))
    assert program.notes == ("Dropout is off: the module runs in evaluation mode.",)


def test_names_roles_and_nested_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(meta(4, 4))
            self.register_buffer("offset", meta(4))
            self.register_buffer("ramp", torch.arange(4.0), persistent=False)

        def forward(self, pair, flag, *, extra):
            return {"out": pair["a"] @ self.w + pair["b"] + self.offset + self.ramp if flag else extra, "none": None}

    program = from_torch(Two(), ({"a": meta(2, 4), "b": meta(4)}, True), {"extra": meta(3)})
    assert {a.name: a.role for a in program.arguments} == {
        "w": Role.PARAMETER,
        "batch.pair.a": Role.BATCH,
        "batch.pair.b": Role.BATCH,
        "batch.extra": Role.BATCH,
        "offset": Role.OTHER,
    }
    assert [r.name for r in program.results] == ["result.out"]


def test_tied_weights_are_one_argument():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(16, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.table(ids))

    module, ids = Tied(), torch.tensor([[1, 2, 15]])
    program, result = run_module(module, ids)
    assert [a.name for a in program.arguments] == ["table.weight", "batch.ids"]
    close(result, module(ids).detach().numpy())
    assert program.model_flops == 2 * 3 * 8 * 16


def test_transformer_encoder_keeps_heads_and_batch_apart():

    import jax

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    module = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x = torch.randn(5, 7, 32)
    program, result = run_module(module, x)
    close(result, module(x).detach().numpy())
    text = jax.jit(program.fn).lower(*program.args).as_text()
    sizes = {int(size) for dims in re.findall(r"tensor<((?:\d+x)+)", text) for size in dims.split("x") if size}
    assert not sizes & {35, 20, 28} and "stablehlo.while" in text


@pytest.mark.parametrize(
    "call",
    [
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(6, 6).tril().bool()),
        lambda x: torch.matmul(x, x.transpose(-1, -2)),
        lambda x: torch.einsum("bhsd,bhtd->bhst", x, x),
        lambda x: nn.functional.rms_norm(x, (8,), eps=1e-6),
        lambda x: nn.functional.layer_norm(x, (6, 8)),
        lambda x: x.repeat_interleave(3, dim=1),
        lambda x: nn.functional.max_pool2d(x, 3, 2, 1),
        lambda x: nn.functional.max_pool2d(x, 2, ceil_mode=True),
        lambda x: nn.functional.cross_entropy(x.mean(1).transpose(1, 2), torch.tensor([[0, 1, -100, 3, 4, 5]] * 2)),
        lambda x: nn.functional.cross_entropy(
            x[:, 0, 0], torch.tensor([3, 1]), weight=torch.linspace(1, 2, 8), label_smoothing=0.1
        ),
        lambda x: nn.functional.cross_entropy(x[:, 0, 0], x[:, 1, 0].softmax(-1), reduction="sum"),
        lambda x: x**3 + 2 - 3 / (x.abs() + 1) + torch.div(x, 2, rounding_mode="floor"),
        lambda x: x * torch.arange(end=8) + torch.arange(6)[:, None] + torch.arange(start=0.0, end=2.0, step=0.25),
        lambda x: x.unfold(-2, 3, 2),
        lambda x: torch.addmm(x[0, 0, 0], x[0, 0], x[0, 1].T @ x[0, 0], beta=0.5, alpha=2.0),
    ],
)
def test_lowerings_equal_torch(call):
    class Call(nn.Module):
        def __init__(self):
            super().__init__()
            self.unit = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return call(x * self.unit)

    torch.manual_seed(0)
    module, x = Call(), torch.randn(2, 4, 6, 8)
    program, result = run_module(module, x)
    close(result, module(x).detach().numpy(), 2e-6)


def test_half_precision_follows_torch_dtypes():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8, dtype=torch.bfloat16)

        def forward(self, x):
            y = nn.functional.layer_norm(self.fc(x), (8,)) * 0.5 + torch.tensor(2.0, device=x.device)
            return y, y.float() * 3.0, nn.functional.softmax(y, dim=-1, dtype=torch.float32).to(y.dtype)

    program = from_torch(Mixed(), torch.ones(2, 8, dtype=torch.bfloat16))
    assert [r.dtype for r in program.results] == ["bfloat16", "float32", "bfloat16"]


@pytest.mark.parametrize(
    ("make", "inputs", "options", "sentence"),
    [
        (
            lambda: nn.Linear(8, 4),
            lambda: meta(2, 7),
            {},
            r"`Linear` could not be lowered: RuntimeError: mat1 and mat2 shapes cannot be multiplied \(2x7 and 8x4\)",
        ),
        (lambda: nn.Linear(8, 4), lambda: meta(2, 8), {"remat": "half"}, "remat `half` does not exist"),
        (lambda: nn.BatchNorm1d(4, momentum=None), lambda: meta(2, 4), {"train": True}, "`momentum=None`"),
        (
            lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
            lambda: (meta(3, 2, 8),) * 3,
            {},
            "`add_bias_kv`.* is not supported",
        ),
    ],
)
def test_bad_modules(make, inputs, options, sentence):
    with pytest.raises(UserError, match=sentence):
        from_torch(make().to("meta"), inputs(), **options)


class Odd(nn.Module):
    def forward(self, x):
        return torch.special.airy_ai(x)


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Picking(nn.Module):
    def forward(self, x):
        return x[x > 0]


class Mistyped(nn.Module):
    def forward(self, x):
        return x.no_such_method()


@pytest.mark.parametrize(
    ("inner", "sentence"),
    [
        (Odd, "uses a torch operation that has no lowering .*airy_ai.* in `1`"),
        (Branching, r"its code asks for the values of a tensor in `1` \(Branching.forward at test_torch.py:\d+\), but"),
        (Picking, r"asks for the values of a tensor in `1` \(Picking.forward .*; replace the `if`"),
        (
            Mistyped,
            r"AttributeError: .*'no_such_method' in `1` \(Mistyped.forward at test_torch.py:\d+\); if the module",
        ),
    ],
)
def test_what_does_not_lower_is_named_with_its_module(inner, sentence):
    module = nn.Sequential(nn.Linear(8, 8), inner()).to("meta")
    with pytest.raises(UserError, match="`Sequential` .*" + sentence):
        from_torch(module, meta(2, 8))


def test_state_and_random_draws_of_one_trace_do_not_reach_another():
    """Trace a module several times: random keys and tensors of cached properties must not leak between traces."""

    class Drawing(nn.Module):
        def forward(self, x):
            return x + torch.randn(8) + torch.rand(8)

    for _ in range(2):
        program = from_torch(Drawing(), meta(2, 8))
    first, second = (np.asarray(jax.tree.leaves(jax.jit(program.fn)(*program.make_args(0)))[0]) for _ in range(2))
    assert (first == second).all() and len(set(first[0])) == 8


def test_values_for_eager_torch_keep_the_width_of_their_floats():
    from autoshard.program.torch.eager_twin import host_tensor

    thirds, whole = host_tensor(np.float32([1 / 3]), torch.bfloat16), host_tensor(np.int32([3]), torch.int64)
    assert thirds.dtype is torch.float32 and thirds.item() == np.float32(1 / 3)
    assert whole.dtype is torch.int64 and whole.item() == 3
    assert host_tensor(np.float32([0.5]).astype(jax.numpy.bfloat16), torch.bfloat16).dtype is torch.float32


@pytest.mark.parametrize("values", [[True, False], np.uint8([3, 255]), np.int8([-128, 5]), np.int64([-7, 2**31 - 1])])
def test_inputs_of_flags_and_of_any_whole_numbers(values):
    class Selected(nn.Module):
        def forward(self, x, chosen):
            return torch.where(chosen > 0, x, -x)

    inputs = torch.randn(3, 2), torch.tensor(values)
    _, found = run_module(Selected(), *inputs)
    close(found, Selected()(*inputs))


def test_options_are_named_in_the_docstring_and_others_are_refused():
    words = set(re.findall(r"`(\w+)`", from_torch.__doc__ or ""))
    assert set(ModuleOptions.__annotations__) <= words
    with pytest.raises(TypeError, match=r"from_torch\(\) got an unexpected keyword argument 'remta'"):
        from_torch(nn.Linear(4, 4), meta(2, 4), **{"remta": "full"})
    with pytest.raises(TypeError, match=r"from_config\(\) got an unexpected keyword argument 'cast_inputs'"):
        from_config("llama-tiny", **{"cast_inputs": True})


def test_an_option_that_is_none_has_its_default():
    module = nn.Linear(4, 4).to("meta")
    given = dict.fromkeys(ModuleOptions.__annotations__) | {"train": True}
    assert from_torch(module, meta(2, 4), **given).fingerprint == from_torch(module, meta(2, 4), train=True).fingerprint
