"""Four layers of attention and of a mixture of 8 experts with capacity, whose tokens are sent by `index_put`."""

import torch
import torch_xla
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        rows, length, dim = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(rows, length, dim))


class Mixture(nn.Module):
    def __init__(self, dim, hidden, count):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(dim), nn.Linear(dim, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, dim, hidden) / dim**0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, dim) / hidden**0.5)

    def forward(self, x):
        tokens = self.norm(x).flatten(0, 1)
        count, capacity = self.up.shape[0], 2 * tokens.shape[0] // self.up.shape[0]
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        place = functional.one_hot(chosen, count).cumsum(0).gather(1, chosen[:, None])[:, 0] - 1
        kept = place < capacity
        place = place.clamp(max=capacity - 1)
        sent = torch.zeros(count, capacity, tokens.shape[1], device=x.device)
        sent = sent.index_put((chosen, place), tokens * kept[:, None], accumulate=True)
        made = torch.bmm(functional.gelu(torch.bmm(sent, self.up)), self.down)
        return x + (made[chosen, place] * (weight * kept)[:, None]).view_as(x)


class Net(nn.Module):
    def __init__(self, words=1024, dim=128, layers=4):
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.layers = nn.Sequential(*(nn.Sequential(Attention(dim, 4), Mixture(dim, 256, 8)) for _ in range(layers)))
        self.head = nn.Linear(dim, words)

    def forward(self, ids):
        return self.head(self.layers(self.words(ids)))


torch.manual_seed(0)
model = Net().to("xla")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
print("built")
for step in range(28):
    ids = torch.randint(0, 1024, (8, 33))
    inputs, targets = ids[:, :-1].to("xla"), ids[:, 1:].to("xla")
    loss = functional.cross_entropy(model(inputs).transpose(1, 2), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
