"""Inference of a compiled encoder."""

import torch
import torch_xla
from torch import nn


torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(128, 16)).to("xla").eval()
model = torch.compile(model, backend="openxla")
for step in range(28):
    x = torch.randn(16, 32, 128).to("xla")
    with torch.no_grad():
        logits = model(x)
    torch_xla.sync()
    found = logits.cpu()
    print("step", step, found.abs().mean().item(), found[0, 0, 0].item())
