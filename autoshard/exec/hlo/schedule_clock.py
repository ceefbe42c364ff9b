"""Time inside one computation of a compiled program, what it was spent on, and when each part of it ran."""

import collections
import dataclasses
from collections.abc import Iterable


COMPUTE, WAITING = "compute", "exposed"
"""Lanes of what runs on the device itself, and of what it waits for; other lanes are links."""


@dataclasses.dataclass(frozen=True, slots=True)
class Busy:
    """One thing that takes time; seconds from the start of the computation."""

    name: str
    lane: str
    start_s: float
    seconds: float


@dataclasses.dataclass(slots=True)
class Traffic:
    """Seconds of all transfers of one kind, and the part of them that the device waits for."""

    sent_s: float = 0.0
    waited_s: float = 0.0

    def add(self, other: "Traffic", times: float) -> None:
        self.sent_s += other.sent_s * times
        self.waited_s += other.waited_s * times


class Clock:
    """Simulated time: work goes on it, transfers go on their links, and waiting for one moves it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.compute = 0.0
        self.copies = 0.0
        self.flops = 0.0
        self.again = 0.0
        """Flops that the compiler's own rematerialisation added."""
        self.unknown_trips = 0
        self.by_kind: dict[str, float] = collections.defaultdict(float)
        self.busy: dict[str, float] = collections.defaultdict(float)
        """When each link is free again."""
        self.traffic: dict[tuple[str, bool], Traffic] = collections.defaultdict(Traffic)
        """Kind of collective, and whether it goes between slices -> how long its transfers take."""
        self.pending: dict[str, tuple[float, str, bool]] = {}
        """Key of a running transfer -> when it ends, its kind, and whether it goes between slices."""
        self.spans: list[Busy] = []

    @property
    def communication(self) -> float:
        """Seconds of all transfers between devices."""
        return sum(each.sent_s for each in self.traffic.values())

    @property
    def exposed(self) -> float:
        """The part of them that the device waits for."""
        return sum(each.waited_s for each in self.traffic.values())

    def work(self, seconds: float, kind: str, name: str) -> None:
        """The device computes."""
        if seconds > 0:
            self.spans.append(Busy(name, COMPUTE, self.now, seconds))
        self.now += seconds
        self.compute += seconds
        self.by_kind[kind] += seconds

    def transfer(
        self, seconds: float, links: Iterable[str], name: str, key: str, kind: str, far: bool = False
    ) -> float:
        """A transfer takes its links as soon as all are free; gives when it ends. `key` names it for `end`, if any;
        `far`: between slices."""
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
        """The device waits for a transfer that was begun."""
        if key in self.pending:
            self.wait(*self.pending.pop(key))

    def wait(self, until: float, kind: str, far: bool = False) -> None:
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
        """Wait for all that still runs."""
        for until, kind, far in self.pending.values():
            self.wait(until, kind, far)
        self.pending.clear()

    def add(self, other: "Clock", times: float) -> None:
        """Run another computation so many times; all runs are drawn as one."""
        self.spans += [Busy(s.name, s.lane, self.now + s.start_s * times, s.seconds * times) for s in other.spans]
        self.now += other.now * times
        self.compute += other.compute * times
        self.copies += other.copies * times
        self.flops += other.flops * times
        self.again += other.again * times
        self.unknown_trips += other.unknown_trips
        for kind, seconds in other.by_kind.items():
            self.by_kind[kind] += seconds * times
        for what, traffic in other.traffic.items():
            self.traffic[what].add(traffic, times)


def _lanes(links: list[str]) -> list[str]:
    """Links as lanes to draw: an axis that is used both ways (`x+`, `x-`) is one."""
    both = {link[:-1] for link in links if link.endswith("+") and f"{link[:-1]}-" in links}
    return sorted({link[:-1] if link[:-1] in both and link[-1] in "+-" else link for link in links})
