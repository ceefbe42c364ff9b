"""Simulated time inside one computation of a compiled program, by kind of work, with its timeline."""

import collections
import dataclasses
from collections.abc import Iterable


COMPUTE, WAITING = "compute", "exposed"
"""Lanes of the device's own work and of its waits; all other lanes are links."""


@dataclasses.dataclass(frozen=True, slots=True)
class Busy:
    """One span of time on a lane; seconds count from the start of the computation."""

    name: str
    lane: str
    start_s: float
    seconds: float


@dataclasses.dataclass(slots=True)
class Traffic:
    """Seconds of all transfers of one kind, and the exposed part of them."""

    sent_s: float = 0.0
    waited_s: float = 0.0

    def add(self, other: "Traffic", times: float) -> None:
        """Add other traffic, multiplied by `times`."""
        self.sent_s += other.sent_s * times
        self.waited_s += other.waited_s * times


class Clock:
    """Simulated time: work advances it, transfers occupy their links, and a wait for a transfer advances it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.compute = 0.0
        self.copies = 0.0
        self.flops = 0.0
        self.remat_flops = 0.0
        """FLOPs that the compiler's own rematerialisation added."""
        self.unknown_trips = 0
        self.by_kind: dict[str, float] = collections.defaultdict(float)
        self.busy: dict[str, float] = collections.defaultdict(float)
        """Time at which each link is free again."""
        self.traffic: dict[tuple[str, bool], Traffic] = collections.defaultdict(Traffic)
        """(Kind of collective, True between slices) -> seconds of its transfers."""
        self.pending: dict[str, tuple[float, str, bool]] = {}
        """Key of a running transfer -> the time of its end, its kind, and True between slices."""
        self.spans: list[Busy] = []

    @property
    def communication(self) -> float:
        """Seconds of all transfers between devices."""
        return sum(each.sent_s for each in self.traffic.values())

    @property
    def exposed(self) -> float:
        """Seconds of transfers that the device waits for."""
        return sum(each.waited_s for each in self.traffic.values())

    def work(self, seconds: float, kind: str, name: str) -> None:
        """Move the clock past a computation of the device."""
        if seconds > 0:
            self.spans.append(Busy(name, COMPUTE, self.now, seconds))
        self.now += seconds
        self.compute += seconds
        self.by_kind[kind] += seconds

    def transfer(
        self, seconds: float, links: Iterable[str], name: str, key: str, kind: str, far: bool = False
    ) -> float:
        """Start a transfer as soon as all of its links are free; return the time at which it ends.

        - `links`: links that it occupies.
        - `name`: title of its span.
        - `key`: name for `end`; empty if nothing waits for it by name.
        - `kind`: kind of collective, or `copy`.
        - `far`: True between slices.
        """
        used = sorted(links)
        begin = max([self.now, *(self.busy[link] for link in used)])
        until = begin + seconds
        for link in used:
            self.busy[link] = until
        self.spans += [Busy(name, lane, begin, seconds) for lane in _lanes(used)]
        if kind != "copy":
            self.traffic[kind, far].sent_s += seconds
        if key:
            earlier = self.pending.get(key)
            self.pending[key] = (max(until, earlier[0]) if earlier else until, kind, far)
        return until

    def end(self, key: str) -> None:
        """Wait for the pending transfer with that key, if there is one."""
        if key in self.pending:
            self.wait(*self.pending.pop(key))

    def wait(self, until: float, kind: str, far: bool = False) -> None:
        """Move the clock to the end of a transfer, and count the wait."""
        waited = max(0.0, until - self.now)
        if waited > 0:
            self.spans.append(Busy(f"waiting for {kind}", WAITING, self.now, waited))
        self.now += waited
        self.by_kind[kind] += waited
        if kind == "copy":
            self.copies += waited
        else:
            self.traffic[kind, far].waited_s += waited

    def finish(self) -> None:
        """Wait for all pending transfers."""
        for until, kind, far in self.pending.values():
            self.wait(until, kind, far)
        self.pending.clear()

    def add(self, other: "Clock", times: float) -> None:
        """Run another computation so many times; the timeline shows all runs as one."""
        self.spans += [Busy(s.name, s.lane, self.now + s.start_s * times, s.seconds * times) for s in other.spans]
        self.now += other.now * times
        self.compute += other.compute * times
        self.copies += other.copies * times
        self.flops += other.flops * times
        self.remat_flops += other.remat_flops * times
        self.unknown_trips += other.unknown_trips
        for kind, seconds in other.by_kind.items():
            self.by_kind[kind] += seconds * times
        for what, traffic in other.traffic.items():
            self.traffic[what].add(traffic, times)


def _lanes(links: list[str]) -> list[str]:
    """Return the lanes of links in the timeline; an axis used in both directions (`x+`, `x-`) is one lane."""
    both = {link[:-1] for link in links if link.endswith("+") and f"{link[:-1]}-" in links}
    return sorted({link[:-1] if link[:-1] in both and link[-1] in "+-" else link for link in links})
