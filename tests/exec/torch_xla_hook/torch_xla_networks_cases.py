"""Scripts for `test_torch_xla_posted.py`: networks that people write, with masks, buffers, views and ranges."""

import random
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from tests.exec.torch_xla_hook.torch_xla_alias_cases import data, labels, mlp, sgd
from tests.exec.torch_xla_hook.torch_xla_modes import Case, Script
from tests.exec.torch_xla_hook.torch_xla_posted_cases import Gpt, adamw, descend, next_word


CASES: dict[str, Case] = {}

STEPS = 4


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
def lengths_gathered(script: Script) -> None:
    """Train an LSTM on sequences of several lengths, of which the last states are gathered."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.lstm, self.head = nn.Embedding(64, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 8)

        def forward(self, ids: Any, lengths: Any) -> Any:
            seen, _ = self.lstm(self.words(ids))
            last = seen.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, seen.shape[2]))
            return self.head(last[:, 0])

    torch.manual_seed(0)
    model = Net().to(script.device)
    optimizer = sgd(model, 0.1)
    for step in range(3):
        lengths = torch.tensor([6, 3, 5, 2, 6, 4, 1, 3]).to(script.device)
        loss = functional.cross_entropy(model(labels(script, step, 64, 8, 6), lengths), labels(script, step, 8, 8))
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def cells(script: Script) -> None:
    """Translate with GRU cells and additive attention, by teachers or by the network's own choice in turn."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(32, 16)
            self.encode, self.decode = nn.LSTM(16, 32, batch_first=True), nn.GRUCell(48, 32)
            self.query, self.key, self.score = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(16, 1, bias=False)
            self.head = nn.Linear(64, 32)

        def forward(self, source: Any, target: Any, taught: bool) -> Any:
            seen, (state, _) = self.encode(self.words(source))
            state, keys, chosen, outputs = state[0], self.key(seen), target[:, 0], []
            for place in range(target.shape[1] - 1):
                weights = self.score(torch.tanh(keys + self.query(state)[:, None])).softmax(1)
                context = (weights * seen).sum(1)
                state = self.decode(torch.cat([self.words(chosen), context], 1), state)
                outputs.append(self.head(torch.cat([state, context], 1)))
                chosen = target[:, place + 1] if taught else outputs[-1].argmax(-1)
            return torch.stack(outputs, 1)

    torch.manual_seed(0)
    model = Net().to(script.device)
    optimizer = adamw(model)
    for step in range(STEPS):
        source, target = labels(script, step, 32, 8, 5), labels(script, step + 9, 32, 8, 5)
        output = model(source, target, step % 2 == 0)
        loss = functional.cross_entropy(output.flatten(0, 1), target[:, 1:].flatten())
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def bags(script: Script) -> None:
    """Train bags of embeddings with offsets and a weight for each sample, and a padding row."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sums = nn.EmbeddingBag(64, 16, mode="sum", padding_idx=0)
            self.means = nn.EmbeddingBag(64, 16, mode="mean")
            self.head = nn.Linear(32, 8)

        def forward(self, ids: Any, offsets: Any, weights: Any) -> Any:
            return self.head(torch.cat([self.sums(ids, offsets, weights), self.means(ids, offsets)], 1))

    torch.manual_seed(0)
    model = Net().to(script.device)
    optimizer = sgd(model, 0.1)
    offsets = torch.arange(0, 64, 4, device=script.device)
    for step in range(STEPS):
        ids, weights = labels(script, step, 64, 64), data(script, step, 64)
        loss = functional.cross_entropy(model(ids, offsets, weights), labels(script, step, 8, 16))
        descend(script, optimizer, loss)
    script.log_state("model", model)


@case
def hard_examples(script: Script) -> None:
    """Average the largest losses of a batch, weighted by focus and by class, as detectors do."""
    model = mlp(script)
    optimizer = sgd(model, 0.1)
    weights = torch.linspace(0.5, 2.0, 8).to(script.device)
    for step in range(STEPS):
        output, y = model(data(script, step, 32, 16)), labels(script, step, 8, 32)
        each = functional.cross_entropy(output, y, weight=weights, reduction="none")
        each = (1 - torch.exp(-each)) ** 2 * each
        loss = each.topk(12).values.mean() + 0.1 * torch.where(each > 1, each, 0.5 * each.square()).mean()
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def triplets(script: Script) -> None:
    """Find the hardest triplets of a batch by distances, and classify by angles with a margin."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)).to(script.device)
    centers = nn.Parameter(torch.randn(8, 32).to(script.device))
    optimizer = torch.optim.SGD([*body.parameters(), centers], lr=0.05)
    for step in range(STEPS):
        y = labels(script, step, 8, 32)
        found = body(data(script, step, 32, 16))
        apart = torch.cdist(found, found + 0.01)
        same = y[:, None] == y[None]
        far = apart.masked_fill(~same, -1e4).max(1)[0]
        near = apart.masked_fill(same, 1e4).min(1)[0]
        angles = functional.linear(functional.normalize(found), functional.normalize(centers))
        shifted = torch.cos(torch.acos(angles.clamp(-0.99, 0.99)) + 0.2)
        output = 8 * torch.where(functional.one_hot(y, 8).bool(), shifted, angles)
        loss = functional.relu(far - near + 0.3).mean() + functional.cross_entropy(output, y)
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log("centers", centers)
    script.log_state("body", body)


@case
def enlarged(script: Script) -> None:
    """Train a net that enlarges pictures by sub-pixel convolution, and mixes patches by `unfold` and `fold`."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 12, 3, padding=1)
            self.mix = nn.Parameter(torch.randn(27, 27) / 27)

        def forward(self, x: Any) -> Any:
            columns = functional.unfold(x, 3, padding=1)
            mixed = torch.einsum("bcl,cd->bdl", columns, self.mix)
            x = x + functional.fold(mixed, x.shape[2:], 3, padding=1) / 9
            return functional.pixel_shuffle(self.outer(torch.relu(self.inner(x))), 2)

    torch.manual_seed(0)
    model = Net().to(script.device)
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        x = data(script, step, 16, 3, 8, 8)
        wanted = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        made = model(x)
        loss = functional.l1_loss(made, wanted) + functional.mse_loss(functional.pixel_unshuffle(made, 2)[:, :3], x)
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def written_views(script: Script) -> None:
    """Write into views of activations in place: slices, masks, chunks and diagonals."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 8)

        def forward(self, x: Any) -> Any:
            h = torch.tanh(self.first(x))
            h = h.clone()
            h[:, ::2] += 0.5 * h[:, 1::2]
            h[:, :8].mul_(2.0)
            one, two = h[:, :32], h[:, 32:]
            two.sub_(one.detach().mean(0))
            h.masked_fill_(h > 1.5, 1.5)
            h.view(-1, 8, 8).diagonal(dim1=1, dim2=2).fill_(0.25)
            out = torch.zeros(x.shape[0], 64, device=x.device)
            out[:, :32] = h[:, 32:]
            out[:, 32:] = h[:, :32].flip(1)
            return self.last(out)

    torch.manual_seed(0)
    model = Net().to(script.device)
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        loss = functional.cross_entropy(model(data(script, step, 32, 16)), labels(script, step, 8, 32))
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def counted(script: Script) -> None:
    """Sum a confusion matrix, prototypes of classes and running ranges in buffers, in training and evaluation."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(16, 64), nn.Linear(64, 8)
            self.register_buffer("confusion", torch.zeros(8, 8, dtype=torch.long))
            self.register_buffer("sums", torch.zeros(8, 64))
            self.register_buffer("counts", torch.zeros(8))
            self.register_buffer("low", torch.full((64,), 1e4))
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x: Any, y: Any) -> Any:
            h = torch.relu(self.body(x))
            output = self.head(h)
            with torch.no_grad():
                self.confusion.index_put_((y, output.argmax(1)), torch.ones_like(y), accumulate=True)
                self.sums.index_add_(0, y, h)
                self.counts += functional.one_hot(y, 8).sum(0)
                self.low = torch.minimum(self.low, h.amin(0))
                self.steps += 1
            return output + 0.1 * h @ (self.sums / self.counts.clamp(min=1)[:, None]).t()

    torch.manual_seed(0)
    model = Net().to(script.device)
    optimizer = sgd(model, 0.05)
    for step in range(STEPS):
        y = labels(script, step, 8, 32)
        loss = functional.cross_entropy(model(data(script, step, 32, 16), y), y)
        descend(script, optimizer, loss)
        if step == 1:
            model.confusion.zero_()
        with torch.no_grad():
            model(data(script, 9 + step, 16, 16), labels(script, 9, 8, 16))
        script.sync()
        script.log("confusion", model.confusion)
    script.log_state("model", model)


@case
def rotated(script: Script) -> None:
    """Rotate queries and keys by complex numbers in a buffer, as Llama's own code does."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.qkv, self.head = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 64, bias=False)
            angles = torch.outer(torch.arange(16).float(), 10000.0 ** (-torch.arange(4).float() / 4))
            self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

        def turned(self, x: Any) -> Any:
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * self.turns[: x.shape[1], None]).flatten(3).type_as(x)

        def forward(self, ids: Any) -> Any:
            q, k, v = self.qkv(self.words(ids)).view(*ids.shape, 3, 4, 8).unbind(2)
            q, k, v = (each.transpose(1, 2) for each in (self.turned(q), self.turned(k), v))
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.head(seen.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model = Net().to(script.device)
    optimizer = adamw(model)
    for step in range(STEPS):
        loss = next_word(script, model, step, 8, 16)
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def in_bfloat16(script: Script) -> None:
    """Train weights in bfloat16 with copies in float32 that the optimizer updates."""
    model = mlp(script)
    exact = [each.detach().clone().requires_grad_() for each in model.parameters()]
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(exact, lr=0.05, momentum=0.9)
    for step in range(STEPS):
        output = model(data(script, step, 32, 16).bfloat16())
        loss = functional.cross_entropy(output.float(), labels(script, step, 8, 32))
        model.zero_grad()
        loss.backward()
        for master, each in zip(exact, model.parameters(), strict=True):
            master.grad = each.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, each in zip(exact, model.parameters(), strict=True):
                each.copy_(master)
        script.sync()
        script.log("loss", loss)
    for number, each in enumerate(exact):
        script.log(f"exact{number}", each)


@case
def autocast(script: Script) -> None:
    """Train by autocast to bfloat16 with parts in float32, accumulate, and clip."""
    model = Gpt().to(script.device)
    optimizer = sgd(model, 0.05)
    for step in range(6):
        with torch.autocast("cpu" if script.device == "cpu" else "xla", dtype=torch.bfloat16):
            loss = next_word(script, model, step, 8, 16)
        (loss.float() / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        script.sync()
        script.log("loss", loss)


@case
def dropped(script: Script) -> None:
    """Drop activations at random, with a seed that is set again for each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 8)).to(script.device)
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        if script.device == "xla":
            import torch_xla

            torch_xla.manual_seed(step)
        noise = torch.rand(32, 16, device=script.device)
        loss = functional.cross_entropy(model(data(script, step, 32, 16) + noise), labels(script, step, 8, 32))
        descend(script, optimizer, loss)
        script.log("noise", noise)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def encoder(script: Script) -> None:
    """Train torch's own encoder with a padding mask, and evaluate it; log the weights of an attention."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(64, 32)
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.pool, self.start = nn.MultiheadAttention(32, 4, batch_first=True), nn.Parameter(torch.randn(1, 1, 32))
            self.head = nn.Linear(32, 8)

        def forward(self, ids: Any, masked: Any) -> tuple[Any, Any]:
            x = self.layers(self.words(ids), src_key_padding_mask=masked)
            pooled, weights = self.pool(self.start.expand(ids.shape[0], -1, -1), x, x, key_padding_mask=masked)
            return self.head(pooled[:, 0]), weights

    torch.manual_seed(0)
    model = Net().to(script.device)
    optimizer = adamw(model)
    for step in range(STEPS):
        ids, lengths = labels(script, step, 64, 16, 8), labels(script, step, 7, 16) + 1
        masked = torch.arange(8, device=script.device)[None] >= lengths[:, None]
        output, weights = model(ids, masked)
        loss = functional.cross_entropy(output, labels(script, step, 8, 16))
        descend(script, optimizer, loss)
        script.log("weights", weights)
        model.eval()
        with torch.no_grad():
            script.log("output", model(ids, masked)[0])
        model.train()
    script.log_state("model", model)


@case
def flow(script: Script) -> None:
    """Train a normalizing flow of couplings and triangular matrices, with log determinants."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrices = nn.ParameterList(torch.eye(8) + 0.1 * torch.randn(8, 8) for _ in range(2))
            self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(2))

        def forward(self, x: Any) -> tuple[Any, Any]:
            total = torch.zeros(x.shape[0], device=x.device)
            for matrix, net in zip(self.matrices, self.nets, strict=True):
                x = x @ matrix.tril()
                total = total + matrix.diagonal().abs().log().sum()
                one, two = x.chunk(2, 1)
                scale, shift = net(one).chunk(2, 1)
                two = two * torch.exp(torch.tanh(scale)) + shift
                total = total + torch.tanh(scale).sum(1)
                x = torch.cat([two, one], 1)
            return x, total

    torch.manual_seed(0)
    model = Net().to(script.device)
    optimizer = sgd(model, 0.01)
    for step in range(STEPS):
        z, determinant = model(data(script, step, 32, 8))
        loss = (0.5 * z.square().sum(1) - determinant).mean()
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def integrated(script: Script) -> None:
    """Train a neural differential equation by Runge and Kutta, with times in a tensor."""

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, 8))

        def forward(self, t: Any, y: Any) -> Any:
            return self.net(torch.cat([y, t.expand(y.shape[0], 1)], 1))

    torch.manual_seed(0)
    field = Field().to(script.device)
    optimizer = adamw(field)
    times = torch.linspace(0, 1, 4).to(script.device)
    for step in range(STEPS):
        y = data(script, step, 32, 8)
        wanted = y.cos()
        for start, end in zip(times[:-1], times[1:], strict=True):
            h = end - start
            one = field(start, y)
            two = field(start + h / 2, y + h / 2 * one)
            three = field(start + h / 2, y + h / 2 * two)
            y = y + h / 6 * (one + 2 * two + 2 * three + field(end, y + h * three))
        loss = functional.mse_loss(y, wanted)
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("field", field)


@case
def fixed_points(script: Script) -> None:
    """Train a deep equilibrium: iterate without gradients until a residual that is read is small, then once more."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.again, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)

        def forward(self, x: Any) -> Any:
            given = self.into(x)
            with torch.no_grad():
                z = torch.zeros_like(given)
                for _ in range(6):
                    after = torch.tanh(0.5 * self.again(z) + given)
                    off = (after - z).norm() / (after.norm() + 1e-6)
                    z = after
                    if off.item() < 0.05:
                        break
            return self.head(torch.tanh(0.5 * self.again(z) + given))

    torch.manual_seed(0)
    model = Net().to(script.device)
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        loss = functional.cross_entropy(model(data(script, step, 32, 16)), labels(script, step, 8, 32))
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def masks_of_pictures(script: Script) -> None:
    """Train a U-Net with transposed convolutions, instance norm and dice loss, and threshold in evaluation."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU())
            self.two = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
            self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 1, 1)

        def forward(self, x: Any) -> Any:
            one = self.one(x)
            return self.out(torch.cat([one, self.up(self.two(one))], 1))

    torch.manual_seed(0)
    model = Net().to(script.device)
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        x = data(script, step, 16, 3, 8, 8)
        wanted = (x.mean(1, keepdim=True) > 0).float()
        made = torch.sigmoid(model(x))
        shared = (made * wanted).sum((2, 3))
        dice = 1 - (2 * shared + 1) / (made.sum((2, 3)) + wanted.sum((2, 3)) + 1)
        loss = dice.mean() + functional.binary_cross_entropy(made, wanted)
        descend(script, optimizer, loss)
        with torch.no_grad():
            found = model(data(script, 9, 16, 3, 8, 8)) > 0
        script.log("found", found.float().mean())
    script.log_state("model", model)


@case
def boxes(script: Script) -> None:
    """Match anchors to boxes by their overlap, gather targets, and regress the matched ones smoothly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 5, 1)).to(script.device)
    optimizer = sgd(model, 0.1)
    places = torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij"), -1).view(-1, 2)
    anchors = torch.cat([places, places + 3], 1).to(script.device)
    for step in range(STEPS):
        corner = data(script, step, 16, 4, 2).abs() * 3
        wanted = torch.cat([corner, corner + 3.5], 2)
        low = torch.maximum(anchors[None, :, None, :2], wanted[:, None, :, :2])
        high = torch.minimum(anchors[None, :, None, 2:], wanted[:, None, :, 2:])
        shared = (high - low).clamp(min=0).prod(-1)
        overlap = shared / (9 + 12.25 - shared)
        best, which = overlap.max(2)
        chosen = wanted.gather(1, which[..., None].expand(-1, -1, 4))
        made = model(data(script, step, 16, 3, 8, 8)).flatten(2).transpose(1, 2)
        matched = (best > 0.2).float()
        off = functional.smooth_l1_loss(anchors + made[..., :4], chosen, reduction="none").sum(-1)
        score = functional.binary_cross_entropy_with_logits(made[..., 4], matched, reduction="none")
        hard = (score * (1 - matched)).topk(8, dim=1)[0]
        loss = (off * matched).sum() / matched.sum().clamp(min=1) + hard.mean() + (score * matched).mean()
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def quantized(script: Script) -> None:
    """Train with rounded weights and activations, whose ranges are followed in buffers."""

    class Rounded(nn.Linear):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs)
            self.register_buffer("range", torch.tensor(1.0))
            self.register_buffer("begun", torch.tensor(False))

        def forward(self, x: Any) -> Any:
            if self.training:
                with torch.no_grad():
                    most = x.abs().max()
                    self.range.copy_(torch.where(self.begun, 0.9 * self.range + 0.1 * most, most))
                    self.begun.fill_(True)
            scale = self.range / 7 + 1e-8
            x = x + ((x / scale).clamp(-8, 7).round() * scale - x).detach()
            size = self.weight.abs().amax(1, keepdim=True) / 7
            weight = self.weight + ((self.weight / size).round() * size - self.weight).detach()
            return functional.linear(x, weight, self.bias)

    torch.manual_seed(0)
    model = nn.Sequential(Rounded(16, 64), nn.ReLU(), Rounded(64, 8)).to(script.device)
    optimizer = sgd(model, 0.01)
    for step in range(STEPS):
        x = (data(script, step, 32, 16) * 4).round() / 4
        descend(script, optimizer, functional.cross_entropy(model(x), labels(script, step, 8, 32)))
    script.log("range", model[0].range)
    script.log("begun", model[2].begun)


@case
def denoised(script: Script) -> None:
    """Train a denoiser with noise of the host, and sample from an average of it by a loop without gradients."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.times, self.body = nn.Embedding(8, 32), nn.Sequential(nn.Linear(48, 64), nn.SiLU(), nn.Linear(64, 16))

        def forward(self, x: Any, t: Any) -> Any:
            return self.body(torch.cat([x, self.times(t)], 1))

    torch.manual_seed(0)
    model = Net().to(script.device)
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, b, _: 0.8 * a + 0.2 * b, use_buffers=True)
    optimizer = adamw(model)
    kept = torch.cumprod(1 - torch.linspace(0.01, 0.3, 8), 0).to(script.device)
    for step in range(STEPS):
        x, noise, t = data(script, step, 32, 16), data(script, step + 9, 32, 16), labels(script, step, 8, 32)
        share = kept[t][:, None]
        loss = functional.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, t), noise)
        descend(script, optimizer, loss)
        average.update_parameters(model)
    x = data(script, 99, 16, 16)
    with torch.no_grad():
        for t in reversed(range(8)):
            found = average(x, torch.full((16,), t, device=script.device))
            x = (x - (1 - kept[t]).sqrt() * found) / kept[t].sqrt().clamp(min=0.5)
            script.sync()
    script.log("x", x)
    script.log_state("average", average)


@case
def hypernetwork(script: Script) -> None:
    """Let one network make the weights of another, which runs by `functional_call` for each task."""
    inner = mlp(script)
    sizes = {name: each.shape for name, each in inner.named_parameters()}
    total = sum(size.numel() for size in sizes.values())
    torch.manual_seed(1)
    maker = nn.Sequential(nn.Embedding(4, 16), nn.Linear(16, total)).to(script.device)
    with torch.no_grad():
        maker[1].weight.mul_(0.1)
    optimizer = sgd(maker, 0.05)
    for step in range(STEPS):
        loss = 0.0
        for task in (step % 4, (step + 1) % 4):
            flat = maker(torch.tensor([task], device=script.device))[0]
            made = dict(zip(sizes, flat.split([size.numel() for size in sizes.values()]), strict=True))
            made = {name: each.view(sizes[name]) for name, each in made.items()}
            output = torch.func.functional_call(inner, made, (data(script, step, 32, 16),))
            loss = loss + functional.cross_entropy(output, (labels(script, step, 8, 32) + task) % 8)
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("maker", maker)


@case
def jacobians(script: Script) -> None:
    """Train with a penalty on Jacobians by `vmap` of `jacrev`, and log a directional derivative by `jvp`."""
    model = mlp(script)
    optimizer = sgd(model, 0.1)
    for step in range(3):
        x = data(script, step, 16, 16)
        parameters = dict(model.named_parameters())

        def apply(one: Any, given: Any = parameters) -> Any:
            return torch.func.functional_call(model, given, (one,))

        slopes = torch.func.vmap(torch.func.jacrev(apply))(x)
        loss = functional.cross_entropy(model(x), labels(script, step, 8, 16)) + 0.01 * slopes.square().mean()
        along = torch.func.jvp(apply, (x,), (torch.ones_like(x),))[1]
        descend(script, optimizer, loss)
        script.log("along", along)
    script.log_state("model", model)


@case
def growing_pictures(script: Script) -> None:
    """Train a convolutional net on pictures that grow, with stochastic crops and flips on the device."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8),
    ).to(script.device)  # fmt: skip
    optimizer = sgd(model, 0.1)
    drawn = random.Random(3)
    for step in range(6):
        size = 8 + 4 * (step // 2)
        x = functional.pad(data(script, step, 16, 3, size, size), (2, 2, 2, 2))
        top = drawn.randrange(5)
        x = x[:, :, top : top + size, 1 : 1 + size]
        if drawn.random() < 0.5:
            x = x.flip(3)
        loss = functional.cross_entropy(model(x), labels(script, step, 8, 16))
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


CUT = {"fixed_points": 3}
"""Additional programs of scripts that read values in the middle of a call: each piece runs once with nothing split."""

READS: dict[str, int] = {}

UNHOOKED_DIFFERS = ("dropped",)
"""Cases that differ from eager torch in PyTorch/XLA alone: random numbers do."""
