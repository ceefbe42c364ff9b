"""Buffers that torch modules write to: results of a planned step and arguments of the next."""

import jax
import numpy as np
import pytest
import torch
from hf_reference import close

from autoshard import UserError
from autoshard.program import from_torch
from autoshard.program.jax import optimizers


class Attending(torch.nn.Module):
    """Attention to a cache of earlier inputs, with a counter of calls that no checkpoint saves."""

    cache: torch.Tensor
    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.query, self.key = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(2, 16, 8))
        self.register_buffer("calls", torch.zeros(2, 1), persistent=False)

    def forward(self, x, place):
        self.cache[:, place] = self.key(x)
        self.calls.add_(1)
        weights = (self.query(x) @ self.cache.mT).softmax(-1)
        return x + weights @ self.cache / self.calls.view(2, 1, 1)


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Attending() for _ in range(3))

    def forward(self, x, place):
        for layer in self.layers:
            x = layer(x, place)
        return x


class Averaging(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
        return self.linear(x) - self.mean


@pytest.mark.parametrize("scan", [True, False])
def test_a_cache_of_a_module_goes_from_step_to_step(scan):
    torch.manual_seed(0)
    module = Decoder()
    steps = [torch.randn(2, 1, 8) for _ in range(3)]
    program = from_torch(module, (steps[0], torch.tensor([0])), scan=scan)
    assert any(note.startswith("The module writes to its buffers (`layers.") for note in program.notes)
    assert program.stacks == ((3,) if scan else ())
    params, _, buffers = program.make_args(0)
    kept = [each for each in program.arguments if each.name.endswith(("cache", "calls"))]
    assert len(kept) == len(buffers) and all(each.donated for each in kept)
    run = jax.jit(program.fn)
    with torch.no_grad():
        for place, x in enumerate(steps):
            given = {"x": x.numpy(), "place": np.array([place], np.int32)}
            found, buffers = run(params, given, buffers)
            close(found, module(x, torch.tensor([place])).numpy(), 1e-5)
    caches = np.stack([layer.cache.numpy() for layer in module.layers])
    name = "layers.*.cache" if scan else "layers.1.cache"
    close(buffers[name], caches if scan else caches[1], 1e-5)


def test_a_training_step_gives_back_what_the_module_wrote():
    torch.manual_seed(0)
    module, x = Averaging(), torch.randn(3, 4)
    program = from_torch(module, (x,), train=True)
    params, state, batch, buffers = program.make_args(0)
    *_, buffers, loss = jax.jit(program.fn)(params, state, {key: x.numpy() for key in batch}, buffers)
    close(loss, (module(x) ** 2).mean().detach().numpy())
    close(buffers["mean"], module.mean.numpy())


class Renormalising(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        self.weight.data.div_(self.weight.data.norm())
        return x @ self.weight


class Written(torch.nn.Module):
    """A layer that writes results of operations to its buffers by `out`, into a view and a pair too."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("unit", torch.zeros(6, 8))
        self.register_buffer("highest", torch.zeros(6))
        self.register_buffer("place", torch.zeros(6, dtype=torch.long))

    def forward(self, x):
        hidden = self.linear(x)
        with torch.no_grad():
            torch.nn.functional.normalize(hidden, dim=1, out=self.unit)
            torch.add(hidden[:2], 1, out=self.unit[2:4])
            torch.max(hidden, 1, out=(self.highest, self.place))
        return hidden * self.unit + self.highest[:, None] * self.place[:, None]


UPDATING = {
    "spectral norm": lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(8, 8)),
    "older spectral norm": lambda: torch.nn.utils.spectral_norm(torch.nn.Linear(8, 8)),
    "instance norm": lambda: torch.nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
    "outputs": Written,
}


@pytest.mark.parametrize("kind", UPDATING)
def test_modules_that_update_their_buffers_in_training_do_as_torch(kind):
    """Take two steps of SGD, the second from the first one's buffers."""
    torch.manual_seed(0)
    module, x = torch.nn.Sequential(UPDATING[kind]()).train(), torch.randn(6, 8)
    x = x[None].repeat(2, 1, 1) if kind == "instance norm" else x
    program = from_torch(module, (x,), train=True, optimizer="sgd", loss=lambda out: out.square().mean())
    params, state, _, buffers = program.make_args(0)
    run, optimizer = jax.jit(program.fn), torch.optim.SGD(module.parameters(), lr=optimizers.LEARNING_RATE)
    for _ in range(2):
        params, state, buffers, loss = run(params, state, {"input": x.numpy()}, buffers)
        expected = module(x).square().mean()
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        close(loss, expected.detach().numpy(), 1e-5)
    for name, buffer in module.named_buffers():
        if name in buffers:
            close(buffers[name], buffer.detach().numpy(), 1e-5)
    assert len(buffers) >= 2


def test_a_tensor_that_is_no_buffer_has_the_values_of_the_first_call_and_a_note_says_so():
    class Halving(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = torch.nn.Linear(4, 4), torch.ones(4)

        def forward(self, x):
            self.scale.mul_(0.5)
            return self.linear(x) * self.scale

    module, x = Halving(), torch.randn(3, 4)
    program = from_torch(module, (x,))
    assert any("changes its attribute `scale` in a call" in note for note in program.notes)
    assert torch.equal(module.scale, torch.ones(4))
    close(jax.jit(program.fn)(program.make_args(0)[0], {"x": x.numpy()}), module(x).detach().numpy(), 1e-5)


@pytest.mark.parametrize("train", [False, True])
def test_a_module_that_writes_to_its_parameters_is_refused(train):
    with pytest.raises(UserError, match="writes in place to its parameter `weight`"):
        from_torch(Renormalising(), (torch.zeros(3, 4),), train=train)


@pytest.mark.parametrize("options, said", [({"max_norm": 1.0}, "max_norm"), ({"scale_grad_by_freq": True}, "by_freq")])
def test_an_embedding_that_changes_its_weights_or_gradients_is_refused(options, said):
    module = torch.nn.Embedding(10, 4, **options)
    with pytest.raises(UserError, match=f"embedding with `.*{said}`"):
        from_torch(module, (torch.tensor([1, 2]),), train=True)
