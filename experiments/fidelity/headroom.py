"""Effect of full memory on a step: one program and plan, its batch raised until the compiler refuses it.

    python experiments/fidelity/headroom.py [--only TEXT ...] [--share S ...] [--table] [--write]

Each point is planned as the baseline FSDP and compiled with no accelerator. Its batch uses the share S of the chip's
memory, by the memory model. The script reports if the plan fits, and the compiler's own recomputation. It also compares
the time of a sample with that of the same plan with free memory.

Results are saved by program and share in `experiments/results/headroom.json`, so that a broken run resumes. `--write`
stores the cost of nearly full memory in `autoshard/planning/price/headroom.json`, from these points and those of
`compile_fidelity.py`, and for GPUs with the errors of `gpu_fidelity.py`.
"""

import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from autoshard.planning import Plan
    from autoshard.program import Program

from experiments.lib.harness import RESULTS, ROOT, Experiment, Rows, grid, own_parser, page
from experiments.lib.programs.compile_programs import hf, jax_mlp, llama
from experiments.lib.saved_results import Results, compiled


FIDELITY = RESULTS / "compile_fidelity.json"
GPU_FIDELITY = RESULTS / "gpu_fidelity.json"
CONSTANTS = ROOT / "autoshard" / "planning" / "price" / "headroom.json"

RECOMPUTE = "fits only with the compiler's own remat"
LARGE = 1 / 3
"""Predicted share of memory from which a program's error counts: small programs err by other causes."""

SHARES = (0.70, 0.85, 0.92, 0.97, 1.0, 1.03, 1.10)
"""Shares of the chip's memory, as predicted; the first leaves memory free."""
SHARES_ON_GPUS = (0.60, 0.70, 0.75, 0.80, 0.85, 0.92, 1.0)
"""The same for GPUs, whose compiler recomputes earlier."""
AGAIN = 1.01
"""Matrix FLOPs over those of the program from which on a compiler counts as one that recomputes matmuls."""
ON_GPUS = ", on GPUs"
"""End of the names of GPU cases."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A program by its batch, under FSDP over all devices."""

    program: "Callable[[int], Callable[[], Program]]"
    topology: str
    devices: int
    first: int
    """A batch per device that leaves memory free."""
    grain: int
    """Divisor of the batches per device."""


SMALL = llama(8, 2048, 5632, 16, 8, 32000)

CASES = {
    "MLP, unrolled": Case(lambda n: jax_mlp(12, 4096, n), "v5e:2x4", 8, 65536, 256),
    "decoder, scanned": Case(
        lambda n: hf(SMALL, train=True, remat="none", batch=n, seq=256), "v5e:4x4", 16, 24, 1
    ),
    "MLP, unrolled" + ON_GPUS: Case(lambda n: jax_mlp(12, 4096, n), "h100:8", 8, 262144, 1024),
    "decoder, scanned" + ON_GPUS: Case(
        lambda n: hf(SMALL, train=True, remat="none", batch=n, seq=256, attention="cudnn"), "h100:8", 8, 96, 4
    ),
}  # fmt: skip


def plan_at(case: Case, batch: int) -> "tuple[Program, Plan, int]":
    """Return the program at a batch per device, its FSDP plan, and the chip's memory in bytes."""
    from autoshard.cost import Topology
    from autoshard.planning import Options, make_plan

    program = case.program(batch * case.devices)()
    limit = Topology.parse(case.topology).usable_bytes
    made = make_plan(program, Options(topology=case.topology, mesh={"data": case.devices}, memory_limit=2 * limit))
    return program, made.baseline_plans["fsdp"], limit


@functools.cache
def memory_line(name: str) -> tuple[float, float, int]:
    """Return predicted bytes without a batch, predicted bytes for each of a batch, and the chip's memory.

    The predicted peak grows linearly, so that two batches give it.
    """
    case = CASES[name]
    (_, low, limit), (_, high, _) = plan_at(case, case.first), plan_at(case, 2 * case.first)
    slope = (high.prediction.peak_bytes - low.prediction.peak_bytes) / case.first
    return low.prediction.peak_bytes - slope * case.first, slope, limit


def batch_for(name: str, share: float) -> int:
    """Return the batch per device at which the predicted peak is nearest to a share of the chip's memory."""
    start, slope, limit = memory_line(name)
    grain = CASES[name].grain
    return max(1, round((share * limit - start) / slope / grain)) * grain


def judge(point: str, time_limit: float) -> dict[str, Any]:
    """Plan and compile one point, and return its figures."""
    from autoshard.exec import compile_figures
    from autoshard.exec.ahead.compile_plans import report

    name, _, share = point.rpartition(" at ")
    batch = batch_for(name, float(share))
    program, plan, limit = plan_at(CASES[name], batch)
    figures = compile_figures(report(program, plan, compiled("headroom", program, plan, time_limit)))
    flops = figures["flops"]
    return {
        "batch": batch,
        "limit_bytes": limit,
        "predicted_bytes": plan.prediction.peak_bytes,
        "compiled_bytes": figures["peak_bytes"]["compiled"],
        "verdict": figures["verdict"],
        "flops": flops["compiled"] / flops["program"] if flops else None,
        "estimated_s": figures["step_time_s"]["estimated"],
        "predicted_s": plan.prediction.step_time_s,
        "exposed_s": figures["time"]["exposed_comm_s"] if flops else None,
        "hidden_s": figures["time"]["hidden_comm_s"] if flops else None,
        "copy_s": figures["time"]["copy_s"] if flops else None,
        "compile_s": figures["compile_s"],
    }


def by_program(rows: Rows) -> dict[str, list[dict[str, Any]]]:
    """Return the points of each program, those of less memory first."""
    ordered = sorted(rows, key=lambda point: rows[point]["predicted_bytes"])
    return {name: [rows[point] for point in ordered if point.startswith(f"{name} at ")] for name in CASES}


def constants(rows: Rows) -> dict[str, Any]:
    """Return the figures that `autoshard.plan` charges near the limit.

    All points of one program have the same error, so that they count as one.
    """
    by_name = by_program(rows)
    kinds = {
        "TPU": ("libtpu 0.0.51", FIDELITY, [name for name in CASES if not name.endswith(ON_GPUS)]),
        "GPU": ("XLA's compiler for H100s", GPU_FIDELITY, [name for name in CASES if name.endswith(ON_GPUS)]),
    }
    found = {}
    for kind, (compiler, file, names) in kinds.items():
        programs = [by_name[name] for name in names]
        # If XLA recomputes for GPUs, the compiled peak is the one after it.
        verdicts = ("fits", RECOMPUTE) if kind == "TPU" else ("fits",)
        errors = [statistics.mean(map(_error, large)) for mine in programs if (large := _large(mine, verdicts))]
        errors += [_error(row) for row in _large(map(_flat, json.loads(file.read_text()).values()), verdicts)]
        found[kind] = {
            **_onset(programs),
            "error_mean": round(statistics.mean(errors), 4),
            "error_deviation": round(statistics.stdev(errors), 4),
            "source": f"{compiler}: {sum(map(len, programs))} points of {len(programs)} programs "
            f"(experiments/results/headroom.md); errors of {len(errors)} programs that take a third of the memory or "
            f"more (also {file.stem}.md)",
        }
    return found


def _onset(programs: list[list[dict[str, Any]]]) -> dict[str, float]:
    """Return the share of the memory from which the compiler recomputes matmuls, and the communication that it then
    exposes.

    Values that it recomputes before, such as activation functions, took at most 1.5 % of a step.
    """
    points = [point for mine in programs for point in mine if point["flops"] is not None]
    above = [_share(point, "compiled") for point in points if point["flops"] >= AGAIN]
    below = [_share(point, "compiled") for point in points if point["flops"] < AGAIN]
    unhidden = [share for mine in programs if (share := _unhidden(mine)) is not None]
    return {
        "recompute_from": round((max(below) + min(above)) / 2, 3),
        "unhidden": round(statistics.mean(unhidden), 2),
    }


def _unhidden(points: list[dict[str, Any]]) -> float | None:
    """Return the share of hidden communication that is exposed once the compiler recomputes; None if unknown."""
    hidden = {
        verdict: [point["hidden_s"] for point in points if point["verdict"] == verdict]
        for verdict in ("fits", RECOMPUTE)
    }
    if not all(hidden.values()) or not any(hidden["fits"]):
        return None
    return 1 - statistics.mean(hidden[RECOMPUTE]) / statistics.mean(hidden["fits"])


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a row of `compile_fidelity.py` to a point."""
    peaks = row["peak_bytes"]
    return row | {"predicted_bytes": peaks["predicted"], "compiled_bytes": peaks["compiled"]}


def _large(points: Iterable[dict[str, Any]], verdicts: Collection[str]) -> list[dict[str, Any]]:
    """Select the large programs with these verdicts that are predicted to fit.

    For a program that does not fit, the compiler reports the memory after it tried to recompute, so that its error
    would mislead. So it would if a program fits against its prediction. No such program is planned either.
    """
    fitting = [point for point in points if point["verdict"] in verdicts]
    return [point for point in fitting if LARGE <= _share(point, "predicted") <= 1]


def _share(point: dict[str, Any], which: str) -> float:
    return point[f"{which}_bytes"] / point["limit_bytes"]


def _error(point: dict[str, Any]) -> float:
    return _share(point, "compiled") - _share(point, "predicted")


def table(rows: Rows) -> str:
    """Return the results as a page of Markdown."""
    return page(
        "# What full memory does to a step",
        """
`python experiments/fidelity/headroom.py`; libtpu and XLA for GPUs, no accelerator. One FSDP plan per program, its batch
raised. Shares are of the chip's memory; `recompute`: matrix flops beyond the program's; `hidden`: ms of communication
beside compute; `per sample`: estimated time of a sample over that of the first point, `foreseen` the same of our
prediction. What does not fit has under `compiled` what the compiler would need after it tried to recompute; so has what
GPUs recompute.
""",
        grid(
            "program | batch of a device | predicted | compiled | verdict | recompute | hidden | per sample | foreseen",
            (
                [name, point["batch"], *_cells(point, points[0])]
                for name, points in by_program(rows).items()
                for point in points
            ),
        ),
    )


def _cells(point: dict[str, Any], first: dict[str, Any]) -> list[str]:
    share = [f"{_share(point, which):.1%}" for which in ("predicted", "compiled")]
    if point["estimated_s"] is None:
        return [*share, point["verdict"], "-", "-", "-", "-"]
    times = [
        point[key] / point["batch"] / (first[key] / first["batch"]) if first[key] else 0.0
        for key in ("estimated_s", "predicted_s")
    ]
    figures = [f"{point['flops'] - 1:.1%}", f"{1e3 * point['hidden_s']:.1f}"]
    return [*share, point["verdict"], *figures, *(f"{time:.3f}" for time in times)]


def main() -> int:
    parser = own_parser(time_limit=600.0)
    parser.add_argument("--share", type=float, nargs="*", help="predicted shares of the chip's memory")
    parser.add_argument("--write", action="store_true", help="write the constants, too")
    given = parser.parse_args()
    known = Results(given.out / "headroom.json").rows
    shares = {name: given.share or (SHARES_ON_GPUS if name.endswith(ON_GPUS) else SHARES) for name in CASES}
    names = [*(f"{name} at {share:.2f}" for name in CASES for share in shares[name]), *known]
    code = Experiment(
        script=__file__,
        names=dict.fromkeys(names),
        work=lambda point: judge(point, given.time_limit),
        table=table,
    ).run(given)
    if given.write:
        known = Results(given.out / "headroom.json").rows
        CONSTANTS.write_text(json.dumps(constants(known), indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
