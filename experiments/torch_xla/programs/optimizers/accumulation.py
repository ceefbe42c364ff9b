"""Gradients summed over four small batches, with a step boundary after each batch."""

import torch
import torch_xla
from torch import nn


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256)).to("xla")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(28):
    total = torch.zeros((), device="xla")
    for _ in range(4):
        x, y = torch.randn(32, 256).to("xla"), torch.randn(32, 256).to("xla")
        loss = nn.functional.mse_loss(model(x), y) / 4
        loss.backward()
        total += loss.detach()
        torch_xla.sync()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    print("step", step, total.item())
