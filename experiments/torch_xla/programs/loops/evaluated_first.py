"""A model that is evaluated before its first step, and after each epoch of seven."""

import torch
import torch_xla
from torch import nn


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1)).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
held = torch.randn(64, 256)


@torch.no_grad()
def evaluate():
    x = held.to("xla")
    loss = nn.functional.mse_loss(model(x).squeeze(1), x.sum(1) / 16)
    return loss.item()


print("before", evaluate())
for step in range(28):
    x = torch.randn(64, 256).to("xla")
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x).squeeze(1), x.sum(1) / 16)
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    if step % 7 == 6:
        print("epoch", evaluate())
    print("step", step, loss.item())
