"""A small student that learns from a large teacher, which has no gradients."""

import torch
import torch_xla
from torch import nn


def make(width, depth):
    layers = [nn.Linear(256, width), nn.GELU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 32))


torch.manual_seed(0)
teacher = make(1024, 2).to("xla").eval().requires_grad_(False)
student = make(256, 1).to("xla")
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
for step in range(28):
    x, y = torch.randn(64, 256).to("xla"), torch.randint(0, 32, (64,)).to("xla")
    with torch.no_grad():
        wanted = (teacher(x) / 2).softmax(-1)
    logits = student(x)
    soft = nn.functional.kl_div((logits / 2).log_softmax(-1), wanted, reduction="batchmean") * 4
    loss = 0.5 * soft + 0.5 * nn.functional.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
