"""Scripts for `test_torch_xla_posted.py`: training and inference of the kinds that people post, in few steps."""

import copy
import io
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from tests.exec.torch_xla_hook.torch_xla_alias_cases import data, labels, mlp, sgd, train
from tests.exec.torch_xla_hook.torch_xla_modes import Case, Script


CASES: dict[str, Case] = {}

STEPS = 5


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def descend(script: Script, optimizer: Any, loss: Any) -> None:
    """Run a backward pass and an update, and end the step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    script.sync()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW that does not amplify the rounding of small gradients."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)


class Block(nn.Module):
    """A layer of causal attention and a feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A small GPT."""

    def __init__(self, words: int = 64, width: int = 32, layers: int = 2, most: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(most, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_word(script: Script, model: nn.Module, step: int, rows: int, length: int) -> Any:
    """Return the loss of a model of language on a batch of its own."""
    ids = labels(script, step, 64, rows, length + 1)
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@case
def moved_to_other(script: Script) -> None:
    """Move a mask and a batch by `to(other)`, where the other is a tensor on the device."""
    model = mlp(script)
    optimizer = sgd(model)
    for step in range(STEPS):
        x = data(script, step, 32, 16)
        hidden = model[1](model[0](x))
        keep = (hidden.sum(1, keepdim=True) > 0).to(hidden)
        loss = functional.cross_entropy(model[2](hidden * keep), labels(script, step, 8, 32))
        descend(script, optimizer, loss)
    script.log_state("model", model)


@case
def complex_weights(script: Script) -> None:
    """Train a spectral layer with complex weights, as Fourier operators have."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift = nn.Linear(1, 8)
            self.weight = nn.Parameter(torch.randn(8, 8, 6, dtype=torch.cfloat) / 8)
            self.drop = nn.Linear(8, 1)

        def forward(self, x: Any) -> Any:
            h = self.lift(x).transpose(1, 2)
            f = torch.fft.rfft(h)[..., :6]
            f = torch.einsum("bim,iom->bom", f, self.weight)
            return self.drop((torch.fft.irfft(f, n=x.shape[1]) + h).transpose(1, 2))

    model = Spectral().to(script.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x = data(script, step, 16, 32, 1)
        descend(script, optimizer, functional.mse_loss(model(x), x.cumsum(1) / 8))
    script.log_state("model", model)


@case
def generated(script: Script) -> None:
    """Generate by a small GPT-2 of Hugging Face, after a few steps of training."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, attn_pdrop=0.0)
    config.embd_pdrop = 0.0
    model = GPT2LMHeadModel(config).to(script.device)
    optimizer = sgd(model, 0.05)
    for step in range(3):
        ids = labels(script, step, 64, 8, 16)
        descend(script, optimizer, model(input_ids=ids, labels=ids).loss)
    model.eval()
    ids = labels(script, 9, 64, 8, 6)
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    script.log("made", made)
    script.log_state("model", model)


@case
def generated_only(script: Script) -> None:
    """Generate by a small Llama of Hugging Face, twice."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).to(script.device).eval()
    for step in range(2):
        ids = labels(script, step, 64, 8, 6)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        script.log("made", made)


@case
def losses_read(script: Script) -> None:
    """Read several losses in each step, before the update and after it."""
    model = Gpt().to(script.device)
    optimizer = sgd(model, 0.05)
    for step in range(STEPS):
        ids = labels(script, step, 64, 8, 17)
        output = model(ids[:, :-1])
        words = functional.cross_entropy(output.flatten(0, 1), ids[:, 1:].flatten())
        size = output.square().mean()
        loss = words + 1e-3 * size
        script.log("words", words)
        script.log("size", size)
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def loss_item(script: Script) -> None:
    """Print the loss by `item()` after each step."""
    model = Gpt().to(script.device)
    optimizer = adamw(model)
    for step in range(STEPS):
        loss = next_word(script, model, step, 8, 16)
        descend(script, optimizer, loss)
        script.log("loss", torch.tensor(loss.item()))
    script.log_state("model", model)


@case
def accuracy_read(script: Script) -> None:
    """Read loss, accuracy and the gradients' norm in each step."""
    model = mlp(script)
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        output = model(data(script, step, 32, 16))
        y = labels(script, step, 8, 32)
        loss = functional.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        script.sync()
        script.log("loss", loss)
        script.log("accuracy", (output.argmax(1) == y).float().mean())
        script.log("norm", norm)
    script.log_state("model", model)


@case
def interpolated(script: Script) -> None:
    """Interpolate features bilinearly and by nearest places, as decoders of pictures do."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 3, 3, padding=1)
            self.skip = nn.Conv2d(8, 3, 1)

        def forward(self, x: Any) -> Any:
            h = torch.relu(self.down(x))
            big = functional.interpolate(h, size=x.shape[2:], mode="bilinear", align_corners=False)
            near = functional.interpolate(h, scale_factor=2, mode="nearest")
            return self.up(big) + self.skip(near)

    model = Net().to(script.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x = data(script, step, 16, 3, 16, 16)
        descend(script, optimizer, functional.mse_loss(model(x), x.flip(3)))
    script.log_state("model", model)


@case
def grid_sampled(script: Script) -> None:
    """Transform pictures by a learned affine grid, as spatial transformers do."""

    class Warp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.locate = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 6))
            self.classify = nn.Linear(64, 8)
            with torch.no_grad():
                self.locate[3].weight.mul_(0.1)
                self.locate[3].bias.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

        def forward(self, x: Any) -> Any:
            grid = functional.affine_grid(self.locate(x).view(-1, 2, 3), list(x.shape), align_corners=False)
            return self.classify(functional.grid_sample(x, grid, align_corners=False).flatten(1))

    model = Warp().to(script.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = functional.cross_entropy(model(data(script, step, 16, 1, 8, 8)), labels(script, step, 8, 16))
        descend(script, optimizer, loss)
    script.log_state("model", model)


@case
def many_lengths(script: Script) -> None:
    """Train on sequences of ten lengths."""
    model = Gpt().to(script.device)
    optimizer = sgd(model, 0.05)
    for step in range(12):
        loss = next_word(script, model, step, 8, 8 + 4 * (step * 7 % 10))
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def mixture(script: Script) -> None:
    """Train a mixture of experts with capacity, whose tokens are sent by `index_put`."""

    class Experts(nn.Module):
        def __init__(self, width: int, experts: int) -> None:
            super().__init__()
            self.gate = nn.Linear(width, experts, bias=False)
            self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / 8)
            self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / 8)

        def forward(self, x: Any) -> Any:
            flat = x.flatten(0, 1)
            tokens, experts = flat.shape[0], self.up.shape[0]
            capacity = 2 * tokens // experts
            weight, chosen = self.gate(flat).softmax(-1).max(-1)
            place = functional.one_hot(chosen, experts).cumsum(0).gather(1, chosen[:, None])[:, 0] - 1
            kept = place < capacity
            place = place.clamp(max=capacity - 1)
            sent = torch.zeros(experts, capacity, flat.shape[1], device=x.device)
            sent = sent.index_put((chosen, place), flat * kept[:, None], accumulate=True)
            made = torch.bmm(torch.relu(torch.bmm(sent, self.up)), self.down)
            return x + (made[chosen, place] * (weight * kept)[:, None]).view_as(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(64, 32)
            self.layers = nn.ModuleList(Experts(32, 8) for _ in range(2))
            self.head = nn.Linear(32, 64)

        def forward(self, ids: Any) -> Any:
            x = self.words(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model = Net().to(script.device)
    optimizer = adamw(model)
    for step in range(STEPS):
        loss = next_word(script, model, step, 8, 16)
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def updated_in_backward(script: Script) -> None:
    """Update each parameter in a hook of its gradient, as soon as it is summed."""
    model = Gpt().to(script.device)
    optimizers = {each: torch.optim.SGD([each], lr=0.05, momentum=0.9) for each in model.parameters()}

    def update(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(STEPS):
        loss = next_word(script, model, step, 8, 16)
        loss.backward()
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def averaged(script: Script) -> None:
    """Average the weights exponentially by PyTorch's own class, and evaluate the average in turn with training."""
    model = mlp(script)
    optimizer = sgd(model, 0.1)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for step in range(STEPS):
        train(script, model, optimizer, step)
        average.update_parameters(model)
        script.sync()
        if step % 2:
            average.eval()
            with torch.no_grad():
                script.log("output", average(data(script, 9, 16, 16)))
    script.log_state("average", average)


@case
def evaluated_in_turn(script: Script) -> None:
    """Train and evaluate in turn a net with batch norm and dropout of nothing."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    ).to(script.device)
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        model.train()
        loss = functional.cross_entropy(model(data(script, step, 16, 3, 8, 8)), labels(script, step, 4, 16))
        descend(script, optimizer, loss)
        model.eval()
        with torch.no_grad():
            output = model(data(script, step + 9, 16, 3, 8, 8))
        script.log("output", output)
    # The running variance of PyTorch/XLA alone is not that of a sample.
    script.log("weight", model[0].weight)


@case
def resumed(script: Script) -> None:
    """Save model and optimizer to a file midway, and resume from it in new ones."""
    model = Gpt().to(script.device)
    optimizer = adamw(model)
    for step in range(3):
        descend(script, optimizer, next_word(script, model, step, 8, 16))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if script.device == "xla":
        import torch_xla.core.xla_model as xm

        state = xm._maybe_convert_to_cpu(state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file)
    model = Gpt()
    model.load_state_dict(state["model"])
    model = model.to(script.device)
    optimizer = adamw(model)
    optimizer.load_state_dict(state["optimizer"])
    for step in range(3, 6):
        loss = next_word(script, model, step, 8, 16)
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def rivals(script: Script) -> None:
    """Train a generator and its critic in turn, each with an update and a step of its own."""
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16)).to(script.device)
    critic = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).to(script.device)
    theirs, ours = torch.optim.Adam(critic.parameters(), 1e-3), torch.optim.Adam(generator.parameters(), 1e-3)
    for step in range(STEPS):
        real, noise = data(script, step, 32, 16), data(script, step + 50, 32, 8)
        one, zero = torch.ones(32, 1, device=script.device), torch.zeros(32, 1, device=script.device)
        judge = functional.binary_cross_entropy_with_logits
        descend(script, theirs, judge(critic(real), one) + judge(critic(generator(noise).detach()), zero))
        loss = judge(critic(generator(noise)), one)
        descend(script, ours, loss)
        script.log("loss", loss)
    script.log_state("generator", generator)
    script.log_state("critic", critic)


@case
def accumulated(script: Script) -> None:
    """Sum gradients over three batches, each its own step, and update after the third."""
    model = Gpt().to(script.device)
    optimizer = adamw(model)
    for step in range(9):
        loss = next_word(script, model, step, 8, 16) / 3
        loss.backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def flat_buffer(script: Script) -> None:
    """Use views of one buffer as gradients, and clip and zero the buffer as a whole."""
    model = Gpt().to(script.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    flat = torch.zeros(sum(each.numel() for each in model.parameters()), device=script.device)
    start = 0
    for each in model.parameters():
        each.grad = flat[start : start + each.numel()].view_as(each)
        start += each.numel()
    for step in range(STEPS):
        flat.zero_()
        loss = next_word(script, model, step, 8, 16)
        loss.backward()
        flat.mul_((1.0 / flat.norm()).clamp(max=1.0))
        optimizer.step()
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def per_sample(script: Script) -> None:
    """Log the norms of each sample's gradients by `vmap(grad(functional_call))` in ordinary training."""
    model = mlp(script)
    optimizer = sgd(model, 0.1)

    def loss_of(parameters: Any, x: Any, y: Any) -> Any:
        output = torch.func.functional_call(model, parameters, (x[None],))
        return functional.cross_entropy(output, y[None])

    each_gradient = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))
    for step in range(STEPS):
        x, y = data(script, step, 32, 16), labels(script, step, 8, 32)
        found = each_gradient({k: v.detach() for k, v in model.named_parameters()}, x, y)
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in found.values()]).norm(dim=0)
        descend(script, optimizer, functional.cross_entropy(model(x), y))
        script.log("norms", norms)
    script.log_state("model", model)


@case
def private(script: Script) -> None:
    """Train by each sample's clipped gradients, as private training does, with `functional_call` alone."""
    model = mlp(script)

    def loss_of(parameters: Any, x: Any, y: Any) -> Any:
        output = torch.func.functional_call(model, parameters, (x[None],))
        return functional.cross_entropy(output, y[None])

    each_gradient = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    for step in range(STEPS):
        x, y = data(script, step, 32, 16), labels(script, step, 8, 32)
        found = each_gradient(parameters, x, y)
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in found.values()]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for key, value in found.items():
            parameters[key].sub_(0.1 * torch.einsum("b...,b->...", value, factor) / 32)
        script.sync()
    for key, value in parameters.items():
        script.log(key, value)


@case
def cached_keys(script: Script) -> None:
    """Decode token by token with a static cache of keys that is written by `index_copy_`."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(64, 32)
            self.qkv, self.head = nn.Linear(32, 96), nn.Linear(32, 64)
            self.register_buffer("keys", torch.zeros(8, 4, 16, 8))
            self.register_buffer("values", torch.zeros(8, 4, 16, 8))

        def forward(self, ids: Any, place: Any) -> Any:
            q, k, v = self.qkv(self.words(ids)).view(8, 1, 3, 4, 8).permute(2, 0, 3, 1, 4)
            self.keys.index_copy_(2, place, k)
            self.values.index_copy_(2, place, v)
            mask = torch.arange(16, device=ids.device) <= place
            scores = (q @ self.keys.transpose(2, 3) / 8**0.5).masked_fill(~mask, float("-inf"))
            return self.head((scores.softmax(-1) @ self.values).transpose(1, 2).reshape(8, 1, 32))

    model = Layer().to(script.device).eval()
    ids = labels(script, 0, 64, 8, 1)
    with torch.no_grad():
        for place in range(8):
            output = model(ids, torch.tensor([place], device=script.device))
            ids = output.argmax(-1)
            script.sync()
            script.log("ids", ids)
    script.log_state("model", model)


@case
def sharpness(script: Script) -> None:
    """Train by SAM: two passes for each update, with the perturbation removed between."""
    model = mlp(script)
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        x, y = data(script, step, 32, 16), labels(script, step, 8, 32)
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            norm = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
            moved = [each.grad * (0.05 / (norm + 1e-12)) for each in model.parameters()]
            for each, by in zip(model.parameters(), moved, strict=True):
                each.add_(by)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for each, by in zip(model.parameters(), moved, strict=True):
                each.sub_(by)
        optimizer.step()
        optimizer.zero_grad()
        script.sync()
    script.log_state("model", model)


@case
def recurrent(script: Script) -> None:
    """Train an LSTM on series, with its state handed from batch to batch."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 16, 2, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: Any, state: Any) -> Any:
            h, state = self.lstm(x, state)
            return self.head(h), state

    model = Net().to(script.device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    state = (torch.zeros(2, 16, 16, device=script.device), torch.zeros(2, 16, 16, device=script.device))
    for step in range(STEPS):
        x = data(script, step, 16, 9, 4)
        output, state = model(x[:, :-1], state)
        state = tuple(each.detach() for each in state)
        descend(script, optimizer, functional.mse_loss(output, x[:, 1:]))
    script.log_state("model", model)


@case
def scheduled(script: Script) -> None:
    """Change the learning rate in each step."""
    model = Gpt().to(script.device)
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(STEPS):
        loss = next_word(script, model, step, 8, 16)
        descend(script, optimizer, loss)
        schedule.step()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def frozen_midway(script: Script) -> None:
    """Freeze the first layer midway, and replace the head after that."""
    model = mlp(script)
    optimizer = sgd(model, 0.1)
    for step in range(8):
        if step == 3:
            model[0].requires_grad_(False)
        if step == 5:
            torch.manual_seed(1)
            model[2] = nn.Linear(64, 8).to(script.device)
            optimizer = sgd(model, 0.1)
        loss = train(script, model, optimizer, step)
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def contrast(script: Script) -> None:
    """Train MoCo: a momentum encoder and a queue of keys that each step overwrites in part."""
    model = mlp(script)
    slow = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model, 0.05)
    queue = functional.normalize(data(script, 99, 64, 8), dim=1)
    head = 0
    for step in range(STEPS):
        x = data(script, step, 16, 16)
        q = functional.normalize(model(x), dim=1)
        with torch.no_grad():
            for a, b in zip(slow.parameters(), model.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)
            k = functional.normalize(slow(x + 0.1), dim=1)
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.t()], 1) / 0.2
        loss = functional.cross_entropy(scores, torch.zeros(16, dtype=torch.long, device=script.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue[head : head + 16] = k
        head = (head + 16) % 64
        script.sync()
        script.log("loss", loss)
    script.log("queue", queue)
    script.log_state("model", model)


@case
def early_stop(script: Script) -> None:
    """Validate after each epoch, keep the best weights on the host, and restore them at the end."""
    model = mlp(script)
    optimizer = sgd(model, 0.1)
    best, kept = float("inf"), None
    for epoch in range(3):
        for step in range(2):
            train(script, model, optimizer, 2 * epoch + step)
            script.sync()
        model.eval()
        total = 0.0
        with torch.no_grad():
            for step in range(2):
                output = model(data(script, 20 + step, 16, 16))
                total += functional.cross_entropy(output, labels(script, step, 8, 16)).item()
        model.train()
        script.log("total", torch.tensor(total))
        if total < best:
            best, kept = total, {key: value.cpu().clone() for key, value in model.state_dict().items()}
    model.load_state_dict(kept)
    script.log_state("model", model)
    train(script, model, optimizer, 9)
    script.sync()
    script.log_state("model", model)


@case
def shuffled(script: Script) -> None:
    """Keep the data set on the device and draw batches from it by `randperm` of the host."""
    model = mlp(script)
    optimizer = sgd(model, 0.1)
    xs, ys = data(script, 0, 128, 16), labels(script, 0, 8, 128)
    drawn = torch.Generator().manual_seed(5)
    for _ in range(2):
        order = torch.randperm(128, generator=drawn).to(script.device)
        for start in range(0, 128, 32):
            rows = order[start : start + 32]
            loss = functional.cross_entropy(model(xs[rows]), ys[rows])
            descend(script, optimizer, loss)
            script.log("loss", loss)
    script.log_state("model", model)


@case
def padded(script: Script) -> None:
    """Train on padded batches with lengths, a mask from them, and a mean over the tokens that count."""
    model = Gpt().to(script.device)
    optimizer = adamw(model)
    for step in range(STEPS):
        ids, lengths = labels(script, step, 64, 8, 17), labels(script, step + 1, 12, 8) + 4
        mask = torch.arange(16, device=script.device)[None] < lengths[:, None]
        each = functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
        loss = (each * mask).sum() / mask.sum()
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def hooked_features(script: Script) -> None:
    """Keep features of a hook, and add a loss on them."""
    model = mlp(script)
    kept: dict[str, Any] = {}
    model[1].register_forward_hook(lambda module, given, output: kept.update(features=output))
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        loss = functional.cross_entropy(model(data(script, step, 32, 16)), labels(script, step, 8, 32))
        loss = loss + 0.01 * kept["features"].abs().mean()
        descend(script, optimizer, loss)
        script.log("features", kept["features"])
    script.log_state("model", model)


CUT = {
    "accumulated": 1,
    "complex_weights": 3,
    "frozen_midway": 1,
    "generated_only": 6,
    "grid_sampled": 1,
    "losses_read": 1,
}
"""Additional programs of scripts whose steps are cut, by reads or by ops on the host.

Each piece before the first plan runs with nothing split, once.
"""

UNHOOKED_DIFFERS = ("complex_weights", "generated")
"""Cases that differ from eager torch in PyTorch/XLA alone.

Gradients of complex products do, and a GPT-2 that is moved with tied weights.
"""

READS = {"resumed": 1}
"""Additional transfers: saved state that is split in part is fetched in two."""
