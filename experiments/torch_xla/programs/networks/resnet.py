"""A ResNet with residual blocks, a cosine schedule and weight decay, label smoothing."""

import torch
import torch_xla.core.xla_model as xm
from torch import nn


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.short = nn.Sequential()
        if stride != 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.blocks = nn.Sequential(Block(32, 32, 1), Block(32, 64, 2), Block(64, 128, 2))
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


torch.manual_seed(0)
device = xm.xla_device()
model = ResNet().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=28)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
for step in range(28):
    images, labels = torch.randn(32, 3, 16, 16).to(device), torch.randint(0, 10, (32,)).to(device)
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    xm.optimizer_step(optimizer)
    scheduler.step()
    xm.mark_step()
    print("step", step, loss.item())
