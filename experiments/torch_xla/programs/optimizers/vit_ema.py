"""A vision transformer with an exponential average of its weights, evaluated every few steps."""

import torch
import torch_xla
from torch import nn


class ViT(nn.Module):
    def __init__(self, dim=96, depth=2, heads=4, patch=8, size=32, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.encoder(x))[:, 0])


torch.manual_seed(0)
model = ViT().to("xla")
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
for step in range(28):
    images, labels = torch.randn(32, 3, 32, 32).to("xla"), torch.randint(0, 10, (32,)).to("xla")
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update_parameters(model)
    torch_xla.sync()
    if step in (2, 12, 24):
        with torch.no_grad():
            print("average", nn.functional.cross_entropy(ema(images), labels).item())
    print("step", step, loss.item())
