"""Models of several widths trained one after the other, as a search for the best one does."""

import gc

import torch
import torch_xla
from torch import nn


torch.manual_seed(0)
step = 0
for width, rate in ((512, 0.05), (1024, 0.05), (1024, 0.02), (512, 0.02)):
    model = nn.Sequential(nn.Linear(256, width), nn.Tanh(), nn.Linear(width, 16)).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for _ in range(7):
        x, y = torch.randn(64, 256).to("xla"), torch.randint(0, 16, (64,)).to("xla")
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        print("step", step, loss.item())
        step += 1
    del model, optimizer
    gc.collect()
