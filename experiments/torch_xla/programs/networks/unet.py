"""A U-Net that learns masks, with group norm and skip connections."""

import torch
import torch_xla
from torch import nn


def double(before, after):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(),
        nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.middle = double(3, 16), double(16, 32), double(32, 64)
        self.up2, self.up1 = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.join2, self.join1, self.head = double(64, 32), double(32, 16), nn.Conv2d(16, 1, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(nn.functional.max_pool2d(first, 2))
        x = self.middle(nn.functional.max_pool2d(second, 2))
        x = self.join2(torch.cat([self.up2(x), second], 1))
        return self.head(self.join1(torch.cat([self.up1(x), first], 1)))


torch.manual_seed(0)
model = UNet().to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(28):
    images = torch.randn(16, 3, 16, 16)
    masks = (images.mean(1, keepdim=True) > 0).float()
    loss = nn.functional.binary_cross_entropy_with_logits(model(images.to("xla")), masks.to("xla"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
