"""A U-Net of four depths and 64 channels at most, which learns masks of pictures of 32 x 32."""

import torch
import torch_xla
from torch import nn


def double(before, after):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(),
        nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, widths=(8, 16, 32, 64)):
        super().__init__()
        steps = [(widths[k], widths[k + 1]) for k in range(len(widths) - 1)]
        self.first, self.head = double(3, widths[0]), nn.Conv2d(widths[0], 1, 1)
        self.down = nn.ModuleList(double(a, b) for a, b in steps)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in steps)
        self.join = nn.ModuleList(double(2 * a, a) for a, _ in steps)

    def forward(self, x):
        passed = [self.first(x)]
        for down in self.down:
            passed.append(down(nn.functional.max_pool2d(passed[-1], 2)))
        x = passed.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat([up(x), passed.pop()], 1))
        return self.head(x)


torch.manual_seed(0)
model = UNet().to("xla")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
print("built")
for step in range(28):
    images = torch.randn(16, 3, 32, 32)
    masks = (images.mean(1, keepdim=True) > 0).float()
    loss = nn.functional.binary_cross_entropy_with_logits(model(images.to("xla")), masks.to("xla"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
