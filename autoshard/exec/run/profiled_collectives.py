"""How long collectives took, by JAX's profiler: its ops by the names that the compiler gave them.

The profiler's XSpace has, on CPU, an event for every op that a device ran (`hlo_op`, `device_ordinal`, `run_id`) and a
second one where an op that runs on its own ends; on GPU and TPU a plane for each device with events named after ops.
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
    """All collectives of one kind over the same mesh axes, in one step."""

    kind: str
    axes: tuple[str, ...]
    seconds: float
    """Seconds of one device, waiting for other devices included: the mean over the devices of this process, and the
    median over the profiled steps."""
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """What the profiler gave, and why something is missing."""

    times: tuple[CollectiveTime, ...]
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """One op on one device; seconds on the profiler's clock."""

    op: str
    module: str
    device: int
    run: int
    """Which step, if the profiler says."""
    start_s: float
    seconds: float


def time_collectives(
    step: Callable[[], Any], steps: int, module: str, found: Sequence[CompiledCollective]
) -> CollectiveTimes:
    """Run `step` so many times under the profiler; what it saw of `module` (the HLO module's name) is matched with the
    collectives `found` in its text."""
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
            return CollectiveTimes((), f"what the profiler wrote cannot be read: {error}")
    return collective_times([event for event in ran if event.module in ("", module)], steps, found)


def read_events(file: Path) -> list[Ran]:
    """Every op that an XSpace file says a device ran."""
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
            found = Ran(name, str(stats.get("hlo_module", "")), device, _whole(stats.get("run_id")), start, seconds)
            begun.append((found, _whole(stats.get("_p"))))
        for found, key in begun:
            until = max(found.start_s + found.seconds, ends.get(key, 0.0) if key >= 0 else 0.0)
            ran.append(dataclasses.replace(found, seconds=until - found.start_s))
    return ran


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1


def collective_times(ran: Sequence[Ran], steps: int, found: Sequence[CompiledCollective]) -> CollectiveTimes:
    """The time of collectives by kind and axes in a step, from all ops of `steps` profiled ones."""
    if not ran:
        return CollectiveTimes((), "the profiler recorded no op of the compiled program on these devices")
    runs: dict[int, list[Ran]] = {}
    for event in ran:
        runs.setdefault(event.run, []).append(event)
    named = {name: collective for collective in found for name in _names(collective)}
    # Without step numbers in the profile all steps are one run.
    shared = 1 if len(runs) > 1 else steps
    devices = len({event.device for event in ran})
    totals: dict[tuple[str, tuple[str, ...]], list[float]] = collections.defaultdict(lambda: [0.0] * len(runs))
    counts: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for number, events in enumerate(runs.values()):
        for event in events:
            collective = named.get(event.op)
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
    """The op's names in a profile: an asynchronous one has a start and a done."""
    name = collective.name
    return (name, name.replace("-start", "-done")) if "-start" in name else (name,)
