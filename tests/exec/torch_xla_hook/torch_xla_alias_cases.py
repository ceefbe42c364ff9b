"""Scripts for `test_torch_xla_aliases.py`: aliases of tensors that a script creates once and uses in all its steps."""

import copy
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from tests.exec.torch_xla_hook.torch_xla_modes import Case, Script


CASES: dict[str, Case] = {}

STEPS = 4


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def mlp(script: Script) -> Any:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)).to(script.device)


def sgd(model: nn.Module, rate: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def data(script: Script, step: int, *shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step)).to(script.device)


def labels(script: Script, step: int, high: int, *shape: int) -> Any:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(step)).to(script.device)


def train(script: Script, model: nn.Module, optimizer: Any, step: int, zeroes: bool = True) -> Any:
    """Run one step on a batch of its own, without ending it."""
    loss = functional.cross_entropy(model(data(script, step, 32, 16)), labels(script, step, 8, 32))
    if zeroes:
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@case
def state_dict(script: Script) -> None:
    """Create a state dict once and read it at the end."""
    model = mlp(script)
    optimizer, state = sgd(model), model.state_dict()
    for step in range(STEPS):
        loss = train(script, model, optimizer, step)
        script.sync()
        script.log("loss", loss)
    for name, value in state.items():
        script.log(name, value)
    script.log_state("model", model)


@case
def averages(script: Script) -> None:
    """Average the weights through detached aliases of both models' parameters."""
    model = mlp(script)
    average = copy.deepcopy(model)
    optimizer = sgd(model)
    pairs = [(a.detach(), p.detach()) for a, p in zip(average.parameters(), model.parameters(), strict=True)]
    for step in range(STEPS):
        train(script, model, optimizer, step)
        for mean, value in pairs:
            mean.mul_(0.75).add_(value, alpha=0.25)
        script.sync()
        with torch.no_grad():
            script.log("output", average(data(script, step, 32, 16)))
    script.log_state("average", average)


@case
def decayed_data(script: Script) -> None:
    """Scale `.data` of each parameter by hand."""
    model = mlp(script)
    optimizer, weights = sgd(model), [p.data for p in model.parameters()]
    for step in range(STEPS):
        loss = train(script, model, optimizer, step)
        for value in weights:
            value.mul_(0.5)
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)
    script.log("norm", torch.stack([value.square().sum() for value in weights]))


@case
def flat_gradients(script: Script) -> None:
    """Use one buffer for all gradients, and zero and clip it as a whole."""
    model = mlp(script)
    optimizer = sgd(model)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()), device=script.device)
    at = 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    for step in range(STEPS):
        flat.zero_()
        loss = functional.cross_entropy(model(data(script, step, 32, 16)), labels(script, step, 8, 32))
        loss.backward()
        flat.mul_(1 / flat.norm().clamp(min=1))
        optimizer.step()
        script.sync()
        script.log("loss", loss)
    script.log("flat", flat)
    script.log_state("model", model)


@case
def table_views(script: Script) -> None:
    """Write to rows, columns, strides and the flat form of one table, and read all of them."""
    model = mlp(script)
    optimizer = sgd(model)
    table = torch.zeros(8, 16, device=script.device)
    row, column, flat, turned, even = table[1], table[:, 2], table.view(-1), table.t(), table[::2]
    for step in range(STEPS):
        row.add_(train(script, model, optimizer, step).detach())
        column.mul_(2).add_(1)
        flat[5:7] += step
        turned[3].sub_(1)
        even.mul_(1.5)
        script.sync()
        script.log("row", row)
        script.log("column", column)
    for name, value in {"table": table, "flat": flat, "turned": turned, "even": even}.items():
        script.log(name, value)


@case
def metrics(script: Script) -> None:
    """Sum metrics in one tensor through named entries, and update a counter of the model."""
    model = mlp(script)
    optimizer = sgd(model)
    sums = torch.zeros(3, device=script.device)
    named = {"loss": sums[0], "count": sums[1], "norm": sums[2]}
    for step in range(STEPS):
        named["loss"] += train(script, model, optimizer, step).detach()
        named["count"] += 1
        named["norm"].copy_(next(model.parameters()).detach().norm())
        script.sync()
    script.log("sums", sums)
    script.log("mean", named["loss"] / named["count"])


@case
def layer_caches(script: Script) -> None:
    """Share one cache of keys among all layers. Each layer writes its own part during generation."""

    class Layer(nn.Module):
        def __init__(self, cache: Any) -> None:
            super().__init__()
            self.project, self.cache = nn.Linear(16, 16), cache

        def forward(self, x: Any, at: int) -> Any:
            self.cache[:, at : at + 1] = self.project(x)
            weights = torch.softmax((x @ self.cache[:, : at + 1].transpose(1, 2)), -1)
            return x + weights @ self.cache[:, : at + 1]

    cache = torch.zeros(2, 16, 4, 16, device=script.device)
    layers = [Layer(cache[number]).to(script.device) for number in range(2)]
    with torch.no_grad():
        for at in range(4):
            x = data(script, at, 16, 1, 16)
            for layer in layers:
                x = layer(x, at)
            script.sync()
            script.log("output", x)
    script.log("cache", cache)
    cache.zero_()
    script.log("zeroed", layers[1].cache)


class Tied(nn.Module):
    """A table and a head that share one storage."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 16), nn.Linear(16, classes, bias=False)

    def forward(self, ids: Any) -> Any:
        return self.head(self.table(ids).mean(1))


@case
def shared_rows(script: Script) -> None:
    """Use the table's first rows as the head's weight: two parameters of one storage."""
    model = Tied(8).to(script.device)
    model.head.weight = nn.Parameter(model.table.weight.data[:8])
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        loss = functional.cross_entropy(model(labels(script, step, 40, 32, 5)), labels(script, step, 8, 32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def turned(script: Script) -> None:
    """Use the encoder's transposed weight as the decoder's parameter."""
    encoder, decoder = nn.Linear(16, 64).to(script.device), nn.Linear(64, 16).to(script.device)
    decoder.weight = nn.Parameter(encoder.weight.data.t())
    model = nn.Sequential(encoder, nn.Tanh(), decoder)
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        x = data(script, step, 32, 16)
        loss = functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def written_after_inference(script: Script) -> None:
    """Create a state dict before planned inference, write through it after, and then train."""
    model = mlp(script)
    state = model.state_dict()
    with torch.no_grad():
        for step in range(6):
            script.log("output", model(data(script, step, 32, 16)))
            script.sync()
            if step % 2:
                for value in state.values():
                    value.mul_(0.5)
    optimizer = sgd(model)
    for step in range(STEPS):
        script.log("loss", train(script, model, optimizer, step))
        script.sync()
        state["0.bias"].add_(0.1)
    for name, value in state.items():
        script.log(name, value)
    script.log_state("model", model)


@case
def buffers(script: Script) -> None:
    """Write through aliases of buffers: running statistics decay, and a mask is changed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)
            self.mask: torch.Tensor
            self.register_buffer("mask", torch.ones(64))

        def forward(self, x: Any) -> Any:
            return self.last(torch.tanh(self.norm(self.first(x))) * self.mask)

    model: Any = Net().to(script.device)
    optimizer = sgd(model, 0.1)
    mean, variance, mask = model.norm.running_mean.detach(), model.norm.running_var.data, model.mask[::2]
    for step in range(STEPS):
        loss = train(script, model, optimizer, step)
        mean.mul_(0.5)
        variance.add_(1)
        mask.mul_(0.5)
        script.sync()
        script.log("loss", loss)
    script.log("mean", mean)
    script.log_state("model", model)


@case
def optimizer_state(script: Script) -> None:
    """Scale an optimizer's state through aliases that are created before and after its first step."""
    model = mlp(script)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    parameters = list(model.parameters())
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    moments = [optimizer.state[p]["exp_avg"].detach() for p in parameters]
    squares = []
    for step in range(STEPS + 1):
        script.log("loss", train(script, model, optimizer, step))
        for value in moments:
            value.mul_(0.5)
        script.sync()
        if step == 1:
            squares = [optimizer.state[p]["exp_avg_sq"].view(-1)[:2] for p in parameters]
        for value in squares:
            value.mul_(2)
    for p in parameters:
        script.log("moment", optimizer.state[p]["exp_avg"])
        script.log("square", optimizer.state[p]["exp_avg_sq"])
    script.log_state("model", model)


@case
def swapped(script: Script) -> None:
    """Swap a parameter for another one in the middle of training, with aliases of both."""
    model = mlp(script)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    other = nn.Parameter(torch.full((64, 16), 0.01).to(script.device))
    old, new = model[0].weight.data, other.data
    for step in range(STEPS + 2):
        script.log("loss", train(script, model, optimizer, step))
        script.sync()
        if step == 2:
            torch.utils.swap_tensors(model[0].weight, other)
        new.mul_(0.75)
        old.add_(0.01)
    script.log("old", old)
    script.log("new", new)
    script.log_state("model", model)


@case
def pruned_rows(script: Script) -> None:
    """Zero parts of a weight after every step, through views created without gradients."""
    model = mlp(script)
    optimizer = sgd(model)
    with torch.no_grad():
        rows, corner = model[0].weight[4:12], model[2].weight[:, :3]
    for step in range(STEPS):
        loss = train(script, model, optimizer, step)
        with torch.no_grad():
            rows.zero_()
            corner.clamp_(-0.05, 0.05)
        script.sync()
        script.log("loss", loss)
    script.log("rows", rows)
    script.log_state("model", model)


@case
def batch_views(script: Script) -> None:
    """Fill one batch on the device again for every step, and use views of it."""
    model = mlp(script)
    optimizer = sgd(model)
    whole = torch.zeros(64, 16, device=script.device)
    first, last = whole[:32], whole[32:]
    for step in range(STEPS):
        whole.copy_(data(script, step, 64, 16))
        last.mul_(0.5)
        loss = functional.cross_entropy(model(first) + model(last), labels(script, step, 8, 32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        script.sync()
        script.log("loss", loss)
        script.log("last", last)
    script.log_state("model", model)


@case
def flat_parameters(script: Script) -> None:
    """Store all parameters in one flat parameter, which the optimizer updates."""
    model = mlp(script)
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    flat.grad = torch.zeros_like(flat)
    at = 0
    for p in model.parameters():
        p.data = flat.data[at : at + p.numel()].view_as(p)
        p.grad = flat.grad[at : at + p.numel()].view_as(p)
        at += p.numel()
    optimizer = torch.optim.SGD([flat], lr=0.5)
    for step in range(STEPS):
        flat.grad.zero_()
        loss = functional.cross_entropy(model(data(script, step, 32, 16)), labels(script, step, 8, 32))
        loss.backward()
        optimizer.step()
        script.sync()
        script.log("loss", loss)
    script.log("flat", flat)
    script.log_state("model", model)


@case
def planned_again(script: Script) -> None:
    """Run batches of different shapes and evaluations in turn, each with its own plan, and reuse one stored batch."""
    model = mlp(script)
    optimizer = sgd(model)
    state, batch = model.state_dict(), data(script, 0, 64, 16)
    part = batch[16:32]
    for step in range(STEPS):
        rows = 32 if step % 2 else 64
        loss = functional.cross_entropy(model(batch[:rows]), labels(script, step, 8, rows))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        script.sync()
        script.log("loss", loss)
        part.add_(0.1)
        with torch.no_grad():
            script.log("evaluated", model(batch))
        script.sync()
        state["2.weight"].mul_(0.9)
    for name, value in state.items():
        script.log(name, value)
    script.log("batch", batch)
    script.log_state("model", model)


@case
def loaded(script: Script) -> None:
    """Restore weights from copies, and load weights over others, with an alias of each."""
    model = mlp(script)
    optimizer = sgd(model)
    aliases = [p.detach() for p in model.parameters()]
    saved = {}
    for step in range(STEPS + 3):
        script.log("loss", train(script, model, optimizer, step))
        script.sync()
        if step == 1:
            saved = {name: value.clone() for name, value in model.state_dict().items()}
        if step == 3:
            model.load_state_dict(saved)
        if step == 4:
            model.load_state_dict(saved, assign=True)
            optimizer = sgd(model)
        for value in saved.values():
            value.mul_(0.9)
        for value in aliases:
            value.mul_(0.95)
    for value in aliases:
        script.log("alias", value)
    script.log_state("model", model)


@case
def vector(script: Script) -> None:
    """Store the parameters in a vector, perturb it for a second pass, and reset it."""
    model = mlp(script)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat, model.parameters())
    for step in range(STEPS):
        flat.add_(0.05)
        script.log("ahead", model(data(script, step, 32, 16)))
        flat.sub_(0.05)
        loss = train(script, model, optimizer, step)
        script.sync()
        script.log("loss", loss)
    script.log("vector", flat)
    script.log_state("model", model)


@case
def accumulated(script: Script) -> None:
    """Sum gradients over two batches, each its own step, and scale them through detached aliases."""
    model = mlp(script)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    gradients = [p.grad.detach() for p in model.parameters() if p.grad is not None]
    for step in range(2 * STEPS):
        loss = functional.cross_entropy(model(data(script, step, 32, 16)), labels(script, step, 8, 32))
        loss.backward()
        if step % 2:
            for value in gradients:
                value.mul_(0.5)
            optimizer.step()
            for value in gradients:
                value.zero_()
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def samples_of_gradients(script: Script) -> None:
    """Compute each sample's gradients by `vmap` and `grad`, and apply their average by hand."""
    model = mlp(script)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(weights: Any, x: Any, y: Any) -> Any:
        return functional.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))
    for step in range(STEPS):
        gradients = each(parameters, data(script, step, 32, 16), labels(script, step, 8, 32))
        for name, value in parameters.items():
            value.sub_(gradients[name].clamp(-0.1, 0.1).mean(0))
        script.sync()
        script.log("gradient", gradients["0.weight"])
    script.log_state("model", model)
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = train(script, model, optimizer, step)
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def shifted(script: Script) -> None:
    """Shift tokens by a pad that cuts, add reversed ones, for a batch whose tokens the script splits."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)

        def forward(self, x: Any) -> Any:
            shifted = functional.pad(self.one(x), (0, 0, 1, -1))
            return self.last(torch.tanh(shifted + self.other(x).flip(1)))

    model = Net().to(script.device)
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        x, y = data(script, step, 1, 64, 32), labels(script, step, 8, 1, 64)
        script.mark(x, (None, "data", None))
        script.mark(y, (None, "data"))
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def per_sample_gradients(script: Script) -> None:
    """Store each sample's gradients, computed by a transform of detached parameters, and train an ordinary step."""
    model = mlp(script)
    optimizer = sgd(model)
    detached = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def squares(parameters: Any, x: Any) -> Any:
        return torch.func.functional_call(model, parameters, (x[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(squares), in_dims=(None, 0))
    kept = []
    for step in range(STEPS):
        gradients = each(detached, data(script, step, 32, 16))
        kept.append(gradients)
        loss = train(script, model, optimizer, step)
        script.sync()
        script.log("loss", loss)
    for gradients in kept:
        script.log("bias", gradients["2.bias"])
    script.log_state("model", model)
