"""Rows of a sweep: the figures of one plan, the time and cost of a long run, and the choice of rows."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


DAY_S = 86_400.0


@dataclasses.dataclass(frozen=True, slots=True)
class SweepRow:
    """One plan of a sweep. Times are seconds, sizes are bytes of one device."""

    topology: str
    batch: int | None
    """Requested or chosen batch; None if the program fixes it."""
    remat: str | None
    failed: str = ""
    """Reason for which there is no plan; empty if there is one."""
    mesh: str = ""
    step_time_s: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    chips: int | None = None
    tokens: int | None = None
    """Tokens of one step; None if the program does not count them."""
    words: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values that the planner chose for open options, by the names of the options."""
    plan: str = ""
    """File of the plan in the sweep's folder; empty if plans are not stored."""

    @property
    def chip(self) -> str:
        """The name of the chip."""
        return self.topology.partition(":")[0]

    @property
    def headroom_bytes(self) -> int | None:
        """The free bytes of one device's memory."""
        if self.peak_bytes is None or self.memory_limit_bytes is None:
            return None
        return self.memory_limit_bytes - self.peak_bytes

    @property
    def seconds_per_token(self) -> float | None:
        """The step time over the tokens of a step."""
        return None if not self.tokens or self.step_time_s is None else self.step_time_s / self.tokens

    @property
    def tokens_per_s(self) -> float | None:
        """The tokens of all chips in a second."""
        seconds = self.seconds_per_token
        return None if not seconds else 1.0 / seconds

    @property
    def tokens_per_s_per_chip(self) -> float | None:
        """The tokens of one chip in a second."""
        rate = self.tokens_per_s
        return None if rate is None or not self.chips else rate / self.chips

    def price_per_token(self, prices: Mapping[str, float]) -> float | None:
        """Return the price of a token in the currency of `prices`; None if unknown.

        `prices` are per chip and hour, by the name of the chip.
        """
        seconds = self.seconds_per_token
        if seconds is None or self.chips is None or self.chip not in prices:
            return None
        return prices[self.chip] * self.chips * seconds / 3600

    def days(self, tokens: float) -> float | None:
        """Return the days that a run of so many tokens takes without interruption; None if unknown."""
        seconds = self.seconds_per_token
        return None if seconds is None else tokens * seconds / DAY_S

    def cost(self, tokens: float, prices: Mapping[str, float]) -> float | None:
        """Return the cost of a run of so many tokens, in the currency of `prices`; None if unknown."""
        price = self.price_per_token(prices)
        return None if price is None else tokens * price


@dataclasses.dataclass(frozen=True, slots=True)
class SweepChoice:
    """Notable rows of a sweep, as numbers of rows."""

    best: int | None
    """Cheapest row per token if all rows have prices, else the fastest; None if nothing was planned."""
    smallest: int | None
    """Row with the fewest chips that fits; the faster one of equals."""
    frontier: tuple[int, ...]
    """Rows that no other row beats in both speed and cost (in chips without prices), the fastest first."""


def choose_rows(rows: Sequence[SweepRow], prices: Mapping[str, float]) -> SweepChoice:
    """Return the notable rows; rows without tokens are compared by step time."""
    planned = [n for n, row in enumerate(rows) if not row.failed and row.step_time_s is not None]
    if not planned:
        return SweepChoice(None, None, ())

    def seconds(n: int) -> float:
        """Return the seconds of a row per token, or per step without tokens."""
        per_token = rows[n].seconds_per_token
        return (rows[n].step_time_s or 0.0) if per_token is None else per_token

    priced = all(rows[n].price_per_token(prices) is not None for n in planned)

    def cost(n: int) -> float:
        """Return the price of a row per token, or its chips without prices."""
        return (rows[n].price_per_token(prices) or 0.0) if priced else float(rows[n].chips or 0)

    smallest = min(planned, key=lambda n: (rows[n].chips or 0, seconds(n), n))
    best = min(planned, key=lambda n: ((cost(n), seconds(n)) if priced else (seconds(n), cost(n)), n))
    frontier: list[int] = []
    for n in sorted(planned, key=lambda n: (seconds(n), cost(n), n)):
        if not frontier or cost(n) < cost(frontier[-1]):
            frontier.append(n)
    return SweepChoice(best, smallest, tuple(frontier))
