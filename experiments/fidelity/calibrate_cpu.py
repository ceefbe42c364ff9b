"""Microbenchmarks of `cpu:8` on this machine, and the figures of the cost model that they give.

    python experiments/fidelity/calibrate_cpu.py [--write] [--hold CMD]

Eight devices of one process share the cores, so that all devices run every benchmark at once. The benchmarks are
matmuls of each shape, additions that stream through memory, and collectives of every kind, size and group. Others are
all-reduces after matmuls, gathers of either dim of a matrix, and chains of small ops.

The script prints measured times next to those of the fitted model. `--write` puts the figures, with their source and
today's date, into the `cpu` entry of the shipped calibration, and `mxu_edge` into the chip file. See `cpu_order.py` for
`--hold`.
"""

import argparse
import dataclasses
import itertools as it
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np


os.environ.setdefault("JAX_PLATFORMS", "cpu")
from autoshard.cost import Calibration, Collectives, Compute, Topology, load_calibration, make_mesh
from autoshard.cost.collectives import _COPIES
from autoshard.exec import ensure_devices
from autoshard.exec.devices.local_devices import retained_memory
from experiments.lib.quiet_machine import held


DEVICES = 8
MESH = {"data": 4, "model": 2}
GROUPS: dict[tuple[str, ...], int] = {("data", "model"): 8, ("data",): 4, ("model",): 2}
MATMULS = (
    *((n, n, n) for n in (64, 128, 256, 512)),
    *((64, 512, 512), (16, 1024, 1024), (32, 2048, 512), (512, 64, 512), (512, 512, 64), (2048, 256, 256)),
    *((64, 256, 32), (128, 32, 128), (256, 704, 256)),
)
SIZES = (1 << 14, 1 << 18, 1 << 20, 1 << 22)
KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
WORK, MEETING, ROWS, WIDTH = "work", "all-reduce after work", (128, 256, 512), 256
LAID_OUT, GATHER_OF = "gather of dim", ((256, 1024), (1024, 256), (512, 512))
CHAIN, REPEATS = 8, 15
ELEMENTS = (1 << 19, 1 << 20, 1 << 21)
SMALL_OPS = 200

Run = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Bench:
    """One compiled benchmark: its description, and the number of operations in one run."""

    what: tuple[Any, ...]
    count: int
    run: Run


def compiled(body: Callable[..., Any], shapes: Sequence[tuple[int, ...]]) -> Run:
    """Compile `body` for local arrays of zeros, on all devices at once."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(tuple(MESH.values())), tuple(MESH))
    spec = PartitionSpec(tuple(MESH))
    args = [jax.device_put(jnp.zeros((DEVICES, *shape)), NamedSharding(mesh, spec)) for shape in shapes]

    def local(*blocks: Any) -> Any:
        return jax.tree.map(lambda x: x[None], body(*(block[0] for block in blocks)))

    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    ready = step.lower(*args).compile(compiler_options={"xla_disable_hlo_passes": "cpu-all-reduce-combiner"})
    return lambda: jax.block_until_ready(ready(*args))


def collective(kind: str, axes: tuple[str, ...], dim: int = 0) -> Callable[[Any], Any]:
    """Return one collective as a function of a local array; a gather is along `dim`."""
    import jax

    n = GROUPS[axes]
    if kind == "all-reduce":
        return lambda x: jax.lax.psum(x, axes)
    if kind == "all-gather":
        return lambda x: jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    if kind == "all-to-all":
        return lambda x: jax.lax.all_to_all(x, axes, 0, 0, tiled=True)
    return lambda x: jax.lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])


def chain(op: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a function that applies an op `count` times, each on the previous result, with no fusion between them."""
    import jax

    def body(x: Any, *others: Any) -> Any:
        for _ in range(count):
            x = jax.lax.optimization_barrier(op(x, *others))
        return x

    return body


def one_after_another(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that applies an op to each argument in turn.

    Each op reads and writes memory that no other op has just used, as in a step.
    """
    import jax

    def body(*xs: Any) -> Any:
        results = []
        for i, x in enumerate(xs):
            x, *results[i - 1 :] = jax.lax.optimization_barrier((x, *results[i - 1 :])) if i else (x,)
            results.append(op(x))
        return results

    return body


def there_and_back(x: Any, a: Any, b: Any) -> Any:
    """Compute `[m, k] x [k, n]`, then `[m, n] x [n, k]`: two matmuls of the same three sizes."""
    import jax

    return jax.lax.optimization_barrier(x @ a) @ b


def benches() -> list[Bench]:
    ready = [Bench(("step",), 1, compiled(lambda x: x + 1, [(8,)]))]
    for m, n, k in MATMULS:
        ready.append(Bench(("matmul", m, n, k), 4, compiled(chain(there_and_back, 2), [(m, k), (k, n), (n, k)])))
    for elements in ELEMENTS:
        ready.append(Bench(("add", elements), 1, compiled(lambda a, b: a + b, [(elements,)] * 2)))
    ready.append(Bench(("small", 0), SMALL_OPS, compiled(chain(lambda a, b: a @ b, SMALL_OPS), [(8, 8)] * 2)))
    for kind, axes, size in it.product(KINDS, GROUPS, SIZES):
        local = size // 4 // (GROUPS[axes] if kind == "all-gather" else 1)
        body = one_after_another(collective(kind, axes))
        ready.append(Bench((kind, axes, size), CHAIN, compiled(body, [(local,)] * CHAIN)))
    for rows in ROWS:
        shapes = [(rows, WIDTH), (WIDTH, WIDTH)]
        ready.append(Bench((WORK, rows), CHAIN, compiled(chain(lambda x, w: x @ w, CHAIN), shapes)))
        for axes in GROUPS:
            meet = collective("all-reduce", axes)
            body = chain(lambda x, w, meet=meet: meet(x @ w), CHAIN)
            ready.append(Bench((MEETING, axes, rows), CHAIN, compiled(body, shapes)))
    for shape, axes, dim in it.product(GATHER_OF, GROUPS, (0, 1)):
        body = one_after_another(collective("all-gather", axes, dim))
        shards = tuple(size // (GROUPS[axes] if d == dim else 1) for d, size in enumerate(shape))
        ready.append(Bench((LAID_OUT, axes, shape, dim), CHAIN, compiled(body, [shards] * CHAIN)))
    return ready


def measured(found: Sequence[Bench]) -> dict[tuple[Any, ...], float]:
    """Return the median seconds of one operation of each benchmark, less the launch of the step.

    The benchmarks take turns in each repetition.
    """
    times: dict[tuple[Any, ...], list[float]] = {bench.what: [] for bench in found}
    for number in range(REPEATS + 2):
        for bench in found:
            start = time.perf_counter()
            bench.run()
            if number >= 2:
                times[bench.what].append(time.perf_counter() - start)
    launch = statistics.median(times[("step",)])
    return {
        b.what: max(1e-9, statistics.median(times[b.what]) - launch) / b.count for b in found if b.what[0] != "step"
    }


def fit_matmuls(seconds: dict[tuple[Any, ...], float], topology: Topology) -> tuple[float, int]:
    """Fit the efficiency of a large matmul and the edge: the edge of least spread, and the efficiency that centres
    it.
    """
    shapes = np.array([what[1:] for what in seconds if what[0] == "matmul"], dtype=np.float64)
    took = np.array([s for what, s in seconds.items() if what[0] == "matmul"])
    share = 2.0 * shapes.prod(axis=1) / took / topology.peak_flops("f32")
    spread = {}
    for edge in range(1, 65):
        logs = np.log(share / (shapes / (shapes + edge)).prod(axis=1))
        spread[edge] = (float(logs.std()), float(np.exp(np.median(logs))))
    edge = min(spread, key=lambda e: spread[e][0])
    return spread[edge][1], edge


def fit_collectives(seconds: dict[tuple[Any, ...], float], rate: float) -> tuple[dict[str, float], dict[str, float]]:
    """Fit figures of collectives, and the copies of every kind relative to a gather, by least squares on relative
    errors.

    The figures are the launch, the time for each member of a group, and the bytes through memory per gathered byte.
    Launch and bytes are fitted to collectives that follow each other. A collective waits longer after work, whose
    threads do not end together. The time of a member is therefore the remainder of all-reduces after matmuls that
    occupy all devices for 1 to 3 ms.
    """
    from scipy.optimize import nnls

    rows = [(what, s) for what, s in seconds.items() if what[0] in KINDS]
    traffic = [[what[2] / rate * (what[0] == kind) for kind in KINDS] for what, _ in rows]
    terms = np.array([[1.0, GROUPS[what[1]], *each] for (what, _), each in zip(rows, traffic, strict=True)])
    took = np.array([s for _, s in rows])
    launch, _, *each = nnls(terms / took[:, None], np.ones(len(rows)))[0]
    copies = {kind: amount / each[0] for kind, amount in zip(KINDS, each, strict=True)}
    met = [what for what in seconds if what[0] == MEETING]
    extra = np.array([seconds[what] - seconds[WORK, what[2]] for what in met])
    copied = np.array([what[2] * WIDTH * 4.0 for what in met]) * each[KINDS.index("all-reduce")] / rate
    members = np.array([[GROUPS[what[1]]] for what in met], dtype=np.float64)
    (member,), _ = nnls(members, extra - copied - launch)
    return {"collective_launch_s": launch, "hop_s": member, "shared_memory_traffic": each[0]}, copies


def fit(seconds: dict[tuple[Any, ...], float], topology: Topology) -> tuple[dict[str, Any], dict[str, float], int]:
    """Fit the measurable figures of the `cpu` entry, the copies of every kind, and the chip's `mxu_edge`."""
    efficiency, edge = fit_matmuls(seconds, topology)
    streamed = [12.0 * what[1] / s for what, s in seconds.items() if what[0] == "add"]
    rate = statistics.median(streamed)
    figures = {"matmul_efficiency": efficiency, "memory_efficiency": rate / topology.memory_bytes_per_s}
    figures["op_overhead_s"] = seconds[("small", 0)]
    wire, copies = fit_collectives(seconds, rate)
    again = [
        (s - seconds[*what[:3], 0]) * rate / copied_bytes(what)
        for what, s in seconds.items()
        if what[0] == LAID_OUT and what[3]
    ]
    return figures | wire | {"relayout_traffic": statistics.median(again)}, copies, edge


def copied_bytes(what: tuple[Any, ...]) -> float:
    """Return the bytes of one device that a gather of an inner dim copies: the shard and the gathered result."""
    _, axes, shape, dim = what
    return dim * 4.0 * math.prod(shape) * (1.0 + 1.0 / GROUPS[axes])


def report(seconds: dict[tuple[Any, ...], float], calibration: Calibration, topology: Topology) -> str:
    """Tabulate measured and modelled times, in microseconds."""
    compute, wire = Compute(topology, calibration), Collectives(make_mesh(topology, MESH), calibration)
    lines, errors = [f"{'':44} {'measured':>10} {'model':>10}"], []
    for what, took in seconds.items():
        if what[0] == "matmul":
            model = float(compute.dot_seconds(*what[1:], dtype="f32", size_bytes=0.0))
        elif what[0] in KINDS:
            model = float(wire.time(what[0], what[1], what[2]))
        elif what[0] == WORK:
            model = float(compute.dot_seconds(what[1], WIDTH, WIDTH, dtype="f32", size_bytes=0.0))
        elif what[0] == MEETING:
            model = float(compute.dot_seconds(what[2], WIDTH, WIDTH, dtype="f32", size_bytes=0.0))
            model += float(wire.time("all-reduce", what[1], 4.0 * what[2] * WIDTH))
        elif what[0] == LAID_OUT:
            model = float(wire.time("all-gather", what[1], 4.0 * math.prod(what[2])))
            model += float(compute.relayout_seconds(copied_bytes(what)))
        else:
            model = float(compute.op_seconds(0.0, 12.0 * what[1] or 768.0))
        errors.append(abs(model / took - 1.0))
        lines.append(f"{' '.join(map(str, what)):44} {took * 1e6:10.1f} {model * 1e6:10.1f}")
    return "\n".join([*lines, f"median error {statistics.median(errors):.0%}"])


def write(figures: dict[str, float], edge: int) -> None:
    """Store the figures, rounded to two digits, with their source."""
    import jax

    room = Path(__file__).parents[2] / "autoshard" / "cost"
    chip = room / "chips" / "cpu.json"
    chip.write_text(re.sub(r'"mxu_edge": \d+', f'"mxu_edge": {edge}', chip.read_text()))
    file = room / "calibration.json"
    document = json.loads(file.read_text())
    cores = len(os.sched_getaffinity(0))
    source = (
        f"experiments/fidelity/calibrate_cpu.py: jax {jax.__version__}, {DEVICES} devices over {cores} cores, medians"
    )
    for name, value in figures.items():
        entry = {"value": float(f"{value:.2g}"), "source": source, "date": time.strftime("%Y-%m-%d")}
        document["chips"]["cpu"][name] = entry
    file.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the shipped calibration")
    parser.add_argument("--hold", metavar="CMD", help="a command that keeps the machine quiet meanwhile")
    arguments = parser.parse_args()
    ensure_devices(DEVICES)
    topology = Topology.parse(f"cpu:{DEVICES}")
    ready = benches()
    with held(arguments.hold), retained_memory():
        seconds = measured(ready)
    figures, copies, edge = fit(seconds, topology)
    print(report(seconds, dataclasses.replace(load_calibration("cpu"), **figures), topology))
    print(*(f"{name} {value:.3g}" for name, value in figures.items()), sep="\n")
    for kind, number in copies.items():
        print(f"copies of an {kind}: {number:.3g} (the model has {_COPIES[kind]:g})")
    print(f"mxu_edge {edge} (the chip file has {topology.chip.mxu_edge})")
    if arguments.write:
        write(figures, edge)


if __name__ == "__main__":
    main()
