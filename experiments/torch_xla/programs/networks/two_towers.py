"""Two towers that learn to match pictures and words, each example against all others of the batch."""

import torch
import torch_xla
from torch import nn


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.images = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 128))
        self.table = nn.EmbeddingBag(1000, 128, mode="mean")
        self.texts = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, texts):
        a = nn.functional.normalize(self.images(images), dim=-1)
        b = nn.functional.normalize(self.texts(self.table(texts)), dim=-1)
        return self.scale.exp() * a @ b.T


torch.manual_seed(0)
model = Towers().to("xla")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(28):
    images, texts = torch.randn(64, 512).to("xla"), torch.randint(0, 1000, (64, 12)).to("xla")
    logits = model(images, texts)
    labels = torch.arange(64, device="xla")
    loss = (nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.T, labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
