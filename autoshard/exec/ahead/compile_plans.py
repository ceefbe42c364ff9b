"""Compilation of a plan by the real compiler without devices, compared with the plan's predictions."""

import collections
import concurrent.futures
import dataclasses
import enum
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autoshard.base.units import format_bytes, format_seconds
from autoshard.base.worker_pool import as_ended
from autoshard.errors import UserError
from autoshard.exec.ahead.ahead_process import CompileJob, compile_job, compile_without_devices, try_job
from autoshard.exec.ahead.compile_targets import Compiled
from autoshard.exec.ahead.live_ranges import device_peak, memory_at_peak, reserved_bytes
from autoshard.exec.ahead.time_band import outside_band
from autoshard.exec.hlo.compiled_collectives import CompiledCollective, plan_mesh, read_collectives, wire_by_axis
from autoshard.exec.hlo.compiled_flops import FlopCheck, check_flops
from autoshard.exec.hlo.hlo_text import parse_hlo
from autoshard.exec.hlo.schedule_estimate import Estimate, decided, estimate
from autoshard.exec.hlo.unforeseen import Unforeseen, involuntary, unforeseen
from autoshard.exec.run.measurement import verify_program
from autoshard.planning import Plan
from autoshard.program import Program


class Verdict(enum.StrEnum):
    """Verdict on the fit of a compiled program into the memory of one device."""

    FITS = "fits"
    FITS_WITH_REMAT = "fits only with the compiler's own remat"
    DOES_NOT_FIT = "does not fit"


NOT_FOLLOWED = 1.25
"""Compiled over predicted bytes on the wire above which unforeseen collectives mean that the plan is not followed."""

_SHOWN = 8
"""Most lines on unforeseen collectives."""
_LARGE = 0.05
"""Share of all bytes on the wire from which an unforeseen collective is worth a pin."""


_REMATERIALISED = re.compile(r"%[\w.\-]+\.remat[\w.\-]* = ")
"""The definition of an instruction that the compiler added to compute a value again."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompileReport:
    """Compiled program against the plan's predictions; sizes are bytes of one device."""

    verdict: Verdict
    over_bytes: int
    """Bytes by which the program exceeds the memory of a device; 0 if it fits."""
    available_bytes: int | None
    """The compiler's memory limit in bytes; None if the program fits."""
    peak_predicted: int
    """Predicted peak bytes of one device."""
    peak_compiled: int | None
    """Least bytes with which the compiled program runs: live bytes at its peak, or the bytes it needs if it does not
    fit. None if the compiler reported no figure.
    """
    reserved_compiled: int | None
    """Bytes of a device's memory that the compiled program reserves from its start to its end. These are arguments,
    results that share no memory with an argument, and the compiler's arena. None if the program does not fit.
    """
    memory_predicted: dict[str, int]
    """Predicted bytes of each kind at the peak, as `Prediction.memory` names the kinds."""
    memory_compiled: dict[str, int]
    """Bytes of `arguments`, `results`, `donated`, `temporaries` and `host` (in the host's memory). With machine code
    also `peak`, without it also `on_chip`.
    """
    host_predicted: int
    """Predicted bytes of the host's memory that the program uses for one device."""
    memory_at_peak: dict[str, int]
    """Bytes of each kind at the peak, from the compiler's live ranges; empty if it wrote none."""
    wire_predicted: dict[str, int]
    """Predicted bytes that one device sends in a step, by mesh axis."""
    wire_compiled: dict[str, int]
    """Bytes of the compiled collectives; empty if the program does not fit, as the next two fields are."""
    collectives: tuple[CompiledCollective, ...]
    """Collectives of the compiled program."""
    unforeseen: tuple[Unforeseen, ...]
    """Collectives of the compiled program that the plan does not predict."""
    step_time_predicted_s: float
    estimate: Estimate | None
    """Step time estimated from the compiled schedule; None, as `flops`, if there is no compiled text."""
    flops: FlopCheck | None
    """Matrix FLOPs of the compiled program, compared with those of the traced program and of the model."""
    compile_s: float
    """Seconds that the compiler took here."""
    hlo: str
    """Scheduled HLO of the program, as text; empty if the compiler found that it does not fit."""
    warnings: tuple[str, ...]
    """Sentences for the user on the compilation."""

    @property
    def followed(self) -> bool:
        """False if the compiled program sends far more than the plan, by collectives that the plan does not have.

        Bytes on the wire are counted, not estimated.
        """
        sent, planned = sum(self.wire_compiled.values()), sum(self.wire_predicted.values())
        return not self.unforeseen or sent <= NOT_FOLLOWED * planned


UNCODED = "no machine code was written: a kernel that the code generator refuses would not be seen"
"""Warning of a quick compilation."""


def compile_plan(program: Program, plan: Plan, time_limit: float = 600.0, *, quick: bool = False) -> CompileReport:
    """Compile the program under the plan without devices: by libtpu for TPUs, by JAX's CUDA plugin for GPUs.

    - `time_limit`: most seconds of compiling.
    - `quick`: end libtpu before it writes machine code, which takes most of its time. All figures of the report are
      known by then, but a kernel that the code generator refuses goes unnoticed. GPUs always compile completely.

    A program that does not fit gives a report too. The compiler runs in a subprocess, which is gone afterwards in
    every case. Raises `UserError` if the compiler is missing, refuses the topology or exceeds `time_limit`, or if
    the program is not the plan's.
    """
    program = verify_program(program, plan)
    return report(program, plan, compile_without_devices(program, plan, time_limit, quick))


def compile_plans(
    program: Program,
    plans: Mapping[str, Plan],
    time_limit: float = 600.0,
    *,
    quick: bool = False,
    executor: concurrent.futures.Executor | None = None,
    progress: Callable[[str], None] | None = None,
) -> Iterator[tuple[str, CompileReport | UserError]]:
    """Yield each plan's name and its report, compiled as by `compile_plan`, or its `UserError`, in order.

    - `plans`: plans of the program by name.
    - `time_limit`, `quick`: as for `compile_plan`, for each plan.
    - `executor`: runs the compilations as its tasks. Any `concurrent.futures` executor works; the nodes of a cluster
      need the compiler. Without it, plans compile one after the other.
    - `progress`: receives a line before each plan.

    Raises `UserError` if workers die repeatedly.
    """
    say = progress or (lambda line: None)
    if executor is None:
        for name, plan in plans.items():
            say(f"Compiling {name} for {plan.topology}")
            try:
                yield name, compile_plan(program, plan, time_limit, quick=quick)
            except UserError as error:
                yield name, error
        return
    reports: dict[str, CompileReport | UserError] = {}
    submitted: list[tuple[str, Program]] = []

    def jobs() -> Iterator[CompileJob]:
        """Yield a job for each plan of this program; record the errors of the others."""
        for name, plan in plans.items():
            say(f"Compiling {name} for {plan.topology}")
            try:
                verified = verify_program(program, plan)
                job = compile_job(verified, plan, time_limit, quick)
            except UserError as error:
                reports[name] = error
                continue
            submitted.append((name, verified))
            yield job

    unreported = list(plans)
    try:
        for number, outcome in as_ended(executor, try_job, jobs()):
            name, verified = submitted[number]
            reports[name] = outcome if isinstance(outcome, UserError) else report(verified, plans[name], outcome)
            while unreported and unreported[0] in reports:
                yield unreported[0], reports[unreported.pop(0)]
    except concurrent.futures.BrokenExecutor as error:
        raise UserError(f"a worker that compiles died again and again ({error}); compile without --on.") from error
    yield from ((name, reports[name]) for name in unreported)


def report(program: Program, plan: Plan, compiled: Compiled) -> CompileReport:
    """Return the report of a compiled program (see `compile_plan`).

    It does not fit if the compiler gave no text, or if a GPU's peak exceeds the usable memory. An unknown peak
    counts as fitting. It fits only with remat if the text has instructions that the compiler rematerialised.
    `over_bytes` is 0 without text if the compiler gave no figures.

    Involuntary full rematerializations become a warning. With a text, so do unknown trip counts, missing machine
    code and unexpected FLOPs.
    """
    prediction = plan.prediction
    common = {
        "peak_predicted": prediction.peak_bytes,
        "memory_predicted": dict(prediction.memory),
        "host_predicted": prediction.host_bytes,
        "memory_compiled": dict(compiled.memory),
        "wire_predicted": dict(prediction.wire_bytes),
        "step_time_predicted_s": prediction.step_time_s,
        "compile_s": compiled.compile_s,
        "hlo": compiled.text,
    }
    if not compiled.text:
        over = (compiled.needed_bytes or 0) - (compiled.available_bytes or 0)
        return CompileReport(
            verdict=Verdict.DOES_NOT_FIT,
            over_bytes=max(0, over),
            available_bytes=compiled.available_bytes,
            peak_compiled=compiled.needed_bytes,
            reserved_compiled=None,
            memory_at_peak={},
            wire_compiled={},
            collectives=(),
            unforeseen=(),
            estimate=None,
            flops=None,
            warnings=_warnings(compiled.log),
            **common,
        )
    mesh = plan_mesh(plan)
    module = parse_hlo(compiled.text)
    collectives = read_collectives(module, mesh)
    timed = estimate(module, mesh)
    flops = check_flops(program, timed, mesh.num_devices, plan.origin.padded_flops, plan.origin.padded)
    at_peak = memory_at_peak(compiled, plan)
    peak = device_peak(compiled, at_peak)
    limit = mesh.topology.usable_bytes
    over = peak - limit if peak is not None and mesh.topology.traits.described else 0  # the GPU compiler knows no limit
    rematerialised = _REMATERIALISED.search(compiled.text) is not None
    warnings = list(_warnings(compiled.log))
    if timed.unknown_trips:
        warnings.append(f"{timed.unknown_trips} loops have a trip count that the compiled text does not tell")
    if not compiled.coded:
        warnings.append(UNCODED)
    if flops.complaint:
        warnings.append(flops.complaint)
    warnings += outside_band(plan, timed)
    return CompileReport(
        verdict=Verdict.DOES_NOT_FIT if over > 0 else Verdict.FITS_WITH_REMAT if rematerialised else Verdict.FITS,
        over_bytes=max(0, over),
        available_bytes=limit if over > 0 else None,
        peak_compiled=peak,
        reserved_compiled=reserved_bytes(compiled),
        memory_at_peak=at_peak,
        wire_compiled=wire_by_axis(collectives),
        collectives=tuple(collectives),
        unforeseen=unforeseen(program, plan, collectives, compiled.log),
        estimate=timed,
        flops=flops,
        warnings=tuple(warnings),
        **common,
    )


def _warnings(log: str) -> tuple[str, ...]:
    """Return one sentence with the number of involuntary full rematerializations in a log; none if there are none."""
    lines = involuntary(log)
    return (f"the compiler reports {len(lines)} involuntary full rematerializations",) if lines else ()


def compile_figures(result: CompileReport) -> dict[str, Any]:
    """Return the JSON object of `autoshard compile --json`.

    Without compiled text `time`, `flops`, `model_flops_ratio` and all of `step_time_s` but `predicted` are None. The
    compiled `host_bytes` are None if the compiler gave no memory.
    """
    axes = sorted({*result.wire_predicted, *result.wire_compiled})
    timed = result.estimate
    return {
        "verdict": result.verdict.value,
        "over_bytes": result.over_bytes,
        "peak_bytes": {
            "predicted": result.peak_predicted,
            "compiled": result.peak_compiled,
            "reserved": result.reserved_compiled,
        },
        "host_bytes": {"predicted": result.host_predicted, "compiled": result.memory_compiled.get("host")},
        "memory": {
            "predicted": result.memory_predicted,
            "compiled": result.memory_compiled,
            "compiled_at_peak": result.memory_at_peak,
        },
        "wire_bytes": {
            axis: {
                "predicted": result.wire_predicted.get(axis, 0),
                "compiled": result.wire_compiled.get(axis, 0),
            }
            for axis in axes
        },
        "collectives": [
            {
                "kind": c.kind,
                "axes": list(c.axes),
                "wire_bytes": round(c.wire_bytes),
                "count": c.count,
                "in_loop": c.in_loop,
                "asynchronous": c.asynchronous,
                "network": c.network,
                "op": c.source or c.name,
                "line": c.line,
            }
            for c in result.collectives
        ],
        "step_time_s": {
            "predicted": result.step_time_predicted_s,
            "estimated": timed.step_time_s if timed else None,
            "error": timed.error if timed else None,
            "followed": result.followed,
            "undecided": not decided(timed.step_time_s, result.step_time_predicted_s, timed.error) if timed else None,
        },
        "time": {
            "compute_s": timed.compute_s,
            "exposed_comm_s": timed.exposed_comm_s,
            "hidden_comm_s": timed.hidden_comm_s,
            "copy_s": timed.copy_s,
            "by_kind": timed.by_kind,
            "spans": [dataclasses.asdict(span) for span in timed.spans],
        }
        if timed
        else None,
        "flops": {
            "program": result.flops.program,
            "compiled": result.flops.compiled,
            "remat": result.flops.remat,
            "model": result.flops.model,
        }
        if result.flops
        else None,
        "model_flops_ratio": result.flops.model_ratio if result.flops else None,
        "unforeseen": [dataclasses.asdict(row) for row in result.unforeseen],
        "compile_s": result.compile_s,
        "warnings": list(result.warnings),
    }


def compile_lines(result: CompileReport) -> list[str]:
    """Return the lines of the printed report, with the twelve sorts of collectives of most bytes on the wire."""
    lines = [f"Verdict: {result.verdict.value}"]
    if result.verdict is Verdict.DOES_NOT_FIT and result.available_bytes:
        lines[0] += (
            f", by {format_bytes(result.over_bytes)} "
            f"(needs {format_bytes(result.peak_compiled or 0)}, has {format_bytes(result.available_bytes)})"
        )
    elif result.verdict is Verdict.FITS_WITH_REMAT:
        count = len(set(_REMATERIALISED.findall(result.hlo)))
        lines[0] += (
            f": it computes {count} value{'s' if count > 1 else ''} again; without that the plan foresees a peak of "
            f"{format_bytes(result.peak_predicted)}"
        )
    compiled = "not said" if result.peak_compiled is None else format_bytes(result.peak_compiled)
    lines.append(f"Peak memory of a device: predicted {format_bytes(result.peak_predicted)}, compiled {compiled}")
    if result.reserved_compiled is not None:
        lines[-1] += f"; the program reserves {format_bytes(result.reserved_compiled)}"
    for kind in sorted({*result.memory_predicted, *result.memory_at_peak} if result.memory_at_peak else ()):
        lines.append(
            f"  {kind.replace('_', ' ')}: predicted {format_bytes(result.memory_predicted.get(kind, 0))}, "
            f"compiled {format_bytes(result.memory_at_peak.get(kind, 0))}"
        )
    host = result.memory_compiled.get("host", 0)
    if result.host_predicted or host:
        lines.append(
            f"Memory of the host for a device: predicted {format_bytes(result.host_predicted)}, "
            f"compiled {format_bytes(host)}"
        )
    for axis in sorted({*result.wire_predicted, *result.wire_compiled}):
        lines.append(
            f"On the wire over {axis}: predicted {format_bytes(result.wire_predicted.get(axis, 0))}, "
            f"compiled {format_bytes(result.wire_compiled.get(axis, 0))}"
        )
    timed = result.estimate
    if timed is not None:
        lines.append(
            f"Step time: predicted {format_seconds(result.step_time_predicted_s)}, estimated from the schedule "
            f"{format_seconds(timed.step_time_s)} +- {timed.error:.0%} (compute {format_seconds(timed.compute_s)}, "
            f"exposed communication {format_seconds(timed.exposed_comm_s)})"
        )
        if not result.followed:
            lines.extend(_not_followed(result))
        elif not decided(timed.step_time_s, result.step_time_predicted_s, timed.error):
            lines[-1] += ": undecided, they differ by less than the estimator's error"
    if result.flops is not None:
        model = result.flops.model_ratio
        lines.append(f"Matrix flops: {result.flops.ratio:.2f} x the program's")
        lines[-1] += f", {model:.2f} x the model's" if model is not None else ""
        again = result.flops.remat / result.flops.program if result.flops.program else 0.0
        lines[-1] += (
            f"; {again:.2f} x of it is what the compiler computes again to save memory" if again >= 0.01 else ""
        )
    return [*lines, *_sent(result), *compile_notes(result), f"Compiled in {result.compile_s:.1f} s"]


def _sent(result: CompileReport) -> list[str]:
    """Return a line for each of the twelve sorts of collectives that send most; those that differ in size are apart."""
    sorts = collections.defaultdict[tuple[str, str, int], list[CompiledCollective]](list)
    for collective in result.collectives:
        flags = [
            "of one number" if collective.kind == "all-reduce" and collective.size_bytes <= 4 else "",
            "in a loop" if collective.in_loop else "",
            "async" if collective.asynchronous else "sync",
            "between slices" if collective.network else "",
        ]
        name = f"{collective.kind} over {'+'.join(collective.axes)}"
        each = round(collective.wire_bytes / max(collective.count, 1))
        sorts[name, ", ".join(filter(None, flags)), each].append(collective)
    most = sorted(sorts.items(), key=lambda item: -sum(c.wire_bytes for c in item[1]))[:12]
    return [
        f"  {sum(c.count for c in members)} x {name}: {format_bytes(sum(c.wire_bytes for c in members))} ({flags})"
        for (name, flags, _), members in most
    ]


def _not_followed(result: CompileReport) -> list[str]:
    """Return the lines on a plan that the compiler does not follow: the bytes, the place, and the pins that help."""
    sent, planned = sum(result.wire_compiled.values()), sum(result.wire_predicted.values())
    worst = result.unforeseen[0]
    times = f", {sent / planned:.1f} times as much as planned" if planned else ", where the plan sends nothing"
    line = f" at {worst.line}" if worst.line else ""
    lines = [
        f"The compiler does not follow the plan: a device sends {format_bytes(sent)} a step{times}. These bytes are "
        f"counted, not estimated. Most of what was not planned is {worst.kind} over {'+'.join(worst.axes)}{line}, "
        f"{worst.count} times a step."
    ]
    pins = dict.fromkeys(row.pin for row in result.unforeseen if row.pin and row.share >= _LARGE)
    lines.extend(f"  against it: autoshard plan ... --pin {shlex.quote(pin)}" for pin in pins)
    return lines


def compile_notes(result: CompileReport) -> list[str]:
    """Return the lines of the printed report on unforeseen collectives, then the warnings; empty without any.

    Collectives with equal lines share one, which begins with their number. After `_SHOWN` lines the others have one.
    """
    lines: dict[str, list[int]] = collections.defaultdict(list)
    for row in result.unforeseen:
        where = f" at {row.line}" if row.line else ""
        specs = f", {row.before} -> {row.after}" if row.after else ""
        lines[
            f"{row.kind} over {'+'.join(row.axes)}, {format_bytes(row.wire_bytes)} "
            f"({row.share:.0%} of all): {row.op}{where}{specs}{f' ({row.note})' if row.note else ''}"
        ].append(row.wire_bytes)
    shown = list(lines.items())[:_SHOWN]
    texts = [f"Unforeseen: {f'{len(each)} x ' if len(each) > 1 else ''}{line}" for line, each in shown]
    if others := [size for each in list(lines.values())[_SHOWN:] for size in each]:
        texts.append(f"Unforeseen: {len(others)} more, {format_bytes(sum(others))} in all")
    return [*texts, *result.warnings]
