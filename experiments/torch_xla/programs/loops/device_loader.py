"""Batches that `MpDeviceLoader` sends in the background, as dicts."""

import torch
import torch_xla
import torch_xla.distributed.parallel_loader as pl
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self):
        self.x, self.y = torch.randn(28 * 64, 256), torch.randint(0, 16, (28 * 64,))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


torch.manual_seed(0)
loader = pl.MpDeviceLoader(DataLoader(Rows(), batch_size=64, shuffle=True), torch_xla.device())
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 16)).to(torch_xla.device())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step, batch in enumerate(loader):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    loss.backward()
    optimizer.step()
    print("step", step, loss.item())
