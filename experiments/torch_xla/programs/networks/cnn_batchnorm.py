"""A convolutional net with batch norm, whose running statistics are used in an evaluation."""

import torch
import torch_xla
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.conv2, self.norm2 = nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.fc1, self.fc2 = nn.Linear(64 * 4 * 4, 256), nn.Linear(256, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(nn.functional.relu(self.norm1(self.conv1(x))), 2)
        x = nn.functional.max_pool2d(nn.functional.relu(self.norm2(self.conv2(x))), 2)
        return self.fc2(nn.functional.relu(self.fc1(x.flatten(1))))


torch.manual_seed(0)
device = torch_xla.device()
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
for step in range(28):
    images, labels = torch.randn(32, 3, 16, 16).to(device), torch.randint(0, 10, (32,)).to(device)
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    if step == 20:
        model.eval()
        with torch.no_grad():
            right = nn.functional.cross_entropy(model(images), labels)
        torch_xla.sync()
        print("held out", right.item(), model.state_dict()["norm1.running_mean"].abs().sum().item())
        model.train()
    print("step", step, loss.item())
