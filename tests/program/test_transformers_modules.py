"""Unmodified modules of transformers and PEFT: caches that stay on, adapters with custom backward passes."""

from typing import Any

import jax
import numpy as np
import peft
import pytest
import torch
import transformers

from autoshard.errors import UserError
from autoshard.program import from_torch


RATE = 1e4
"""Factor of losses, so that a step of SGD subtracts a significant part of the values."""


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    assert config.use_cache, "which it is by default"
    return transformers.AutoModelForCausalLM.from_config(config)


IDS = torch.tensor([[1, 5, 9, 3], [2, 6, 4, 8]])


def check_step(module: Any, given: dict[str, torch.Tensor], loss: Any) -> Any:
    """Compare a step of SGD with eager torch: its loss, and the changes, which are proportional to the gradients."""
    program = from_torch(module, (), given, train=True, optimizer="sgd", loss=lambda out: loss(out) * RATE, scan=False)
    params, optimizer, _, *rest = program.make_args(0)
    state = {name: value.detach().numpy() for name, value in module.named_parameters()}
    batch = {name: value.numpy() for name, value in zip(program.args[2], given.values(), strict=True)}
    moved, _, value = jax.jit(program.fn)({name: state[name] for name in params}, optimizer, batch, *rest)
    wanted = loss(module.eval()(**given)) * RATE
    wanted.backward()
    np.testing.assert_allclose(float(value), wanted.item(), rtol=1e-5)
    trained = {name: each.grad.numpy() for name, each in module.named_parameters() if each.grad is not None}
    assert trained.keys() == {name for name in params if np.any(np.asarray(moved[name]) != state[name])}
    largest = max(trained, key=lambda name: np.abs(trained[name]).max())
    change = {name: state[name] - np.asarray(moved[name]) for name in trained}
    rate = np.abs(change[largest]).max() / np.abs(trained[largest]).max()
    for name, gradient in trained.items():
        np.testing.assert_allclose(change[name], rate * gradient, atol=1e-3 * rate * np.abs(gradient).max(), rtol=1e-3)
    return program


def test_a_step_of_training_keeps_no_cache() -> None:
    module = llama()
    program = check_step(module, {"input_ids": IDS, "labels": IDS}, lambda out: out.loss)
    assert any(note.startswith("`use_cache` is off") for note in program.notes)
    assert module.config.use_cache, "the user's module is as it was"
    scanned = from_torch(module, (IDS,), train=True, loss=lambda out: out.logits.square().mean())
    assert scanned.stacks == (2,)


class Wrapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss


def test_a_cache_inside_a_module_is_named_where_layers_are_not_scanned_for_it() -> None:
    module = Wrapped()
    program = from_torch(module, (IDS,), train=True, loss=lambda out: out)
    assert program.notes == (
        "The layers of `model` are not scanned, since each writes to a cache of its own: set `use_cache` of its "
        "configuration to False.",
    )
    module.model.config.use_cache = False
    program = from_torch(module, (IDS,), train=True, loss=lambda out: out)
    assert program.notes == () and program.stacks == (2,)


def test_a_returned_cache_is_refused_in_the_users_words() -> None:
    with pytest.raises(UserError) as caught:
        from_torch(llama(), (IDS,))
    assert str(caught.value) == (
        "`LlamaForCausalLM` returns a `DynamicCache`, which is no tensor: give the keyword input `use_cache=False`, or "
        "set `use_cache` of its configuration to False."
    )
    assert from_torch(llama(), (IDS,), {"use_cache": False}).stacks == (2,)


def test_another_result_that_is_no_tensor_is_named() -> None:
    class Report:
        pass

    class Reporting(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            return super().forward(input), Report()

    with pytest.raises(UserError, match="`Reporting` returns a `Report`, which is no tensor: return tensors"):
        from_torch(Reporting(4, 4), (torch.ones(2, 4),))


class Projections(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.v(torch.tanh(self.q(x)))


@pytest.mark.parametrize(
    "config",
    [
        peft.LoHaConfig(r=4, alpha=8, target_modules=["q", "v"], init_weights=False),
        peft.LoKrConfig(r=4, alpha=8, target_modules=["q", "v"], init_weights=False),
    ],
    ids=lambda config: type(config).__name__,
)
def test_adapters_with_a_backward_pass_of_their_own_train_as_in_torch(config: Any) -> None:
    torch.manual_seed(0)
    module = peft.get_peft_model(Projections(), config)
    check_step(module, {"x": torch.randn(8, 16)}, lambda out: out.square().mean())


@pytest.mark.full
def test_an_adapter_of_a_decoder_keeps_no_cache_either() -> None:
    config = peft.LoHaConfig(r=2, alpha=4, target_modules=["q_proj", "v_proj"], init_weights=False)
    module = peft.get_peft_model(llama(), config)
    program = check_step(module, {"input_ids": IDS, "labels": IDS}, lambda out: out.loss)
    assert any(note.startswith("`use_cache` is off") for note in program.notes)
    assert from_torch(module, (IDS,), train=True, loss=lambda out: out.logits.square().mean()).stacks == (2,)
