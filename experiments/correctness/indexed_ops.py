"""Every op with a start, an index or an edge, in every split on 8 CPU devices, compared with one device.

    python experiments/correctness/indexed_ops.py [--only TEXT] [--again]

A case is a program of one or two such ops. Its arrays and its result are pinned whole, or split along each dim that
divides. Every such plan runs with starts and indices before, at and past the ends, which the ops clamp, drop or wrap by
their definitions. The results are compared with `jax.jit` on one device. Values must be equal, except sums.

Cases run in their own process, since XLA may abort. The table, `experiments/results/indexed_ops.md`, counts the splits
that are right, wrong, refused by autoshard in a sentence, or failed otherwise. Rows in `indexed_ops.json` are not run
again without `--again`. The exit code is 1 if any case is wrong or fails.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.lib.saved_results import Results, checked_out


HERE = Path(__file__).parents[1] / "results"
DATA, TABLE = HERE / "indexed_ops.json", HERE / "indexed_ops.md"
MESHES = {"8": {"data": 8}, "4x2": {"data": 4, "model": 2}}
OUTCOMES = ("right", "wrong", "refused", "failed")
SIZE = 16
"""Size of the dims that are indexed."""
STARTS = (-20, -3, 0, 5, SIZE - 1, SIZE, 100)


@dataclasses.dataclass(frozen=True)
class Case:
    """A program `fn(*arrays, *indices)`; its indices are drawn from `STARTS`, equal for every split."""

    name: str
    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    indices: tuple[tuple[int, ...], ...] = ()
    """Shapes of the index arguments, which are never split."""
    dtype: str = "float32"
    starts: tuple[int, ...] = STARTS


def moves() -> dict[str, tuple[Callable[[Any], Any], str]]:
    """Return the ops with edges, by name, each with a dtype."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    def padded(*edges: tuple[int, int, int]) -> Callable[[Any], Any]:
        def pad(x: Any) -> Any:
            return lax.pad(x, jnp.zeros((), x.dtype), [*edges, *[(0, 0, 0)] * (x.ndim - len(edges))])

        return pad

    floats: dict[str, Callable[[Any], Any]] = {
        "nothing": lambda x: x * 2,
        "roll by 1": lambda x: jnp.roll(x, 1, 0),
        "roll by -5": lambda x: jnp.roll(x, -5, 0),
        "flip": lambda x: jnp.flip(x, 0),
        "slice": lambda x: x[4:12],
        "slice of all but one": lambda x: x[1:],
        "strided slice": lambda x: x[::2],
        "strided slice, reversed": lambda x: x[::-2],
        "shift by concatenation": lambda x: jnp.concatenate([x[1:], x[:1]]),
        "concatenation": lambda x: jnp.concatenate([x, jnp.flip(x, 0)]),
        "concatenation of unequal": lambda x: jnp.concatenate([x[:3], x, x[11:]]),
        "sort": lambda x: jnp.sort(x, 0),
        "argsort": lambda x: jnp.argsort(x, 0).astype(x.dtype),
        "top_k": lambda x: lax.top_k(x, 8)[0],
        "repeat by counts": lambda x: jnp.repeat(
            x, jnp.arange(x.shape[0]) % 3, axis=0, total_repeat_length=2 * x.shape[0]
        ),
        "tile": lambda x: jnp.concatenate([x] * 2),
        "cumulative sum": lambda x: jnp.cumsum(x, 0),
        "cumulative maximum, reversed": lambda x: lax.cummax(x, 0, reverse=True),
        "pad": padded((3, 5, 0)),
        "pad inside": padded((0, 1, 1)),
        "pad inside, cut before": padded((-3, 4, 1)),
        "pad inside, cut after": padded((2, -4, 1)),
        "pad, cut before": padded((-3, 3, 0)),
        "pad, cut after": padded((3, -3, 0)),
        "pad, cut at both ends": padded((-4, -4, 0)),
        "windows": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, *[1] * (x.ndim - 1)), (1,) * x.ndim, "SAME"),
        "strided windows": lambda x: lax.reduce_window(
            x, 0.0, lax.add, (2, *[1] * (x.ndim - 1)), (2, *[1] * (x.ndim - 1)), "VALID"
        ),
        "largest of windows, gradient": jax.grad(
            lambda x: jnp.sum(
                lax.reduce_window(x, -jnp.inf, lax.max, (2, *[1] * (x.ndim - 1)), (2, *[1] * (x.ndim - 1)), "VALID")
                ** 2
            )
        ),
        "fft": lambda x: jnp.fft.fft(x, axis=0).real,
        "fft of the last dim": lambda x: jnp.fft.fft(x).real * 2,
        "fft over all dims": lambda x: jnp.fft.fftn(x).imag,
        "real fft": lambda x: jnp.fft.rfft(x, axis=-1).real,
        "real fft there and back": lambda x: jnp.fft.irfft(jnp.fft.rfft(x, axis=-1) * 0.5, axis=-1),
    }
    wholes: dict[str, Callable[[Any], Any]] = {
        "bitwise or": lambda x: lax.reduce(x, np.int32(0), lax.bitwise_or, (0,)),
        "bitwise and": lambda x: lax.reduce(x, np.int32(-1), lax.bitwise_and, (0,)),
        "bitwise xor": lambda x: lax.reduce(x, np.int32(0), lax.bitwise_xor, (0,)),
        "all": lambda x: jnp.all(x > 3, 0),
        "any": lambda x: jnp.any(x > 90, 0),
        "parity": lambda x: lax.reduce(x > 40, False, lax.bitwise_xor, (0,)),
        "product": lambda x: jnp.prod(x, 0),
        "place of the largest": lambda x: jnp.argmax(x, 0),
        "roll of whole numbers": lambda x: jnp.roll(x, 3, 0),
    }
    return {name: (fn, "float32") for name, fn in floats.items()} | {name: (fn, "int32") for name, fn in wholes.items()}


def follow_ups() -> dict[str, tuple[Callable[..., Any], tuple[int, ...]]]:
    """Return reads and writes by index of a value, by name, each with the shape of its index."""
    import jax.numpy as jnp
    from jax import lax

    def zeros(x: Any) -> tuple[int, ...]:
        return (0,) * (x.ndim - 1)

    def row(x: Any, count: int) -> Any:
        return jnp.full((count, *x.shape[1:]), 7, x.dtype)

    return {
        "set first": (lambda x: x.at[0].set(7), ()),
        "set last": (lambda x: x.at[-1].set(7), ()),
        "add from 4": (lambda x: x.at[4:].add(7), ()),
        "set at": (lambda x, i: x.at[i].set(7), (1,)),
        "set at, clipped": (lambda x, i: x.at[i].set(7, mode="clip"), (1,)),
        "add at several": (lambda x, i: x.at[i].add(7), (3, 4)),
        "update one": (lambda x, i: lax.dynamic_update_slice(x, row(x, 1), (i, *zeros(x))), (1,)),
        "update four": (lambda x, i: lax.dynamic_update_slice(x, row(x, 4), (i, *zeros(x))), (1,)),
        "slice four": (lambda x, i: lax.dynamic_slice(x, (i, *zeros(x)), (4, *x.shape[1:])), (1,)),
        "slice eight": (lambda x, i: lax.dynamic_slice(x, (i, *zeros(x)), (8, *x.shape[1:])), (1,)),
        "take": (lambda x, i: jnp.take(x, i, axis=0), (3, 8)),
        "take, clipped": (lambda x, i: jnp.take(x, i, axis=0, mode="clip"), (3, 8)),
        "read at": (lambda x, i: x[i], (1,)),
    }


def cases() -> Iterator[Case]:
    """Yield moves alone, moves followed by reads and writes, then ops of windows and of several indices."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    for move, (fn, dtype) in moves().items():
        for shape in ((SIZE,), (SIZE, 8)):
            yield Case(f"{move} [{len(shape)}]", fn, (shape,), dtype=dtype)
    for move, (fn, dtype) in moves().items():
        for then, (follow, index) in follow_ups().items():
            if dtype == "float32" or move == "roll of whole numbers":
                indices = () if not index else (index[1:],)
                composed = lambda x, *i, fn=fn, follow=follow: follow(fn(x), *i)  # noqa: E731
                for shape in ((SIZE,), (SIZE, 8)) if move in FREQUENT else ((SIZE,),):
                    yield Case(f"{move}, {then} [{len(shape)}]", composed, (shape,), indices, dtype)

    table, rows = (SIZE, 8), (8, 8)
    windows = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))
    written = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )
    for mode in ("clip", "fill"):
        yield Case(
            f"windows of 4, {mode}",
            lambda x, i, mode=mode: lax.gather(x, i[:, None], windows, (4, 8), mode=mode),
            (table,),
            ((8,),),
        )
        yield Case(
            f"windows of 4 set, {mode}",
            lambda x, u, i, mode=mode: lax.scatter(x, i[:1, None], u, written, mode=mode),
            (table, (1, 4, 8)),
            ((8,),),
        )
        yield Case(
            f"windows of 4 added, {mode}",
            lambda x, u, i, mode=mode: lax.scatter_add(x, i[:, None], u, written, mode=mode),
            (table, (8, 4, 8)),
            ((8,),),
        )
    yield Case("slices of rows", jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (8,))), ((8, SIZE),), ((8,),))
    yield Case(
        "updates of rows",
        jax.vmap(lambda x, u, i: lax.dynamic_update_slice(x, u, (i,))),
        ((8, SIZE), (8, 4)),
        ((8,),),
    )
    yield Case(
        "updates of one a row",
        jax.vmap(lambda x, u, i: lax.dynamic_update_slice(x, u, (i,))),
        ((8, SIZE), (8, 1)),
        ((8,),),
    )
    yield Case("slice of two dims", lambda x, i, j: lax.dynamic_slice(x, (i, j), (8, 4)), (table,), ((), ()))
    yield Case(
        "update of two dims", lambda x, u, i, j: lax.dynamic_update_slice(x, u, (i, j)), (table, (8, 4)), ((), ())
    )
    yield Case(
        "update of a column", lambda x, u, i, j: lax.dynamic_update_slice(x, u, (i, j)), (table, (16, 1)), ((), ())
    )
    yield Case("along an axis", lambda x, i: jnp.take_along_axis(x, i, 0), (table,), (rows,))
    yield Case("along an axis, clipped", lambda x, i: jnp.take_along_axis(x, i, 0, mode="clip"), (table,), (rows,))
    for what in ("set", "add", "mul", "min", "max"):
        for mode in ("drop", "clip"):
            yield Case(
                f"{what}, {mode}",
                lambda x, u, i, what=what, mode=mode: getattr(x.at[i if what != "set" else i[:1]], what)(
                    u if what != "set" else u[:1], mode=mode
                ),
                (table, rows),
                ((8,),),
            )

    def loop(x: Any, u: Any, i: Any) -> Any:
        return lax.scan(lambda c, t: (lax.dynamic_update_slice(c, t[None], (i + 4, 0)), c[0]), x, u)[0]

    yield Case("updates in a loop", loop, (table, rows), ((),))
    yield Case(
        "one element a device", lambda x: jnp.concatenate([x[1:], x[:1]]) + jnp.concatenate([x, x])[4:12], ((8,),)
    )
    yield Case("one element a device, twice", lambda x: jnp.concatenate([jnp.concatenate([x, x]), x]), ((8,),))


FREQUENT = ("nothing", "roll by 1", "concatenation", "sort", "pad", "strided slice")
"""Moves that are followed by reads and writes in two dims too."""


DRAWN = 24
"""Plans that are drawn for a case on two axes; there are up to a thousand."""


def splits(shape: tuple[int, ...], mesh: dict[str, int]) -> list[str]:
    """Return the pins of a value: whole; one axis, or all, along each dim that divides; two axes along two dims."""
    whole = ["None"] * len(shape)
    total = 1
    for size in mesh.values():
        total *= size
    wanted = {"+".join(mesh): total} | mesh
    pins = [",".join(whole)]
    for dim, size in enumerate(shape):
        for axes, parts in wanted.items():
            if size and size % parts == 0:
                pins.append(",".join([*whole[:dim], axes, *whole[dim + 1 :]]))
    for dims in itertools.permutations(range(len(shape)), 2):
        for pair in itertools.combinations(mesh, 2):
            if all(shape[dim] and shape[dim] % mesh[axis] == 0 for dim, axis in zip(dims, pair, strict=True)):
                placed = dict(zip(dims, pair, strict=True))
                pins.append(",".join(placed.get(dim, "None") for dim in range(len(shape))))
    return pins


class Comparison:
    """A case and its results on one device, by sets of indices."""

    def __init__(self, case: Case) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np

        import autoshard

        self.case = case
        draw = np.random.default_rng(0)
        whole = case.dtype == "int32"
        self.arrays = [
            jnp.asarray(draw.integers(0, 100, s) if whole else draw.permutation(np.prod(s)).reshape(s) + 1, case.dtype)
            for s in case.shapes
        ]
        starts, count = np.array(case.starts), len(case.indices)
        self.indices = [
            [
                jnp.asarray(np.resize(np.roll(starts, -k - 2 * n), shape), "int32")
                for n, shape in enumerate(case.indices)
            ]
            for k in range(len(starts) if count else 1)
        ]
        arrays = ["x", "u"][: len(case.shapes)]
        names = ", ".join([*arrays, *(f"i{n}" for n in range(count))])
        self.fn = eval(f"lambda {names}: fn({names})", {"fn": case.fn})
        self.expected = [np.asarray(jax.jit(self.fn)(*self.arrays, *each)) for each in self.indices]
        self.program = autoshard.trace(self.fn, (*self.arrays, *self.indices[0]))
        self.shapes = dict(zip(arrays, case.shapes, strict=True))
        if self.expected[0].ndim:
            self.shapes["result"] = self.expected[0].shape

    def splits(self, mesh: dict[str, int]) -> list[dict[str, str]]:
        """Return the pins of every plan: no pins, then each combination of the values' pins; on two axes at most
        `DRAWN`.
        """
        ways = [*itertools.product(*(splits(shape, mesh) for shape in self.shapes.values()))]
        if len(mesh) > 1:
            ways = random.Random(self.case.name).sample(ways, min(DRAWN, len(ways)))
        return [{}, *(dict(zip(self.shapes, way, strict=True)) for way in ways)]

    def outcome(self, mesh: dict[str, int], pins: dict[str, str]) -> tuple[str, str]:
        """Return one of `OUTCOMES`, and the first indices that are wrong or the error."""
        import numpy as np

        import autoshard

        sums = any(word in self.case.name for word in ("sum", "fft", "add", "windows"))
        try:
            plan = autoshard.plan(self.program, topology="cpu:8", mesh=mesh, pins=pins)
            run = plan.jit(self.fn)
            for indices, right in zip(self.indices, self.expected, strict=True):
                got = np.asarray(run(*self.arrays, *indices))
                largest = np.nanmax(np.abs(right.astype(float)), initial=0)
                if not np.allclose(got, right, rtol=0, atol=1e-4 * largest if sums else 0, equal_nan=True):
                    return "wrong", str([np.asarray(index).ravel()[:4].tolist() for index in indices])
        except autoshard.UserError as error:
            return "refused", str(error)[:300]
        except Exception as error:
            return "failed", f"{type(error).__name__}: {error}"[:300]
        return "right", ""


def work(case: Case, mesh: dict[str, int], done: set[str]) -> None:
    """Print a line before and after each split, so that the parent process recognises the split that aborted."""
    comparison = Comparison(case)
    for pins in comparison.splits(mesh):
        key = " ".join(f"{name}:{pin}" for name, pin in pins.items()) or "default"
        if key not in done:
            print("try", json.dumps([case.name, key]), flush=True)
            print("did", json.dumps([case.name, key, *comparison.outcome(mesh, pins)]), flush=True)


def run(names: list[str], mesh: str, results: Results) -> None:
    """Run all splits of these cases, in a new process after each abort; save each row as it ends."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "AUTOSHARD_CACHE_DIR": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    outcomes: dict[str, dict[str, tuple[str, str]]] = {name: {} for name in names}
    left = list(names)
    while left:
        command = [sys.executable, __file__, "--work", "--mesh", mesh]
        given = json.dumps([[name, [*outcomes[name]]] for name in left])
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(given)
        process.stdin.close()
        errors: list[str] = []
        reader = threading.Thread(target=lambda stream=process.stderr, errors=errors: errors.extend(stream))
        reader.start()
        trying: list[str] | None = None
        for line in process.stdout:
            kind, _, text = line.partition(" ")
            if kind == "try":
                trying = json.loads(text)
            elif kind == "did":
                name, key, outcome, why = json.loads(text)
                outcomes[name][key] = outcome, why
                trying = None
            elif kind == "end":
                name = json.loads(text)
                counts = collections.Counter(outcome for outcome, _ in outcomes[name].values())
                bad = {key: [outcome, why] for key, (outcome, why) in outcomes[name].items() if outcome != "right"}
                results.keep(f"{name} | {mesh}", {"counts": counts, "bad": bad, "commit": checked_out()})
                print(f"{name} | {mesh}", dict(counts), flush=True)
                left.remove(name)
        process.wait()
        reader.join()
        if process.returncode and trying is None:
            raise RuntimeError(f"{left[:1]}: {''.join(errors)[-1500:]}")
        if trying is not None:
            outcomes[trying[0]][trying[1]] = "failed", f"exit code {process.returncode}"


def table(results: Results) -> str:
    """Return totals by mesh, and every case that is not right in all splits."""
    lines = [f"Splits of {len({key.split(' | ')[0] for key in results.rows})} cases, by outcome.", ""]
    lines += ["| mesh | " + " | ".join(OUTCOMES) + " |", "| --- |" + " ---: |" * len(OUTCOMES)]
    for mesh in MESHES:
        rows = [row for key, row in results.rows.items() if key.endswith(f" | {mesh}")]
        sums = [str(sum(row["counts"].get(outcome, 0) for row in rows)) for outcome in OUTCOMES]
        lines.append(f"| {mesh} | " + " | ".join(sums) + " |")
    lines += ["", "| case | mesh | " + " | ".join(OUTCOMES) + " | first |", "| --- | --- |" + " ---: |" * 4 + " --- |"]
    for key, row in sorted(results.rows.items()):
        if row["bad"]:
            name, mesh = key.split(" | ")
            first = next(iter(row["bad"].items()))
            counts = " | ".join(str(row["counts"].get(outcome, 0)) for outcome in OUTCOMES)
            lines.append(f"| {name} | {mesh} | {counts} | {first[0]}: {first[1][1][:120]} |".replace("\n", " "))
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it")
    parser.add_argument("--again", action="store_true", help="run rows that are there already")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--mesh", choices=MESHES, help="this mesh only")
    given = parser.parse_args()
    if given.work:
        from autoshard.exec import ensure_devices

        ensure_devices(8)
        by_name = {case.name: case for case in cases()}
        for name, done in json.load(sys.stdin):
            work(by_name[name], MESHES[given.mesh], set(done))
            print("end", json.dumps(name), flush=True)
        return 0
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    results = Results(DATA)
    for mesh in [given.mesh] if given.mesh else MESHES:
        # A vector's one dim over two axes equals the dim over one axis, so that vectors need no second mesh.
        known = [case for case in cases() if mesh == "8" or any(len(shape) > 1 for shape in case.shapes)]
        names = [case.name for case in known if given.only in case.name]
        run([name for name in names if given.again or f"{name} | {mesh}" not in results.rows], mesh, results)
    TABLE.write_text(table(results), encoding="utf-8")
    bad = [key for key, row in results.rows.items() if row["counts"].get("wrong", 0) + row["counts"].get("failed", 0)]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
