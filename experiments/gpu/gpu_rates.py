"""Rates of one GPU that no published table has, compared with their prices: about a minute on the device.

    python experiments/gpu/gpu_rates.py [CASE ...] [--again]
    python experiments/gpu/gpu_rates.py --tiny

The cases are matmuls and convolutions in float32, gathers and scatters of rows, strided reads, and chains of small
kernels. Results are saved by case in `experiments/results/gpu_rates.json`, with device, versions and date, so that a
broken run resumes. `--tiny` runs small cases on any local device, to test the script itself.
"""

import argparse
import dataclasses
import datetime
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.cost import Compute, Topology


TABLE = Path(__file__).parents[1] / "results" / "gpu_rates.md"
REPEATS, SECONDS = 5, 0.5
"""Timed batches of calls of each case, and their approximate total in seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A function of arrays, and the work of one call."""

    run: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    flops: float = 0.0
    size: float = 0.0
    """Bytes that one call reads and writes."""
    kernels: int = 1
    matmul: tuple[int, int, int] | None = None
    """Rows, columns and contracted size, if the case is priced as a matmul."""

    def priced(self, compute: Compute) -> float:
        """Return the seconds that the cost model predicts."""
        overhead = self.kernels * compute.calibration.op_overhead_s
        if self.matmul is not None:
            return float(compute.dot_seconds(*self.matmul, 1, "f32", self.size))
        return float(compute.memory_seconds(self.size)) + overhead


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def matmul(m: int, n: int, k: int) -> Case:
    size = 4.0 * (m * k + k * n + m * n)
    return Case(lambda a, b: a @ b, (f32(m, k), f32(k, n)), 2.0 * m * n * k, size, matmul=(m, n, k))


def convolution(batch: int, side: int, inputs: int, outputs: int, window: int) -> Case:
    def run(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    rows, depth = batch * side * side, inputs * window * window
    size = 4.0 * (rows * (inputs + outputs) + depth * outputs)
    shapes = f32(batch, side, side, inputs), f32(window, window, inputs, outputs)
    return Case(run, shapes, 2.0 * rows * depth * outputs, size, matmul=(rows, outputs, depth))


def gather(table: int, rows: int, width: int) -> Case:
    return Case(lambda t, at: jnp.take(t, at, axis=0), (f32(table, width), ids(rows)), size=8.0 * rows * width)


def scatter(table: int, rows: int, width: int) -> Case:
    def run(at: Any, values: Any) -> Any:
        return jnp.zeros((table, width), jnp.float32).at[at].add(values)

    return Case(run, (ids(rows), f32(rows, width)), size=4.0 * (2 * table + 3 * rows) * width, kernels=2)


def strided(rows: int, width: int, step: int) -> Case:
    def run(x: Any) -> Any:
        return x[:, ::step] + x[:, step - 1 :: step]

    return Case(run, (f32(rows, width),), size=4.0 * rows * (2 + 1) * (width // step))


def stream(elements: int) -> Case:
    return Case(lambda x, y: x + 2.0 * y, (f32(elements), f32(elements)), size=12.0 * elements)


def chain(length: int, elements: int) -> Case:
    """Return a chain of kernels that move almost no bytes."""

    def run(x: Any) -> Any:
        for _ in range(length):
            x = jax.lax.optimization_barrier(x * 0.5 + 1.0)
        return x

    return Case(run, (f32(elements),), size=8.0 * length * elements, kernels=length)


def cases(tiny: bool) -> dict[str, Case]:
    """Return the cases by name, smaller ones if `tiny`."""
    far = 16 if tiny else 1
    by_name = {
        f"matmul {m}x{n}x{k}": matmul(m // far, n // far, k // far)
        for m, n, k in (
            (1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192), (65536, 256, 1024), (262144, 256, 256),
            (262144, 512, 768), (1024, 1024, 65536), (512, 512, 524288),
        )
    }  # fmt: skip
    by_name |= {
        f"convolution {b}x{s}x{s}x{i} to {o}, {w}x{w}": convolution(max(1, b // far), max(w, s // far), i, o, w)
        for b, s, i, o, w in (
            (128, 56, 64, 64, 3),
            (128, 28, 128, 128, 3),
            (128, 14, 256, 1024, 1),
            (32, 64, 256, 256, 3),
        )
    }
    by_name |= {
        f"gather {rows} rows of {width}": gather(1_000_000 // far, rows // far, width)
        for rows, width in ((1 << 20, 32), (1 << 20, 128), (1 << 20, 256), (1 << 17, 1024))
    }
    by_name |= {
        f"scatter {rows} rows of {width}": scatter(200_000 // far, rows // far, width)
        for rows, width in ((1 << 20, 32), (1 << 20, 128), (1 << 20, 256), (1 << 17, 1024))
    }
    by_name |= {f"every {step}th element": strided(16384 // far, 16384 // far, step) for step in (2, 4, 16)}
    by_name |= {"stream": stream((1 << 28) // far**2), "chain of 1000": chain(1000 // far, 4096)}
    return by_name


def run(case: Case) -> dict[str, float]:
    """Return the seconds of one call: the median of batches of calls, and the spread of their quartiles."""
    key = jax.random.key(0)
    arrays = [
        jax.random.randint(key, shape.shape, 0, 10_000, shape.dtype)
        if shape.dtype == jnp.int32
        else jax.random.normal(key, shape.shape, shape.dtype)
        for shape in case.shapes
    ]
    call = jax.jit(case.run)
    jax.block_until_ready(call(*arrays))
    began = time.perf_counter()
    jax.block_until_ready(call(*arrays))
    calls = max(1, min(1000, int(SECONDS / REPEATS / (time.perf_counter() - began))))
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(calls):
            results = call(*arrays)
        jax.block_until_ready(results)
        times.append((time.perf_counter() - began) / calls)
    quartiles = statistics.quantiles(times, n=4)
    return {"seconds": statistics.median(times), "spread": (quartiles[2] - quartiles[0]) / statistics.median(times)}


def main() -> int:
    """Measure the requested cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--chip", default="h100")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if not arguments.tiny and shutil.which("nvidia-smi") is None:
        print("no GPU is here, and rates of one can only be measured", file=sys.stderr)
        return 0
    path = TABLE.with_suffix(".json") if not arguments.tiny else TABLE.parents[2] / "build" / "gpu_rates_tiny.json"
    known = json.loads(path.read_text()) if path.exists() and not arguments.again else {}
    compute = Compute(Topology.parse(f"{arguments.chip}:1"))
    said = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "date": datetime.date.today().isoformat()}
    for name, case in cases(arguments.tiny).items():
        if name in known or (arguments.cases and name not in arguments.cases):
            continue
        known[name] = said | run(case) | {"priced_s": case.priced(compute), "flops": case.flops, "bytes": case.size}
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".part")
        scratch.write_text(json.dumps(known, indent=1) + "\n")
        os.replace(scratch, path)
    lines = [
        "# Rates of one GPU, measured and priced",
        "",
        "`python experiments/gpu/gpu_rates.py`. Times are medians of one call, in us.",
        "",
        "| case | measured | spread | priced | priced over measured | TFLOP/s | TB/s | device | date |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in known.items():
        seconds = row["seconds"]
        lines.append(
            f"| {name} | {1e6 * seconds:.4g} | {row['spread']:.0%} | {1e6 * row['priced_s']:.4g} | "
            f"{row['priced_s'] / seconds:.2f} | {row['flops'] / seconds / 1e12:.4g} | "
            f"{row['bytes'] / seconds / 1e12:.3g} | {row['device']} | {row['date']} |"
        )
    text = "\n".join(lines) + "\n"
    if not arguments.tiny:
        TABLE.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
