"""One process of `torch_xla_overhead.py`: a training loop that runs the requested numbers of steps, and times them.

`planned` runs under `xr.use_spmd(auto=True)` and reports its sharding. `all` and `arguments` read that sharding from
their first line of input, and shard the same loop by hand, with PyTorch/XLA alone. `all` marks everything that the hook
marks. `arguments` marks only parameters, states of the optimizer and batches. Each later line of input is a number of
steps.
"""

import argparse
import itertools as it
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


WARMUP = 4
"""Steps before the first timed one; nothing is compiled after the second."""

MESH = {"data": 4, "model": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("how", choices=["planned", "all", "arguments"])
    given = parser.parse_args()
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8")
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as dump:
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=NONE"
        print(json.dumps(run(given.model, given.how, Path(dump))), flush=True)


def run(model: str, how: str, dump: Path) -> dict[str, Any]:
    """Answer every line of input with the seconds of its steps; return the sharding of the loop."""
    import torch
    import torch_xla.runtime as xr

    from experiments.lib.programs.torch_xla_models import MODELS, optimizer

    if how == "planned":
        os.environ.update(XLA_AUTO_SPMD_MESH=",".join(map(str, MESH.values())), AUTOSHARD_STRICT="1")
        import autoshard.torch_xla  # noqa: F401

    xr.use_spmd(**({"auto": True} if how == "planned" else {}))
    torch.manual_seed(0)
    case = MODELS[model]()
    marks = Planned() if how == "planned" else ByHand(json.loads(sys.stdin.readline()), how == "all")
    moved = case.model.to("xla")
    updater = optimizer("adamw", moved.parameters())
    marks.model(moved)
    hosted = [case.batch() for _ in range(8)]
    batches = it.cycle(hosted)

    def step() -> tuple[float, float]:
        """Run a step; return the seconds until it is dispatched, and until its loss is on the host."""
        import torch_xla

        began = time.perf_counter()
        batch = [marks.batch(value.to("xla")) for value in next(batches)]
        updater.zero_grad()
        loss = case.loss(moved, *batch)
        loss.backward()
        updater.step()
        torch_xla.sync()
        handed = time.perf_counter()
        loss.item()
        return handed - began, time.perf_counter() - began

    step()
    marks.states(moved, updater)
    for _ in range(WARMUP - 1):
        step()
    print(json.dumps(marks.said(moved, updater)), flush=True)
    for line in sys.stdin:
        print(json.dumps([step() for _ in range(int(line))]), flush=True)
    return {"compiled": compiled(), "wire": wire(dump), "calls": hook_calls(step)}


def compiled() -> int:
    """Return the number of programs that this process has compiled."""
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0


def wire(dump: Path) -> dict[str, int]:
    """Return the bytes on the wire of one device in a step, by mesh axis, of the program that was compiled last."""
    from autoshard.cost import Topology, make_mesh
    from autoshard.exec import read_collectives, wire_by_axis

    last = max(dump.glob("*after_optimizations.txt"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    return wire_by_axis(read_collectives(last.read_text(), make_mesh(Topology.parse("cpu:8"), MESH)))


def hook_calls(step: Callable[[], Any], steps: int = 3) -> list[int]:
    """Count the calls of the hook's own functions in each of some steps."""
    counts = []
    for _ in range(steps):
        found = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal found
            found += event == "call" and "torch_xla_hook" in frame.f_code.co_filename

        sys.setprofile(count)
        step()
        sys.setprofile(None)
        counts.append(found)
    return counts


def states_of(model: Any, optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and tensor of the optimizer's state of each parameter, without counters."""
    import torch

    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor) and value.dim():
                yield f"{name}.{key}", value


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors of a module's output, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(inner)


def tupled(spec: Any) -> tuple[Any, ...]:
    """Convert a partition spec from JSON."""
    return tuple(tuple(axes) if isinstance(axes, list) else axes for axes in spec)


class Planned:
    """Sharding by the hook, which this class records."""

    def __init__(self) -> None:
        from autoshard.exec.torch_xla_hook.lifecycle import hook_session

        self._pinned: list[Any] = []
        of = hook_session.Pins.of

        def kept(*given: Any) -> Any:
            self._pinned.append(of(*given))
            return self._pinned[-1]

        setattr(hook_session.Pins, "of", kept)  # noqa: B010 (a method, to type checkers)

    def model(self, model: Any) -> None:
        pass

    def batch(self, tensor: Any) -> Any:
        return tensor

    def states(self, model: Any, optimizer: Any) -> None:
        pass

    def said(self, model: Any, updater: Any) -> dict[str, Any]:
        """Return all marks, as arguments of PyTorch/XLA's functions."""
        from autoshard.exec.torch_xla_hook import partition, session

        hook = session()
        assert hook is not None and len(hook.plans) == len(self._pinned) == 1
        specs = hook.applied.specs
        ((_, live), *_) = hook.applied.batches.values()
        return {
            "mesh": [live.devices, list(live.sizes.values()), list(live.sizes)],
            "parameters": {n: partition(specs[p]) for n, p in model.named_parameters() if p in specs},
            "states": {n: partition(specs[t]) for n, t in states_of(model, updater) if t in specs},
            "batches": [
                [list(key[0]), str(key[1]), partition(spec)] for key, (spec, _) in hook.applied.batches.items()
            ],
            "values": [
                [place.module, place.call, place.what, place.number, list(map(partition, given))]
                for (place, _), given in self._pinned[0].items()
                if place.op is None
            ],
            "ops": sum(place.op is not None for place, _ in self._pinned[0]),
        }


class ByHand:
    """Sharding as a person writes it from the plan: `xs.mark_sharding`, and hooks on the outputs of modules."""

    def __init__(self, marks: dict[str, Any], values: bool) -> None:
        import numpy as np
        import torch_xla.distributed.spmd as xs

        devices, sizes, names = marks["mesh"]
        self._live = xs.Mesh(np.array(devices), tuple(sizes), tuple(names))
        self._marks = marks
        self._values = values
        self._batches = {(tuple(shape), dtype): tupled(spec) for shape, dtype, spec in marks["batches"]}

    def model(self, model: Any) -> None:
        for name, parameter in model.named_parameters():
            if name in self._marks["parameters"]:
                self._mark(parameter, self._marks["parameters"][name])
        by_call: dict[tuple[str, int], list[Any]] = {}
        for module, call, *value in self._marks["values"] if self._values else ():
            by_call.setdefault((module, call), []).append(value)
        modules = dict(model.named_modules())
        for name in dict.fromkeys(name for name, _ in by_call):
            calls = [values for (module, _), values in by_call.items() if module == name]
            modules[name].register_forward_hook(self._hook(it.cycle(calls)))

    def _hook(self, calls: Iterator[Any]) -> Callable[..., None]:
        def after(module: Any, args: Any, output: Any) -> None:
            tensors = list(tensors_in(output))
            for what, number, specs in next(calls):
                if what == "output":
                    self._pin(tensors[number], specs)
                elif tensors[number].requires_grad:
                    tensors[number].register_hook(lambda gradient, specs=specs: self._pin(gradient, specs))

        return after

    def _pin(self, tensor: Any, specs: list[Any]) -> None:
        import torch_xla.distributed.spmd as xs

        for spec in specs[:-1]:
            xs.annotate_custom_sharding(tensor, self._live, tupled(spec))
        self._mark(tensor, specs[-1])

    def _mark(self, tensor: Any, spec: Any) -> None:
        import torch_xla.distributed.spmd as xs

        xs.mark_sharding(tensor, self._live, tupled(spec))

    def batch(self, tensor: Any) -> Any:
        self._mark(tensor, self._batches[tuple(tensor.shape), str(tensor.dtype)])
        return tensor

    def states(self, model: Any, optimizer: Any) -> None:
        import torch_xla.distributed.spmd as xs

        for name, state in states_of(model, optimizer):
            if name in self._marks["states"]:
                xs.clear_sharding(state)  # the first step gave it the spec of its gradient
                self._mark(state, self._marks["states"][name])

    def said(self, model: Any, updater: Any) -> dict[str, Any]:
        return {}


if __name__ == "__main__":
    main()
