"""A loop of Hugging Face's Accelerate, with its loader, its clipping and its accumulation."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
data = TensorDataset(torch.randn(56 * 32, 256), torch.randint(0, 16, (56 * 32,)))
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = 0
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        print("step", step, loss.item())
        step += 1
