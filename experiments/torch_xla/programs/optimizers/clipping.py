"""Gradients clipped by their norm, which is logged too."""

import torch
import torch_xla
from torch import nn


torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Embedding(256, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 256)).to("xla")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(28):
    ids = torch.randint(0, 256, (8, 32)).to("xla")
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item(), norm.item())
