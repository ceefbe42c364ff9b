"""bfloat16 by autocast, with weights in float32."""

import torch
import torch_xla
from torch import nn


torch.manual_seed(0)
device = torch_xla.device()
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 16)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(28):
    x, y = torch.randn(128, 256).to(device), torch.randint(0, 16, (128,)).to(device)
    optimizer.zero_grad()
    with torch.autocast("xla", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
