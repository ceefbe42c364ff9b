"""Layers of one list that differ in more than their weights: each computes its own values, as in eager torch."""

import contextlib
import dataclasses
import enum
import fractions
import functools
import math
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch_modules import eager_step, training_step

from autoshard.errors import UserError
from autoshard.program import from_torch
from autoshard.program.torch.layer_differences import LayerComparison, opaque_numbers, reads


class Kind(enum.Enum):
    EVEN = 1.0
    ODD = 2.0


@dataclasses.dataclass
class Config:
    power: float


class Constant(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), value), requires_grad=False)

    def forward(self, x):
        return x * self.weight


def closure(scale):
    return lambda x: x * scale


def default(scale):
    def apply(x, scale=scale):
        return x * scale

    return apply


# An attribute of a layer that depends on its number, and its use in the forward pass.
HELD = {
    "tensor": (lambda i: torch.tensor(i + 0.5), lambda held, x: x * held),
    "tensors in a list": (lambda i: [torch.tensor(i + 0.5)], lambda held, x: x * held[0]),
    "numpy scalar": (lambda i: np.float32(i + 0.5), lambda held, x: x * held),
    "numpy integer": (lambda i: np.int64(i), lambda held, x: x * (1 + int(held))),
    "array": (lambda i: np.full(8, i + 0.5, np.float32), lambda held, x: x * torch.as_tensor(held)),
    "dict": (lambda i: {"default": i + 0.5}, lambda held, x: x * held["default"]),
    "dataclass": (lambda i: Config(i + 0.5), lambda held, x: x * held.power),
    "namespace": (lambda i: types.SimpleNamespace(power=i + 0.5), lambda held, x: x * held.power),
    "enum": (lambda i: Kind.ODD if i % 2 else Kind.EVEN, lambda held, x: x * held.value),
    "dtype": (lambda i: torch.bfloat16 if i > 1 else torch.float32, lambda held, x: x.to(held).float()),
    "slice": (lambda i: slice(0, 2 * i), lambda held, x: torch.cat([x[:, held] * 2, x[:, held.stop :]], 1)),
    "set": (lambda i: {i}, lambda held, x: x * (1 + max(held))),
    "range": (lambda i: range(i), lambda held, x: x * (1 + len(held))),
    "bytes": (lambda i: bytes([i]), lambda held, x: x * (1 + held[0])),
    "complex": (lambda i: complex(i, 1), lambda held, x: x * held.real),
    "fraction": (lambda i: fractions.Fraction(i + 1, 3), lambda held, x: x * float(held)),
    "partial": (lambda i: functools.partial(torch.mul, other=i + 0.5), lambda held, x: held(x)),
    "closure": (lambda i: closure(i + 0.5), lambda held, x: held(x)),
    "default argument": (lambda i: default(i + 0.5), lambda held, x: held(x)),
    "module in a list": (lambda i: [Constant(i + 0.5)], lambda held, x: held[0](x)),
    "number in a condition": (lambda i: i, lambda held, x: torch.relu(x) if held == 2 else x),
    "negative zero": (lambda i: -0.0 if i else 0.0, lambda held, x: x * math.copysign(2.0, held)),
}


class Layer(nn.Module):
    def __init__(self, number, name, make, use):
        super().__init__()
        self.fc, self.use = nn.Linear(8, 8), use
        self.name = name
        setattr(self, name, make(number))

    def forward(self, x):
        return x + self.use(getattr(self, self.name), torch.tanh(self.fc(x)))


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def check(module, *inputs, **options):
    """Compare a traced step with eager torch; return the program."""
    expected, gradients = eager_step(module, *inputs)
    program, loss, found = training_step(module, *inputs, **options)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[name], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=name)
    return program


@pytest.mark.parametrize("make", [lambda i: float(i + 1), lambda i: torch.tensor(i + 1.0), lambda i: (i + 1, 2.0)])
def test_layers_that_are_called_with_different_arguments_compute_their_own(make):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, scale):
            return x + torch.tanh(self.fc(x)) * (scale[0] if isinstance(scale, tuple) else scale)

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Scaled() for _ in range(3))

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = layer(x, make(i))
            return x

    torch.manual_seed(0)
    check(Calls(), torch.randn(4, 8))


def stacked(program):
    return [name for name in program.weights if name.endswith("bias") and len(program.weights[name]) > 1]


# Layers are compared by what their attributes hold, whether a name is private or public.
PRIVATE = ("tensor", "closure", "number in a condition")


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "held") for kind in HELD),
        *(pytest.param(kind, "_held", marks=[] if kind in PRIVATE else [pytest.mark.full]) for kind in HELD),
    ],
)
def test_layers_that_hold_different_things_compute_different_things(kind, name):
    torch.manual_seed(0)
    make, use = HELD[kind]
    check(Net(Layer(i, name, make, use) for i in range(4)), torch.randn(4, 8))


@pytest.mark.parametrize("kind", [kind for kind in HELD if kind not in ("partial", "closure", "module in a list")])
def test_layers_that_hold_equal_things_are_scanned(kind):
    torch.manual_seed(0)
    make, use = HELD[kind]
    program = check(Net(Layer(1, "held", make, use) for i in range(4)), torch.randn(4, 8))
    assert stacked(program) == ["layers.*.fc.bias"]


class Numbered(nn.Module):
    """A layer that knows its number and computes with it."""

    def __init__(self, number, use=None):
        super().__init__()
        self.fc, self._number, self.use = nn.Linear(8, 8), number, use

    def forward(self, x):
        y = torch.tanh(self.fc(x))
        return x + (y if self.use is None else self.use(self._number, y))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("use", "stacks"),
    [
        (None, ["layers.*.fc.bias"]),
        (lambda n, y: y if n < 100 else -y, ["layers.*.fc.bias"]),
        (lambda n, y: y.relu() if n % 2 else y, ["layers.[0::2].fc.bias", "layers.[1::2].fc.bias"]),
        (lambda n, y: y * 0.1 if n >= 2 else y, ["layers.[0:2].fc.bias", "layers.[2:].fc.bias"]),
        (lambda n, y: y / (n + 1), []),
    ],
    ids=["unused", "read without effect", "alternating", "threshold", "divided by"],
)
def test_layers_are_scanned_where_their_numbers_leave_them_equal(use, stacks):
    torch.manual_seed(0)
    module = Net(Numbered(i, use) for i in range(6))
    assert sorted(stacked(check(module, torch.randn(4, 8)))) == stacks
    assert sorted(stacked(check(module, torch.randn(4, 8), remat="full"))) == stacks


class Reversal(torch.autograd.Function):
    """The identity with a custom gradient."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


def test_layers_that_differ_in_their_gradients_alone_are_distinguished():
    torch.manual_seed(0)
    module = Net(Numbered(i, lambda n, y: Reversal.apply(y, n + 1.0)) for i in range(3))
    assert stacked(check(module, torch.randn(4, 8))) == []


def test_layers_that_count_in_a_common_object_are_not_scanned():
    torch.manual_seed(0)
    counter = {"calls": 0}

    def use(_, y):
        counter["calls"] += 1
        return y * (counter["calls"] % 3)

    program, _, _ = training_step(Net(Numbered(0, use) for _ in range(3)), torch.randn(4, 8))
    assert stacked(program) == []
    assert counter["calls"] == 0, "tracing restores what it changes"


def local_kind(scale):
    class Local(Numbered):
        def forward(self, x):
            return x + torch.tanh(self.fc(x)) * scale

    return Local


def test_classes_of_one_name_are_distinguished():
    torch.manual_seed(0)
    check(Net(local_kind(i + 0.5)(i) for i in range(3)), torch.randn(4, 8))


def method(layer, number):
    def forward(self, x):
        return x + torch.relu(self.fc(x))

    layer.forward = types.MethodType(forward, layer)


def wrapped(layer, number):
    def forward(module, before, x):
        return before(x) * 0.5

    layer.forward = functools.update_wrapper(functools.partial(forward, layer, layer.forward), layer.forward)


def numbered(layer, number):
    layer.forward = lambda x: x + torch.tanh(layer.fc(x)) * (number + 1)


def hooked(layer, number):
    layer.fc.register_forward_hook(lambda module, args, out: out * (number + 1))


def pre_hooked(layer, number):
    layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


@pytest.mark.few(3)
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    ("change", "stacks"),
    [(method, 1), (wrapped, 1), (numbered, 0), (hooked, 0), (pre_hooked, 0)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_forwards_and_hooks_of_single_layers_are_called(change, stacks, remat):
    torch.manual_seed(0)
    module = Net(Numbered(0) for _ in range(4))
    for number, layer in enumerate(module.layers):
        change(layer, number)
    assert len(stacked(check(module, torch.randn(4, 8), remat=remat))) == stacks


class Shared(nn.Module):
    def __init__(self, fc, table):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8), fc
        self.register_buffer("table", table)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x))) * self.get_buffer("table")


@pytest.mark.parametrize("remat", ["none", "full"])
def test_layers_that_share_a_module_are_scanned_with_its_weights_in_common(remat):
    torch.manual_seed(0)
    fc, table = nn.Linear(8, 8), torch.randn(8)
    module = Net(Shared(fc, table) for _ in range(4))
    program = check(module, torch.randn(4, 8), remat=remat)
    names = {a.name: a.shape for a in program.arguments if a.role == "parameter"}
    assert names["layers.0.fc.weight"] == (8, 8) and names["layers.*.norm.bias"] == (4, 8)
    assert [a.shape for a in program.arguments if a.name.endswith("table")] == [(8,)]
    check(Net([*(Shared(fc, table) for _ in range(3)), Shared(nn.Linear(8, 8), table)]), torch.randn(4, 8), remat=remat)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_one_layer_may_stand_in_a_list_many_times(remat):
    torch.manual_seed(0)
    layer = Numbered(0)
    check(Net([layer] * 4), torch.randn(4, 8), remat=remat)
    check(Net([layer, Numbered(0), layer, Numbered(0)]), torch.randn(4, 8), remat=remat)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b, self.c = self.a, nn.Linear(8, 8)
        self.tables = [self.c.weight]

    def forward(self, x):
        return self.b(torch.tanh(self.c(torch.tanh(self.a(x))))) @ self.tables[0]


def test_a_module_may_have_two_names_and_a_weight_stand_in_a_list():
    torch.manual_seed(0)
    check(Siamese(), torch.randn(4, 8))


@pytest.mark.few(3)
@pytest.mark.parametrize("part", ["", "weight", "norm.bias"])
@pytest.mark.parametrize("frozen", [(0, 1), (2, 3), (1,), (0, 2), (0, 1, 2, 3)])
def test_frozen_parameters_have_no_gradient_and_all_others_do(frozen, part):
    torch.manual_seed(0)
    module = Net(Shared(nn.Linear(8, 8), torch.ones(8)) for _ in range(4))
    for number in frozen:
        for name, parameter in module.layers[number].named_parameters():
            parameter.requires_grad_(not name.endswith(part))
    if frozen == (0, 1, 2, 3) and not part:
        module.layers.append(nn.Linear(8, 8))
    check(module, torch.randn(4, 8))


class Keeping(nn.Module):
    """A module that stores values of a call in every way that a module can."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Numbered(i) for i in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.seen, self.by_name, self.calls, self.last = [], {"x": None}, 0, None
        self.config = types.SimpleNamespace(cached=None)
        self.layers[0].register_forward_hook(lambda module, args, out: self.seen.append(out))

    def forward(self, x):
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        self.last = self.by_name["x"] = self.config.cached = x
        self.by_name["y"] = self.drop(x)
        return self.norm(x)


def contents(value, memo):
    """List all objects that can be reached from a module, by identity."""
    if id(value) in memo:
        return id(value)
    memo.add(id(value))
    if isinstance(value, dict):
        return [(key, contents(each, memo)) for key, each in value.items()]
    if isinstance(value, list):
        return [contents(each, memo) for each in value]
    return [id(value), contents(value.__dict__, memo) if isinstance(value, nn.Module | types.SimpleNamespace) else None]


class Failing(Keeping):
    def forward(self, x):
        super().forward(x)
        return x.nonsense()


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("kind", [Keeping, Failing, Siamese])
def test_a_module_is_left_as_it_was(kind, remat):
    torch.manual_seed(0)
    module = kind()
    before, state = contents(module, set()), {key: value.clone() for key, value in module.state_dict().items()}
    x = torch.randn(4, 8)
    try:
        training_step(module, x, remat=remat)
    except Exception:
        assert kind is Failing
    else:
        assert kind is not Failing
    assert contents(module, set()) == before
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
    assert all(child.training for child in module.modules())
    assert all(isinstance(parameter, nn.Parameter) for parameter in module.parameters())


def test_what_is_read_is_seen():
    first, other = Numbered(0), Numbered(1)
    assert LayerComparison(first).differences(other) == {("", "_number")}
    with reads(first, [("", "_number")]) as seen:
        first(torch.zeros(1, 8))
        assert seen == []
        assert (other._number, first._number) == (1, 0)
        assert seen == [("", "_number")]
        vars(first)
        assert len(seen) == 2
    assert "__getattribute__" not in vars(Numbered)


@pytest.mark.parametrize(
    ("use", "uses"),
    [
        (lambda n: [n, {"number": n}, n is None], 0),
        (lambda n: n % 2, 1),
        (lambda n: [7, 8, 9][n], 1),
        (lambda n: "even" if n == 2 else "odd", 1),
        (lambda n: {2: 3}.get(n), 1),
        (lambda n: f"{n}", 1),
        (lambda n: isinstance(n, int), 1),
        (lambda n: 3.0 / n, 1),
        (lambda n: torch.ones(3)[n], 1),
        (lambda n: -n if n else 1, 1),
    ],
)
def test_the_use_of_a_number_is_seen(use, uses):
    module, plain = Numbered(2), use(2)
    found = plain
    # arithmetic of a float and the stand-in raises TypeError
    with opaque_numbers(module, [("", "_number")]) as used, contextlib.suppress(TypeError):
        found = use(module._number)
    assert bool(used) == bool(uses) and module._number == 2
    assert uses == 0 or found == plain


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of rank 4."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def test_frozen_weights_have_a_role_and_no_gradient_flops():
    torch.manual_seed(0)
    program = check(Net(Adapted() for _ in range(4)), torch.randn(4, 8))
    roles = {a.name: a.role.value for a in program.arguments if a.name.startswith("layers")}
    assert roles == {
        "layers.*.base.weight": "frozen",
        "layers.*.down.weight": "parameter",
        "layers.*.up.weight": "parameter",
    }
    # The base runs forward and for the gradient of its input, the adapter also for the gradient of its weights.
    assert program.model_flops == 4 * (2 * 2 * 4 * 8 * 8 + 3 * 2 * 2 * 4 * 8 * 4)
    assert program.weights["layers.*.base.weight"] == tuple(f"layers.{n}.base.weight" for n in range(4))


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_frozen_body_is_computed_forward_alone(scan, remat):
    torch.manual_seed(0)
    module = Net([*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 2)])
    module.layers[:3].requires_grad_(False)
    program = check(module, torch.randn(4, 8), scan=scan, remat=remat)
    assert program.model_flops == 3 * 2 * 4 * 8 * 8 + 2 * 2 * 4 * 8 * 2


def test_baselines_split_frozen_weights_too():
    import autoshard

    with torch.device("meta"):
        module, x = Net(Adapted() for _ in range(4)), torch.zeros(64, 8)
    plan = autoshard.plan(from_torch(module, x, train=True), topology="v5e:2x4", mesh={"data": 8})
    held = {name: plan.baselines[name].memory["frozen_parameters"] for name in ("fsdp", "data_parallel")}
    assert held["fsdp"] * 4 < held["data_parallel"]


class Counting(nn.Module):
    """A module that counts its calls in a number, and in a buffer that it assigns."""

    def __init__(self):
        super().__init__()
        self.fc, self.calls = nn.Linear(8, 8), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen = self.get_buffer("seen") + 1
        return self.fc(x) * self.calls * self.seen


def test_what_a_module_assigns_is_given_back_or_noted():
    module, x = Counting(), torch.randn(4, 8)
    program, loss, _ = training_step(module, x)
    np.testing.assert_allclose(loss, eager_step(module, x)[0], rtol=1e-5)
    assert [a.name for a in program.arguments if a.result is not None and a.role == "other"] == ["seen"]
    assert any("changes its attribute `calls` in a call" in note for note in program.notes)


class Growing(Counting):
    def forward(self, x):
        self.seen = torch.stack([self.seen, self.seen])
        return self.fc(x)


def test_a_buffer_that_grows_is_refused():
    with pytest.raises(UserError, match=r"assigns float32\[2\] to `seen`, which is \[\]"):
        from_torch(Growing(), torch.randn(4, 8))


def test_parameters_that_share_elements_are_not_trained_apart():
    wide, narrow = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)
    module = nn.Sequential(wide, narrow)
    narrow.weight = nn.Parameter(wide.weight.data[:4])
    with pytest.raises(UserError, match="share elements, `1.weight` and `0.weight`, which a planned step would train"):
        from_torch(module, torch.randn(4, 8), train=True)
    assert from_torch(module, torch.randn(4, 8))
    pairs = torch.randn(32, 2)
    narrow.weight, wide.weight = nn.Parameter(pairs[:, 0].view(4, 8)), nn.Parameter(torch.randn(8, 8))
    narrow.bias = nn.Parameter(pairs[:4, 1])
    assert from_torch(module, torch.randn(4, 8), train=True)
    narrow.bias = nn.Parameter(pairs[4:6].flatten())
    with pytest.raises(UserError, match="share elements, `1.weight` and `1.bias`, which a planned step would train"):
        from_torch(module, torch.randn(4, 8), train=True)
    narrow.bias = None  # type: ignore[assignment]
    flat = torch.randn(96)
    wide.weight, narrow.weight = (nn.Parameter(x) for x in (flat[:64].view(8, 8), flat[64:].view(4, 8)))
    assert from_torch(module, torch.randn(4, 8), train=True)


class Partly(Net):
    """The first layers are called without gradients."""

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            with torch.set_grad_enabled(number >= 2):
                x = layer(x)
        return x


def test_layers_that_are_called_without_gradients_have_none():
    torch.manual_seed(0)
    module, x = Partly(Numbered(i) for i in range(4)), torch.randn(4, 8)
    expected, gradients = eager_step(module, x)
    program, loss, found = training_step(module, x)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name, gradient in found.items():
        wanted = gradients.get(name, np.zeros_like(gradient))
        np.testing.assert_allclose(gradient, wanted, atol=1e-5 * (np.abs(wanted).max() or 1e-3), err_msg=name)
    assert stacked(program) == []
