"""GPT-2 small of Hugging Face, a sixth as wide: 12 layers of 128 and 4,096 words."""

import torch
import torch_xla
from transformers import GPT2Config, GPT2LMHeadModel


torch.manual_seed(0)
config = GPT2Config(vocab_size=4096, n_positions=32, n_embd=128, n_layer=12, n_head=4, use_cache=False)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
model = GPT2LMHeadModel(config).to("xla").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
print("built")
for step in range(28):
    ids = torch.randint(0, 4096, (8, 32)).to("xla")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    print("step", step, loss.item())
