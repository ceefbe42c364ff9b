"""The Trainer of Hugging Face on a Llama of 4 layers of 128 and 2,048 words."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        ids = (torch.arange(32) * (index + 1)) % 2048
        return {"input_ids": ids, "labels": ids}


class Logged(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            print("step", state.global_step, logs["loss"], logs["grad_norm"])


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=4,
    num_attention_heads=4,
    use_cache=False,
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=16,
        max_steps=28,
        logging_steps=1,
        save_strategy="no",
        learning_rate=1e-3,
        report_to=[],
        optim="adamw_torch",
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        logging_nan_inf_filter=False,
    )
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Numbers())
    trainer.add_callback(Logged())
    print("built")
    trainer.train()
