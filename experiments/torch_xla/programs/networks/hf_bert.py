"""BERT of Hugging Face as a classifier of sentences."""

import torch
import torch_xla
from transformers import BertConfig, BertForSequenceClassification


torch.manual_seed(0)
config = BertConfig(
    vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, num_labels=4,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
model = BertForSequenceClassification(config).to("xla").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
for step in range(28):
    ids = torch.randint(0, 512, (16, 32))
    batch = {"input_ids": ids.to("xla"), "attention_mask": torch.ones_like(ids).to("xla")}
    labels = torch.randint(0, 4, (16,)).to("xla")
    loss = model(**batch, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    print("step", step, loss.item())
