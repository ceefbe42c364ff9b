"""Scripts of further kinds that people post, for `test_torch_xla_kinds.py`."""

import copy
import io
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from tests.exec.torch_xla_hook.torch_xla_alias_cases import data, labels, mlp, sgd, train
from tests.exec.torch_xla_hook.torch_xla_modes import Case, Script
from tests.exec.torch_xla_hook.torch_xla_posted_cases import Gpt, adamw, descend, next_word


CASES: dict[str, Case] = {}

STEPS = 5


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
def average_swapped(script: Script) -> None:
    """Swap averaged weights in for each evaluation by `.data`, and the trained ones back."""
    model = mlp(script)
    optimizer = sgd(model, 0.1)
    shadow = [p.detach().clone() for p in model.parameters()]
    for step in range(STEPS):
        train(script, model, optimizer, step)
        with torch.no_grad():
            for s, p in zip(shadow, model.parameters(), strict=True):
                s.lerp_(p, 0.25)
        script.sync()
        if step % 2:
            stored = [p.data for p in model.parameters()]
            for s, p in zip(shadow, model.parameters(), strict=True):
                p.data = s
            with torch.no_grad():
                script.log("evaluated", model(data(script, 9, 32, 16)))
            for s, p in zip(stored, model.parameters(), strict=True):
                p.data = s
    script.log_state("model", model)
    for number, s in enumerate(shadow):
        script.log(f"shadow{number}", s)


@case
def average_copied(script: Script) -> None:
    """Swap averaged weights in by `copy_` with a clone stored, as torch_ema does."""
    model = Gpt().to(script.device)
    optimizer = adamw(model)
    shadow = [p.detach().clone() for p in model.parameters()]
    for step in range(STEPS):
        loss = next_word(script, model, step, 8, 16)
        descend(script, optimizer, loss)
        with torch.no_grad():
            for s, p in zip(shadow, model.parameters(), strict=True):
                s.sub_(0.1 * (s - p))
        if step % 2:
            stored = [p.clone() for p in model.parameters()]
            for s, p in zip(shadow, model.parameters(), strict=True):
                p.data.copy_(s.data)
            with torch.no_grad():
                script.log("evaluated", next_word(script, model, 77, 8, 16))
            for s, p in zip(stored, model.parameters(), strict=True):
                p.data.copy_(s.data)
        script.sync()
    script.log_state("model", model)


@case
def ensemble(script: Script) -> None:
    """Train an ensemble by `stack_module_state` and a `vmap` of `functional_call`."""
    models = [mlp(script) for _ in range(4)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0])
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)

    def call(p: Any, b: Any, x: Any) -> Any:
        return torch.func.functional_call(base, (p, b), (x,))

    for step in range(STEPS):
        x, y = data(script, step, 32, 16), labels(script, step, 8, 32)
        outputs = torch.func.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
        loss = functional.cross_entropy(outputs.flatten(0, 1), y.repeat(4))
        descend(script, optimizer, loss)
        script.log("loss", loss)
    for key, value in parameters.items():
        script.log(key, value)


@case
def functional_loop(script: Script) -> None:
    """Train by `grad_and_value` of `functional_call` on a dict of parameters that each step replaces."""
    model = mlp(script)
    parameters = {k: v.detach().clone() for k, v in model.named_parameters()}

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        return functional.cross_entropy(torch.func.functional_call(model, p, (x,)), y)

    for step in range(STEPS):
        gradients, loss = torch.func.grad_and_value(loss_of)(
            parameters, data(script, step, 32, 16), labels(script, step, 8, 32)
        )
        parameters = {k: v - 0.1 * gradients[k] for k, v in parameters.items()}
        script.sync()
        script.log("loss", loss)
    for key, value in parameters.items():
        script.log(key, value)


@case
def replay(script: Script) -> None:
    """Train DQN from a replay memory on the device, which `index_copy_` and `scatter_` write in a ring."""
    online = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 4)).to(script.device)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), 1e-3, eps=1e-4)
    memory = {
        "state": torch.zeros(64, 6, device=script.device),
        "next": torch.zeros(64, 6, device=script.device),
        "action": torch.zeros(64, dtype=torch.long, device=script.device),
        "reward": torch.zeros(64, device=script.device),
    }
    draw = torch.Generator().manual_seed(3)
    state = data(script, 0, 8, 6)
    for step in range(8):
        with torch.no_grad():
            action = online(state).argmax(1)
        following = torch.tanh(state + 0.1 * data(script, step + 1, 8, 6) + action[:, None] * 0.05)
        reward = following.sum(1)
        places = (torch.arange(8) + 8 * step).remainder(64).to(script.device)
        memory["state"].index_copy_(0, places, state)
        memory["next"].index_copy_(0, places, following)
        memory["action"].scatter_(0, places, action)
        memory["reward"][places] = reward
        state = following
        if step >= 2:
            rows = torch.randint(0, 8 * (step + 1), (32,), generator=draw).to(script.device)
            q = online(memory["state"][rows]).gather(1, memory["action"][rows][:, None])[:, 0]
            with torch.no_grad():
                aim = memory["reward"][rows] + 0.9 * target(memory["next"][rows]).max(1).values
            loss = functional.smooth_l1_loss(q, aim)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % 3 == 2:
            target.load_state_dict(online.state_dict())
        script.sync()
    for key, value in memory.items():
        script.log(key, value)
    script.log_state("online", online)
    script.log_state("target", target)


@case
def codebook(script: Script) -> None:
    """Train a VQ-VAE whose codebook is an average in buffers, with a straight-through gradient."""

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(16, 32), nn.Linear(32, 16)
            self.register_buffer("codes", torch.randn(64, 32) * 0.3)
            self.register_buffer("count", torch.ones(64))
            self.register_buffer("sums", self.codes.clone())

        def forward(self, x: Any) -> Any:
            z = self.encode(x)
            far = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.codes.t() + self.codes.pow(2).sum(1)
            chosen = far.argmin(1)
            q = functional.embedding(chosen, self.codes)
            if self.training:
                with torch.no_grad():
                    hot = functional.one_hot(chosen, 64).to(z.dtype)
                    self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                    self.sums.mul_(0.9).add_(hot.t() @ z, alpha=0.1)
                    self.codes.copy_(self.sums / (self.count + 1e-3)[:, None])
            loss = functional.mse_loss(z, q.detach())
            return self.decode(z + (q - z).detach()), loss

    model = Codes().to(script.device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-4)
    for step in range(STEPS):
        x = data(script, step, 64, 16)
        output, commit = model(x)
        descend(script, optimizer, functional.mse_loss(output, x) + 0.25 * commit)
    model.eval()
    with torch.no_grad():
        script.log("output", model(data(script, 50, 64, 16))[0])
    script.log_state("model", model)


@case
def summed_state(script: Script) -> None:
    """Train linear attention by `cumsum`, and decode with a state of sums that is written in place."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.qkv, self.head = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 64)
            self.register_buffer("state", torch.zeros(8, 32, 32), persistent=False)
            self.register_buffer("norm", torch.zeros(8, 32), persistent=False)

        def parts(self, ids: Any) -> Any:
            q, k, v = self.qkv(self.words(ids)).chunk(3, -1)
            return functional.elu(q) + 1, functional.elu(k) + 1, v

        def forward(self, ids: Any) -> Any:
            q, k, v = self.parts(ids)
            state = (k[..., None] * v[..., None, :]).cumsum(1)
            norm = (q * k.cumsum(1)).sum(-1, keepdim=True)
            return self.head(torch.einsum("btd,btde->bte", q, state) / norm)

        def decode(self, ids: Any) -> Any:
            q, k, v = self.parts(ids)
            self.state += k[..., None] * v[..., None, :]
            self.norm += k
            return self.head(torch.einsum("bd,bde->be", q, self.state) / (q * self.norm).sum(-1, keepdim=True))

    model = Linear().to(script.device)
    optimizer = adamw(model)
    for step in range(4):
        loss = next_word(script, model, step, 8, 16)
        descend(script, optimizer, loss)
        script.log("loss", loss)
    ids = labels(script, 0, 64, 8)
    with torch.no_grad():
        for _ in range(6):
            ids = model.decode(ids).argmax(-1)
            script.sync()
            script.log("ids", ids)
    script.log("state", model.state)


@case
def tied_after_move(script: Script) -> None:
    """Tie the head to the embedding after the move, and grow both midway."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.mix, self.head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)

        def forward(self, ids: Any) -> Any:
            return self.head(torch.tanh(self.mix(self.words(ids))))

    model = Words().to(script.device)
    model.head.weight = model.words.weight
    optimizer = adamw(model)
    for step in range(6):
        if step == 3:
            grown = nn.Embedding(72, 32).to(script.device)
            with torch.no_grad():
                grown.weight[:64] = model.words.weight
                grown.weight[64:] = 0.01
            model.words = grown
            model.head.weight = grown.weight
            optimizer = adamw(model)
        loss = next_word(script, model, step, 8, 16)
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def resumed_midway(script: Script) -> None:
    """Save between two microbatches, train on, and load the state into the same model, optimizer and schedule."""
    model = Gpt().to(script.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    kept: Any = None
    for step in range(6):
        if step == 4:
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
            schedule.load_state_dict(kept["schedule"])
        for micro in range(2):
            (next_word(script, model, 2 * step + micro, 8, 16) / 2).backward()
            if step == 2 and not micro:
                file = io.BytesIO()
                state = {"model": model, "optimizer": optimizer, "schedule": schedule}
                state = {key: each.state_dict() for key, each in state.items()}
                if script.device == "xla":
                    import torch_xla.core.xla_model as xm

                    state = xm._maybe_convert_to_cpu(state)
                torch.save(state, file)
                file.seek(0)
                kept = torch.load(file)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        script.sync()
    script.log_state("model", model)


@case
def proximal(script: Script) -> None:
    """Train PPO: a rollout in stored tensors, advantages backwards in time, and epochs of shuffled minibatches."""
    actor = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5)).to(script.device)
    optimizer = torch.optim.Adam(actor.parameters(), 1e-3, eps=1e-4)
    running = {"mean": torch.zeros(6, device=script.device), "count": torch.ones((), device=script.device)}
    draw = torch.Generator().manual_seed(3)
    for episode in range(2):
        states = torch.zeros(8, 16, 6, device=script.device)
        values, rewards = torch.zeros(8, 16, device=script.device), torch.zeros(8, 16, device=script.device)
        actions = torch.zeros(8, 16, dtype=torch.long, device=script.device)
        state = data(script, episode, 16, 6)
        for time in range(8):
            with torch.no_grad():
                output = actor(state - running["mean"])
            states[time], values[time] = state - running["mean"], output[:, 4]
            actions[time] = output[:, :4].argmax(1)
            state = torch.sin(state + actions[time][:, None] * 0.3)
            rewards[time] = state.mean(1)
            running["mean"].mul_(0.9).add_(state.mean(0), alpha=0.1)
            running["count"] += 1
            script.sync()
        gains, last = torch.zeros_like(rewards), torch.zeros(16, device=script.device)
        for time in reversed(range(8)):
            following = values[time + 1] if time < 7 else torch.zeros(16, device=script.device)
            last = rewards[time] + 0.9 * following - values[time] + 0.8 * last
            gains[time] = last
        aims = (gains + values).flatten()
        flat, chosen, gains = states.flatten(0, 1), actions.flatten(), gains.flatten()
        with torch.no_grad():
            old = actor(flat)[:, :4].log_softmax(1).gather(1, chosen[:, None])[:, 0]
        for _ in range(2):
            for rows in torch.randperm(128, generator=draw).view(2, 64):
                rows = rows.to(script.device)
                output = actor(flat[rows])
                new = output[:, :4].log_softmax(1).gather(1, chosen[rows][:, None])[:, 0]
                ratio = (new - old[rows]).exp()
                gain = gains[rows]
                gain = (gain - gain.mean()) / (gain.std() + 1e-3)
                loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                loss = loss + 0.5 * functional.mse_loss(output[:, 4], aims[rows])
                descend(script, optimizer, loss)
                script.log("loss", loss)
    script.log("mean", running["mean"])
    script.log_state("actor", actor)


@case
def binarized(script: Script) -> None:
    """Train with signs for weights: the real ones are stored, replaced by `.data`, and restored before the update."""
    model = mlp(script)
    optimizer = sgd(model, 0.05)
    for step in range(STEPS):
        real = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = p.data.sign() * p.data.abs().mean()
        loss = functional.cross_entropy(model(data(script, step, 32, 16)), labels(script, step, 8, 32))
        optimizer.zero_grad()
        loss.backward()
        for p, r in zip(model.parameters(), real, strict=True):
            p.data = r
        optimizer.step()
        for p in model.parameters():
            p.data.clamp_(-1, 1)
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def orthogonal_updates(script: Script) -> None:
    """Train by Muon: momentum made orthogonal by Newton and Schulz, and AdamW for vectors."""
    model = Gpt().to(script.device)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "words" not in n]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    momenta = [torch.zeros_like(p) for p in matrices]
    second = torch.optim.AdamW(others, lr=1e-3, eps=1e-4)
    for step in range(4):
        loss = next_word(script, model, step, 8, 16)
        for p in model.parameters():
            p.grad = None
        loss.backward()
        with torch.no_grad():
            for p, m in zip(matrices, momenta, strict=True):
                m.lerp_(p.grad, 0.1)
                x = p.grad.lerp(m, 0.9)
                turned = x.shape[0] > x.shape[1]
                x = x.t() if turned else x
                x = x / (x.norm() + 1e-3)
                for _ in range(3):
                    a = x @ x.t()
                    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                p.add_(x.t() if turned else x, alpha=-0.01)
        second.step()
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def rendered(script: Script) -> None:
    """Train a NeRF: sines of places, samples by `searchsorted` and `gather`, and `cumprod` of transparency."""
    model = nn.Sequential(nn.Linear(18, 64), nn.Softplus(), nn.Linear(64, 4)).to(script.device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-4)

    def shade(places: Any) -> Any:
        parts = [f(2.0**k * places) for k in range(3) for f in (torch.sin, torch.cos)]
        return model(torch.cat(parts, -1))

    def weights_of(found: Any) -> Any:
        alpha = 1 - torch.exp(-functional.softplus(found[..., 3]) * 0.2)
        clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-6], 1), 1)[:, :-1]
        return alpha * clear

    for step in range(4):
        origin, direction = data(script, step, 32, 3), functional.normalize(data(script, step + 9, 32, 3), dim=1)
        depth = torch.linspace(0, 1, 8, device=script.device).expand(32, 8)
        coarse = weights_of(shade(origin[:, None] + direction[:, None] * depth[..., None]))
        shares = (coarse.detach() + 1e-2) / (coarse.detach() + 1e-2).sum(1, keepdim=True)
        sums = shares.cumsum(1)
        wanted = torch.linspace(0.05, 0.95, 8, device=script.device).expand(32, 8).contiguous()
        found = torch.searchsorted(sums.contiguous(), wanted).clamp(max=7)
        fine = depth.gather(1, found) + 0.01
        made = shade(origin[:, None] + direction[:, None] * fine[..., None])
        color = (weights_of(made)[..., None] * made[..., :3].sigmoid()).sum(1)
        loss = functional.mse_loss(color, data(script, step + 20, 32, 3).sigmoid()) + coarse.mean() * 0.01
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def messages(script: Script) -> None:
    """Train a graph net: `index_add`, degrees by `bincount`, and attention by `scatter_reduce`."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.score, self.head = nn.Linear(16, 32), nn.Linear(64, 1), nn.Linear(32, 4)

        def forward(self, x: Any, sources: Any, targets: Any) -> Any:
            h = self.left(x)
            e = functional.leaky_relu(self.score(torch.cat([h[sources], h[targets]], 1)))[:, 0]
            most = torch.full((64,), -1e9, device=x.device).scatter_reduce(0, targets, e.detach(), "amax")
            e = (e - most[targets]).exp()
            total = torch.zeros(64, device=x.device).index_add(0, targets, e)
            e = e / (total[targets] + 1e-6)
            return self.head(torch.zeros_like(h).index_add(0, targets, e[:, None] * h[sources]) + h)

    model = Attend().to(script.device)
    optimizer = sgd(model, 0.1)
    sources, targets = labels(script, 1, 64, 256), labels(script, 2, 64, 256)
    x, y = data(script, 0, 64, 16), labels(script, 3, 4, 64)
    train_rows = labels(script, 4, 64, 32)
    for _ in range(STEPS):
        output = model(x, sources, targets)
        descend(script, optimizer, functional.cross_entropy(output[train_rows], y[train_rows]))
    script.log("output", output)
    script.log_state("model", model)


@case
def task_weights(script: Script) -> None:
    """Train GradNorm: gradients of the shared layer by task, and weights of tasks that are normalised in place."""
    shared = nn.Linear(16, 64).to(script.device)
    heads = nn.ModuleList(nn.Linear(64, 8) for _ in range(3)).to(script.device)
    weights = torch.ones(3, device=script.device, requires_grad=True)
    optimizer = torch.optim.SGD([*shared.parameters(), *heads.parameters()], lr=0.1)
    for step in range(STEPS):
        h = torch.tanh(shared(data(script, step, 32, 16)))
        y = labels(script, step, 8, 32)
        losses = torch.stack([functional.cross_entropy(head(h), y) for head in heads])
        optimizer.zero_grad()
        (weights.detach() * losses).sum().backward(retain_graph=True)
        norms = torch.stack(
            [
                torch.autograd.grad(weights[k] * losses[k], shared.weight, retain_graph=True, create_graph=True)[
                    0
                ].norm()
                for k in range(3)
            ]
        )
        (gradient,) = torch.autograd.grad((norms - norms.mean().detach()).abs().sum(), weights)
        optimizer.step()
        with torch.no_grad():
            weights -= 0.1 * gradient
            weights *= 3 / weights.sum()
        script.sync()
        script.log("weights", weights)
    script.log_state("shared", shared)


@case
def grown_layers(script: Script) -> None:
    """Add a layer and its parameter group in the middle of training."""
    layers = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 8)]).to(script.device)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        if step == 3:
            torch.manual_seed(4)
            layers.insert(1, nn.Linear(32, 32).to(script.device))
            optimizer.add_param_group({"params": layers[1].parameters(), "lr": 0.05})
        x = data(script, step, 32, 16)
        for layer in layers[:-1]:
            x = torch.tanh(layer(x))
        loss = functional.cross_entropy(layers[-1](x), labels(script, step, 8, 32))
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("layers", layers)


@case
def beams(script: Script) -> None:
    """Search by beams with a cache that grows by `cat` and is reordered by `index_select`."""
    torch.manual_seed(5)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.qkv, self.head = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 64)

        def forward(self, ids: Any, cache: Any) -> Any:
            q, k, v = self.qkv(self.words(ids)).chunk(3, -1)
            k, v = (torch.cat([old, new[:, None]], 1) for old, new in zip(cache, (k, v), strict=True))
            mixed = (torch.einsum("bd,btd->bt", q, k) / 32**0.5).softmax(-1)
            return self.head(torch.einsum("bt,btd->bd", mixed, v)), (k, v)

    model = Step().to(script.device).eval()
    with torch.no_grad():
        ids = labels(script, 0, 64, 8).repeat_interleave(4)
        cache = (torch.zeros(32, 1, 32, device=script.device), torch.zeros(32, 1, 32, device=script.device))
        scores = torch.tensor([0.0, -1e9, -1e9, -1e9], device=script.device).repeat(8)
        for _ in range(6):
            output, cache = model(ids, cache)
            each = (output.log_softmax(-1) + scores[:, None]).view(8, 256)
            scores, best = each.topk(4, 1)
            scores = scores.flatten()
            rows = (torch.arange(8, device=script.device)[:, None] * 4 + best // 64).flatten()
            ids = (best % 64).flatten()
            cache = tuple(part.index_select(0, rows) for part in cache)
            script.sync()
            script.log("ids", ids)
            script.log("scores", scores)


@case
def speech(script: Script) -> None:
    """Train on CTC with lengths, after a convolution and a GRU of two directions."""

    class Hear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.gru = nn.Conv1d(8, 16, 3, stride=2, padding=1), nn.GRU(16, 16, batch_first=True)
            self.head = nn.Linear(16, 12)

        def forward(self, x: Any) -> Any:
            h, _ = self.gru(torch.relu(self.conv(x)).transpose(1, 2))
            return self.head(h).log_softmax(-1)

    model = Hear().to(script.device)
    optimizer = sgd(model, 0.02)
    for step in range(3):
        output = model(data(script, step, 16, 8, 24)).transpose(0, 1)
        words = labels(script, step, 11, 16, 4) + 1
        loss = functional.ctc_loss(output, words, torch.full((16,), 12), torch.full((16,), 4))
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def statistics_again(script: Script) -> None:
    """Average weights stochastically, and estimate the norms' statistics of the average by `update_bn`."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 8)).to(script.device)
    optimizer = sgd(model, 0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(4):
        train(script, model, optimizer, step)
        if step >= 2:
            average.update_parameters(model)
        script.sync()
    torch.optim.swa_utils.update_bn([data(script, 30 + k, 32, 16) for k in range(3)], average)
    average.eval()
    with torch.no_grad():
        script.log("output", average(data(script, 60, 32, 16)))
    script.log("weight", average.module[0].weight)


@case
def two_losses_two_steps(script: Script) -> None:
    """Train two objectives on one backbone in turn, with separate optimizers that share parameters."""
    body, left, right = (each.to(script.device) for each in (nn.Linear(16, 64), nn.Linear(64, 8), nn.Linear(64, 16)))
    first = torch.optim.Adam([*body.parameters(), *left.parameters()], 1e-3, eps=1e-4)
    second = torch.optim.Adam([*body.parameters(), *right.parameters()], 1e-3, eps=1e-4)
    for step in range(6):
        x = data(script, step, 32, 16)
        h = functional.gelu(body(x))
        if step % 2:
            descend(script, second, functional.mse_loss(right(h), x))
        else:
            descend(script, first, functional.cross_entropy(left(h), labels(script, step, 8, 32)))
    for name, module in {"body": body, "left": left, "right": right}.items():
        script.log_state(name, module)


CUT = {"average_copied": 1, "proximal": 5, "speech": 1}
"""Additional programs of scripts whose steps are cut, or whose placement changes.

A rollout is planned before training and runs again after it, in a program for each of its steps.
"""

UNHOOKED_DIFFERS = ()
"""Cases that differ from eager torch with the hook as without it."""

READS = {"resumed_midway": 1}
"""Additional transfers: saved state that is split in part is fetched in two."""
