"""Cost of auto-sharding after the first step, and for a script that does not use it.

    python experiments/torch_xla/torch_xla_overhead.py [ROW ...] [--again] [--table]

A training loop under `xr.use_spmd(auto=True)` is timed against the same loop that is sharded by hand with PyTorch/XLA
alone. The loop by hand `all` marks everything that the hook marks: parameters, states, batches, outputs of modules and
gradients. The loop by hand `arguments` marks parameters, states and batches only. Each loop is a process of its own on
8 CPU devices. The loops run a few steps in turn, so that the load of the machine is equal for all. A ratio compares two
adjacent turns. A step ends when its loss is read.

`import` starts processes that import torch_xla, in turn with and without autoshard among the installed distributions.
Rows are saved in `experiments/results/torch_xla_overhead.json`; the table is `torch_xla_overhead.md` there.
"""

import argparse
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


sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.lib.saved_results import Results  # noqa: E402


ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results" / "torch_xla_overhead.json"
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
    lines = [
        "# What auto-sharding costs after the first step",
        "",
        "`python experiments/torch_xla/torch_xla_overhead.py`: AdamW in fp32 on 8 CPU devices, mesh 4 x 2, median",
        "(quartiles) of",
        "turns. A step ends when its loss is read. By hand `all` marks what the hook marks but for ops inside of",
        "modules, which only the hook pins; `arguments` marks parameters, states and batches. Ratios are the planned",
        f"loop over the one by hand; {MARK_RATIO - 1:.0%} more is allowed over `all`.",
        "",
        "| model | marked by hand | planned ms | by hand ms | ratio | ratio until handed over | pins of values, of ops "
        "| bytes on the wire: planned, by hand | calls of the hook in a step | compiled: planned, by hand | date |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model in MODELS:
        if model not in rows:
            continue
        row = rows[model]
        turns, said = row["turns"], row["said"]
        for how in BY_HAND:
            handed, whole = zip(*turns[how], strict=True)
            ours_handed, ours = zip(*turns["planned"], strict=True)
            lines.append(
                f"| {model} | {how} | {spread(ours, ms)} | {spread(whole, ms)} "
                f"| {spread(ratios(ours, whole), '{:.3f}'.format)} "
                f"| {spread(ratios(ours_handed, handed), '{:.3f}'.format)} | {row['values']}, {row['ops']} "
                f"| {sum(said['planned']['wire'].values())}, {sum(said[how]['wire'].values())} "
                f"| {said['planned']['calls'][-1]} | {said['planned']['compiled']}, {said[how]['compiled']} "
                f"| {row['date']} |"
            )
    if IMPORT in rows:
        turns = rows[IMPORT]["turns"]
        more = [b - a for a, b in zip(turns["without"], turns["with"], strict=True)]
        lines += [
            "",
            "## A script that does not ask",
            "",
            f"`import torch_xla, torch_xla.runtime` in milliseconds of processor, {rows[IMPORT]['date']}; "
            f"{ms(MARK_IMPORT)} more are allowed.",
            "",
            "| without autoshard installed | with it | difference of a pair | in autoshard's own code "
            "| to find it | modules loaded more |",
            "| --- | --- | --- | --- | --- | --- |",
            f"| {spread(turns['without'], ms)} | {spread(turns['with'], ms)} | {spread(more, ms)} "
            f"| {spread(turns['own'], ms)} | {spread(turns['found'], ms)} | {', '.join(rows[IMPORT]['more'])} |",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join([*MODELS, IMPORT])} (default: all)")
    parser.add_argument("--again", action="store_true", help="also rows that are there")
    parser.add_argument("--table", action="store_true", help="only write the table of what is known")
    given = parser.parse_args()
    if unknown := [row for row in given.rows if row not in (*MODELS, IMPORT)]:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join([*MODELS, IMPORT])}")
    results = Results(RESULTS)
    for key in () if given.table else given.rows or (*MODELS, IMPORT):
        if key in results.rows and not given.again:
            continue
        print(key, flush=True)
        figures = imports(IMPORTS) if key == IMPORT else overhead(key, ROUNDS, STEPS)
        results.keep(key, rounded(figures) | {"date": time.strftime("%Y-%m-%d")})
    text = table(results.rows)
    RESULTS.with_suffix(".md").write_text(text)
    print(text)


def rounded(found: Any) -> Any:
    """Round times to a microsecond."""
    if isinstance(found, float):
        return round(found, 6)
    if isinstance(found, dict):
        return {key: rounded(value) for key, value in found.items()}
    return [rounded(value) for value in found] if isinstance(found, (list, tuple)) else found


if __name__ == "__main__":
    main()
