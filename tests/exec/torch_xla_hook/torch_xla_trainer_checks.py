"""Scripts for `test_torch_xla_trainer.py`: the unmodified Hugging Face Trainer, planned live.

It evaluates in the middle of training, and resumes from a checkpoint under another plan.
"""

import functools
import os
from typing import Any

from tests.exec.torch_xla_hook.torch_xla_checks import plans, report, spec


STEPS, SAVED = 6, 3
LAYERS = {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block", "gpt_neox": "GPTNeoXLayer"}


def model_of(family: str) -> Any:
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(0)
    if family == "gpt2":
        sizes = {"vocab_size": 128, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4, "use_cache": False}
        return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    if family == "gpt_neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=4, use_cache=False))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


def trained(family: str, folder: str, resumes: bool = False, **options: Any) -> dict[str, Any]:
    """Return the Trainer's logs and its model: from the start with a checkpoint in the middle, or resumed from it."""
    import torch
    from transformers import Trainer, TrainingArguments

    class Numbers(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, Any]:
            ids = (torch.arange(16) * (index + 1)) % 128
            return {"input_ids": ids, "labels": ids}

    class Completed(Trainer):
        """Trainer with an optimizer: Trainer 5.23 creates none if XLA's FSDP wraps the model."""

        def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
            if self.optimizer is None:
                self.optimizer = self.accelerator.prepare(self.create_optimizer())
            return super().create_scheduler(*args, **kwargs)

    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        max_steps=STEPS,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=SAVED,
        save_strategy="steps",
        save_steps=SAVED,
        learning_rate=1e-2,
        report_to=[],
        optim="adamw_torch",
        dataloader_drop_last=True,
        dataloader_pin_memory=False,  # torchax registers a device without it
        **options,
    )
    made = Completed if options else Trainer
    trainer = made(model=model_of(family), args=arguments, train_dataset=Numbers(), eval_dataset=Numbers())
    trainer.train(resume_from_checkpoint=os.path.join(folder, f"checkpoint-{SAVED}") if resumes else None)
    logged = trainer.state.log_history
    return {
        "losses": {str(each["step"]): each["loss"] for each in logged if "loss" in each},
        "evaluated": {str(each["step"]): each["eval_loss"] for each in logged if "eval_loss" in each},
        "model": trainer.model_wrapped,
    }


def alone(family: str) -> dict[str, Any]:
    """Train on one device, without a plan."""
    run = trained(family, os.environ["FOLDER"])
    return {key: run[key] for key in ("losses", "evaluated")}


def planned(family: str, resumes: bool = False, **options: Any) -> dict[str, Any]:
    import torch_xla.runtime as xr

    import autoshard.torch_xla  # noqa: F401

    xr.use_spmd(auto=True)
    run = trained(family, os.environ["FOLDER"], resumes, **options)
    model, made = run.pop("model"), plans()
    return run | {
        "wrapped": type(model).__name__,
        "plans": len(made),
        "mesh": made[0].mesh,
        "parameters": [name for name, role in made[0].roles.items() if role == "parameter"],
        "held": [spec(p) for p in model.parameters() if p.dim() == 2],
    }


def wrapped(family: str) -> dict[str, Any]:
    """Train with the Trainer's FSDPv2 option."""
    config: dict[str, Any] = {"xla": True, "xla_fsdp_v2": True, "xla_fsdp_grad_ckpt": False}
    config["transformer_layer_cls_to_wrap"] = [LAYERS[family]]
    return planned(family, fsdp="full_shard", fsdp_config=config)


def resumed(family: str) -> dict[str, Any]:
    return planned(family, resumes=True)


CHECKS = {
    f"{run.__name__}_{family}": functools.partial(run, family)
    for run in (alone, planned, wrapped, resumed)
    for family in LAYERS
}


if __name__ == "__main__":
    report(CHECKS)
