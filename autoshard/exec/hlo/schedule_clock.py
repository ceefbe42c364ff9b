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
    """Title in the timeline."""
    lane: str
    """`COMPUTE`, `WAITING`, or a link."""
    start_s: float
    """Start, in seconds from the start of the computation."""
    seconds: float
    """Length in seconds, of all trips together in a loop."""


@dataclasses.dataclass(slots=True)
class Traffic:
    """Seconds of all transfers of one kind, and the exposed part of them."""

    sent_s: float = 0.0
    """Seconds of transfers, hidden or not."""
    waited_s: float = 0.0
    """Seconds that the device waits for them."""

    def add(self, other: "Traffic", times: float) -> None:
        """Add the seconds of other traffic, multiplied by `times`."""
        self.sent_s += other.sent_s * times
        self.waited_s += other.waited_s * times


class Clock:
    """Simulated time: work advances it, transfers occupy their links, and a wait for a transfer advances it.

    All times are seconds from the start of the computation.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.compute = 0.0
        """Seconds of the device's own work."""
        self.copies = 0.0
        """Seconds of waits for copies between memories."""
        self.flops = 0.0
        """Matrix FLOPs of one device, which the caller adds."""
        self.remat_flops = 0.0
        """FLOPs that the compiler's own rematerialisation added."""
        self.unknown_trips = 0
        """Number of loops without a known trip count."""
        self.by_kind: dict[str, float] = collections.defaultdict(float)
        """Kind of work, collective or copy -> seconds by which it moved the clock."""
        self.busy: dict[str, float] = collections.defaultdict(float)
        """Time at which each link is free again."""
        self.traffic: dict[tuple[str, bool], Traffic] = collections.defaultdict(Traffic)
        """(Kind of collective, True between slices) -> seconds of its transfers."""
        self.pending: dict[str, tuple[float, str, bool]] = {}
        """Key of a running transfer -> the time of its end, its kind, and True between slices."""
        self.spans: list[Busy] = []
        """Timeline, in the order in which spans were added."""

    @property
    def communication(self) -> float:
        """Seconds of all transfers between devices, exposed or hidden."""
        return sum(each.sent_s for each in self.traffic.values())

    @property
    def exposed(self) -> float:
        """Seconds of transfers that the device waits for."""
        return sum(each.waited_s for each in self.traffic.values())

    def work(self, seconds: float, kind: str, name: str) -> None:
        """Move the clock past `seconds` of the device's own work, and count them under `kind`; 0 seconds leave no
        span.
        """
        if seconds > 0:
            self.spans.append(Busy(name, COMPUTE, self.now, seconds))
        self.now += seconds
        self.compute += seconds
        self.by_kind[kind] += seconds

    def transfer(
        self, seconds: float, links: Iterable[str], name: str, key: str, kind: str, far: bool = False
    ) -> float:
        """Start a transfer as soon as all of its links are free, and return the time at which it ends; the clock stays.

        - `seconds`: its length.
        - `links`: links that it occupies; without any it starts at once.
        - `name`: title of its span.
        - `key`: name for `end`; empty if nothing waits for it by name. Transfers with one key end with the last of
          them.
        - `kind`: kind of collective, or `copy`, which is no traffic.
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
        """Wait for the pending transfer with that key and forget it; do nothing if there is none."""
        if key in self.pending:
            self.wait(*self.pending.pop(key))

    def wait(self, until: float, kind: str, far: bool = False) -> None:
        """Move the clock to `until`, the end of a transfer, and count the wait under `kind`; nothing if that is past.

        A wait for a `copy` counts to `copies`, any other to the traffic of `kind` and `far`.
        """
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
        """Wait for all pending transfers that have a key, in the order in which they started."""
        for until, kind, far in self.pending.values():
            self.wait(until, kind, far)
        self.pending.clear()

    def add(self, other: "Clock", times: float) -> None:
        """Run another computation `times` times, one run after the other; the timeline shows all runs as one.

        All seconds and FLOPs are multiplied, but unknown trips count once. Links that the other clock occupied are free
        after it.
        """
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
    """Return the sorted lanes of links in the timeline; an axis used in both directions (`x+`, `x-`) is one lane
    (`x`).
    """
    both = {link[:-1] for link in links if link.endswith("+") and f"{link[:-1]}-" in links}
    return sorted({link[:-1] if link[:-1] in both and link[-1] in "+-" else link for link in links})
