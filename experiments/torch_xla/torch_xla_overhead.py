"""Cost of auto-sharding after the first step, and for a script that does not use it.

    python experiments/torch_xla/torch_xla_overhead.py [--only TEXT ...] [--again] [--table]

A training loop under `xr.use_spmd(auto=True)` is timed against the same loop that is sharded by hand with PyTorch/XLA
alone. The loop by hand `all` marks everything that the hook marks: parameters, states, batches, outputs of modules and
gradients. The loop by hand `arguments` marks parameters, states and batches only. Each loop is a process of its own on
8 CPU devices. The loops run a few steps in turn, so that the load of the machine is equal for all. A ratio compares two
adjacent turns. A step ends when its loss is read.

`import` starts processes that import torch_xla, in turn with and without autoshard among the installed distributions.
Rows are saved in `experiments/results/torch_xla_overhead.json`; the table is `torch_xla_overhead.md` there.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lib.harness import ROOT, Experiment, grid, page


MODELS = ("mlp", "gpt2", "llama")
IMPORT = "import"
BY_HAND = ("all", "arguments")
ROUNDS, STEPS = 40, 4
IMPORTS = 12
OWN_TIMES = 5
SCANS = 20
MARK_RATIO, MARK_IMPORT = 1.05, 0.020


class Loop:
    """A process of `torch_xla_loop.py`."""

    def __init__(self, model: str, how: str) -> None:
        self._what = f"{model}, {how}"
        self._stderr = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.lib.torch_xla_loop", model, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def __enter__(self) -> "Loop":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with self._process, self._stderr:
            pass  # waits for the process, and closes its pipes

    def tell(self, what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._stderr.seek(0)
            said = self._stderr.read().strip().splitlines()
            raise SystemExit(f"{self._what}: the process ended early: {said[-1] if said else 'it said nothing'}")
        return json.loads(line)

    def turn(self, count: int) -> list[float]:
        """Return seconds until a step is dispatched, and until its loss is read: medians of the next steps."""
        self.tell(count)
        return [statistics.median(part) for part in zip(*self.read(), strict=True)]

    def end(self) -> Any:
        """Return the loop's report at its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self.read()


def overhead(model: str, rounds: int, steps: int) -> dict[str, Any]:
    """Return seconds of steps of the planned loop and of the two sharded by hand, in turn."""
    with contextlib.ExitStack() as stack:
        loops = {"planned": stack.enter_context(Loop(model, "planned"))}
        marks = loops["planned"].read()
        for how in BY_HAND:
            loops[how] = stack.enter_context(Loop(model, how))
            loops[how].tell(marks)
            loops[how].read()
        turns: dict[str, list[Any]] = {how: [] for how in loops}
        for number in range(rounds):
            order = list(loops) if number % 2 else list(reversed(loops))
            for how in order:
                turns[how].append(loops[how].turn(steps))
        said = {how: loop.end() for how, loop in loops.items()}
    return {"turns": turns, "said": said, "values": len(marks["values"]), "ops": marks["ops"]}


def ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Divide each turn by the other loop's adjacent turn."""
    return [a / b for a, b in zip(ours, others, strict=True)]


def install(folder: Path) -> None:
    """Make this checkout an installed distribution in a folder of the path, with its entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "autoshard-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: autoshard\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


IMPORTED = """
import json, sys, time
began = time.process_time()
import torch_xla, torch_xla.runtime
print(json.dumps([time.process_time() - began, sorted(sys.modules)]))
"""

FOUND = """
import importlib.metadata, json, os, sys, time
here = os.environ["PYTHONPATH"]
others = [path for path in sys.path if path not in ("", here)]

def seconds(what):
    sys.path[:] = [os.path.join(os.path.dirname(here), what), *others]
    importlib.invalidate_caches()
    began = time.process_time()
    importlib.metadata.entry_points(group="torch.backends")
    return time.process_time() - began

print(json.dumps([[seconds(what) for what in ("without", "with")] for _ in range(TIMES)][1:]))
"""
"""Script that times torch's search for its plugins, in turn without and with autoshard."""

OWN = """
import json, time
spent = 0.0

def timed(owner, name):
    call = getattr(owner, name)
    def stopped(*args):
        global spent
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            spent += time.perf_counter() - began
    setattr(owner, name, stopped)

import importlib.abc, importlib.machinery, importlib.metadata, importlib.util
began = time.perf_counter()
import autoshard.autoload as autoload
spent = time.perf_counter() - began
timed(autoload, "autoload")
timed(autoload._Finder, "find_spec")
timed(autoload, "_ready")
import torch_xla, torch_xla.runtime
print(json.dumps([spent, torch_xla.runtime.use_spmd.__qualname__]))
"""
"""Script that times autoshard's own code during the import of torch_xla; its imported modules are torch's too."""


def imports(pairs: int) -> dict[str, Any]:
    """Return processor seconds of `import torch_xla` without and with autoshard installed, in turn.

    On a busy machine these are more reliable than wall seconds. But whole imports take seconds each, so that their
    difference is mostly noise. Therefore the addition of autoshard is also measured alone, in processes of their own.
    The keys are `own` (seconds in autoshard's code), `found` (additional seconds of the search among distributions) and
    `more` (names of additional modules).
    """
    turns: dict[str, list[float]] = {"without": [], "with": [], "own": [], "found": []}
    loaded: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what in ("without", "with"):
            (folder / what).mkdir()
            for each in Path(sysconfig.get_paths()["purelib"]).iterdir():
                if "autoshard" not in each.name:
                    (folder / what / each.name).symlink_to(each)
        install(folder / "with")
        (folder / "with" / "autoshard").symlink_to(ROOT / "autoshard")
        for number in range(pairs + 1):  # the first pair reads the disk
            for what in ("with", "without") if number % 2 else ("without", "with"):
                took, names = _child(folder / what, IMPORTED)
                loaded[what] = set(names)
                if ("autoshard" in names) != (what == "with"):
                    raise SystemExit(f"autoshard was {'' if 'autoshard' in names else 'not '}loaded {what} it.")
                turns[what].append(took)
        for _ in range(OWN_TIMES):
            spent, name = _child(folder / "with", OWN)
            if not name.startswith("_ready"):
                raise SystemExit("autoshard does not wait for xr.use_spmd.")
            turns["own"].append(spent)
        scans = _child(folder / "with", FOUND.replace("TIMES", str(SCANS + 1)))
        turns["found"] = [there - absent for absent, there in scans]
    kept = {what: times[1:] if what in loaded else times for what, times in turns.items()}
    return {"turns": kept, "more": sorted(loaded["with"] - loaded["without"])}


def _child(place: Path, script: str) -> Any:
    """Run a script and return its output; only the distributions in `place` are on its path."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(place), "PJRT_DEVICE": "CPU"},
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Format the median, and quartiles in brackets."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{show(middle)} ({show(low)} to {show(high)})"


def table(rows: Mapping[str, Any]) -> str:
    """Return the results as a page of Markdown."""
    lines = []
    for model in MODELS:
        if model not in rows:
            continue
        row = rows[model]
        turns, said = row["turns"], row["said"]
        for how in BY_HAND:
            handed, whole = zip(*turns[how], strict=True)
            ours_handed, ours = zip(*turns["planned"], strict=True)
            cells = [model, how, spread(ours, ms), spread(whole, ms), spread(ratios(ours, whole), "{:.3f}".format)]
            cells += [spread(ratios(ours_handed, handed), "{:.3f}".format), f"{row['values']}, {row['ops']}"]
            cells.append(f"{sum(said['planned']['wire'].values())}, {sum(said[how]['wire'].values())}")
            compiled = f"{said['planned']['compiled']}, {said[how]['compiled']}"
            lines.append([*cells, said["planned"]["calls"][-1], compiled, row["date"]])
    blocks = [
        "# What auto-sharding costs after the first step",
        f"""
`python experiments/torch_xla/torch_xla_overhead.py`: AdamW in fp32 on 8 CPU devices, mesh 4 x 2, median (quartiles) of
turns. A step ends when its loss is read. By hand `all` marks what the hook marks but for ops inside of
modules, which only the hook pins; `arguments` marks parameters, states and batches. Ratios are the planned
loop over the one by hand; {MARK_RATIO - 1:.0%} more is allowed over `all`.
""",
        grid(
            "model | marked by hand | planned ms | by hand ms | ratio | ratio until handed over | pins of values, of "
            "ops | bytes on the wire: planned, by hand | calls of the hook in a step | compiled: planned, "
            "by hand | date",
            lines,
        ),
    ]
    if IMPORT in rows:
        turns = rows[IMPORT]["turns"]
        more = [b - a for a, b in zip(turns["without"], turns["with"], strict=True)]
        figures = [spread(times, ms) for times in (turns["without"], turns["with"], more, turns["own"], turns["found"])]
        blocks += [
            "## A script that does not ask",
            f"`import torch_xla, torch_xla.runtime` in milliseconds of processor, {rows[IMPORT]['date']}; "
            f"{ms(MARK_IMPORT)} more are allowed.",
            grid(
                "without autoshard installed | with it | difference of a pair | in autoshard's own code "
                "| to find it | modules loaded more",
                [[*figures, ", ".join(rows[IMPORT]["more"])]],
            ),
        ]
    return page(*blocks)


def work(name: str) -> dict[str, Any]:
    """Measure one model, or imports."""
    figures = imports(IMPORTS) if name == IMPORT else overhead(name, ROUNDS, STEPS)
    return rounded(figures) | {"date": time.strftime("%Y-%m-%d")}


def rounded(found: Any) -> Any:
    """Round times to a microsecond."""
    if isinstance(found, float):
        return round(found, 6)
    if isinstance(found, dict):
        return {key: rounded(value) for key, value in found.items()}
    return [rounded(value) for value in found] if isinstance(found, (list, tuple)) else found


if __name__ == "__main__":
    sys.exit(Experiment(script=__file__, names=[*MODELS, IMPORT], work=work, table=table).run())
