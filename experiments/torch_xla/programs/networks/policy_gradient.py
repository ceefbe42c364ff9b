"""REINFORCE with a baseline: episodes played by the policy itself, then one update."""

import torch
import torch_xla
from torch import nn


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh())
        self.policy, self.value = nn.Linear(512, 4), nn.Linear(512, 1)

    def forward(self, state):
        hidden = self.trunk(state)
        return self.policy(hidden), self.value(hidden).squeeze(-1)


torch.manual_seed(0)
model = Actor().to("xla")
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
moves = torch.randn(4, 32) / 4
for step in range(28):
    state, states, actions, rewards = torch.randn(16, 32), [], [], []
    for _ in range(8):
        with torch.no_grad():
            logits, _ = model(state.to("xla"))
        chances = logits.cpu().softmax(-1)
        action = (chances.cumsum(-1) < torch.rand(16, 1)).sum(-1).clamp(max=3)
        states.append(state)
        actions.append(action)
        state = 0.9 * state + moves[action]
        rewards.append(-state.square().mean(-1))
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0).flatten().to("xla")
    logits, value = model(torch.cat(states).to("xla"))
    gain = returns - value
    picked = logits.log_softmax(-1).gather(1, torch.cat(actions).to("xla")[:, None]).squeeze(1)
    loss = -(picked * gain.detach()).mean() + 0.5 * gain.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
