"""A learning rate that warms up and falls, changed in every step."""

import torch
import torch_xla
from torch import nn


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.SiLU(), nn.Linear(1024, 256)).to("xla")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=28, pct_start=0.3)
for step in range(28):
    x = torch.randn(64, 256).to("xla")
    loss = nn.functional.huber_loss(model(x), x.flip(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    torch_xla.sync()
    print("step", step, loss.item(), float(schedule.get_last_lr()[0]))
