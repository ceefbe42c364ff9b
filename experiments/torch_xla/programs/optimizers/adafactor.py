"""Adafactor of torch, whose state is rows and columns of the gradients' squares."""

import torch
import torch_xla
from torch import nn


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256)).to("xla")
optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
for step in range(28):
    x = torch.randn(64, 256).to("xla")
    loss = nn.functional.mse_loss(model(x), x.flip(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
