"""Scripts for `test_torch_xla_staying.py`: steps with a part that cannot be planned, and ordinary ones after them."""

from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from tests.exec.torch_xla_hook.torch_xla_alias_cases import data, labels, mlp, sgd, train
from tests.exec.torch_xla_hook.torch_xla_modes import Case, Script


CASES: dict[str, Case] = {}

STEPS = 4


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def fit(script: Script, model: nn.Module, optimizer: Any, step: int, rows: int) -> None:
    """Run one step on a batch of this many rows."""
    loss = functional.cross_entropy(model(data(script, step, rows, 16)), labels(script, step, 8, rows))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    script.sync()
    script.log("loss", loss)


# First in the process: a batch that an earlier plan has split is gathered before a script's own mark.
@case
def marked_rows(script: Script) -> None:
    """Mark whole batches by hand, then train on a batch of 30 rows, whose split is uneven."""
    model = mlp(script)
    optimizer = sgd(model)
    for step, rows in enumerate((32, 32, 30, 32)):
        x = data(script, step, rows, 16)
        script.mark(x, ("data", None))
        loss = functional.cross_entropy(model(x), labels(script, step, 8, rows))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def thirty_rows(script: Script) -> None:
    """Train on batches whose rows no axis divides."""
    model = mlp(script)
    optimizer = sgd(model)
    for step in range(STEPS):
        fit(script, model, optimizer, step, 30)
    script.log_state("model", model)


@case
def odd_rows(script: Script) -> None:
    """Train on batches of a prime number of rows."""
    model = mlp(script)
    optimizer = sgd(model)
    for step in range(STEPS):
        fit(script, model, optimizer, step, 13)
    script.log_state("model", model)


@case
def short_epochs(script: Script) -> None:
    """End each epoch with a short batch, and evaluate on one."""
    model = mlp(script)
    optimizer = sgd(model)
    for _ in range(2):
        for step, rows in enumerate((32, 32, 30)):
            fit(script, model, optimizer, step, rows)
        with torch.no_grad():
            script.log("evaluated", model(data(script, 9, 7, 16)))
    script.log_state("model", model)


@case
def spectrum(script: Script) -> None:
    """Log eigenvalues of a weight in each step."""
    model = mlp(script)
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = train(script, model, optimizer, step)
        weight = model[2].weight.detach()
        values = torch.linalg.eigvalsh(weight @ weight.t())
        script.sync()
        script.log("loss", loss)
        script.log("values", values)
    script.log_state("model", model)


@case
def spectrum_once(script: Script) -> None:
    """Log singular values in the first step alone."""
    model = mlp(script)
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = train(script, model, optimizer, step)
        if not step:
            values = torch.linalg.svdvals(model[2].weight.detach())
            script.log("values", values)
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def filled(script: Script) -> None:
    """Fill masked places of the batch with other values, in order."""
    model = mlp(script)
    optimizer = sgd(model)
    for step in range(STEPS):
        x = data(script, step, 32, 16)
        x.masked_scatter_(x > 1, torch.zeros(512, device=script.device))
        loss = functional.cross_entropy(model(x), labels(script, step, 8, 32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


@case
def masked_features(script: Script) -> None:
    """Put features into masked places of a batch, as models of images and words do, with gradients of both."""
    model = mlp(script)
    features = nn.Linear(16, 16).to(script.device)
    optimizer = torch.optim.SGD([*model.parameters(), *features.parameters()], lr=0.1)
    for step in range(STEPS):
        x, mask = data(script, step, 32, 16), data(script, step + 9, 32, 1) > 0
        x = (x * 2).masked_scatter(mask, features(x).flatten()[:300].repeat(2))
        loss = functional.cross_entropy(model(x), labels(script, step, 8, 32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)
    script.log_state("features", features)


@case
def places(script: Script) -> None:
    """List places in the data, whose number depends on it, in the first steps; the others are planned."""
    model = mlp(script)
    optimizer = sgd(model)
    found = None
    for step in range(STEPS + 1):
        loss = train(script, model, optimizer, step)
        if step == 0:
            found = torch.nonzero(model[2].weight.detach() > 0)
        script.sync()
        script.log("loss", loss)
        if step == 0:
            script.log("found", found)
    script.log_state("model", model)


@case
def selected(script: Script) -> None:
    """Train on the rows that a mask selects, whose number depends on the data."""
    model = mlp(script)
    optimizer = sgd(model)
    for step in range(STEPS):
        x, y = data(script, step, 32, 16), labels(script, step, 8, 32)
        output = model(x)
        loss = functional.cross_entropy(output[y < 6], y[y < 6])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        script.sync()
        script.log("loss", loss)
    script.log_state("model", model)


UNHOOKED_FAILS = ("masked_features",)
"""Cases that PyTorch/XLA alone cannot run."""
