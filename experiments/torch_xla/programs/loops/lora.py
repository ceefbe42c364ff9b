"""Fine tuning of a frozen encoder by additional matrices of low rank."""

import torch
import torch_xla
from torch import nn


class LoRA(nn.Module):
    def __init__(self, base, rank=8, scale=2.0):
        super().__init__()
        self.base, self.scale = base, scale
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.down.T @ self.up.T)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(dim), nn.ModuleList([nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)])

    def forward(self, x):
        up, down = self.layers
        return x + down(nn.functional.gelu(up(self.norm(x))))


torch.manual_seed(0)
blocks = [Block(256) for _ in range(3)]
model = nn.Sequential(*blocks, nn.Linear(256, 16))
model.requires_grad_(False)
for block in blocks:
    block.layers = nn.ModuleList(LoRA(layer) for layer in block.layers)
model = model.to("xla")
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for step in range(28):
    x, y = torch.randn(64, 256).to("xla"), torch.randint(0, 16, (64,)).to("xla")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
