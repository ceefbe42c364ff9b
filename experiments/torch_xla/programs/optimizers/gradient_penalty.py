"""A critic with a penalty on gradients by its input that differ from 1 (WGAN-GP)."""

import torch
import torch_xla
from torch import nn


torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)).to("xla")
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
for step in range(28):
    real, fake = torch.randn(64, 256).to("xla"), torch.rand(64, 256).to("xla")
    share = torch.rand(64, 1).to("xla")
    between = (share * real + (1 - share) * fake).requires_grad_(True)
    out = critic(between)
    (slope,) = torch.autograd.grad(out.sum(), between, create_graph=True)
    penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
