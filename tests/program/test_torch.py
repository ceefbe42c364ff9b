"""Any torch module: names, losses, buffers, scans that hold and scans that do not, refusals."""

import collections
import re

import jax
import numpy as np
import pytest
import torch
from hf_reference import close
from torch import nn

from autoshard.errors import UserError
from autoshard.program import Role, from_torch


def _meta(*shape):
    return torch.empty(*shape, device="meta")


class Layer(nn.Module):
    def __init__(self, width, scale=1.0):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.scale = scale

    def forward(self, hidden, shift):
        return hidden + torch.tanh(self.fc(self.norm(hidden))) * self.scale + shift


class Chain(nn.Module):
    """Layers called one after another, with a hook for what happens in between."""

    def __init__(self, layers=4, width=8, scales=None):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, 1.0 if scales is None else scales[i]) for i in range(layers))

    def between(self, index, hidden):
        return hidden

    def forward(self, x, shift):
        for index, layer in enumerate(self.layers):
            x = layer(self.between(index, x), shift)
        return x


class Doubling(Chain):
    def between(self, index, hidden):
        return hidden * 2


class Collecting(Chain):
    def forward(self, x, shift):
        seen = []
        for layer in self.layers:
            x = layer(x, shift)
            seen.append(x)
        return sum(seen)


class Reversed(Chain):
    def forward(self, x, shift):
        for layer in reversed(self.layers):
            x = layer(x, shift)
        return x


class Shifting(Chain):
    def forward(self, x, shift):
        for index, layer in enumerate(self.layers):
            x = layer(x, shift * index)
        return x


class Twice(Chain):
    def forward(self, x, shift):
        return super().forward(super().forward(x, shift), shift)


def _run(module, *inputs, **options):
    import jax

    program = from_torch(module, inputs, **options)
    args = program.make_args(0)
    batch = {k: v.numpy() for k, v in zip(program.args[1], inputs, strict=True)}
    return program, jax.jit(program.fn)(args[0], batch, *args[2:])


@pytest.mark.parametrize(
    ("kind", "scanned", "note"),
    [
        (Chain, True, None),
        (Twice, True, None),
        (Doubling, False, "something happens to the hidden state between two layers"),
        (Collecting, False, "the hidden state between two layers is used elsewhere"),
        (Reversed, False, "the layers are not called in order"),
        (Shifting, False, "the layers are called with different arguments"),
    ],
)
def test_layers_are_scanned_only_if_they_are_a_chain(kind, scanned, note):
    torch.manual_seed(0)
    module = kind().eval()
    x, shift = torch.randn(3, 8), torch.randn(8)
    program, result = _run(module, x, shift)
    close(result, module(x, shift).detach().numpy())
    names = {a.name for a in program.arguments}
    assert ("layers.*.fc.weight" in names) is scanned and ("layers.0.fc.weight" in names) is not scanned
    assert program.notes == (() if note is None else (f"The layers of `layers` are not scanned: {note}.",))


def test_unlike_layers_are_grouped_by_period_and_run():
    torch.manual_seed(0)
    module = Chain(7, scales=[5.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0]).eval()
    x, shift = torch.randn(3, 8), torch.randn(8)
    program, result = _run(module, x, shift)
    close(result, module(x, shift).detach().numpy())
    shapes = {a.name: a.shape for a in program.arguments if a.name.endswith("fc.weight")}
    assert shapes == {
        "layers.0.fc.weight": (8, 8),
        "layers.[1::2].fc.weight": (3, 8, 8),
        "layers.[2::2].fc.weight": (3, 8, 8),
    }


def test_the_module_is_left_as_it_was():
    module = Chain()
    before = {name: (id(p), p.clone()) for name, p in module.named_parameters()}
    _run(module, torch.randn(3, 8), torch.randn(8), remat="full")
    assert all("forward" not in layer.__dict__ for layer in module.layers)
    for name, parameter in module.named_parameters():
        assert id(parameter) == before[name][0] and torch.equal(parameter, before[name][1])


@pytest.mark.parametrize("remat", ["none", "dots", "full", "full:2+none", "none:1+dots:1+full"])
@pytest.mark.parametrize("kind", [Chain, Doubling])
def test_training_equals_torch_sgd(kind, remat):
    import jax

    from autoshard.program._train import LEARNING_RATE

    torch.manual_seed(0)
    module = kind().eval()
    x, shift, target = torch.randn(3, 8), torch.randn(8), torch.tensor([1, 7, 2])
    program = from_torch(
        module,
        (x, shift),
        train=True,
        loss=nn.functional.cross_entropy,
        targets=target,
        optimizer="sgd",
        remat=remat,
    )
    params, state, batch = program.make_args(0)
    batch = {"x": x.numpy(), "shift": shift.numpy(), "targets": target.numpy().astype(np.int32)}
    assert program.args[2].keys() == batch.keys()
    updated, _, loss = jax.jit(program.fn)(params, state, batch)
    expected = nn.functional.cross_entropy(module(x, shift), target)
    expected.backward()
    close(loss, expected.detach().numpy())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= LEARNING_RATE * parameter.grad
    again = from_torch(module, (x, shift), remat=remat).make_args(0)[0]
    assert updated.keys() == again.keys()
    for name in updated:
        close(updated[name], again[name])


def test_layers_with_choices_of_their_own_are_scanned_apart():
    def names(remat, **options):
        program = from_torch(Chain(6).eval(), (torch.randn(3, 8), torch.randn(8)), remat=remat, **options)
        assert program.layers == 6
        return {a.name: a.shape[0] for a in program.arguments if a.name.endswith("fc.weight")}

    assert names("full") == {"layers.*.fc.weight": 6}
    assert names("full:4+none") == {"layers.[0:4].fc.weight": 4, "layers.[4:].fc.weight": 2}
    assert names("full:4+full") == {"layers.*.fc.weight": 6}
    assert names("full:1+none") == {"layers.0.fc.weight": 8, "layers.[1:].fc.weight": 5}
    assert names("full:4+none", scan=False) == {f"layers.{n}.fc.weight": 8 for n in range(6)}


@pytest.mark.parametrize("scan", [True, False])
def test_only_layers_that_are_named_compute_again(scan):
    import jax

    def sines(remat):
        module = Chain(6).eval()
        program = from_torch(module, (torch.randn(3, 8), torch.randn(8)), train=True, remat=remat, scan=scan)
        text = str(jax.make_jaxpr(program.fn)(*program.args))
        return text.count("checkpoint[") + text.count("remat2[")

    assert sines("none") == 0
    assert 0 < sines("full:3+none") <= sines("full")
    if not scan:
        assert sines("full:2+none") < sines("full:4+none") < sines("full")


class Numbered(Chain):
    """Layers in a dict, by number, as a stage of a pipeline has them."""

    def __init__(self, layers=6, first=0):
        super().__init__(layers)
        self.layers = nn.ModuleDict({str(first + place): layer for place, layer in enumerate(self.layers)})

    def forward(self, x, shift):
        for layer in self.layers.values():
            x = layer(x, shift)
        return x


@pytest.mark.parametrize("first", [0, 4])
def test_layers_in_a_dict_are_scanned_and_made_again_as_in_a_list(first):
    inputs = torch.randn(3, 8), torch.randn(8)
    dicts, lists = Numbered(6, first), Chain(6)
    lists.load_state_dict(dict(zip(lists.state_dict(), dicts.state_dict().values(), strict=True)))
    names = [[a.name for a in from_torch(module.eval(), inputs).arguments] for module in (dicts, lists)]
    assert names[0] == names[1] and "layers.*.fc.weight" in names[0]
    options = {"train": True, "remat": "full:2+none"}
    parted = [from_torch(module, inputs, **options) for module in (dicts, lists)]
    assert parted[0].layers == parted[1].layers == 6
    assert f"layers.[{first}:{first + 2}].fc.weight" in [a.name for a in parted[0].arguments]
    made = [*parted, from_torch(dicts, inputs, train=True)]
    computed = [str(jax.make_jaxpr(program.fn)(*program.args)).count(" tanh ") for program in made]
    assert computed[0] == computed[1] > computed[2], "more than once only where it is made again"
    results = [jax.tree.leaves(program.fn(*program.make_args(0))) for program in parted]
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


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


def test_remat_without_layers_says_so():
    program = from_torch(nn.Linear(8, 8), _meta(4, 8), train=True, remat="full")
    assert any("remat `full` changes nothing: no layers were found in `Linear`" in note for note in program.notes)
    named = nn.Sequential(collections.OrderedDict(up=nn.Linear(8, 8), down=nn.Linear(8, 8)))
    program = from_torch(named, _meta(4, 8), train=True, remat="dots")
    assert any("remat `dots` changes nothing" in note for note in program.notes)
    assert not from_torch(nn.Linear(8, 8), _meta(4, 8), train=True).notes[1:]


@pytest.mark.parametrize("remat", ["full:6+none", "dots:2+full:9+none"])
def test_a_choice_for_more_layers_than_there_are_is_refused(remat):
    with pytest.raises(UserError, match="but the model has 6: leave at least one for the last choice"):
        from_torch(Chain(6).eval(), (torch.randn(3, 8), torch.randn(8)), remat=remat)


@pytest.mark.parametrize("remat", ["half", "full:0+none", "full+none", "full:2", "full:2+", ":2+none", "full:two+none"])
def test_what_is_no_choice_is_refused(remat):
    with pytest.raises(UserError, match=f"remat `{re.escape(remat)}` does not exist"):
        from_torch(Chain(6).eval(), (torch.randn(3, 8), torch.randn(8)), remat=remat)


def test_default_loss_is_named_in_the_notes():
    program = from_torch(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to("meta"), _meta(2, 4), train=True)
    assert program.notes == ("No loss was given: the step minimises the mean of squares of the first output.",)
    assert program.training and program.results[-1].shape == ()


def test_dropout_is_off_and_said():
    program = from_torch(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to("meta"), _meta(2, 4))
    assert program.notes == ("Dropout is off: the module runs in evaluation mode.",)


def test_names_roles_and_nested_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(_meta(4, 4))
            self.register_buffer("offset", _meta(4))
            self.register_buffer("ramp", torch.arange(4.0), persistent=False)

        def forward(self, pair, flag, *, extra):
            return {"out": pair["a"] @ self.w + pair["b"] + self.offset + self.ramp if flag else extra, "none": None}

    program = from_torch(Two(), ({"a": _meta(2, 4), "b": _meta(4)}, True), {"extra": _meta(3)})
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
    program, result = _run(module, ids)
    assert [a.name for a in program.arguments] == ["table.weight", "batch.ids"]
    close(result, module(ids).detach().numpy())
    assert program.model_flops == 2 * 3 * 8 * 16


def test_transformer_encoder_keeps_heads_and_batch_apart():
    import re

    import jax

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    module = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x = torch.randn(5, 7, 32)
    program, result = _run(module, x)
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
    program, result = _run(module, x)
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
            lambda: _meta(2, 7),
            {},
            "`Linear` could not be lowered: TypeError: dot_general",
        ),
        (lambda: nn.Linear(8, 4), lambda: _meta(2, 8), {"remat": "half"}, "remat `half` does not exist"),
        (lambda: nn.BatchNorm1d(4, momentum=None), lambda: _meta(2, 4), {"train": True}, "`momentum=None`"),
        (
            lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
            lambda: (_meta(3, 2, 8),) * 3,
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
        (Branching, r"its code asks for the values of a tensor in `1` \(Branching.forward at test_torch.py:\d+\), and"),
        (Picking, r"asks for the values of a tensor in `1` \(Picking.forward .*; replace the `if`"),
        (Mistyped, r"AttributeError: .*'no_such_method' in `1` \(Mistyped.forward at test_torch.py:\d+\)\.$"),
    ],
)
def test_what_does_not_lower_is_named_with_its_module(inner, sentence):
    module = nn.Sequential(nn.Linear(8, 8), inner()).to("meta")
    with pytest.raises(UserError, match="`Sequential` .*" + sentence):
        from_torch(module, _meta(2, 8))
