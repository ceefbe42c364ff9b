"""Layers of torch modules: valid and invalid scans, and the recomputation of the backward pass."""

import collections
import re

import jax
import numpy as np
import pytest
import torch
from hf_reference import close
from torch import nn
from torch_modules import Chain, Layer, meta, run_module

from autoshard.errors import UserError
from autoshard.program import from_torch
from autoshard.program.jax.jaxprs import equations


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


class Apart(Chain):
    def forward(self, x, shift):
        outputs = [layer(x, shift) for layer in self.layers]
        return sum(outputs)


class Weighing(Layer):
    """A layer that returns its weights too, as layers of attention do."""

    def forward(self, hidden, shift):
        weights = torch.softmax(self.fc(hidden), -1)
        return super().forward(hidden * weights, shift), weights


class Weighed(Chain):
    """A chain of such layers. `reads` selects the weights that are part of the result."""

    def __init__(self, reads):
        super().__init__()
        self.layers = nn.ModuleList(Weighing(8) for _ in range(4))
        self.reads = reads

    def forward(self, x, shift):
        seen = []
        for layer in self.layers:
            x, weights = layer(x, shift)
            seen.append(weights)
        return x + sum(weights.square() for weights in seen[self.reads])


@pytest.mark.parametrize(
    ("reads", "note"),
    [
        (slice(0), None),
        (slice(None), "the hidden state between two layers is used elsewhere"),
        (slice(3, 4), "the hidden state between two layers is used elsewhere"),
        (slice(1), "the hidden state between two layers is used elsewhere"),
    ],
)
def test_outputs_that_nothing_reads_do_not_prevent_a_scan(reads, note):
    torch.manual_seed(0)
    module = Weighed(reads).eval()
    x, shift = torch.randn(3, 8), torch.randn(8)
    program, result = run_module(module, x, shift)
    close(result, module(x, shift).detach().numpy())
    assert ("layers.*.fc.weight" in {a.name for a in program.arguments}) is (note is None)
    assert program.notes == (() if note is None else (f"The layers of `layers` are not scanned: {note}.",))


def test_outputs_without_values_are_no_results():
    class Returning(Weighed):
        def forward(self, x, shift):
            kept = []
            for layer in self.layers:
                x, weights = layer(x, shift)
                kept.append(weights)
            return x, kept

    torch.manual_seed(0)
    module = Returning(slice(0)).eval()
    x, shift = torch.randn(3, 8), torch.randn(8)
    program, (hidden, kept) = run_module(module, x, shift)
    expected, weights = module(x, shift)
    close(hidden, expected.detach().numpy())
    assert len(kept) == 4 and "layers.0.fc.weight" in {a.name for a in program.arguments}
    for mine, theirs in zip(kept, weights, strict=True):
        close(mine, theirs.detach().numpy())


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("kind", "scanned", "note"),
    [
        (Chain, True, None),
        (Twice, True, None),
        (Doubling, False, "something happens to the hidden state between two layers"),
        (Collecting, False, "the hidden state between two layers is used elsewhere"),
        (Apart, False, "the layers are not called one after the other"),
        (Reversed, False, "the layers are not called in order"),
        (Shifting, False, "the layers are called with different arguments"),
    ],
)
def test_layers_are_scanned_only_if_they_are_a_chain(kind, scanned, note):
    torch.manual_seed(0)
    module = kind().eval()
    x, shift = torch.randn(3, 8), torch.randn(8)
    program, result = run_module(module, x, shift)
    close(result, module(x, shift).detach().numpy())
    names = {a.name for a in program.arguments}
    assert ("layers.*.fc.weight" in names) is scanned and ("layers.0.fc.weight" in names) is not scanned
    assert program.notes == (() if note is None else (f"The layers of `layers` are not scanned: {note}.",))


def test_unlike_layers_are_grouped_by_period_and_run():
    torch.manual_seed(0)
    module = Chain(7, scales=[5.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0]).eval()
    x, shift = torch.randn(3, 8), torch.randn(8)
    program, result = run_module(module, x, shift)
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
    run_module(module, torch.randn(3, 8), torch.randn(8), remat="full")
    assert all("forward" not in layer.__dict__ for layer in module.layers)
    for name, parameter in module.named_parameters():
        assert id(parameter) == before[name][0] and torch.equal(parameter, before[name][1])


@pytest.mark.few(2)
@pytest.mark.parametrize("remat", ["none", "dots", "full", "full:2+none", "none:1+dots:1+full"])
@pytest.mark.parametrize("kind", [Chain, Doubling])
def test_training_equals_torch_sgd(kind, remat):
    import jax

    from autoshard.program.jax.optimizers import LEARNING_RATE

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
    def sines(remat):
        module = Chain(6).eval()
        program = from_torch(module, (torch.randn(3, 8), torch.randn(8)), train=True, remat=remat, scan=scan)
        again = [e for e in equations(jax.make_jaxpr(program.fn)(*program.args).jaxpr) if "policy" in e.params]
        assert again or remat == "none"
        # An activation or a norm may be computed again from its input, as in torch's own kernels.
        return sum(any(e.primitive.name == "dot_general" for e in equations(each.params["jaxpr"])) for each in again)

    assert sines("none") == 0
    assert 0 < sines("full:3+none") <= sines("full")
    if not scan:
        assert sines("full:2+none") < sines("full:4+none") < sines("full")


class Numbered(Chain):
    """Layers in a dict by number, like those of a pipeline's stage."""

    def __init__(self, layers=6, first=0):
        super().__init__(layers)
        numbered = {str(first + place): layer for place, layer in enumerate(self.layers)}
        self.layers = nn.ModuleDict(numbered)  # pyrefly: ignore[bad-assignment]

    def forward(self, x, shift):
        for layer in self.layers.values():
            x = layer(x, shift)
        return x


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.full), 4])
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


def test_remat_without_layers_says_so():
    program = from_torch(nn.Linear(8, 8), meta(4, 8), train=True, remat="full")
    assert any("remat `full` changes nothing: no layers were found in `Linear`" in note for note in program.notes)
    named = nn.Sequential(collections.OrderedDict(up=nn.Linear(8, 8), down=nn.Linear(8, 8)))
    program = from_torch(named, meta(4, 8), train=True, remat="dots")
    assert any("remat `dots` changes nothing" in note for note in program.notes)
    assert not from_torch(nn.Linear(8, 8), meta(4, 8), train=True).notes[1:]


@pytest.mark.parametrize("remat", ["full:6+none", "dots:2+full:9+none"])
def test_a_choice_for_more_layers_than_there_are_is_refused(remat):
    with pytest.raises(UserError, match="but the model has 6: leave at least one for the last choice"):
        from_torch(Chain(6).eval(), (torch.randn(3, 8), torch.randn(8)), remat=remat)


@pytest.mark.parametrize("remat", ["half", "full:0+none", "full+none", "full:2", "full:2+", ":2+none", "full:two+none"])
def test_what_is_no_choice_is_refused(remat):
    with pytest.raises(UserError, match=f"remat `{re.escape(remat)}` does not exist"):
        from_torch(Chain(6).eval(), (torch.randn(3, 8), torch.randn(8)), remat=remat)


class Collected(nn.Module):
    """Two stages of different width whose outputs hooks collect, as transformers collects hidden states."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4)])
        self.found = []
        for stage in self.stages:
            stage.register_forward_hook(lambda module, args, out: self.found.append(out))

    def forward(self, x):
        self.found.clear()
        for stage in self.stages:
            x = stage(x)
        wide, narrow = self.found
        return wide.sum(1) + narrow.sum(1)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_hooks_collect_the_output_of_a_layer_once(remat):
    module, x = Collected(), torch.randn(3, 8)
    _, out = run_module(module, x, remat=remat)
    close(out, module(x).detach())
