"""A BERT written in the script that fills in masked words; only masked places count."""

import torch
import torch_xla
from torch import nn


class Bert(nn.Module):
    def __init__(self, words=512, dim=128, length=32):
        super().__init__()
        self.words, self.places = nn.Embedding(words, dim, padding_idx=0), nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.dense, self.norm, self.head = nn.Linear(dim, dim), nn.LayerNorm(dim), nn.Linear(dim, words)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.encoder(x, src_key_padding_mask=ids == 0)
        return self.head(self.norm(nn.functional.gelu(self.dense(x))))


torch.manual_seed(0)
model = Bert().to("xla")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
for step in range(28):
    ids = torch.randint(2, 512, (16, 32))
    lengths = torch.randint(16, 33, (16, 1))
    ids[torch.arange(32) >= lengths] = 0
    masked = (torch.rand(16, 32) < 0.15) & (ids != 0)
    labels = ids.masked_fill(~masked, -100).to("xla")
    logits = model(ids.masked_fill(masked, 1).to("xla"))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print("step", step, loss.item())
