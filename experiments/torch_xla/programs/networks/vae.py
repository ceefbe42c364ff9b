"""A variational autoencoder with noise from the host."""

import torch
import torch_xla
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 512), nn.ReLU())
        self.mean, self.spread = nn.Linear(512, 32), nn.Linear(512, 32)
        self.decoder = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 784))

    def forward(self, x, noise):
        h = self.encoder(x)
        mean, spread = self.mean(h), self.spread(h)
        return self.decoder(mean + noise * (0.5 * spread).exp()), mean, spread


torch.manual_seed(0)
model = VAE().to("xla")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(28):
    x, noise = torch.rand(64, 784).to("xla"), torch.randn(64, 32).to("xla")
    made, mean, spread = model(x, noise)
    fit = nn.functional.binary_cross_entropy_with_logits(made, x, reduction="sum")
    apart = -0.5 * (1 + spread - mean**2 - spread.exp()).sum()
    loss = (fit + apart) / len(x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
