"""Forecast of series by an LSTM of two layers, whose state passes from batch to batch."""

import torch
import torch_xla
from torch import nn


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 128, num_layers=2, batch_first=True), nn.Linear(128, 8)

    def forward(self, x, state):
        out, state = self.lstm(x, state)
        return self.head(out), state


torch.manual_seed(0)
model = Forecast().to("xla")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
state = (torch.zeros(2, 32, 128).to("xla"), torch.zeros(2, 32, 128).to("xla"))
for step in range(28):
    x = torch.randn(32, 13, 8).cumsum(1).to("xla")
    found, state = model(x[:, :-1], state)
    state = tuple(each.detach() for each in state)
    loss = nn.functional.mse_loss(found, x[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
