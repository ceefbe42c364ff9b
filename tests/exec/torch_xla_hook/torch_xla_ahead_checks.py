"""Scripts for `test_torch_xla_ahead.py`: models that would fill more than half of a device's memory unsplit."""

import threading
import time
import warnings
from pathlib import Path
from typing import Any

from tests.exec.torch_xla_hook.torch_xla_checks import Check, difference, plans, report, spec
from tests.exec.torch_xla_hook.torch_xla_scripts_checks import on, step


CHECKS: dict[str, Check] = {}


def script(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


WIDTH, LAYERS = 1792, 24
"""300 million bytes of parameters."""


def blocks(odd: bool = False) -> Any:
    """Build a stack of layers with residuals. A copy of an `odd` one fails."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
            self.head = torch.nn.Linear(WIDTH, 16)

        def forward(self, x: Any) -> Any:
            if odd:
                raise_if_copied(self)
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return self.head(x)

    return Net()


def raise_if_copied(model: Any) -> None:
    """Raise in a copy of the module, as a module with a registry of itself would."""
    if id(model) not in KNOWN:
        raise RuntimeError("who is this")


KNOWN: set[int] = set()


class Resident:
    """Largest growth of this process in bytes since the context was entered."""

    def __enter__(self) -> "Resident":
        self.first = self.most = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.is_set():
            self.most = max(self.most, self._now())
            time.sleep(0.002)

    def _now(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    @property
    def growth(self) -> int:
        return self.most - self.first


def trained(device: str, odd: bool = False) -> dict[str, Any]:
    """Train three steps of a module on `device`. Its optimizer is built before any tensor is on the devices."""
    import torch
    import torch_xla

    torch.manual_seed(1)
    plain = blocks()
    on()
    torch.manual_seed(1)
    with torch.device(device):
        model = blocks(odd)
    KNOWN.add(id(model))
    model.to("xla")
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    size = sum(each.numel() * each.element_size() for each in plain.parameters())
    batches = [(torch.randn(16, WIDTH), torch.randn(16, 16)) for _ in range(3)]
    losses, growth = [], []
    torch.manual_seed(1)  # parameters created in the first call equal the plain ones
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y in batches:
            with Resident() as resident:
                loss = step(model, ours, x.to("xla"), y.to("xla"))
                torch_xla.sync()
                losses.append(loss.item())
            growth.append(resident.growth / size)
    expected = [step(plain, theirs, x, y).item() for x, y in batches]
    return {
        "growth": growth,
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
        "parameters": max(difference(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)),
        "split": sum(spec(p).startswith("{devices=") for p in model.parameters()) / len([*model.parameters()]),
        "said": [str(each.message) for each in said if "autoshard" in str(each.message)],
        "plans": len(plans()),
    }


@script
def on_the_host() -> dict[str, Any]:
    return trained("cpu")


@script
def on_meta() -> dict[str, Any]:
    return trained("meta")


@script
def not_copied() -> dict[str, Any]:
    return trained("cpu", odd=True)


if __name__ == "__main__":
    report(CHECKS)
