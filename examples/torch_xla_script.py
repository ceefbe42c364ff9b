"""Train in PyTorch/XLA as always: one line, `xr.use_spmd(auto=True)`, has the first step read, planned and run.

Run `python examples/torch_xla_script.py`: eight CPU devices stand in for a machine, and plain torch checks the losses
and parameters.
For real hardware, drop the lines with `os.environ`: the topology is read from the devices, or from
`AUTOSHARD_TOPOLOGY=v5e:4x4`, and `XLA_AUTO_SPMD_MESH=auto` searches a mesh.
"""

import os


os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")
os.environ.setdefault("XLA_AUTO_SPMD_MESH", "4,2")  # axes `data` and `model`

import torch
import torch_xla
import torch_xla.runtime as xr
from torch import nn
from torch.nn import functional

from autoshard.torch_xla import session


BATCH, LENGTH, WIDTH, HEADS, VOCABULARY, STEPS = 32, 32, 64, 4, 256, 5


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention_qkv, self.attention_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = self.attention_qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return self.head(x + self.down(functional.gelu(self.up(self.norm_mlp(x)))))


def train(device):
    """Train a new model on the device; return the losses and the model."""
    torch.manual_seed(0)
    model = Decoder().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(STEPS):
        tokens = ((torch.arange(BATCH)[:, None] * 8 + torch.arange(LENGTH) + step) % VOCABULARY).to(device)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), ((tokens + 1) % VOCABULARY).flatten())
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    return losses, model.cpu()


def main():
    xr.use_spmd(auto=True)  # before the model is moved to the device
    losses, model = train("xla")
    plain_losses, plain_model = train("cpu")
    watched = session()
    assert watched is not None
    for plan in watched.plans:
        print(plan, *plan.words, sep="\n")
    print("planned losses:", *(f"{loss:.4f}" for loss in losses))
    print("plain losses:  ", *(f"{loss:.4f}" for loss in plain_losses))
    torch.testing.assert_close(losses, plain_losses, rtol=1e-3, atol=0.0)
    for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert losses[-1] < losses[0]
    print("AGREES with plain torch, losses and parameters")


if __name__ == "__main__":
    main()
