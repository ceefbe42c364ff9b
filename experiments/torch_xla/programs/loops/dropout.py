"""Dropout with a seed on the device."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn


torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(256, 1024), nn.ReLU(), nn.Dropout(0.3), nn.Linear(1024, 1024), nn.ReLU(), nn.Dropout(0.3),
    nn.Linear(1024, 16),
).to("xla")  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
xm.set_rng_state(1234)
for step in range(28):
    x, y = torch.randn(64, 256).to("xla"), torch.randint(0, 16, (64,)).to("xla")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
