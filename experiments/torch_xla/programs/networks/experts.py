"""A mixture of experts: the two best of eight for each token, with a loss that balances their load."""

import torch
import torch_xla
from torch import nn


class Experts(nn.Module):
    def __init__(self, dim=128, hidden=256, count=8, best=2):
        super().__init__()
        self.best, self.router = best, nn.Linear(dim, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, dim, hidden) / dim**0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, dim) / hidden**0.5)

    def forward(self, x):
        chances = self.router(x).softmax(-1)
        weights, chosen = chances.topk(self.best, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        gates = torch.zeros_like(chances).scatter(-1, chosen, weights)
        hidden = torch.einsum("td,edh->teh", x, self.up)
        out = torch.einsum("teh,ehd->ted", nn.functional.silu(hidden), self.down)
        busy = (gates > 0).float().mean(0)
        return x + torch.einsum("ted,te->td", out, gates), (busy * chances.mean(0)).sum() * len(busy)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Experts(), Experts(), nn.Linear(128, 32)

    def forward(self, x):
        x, first = self.first(x)
        x, second = self.second(x)
        return self.head(x), first + second


torch.manual_seed(0)
model = Net().to("xla")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(28):
    x, y = torch.randn(128, 128).to("xla"), torch.randint(0, 32, (128,)).to("xla")
    logits, balance = model(x)
    loss = nn.functional.cross_entropy(logits, y) + 0.01 * balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
