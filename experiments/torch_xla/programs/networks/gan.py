"""A GAN: generator and discriminator in turn, each with an optimizer of its own."""

import torch
import torch_xla
from torch import nn


torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(64, 512), nn.LeakyReLU(0.2), nn.Linear(512, 784), nn.Tanh()).to("xla")
discriminator = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1)).to("xla")
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(64, 1).to("xla"), torch.zeros(64, 1).to("xla")
for step in range(28):
    real, noise = torch.rand(64, 784).to("xla") * 2 - 1, torch.randn(64, 64).to("xla")
    fake = generator(noise)
    of_discriminator.zero_grad()
    loss_d = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
    loss_d.backward()
    of_discriminator.step()
    of_generator.zero_grad()
    loss_g = criterion(discriminator(fake), ones)
    loss_g.backward()
    of_generator.step()
    torch_xla.sync()
    print("step", step, loss_d.item(), loss_g.item())
