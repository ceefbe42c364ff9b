"""Whole scripts as people write them, each run under auto-sharding and without it.

    python experiments/torch_xla/torch_xla_scripts.py [--only TEXT ...] [--again] [--table]

Every file of `torch_xla/programs` is a script that knows nothing of autoshard. It runs in two processes in SPMD mode on
8 CPU devices. In `hooked`, `xr.use_spmd(auto=True)` plans for a mesh of 4 x 2. In `unhooked`, `xr.use_spmd()` leaves
every tensor whole on every device. All numbers that the script prints are compared, and programs compiled by the end
are counted. The processes run a few steps in turn, so that the load of the machine is equal for both. The ratio of
steps is the median over adjacent turns. The hook's own share is timed in the hooked process alone, as the time in its
outermost functions over that of the step. If numbers differ by more than is allowed, two more runs follow. The third
run shows the effect of rounding alone: unhooked, with every parameter moved by one unit in its last place. The fourth
run is plain PyTorch on the CPU, whose distance from the unhooked run is rounding too. The traffic of later steps is
read from the program that XLA runs in them, by mesh axis, and compared with their plan. The table shows the axis that
differs most, of the axes with at least 1% of the plan's bytes.

The first steps of the scripts in `programs/larger` are timed too, and the peak memory of their processes is read. For
them a hooked and an unhooked process come first, one after the other, and nothing is in the cache of decisions. The
processes that run in turn follow, and the hooked one finds its decision there.

Some scripts compile more with the hook, and the table has the causes. A planned step is a program of its own, while
without the hook the program of the first step is used again. A step may be cut by ops that PyTorch/XLA computes on the
host, or by numbers that are read in it. Such a step has pieces that run whole before there is a plan.

Rows are saved in `experiments/results/torch_xla_scripts.json`; the table is `torch_xla_scripts.md` there.
"""

import ast
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from experiments.lib.harness import ROOT, Experiment, Rows, grid, page, plain


PROGRAMS = {path.stem: path for path in sorted((ROOT / "experiments/torch_xla/programs").glob("*/*.py"))}
LIMIT_S = 900.0
ALLOWED, OVERHEAD, WIRE = 1e-5, 0.05, 0.05
STEP_MARK, FIRST_MARK, MEMORY_MARK = 1.0, 1.3, 1.0
"""Largest ratios of larger scripts to the unhooked run: of a step's time, the first step's time, and peak memory."""

MORE = {
    "accelerated": "the first small batch's planned step, which no later one repeats",
    "accumulation": "the first small batch's planned step, which no later one repeats, nor what adds to its gradients",
    "adafactor": "norms are read in the middle of the first update: two run before the plan, and pieces of it after",
    "compiled_inference": "the planned first call runs uncompiled, the others as dynamo's program",
    "dlrm": "gradients of four bags, on the host: with nothing split before there is a plan",
    "evaluated_between": "the first planned evaluation, and what is read of its results",
    "evaluated_first": "evaluation is planned before training and again after it",
    "hf_trainer": "the first planned evaluation; batches that the loader had sent before there was a plan",
    "parametrized": "a spectral norm with nothing split before there is a plan, and once with its results",
    "policy_gradient": "playing is planned before training and again after it",
    "schedule": "the loss, on the host: with nothing split before there is a plan",
    "short_batches": "the first planned short batch",
    "two_towers": "a piece of its step, with nothing split before there is a plan",
}
"""Additional compilations with the hook, as PyTorch/XLA's log (`PT_XLA_DEBUG_LEVEL=2`) shows."""


SENDS = {
    "accelerated": "its later small batches end in the update, of which the planned one has nothing",
    "adafactor": "its steps are cut: the plan is of a piece",
    "dlrm": "its steps are cut: the plan is of a piece",
    "gradient_penalty": "gradients of gradients are not pinned",
    "gru": "inside of a loop nothing is pinned",
    "lstm": "what a layer gives is gathered for its own gradients, and again where the next layer takes it, stacked",
    "parametrized": "its steps are cut: the plan is of a piece",
    "two_towers": "its steps are cut: the plan is of a piece",
}
"""Reasons of traffic in later steps that differs from the plan, as the compiled programs show."""


class Run:
    """A process of `torch_xla_script.py`, which waits for its turns."""

    def __init__(self, name: str, *how: str, cache: str = "") -> None:
        self._stderr = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.lib.torch_xla_script", name, *how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "AUTOSHARD_CACHE_DIR": cache},
        )
        self._late = threading.Timer(LIMIT_S, self._process.kill)
        self._late.start()
        self.first: dict[str, Any] = {}
        self.end: dict[str, Any] | None = None

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self._late.cancel()
        self._process.kill()
        with self._process, self._stderr:
            pass  # waits for the process, and closes its pipes

    def turn(self) -> list[float]:
        """Return the seconds of the steps until the process waits; at its end an empty list, and `end` has its
        report. The first turn sets `first`: times of the first steps, and peak memory.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._stderr.seek(0)
            errors = [line for line in self._stderr.read().strip().splitlines() if "GSPMD" not in line]
            raise RuntimeError(errors[-1] if errors else f"it ended with {self._process.returncode}")
        record = json.loads(line)
        self.end = record.get("end")
        self.first |= {key: record[key] for key in ("firsts", "peak") if key in record}
        return record.get("turn", [])

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()


def compare(name: str) -> dict[str, Any]:
    """Run a script in both ways, and compare."""
    turns: dict[str, list[list[float]]] = {"hooked": [], "unhooked": []}
    firsts: dict[str, list[dict[str, Any]]] = {"hooked": [], "unhooked": []}
    ends: dict[str, dict[str, Any]] = {}
    try:
        with contextlib.ExitStack() as stack:
            cache = stack.enter_context(tempfile.TemporaryDirectory())
            if is_larger(name):
                for how in turns:
                    with Run(name, how, cache=cache) as run:
                        run.turn()
                        firsts[how].append(run.first)
            runs: dict[str, Run] = {}
            for how in turns:  # one after the other, so that first steps have the machine to themselves
                runs[how] = stack.enter_context(Run(name, how, cache=cache))
                runs[how].turn()
                firsts[how].append(runs[how].first)
            for run in runs.values():
                run.go_on()
            number = 0
            while len(ends) < 2:
                for how in list(runs) if number % 2 else reversed(list(runs)):
                    seconds = runs[how].turn()
                    if (end := runs[how].end) is not None:
                        ends[how] = end
                    else:
                        turns[how].append(seconds)
                        runs[how].go_on()
                number += 1
    except (RuntimeError, BrokenPipeError) as error:
        return {"error": str(error)[:300]}
    ours, theirs = ends["hooked"], ends["unhooked"]
    off = difference(ours["numbers"], theirs["numbers"])
    row = {
        "difference": off,
        "numbers": sum(map(len, theirs["numbers"])),
        "first": theirs["numbers"][0],
        "last": theirs["numbers"][-1],
        "compiled": [ours["compiled"][-1], theirs["compiled"][-1]],
        "compiled by step": [ours["compiled"], theirs["compiled"]],
        "turns": turns,
        "firsts": firsts,
        "shares": ours["shares"],
        "wire": ours["wire"],
        **{key: ours[key] for key in ("parameters", "elements", "plans", "notes", "said")},
        "host": [ours["host"], theirs["host"]],
    }
    if off > ALLOWED:
        row["rounding"] = apart(theirs["numbers"], name, "unhooked", "--nudged")
        row["hooked to host"] = apart(ours["numbers"], name, "host")
        row["unhooked to host"] = apart(theirs["numbers"], name, "host")
    return row


def is_larger(name: str) -> bool:
    """Return True for a script whose first steps and memory are compared."""
    return PROGRAMS[name].parent.name == "larger"


def apart(numbers: Sequence[Sequence[float]], name: str, *how: str) -> float | str:
    """Return the difference of these numbers from those of another run, or that run's error."""
    try:
        with Run(name, *how) as run:
            run.turn()
            while run.end is None:
                run.go_on()
                run.turn()
            return difference(numbers, run.end["numbers"])
    except (RuntimeError, BrokenPipeError) as error:
        return str(error)[:300]


def difference(numbers: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """Return the largest relative difference of any number.

    The divisor is at least a hundredth of the largest number printed in the same place.
    """
    if [len(each) for each in numbers] != [len(each) for each in others]:
        return float("inf")
    largest: dict[tuple[int, int], float] = {}
    for row in others:
        for place, value in enumerate(row):
            largest[len(row), place] = max(largest.get((len(row), place), 0.0), abs(value))
    most = 0.0
    for ours, theirs in zip(numbers, others, strict=True):
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if (a == b) or (math.isnan(a) and math.isnan(b)):
                continue
            off = abs(a - b) / max(abs(b), largest[len(theirs), place] / 100)
            most = max(most, math.inf if math.isnan(off) else off)
    return most


def ratios(row: dict[str, Any]) -> list[float]:
    """Divide each turn by the other process's adjacent turn."""
    pairs = zip(row["turns"]["hooked"], row["turns"]["unhooked"], strict=True)
    return [statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs]


def verdict(row: dict[str, Any], more: str = "", sends: str = "") -> str:
    """Describe the shortcomings of a row; empty if there are none.

    `more` is the reason of more compilations, `sends` the reason of unplanned traffic.
    """
    short = []
    if row["difference"] > ALLOWED:
        if is_within(row["hooked to host"], ALLOWED):
            short.append("as plain PyTorch; PyTorch/XLA alone differs from that")
        elif any(is_within(row["difference"], row[key], 2.0) for key in ("rounding", "unhooked to host")):
            short.append("differs as rounding does")
        else:
            short.append("DIFFERS")
    if row["compiled"][0] > row["compiled"][1]:
        short.append(f"compiles more ({more})" if more else "compiles more")
    if statistics.median(ratios(row)) > 1 + OVERHEAD:
        short.append("slower")
    if (sent := on_the_wire(row)) is not None and abs(sent[1]) > WIRE:
        short.append(f"sends {'more' if sent[1] > 0 else 'less'}" + (f" ({sends})" if sends else ""))
    if not row["parameters"][0]:
        short.append("only the batch is split")
    return ", ".join(short)


def on_the_wire(row: dict[str, Any]) -> tuple[str, float] | None:
    """Return the mesh axis on which later steps differ most from their plan, and its relative difference; None if
    none.
    """
    differences: list[tuple[str, float]] = []
    for each in row["wire"]:
        planned = {axis: size for axis, size in each["planned"].items() if size > 0.01 * sum(each["planned"].values())}
        differences += [(axis, each["sent"].get(axis, 0) / size - 1) for axis, size in planned.items()]
    return max(differences, key=lambda pair: abs(pair[1]), default=None)


def is_within(found: float | str, most: float | str, times: float = 1.0) -> bool:
    """Return True if a difference is known and at most `times * most`."""
    return not isinstance(found, str) and not isinstance(most, str) and found <= times * most


def table(rows: Rows) -> str:
    """Return the known results as a page of Markdown."""
    lines = []
    for name, row in rows.items():
        what = str(ast.get_docstring(ast.parse(PROGRAMS[name].read_text())))
        if "error" in row:
            lines.append([f"{name} | {what} | | | | | | | | |", row["error"]])
            continue
        steps = [1e3 * statistics.median(sum(row["turns"][how], [])) for how in ("hooked", "unhooked")]
        low, middle, high = statistics.quantiles(ratios(row), n=4)
        off = f"{row['difference']:.1e}"
        if "rounding" in row:
            off += f" ({', '.join(shown(row[key]) for key in ('rounding', 'hooked to host', 'unhooked to host'))})"
        (split, count), (part, whole) = row["parameters"], row["elements"]
        cells = [
            name,
            what,
            str(row["numbers"]),
            off,
            f"{row['compiled'][0]}, {row['compiled'][1]}",
            f"{steps[0]:.1f}, {steps[1]:.1f}",
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
            f"{statistics.median(row['shares']):.1%}",
            f"{split} of {count}, {part / max(whole, 1):.0%}",
            str(row["plans"]),
            "" if (sent := on_the_wire(row)) is None else f"{sent[0]} {sent[1]:+.1%}",
            "; ".join(
                [
                    *filter(None, [verdict(row, MORE.get(name, ""), SENDS.get(name, ""))]),
                    *row["said"],
                    *on_host(row),
                ]
            ),
        ]
        lines.append([plain(cell) for cell in cells])
    return page(
        "# Whole scripts under auto-sharding, and without it",
        *str(__doc__).split("\n\n")[2:5],
        *costs(rows),
        "## All scripts",
        summary(rows),
        grid(
            "script | what it is | numbers | largest difference (of rounding alone; hooked, unhooked to "
            "plain PyTorch) | compiled, unhooked | ms a step, unhooked | ratio (quartiles) | the hook's own share | "
            "parameters split, by number and by size | plans | sent by later steps, to the plan | falls short",
            lines,
        ),
    )


def costs(rows: Rows) -> list[str]:
    """Return a table of the costs of larger scripts with their marks; empty without such rows."""
    lines = []
    for name, row in rows.items():
        if not is_larger(name) or "error" in row:
            continue
        (cold, cached), theirs = row["firsts"]["hooked"], row["firsts"]["unhooked"]
        cells = [name.removeprefix("larger_"), marked(statistics.median(ratios(row)), STEP_MARK)]
        for part in (cold, cached):
            wall, processor = (
                part["firsts"][0][clock] / statistics.mean(each["firsts"][0][clock] for each in theirs)
                for clock in range(2)
            )
            cells.append(f"{marked(processor, FIRST_MARK)} ({wall:.2f})")
        steps = [each["firsts"] for each in (cold, cached, *theirs)]
        cells.append("; ".join(", ".join(f"{processor:.1f}" for _, processor in each) for each in steps))
        cells.append(f"{row['compiled'][0]}, {row['compiled'][1]}")
        most = [max(each["peak"] for each in part) for part in ([cold], theirs)]
        lines.append([*cells, marked(most[0] / most[1], MEMORY_MARK), f"{most[0] / 1e9:.1f}, {most[1] / 1e9:.1f}"])
    if not lines:
        return []
    return [
        "## Costs of larger scripts",
        f"The models are scaled down, so that a row takes two minutes on two idle cores. Ratios are of the hooked run "
        f"to the unhooked one. Bold ones exceed the marks: {STEP_MARK:g} for a step and for the peak memory of the "
        f"process, {FIRST_MARK:g} for a first step. First steps include tracing, planning, compilation and the run. "
        "Their figures are processor seconds, with the ratio of wall seconds in brackets, since the machine is shared. "
        "The second step compiles too, in both modes.",
        grid(
            "script | step | first step | first step, decision cached | processor seconds of the first two steps: "
            "hooked; cached; unhooked twice | compiled, unhooked | peak memory | GB, unhooked",
            lines,
        ),
    ]


def marked(ratio: float, mark: float) -> str:
    """Format a ratio, in bold if it exceeds its mark."""
    text = f"{ratio:.2f}"
    return f"**{text}**" if ratio > mark else text


def on_host(row: dict[str, Any]) -> list[str]:
    """Describe the ops that PyTorch/XLA computes on the host, which cut the graph."""
    ours, theirs = (set(names) for names in row["host"])
    said = {"on the host without the hook too": ours & theirs, "on the host only with the hook": ours - theirs}
    return [
        f"{what}: {', '.join(sorted(name.removeprefix('aten::') for name in names))}"
        for what, names in said.items()
        if names
    ]


def shown(found: float | str) -> str:
    return found if isinstance(found, str) else f"{found:.1e}"


def summary(rows: dict[str, Any]) -> str:
    """Count the scripts that fall short, by criterion."""
    good = [row for row in rows.values() if "error" not in row]
    equal = sum(row["difference"] <= ALLOWED for row in good)
    silent = sum("DIFFERS" in verdict(row) for row in good)
    compiled = sum(row["compiled"][0] <= row["compiled"][1] for row in good)
    fast = sum(statistics.median(ratios(row)) <= 1 + OVERHEAD for row in good)
    own = sum(statistics.median(row["shares"]) <= OVERHEAD for row in good)
    split = sum(row["parameters"][0] > 0 for row in good)
    sent = [difference_on_wire[1] for row in good if (difference_on_wire := on_the_wire(row)) is not None]
    exact = sum(abs(off) <= WIRE for off in sent)
    return (
        f"Of {len(rows)} scripts {len(good)} run; in {equal} no number differs by more than {ALLOWED:.0e}, and in "
        f"{len(good) - equal - silent} of the others by no more than rounding, or PyTorch/XLA's own error; {compiled} "
        f"compile no more than without the hook; in {split} parameters are split; the median step of {fast} takes at "
        f"most {OVERHEAD:.0%} longer, and in {own} the hook's own part is at most {OVERHEAD:.0%} of it. Of {len(sent)} "
        f"whose later steps are one program and send anything, {exact} send what is planned within {WIRE:.0%} on every "
        f"axis, and {sum(off < -WIRE for off in sent)} less."
    )


def work(name: str) -> dict[str, Any]:
    """Compute the row of one script."""
    began = time.monotonic()
    return rounded(compare(name)) | {"seconds": round(time.monotonic() - began)}


def rounded(found: Any) -> Any:
    """Round every number to four significant digits."""
    if isinstance(found, float):
        return float(f"{found:.4g}")
    if isinstance(found, dict):
        return {key: rounded(value) for key, value in found.items()}
    return [rounded(value) for value in found] if isinstance(found, (list, tuple)) else found


if __name__ == "__main__":
    sys.exit(Experiment(script=__file__, names=sorted(PROGRAMS), work=work, table=table).run())
