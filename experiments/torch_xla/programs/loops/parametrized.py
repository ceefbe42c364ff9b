"""Weight norm, spectral norm and an orthogonal parametrization in one model."""

import torch
import torch_xla
from torch import nn
from torch.nn.utils import parametrizations, parametrize


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


torch.manual_seed(0)
model = nn.Sequential(
    parametrizations.weight_norm(nn.Linear(256, 512)), nn.Tanh(),
    parametrizations.spectral_norm(nn.Linear(512, 256)), nn.Tanh(),
    nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 16),
)  # fmt: skip
parametrize.register_parametrization(model[4], "weight", Symmetric())
model = model.to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(28):
    x, y = torch.randn(64, 256).to("xla"), torch.randint(0, 16, (64,)).to("xla")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
