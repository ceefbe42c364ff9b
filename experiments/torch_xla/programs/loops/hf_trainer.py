"""The Trainer of Hugging Face, which evaluates in the middle."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        ids = (torch.arange(32) * (index + 1)) % 256
        return {"input_ids": ids, "labels": ids}


class Logged(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "eval_loss" in logs:
            print("held out", logs["eval_loss"])
        elif logs and "loss" in logs:
            print("step", state.global_step, logs["loss"], logs["grad_norm"])


torch.manual_seed(0)
config = GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=4, use_cache=False)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        max_steps=28,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=14,
        save_strategy="no",
        learning_rate=1e-3,
        report_to=[],
        optim="adamw_torch",
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        logging_nan_inf_filter=False,
    )
    held = torch.utils.data.Subset(Numbers(), range(32))
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Numbers(), eval_dataset=held)
    trainer.add_callback(Logged())
    trainer.train()
