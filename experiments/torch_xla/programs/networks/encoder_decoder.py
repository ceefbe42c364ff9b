"""A T5 of Hugging Face that learns to reverse sequences."""

import torch
import torch_xla
from transformers import T5Config, T5ForConditionalGeneration


torch.manual_seed(0)
config = T5Config(
    vocab_size=256, d_model=64, d_kv=16, d_ff=256, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False
)
config.decoder_start_token_id = 0
model = T5ForConditionalGeneration(config).to("xla").train()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(28):
    ids = torch.randint(1, 256, (8, 24))
    batch = {"input_ids": ids.to("xla"), "labels": ids.flip(1).to("xla")}
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    print("step", step, loss.item())
