"""Loss and all gradients of convolutions under every split on 8 CPU devices, by XLA's partitioner and as planned.

    python experiments/correctness/convolution_gradients.py [--only TEXT] [--again]

The step computes the loss of one convolution. It also computes the gradients for the images, for the kernel and for the
tensor that multiplies the result (the result itself).

Every axis of a mesh splits batch, height, width, channels or features, or is idle. All such splits that divide evenly
are run. Each split runs in two ways, and both are compared with the step on one device. The first is plain JAX with the
three arguments placed by the split, which XLA partitions. The second is autoshard's plan with the arguments pinned to
the split.

The table, `experiments/results/convolution_gradients.md`, counts for both ways the splits that are right, wrong (by
which factor) or aborted. Every convolution has its own process, since XLA aborts on some splits. An aborted split is
noted, and the remaining splits run. Splits in `build/convolution_gradients` are not run again without `--again`.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results" / "convolution_gradients.json"
BUILD = ROOT / "build" / "convolution_gradients"
MESHES = {"8": {"data": 8}, "4x2": {"data": 4, "model": 2}, "2x2x2, one idle": {"data": 2, "model": 2, "seq": 2}}
IDLE = {"2x2x2, one idle": ("seq",)}
"""Axes that split nothing in any of the specs, by mesh; equal axes before them are not exchanged."""
BATCH, CHANNELS = 8, 8
WAYS = ("XLA alone", "planned")
TOLERANCE = 1e-4
"""Largest difference that counts as right, relative to a tensor's maximum, in 32-bit floats."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One convolution of `CHANNELS` channels; `layout` is that of the images."""

    name: str
    layout: str = "NCHW"
    size: int = 8
    groups: int = 1
    features: int = 8
    kernel: int = 3
    stride: int = 1
    pads: tuple[int, int] | None = (1, 1)
    """Padding before and after each dim of space; None for `VALID`."""
    options: tuple[tuple[str, int], ...] = ()
    """Dilations, equal in every dim of space."""

    @property
    def space(self) -> str:
        return self.layout.replace("N", "").replace("C", "")

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the images and of the kernel, laid out as features, channels of a group, space."""
        sizes = {"N": BATCH, "C": CHANNELS} | dict.fromkeys(self.space, self.size)
        rest = (self.kernel,) * len(self.space)
        return tuple(sizes[letter] for letter in self.layout), (self.features, CHANNELS // self.groups, *rest)

    def convolve(self, images: Any, kernel: Any) -> Any:
        from jax import lax

        rank = len(self.space)
        dilated: dict[str, Any] = {name: (by,) * rank for name, by in self.options}
        return lax.conv_general_dilated(
            images,
            kernel,
            (self.stride,) * rank,
            "VALID" if self.pads is None else (self.pads,) * rank,
            dimension_numbers=(self.layout, f"OI{self.space}", self.layout),
            feature_group_count=self.groups,
            **dilated,
        )


SPREAD, APART = (("rhs_dilation", 2),), (("lhs_dilation", 2),)
CASES = (
    Case("depthwise", groups=8),
    Case("depthwise, channels last", "NHWC", groups=8),
    Case("depthwise, two features each", groups=8, features=16),
    Case("depthwise, stride 2", size=16, groups=8, stride=2),
    Case("depthwise, kernel dilated", groups=8, pads=(2, 2), options=SPREAD),
    Case("depthwise, images dilated", groups=8, pads=(1, 2), options=APART),
    Case("groups of two", groups=4),
    Case("two groups, channels last", "NHWC", groups=2),
    Case("plain"),
    Case("plain, channels last", "NHWC"),
    Case("plain, stride 2", size=16, stride=2),
    Case("plain, kernel dilated", pads=(2, 2), options=SPREAD),
    Case("plain, images dilated", pads=(1, 2), options=APART),
    Case("patches", size=16, kernel=2, stride=2, pads=None),
    Case("1D depthwise, causal", "NCH", size=16, groups=8, kernel=4, pads=(3, 0)),
    Case("1D two groups, channels last", "NHC", size=16, groups=2),
    Case("1D plain, channels last", "NHC", size=16),
    Case("1D plain, stride 2", "NCH", size=16, stride=2),
)


def splits(case: Case, mesh: str) -> list[dict[str, str]]:
    """Return every split that divides evenly: by axis `batch`, `height`, `width`, `channels`, `features` or `idle`."""
    axes = MESHES[mesh]
    free = [axis for axis in axes if axis not in IDLE.get(mesh, ())]
    sides = ["batch", *("height", "width")[: len(case.space)], "channels", "features", "idle"]
    same = len({axes[axis] for axis in free}) < len(free)
    ways = itertools.combinations_with_replacement(sides, 2) if same else itertools.product(sides, repeat=len(free))
    candidates = [dict(zip(free, way, strict=True)) for way in ways]
    return [split for split in candidates if any(s != "idle" for s in split.values()) and _divides(case, mesh, split)]


def _divides(case: Case, mesh: str, split: dict[str, str]) -> bool:
    import jax

    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in case.shapes()]
    above = jax.eval_shape(case.convolve, *arguments).shape
    return all(
        size % math.prod(MESHES[mesh][axis] for axis in dim) == 0
        for shape, spec in zip((*case.shapes(), above), specs(case, split), strict=True)
        for size, dim in zip(shape, spec, strict=True)
    )


def specs(case: Case, split: dict[str, str]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return the axes by dim of the images, of the kernel, and of the tensor that multiplies the result."""

    def of(side: str) -> tuple[str, ...]:
        return tuple(axis for axis, what in split.items() if what == side)

    space = {"H": of("height"), "W": of("width")}
    images = {"N": of("batch"), "C": of("channels"), **space}
    above = images | {"C": of("features")}
    inside = of("channels") if case.groups == 1 else ()
    kernel = (of("features"), inside, *[()] * len(case.space))
    return tuple(images[letter] for letter in case.layout), kernel, tuple(above[letter] for letter in case.layout)


# --- child process: one convolution ---


def work(case: Case, done: set[str]) -> None:
    """Print a line before and after each run, so that the parent process recognises the run that aborted."""
    from autoshard.exec import ensure_devices

    ensure_devices(8)
    import jax
    import jax.numpy as jnp
    import numpy as np

    from autoshard.program import trace

    def step(images: Any, kernel: Any, above: Any) -> Any:
        return jax.value_and_grad(lambda *a: jnp.sum(case.convolve(a[0], a[1]) * a[2]), (0, 1, 2))(
            images, kernel, above
        )

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in case.shapes()]
    shapes.append(jax.eval_shape(case.convolve, *shapes))
    random = np.random.default_rng(0)
    values = [random.normal(size=s.shape).astype(np.float32) for s in shapes]
    wanted = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(step)(*values))]
    program = trace(step, shapes, name=case.name)
    runs = {
        "XLA alone": lambda mesh, split: alone(case, mesh, split, step, values),
        "planned": lambda mesh, split: planned(case, mesh, split, program, values),
    }
    for mesh in MESHES:
        for split in splits(case, mesh):
            for way, run in runs.items():
                key = json.dumps([mesh, split, way])
                if key in done:
                    continue
                print(json.dumps({"starts": key}), flush=True)
                try:
                    leaves, regions = run(mesh, split)
                    verdict = compared([np.asarray(leaf) for leaf in leaves], wanted) | {"regions": regions}
                except Exception as error:  # A compiler error is a row of the table too.
                    verdict = {"verdict": "failed", "said": " ".join(str(error).split())[:200]}
                print(json.dumps({"ends": key} | verdict), flush=True)


def alone(case: Case, mesh: str, split: dict[str, str], step: Any, values: Any) -> tuple[list[Any], int]:
    """Run the step as plain JAX, with its arguments and their gradients placed by `split`."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = Mesh(np.array(jax.devices()[:8]).reshape(tuple(MESHES[mesh].values())), tuple(MESHES[mesh]))
    placed = tuple(NamedSharding(devices, PartitionSpec(*(dim or None for dim in spec))) for spec in specs(case, split))
    whole = NamedSharding(devices, PartitionSpec())
    run = jax.jit(lambda *a: step(*a), in_shardings=placed, out_shardings=(whole, placed))
    return jax.tree.leaves(run(*values)), 0


def planned(case: Case, mesh: str, split: dict[str, str], program: Any, values: Any) -> tuple[list[Any], int]:
    """Run the step as autoshard plans it with its arguments pinned to `split`; also return the number of ops in
    regions.
    """
    import jax

    from autoshard.exec import Application
    from autoshard.planning import Options, Spec, make_plan, read_asked

    asked = read_asked({a.name: Spec(spec) for a, spec in zip(program.arguments, specs(case, split), strict=True)})
    plan = make_plan(
        program, Options(topology="cpu:8", mesh=MESHES[mesh], asked=asked, refine_axes=False, calibration=False)
    ).plan
    run = Application(plan).lower(program.fn, program.args, module=program.module).compile()
    return jax.tree.leaves(run(*values)), len(plan.regions)


def compared(found: list[Any], wanted: list[Any]) -> dict[str, Any]:
    """Compare the loss and the gradients of images, kernel and result with those of one device."""
    import numpy as np

    off, factors = {}, {}
    for name, a, b in zip(("loss", "images", "kernel", "result"), found, wanted, strict=True):
        difference = float(np.abs(a - b).max() / np.abs(b).max())
        if not difference <= TOLERANCE:
            off[name] = difference
            factors[name] = float(np.median(a / np.where(b == 0, 1, b)))
    largest = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, wanted, strict=True))
    return {"verdict": "wrong" if off else "right", "off": off, "factors": factors, "largest": largest}


# --- parent process: all convolutions ---


def run_case(case: Case, again: bool) -> dict[str, dict[str, Any]]:
    """Return the verdict of each run, by its key (mesh, split, way); each verdict is saved as soon as it is known."""
    kept = BUILD / f"{case.name.replace(',', '').replace(' ', '_')}.json"
    rows: dict[str, dict[str, Any]] = {} if again or not kept.is_file() else json.loads(kept.read_text())
    begun: str | None = ""
    while begun is not None:
        begun = _process(case, rows, kept)
        if begun is not None:
            rows[begun] = {"verdict": "aborted"}
    return rows


def _process(case: Case, rows: dict[str, dict[str, Any]], kept: Path) -> str | None:
    """Run the keys that `rows` lacks in a child process; return the run that ended the process, if one did."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    command = [sys.executable, __file__, "--worker", case.name, json.dumps(list(rows))]
    begun, wrong = None, kept.with_suffix(".txt")
    with (
        wrong.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            record = json.loads(line)
            if "starts" in record:
                begun = record["starts"]
            else:
                rows[record.pop("ends")] = record
                begun = None
                kept.write_text(json.dumps(rows))
    if child.returncode and begun is None:
        raise SystemExit(f"{case.name}: the process ended with {child.returncode}: {wrong.read_text().strip()[-500:]}")
    return begun


def counted(rows: dict[str, dict[str, Any]], mesh: str, way: str) -> str:
    """Describe the verdicts of one convolution on one mesh."""
    mine = [row for key, row in rows.items() if json.loads(key)[0] == mesh and json.loads(key)[2] == way]
    kinds = collections.Counter(row["verdict"] for row in mine)
    parts = [f"{kinds['right']} of {len(mine)}"]
    wrong = [row for row in mine if row["verdict"] == "wrong"]
    if wrong:
        times = collections.Counter(
            f"{name} x{round(factor, 2):g}" if abs(factor - round(factor)) < 0.01 else f"{name} otherwise"
            for row in wrong
            for name, factor in row["factors"].items()
        )
        parts.append("wrong: " + ", ".join(f"{what} ({times[what]})" for what in sorted(times)))
    parts += [f"{kinds[kind]} {kind}" for kind in ("aborted", "failed") if kinds[kind]]
    return "; ".join(parts)


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the page: a row for each convolution and mesh, and the splits that are not right."""
    lines = [f"| convolution | mesh | {' | '.join(f'{way}: right' for way in WAYS)} | in regions |", "|" + " --- |" * 5]
    for name, rows in found.items():
        for mesh in MESHES:
            inside = sum(bool(row.get("regions")) for key, row in rows.items() if json.loads(key)[0] == mesh)
            lines.append(f"| {name} | {mesh} | {' | '.join(counted(rows, mesh, way) for way in WAYS)} | {inside} |")
    lines += ["", "Splits that are not right:", "", f"| convolution | mesh | split | {' | '.join(WAYS)} |"]
    lines.append("|" + " --- |" * 5)
    for name, rows in found.items():
        for mesh, split in dict.fromkeys((json.loads(k)[0], json.dumps(json.loads(k)[1])) for k in rows):
            pair = [rows[json.dumps([mesh, json.loads(split), way])] for way in WAYS]
            if any(row["verdict"] != "right" for row in pair):
                words = ", ".join(f"{side} over {axis}" for axis, side in json.loads(split).items() if side != "idle")
                lines.append(f"| {name} | {mesh} | {words} | {' | '.join(_words(row) for row in pair)} |")
    return "\n".join(lines) + "\n"


def _words(row: dict[str, Any]) -> str:
    if row["verdict"] == "wrong":
        return ", ".join(f"{name} x{factor:.3g}" for name, factor in row["factors"].items())
    return row["verdict"] + (f": {row['said'][:120]}" if "said" in row else "")


def totals(found: dict[str, dict[str, dict[str, Any]]], way: str) -> str:
    mine = [row for rows in found.values() for key, row in rows.items() if json.loads(key)[2] == way]
    kinds = collections.Counter(row["verdict"] for row in mine)
    largest = max((row["largest"] for row in mine if row["verdict"] == "right"), default=0.0)
    rest = ", ".join(f"{kinds[kind]} {kind}" for kind in ("wrong", "aborted", "failed") if kinds[kind])
    return f"{way}: {kinds['right']} of {len(mine)} right (within {largest:.1e}){', ' + rest if rest else ''}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="convolutions whose name contains this; the table is not written")
    parser.add_argument("--again", action="store_true", help="run what has been run")
    parser.add_argument("--jobs", type=int, default=max(1, min(4, os.cpu_count() or 1)))
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        name, done = given.worker
        work(next(case for case in CASES if case.name == name), set(json.loads(done)))
        return 0
    BUILD.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if given.only in case.name]
    finished = {}
    with ThreadPoolExecutor(given.jobs) as pool:
        for case, rows in zip(cases, pool.map(lambda case: run_case(case, given.again), cases), strict=True):
            finished[case.name] = rows
            said = "; ".join(f"{way}, {mesh}: {counted(rows, mesh, way)}" for mesh in MESHES for way in WAYS)
            print(f"{len(finished)} of {len(cases)}, {case.name}: {said}", flush=True)
    text = f"# Gradients of convolutions\n\n{(__doc__ or '').splitlines()[0]}\n\n"
    import jax

    text += (
        f"Made by `python experiments/correctness/convolution_gradients.py`, jax {jax.__version__}, 32-bit floats;\n"
    )
    text += f"at most {TOLERANCE:.0e} of a tensor's maximum is allowed.\n\n"
    text += "".join(f"- {totals(finished, way)}\n" for way in WAYS) + "\n" + table(finished)
    if not given.only:
        RESULTS.write_text(json.dumps(finished, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(text)
    print(text)
    bad = [row for rows in finished.values() for key, row in rows.items() if json.loads(key)[2] == "planned"]
    return int(any(row["verdict"] != "right" for row in bad))


if __name__ == "__main__":
    sys.exit(main())
