"""A model with two matrices that the script splits itself."""

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch import nn


torch.manual_seed(0)
first, second = nn.Linear(256, 1024), nn.Linear(1024, 256)
model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(256, 256)).to("xla")
mesh = xs.Mesh(np.arange(8), (4, 2), ("data", "model"))
xs.mark_sharding(first.weight, mesh, ("model", None))
xs.mark_sharding(second.weight, mesh, (None, "model"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(28):
    x, y = torch.randn(64, 256).to("xla"), torch.randn(64, 256).to("xla")
    xs.mark_sharding(x, mesh, ("data", None))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
