"""Layers that are recomputed in the backward pass, by PyTorch/XLA's checkpoint."""

import torch
import torch_xla
from torch import nn
from torch_xla.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(256) for _ in range(3)), nn.Linear(256, 16)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x)
        return self.head(x)


torch.manual_seed(0)
model = Net().to("xla")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(28):
    x, y = torch.randn(64, 256).to("xla"), torch.randint(0, 16, (64,)).to("xla")
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
