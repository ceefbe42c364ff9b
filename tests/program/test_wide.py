"""Numbers beyond 32 bits: a traced module computes them in 64 bits, as eager torch does, and warns."""

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch_modules import eager_step, meta, run_module, training_step

from autoshard.errors import UserError
from autoshard.program import from_torch, open_source


ROWS = 1009
HASHES = {
    "n-gram": lambda ids: (ids[:, :-1] * 1000003 + ids[:, 1:]) % ROWS,
    "product": lambda ids: (ids * 300_000_000) % ROWS,
    "constants of 63 bits": lambda ids: (ids * 6364136223846793005 + 1442695040888963407) % ROWS,
    "running sum": lambda ids: (ids * 1000).cumsum(1) * 100_000 % ROWS,
    "shifts": lambda ids: ((ids << 20) ^ (ids << 13) ^ (ids >> 3)) % ROWS,
    "double": lambda ids: (ids.double() * 1234567.891).floor().long() % ROWS,
    "power": lambda ids: ids.pow(3) % ROWS,
}


class Hashed(nn.Module):
    def __init__(self, hashed):
        super().__init__()
        self.table, self.hashed = nn.Embedding(ROWS, 8), hashed

    def forward(self, ids):
        return self.table(self.hashed(ids))


class Rotary(nn.Module):
    """Positions up to a million, rotated by angles in float64."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        positions = torch.arange(x.shape[1], dtype=torch.float64) + 1e6
        angles = positions[:, None] / 10000 ** (torch.arange(0, 8, dtype=torch.float64) / 8)
        return x + torch.tanh(self.fc(x)) * angles.cos().float()


class Variance(nn.Module):
    """The difference of two large sums of squares."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = (self.fc(x) + 1000).double()
        return (y.square().mean(-1) - y.mean(-1).square()).float()


class Constant(nn.Module):
    def __init__(self, values, persistent=False):
        super().__init__()
        self.table = nn.Embedding(ROWS, 8)
        self.register_buffer("factors", values, persistent=persistent)

    def forward(self, ids):
        return self.table((ids * self.get_buffer("factors")).long() % ROWS)


class Sum(nn.Module):
    def forward(self, ids, more):
        return ids + more


def check(module, *inputs, wide=True, **options):
    loss, gradients = eager_step(module, *inputs)
    program, traced, found = training_step(module, *inputs, **options)
    np.testing.assert_allclose(traced, loss, rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[name], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=name)
    assert any("in 64 bits where torch does so" in note for note in program.notes) is wide
    return program


@pytest.mark.parametrize("kind", HASHES)
def test_whole_numbers_past_31_bits(kind):
    torch.manual_seed(0)
    program = check(Hashed(HASHES[kind]), torch.randint(0, 50_000, (8, 16)))
    assert {a.dtype for a in program.arguments} == {"float32", "int32"}


SMALL, SQUARE, CUBE = torch.tensor([3, 40, 7]), torch.tensor([[50000, 40000], [2, 3]]), torch.full((20, 20, 20), 1000)
MANY, NONE = torch.full((100,), 50_000_000), torch.zeros(100, dtype=torch.long)
OPERATIONS = {
    "a tensor as exponent": (lambda t: torch.pow(2, t), SMALL),
    "a tensor behind **": (lambda t: 2**t, SMALL),
    "a tensor as distance": (lambda t: 1 << t, SMALL),
    "a tensor as divisor": (lambda t: 10**9 // t * 7, SMALL),
    "remainders of a negative number": (lambda t: torch.remainder(-5, t) * 100_000, SMALL * 1000),
    "alpha": (lambda t: torch.add(t, t, alpha=100_000_000), SMALL),
    "alpha of rsub": (lambda t: torch.rsub(t, t, alpha=300_000_000), SMALL),
    "addmm": (lambda t: torch.addmm(t, t, t), SQUARE),
    "baddbmm": (lambda t: torch.baddbmm(t[None], t[None], t[None], beta=5), SQUARE),
    "addbmm": (lambda t: torch.addbmm(t, t[None], t[None]), SQUARE),
    "addmv": (lambda t: torch.addmv(t[0], t, t[0]), SQUARE),
    "addr": (lambda t: torch.addr(t, t[0], t[0]), SQUARE),
    "addcmul to zeros": (lambda t: torch.addcmul(torch.zeros_like(t), t, t, value=10), SQUARE),
    "kron": (lambda t: torch.kron(t // 10, t // 10) * 1000, SQUARE),
    "cross": (lambda t: torch.linalg.cross(t, t.flip(0)) * 1000, torch.tensor([[5000, 4000, 3], [2, 3, 5000]])),
    "matrix_power": (lambda t: torch.linalg.matrix_power(t, 3), SQUARE),
    "einsum over three dims": (lambda t: torch.einsum("abc,abc->", t, t), CUBE),
    "einsum over an ellipsis": (lambda t: torch.einsum("...c,...c->", t, t), CUBE),
    "tensordot over two dims": (lambda t: torch.tensordot(t, t, 2), CUBE[0]),
    "index_add": (lambda t: t.new_zeros(3).index_add(0, NONE, t), MANY),
    "scatter_add": (lambda t: t.new_zeros(3).scatter_add(0, NONE, t), MANY),
}
FITTING = {
    "powers": (lambda t: 2 ** (t % 5), SMALL),
    "remainders": (lambda t: 1000 % t, SMALL),
    "quotients": (lambda t: t // 7 * 1000, SMALL),
    "differences": (lambda t: 1000 - t, SMALL),
    "einsum over one dim": (lambda t: torch.einsum("...c,...c->...", t, t), CUBE // 10),
}


@pytest.mark.parametrize("name", [*OPERATIONS, *FITTING])
def test_bounds_follow_the_operands(name):
    class Body(nn.Module):
        def forward(self, numbers):
            return body(numbers) % ROWS

    body, numbers = (OPERATIONS | FITTING)[name]
    program, found = run_module(Body(), numbers)
    np.testing.assert_array_equal(found, Body()(numbers))
    assert any("in 64 bits where torch does so" in note for note in program.notes) is (name in OPERATIONS)


@pytest.mark.few(4)
@pytest.mark.parametrize("options", [{}, {"remat": "full"}, {"scan": False}, {"microbatches": 2}])
@pytest.mark.parametrize("kind", [Rotary, Variance])
def test_float64(kind, options):
    torch.manual_seed(0)
    program = check(nn.Sequential(Rotary(), Rotary(), kind()), torch.randn(4, 16, 8), **options)
    assert "float64 in `0` (Rotary.forward at test_wide.py:" in program.notes[-1]


@pytest.mark.parametrize("values", [torch.tensor(2**40 + 1), torch.tensor([1.0 + 2**-40], dtype=torch.float64)])
def test_constants_of_64_bits(values):
    check(Constant(values), torch.randint(0, 50_000, (8, 16)))


def test_ids_stay_cheap():
    torch.manual_seed(0)
    ids = torch.randint(0, 50_000, (8, 16))
    for plain in (lambda ids: ids % ROWS, lambda ids: (ids + 1).cumsum(1) % ROWS, lambda ids: (ids * 7 + 3) % ROWS):
        program = check(Hashed(plain), ids, wide=False)
        assert "i64" not in str(jax.make_jaxpr(program.fn)(*program.args))


NORMS = {
    "layer_norm": lambda x, scale: functional.layer_norm(x, (8,), scale, scale),
    "rms_norm": lambda x, scale: (functional.rms_norm(x, (8,), scale) - scale) * 1e6,
    "batch_norm": lambda x, scale: functional.batch_norm(x, None, None, scale, scale, training=True),
    "cross_entropy": lambda x, scale: functional.cross_entropy(x, torch.tensor([1, 2, 3, 4]), scale),
    "cross_entropy of probabilities": lambda x, scale: functional.cross_entropy(x, x.detach().softmax(-1)),
}


@pytest.mark.parametrize("kind", NORMS)
def test_layers_of_float64_are_computed_in_it(kind):
    class Body(nn.Module):
        def forward(self, x):
            scale = torch.linspace(0.5, 2, 8, dtype=torch.float64)
            return NORMS[kind](x.double() + 1e6, scale)

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    _, found = run_module(Body(), x)
    np.testing.assert_allclose(found, Body()(x), rtol=1e-6)


def test_what_arguments_cannot_hold_is_refused():
    with pytest.raises(UserError, match="input `ids` holds 8589934595, and a planned step takes whole numbers of 32"):
        from_torch(Hashed(HASHES["product"]), torch.arange(4)[None] + 2**33)
    after_a_float = {"ids": torch.ones(1, dtype=torch.float64), "more": torch.arange(4) + 2**33}
    with pytest.raises(UserError, match="input `more` holds 8589934595, and a planned step takes whole numbers of 32"):
        from_torch(Sum(), (), after_a_float)
    with pytest.raises(UserError, match="the parameter `weight` is float64, and a planned step takes 32 bits at most"):
        from_torch(nn.Linear(8, 8).double(), torch.randn(4, 8).double())
    with pytest.raises(UserError, match="the buffer `factors` holds 1099511627776, and a planned step takes 32 bits"):
        from_torch(Constant(torch.tensor(2**40), persistent=True), torch.arange(4)[None])
    assert from_torch(nn.Linear(8, 8).double(), meta(4, 8), dtype="float32")


def test_planned_steps_compute_the_same():
    import autoshard

    torch.manual_seed(0)
    module, ids = Hashed(HASHES["n-gram"]), torch.randint(0, 50_000, (8, 17))
    program, loss, _ = training_step(module, ids)
    plan = autoshard.plan(program, topology="cpu:1")
    params, state, _ = program.make_args(0)
    np.testing.assert_allclose(plan.jit(program.fn)(params, state, {"ids": ids.numpy()})[-1], loss, rtol=1e-6)


def test_usual_models_have_none_of_it():
    for name in ("llama-tiny", "t5-tiny"):
        assert not any("64 bits" in note for note in open_source(f"hf:{name}", train=True).notes)
