"""Times of collectives from JAX's profiler, whose ops have the names that the compiler gave them.

On CPU the profiler's XSpace has one event for every op that a device ran (`hlo_op`, `device_ordinal`, `run_id`). An op
that runs asynchronously has a second event at its end. On GPU and TPU it has one plane for each device, whose events
are named after ops.
"""

import collections
import dataclasses
import itertools as it
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autoshard.base.processes import scratch_folder
from autoshard.exec.devices.profiles import events_in
from autoshard.exec.hlo.compiled_collectives import CompiledCollective


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveTime:
    """All collectives of one kind over the same mesh axes in one step."""

    kind: str
    """Kind of the collectives, such as `all-gather`."""
    axes: tuple[str, ...]
    """Mesh axes of their groups."""
    seconds: float
    """Seconds of one device, including waiting for other devices: the mean over this process's devices, and the median
    over the profiled steps.
    """
    count: int
    """Executions on one device in one step."""


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Times of collectives, and the reason if some are missing."""

    times: tuple[CollectiveTime, ...]
    """Times by kind and axes, in alphabetical order."""
    note: str = ""
    """Reason if times are missing; else empty."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """One op's execution on one device; seconds are on the profiler's clock."""

    op: str
    """Name of the HLO instruction."""
    module: str
    """Name of the HLO module; empty if the profiler gives none."""
    device: int
    """Number of the device."""
    run: int
    """Number of the step, if the profiler gives one; else -1."""
    start_s: float
    """Start in seconds."""
    seconds: float
    """Seconds until its end, that of an asynchronous op included."""


def time_collectives(
    step: Callable[[], Any], steps: int, module: str, found: Sequence[CompiledCollective]
) -> CollectiveTimes:
    """Run a step under the profiler and return the times of its collectives.

    - `step`: runs one step and waits for it.
    - `steps`: number of steps to profile.
    - `module`: name of the HLO module whose events count, with events that name no module.
    - `found`: collectives in the module's text, which the events are matched with.

    If the profiler does not start or its output cannot be read, there are no times and a note. If it does not start, no
    step runs.
    """
    import jax

    with scratch_folder("profile") as directory:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(str(directory), profiler_options=options)
        except RuntimeError as error:
            return CollectiveTimes((), f"the profiler did not start: {' '.join(str(error).split())[:200]}")
        try:
            for _ in range(steps):
                step()
        finally:
            jax.profiler.stop_trace()
        try:
            ran = [event for file in sorted(directory.rglob("*.xplane.pb")) for event in read_events(file)]
        except ValueError as error:
            return CollectiveTimes((), f"the profiler's output cannot be read: {error}")
    return collective_times([event for event in ran if event.module in ("", module)], steps, found)


def read_events(file: Path) -> list[Ran]:
    """Read every op that an XSpace file reports as run by a device, by plane in file order.

    Raises `ValueError` if the file is no XSpace.
    """
    ran: list[Ran] = []
    for plane, events in it.groupby(events_in(file), key=lambda event: event.plane):
        number = re.search(r"/device:\w+:(\d+)", plane)
        ends: dict[int, float] = {}
        begun: list[tuple[Ran, int]] = []
        for event in events:
            stats = event.stats
            start, seconds = event.start_ns * 1e-9, event.duration_ns * 1e-9
            if event.name.startswith("end: "):
                ends[_whole(stats.get("_c"))] = start + seconds
                continue
            op = str(stats.get("hlo_op") or (event.name if number and event.line == "XLA Ops" else ""))
            if not op:
                continue
            device = _whole(stats.get("device_ordinal", number[1] if number else 0))
            name = op.partition(" = ")[0].lstrip("%")
            execution = Ran(name, str(stats.get("hlo_module", "")), device, _whole(stats.get("run_id")), start, seconds)
            begun.append((execution, _whole(stats.get("_p"))))
        for execution, key in begun:
            # An asynchronous op ends with the event that has its number.
            until = max(execution.start_s + execution.seconds, ends.get(key, 0.0) if key >= 0 else 0.0)
            ran.append(dataclasses.replace(execution, seconds=until - execution.start_s))
    return ran


def _whole(value: Any) -> int:
    """Convert a statistic to a whole number; -1 if it is none."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1


def collective_times(ran: Sequence[Ran], steps: int, found: Sequence[CompiledCollective]) -> CollectiveTimes:
    """Return the time of collectives in one step, by kind and axes.

    - `ran`: all ops of the profiled steps.
    - `steps`: number of profiled steps, which divides the times if the profile has no step numbers.
    - `found`: collectives in the compiled text.

    Times are means over devices and medians over steps. A note replaces them if the profile has no ops or none of
    `found`.
    """
    if not ran:
        return CollectiveTimes((), "the profiler recorded no op of the compiled program on these devices")
    runs: dict[int, list[Ran]] = {}
    for event in ran:
        runs.setdefault(event.run, []).append(event)
    by_op = {name: collective for collective in found for name in _names(collective)}
    # A profile without step numbers puts all steps into one run.
    shared = 1 if len(runs) > 1 else steps
    devices = len({event.device for event in ran})
    totals: dict[tuple[str, tuple[str, ...]], list[float]] = collections.defaultdict(lambda: [0.0] * len(runs))
    counts: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for number, events in enumerate(runs.values()):
        for event in events:
            collective = by_op.get(event.op)
            if collective is not None:
                key = (collective.kind, collective.axes)
                totals[key][number] += event.seconds / devices / shared
                counts[key] += event.op == collective.name
    times = tuple(
        CollectiveTime(kind, axes, statistics.median(each), round(counts[kind, axes] / len(runs) / devices / shared))
        for (kind, axes), each in sorted(totals.items())
    )
    note = "" if times or not found else "the profiler recorded no collective by the name that the compiler gave it"
    return CollectiveTimes(times, note)


def _names(collective: CompiledCollective) -> tuple[str, ...]:
    """Return the op's names in a profile: an asynchronous collective has a start and a done op, any other only its
    own.
    """
    name = collective.name
    return (name, name.replace("-start", "-done")) if "-start" in name else (name,)
