"""Training that is saved in the middle and resumes in a new model from the file; then in a copy of that model."""

import copy
import os
import tempfile

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn


def make():
    model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256)).to("xla")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


torch.manual_seed(0)
model, optimizer = make()
for step in range(28):
    if step == 6:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "checkpoint.pt")
            xm.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
            saved = torch.load(path)
        model, optimizer = make()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    if step == 12:
        state = copy.deepcopy(optimizer.state_dict())
        model = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.load_state_dict(state)
    x, y = torch.randn(64, 256).to("xla"), torch.randn(64, 256).to("xla")
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
