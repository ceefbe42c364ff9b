"""Random scripts: each seed trains models in the ways that people do, and compares every tensor it can reach.

The draws depend on the seed alone, so that each mode runs the same script. Nothing random runs on the device.
"""

import copy
import functools
import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from tests.exec.torch_xla_hook.torch_xla_modes import Case, Script
from tests.exec.torch_xla_hook.torch_xla_random_models import CLASSES, WORDS, Counted, Net


COUNT = 1000
STEPS = 4
LEAST = 1e-2
"""Size of a tensor below which its differences are compared with this size: small gradients are rounding."""


_ALIASES: dict[str, Callable[[Any], Any]] = {
    "data": lambda t: t.data,
    "detached": lambda t: t.detach(),
    "flat": lambda t: t.data.view(-1),
    "first": lambda t: t.detach()[:1],
    "every": lambda t: t.data[::2],
    "turned": lambda t: t.data.t() if t.dim() == 2 else t.data,
}
_WRITES: tuple[Callable[[Any], Any], ...] = (
    lambda t: t.mul_(0.5),
    lambda t: t.add_(0.01),
    lambda t: t.copy_(t * 0.75),
    lambda t: t.clamp_(-0.2, 0.2),
    lambda t: t[:1].fill_(0.125) if t.dim() else t.fill_(0.125),
)


class Own:
    """An optimizer written by hand, with momentum in a list."""

    def __init__(self, parameters: list[Any], rate: float, fused: bool) -> None:
        self.parameters, self.rate, self.fused = parameters, rate, fused
        self.momenta = [torch.zeros_like(p) for p in parameters]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.parameters:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        pairs = [(p, m) for p, m in zip(self.parameters, self.momenta, strict=True) if p.grad is not None]
        if self.fused and pairs:
            foreach, gradients = vars(torch), [p.grad for p, _ in pairs]
            foreach["_foreach_mul_"]([m for _, m in pairs], 0.9)
            foreach["_foreach_add_"]([m for _, m in pairs], gradients)
            foreach["_foreach_add_"]([p for p, _ in pairs], [m for _, m in pairs], alpha=-self.rate)
            return
        for p, m in pairs:
            m.mul_(0.9).add_(p.grad)
            p.data.sub_(self.rate * m)

    def state_dict(self) -> Any:
        return {str(number): m for number, m in enumerate(self.momenta)}

    def load_state_dict(self, state: Any) -> None:
        for number, m in enumerate(self.momenta):
            m.copy_(state[str(number)])


class Run:
    """One run of a random script."""

    def __init__(self, script: Script, seed: int) -> None:
        self.script, self.draw = script, random.Random(seed)
        self.width = self.draw.choice((16, 24, 32))
        self.rows = self.draw.choice((16, 32, 48))
        self.held: dict[str, Any] = {}
        """Tensors that the script refers to by a name of its own."""
        self.models = [self._model(self.draw.randint(1, 3))]
        self.optimizers: list[Any] = []
        self.watched: list[Any] = []
        self.losses: list[Any] = []
        self.average: Any = None
        self.saved: Any = None
        self.batch = 0
        self.comparing = self.draw.choice(("every", "every", "some", "last", "clones"))

    def may(self, chance: float) -> bool:
        """Draw a decision."""
        return self.draw.random() < chance

    def _model(self, depth: int) -> Net:
        return Net(self.draw, self.width, depth).to(self.script.device)

    # Before training.

    def prepare(self) -> None:
        """Draw what the script sets up once."""
        self.two = self.may(0.25)
        if self.two:
            self.models.append(self._model(1))
        self.teacher = self.may(0.2)
        if self.teacher:
            self.models.append(self._model(1))
            self.models[-1].requires_grad_(False)
        self.hidden = torch.zeros(self.width, device=self.script.device) if self.may(0.25) else None
        model = self.models[0]
        if self.may(0.2):
            model.head.weight = self.draw.choice(
                (
                    lambda: nn.Parameter(model.words.weight.data[:CLASSES]),
                    lambda: nn.Parameter(torch.full((self.width, CLASSES), 0.01, device=self.script.device).t()),
                )
            )()
        elif self.may(0.15):
            self._flatten_parameters(model)
        if self.may(0.2):
            model.words.weight.requires_grad_(False)
        self.in_backward = False
        for trained in self._trained():
            self.optimizers.append(self._optimizer([p for p in trained.parameters() if p.requires_grad]))
        if self.may(0.3):
            self._hooks(model)
        if self.may(0.7):
            self._aliases(model)
        if self.may(0.2) and not self.in_backward:
            self._flatten_gradients(model)
        if self.may(0.3):
            self.average = copy.deepcopy(model)
            self.average.requires_grad_(False)
            self.averages = [
                (a.detach(), p.detach()) for a, p in zip(self.average.parameters(), model.parameters(), strict=True)
            ]
            self.way_to_average = self.draw.randrange(4)
        if self.may(0.4):
            sums = torch.zeros(4, device=self.script.device)
            self.held |= {"sums": sums, "sums.loss": sums[0], "sums.count": sums[1], "sums.rest": sums[2:]}
        self.stored = None
        if self.may(0.2):
            whole = torch.zeros(2 * self.rows, self.width, device=self.script.device)
            self.stored = whole[: self.rows], whole[self.rows :]
            self.held |= {"batch": whole, "batch.second": self.stored[1]}
        self.uneven = self.draw.choice((0, 0, 0, 10, 30, self.rows // 2))
        self.accumulate = self.draw.choice((1, 1, 1, 2))
        self.syncs_inside = self.may(0.5)
        self.evaluates = self.draw.choice((0, 0, 1, 2))
        self.grads_none = self.may(0.6)
        self.reads = {what for what in ("before", "between", "after", "norm", "weight") if self.may(0.15)}
        self.clips = self.draw.choice((None, None, "norm", "value"))
        self.writes = self.draw.choice(((), ("first",), ("last",), ("first", "last")))
        self.events = {step: self.draw.choice(_EVENTS) for step in range(1, STEPS) if self.may(0.3)}

    def _trained(self) -> list[Any]:
        return self.models[: 1 + self.two]

    def _optimizer(self, parameters: list[Any]) -> Any:
        kind = self.draw.randrange(8)
        if kind == 0:
            return torch.optim.SGD(parameters, lr=0.1)
        if kind == 1:
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=self.may(0.5), weight_decay=0.01)
        if kind == 2:
            return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, amsgrad=self.may(0.3))
        if kind == 3:
            return torch.optim.RMSprop(parameters, lr=0.01, eps=1e-2, centered=False, momentum=0.5)
        if kind == 4:
            return torch.optim.Adagrad(parameters, lr=0.05, eps=1e-2)
        if kind == 5:
            return torch.optim.Adam(
                [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:]}], lr=0.01, eps=1e-3
            )
        if kind == 6 or len(self.optimizers):
            return Own(parameters, 0.05, fused=self.may(0.5))
        self.in_backward = True
        own = {p: torch.optim.SGD([p], lr=0.1, momentum=0.5) for p in parameters}

        def step(parameter: Any) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for p in parameters:
            p.register_post_accumulate_grad_hook(step)
        return None

    def _flatten_parameters(self, model: Any) -> None:
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        at = 0
        for p in model.parameters():
            p.data = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        self.held["flat"] = flat

    def _flatten_gradients(self, model: Any) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        flat = torch.zeros(sum(p.numel() for p in trained), device=self.script.device)
        at = 0
        for p in trained:
            p.grad = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        self.held["gradients"] = flat

    def _hooks(self, model: Any) -> None:
        block = self.draw.choice(list(model.blocks))
        kind = self.draw.randrange(5)
        if kind == 0:
            block.register_forward_hook(lambda module, given, output: output * 0.5)
        elif kind == 1:
            seen = torch.zeros(2, self.width, device=self.script.device)
            self.held["seen"] = seen
            block.register_forward_hook(lambda module, given, output: (seen[1].copy_(output.detach()[0]), None)[1])
        elif kind == 2:
            block.register_full_backward_hook(
                lambda module, below, above: tuple(None if g is None else 0.5 * g for g in below)
            )
        elif kind == 3:
            next(p for p in model.parameters() if p.requires_grad).register_hook(
                lambda gradient: gradient.clamp(-0.01, 0.01)
            )
        else:
            block.register_forward_pre_hook(lambda module, given: (given[0] + 0.125,))

    def _aliases(self, model: Any) -> None:
        named = [*model.named_parameters(), *model.named_buffers()]
        for name, tensor in self.draw.sample(named, min(len(named), self.draw.randint(1, 4))):
            kind = self.draw.choice(tuple(_ALIASES))
            # PyTorch/XLA's batch norm does not update views of its running statistics.
            is_whole = "running" not in name or kind in ("data", "detached")
            if (
                is_whole and "num_batches" not in name and (kind, name) != ("flat", "head.weight")
            ):  # it may be transposed
                self.held[f"{kind} {name}"] = _ALIASES[kind](tensor)
        if self.may(0.3):
            self.held |= {f"state {name}": value for name, value in model.state_dict().items()}

    # One step.

    def inputs(self, rows: int) -> tuple[Any, Any, Any]:
        """Return the next batch."""
        self.batch += 1
        made = torch.Generator().manual_seed(self.batch)
        x = torch.randn(rows, self.width, generator=made)
        ids = torch.randint(0, WORDS, (rows, 3), generator=made)
        y = torch.randint(0, CLASSES, (rows,), generator=made)
        device = self.script.device
        if self.stored is not None and rows == self.rows:
            part = self.stored[self.batch % 2]
            part.copy_(x.to(device))
            return part, ids.to(device), y.to(device)
        return x.to(device), ids.to(device), y.to(device)

    def forward(self, rows: int) -> Any:
        """Compute the loss of all models on one batch."""
        x, ids, y = self.inputs(rows)
        if self.hidden is not None:
            x = x + self.hidden
        outputs = [model(x, ids) for model in self._trained()]
        loss = sum(functional.cross_entropy(output, y) for output in outputs)
        if self.teacher:
            with torch.no_grad():
                target = torch.softmax(self.models[-1](x, ids), -1)
            loss = loss + functional.kl_div(torch.log_softmax(outputs[0], -1), target, reduction="batchmean")
        if self.hidden is not None:
            self.hidden = 0.5 * self.hidden + x.detach().mean(0)
        return loss

    def step(self, number: int) -> None:
        """Run one step, with its boundary."""
        rows = self.uneven if self.uneven and number % 3 == 2 else self.rows
        if "first" in self.writes:
            self.write(number)
        if not self.accumulate > 1 or not self.in_backward:
            for optimizer in self.optimizers:
                if optimizer is not None and "gradients" not in self.held:
                    optimizer.zero_grad(set_to_none=self.grads_none)
        if "gradients" in self.held:
            self.held["gradients"].zero_()
        for part in range(self.accumulate):
            loss = self.forward(rows)
            if "before" in self.reads:
                self.script.log("loss before", loss)
            (loss / self.accumulate).backward()
            if part + 1 < self.accumulate and self.syncs_inside:
                self.script.sync()
        if "between" in self.reads:
            self.script.log("loss between", loss)
        self.update(loss)
        self.losses.append(loss.detach())
        if "last" in self.writes:
            self.write(number)
        if number in self.events:
            self.events[number](self)
        self.script.sync()
        if self.evaluates and number % self.evaluates == 0:
            self.evaluate()
        self.compare(number)

    def update(self, loss: Any) -> None:
        """Clip, step, average and count."""
        trained = [p for model in self._trained() for p in model.parameters() if p.grad is not None]
        if self.clips == "norm" and trained:
            norm = nn.utils.clip_grad_norm_(trained, 0.5)
            if "norm" in self.reads:
                self.script.log("norm", norm)
        elif self.clips == "value" and trained:
            nn.utils.clip_grad_value_(trained, 0.02)
        for optimizer in self.optimizers:
            if optimizer is not None:
                optimizer.step()
        if "weight" in self.reads:
            self.script.log("weight", self.models[0].head.weight)
        if self.average is not None:
            self._average()
        if "sums" in self.held:
            self.held["sums.loss"] += loss.detach()
            self.held["sums.count"] += 1
            self.held["sums.rest"][0].copy_(loss.detach())
        if "after" in self.reads:
            self.script.log("loss after", loss)

    @torch.no_grad()
    def _average(self) -> None:
        model = self.models[0]
        if self.way_to_average == 0:
            for mean, value in self.averages:
                mean.mul_(0.75).add_(value, alpha=0.25)
        elif self.way_to_average == 1:
            for mean, value in zip(self.average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.25)
        elif self.way_to_average == 2:
            for mean, value in zip(self.average.parameters(), model.parameters(), strict=True):
                mean.data = 0.5 * (mean.data + value.data)
        else:
            state = model.state_dict()
            for name, mean in self.average.state_dict().items():
                mean.copy_(0.5 * mean + 0.5 * state[name])

    @torch.no_grad()
    def write(self, number: int) -> None:
        """Write in place through some of the names that the script has."""
        names = [name for name, value in self.held.items() if value.is_floating_point()]
        for name in self.draw.sample(names, min(len(names), 2)):
            value = self.held[name]
            self.draw.choice(_WRITES)(value)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Evaluate a batch, and read its results."""
        x, ids, _ = self.inputs(self.rows)
        for model in {id(each): each for each in (self.models[0], self.average or self.models[0])}.values():
            model.eval()
            self.script.log("evaluated", model(x, ids))
            model.train()

    # Comparisons.

    def reachable(self) -> Iterator[tuple[str, Any]]:
        """Yield every tensor that the script can reach, by name."""
        models = [*self.models, *([self.average] if self.average is not None else [])]
        for number, model in enumerate(models):
            for name, p in model.named_parameters():
                yield f"model{number}.{name}", p
                if p.grad is not None:
                    yield f"model{number}.{name}.grad", p.grad
            for name, buffer in model.named_buffers():
                yield f"model{number}.{name}", buffer
        for number, optimizer in enumerate(self.optimizers):
            if isinstance(optimizer, Own):
                yield from ((f"momentum{number}.{index}", m) for index, m in enumerate(optimizer.momenta))
            elif optimizer is not None:
                for index, group in enumerate(optimizer.param_groups):
                    for at, p in enumerate(group["params"]):
                        for key, value in optimizer.state.get(p, {}).items():
                            if isinstance(value, torch.Tensor):
                                yield f"state{number}.{index}.{at}.{key}", value
        yield from self.held.items()
        if self.hidden is not None:
            yield "hidden", self.hidden

    def compare(self, number: int) -> None:
        """Log what the script can reach."""
        if self.comparing == "every" or (self.comparing == "some" and number % 2):
            for name, tensor in self.reachable():
                self.script.log(f"{number} {name}", tensor)
        elif self.comparing == "clones":
            self.watched += [(f"{number} {name}", tensor.detach().clone()) for name, tensor in self.reachable()]

    @torch.no_grad()
    def probe(self) -> None:
        """Add a number of its own to each tensor in place, which shows in all that share its storage."""
        tensors = list(self.reachable())
        for number, (_, tensor) in enumerate(tensors):
            tensor.add_(number + 1)
        self.script.sync()
        for name, tensor in tensors:
            self.script.log(f"probed {name}", tensor)

    def run(self) -> None:
        """Run the whole script."""
        self.prepare()
        for number in range(STEPS):
            self.step(number)
        for number, loss in enumerate(self.losses):
            self.script.log(f"loss{number}", loss)
        for name, value in self.watched:
            self.script.log(name, value)
        for name, tensor in self.reachable():
            self.script.log(f"last {name}", tensor)
        self.probe()


# Events between two steps.


def _save(run: Run) -> None:
    states = [each.state_dict() for each in (*run.models, *(o for o in run.optimizers if o is not None))]
    run.saved = copy.deepcopy(states)


def _load(run: Run) -> None:
    if run.saved is None:
        return
    for each, state in zip((*run.models, *(o for o in run.optimizers if o is not None)), run.saved, strict=True):
        each.load_state_dict(copy.deepcopy(state))


def _through_a_file(run: Run) -> None:
    model, file = run.models[0], io.BytesIO()
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, file)
    file.seek(0)
    model.load_state_dict(torch.load(file))


def _reset(run: Run) -> None:
    head = run.models[0].head
    with torch.no_grad():
        head.weight.copy_(torch.full(head.weight.shape, 0.01))


def _new_data(run: Run) -> None:
    head = run.models[0].head
    head.weight.data = head.weight.data * 0.5


def _freeze(run: Run) -> None:
    if "gradients" not in run.held:
        block = run.models[0].blocks[0]
        block.requires_grad_(not next(block.parameters()).requires_grad)


def _mode(run: Run) -> None:
    for module in run.models[0].modules():
        if isinstance(module, (Counted, nn.BatchNorm1d)):
            module.train(not module.training)


def _more_names(run: Run) -> None:
    run._aliases(run.models[0])


def _sync(run: Run) -> None:
    run.script.sync()
    run.script.sync()


_EVENTS: tuple[Callable[[Run], None], ...] = (
    _save,
    _load,
    _through_a_file,
    _reset,
    _new_data,
    _freeze,
    _mode,
    _more_names,
    _sync,
)


def _run(seed: int, script: Script) -> None:
    Run(script, seed).run()


CASES: dict[str, Case] = {f"seed{seed}": functools.partial(_run, seed) for seed in range(COUNT)}
