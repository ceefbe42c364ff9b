"""One process of `torch_xla_scripts.py`: run one of the scripts in `torch_xla/programs`, and report its observations.

    python -m experiments.lib.torch_xla_script NAME {hooked,unhooked,host} [--nudged]

The script runs unchanged, except that `print` is replaced by a function that records its numbers. A line that begins
with "step" ends a step.

After `WARM` steps the process runs `TURN` steps for each line of its input. It runs the last `COUNTED` steps with the
hook's own functions timed. Compilations are counted before those steps. The traffic of later steps is read from the
programs that XLA runs. The first turn reports the times of the first steps and the peak memory of the process too.

`--nudged` moves every parameter by one unit in the last place before it moves to the device. The run shows the effect
of rounding alone on the losses. On the `host` the script is plain PyTorch: the device is the CPU, and there are no step
boundaries.
"""

import argparse
import functools
import json
import os
import resource
import runpy
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from experiments.lib.torch_xla_run import EXECUTED


PROGRAMS = Path(__file__).parents[1] / "torch_xla" / "programs"
MESH = "4,2"
STEPS, FIRST, WARM, TURN, COUNTED = 28, 2, 6, 3, 4
"""Steps of every script, steps that compile, steps before the first turn, steps of a turn, and last steps with a timed
hook.
"""


def script(name: str) -> Path:
    """Return the file of a script, in one of the folders of `PROGRAMS`."""
    (path,) = PROGRAMS.glob(f"*/{name}.py")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("how", choices=["hooked", "unhooked", "host"])
    parser.add_argument("--nudged", action="store_true")
    given = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the results
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8", TOKENIZERS_PARALLELISM="false")
    dump = Path(tempfile.mkdtemp())
    if given.how == "hooked":
        os.environ["XLA_AUTO_SPMD_MESH"] = MESH
    if given.how != "host":  # written in both modes, since it takes part of a first step
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=NONE"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = Told(out, dump, STEPS if given.how == "host" else WARM)
        if given.how == "host":
            exec(on_cpu(given.name), {"print": told, "__name__": "__main__"})
        else:
            run_on_xla(given.name, given.how == "hooked", given.nudged, told, dump)
        said = list(dict.fromkeys(str(each.message) for each in caught if "autoshard" in str(each.message)))
        json.dump({"end": told.found | {"said": said}}, out)
    out.flush()
    shutil.rmtree(dump, ignore_errors=True)
    os._exit(0)  # torch_xla takes seconds to end


def run_on_xla(name: str, hooked: bool, nudged: bool, told: "Told", dump: Path) -> None:
    """Run a script on 8 devices in SPMD mode."""
    import torch_xla.runtime as xr

    import autoshard.torch_xla  # noqa: F401

    xr.use_spmd(**({"auto": True} if hooked else {}))
    if hooked:
        note_plans(dump)
    if nudged:
        nudge()
    runpy.run_path(str(script(name)), {"print": told}, "__main__")


HOST = {
    '"xla"': '"cpu"',
    "torch_xla.device()": '"cpu"',
    "xm.xla_device()": '"cpu"',
    "torch_xla.sync()": "None",
    "xm.mark_step()": "None",
    "xm.optimizer_step(optimizer)": "optimizer.step()",
}
"""Expressions of a script for the XLA device, and their replacements for the CPU."""


def on_cpu(name: str) -> str:
    """Return a script's text without XLA devices."""
    text = script(name).read_text()
    for ours, theirs in HOST.items():
        text = text.replace(ours, theirs)
    return text


def nudge() -> None:
    """Wrap `Module.to` so that it moves parameters by one unit in the last place before they go to the device."""
    import torch

    modules: Any = torch.nn.Module
    to = modules.to

    @functools.wraps(to)
    def moved(module: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.device.type == "cpu" and parameter.is_floating_point():
                    parameter.mul_(1 + torch.finfo(parameter.dtype).eps)
        return to(module, *args, **kwargs)

    modules.to = moved


class Told:
    """Replacement of `print` in a script."""

    def __init__(self, out: TextIO, dump: Path, warm: int) -> None:
        self._out = out
        self._dump = dump
        self._warm = warm
        self._steps = 0
        self._turn: list[float] = []
        self._numbers: list[list[float]] = []
        self._own: Own | None = None
        self._shares: list[float] = []
        self._compiled: list[int] = []
        self._firsts: list[list[float]] = []
        self.found: dict[str, Any] = {}
        self._began = now()

    def __call__(self, *words: Any, **_: Any) -> None:
        numbers = [float(word) for word in words if isinstance(word, float)]
        took, processor = (end - start for start, end in zip(self._began, now(), strict=True))
        self._numbers.append(numbers)
        if words[0] == "step":
            if self._steps < FIRST:
                self._firsts.append([took, processor])
            self._step(took)
        elif self._own is not None:
            self._own.take()  # discards the time before the first step
        self._began = now()

    def _step(self, took: float) -> None:
        self._steps += 1
        if self._own is None:  # the timed functions cause new compilations
            self._compiled.append(compiled())
        if self._own is not None:
            self._shares.append(self._own.take() / took)
        elif self._steps > self._warm:
            self._turn.append(took)
        if self._steps == STEPS:
            self._end()
        elif self._warm <= self._steps <= STEPS - COUNTED and (self._steps - WARM) % TURN == 0:
            first = {"firsts": self._firsts, "peak": peak()} if self._steps == self._warm else {}
            self._out.write(json.dumps({"turn": self._turn} | first) + "\n")
            self._out.flush()
            self._turn = []
            sys.stdin.readline()
            if self._steps == STEPS - COUNTED:
                self._own = Own()

    def _end(self) -> None:
        """Collect the results before the script frees its tensors."""
        told = {"shares": self._shares, "numbers": self._numbers, "compiled": self._compiled}
        self.found = told | {"host": on_host(), "wire": wire(self._dump)} | parameters()


class Own:
    """Timer of the hook's own functions, counting the outermost call of each thread."""

    def __init__(self) -> None:
        from autoshard.exec.torch_xla_hook.lifecycle import hook_session
        from autoshard.exec.torch_xla_hook.pins import input_placement, later_steps, pin_hooks
        from autoshard.exec.torch_xla_hook.values import module_hooks

        self._spent = 0.0
        self._inside = threading.local()
        for owner, names in (
            (module_hooks.ModuleHook, ("__call__",)),
            (pin_hooks.PinnedOps, ("before", "after", "__enter__", "__exit__")),
            (pin_hooks.CallPins, ("_constrain",)),
            (hook_session.Session, ("on_call", "on_sync", "on_read", "whole")),
            (input_placement.PlannedInputs, ("xla_spec", "can_apply")),
            (later_steps.LaterMarks, ("mark_input", "mark_batch")),
        ):
            for name in names:
                setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "now", False):
                return function(*args, **kwargs)
            self._inside.now = True
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._spent += time.perf_counter() - began
                self._inside.now = False

        return run

    def take(self) -> float:
        """Return the seconds since the last call."""
        spent, self._spent = self._spent, 0.0
        return spent


def now() -> tuple[float, float]:
    """Return wall and processor seconds."""
    return time.perf_counter(), time.process_time()


def peak() -> int:
    """Return the most bytes of memory that the process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def compiled() -> int:
    """Return the number of programs that XLA has compiled, including those that gather a split tensor for the host."""
    import torch_xla.debug.metrics as metrics

    return (metrics.metric_data("CompileTime") or (0,))[0]


_planned_at: list[int] = []
"""Number of dumped programs when each plan was made: the next program is the plan's first step."""


def note_plans(dump: Path) -> None:
    """Record for each plan which program is its first step."""
    from autoshard.exec.torch_xla_hook.lifecycle import hook_session

    modules: Any = hook_session
    replay = modules.replay

    @functools.wraps(replay)
    def noted(*args: Any) -> Any:
        _planned_at.append(len(list(dump.glob(EXECUTED))))
        return replay(*args)

    modules.replay = noted


def wire(dump: Path) -> list[dict[str, Any]]:
    """Return for each plan the bytes on the wire by mesh axis: planned, and sent in later steps.

    Plans without later steps are left out. A later step is the first program after the plan's own and before the next
    plan's with at least half as many products. Programs with fewer products end a step that is cut, or apply
    accumulated gradients.
    """
    import autoshard.torch_xla
    from autoshard.exec import plan_mesh, read_collectives, wire_by_axis
    from autoshard.exec.hlo.hlo_text import parse_hlo

    session = autoshard.torch_xla.session()
    if session is None:
        return []
    modules = [parse_hlo(path.read_text()) for path in sorted(dump.glob(EXECUTED))]
    counts = [
        sum(op.opcode in PRODUCTS for each in module.computations.values() for op in each.instructions)
        for module in modules
    ]
    traffic = []
    for plan, first, end in zip(session.plans, _planned_at, [*_planned_at[1:], len(modules)], strict=True):
        later = [number for number in range(first + 1, end) if 2 * counts[number] >= counts[first]]
        if later and counts[first]:
            sent = wire_by_axis(read_collectives(modules[later[0]], plan_mesh(plan)))
            traffic.append({"planned": plan.prediction.wire_bytes, "sent": sent})
    return traffic


PRODUCTS = ("dot", "convolution")


def on_host() -> list[str]:
    """List the ops that PyTorch/XLA computed on the host for lack of a kernel; reads of a number do not count."""
    import torch_xla.debug.metrics as metrics

    names = (name for name in metrics.counter_names() if name.startswith("aten::"))
    return sorted(name for name in names if name != "aten::_local_scalar_dense")


def parameters() -> dict[str, Any]:
    """Count split and all parameters on the device, their elements, and the plans."""
    import torch

    import autoshard.torch_xla
    from autoshard.exec.torch_xla_hook import is_split, sharding_text
    from autoshard.exec.torch_xla_hook.values.lazy_tensors import live_on_xla

    there = [each for each in live_on_xla() if isinstance(each, torch.nn.Parameter)]
    split = [each for each in there if is_split(sharding_text(each))]
    session = autoshard.torch_xla.session()
    plans = [] if session is None else session.plans
    return {
        "parameters": [len(split), len(there)],
        "elements": [sum(each.numel() for each in split), sum(each.numel() for each in there)],
        "plans": len(plans),
        "notes": list(dict.fromkeys(note for plan in plans for note in plan.warnings)),
    }


if __name__ == "__main__":
    main()
