"""Fine-tune a Hugging Face causal language model under a plan, from its saved weights and back to files.

Run `python examples/hf_finetune.py`. It makes a tiny Llama (nothing is downloaded) and trains it on eight CPU devices.
Losses and saved weights are checked against transformers and torch.
For real hardware, change `TOPOLOGY` (such as "v5p:2x2x2"), set `MESH` to "auto" or another one, and give
`finetune` the folder of a downloaded model.
"""

import tempfile

import torch
import transformers

import autoshard
from autoshard.exec import ensure_devices


TOPOLOGY, MESH = "cpu:8", {"data": 4, "model": 2}
BATCH, LENGTH, STEPS, VOCABULARY = 16, 32, 4, 256


def make_tiny(folder):
    """Save a small Llama with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def batches():
    """Yield counting sequences; a label is the next token, where transformers shifts labels itself."""
    for number in range(STEPS):
        ids = (torch.arange(LENGTH + 1) + 16 * torch.arange(BATCH)[:, None] + number) % VOCABULARY
        yield {"input_ids": ids[:, :-1].int().numpy(), "labels": ids[:, 1:].int().numpy()}


def finetune(folder, trained):
    """Train the model of a folder, save it to another, and return the losses."""
    program = autoshard.load_program(f"hf:{folder}", train=True, batch=BATCH, seq=LENGTH, dtype="float32")
    plan = autoshard.plan(program, topology=TOPOLOGY, mesh=MESH)
    print(plan, *plan.words, sep="\n")
    step = plan.jit(program)
    params = plan.load_weights(folder, program)  # every device reads its own part
    assert program.make_args is not None
    _, state, _ = program.make_args(0)  # an AdamW that starts
    losses = []
    for batch in plan.load_batches(batches()):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    plan.save_weights(params, trained, program)  # the weights; the configuration is copied from the model's folder
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(trained)
    return losses


def finetune_plainly(folder):
    """Train with transformers and torch; return the losses and the model."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for batch in batches():
        inputs, labels = (torch.tensor(batch[name]).long() for name in ("input_ids", "labels"))
        loss = model(inputs, shift_labels=labels, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def main():
    ensure_devices(8)  # CPU devices; it changes nothing where there are accelerators
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(f"{folder}/model")
        losses = finetune(f"{folder}/model", f"{folder}/trained")
        plain_losses, model = finetune_plainly(f"{folder}/model")
        saved = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/trained")
    print("planned losses:", *(f"{loss:.4f}" for loss in losses))
    print("plain losses:  ", *(f"{loss:.4f}" for loss in plain_losses))
    torch.testing.assert_close(losses, plain_losses, rtol=1e-4, atol=0.0)
    for ours, theirs in zip(saved.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-4)
    assert losses[-1] < losses[0]
    print("AGREES with transformers and torch, losses and saved weights")


if __name__ == "__main__":
    main()
