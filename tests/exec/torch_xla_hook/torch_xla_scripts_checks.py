"""Scripts for `test_torch_xla_scripts.py`: ordinary scripts that do more than train one model in a loop."""

import copy
import gc
import io
import os
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

from experiments.lib.programs.torch_xla_models import MODELS, Case
from tests.exec.torch_xla_hook.torch_xla_checks import Check, compiled, difference, inferences, mlp, plans, report, spec


CHECKS: dict[str, Check] = {}


def script(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def on() -> Any:
    """Turn auto-sharding on in this process."""
    import torch_xla.runtime as xr

    import autoshard.torch_xla

    xr.use_spmd(auto=True)
    return autoshard.torch_xla.session()


def net(width: int = 256, layers: int = 2) -> Any:
    """Build a module whose class is the script's own."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(mlp(width) for _ in range(layers))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = x + layer(x)
            return x

    torch.manual_seed(0)
    return Net()


def is_split(tensors: Any) -> list[bool]:
    return [spec(tensor).startswith("{devices=") for tensor in tensors]


def step(model: Any, updater: Any, x: Any, y: Any) -> Any:
    import torch

    updater.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    updater.step()
    return loss


def sgd(*models: Any) -> list[Any]:
    import torch

    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]


def train(model: Any, plain: Any, steps: int, width: int = 256, rows: int = 64) -> float:
    """Train both models alike. Return the largest difference of a loss."""
    import torch
    import torch_xla

    ours, theirs = sgd(model, plain)
    differences = []
    for _ in range(steps):
        x, y = torch.randn(rows, width), torch.randn(rows, width)
        loss, expected = step(model, ours, x.to("xla"), y.to("xla")), step(plain, theirs, x, y)
        torch_xla.sync()
        differences.append(difference(loss, expected))
    return max(differences)


@script
def compiled_own() -> dict[str, Any]:
    """Compile a module of the script's own class by `torch.compile`, and call it several times."""
    import torch

    on()
    plain = net()
    model = copy.deepcopy(plain).to("xla")
    called = torch.compile(model, backend="openxla")
    counts, most = inferences(called, plain, 256)
    return {"difference": most, "compiles": counts, "split": is_split(model.parameters())}


@script
def scanned() -> dict[str, Any]:
    """Run layers by PyTorch/XLA's `scan_layers`, which traces a copy of the first one."""
    import torch
    from torch_xla.experimental.scan_layers import scan_layers

    on()

    class Scanned(torch.nn.Module):
        def __init__(self, inner: Any, scans: bool) -> None:
            super().__init__()
            self.layers, self.scans = inner.layers, scans

        def forward(self, x: Any) -> Any:
            if self.scans:
                return scan_layers(self.layers, x)
            for layer in self.layers:
                x = layer(x)
            return x

    plain = Scanned(net(128, 3), False)
    model = Scanned(copy.deepcopy(plain), True).to("xla")
    before = compiled()
    off = train(model, plain, 4, 128)
    return {"difference": off, "compiles": compiled() - before, "split": is_split(model.parameters())}


@script
def copied() -> dict[str, Any]:
    """Copy, save and average a planned model."""
    import torch
    import torch_xla

    on()
    plain = net(128)
    model = copy.deepcopy(plain).to("xla")
    train(model, plain, 3, 128)
    x = torch.randn(64, 128)
    with torch.no_grad():
        expected = plain(x)
    results = {}
    file = io.BytesIO()
    torch.save(model.layers[0], file)
    file.seek(0)
    with torch.no_grad():
        results["loaded"] = difference(torch.load(file, weights_only=False)(x.to("xla")), plain.layers[0](x))
        twin = copy.deepcopy(model)
        results["copied"] = difference(twin(x.to("xla")), expected)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    torch_xla.sync()
    with torch.no_grad():
        results["averaged"] = difference(averaged(x.to("xla")), expected)
    results["trained"] = train(twin, copy.deepcopy(plain), 3, 128)
    return {"differences": results, "mentions": b"autoshard" in file.getvalue()}


@script
def freed() -> dict[str, Any]:
    """Train models in turn, each freed before the next."""
    session = on()
    watched, split, compiles = [], [], []
    for width in (64, 128, 128):
        plain = net(width)
        model = copy.deepcopy(plain).to("xla")
        before = compiled()
        train(model, plain, 3, width)
        compiles.append(compiled() - before)
        split.append(any(is_split(model.parameters())))
        watched.append([weakref.ref(model), weakref.ref(next(model.parameters()))])
        del plain, model
        gc.collect()
    alive = [[ref() is not None for ref in refs] for refs in watched]
    return {"alive": alive, "split": split, "armed": session.armed, "compiles": compiles}


@script
def inferred() -> dict[str, Any]:
    """Run inference without `no_grad`, and read its results at once, after a call on the host."""
    import torch

    session = on()
    plain = net()
    model = copy.deepcopy(plain)
    model(torch.randn(16, 256))
    model = model.to("xla")
    planned, differences, armed = len(plans()), [], []
    for _ in range(4):
        x = torch.randn(16, 256)
        differences.append(difference(model(x.to("xla")), plain(x)))
        armed.append(session.armed)
    found = {"difference": max(differences), "plans": len(plans()) - planned, "armed": armed}
    found["split"] = any(is_split(model.parameters()))
    found["trained"] = train(model, plain, 3)
    model.to("xla")
    found["moved again"] = session.armed
    return found


@script
def known_steps() -> dict[str, Any]:
    """Move a second model long before it runs: known steps in between do not stay watched."""
    session = on()
    plain = net(128)
    model = copy.deepcopy(plain).to("xla")
    train(model, plain, 2, 128)
    other = copy.deepcopy(plain).to("xla")
    armed = [session.armed]
    train(model, plain, 4, 128)
    armed.append(session.armed)
    planned = len(plans())
    off = train(other, copy.deepcopy(other).cpu(), 3, 128)
    return {"armed": armed, "plans": len(plans()) - planned, "difference": off, "split": is_split(other.parameters())}


@script
def read() -> dict[str, Any]:
    """Read results of planned steps, split or not."""
    import torch
    import torch_xla
    import torch_xla.debug.metrics as metrics

    on()
    plain = net()
    model = copy.deepcopy(plain).to("xla")
    counts, differences = [], []
    for _ in range(5):
        x = torch.randn(64, 256)
        with torch.no_grad():
            y, z = model(x.to("xla")), model.layers[0](x.to("xla")[:8])
        read = z.cpu()  # before the step ends
        torch_xla.sync()
        differences += [difference(y, plain(x)), difference(read, plain.layers[0](x[:8]))]
        moved, listed = y.to("cpu"), torch.tensor(y.tolist())
        differences += [difference(each, plain(x)) for each in (moved, listed)]
        split = is_split([y])
        counts.append(metrics.metric_data("CompileTime")[0])
    x = torch.randn(64, 256, requires_grad=True)
    there = x.detach().to("xla").requires_grad_()
    for given, run in ((x, plain), (there, model)):  # gradients flow back through the value that is read
        run(given).cpu().square().mean().backward()
    torch_xla.sync()
    differences.append(difference(there.grad, x.grad))
    before = metrics.metric_data("CompileTime")[0]
    differences.append(difference(y.cpu(), y.to("cpu")))
    more = metrics.metric_data("CompileTime")[0] - before
    return {"difference": max(differences), "compiles": counts, "split": split, "to read": more}


def noted(session: Any, first: int) -> list[list[str]]:
    """Return the warnings of the session's plans, starting with the plan of the number `first`."""
    return [list(plan.warnings) for plan in session.plans[first:]]


@script
def evaluated_first() -> dict[str, Any]:
    """Evaluate before training, with batches of the same shape."""
    import torch
    import torch_xla

    session = on()
    plain = net(layers=3)
    model = copy.deepcopy(plain).to("xla")
    for _ in range(2):
        x = torch.randn(64, 256)
        with torch.no_grad():
            off = difference(model(x.to("xla")), plain(x))
        torch_xla.sync()
    first = len(session.plans)
    trained = train(model, plain, 3)
    for _ in range(2):
        with torch.no_grad():
            off = max(off, difference(model(x.to("xla")), plain(x)))
        torch_xla.sync()
    again = session.plans[first + 1 :]
    alone = copy.deepcopy(plain).to("xla")
    train(alone, plain, 2)
    before, after = session.plans[first], session.plans[-1]
    return {
        "difference": max(off, trained),
        "step": [plan.prediction.step_time_s for plan in (before, after)],
        "again": [[each.arguments[n] == before.arguments[n] for n, _ in plain.named_parameters()] for each in again],
        "notes": noted(session, first),
    }


def patches() -> Case:
    """Build a classifier of images that are cut into patches."""
    import torch

    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 8, stride=8), torch.nn.Flatten(), torch.nn.Tanh(), torch.nn.Linear(1024, 16)
    )
    return Case(
        net,
        lambda: (torch.randn(16, 3, 32, 32), torch.randint(0, 16, (16,))),
        lambda model, x, y: torch.nn.functional.cross_entropy(model(x), y),
    )


@script
def averaged() -> dict[str, Any]:
    return averaging(patches())


@script
def averaged_vit() -> dict[str, Any]:
    return averaging(MODELS["vit"]())


def averaging(case: Case) -> dict[str, Any]:
    """Train with an EMA of the weights. The last batch is short."""
    import torch
    import torch_xla

    session = on()
    planned = len(session.plans)
    model = copy.deepcopy(case.model).to("xla")
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = {name: p.detach().clone() for name, p in case.model.named_parameters()}
    ours, theirs = sgd(model, case.model)
    differences = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (16, 16, 16, 6, 16, 6):
            batch = [value[:rows] for value in case.batch()]
            losses = []
            for each, updater, means, data in (
                (model, ours, average, [value.to("xla") for value in batch]),
                (case.model, theirs, expected, batch),
            ):
                updater.zero_grad()
                loss = case.loss(each, *data)
                loss.backward()
                updater.step()
                with torch.no_grad():
                    for name, p in each.named_parameters():
                        means[name].mul_(0.9).add_(p, alpha=0.1)
                losses.append(loss)
            torch_xla.sync()
            differences.append(difference(*losses))
    return {
        "difference": max(differences),
        "averages": max(float((average[name].cpu() - expected[name]).abs().max()) for name in average),
        "warned": [str(w.message) for w in caught if "autoshard" in str(w.message)],
        "plans": len(session.plans) - planned,
        "notes": noted(session, planned),
        "unknown": sum(name.startswith("input.") for name in session.plans[-1].roles),
    }


@script
def evaluated() -> dict[str, Any]:
    return evaluating(words())


@script
def evaluated_gpt2() -> dict[str, Any]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    case = MODELS["gpt2"]()._replace(model=GPT2LMHeadModel(config))
    head = case.model.lm_head
    # moving to the device splits a shared parameter into two
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    found = evaluating(case)
    return found | {"embedding": found["split"][:1]}


def words() -> Case:
    """Build a module of a table and a head, with the inputs and outputs of a Hugging Face language model."""
    import torch

    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner, self.head = torch.nn.Embedding(256, 64), mlp(64), torch.nn.Linear(64, 256)
            self.norm = torch.nn.BatchNorm1d(64)

        def forward(self, input_ids: Any, labels: Any = None) -> Any:
            x = self.inner(self.table(input_ids))
            logits = self.head(self.norm(x.flatten(0, 1)).view_as(x))
            if labels is None:
                return SimpleNamespace(loss=None, logits=logits)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return SimpleNamespace(loss=loss, logits=logits)

    return Case(
        Words(), lambda: (torch.randint(0, 256, (8, 32)),), lambda model, ids: model(input_ids=ids, labels=ids).loss
    )


def evaluating(case: Case) -> dict[str, Any]:
    """Evaluate as trainers do: with other shapes after training, while the embedding is split."""
    import torch
    import torch_xla

    session = on()
    planned = len(session.plans)
    model = copy.deepcopy(case.model).to("xla")
    ours, theirs = sgd(model, case.model)
    differences, counts = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for _ in range(2):
                (ids,) = case.batch()
                losses = []
                for each, updater, data in ((model, ours, ids.to("xla")), (case.model, theirs, ids)):
                    updater.zero_grad()
                    loss = case.loss(each, data)
                    loss.backward()
                    updater.step()
                    losses.append(loss)
                before = compiled()
                torch_xla.sync()
                counts.append(compiled() - before)
                differences.append(difference(*losses))
            for each in (model, case.model):
                each.eval()
            (ids,) = case.batch()
            with torch.no_grad():
                found = model(input_ids=ids.to("xla"), labels=ids.to("xla"))
                loss, logits = found.loss.repeat(8), found.logits
                torch_xla.sync()
                off = difference(logits, case.model(input_ids=ids).logits)
                differences.append(off)
            for each in (model, case.model):
                each.train()
    return {
        "difference": max(differences),
        "warned": [str(w.message) for w in caught if "autoshard" in str(w.message)],
        "plans": len(session.plans) - planned,
        "notes": noted(session, planned),
        "split": is_split(model.parameters()),
        "compiles": counts,
    }


@script
def failing_watch() -> dict[str, Any]:
    """Break the watcher, or a leftover of it, for one to three steps: the script continues, and then its plan."""
    os.environ.pop("AUTOSHARD_STRICT", None)  # otherwise the watcher raises
    import torch_xla

    from autoshard.exec.torch_xla_hook.capture.first_step import Watch
    from autoshard.exec.torch_xla_hook.pins.pin_hooks import ModulePins

    session = on()
    planned = len(session.plans)
    found: dict[str, Any] = {"said": [], "differences": [], "armed": [], "plans": [], "current": []}

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("there is no telling")

    plain = net(64)
    model = copy.deepcopy(plain).to("xla")
    for owner, name in ((Watch, "learn"), (Watch, "record"), (Watch, "_after"), (ModulePins, "_pins")):
        if not session.armed:
            session.arm()
        own = getattr(owner, name)
        if owner is Watch:
            setattr(owner, name, broken)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found["differences"].append(train(model, plain, 2, 64))
            if owner is not Watch:
                setattr(owner, name, broken)
            found["differences"].append(train(model, plain, 1, 64))
            torch_xla.sync()
        setattr(owner, name, own)
        found["said"].append([str(w.message) for w in caught if "autoshard" in str(w.message)])
        found["armed"].append(session.armed)
        found["plans"].append(len(session.plans) - planned)
        found["differences"].append(train(model, plain, 1, 64))
        found["current"].append(session.applied.now.plan)
        session.guard.failed, session.guard._failures = False, 0
    return found


@script
def marked_batches() -> dict[str, Any]:
    """Mark the inputs in every step, over another axis in the third step. The targets have the inputs' shape."""
    import torch
    import torch_xla.distributed.spmd as xs

    session = on()
    mesh = xs.Mesh(list(range(8)), (4, 2), ("data", "model"))
    plain = mlp(96)
    model = copy.deepcopy(plain).to("xla")
    (ours,), (theirs,) = sgd(model), sgd(plain)
    differences, held = [], []
    for axis in ("data", "data", "model"):
        x, y = torch.randn(64, 96), torch.randn(64, 96)
        there = x.to("xla")
        xs.mark_sharding(there, mesh, (axis, None))
        held.append([spec(there)])
        y_there = y.to("xla")
        held[-1].append(spec(y_there))
        differences.append(difference(step(model, ours, there, y_there), step(plain, theirs, x, y)))
    return {"difference": max(differences), "held": held, "notes": noted(session, len(session.plans) - 1)}


@script
def compiled_in_place() -> dict[str, Any]:
    """Compile by `module.compile()` before the model is moved: inference is compiled, training lazy."""
    import torch
    import torch_xla

    on()
    plain = net(128)
    model = copy.deepcopy(plain).to("xla")
    model.compile(backend="openxla")
    off = train(model, plain, 3, 128)
    for _ in range(3):
        x = torch.randn(64, 128)
        with torch.no_grad():
            off = max(off, difference(model(x.to("xla")), plain(x)))
        torch_xla.sync()
    return {"difference": off, "split": is_split(model.parameters())}


@script
def mask_inside() -> dict[str, Any]:
    """Run a module that creates a mask in each call, and writes to slices of it."""
    import torch

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(96)

        def forward(self, x: Any) -> Any:
            mask = torch.ones(x.shape[0], 96, device=x.device)
            mask[:, :48] = 0.25
            mask[::2, 90:].mul_(-1)
            return self.inner(x * mask)

    on()
    plain = Masked()
    model = copy.deepcopy(plain).to("xla")
    return {"difference": train(model, plain, 4, 96), "split": is_split(model.parameters())}


@script
def checked_masks() -> dict[str, Any]:
    """Run a module that reads during its call if a mask masks anything, in training and in inference."""
    import torch
    import torch_xla

    class Checked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(112)

        def forward(self, x: Any, mask: Any) -> Any:
            return self.inner(x if mask.bool().all() else x * mask)

    session = on()
    plain = Checked()
    model = copy.deepcopy(plain).to("xla")
    first, before, off, counts = len(session.plans), compiled(), [], []
    (ours,), (theirs,) = sgd(model), sgd(plain)
    mask = torch.ones(64, 112, dtype=torch.int64)
    for gradients in (True, True, True, False, False):
        x, y = torch.randn(64, 112), torch.randn(64, 112)
        pairs = [(model, ours, (x.to("xla"), mask.to("xla")), y.to("xla")), (plain, theirs, (x, mask), y)]
        losses = []
        for net, updater, given, target in pairs:
            with torch.set_grad_enabled(gradients):
                losses.append(torch.nn.functional.mse_loss(net(*given), target))
            if gradients:
                updater.zero_grad()
                losses[-1].backward()
                updater.step()
        torch_xla.sync()
        off.append(difference(*losses))
        counts.append(compiled() - before)
    return {
        "difference": max(off),
        "compiles": counts,
        "plans": [sum(role == "parameter" for role in plan.roles.values()) for plan in session.plans[first:]],
        "split": is_split(model.parameters()),
    }


if __name__ == "__main__":
    report(CHECKS)
