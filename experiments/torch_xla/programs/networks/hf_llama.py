"""Llama of Hugging Face with an attention mask, clipping and a linear schedule."""

import torch
import torch_xla
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, use_cache=False,
)  # fmt: skip
model = LlamaForCausalLM(config).to("xla").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 5, 28)
for step in range(28):
    ids = torch.randint(0, 512, (8, 32))
    mask = torch.arange(32) < torch.randint(20, 33, (8, 1))
    labels = ids.masked_fill(~mask, -100)
    batch = {"input_ids": ids.to("xla"), "attention_mask": mask.long().to("xla"), "labels": labels.to("xla")}
    loss = model(**batch).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    torch_xla.sync()
    print("step", step, loss.item())
