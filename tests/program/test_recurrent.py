"""Recurrent layers of torch as loops over their steps, against torch's own results and gradients."""

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import rnn

from autoshard.errors import UserError
from autoshard.program import from_torch, scan_operands
from autoshard.program.torch_ops.recurrent import torchs_own_gru


def outputs_loss(output):
    """Combine all outputs into a loss."""
    states = output[1] if isinstance(output[1], tuple) else (output[1],)
    return output[0].square().mean() + sum(state.sin().sum() for state in states)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        ("LSTM", {"proj_size": 4, "bias": False}),
        ("GRU", {"num_layers": 2, "bidirectional": True}),
        ("GRU", {"bias": False, "batch_first": True}),
        ("RNN", {"nonlinearity": "relu"}),
        ("RNN", {}),
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_loss_and_gradients_are_torchs_own(kind, options):
    torch.manual_seed(0)
    module = getattr(nn, kind)(6, 8, **options)
    x = torch.randn(4, 5, 6)
    program = from_torch(module, x, train=True, loss=outputs_loss, optimizer="momentum")
    params, state, _ = program.make_args(0)
    _, after, loss = jax.jit(program.fn)(params, state, {"input": x.numpy()})
    with torchs_own_gru(module):
        wanted = outputs_loss(module(x))
    wanted.backward()
    assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-5)
    for name, parameter in module.named_parameters():
        own = parameter.grad.numpy()
        np.testing.assert_allclose(after[0].trace[name], own, atol=3e-6 * np.abs(own).max(), err_msg=name)


def test_steps_are_a_loop_and_the_gradient_of_its_weights_is_one_matmul_after_it():
    """Keep the weights' gradient out of the loop: within it, each step would sum the batch over the devices."""
    module = nn.LSTM(6, 8, device="meta")
    program = from_torch(module, torch.zeros(40, 4, 6, device="meta"), train=True, loss=outputs_loss)
    traced = jax.make_jaxpr(program.fn)(*program.args)
    loops = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert [loop.params["length"] for loop in loops] == [40, 40]
    backward = loops[1].params["jaxpr"]
    _, carried = scan_operands(loops[1])
    assert [v.aval.shape for v in backward.outvars[:carried] if v.aval.shape] == [(4, 8), (4, 8)]


def test_dropout_between_layers_is_reported_as_off():
    module = nn.GRU(6, 8, 2, dropout=0.5, device="meta")
    program = from_torch(module, torch.zeros(5, 4, 6, device="meta"))
    assert any("Dropout is off" in note for note in program.notes)


def test_packed_sequences_are_refused_with_what_works():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(6, 8, batch_first=True)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 2]), batch_first=True)
            return self.rnn(packed)[1][0]

    with pytest.raises(UserError, match=r"packed sequence .* give padded sequences"):
        from_torch(Packed(), torch.zeros(3, 5, 6))


def test_a_gru_under_torch_xla_is_torchs_own():
    gru = pytest.importorskip("torch_xla.experimental.gru")
    torch.manual_seed(0)
    theirs, plain = gru.GRU(6, 8), rnn.GRU(6, 8)
    plain.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 5, 6)
    loss = [float(_loss(from_torch(each, x, train=True, loss=outputs_loss), plain, x)) for each in (theirs, plain)]
    assert loss[0] == loss[1] == pytest.approx(float(outputs_loss(plain(x)).detach()), rel=1e-5)


def _loss(program, module, x):
    params, state, _ = program.make_args(0)
    params = {name: module.state_dict()[name].numpy() for name in params}
    return jax.jit(program.fn)(params, state, {"input": x.numpy()})[-1]
