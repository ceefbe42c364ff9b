"""A graph network: messages along edges, summed at their targets."""

import torch
import torch_xla
from torch import nn


class Layer(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.own, self.sent = nn.Linear(before, after), nn.Linear(before, after)

    def forward(self, x, edges):
        messages = self.sent(x)[edges[0]]
        received = torch.zeros(len(x), messages.shape[1], device=x.device)
        received = received.index_add(0, edges[1], messages)
        count = torch.zeros(len(x), device=x.device).scatter_add(
            0, edges[1], torch.ones(edges.shape[1], device=x.device)
        )
        return self.own(x) + received / count.clamp(min=1)[:, None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(64, 256), Layer(256, 8)

    def forward(self, x, edges):
        return self.second(torch.relu(self.first(x, edges)), edges)


torch.manual_seed(0)
nodes, edges = torch.randn(512, 64).to("xla"), torch.randint(0, 512, (2, 2048)).to("xla")
labels = torch.randint(0, 8, (512,)).to("xla")
train = (torch.rand(512) < 0.6).float().to("xla")
model = Net().to("xla")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for step in range(28):
    optimizer.zero_grad()
    losses = nn.functional.cross_entropy(model(nodes, edges), labels, reduction="none")
    loss = (losses * train).sum() / train.sum()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
