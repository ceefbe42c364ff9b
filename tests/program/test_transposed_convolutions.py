"""Transposed convolutions: value and gradients compared with eager torch."""

import numpy as np
import pytest
import torch
from torch import nn
from torch_modules import eager_step, run_module, training_step

from autoshard.program import from_torch


def _options():
    sizes = {1: (9,), 2: (5, 4), 3: (3, 4, 3)}
    kinds = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
    for dims, side in sizes.items():
        for groups in (1, 2, 4):
            for more in (
                {"stride": 2, "padding": 1, "output_padding": 1},
                {"stride": 1, "padding": 3, "dilation": 2, "output_padding": 1, "bias": False},
            ):
                yield pytest.param(kinds[dims], side, groups, more, id=f"{dims}d-{groups}-{more['stride']}")


@pytest.mark.few(10)
@pytest.mark.parametrize(("kind", "side", "groups", "more"), list(_options()))
def test_a_transposed_convolution_has_torchs_values_and_gradients(kind, side, groups, more):
    class Upsampling(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv1d(8, 8, 1)  # its gradients need the gradient of the other's input
            self.up = kind(8, 12, 3, groups=groups, **more)

        def forward(self, x):
            return self.up(self.first(x.flatten(2)).view(x.shape))

    torch.manual_seed(0)
    module, x = Upsampling(), torch.randn(2, 8, *side)
    _, values = run_module(module, x)
    want, expected = eager_step(module, x)
    _, loss, gradients = training_step(module, x)
    np.testing.assert_allclose(values, module(x).detach().numpy(), atol=1e-5)
    assert abs(loss - want) < 1e-5
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(gradients[name], value, atol=1e-5, err_msg=name)


def test_sides_differ_and_there_is_no_batch():
    torch.manual_seed(0)
    module = nn.ConvTranspose2d(
        6, 6, (3, 2), stride=(1, 3), padding=(2, 0), output_padding=(0, 2), groups=3, dilation=(2, 1)
    )
    x = torch.randn(6, 5, 4)
    _, values = run_module(module, x)
    assert values.shape == tuple(module(x).shape)
    np.testing.assert_allclose(values, module(x).detach().numpy(), atol=1e-5)


def test_the_flops_of_groups_are_counted():
    module = nn.ConvTranspose2d(8, 12, 3, stride=2, groups=4, bias=False)
    program = from_torch(module, (torch.randn(2, 8, 5, 4),))
    assert program.model_flops == 2 * (2 * 8 * 5 * 4) * (12 // 4 * 9)
