"""A language model by an LSTM of two layers of 256 over eight words, whose state passes from batch to batch."""

import torch
import torch_xla
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(2048, 256), nn.Linear(256, 2048)
        self.lstm = nn.LSTM(256, 256, num_layers=2, batch_first=True)

    def forward(self, ids, state):
        out, state = self.lstm(self.words(ids), state)
        return self.head(out), state


torch.manual_seed(0)
model = Words().to("xla")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
state = (torch.zeros(2, 16, 256).to("xla"), torch.zeros(2, 16, 256).to("xla"))
print("built")
for step in range(28):
    ids = torch.randint(0, 2048, (16, 9)).to("xla")
    found, state = model(ids[:, :-1], state)
    state = tuple(each.detach() for each in state)
    loss = nn.functional.cross_entropy(found.transpose(1, 2), ids[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
