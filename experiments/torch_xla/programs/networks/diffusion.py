"""Denoising: a model predicts noise of a random strength, embedded by sines."""

import torch
import torch_xla
from torch import nn


class Denoiser(nn.Module):
    def __init__(self, dim=256, hidden=768):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.into = nn.Linear(dim, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
            for _ in range(2)
        )
        self.out = nn.Linear(hidden, dim)
        self.register_buffer("rates", torch.exp(torch.arange(32) * -0.29))

    def forward(self, x, t):
        angles = t[:, None].float() * self.rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.into(x)
        for block in self.blocks:
            x = x + block(x + time)
        return self.out(x)


torch.manual_seed(0)
model = Denoiser().to("xla")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0).to("xla")
for step in range(28):
    x, noise = torch.randn(64, 256).to("xla"), torch.randn(64, 256).to("xla")
    t = torch.randint(0, 1000, (64,)).to("xla")
    share = kept[t][:, None]
    loss = nn.functional.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, t), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
