"""Scripts for `test_torch_xla_posted.py`: loops that people write, with closures, hooks and many optimizers."""

import copy
import io
import math
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


def classified(script: Script, model: nn.Module, step: int, rows: int = 32) -> Any:
    """Return the loss of a classifier on a batch of its own."""
    return functional.cross_entropy(model(data(script, step, rows, 16)), labels(script, step, 8, rows))


@case
def closures(script: Script) -> None:
    """Pass forward and backward as a closure to the optimizer's step, as Lightning does, and log the loss."""
    model = mlp(script)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    for step in range(STEPS):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = classified(script, model, step)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def quasi_newton(script: Script) -> None:
    """Train by LBFGS with strong Wolfe conditions, which reads losses and slopes in the middle of its step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double().to(script.device)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe")
    x = data(script, 0, 32, 8).double()  # the search amplifies rounding
    y = x.sin().sum(1, keepdim=True)
    for _ in range(3):

        def closure() -> Any:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def penalised_images(script: Script) -> None:
    """Train a critic of images with a penalty on its input gradients in every second step."""
    torch.manual_seed(0)
    critic = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(64, 1),
    ).to(script.device)
    optimizer = sgd(critic, 0.05)
    for step in range(STEPS):
        real = data(script, step, 16, 3, 8, 8).requires_grad_(step % 2 == 0)
        fake = data(script, step + 50, 16, 3, 8, 8)
        judged = critic(real)
        loss = functional.softplus(-judged).mean() + functional.softplus(critic(fake)).mean()
        if step % 2 == 0:
            (slope,) = torch.autograd.grad(judged.sum(), real, create_graph=True)
            loss = loss + 0.5 * slope.square().sum((1, 2, 3)).mean()
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("critic", critic)


@case
def lookahead(script: Script) -> None:
    """Pull slow weights towards the fast ones every second step, and continue from the slow ones."""
    model = mlp(script)
    optimizer = sgd(model, 0.1)
    slow = [each.detach().clone() for each in model.parameters()]
    for step in range(STEPS):
        descend(script, optimizer, classified(script, model, step))
        if step % 2:
            with torch.no_grad():
                for kept, each in zip(slow, model.parameters(), strict=True):
                    kept.add_(each - kept, alpha=0.5)
                    each.copy_(kept)
    script.log_state("model", model)
    for number, each in enumerate(slow):
        script.log(f"slow{number}", each)


@case
def old_norms(script: Script) -> None:
    """Train with weight norm and spectral norm by hooks, in the manner before parametrizations; evaluate between."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.weight_norm(nn.Linear(16, 64)),
        nn.ReLU(),
        nn.utils.spectral_norm(nn.Linear(64, 32)),
        nn.ReLU(),
        nn.Linear(32, 8),
    ).to(script.device)
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        descend(script, optimizer, classified(script, model, step))
        model.eval()
        with torch.no_grad():
            script.log("output", model(data(script, 9, 16, 16)))
        model.train()
    script.log_state("model", model)


class Reversed(torch.autograd.Function):
    """The identity, with a reversed gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, by: float) -> Any:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -ctx.by * gradients[0], None


class Squashed(torch.autograd.Function):
    """A sigmoid in place, which is marked dirty."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x.sigmoid_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (y,) = ctx.saved_tensors
        return gradients[0] * y * (1 - y)


@case
def adversarial_domains(script: Script) -> None:
    """Train features that a second head cannot use, by a reversed gradient and a function that works in place."""
    torch.manual_seed(0)
    body = nn.Linear(16, 64).to(script.device)
    head, domain = nn.Linear(64, 8).to(script.device), nn.Linear(64, 2).to(script.device)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters(), *domain.parameters()], lr=0.1, momentum=0.9)
    for step in range(STEPS):
        features = Squashed.apply(body(data(script, step, 32, 16)) * 2)
        loss = functional.cross_entropy(head(features), labels(script, step, 8, 32))
        turned = Reversed.apply(features, 0.1 * step)
        loss = loss + functional.cross_entropy(domain(turned), labels(script, step + 7, 2, 32))
        descend(script, optimizer, loss)
        script.log("loss", loss)
    for name, module in (("body", body), ("head", head), ("domain", domain)):
        script.log_state(name, module)


@case
def generated_between(script: Script) -> None:
    """Generate with a cache of keys that grows by `cat`, in between steps of training."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.qkv, self.head = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 64)

        def forward(self, ids: Any, past: Any = None) -> Any:
            batch, length = ids.shape
            q, k, v = self.qkv(self.words(ids)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=past is None)
            return self.head(seen.transpose(1, 2).reshape(batch, length, 32)), (k, v)

    torch.manual_seed(0)
    model = Layer().to(script.device)
    optimizer = sgd(model, 0.1)
    for step in range(3):
        ids = labels(script, step, 64, 8, 9)
        output, _ = model(ids[:, :-1])
        descend(script, optimizer, functional.cross_entropy(output.flatten(0, 1), ids[:, 1:].flatten()))
        model.eval()
        with torch.no_grad():
            made = ids[:, :4]
            output, past = model(made)
            for _ in range(3):
                chosen = output[:, -1].argmax(-1, keepdim=True)
                made = torch.cat([made, chosen], 1)
                output, past = model(chosen, past)
                script.sync()
        model.train()
        script.log("made", made)
    script.log_state("model", model)


@case
def scaled_losses(script: Script) -> None:
    """Scale losses by hand as a gradient scaler does: skip an update whose gradients are not finite."""
    model = mlp(script)
    optimizer = sgd(model, 0.1)
    scale = 2.0**16
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = classified(script, model, step)
        if step == 2:
            loss = loss * float("inf")
        (loss * scale).backward()
        finite = torch.stack([each.grad.isfinite().all() for each in model.parameters()]).all()
        if finite.item():
            for each in model.parameters():
                each.grad.div_(scale)
            optimizer.step()
            scale *= 2
        else:
            scale /= 2
        script.sync()
        script.log("finite", finite)
    script.log_state("model", model)


@case
def scaler(script: Script) -> None:
    """Train by torch's own gradient scaler, with clipping after `unscale_`."""
    model = mlp(script)
    optimizer = sgd(model, 0.1)
    scaler = torch.amp.GradScaler(script.device, init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = classified(script, model, step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def clipped_twice(script: Script) -> None:
    """Clip by norm and then by value, and log the norm by `item()`."""
    model = Gpt().to(script.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = next_word(script, model, step, 8, 16)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        script.sync()
        script.log("norm", torch.tensor(norm.item()))
    script.log_state("model", model)


@case
def critics_clipped(script: Script) -> None:
    """Train a Wasserstein critic three times for each generator, clamp its weights, and toggle its gradients."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16)).to(script.device)
    critic = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).to(script.device)
    theirs = torch.optim.RMSprop(critic.parameters(), lr=1e-2, eps=1e-2)
    ours = torch.optim.RMSprop(generator.parameters(), lr=1e-2, eps=1e-2)
    for step in range(3):
        critic.requires_grad_(True)
        for inner in range(3):
            real, noise = data(script, 3 * step + inner, 32, 16), data(script, 100 + 3 * step + inner, 32, 8)
            with torch.no_grad():
                fake = generator(noise)
            descend(script, theirs, critic(fake).mean() - critic(real).mean())
            for each in critic.parameters():
                each.data.clamp_(-0.1, 0.1)
        critic.requires_grad_(False)
        loss = -critic(generator(data(script, 200 + step, 32, 8))).mean()
        descend(script, ours, loss)
        script.log("loss", loss)
    script.log_state("generator", generator)
    script.log_state("critic", critic)


@case
def soft_actor(script: Script) -> None:
    """Train an actor, two critics with slow targets, and a learned temperature, each by its own optimizer."""

    def net(inputs: int, outputs: int) -> Any:
        return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, outputs)).to(script.device)

    torch.manual_seed(0)
    actor, one, two = net(16, 8), net(20, 1), net(20, 1)
    slow_one, slow_two = copy.deepcopy(one).requires_grad_(False), copy.deepcopy(two).requires_grad_(False)
    log_heat = torch.zeros(1, requires_grad=True, device=script.device)
    optimizers = [
        torch.optim.Adam(actor.parameters(), lr=1e-3, eps=1e-2),
        torch.optim.Adam([*one.parameters(), *two.parameters()], lr=1e-3, eps=1e-2),
        torch.optim.Adam([log_heat], lr=1e-2, eps=1e-2),
    ]

    def act(state: Any, noise: Any) -> tuple[Any, Any]:
        mean, log_std = actor(state).chunk(2, -1)
        log_std = log_std.clamp(-5, 2)
        raw = mean + log_std.exp() * noise
        action = raw.tanh()
        density = -0.5 * noise.square() - log_std - (1 - action.square() + 1e-6).log()
        return action, density.sum(-1, keepdim=True)

    for step in range(STEPS):
        state, after, reward = (data(script, 10 * step + n, 32, size) for n, size in ((0, 16), (1, 16), (2, 1)))
        noise, more = data(script, 10 * step + 3, 32, 4), data(script, 10 * step + 4, 32, 4)
        taken = data(script, 10 * step + 5, 32, 4).tanh()
        heat = log_heat.exp().detach()
        with torch.no_grad():
            action, density = act(after, noise)
            both = torch.cat([after, action], 1)
            target = reward + 0.9 * (torch.min(slow_one(both), slow_two(both)) - heat * density)
        both = torch.cat([state, taken], 1)
        descend(script, optimizers[1], functional.mse_loss(one(both), target) + functional.mse_loss(two(both), target))
        action, density = act(state, more)
        both = torch.cat([state, action], 1)
        loss = (heat * density - torch.min(one(both), two(both))).mean()
        descend(script, optimizers[0], loss)
        descend(script, optimizers[2], -(log_heat * (density.detach() - 4)).mean())
        with torch.no_grad():
            for slow, fast in ((slow_one, one), (slow_two, two)):
                for a, b in zip(slow.parameters(), fast.parameters(), strict=True):
                    a.data.mul_(0.95)
                    a.data.add_(0.05 * b.data)
        script.sync()
        script.log("loss", loss)
    script.log("heat", log_heat)
    for name, module in (("actor", actor), ("one", one), ("slow", slow_two)):
        script.log_state(name, module)


@case
def thawed(script: Script) -> None:
    """Train the head, then thaw one layer after the other by `add_param_group`, each with a lower rate."""
    model = mlp(script)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        if step == 3:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01, "momentum": 0.5})
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        loss = classified(script, model, step)
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def plateaus(script: Script) -> None:
    """Reduce the rate where the validated loss does not fall, and warm up by a cycle with momentum."""
    model = mlp(script)
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters(), "weight_decay": 0.0}],
        lr=0.1, momentum=0.9, weight_decay=0.01,
    )  # fmt: skip
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.1], total_steps=20)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for step in range(STEPS):
        loss = classified(script, model, step)
        descend(script, optimizer, loss)
        cycle.step()
        with torch.no_grad():
            checked = classified(script, model.eval(), 30, 16)
        model.train()
        plateau.step(checked.item())
        script.log("loss", checked)
    script.log_state("model", model)


@case
def loaders(script: Script) -> None:
    """Iterate over a `DataLoader` with a short last batch, and average the losses of an epoch."""
    from torch.utils.data import DataLoader, TensorDataset

    made = torch.Generator().manual_seed(3)
    xs, ys = torch.randn(76, 16, generator=made), torch.randint(8, (76,), generator=made)
    loader = DataLoader(TensorDataset(xs, ys), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(4))
    model = mlp(script)
    optimizer = adamw(model)
    for _ in range(3):
        losses, right = [], torch.zeros((), device=script.device)
        for x, y in loader:
            x, y = x.to(script.device), y.to(script.device)
            output = model(x)
            loss = functional.cross_entropy(output, y)
            descend(script, optimizer, loss)
            losses.append(loss.detach())
            right += (output.argmax(1) == y).sum()
        script.log("mean", torch.stack(losses).mean())
        script.log("right", right)
    script.log_state("model", model)


@case
def hooks_of_all_kinds(script: Script) -> None:
    """Change inputs, outputs and gradients by hooks of every kind."""
    model = mlp(script)
    kept: dict[str, Any] = {}
    model[0].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 0.5,), kwargs), with_kwargs=True)
    model[0].register_full_backward_hook(lambda module, into, out: tuple(None if g is None else g * 0.9 for g in into))
    model[2].register_full_backward_pre_hook(lambda module, out: (out[0] * 1.1,))
    model[1].register_forward_hook(lambda module, args, output: output.clamp(max=2.0))
    model[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: kept.update(first=p.grad.detach().norm()))
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        x = data(script, step, 32, 16).requires_grad_()
        hidden = model[1](model[0](x))
        hidden.retain_grad()
        hidden.register_hook(lambda gradient: gradient - gradient.mean(0))
        loss = functional.cross_entropy(model[2](hidden), labels(script, step, 8, 32))
        descend(script, optimizer, loss)
        script.log("input", x.grad)
        script.log("hidden", hidden.grad)
        script.log("norm", kept["first"])
    script.log_state("model", model)


@case
def scaled_by_layer(script: Script) -> None:
    """Train by LAMB, whose rates are ratios of norms."""
    model = Gpt().to(script.device)
    moments = {each: (torch.zeros_like(each), torch.zeros_like(each)) for each in model.parameters()}
    for step in range(STEPS):
        model.zero_grad()
        loss = next_word(script, model, step, 8, 16)
        loss.backward()
        with torch.no_grad():
            for each, (first, second) in moments.items():
                first.mul_(0.9).add_(each.grad, alpha=0.1)
                second.mul_(0.99).addcmul_(each.grad, each.grad, value=0.01)
                change = first / (second.sqrt() + 1e-2) + 0.01 * each
                large, by = each.norm(), change.norm()
                ratio = torch.where((large > 0) & (by > 0), large / by, torch.ones_like(large)).clamp(max=10)
                each.sub_(0.01 * ratio * change)
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def many_optimizers(script: Script) -> None:
    """Train one small model after the other by seven of torch's optimizers."""
    kinds: list[Any] = [
        lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-2),
        lambda p: torch.optim.RAdam(p, lr=1e-2, eps=1e-2),
        lambda p: torch.optim.Adamax(p, lr=1e-2, eps=1e-2),
        lambda p: torch.optim.Adadelta(p, lr=1.0, eps=1e-3),
        lambda p: torch.optim.ASGD(p, lr=0.05),
        lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-2),
        lambda p: torch.optim.Rprop(p, lr=1e-3),
    ]
    for number, kind in enumerate(kinds):
        model = mlp(script)
        optimizer = kind(list(model.parameters()))
        for step in range(3):
            descend(script, optimizer, classified(script, model, step))
        script.log_state(str(number), model)


@case
def conflicting(script: Script) -> None:
    """Project conflicting gradients of two tasks (PCGrad), with learned weights of the tasks."""
    model = mlp(script)
    logs = nn.Parameter(torch.zeros(2, device=script.device))
    parameters = [*model.parameters()]
    optimizer = torch.optim.SGD([*parameters, logs], lr=0.05, momentum=0.9)
    for step in range(STEPS):
        output = model(data(script, step, 32, 16))
        losses = [
            functional.cross_entropy(output, labels(script, step, 8, 32)),
            functional.mse_loss(output, data(script, step + 9, 32, 8)),
        ]
        losses = [loss * (-logs[number]).exp() + logs[number] for number, loss in enumerate(losses)]
        optimizer.zero_grad()
        flat = [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])
            for loss in losses
        ]
        (logs.grad,) = torch.autograd.grad(sum(losses), [logs])
        meet = (flat[0] * flat[1]).sum()
        turned = [
            flat[n]
            - torch.where(meet < 0, meet / (flat[1 - n].square().sum() + 1e-12), torch.zeros_like(meet)) * flat[1 - n]
            for n in (0, 1)
        ]
        together, start = turned[0] + turned[1], 0
        for each in parameters:
            each.grad = together[start : start + each.numel()].view_as(each).clone()
            start += each.numel()
        optimizer.step()
        script.sync()
        script.log("meet", meet)
    script.log("logs", logs)
    script.log_state("model", model)


@case
def elastic(script: Script) -> None:
    """Train a second task with weights that stay near the first one's, by its Fisher information."""
    model = mlp(script)
    optimizer = sgd(model, 0.05)
    for step in range(2):
        descend(script, optimizer, classified(script, model, step))
    fisher = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    for step in range(2):
        model.zero_grad()
        classified(script, model, 10 + step, 16).backward()
        for name, each in model.named_parameters():
            fisher[name] += each.grad.detach() ** 2 / 2
        script.sync()
    kept = {name: each.detach().clone() for name, each in model.named_parameters()}
    for step in range(3):
        loss = classified(script, model, 20 + step)
        held = sum((fisher[name] * (each - kept[name]).square()).sum() for name, each in model.named_parameters())
        descend(script, optimizer, loss + 100 * held)
        script.log("held", held)
    script.log_state("model", model)


@case
def curvature(script: Script) -> None:
    """Log the largest eigenvalue of the Hessian by power iteration, while training."""
    model = mlp(script)
    parameters = list(model.parameters())
    optimizer = sgd(model, 0.1)
    for step in range(3):
        vectors = [torch.ones_like(each) for each in parameters]
        loss = classified(script, model, step)
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        value = None
        for _ in range(2):
            size = torch.sqrt(sum(v.square().sum() for v in vectors))
            vectors = [v / size for v in vectors]
            products = torch.autograd.grad(slopes, parameters, grad_outputs=vectors, retain_graph=True)
            value = sum((p * v).sum() for p, v in zip(products, vectors, strict=True))
            vectors = [p.detach() for p in products]
        descend(script, optimizer, loss)
        script.log("value", value)
    script.log_state("model", model)


@case
def evolved(script: Script) -> None:
    """Train without gradients: score perturbed weights, and move along the better ones."""
    model = mlp(script)
    parameters = list(model.parameters())
    x, y = data(script, 0, 32, 16), labels(script, 0, 8, 32)
    with torch.no_grad():
        for step in range(3):
            total = [torch.zeros_like(each) for each in parameters]
            for sample in range(3):
                noise = [data(script, 100 * step + 10 * sample + n, *each.shape) for n, each in enumerate(parameters)]
                scores = []
                for sign in (1, -1):
                    for each, by in zip(parameters, noise, strict=True):
                        each.add_(by, alpha=0.05 * sign)
                    scores.append(functional.cross_entropy(model(x), y).item())
                    for each, by in zip(parameters, noise, strict=True):
                        each.sub_(by, alpha=0.05 * sign)
                for each, by in zip(total, noise, strict=True):
                    each.add_(by, alpha=scores[0] - scores[1])
            for each, by in zip(parameters, total, strict=True):
                each.sub_(by, alpha=0.05)
            script.sync()
    script.log_state("model", model)


@case
def layers_dropped(script: Script) -> None:
    """Skip layers at random by a draw on the host, so that most steps have another graph."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 64)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
            self.last = nn.Linear(64, 8)
            self.drawn = random.Random(2)

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            for layer in self.layers:
                if not self.training or self.drawn.random() < 0.6:
                    x = x + torch.relu(layer(x))
            return self.last(x)

    torch.manual_seed(0)
    model = Net().to(script.device)
    optimizer = sgd(model, 0.05)
    for step in range(7):
        loss = classified(script, model, step)
        descend(script, optimizer, loss)
        script.log("loss", loss)
    script.log_state("model", model)


@case
def pickled(script: Script) -> None:
    """Save a whole model by pickle, go on with the loaded one on the device, and evaluate a copy on the host."""
    model = mlp(script)
    optimizer = sgd(model, 0.1)
    for step in range(2):
        descend(script, optimizer, classified(script, model, step))
    file = io.BytesIO()
    torch.save(copy.deepcopy(model).cpu(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    script.log("host", loaded(torch.ones(4, 16)))
    model = loaded.to(script.device)
    optimizer = sgd(model, 0.1)
    for step in range(2, 5):
        descend(script, optimizer, classified(script, model, step))
    script.log_state("model", model)


@case
def pruned(script: Script) -> None:
    """Prune weights by their size midway with torch's own tool, train on, and make it permanent."""
    from torch.nn.utils import prune

    model = mlp(script)
    optimizer = sgd(model, 0.1)
    for step in range(2):
        descend(script, optimizer, classified(script, model, step))
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, name="weight", amount=0.5)
    optimizer = sgd(model, 0.1)
    for step in range(2, 5):
        descend(script, optimizer, classified(script, model, step))
    for layer in (model[0], model[2]):
        prune.remove(layer, "weight")
    with torch.no_grad():
        script.log("output", model(data(script, 9, 16, 16)))
    script.log_state("model", model)


@case
def mean_teacher(script: Script) -> None:
    """Train towards an averaged teacher with mixed batches, a ramp of weights and a mask of sure labels."""
    student = mlp(script)
    teacher = copy.deepcopy(student)
    for each in teacher.parameters():
        each.detach_()
    optimizer = sgd(student, 0.1)
    mixing = random.Random(5)
    for step in range(STEPS):
        x, y = data(script, step, 32, 16), functional.one_hot(labels(script, step, 8, 32), 8).float()
        share = mixing.random()
        order = torch.randperm(32, generator=torch.Generator().manual_seed(step)).to(script.device)
        x, y = share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
            sure = (wanted.max(-1)[0] > 0.15).float()
        output = student(x)
        apart = functional.kl_div(output.log_softmax(-1), wanted, reduction="none").sum(-1)
        ramp = math.exp(-5 * (1 - step / STEPS) ** 2)
        loss = functional.cross_entropy(output, y, label_smoothing=0.1) + ramp * (apart * sure).mean()
        descend(script, optimizer, loss)
        alpha = min(1 - 1 / (step + 1), 0.9)
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.data.mul_(alpha).add_(fast.data, alpha=1 - alpha)
        script.log("loss", loss)
    script.log_state("student", student)
    script.log_state("teacher", teacher)


@case
def kept_graphs(script: Script) -> None:
    """Run two backward passes through one graph; gradients become zero in place, and are read between."""
    model = mlp(script)
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        output = model(data(script, step, 32, 16))
        loss = functional.cross_entropy(output, labels(script, step, 8, 32))
        loss.backward(retain_graph=True)
        first = model[0].weight.grad.norm().item()
        output.square().mean().mul(0.01).backward()
        optimizer.step()
        script.sync()
        script.log("first", torch.tensor(first))
        script.log("gradient", model[0].weight.grad)
    script.log_state("model", model)


CUT: dict[str, int] = {}
READS: dict[str, int] = {}
UNHOOKED_DIFFERS: tuple[str, ...] = ()
