"""GPT-2 of Hugging Face, as its documentation trains it."""

import torch
import torch_xla
from transformers import GPT2Config, GPT2LMHeadModel


torch.manual_seed(0)
config = GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=2, n_head=4, use_cache=False)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
model = GPT2LMHeadModel(config).to("xla").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
for step in range(28):
    ids = torch.randint(0, 512, (8, 64)).to("xla")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    print("step", step, loss.item())
