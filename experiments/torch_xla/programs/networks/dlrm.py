"""Prediction of clicks from numbers and from bags of categories, as in DLRM."""

import torch
import torch_xla
from torch import nn


class Clicks(nn.Module):
    def __init__(self, tables=4, rows=1000, dim=64):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, dim), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, 256), nn.ReLU(), nn.Linear(256, 1))
        first, second = torch.tril_indices(tables + 1, tables + 1, -1)
        self.pairs = nn.Buffer(first * (tables + 1) + second)

    def forward(self, numbers, categories):
        dense = self.bottom(numbers)
        every = torch.stack([dense, *(bag(ids) for bag, ids in zip(self.bags, categories.unbind(1), strict=True))], 1)
        products = every @ every.transpose(1, 2)
        return self.top(torch.cat([dense, products.flatten(1)[:, self.pairs]], 1)).squeeze(1)


torch.manual_seed(0)
model = Clicks().to("xla")
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.1)
for step in range(28):
    numbers = torch.randn(128, 13).to("xla")
    categories = torch.randint(0, 1000, (128, 4, 3)).to("xla")
    clicked = torch.randint(0, 2, (128,)).float().to("xla")
    loss = nn.functional.binary_cross_entropy_with_logits(model(numbers, categories), clicked)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
