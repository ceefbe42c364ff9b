"""Run the same scripts in eager torch, in PyTorch/XLA's SPMD mode and under auto-sharding, and compare their numbers.

`python -m tests.exec.torch_xla_hook.torch_xla_modes MODE MODULE NAME ...` runs the named `CASES` of a module of this
directory in one process and prints the numbers of each as a line of JSON.
"""

import importlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tests.exec.torch_xla_hook.torch_xla_processes import run_module


Numbers = list[tuple[str, list[int], str, list[float]]]
"""Name, shape, dtype and values of each logged tensor, in order."""


class Script:
    """One run of a case: its device, its step boundaries, and the numbers that it logs."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.numbers: Numbers = []

    def sync(self) -> None:
        """End a step."""
        if self.device == "xla":
            import torch_xla

            torch_xla.sync()

    def mark(self, tensor: Any, names: tuple[str | None, ...]) -> None:
        """Split a tensor by hand over the 8 devices of one axis, `data`."""
        if self.device == "xla":
            import torch_xla.distributed.spmd as xs

            xs.mark_sharding(tensor, xs.Mesh(np.arange(8), (8,), ("data",)), names)

    def log(self, name: str, value: Any) -> None:
        """Record a tensor's values, which reads them."""
        here = value.detach().cpu()
        flat = here.double().flatten().tolist()
        self.numbers.append((name, list(here.shape), str(here.dtype), flat))

    def log_state(self, name: str, module: Any) -> None:
        """Record all parameters and buffers of a module."""
        for key, value in module.state_dict().items():
            self.log(f"{name}.{key}", value)


Case = Callable[[Script], None]


def eager(module: str, name: str) -> Numbers:
    """Return the numbers of a case in eager torch on the host."""
    script = Script("cpu")
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PyTorch's own, about hooks and layouts
            _case(module, name)(script)
    finally:
        torch.set_num_threads(threads)
    return script.numbers


def run_mode(mode: str, module: str, *names: str, **environment: str) -> dict[str, dict[str, Any]]:
    """Run cases in one process in `spmd` or `auto` mode. Return numbers, warnings and counts of compilations,
    executions and reads by name.
    """
    here = {"XLA_AUTO_SPMD_MESH": "4,2"} | environment
    return run_module("torch_xla_modes", (mode, module), names, **here)


def worst(numbers: Numbers, expected: Numbers, least: float = 1e-6) -> tuple[float, str]:
    """Return the largest difference, as a part of the largest value of its tensor, and the name of that tensor.

    A tensor whose values are all smaller than `least` counts as one of that size: its sums cancel to rounding. Numbers
    of another name, shape or dtype, and infinities where none are expected, differ by infinity.
    """
    differences = [(0.0, "")]
    if len(numbers) != len(expected):
        return float("inf"), f"{len(numbers)} tensors for {len(expected)}"
    for (name, *form, values), (other, *other_form, right) in zip(numbers, expected, strict=True):
        if (name, form) != (other, other_form):
            return float("inf"), f"{name} {form} for {other} {other_form}"
        one, two = torch.tensor(values, dtype=torch.float64), torch.tensor(right, dtype=torch.float64)
        if one.numel() and not torch.equal(one, two):
            off = float((one - two).abs().max() / two.abs().max().clamp(min=least))
            differences.append((off if off < float("inf") else float("inf"), name))
    return max(differences)


def check_costs(planned: Mapping[str, Any], unplanned: Mapping[str, Any]) -> None:
    """Assert that a planned run executes and reads no more than an unplanned one, and compiles one program more for
    each plan at most.
    """
    assert planned["executions"] <= unplanned["executions"]
    assert planned["reads"] <= unplanned["reads"]
    assert planned["compiles"] <= unplanned["compiles"] + planned["plans"]


def _case(module: str, name: str) -> Case:
    return importlib.import_module(f"tests.exec.torch_xla_hook.{module}").CASES[name]


def _run_here(mode: str, module: str, name: str) -> dict[str, Any]:
    import torch_xla
    import torch_xla.debug.metrics as metrics

    torch.manual_seed(0)
    torch_xla.manual_seed(0)
    before, read = _counts(metrics), _bytes_read(metrics)
    script = Script("xla")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _case(module, name)(script)
    after = _counts(metrics)
    return {
        "numbers": script.numbers,
        "compiles": after["CompileTime"] - before["CompileTime"],
        "executions": after["ExecuteReplicatedTime"] - before["ExecuteReplicatedTime"],
        "reads": after["TransferFromDeviceTime"] - before["TransferFromDeviceTime"],
        "bytes": _bytes_read(metrics) - read,
        "warned": [str(each.message) for each in caught if "autoshard" in str(each.message)],
    }


def _counts(metrics: Any) -> Mapping[str, int]:
    names = ("CompileTime", "ExecuteReplicatedTime", "TransferFromDeviceTime")
    return {name: (metrics.metric_data(name) or (0,))[0] for name in names}


def _bytes_read(metrics: Any) -> int:
    """Return the bytes that the process has copied from devices to the host."""
    return int((metrics.metric_data("InboundData") or (0, 0))[1])


def main() -> None:
    """Run the cases that the command line names."""
    import torch_xla.runtime as xr

    mode, module, *names = sys.argv[1:]
    if mode == "auto":
        import autoshard.torch_xla

    xr.use_spmd(auto=mode == "auto")
    for name in names:
        planned = len(autoshard.torch_xla.session().plans) if mode == "auto" else 0
        row = _run_here(mode, module, name)
        if mode == "auto":
            row["plans"] = len(autoshard.torch_xla.session().plans) - planned
        print("found " + json.dumps({"name": name} | row), flush=True)


if __name__ == "__main__":
    main()
