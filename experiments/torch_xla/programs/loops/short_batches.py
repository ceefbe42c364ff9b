"""Epochs of a data set whose last batch is a short one."""

import torch
import torch_xla
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


torch.manual_seed(0)
data = TensorDataset(torch.randn(6 * 64 + 20, 256), torch.randint(0, 16, (6 * 64 + 20,)))
loader = DataLoader(data, batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 16)).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
step = 0
for _ in range(4):
    for x, y in loader:
        x, y = x.to("xla"), y.to("xla")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        print("step", step, loss.item())
        step += 1
