"""Rows of a sweep: the figures of one plan, the time and cost of a long run, and the choice of rows."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


DAY_S = 86_400.0
"""Seconds of a day."""


@dataclasses.dataclass(frozen=True, slots=True)
class SweepRow:
    """One plan of a sweep. Times are seconds, sizes are bytes of one device; figures are None without a plan."""

    topology: str
    """Name of the topology, such as `v5e:4x4`."""
    batch: int | None
    """Requested or chosen batch (examples a step); None if the program fixes it."""
    remat: str | None
    """Requested or chosen remat policy; None if the program fixes it."""
    failed: str = ""
    """Reason for which there is no plan; empty if there is one."""
    mesh: str = ""
    """Mesh axes and sizes as text, `data=4,model=2`."""
    step_time_s: float | None = None
    mfu: float | None = None
    """Model FLOPs utilisation, between 0 and 1."""
    peak_bytes: int | None = None
    """Predicted peak memory of one device."""
    memory_limit_bytes: int | None = None
    """Memory limit that the plan obeys."""
    chips: int | None = None
    """Chips of the topology; a chip may have several devices."""
    tokens: int | None = None
    """Tokens of one step; None if the program does not count them."""
    words: tuple[str, ...] = ()
    """Sentences that describe the plan's shardings."""
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values that the planner chose for open options, by the names of the options."""
    plan: str = ""
    """File of the plan in the sweep's folder; empty if plans are not stored."""

    @property
    def chip(self) -> str:
        """The name of the chip: the part of the topology's name before the colon."""
        return self.topology.partition(":")[0]

    @property
    def headroom_bytes(self) -> int | None:
        """The memory limit less the peak, in bytes of one device; negative if the plan exceeds it, None if unknown."""
        if self.peak_bytes is None or self.memory_limit_bytes is None:
            return None
        return self.memory_limit_bytes - self.peak_bytes

    @property
    def seconds_per_token(self) -> float | None:
        """The step time over the tokens of a step; None without a plan, or if tokens are unknown or 0."""
        return None if not self.tokens or self.step_time_s is None else self.step_time_s / self.tokens

    @property
    def tokens_per_s(self) -> float | None:
        """The tokens of all chips in a second; None if `seconds_per_token` is None or 0."""
        seconds = self.seconds_per_token
        return None if not seconds else 1.0 / seconds

    @property
    def tokens_per_s_per_chip(self) -> float | None:
        """The tokens of one chip in a second; None if unknown."""
        rate = self.tokens_per_s
        return None if rate is None or not self.chips else rate / self.chips

    def price_per_token(self, prices: Mapping[str, float]) -> float | None:
        """Return the price of a token in the currency of `prices`; None if the step's tokens, its time or the chip's
        price is unknown.

        `prices` are per chip and hour, by the name of the chip.
        """
        seconds = self.seconds_per_token
        if seconds is None or self.chips is None or self.chip not in prices:
            return None
        return prices[self.chip] * self.chips * seconds / 3600

    def days(self, tokens: float) -> float | None:
        """Return the days that a run of so many tokens takes without interruption; None if `seconds_per_token` is."""
        seconds = self.seconds_per_token
        return None if seconds is None else tokens * seconds / DAY_S

    def cost(self, tokens: float, prices: Mapping[str, float]) -> float | None:
        """Return the cost of a run of so many tokens, in the currency of `prices`; None if `price_per_token` is."""
        price = self.price_per_token(prices)
        return None if price is None else tokens * price


@dataclasses.dataclass(frozen=True, slots=True)
class SweepChoice:
    """Notable rows of a sweep, as positions in the list of rows; rows without a plan are never chosen."""

    best: int | None
    """Cheapest row per token if all planned rows have prices, else the fastest; None if nothing was planned. Equals are
    decided by the other of speed and cost (in chips without prices), then by position.
    """
    smallest: int | None
    """Planned row with the fewest chips; the faster one of equals. None if nothing was planned."""
    frontier: tuple[int, ...]
    """Rows that no other row beats or equals in both speed and cost (in chips without prices), the fastest first. The
    first of equal rows stands for all.
    """


def choose_rows(rows: Sequence[SweepRow], prices: Mapping[str, float]) -> SweepChoice:
    """Return the notable rows among those with a plan; rows without tokens are compared by step time.

    `prices` are per chip and hour, by the name of the chip; unless all planned rows have one, none is used.
    """
    planned = [n for n, row in enumerate(rows) if not row.failed and row.step_time_s is not None]
    if not planned:
        return SweepChoice(None, None, ())

    def seconds(n: int) -> float:
        """Return the seconds of a row per token, or per step if its tokens are unknown."""
        per_token = rows[n].seconds_per_token
        return (rows[n].step_time_s or 0.0) if per_token is None else per_token

    priced = all(rows[n].price_per_token(prices) is not None for n in planned)

    def cost(n: int) -> float:
        """Return the price of a row's token if all planned rows have prices, else its chips."""
        return (rows[n].price_per_token(prices) or 0.0) if priced else float(rows[n].chips or 0)

    smallest = min(planned, key=lambda n: (rows[n].chips or 0, seconds(n), n))
    best = min(planned, key=lambda n: ((cost(n), seconds(n)) if priced else (seconds(n), cost(n)), n))
    frontier: list[int] = []
    for n in sorted(planned, key=lambda n: (seconds(n), cost(n), n)):
        if not frontier or cost(n) < cost(frontier[-1]):
            frontier.append(n)
    return SweepChoice(best, smallest, tuple(frontier))
