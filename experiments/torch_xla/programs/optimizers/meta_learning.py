"""MAML: gradients through an inner step of the weights."""

import torch
import torch_xla
from torch import nn
from torch.func import functional_call


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(28):
    total = torch.zeros((), device="xla")
    optimizer.zero_grad()
    for _ in range(2):
        turn = torch.randn(64, 64) / 8
        x, held = torch.randn(32, 64), torch.randn(32, 64)
        weights: dict[str, torch.Tensor] = dict(model.named_parameters())
        inner = nn.functional.mse_loss(functional_call(model, weights, (x.to("xla"),)), (x @ turn).to("xla"))
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        total = total + nn.functional.mse_loss(functional_call(model, fast, (held.to("xla"),)), (held @ turn).to("xla"))
    total.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, total.item())
