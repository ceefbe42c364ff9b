"""A classifier of rows, by SGD with momentum."""

import torch
import torch_xla
from torch import nn


torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Dropout(0.0), nn.Linear(1024, 16)
).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(28):
    x, y = torch.randn(128, 256).to("xla"), torch.randint(0, 16, (128,)).to("xla")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
