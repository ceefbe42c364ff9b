"""Training, with an evaluation of larger batches every few steps."""

import torch
import torch_xla
from torch import nn


torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(128, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.0), nn.Linear(512, 512), nn.ReLU(),
    nn.Linear(512, 10),
).to("xla")  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
held = torch.randn(256, 128), torch.randint(0, 10, (256,))


def evaluate():
    model.eval()
    right = loss = 0.0
    with torch.no_grad():
        for x, y in zip(*(each.split(128) for each in held), strict=True):
            logits = model(x.to("xla"))
            loss += nn.functional.cross_entropy(logits, y.to("xla")).item()
            right += (logits.argmax(1).cpu() == y).sum().item()
    model.train()
    return loss / 2, right / 256


for step in range(28):
    x, y = torch.randn(64, 128).to("xla"), torch.randint(0, 10, (64,)).to("xla")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    if step % 10 == 3:
        print("held out", *evaluate())
    print("step", step, loss.item())
