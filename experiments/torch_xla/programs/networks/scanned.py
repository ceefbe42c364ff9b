"""Layers that `scan_layers` runs as one loop."""

import torch
import torch_xla
from torch import nn
from torch_xla.experimental.scan_layers import scan_layers


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer(128) for _ in range(4)), nn.Linear(128, 16)

    def forward(self, x):
        return self.head(scan_layers(self.layers, x))


torch.manual_seed(0)
model = Net().to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(28):
    x, y = torch.randn(64, 128).to("xla"), torch.randint(0, 16, (64,)).to("xla")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
