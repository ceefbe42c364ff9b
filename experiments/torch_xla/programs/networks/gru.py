"""A language model of letters by a GRU."""

import torch
import torch_xla
from torch import nn


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.gru = nn.Embedding(64, 64), nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, 64)

    def forward(self, ids):
        return self.head(self.gru(self.table(ids))[0])


torch.manual_seed(0)
model = Letters().to("xla")
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for step in range(28):
    ids = torch.randint(0, 64, (16, 17)).to("xla")
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
