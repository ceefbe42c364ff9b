"""A row of a sweep: one plan's figures, and what a run of many tokens takes with it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


DAY_S = 86_400.0


@dataclasses.dataclass(frozen=True, slots=True)
class SweepRow:
    """One plan of a sweep. Times in seconds, sizes in bytes of one device."""

    topology: str
    batch: int | None
    """The batch that was asked for or chosen; None where the program says it itself."""
    remat: str | None
    failed: str = ""
    """Why there is no plan; empty if there is one."""
    mesh: str = ""
    step_time_s: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    chips: int | None = None
    tokens: int | None = None
    """Tokens of one step; None where the program does not say."""
    words: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the planner chose of what was left to it, by the names of the options."""
    plan: str = ""
    """The file with the plan, in the folder of the sweep; empty where plans are not kept."""

    @property
    def chip(self) -> str:
        """The name of the chip."""
        return self.topology.partition(":")[0]

    @property
    def headroom_bytes(self) -> int | None:
        """What is left of one device's memory."""
        if self.peak_bytes is None or self.memory_limit_bytes is None:
            return None
        return self.memory_limit_bytes - self.peak_bytes

    @property
    def seconds_per_token(self) -> float | None:
        """Step time over the tokens of a step."""
        return None if not self.tokens or self.step_time_s is None else self.step_time_s / self.tokens

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all chips in a second."""
        seconds = self.seconds_per_token
        return None if not seconds else 1.0 / seconds

    @property
    def tokens_per_s_per_chip(self) -> float | None:
        """Tokens of one chip in a second."""
        rate = self.tokens_per_s
        return None if rate is None or not self.chips else rate / self.chips

    def price_per_token(self, prices: Mapping[str, float]) -> float | None:
        """In the currency of `prices`, which are per chip and hour by the name of the chip."""
        seconds = self.seconds_per_token
        if seconds is None or self.chips is None or self.chip not in prices:
            return None
        return prices[self.chip] * self.chips * seconds / 3600

    def days(self, tokens: float) -> float | None:
        """Days that a run of so many tokens takes, if nothing interrupts it."""
        seconds = self.seconds_per_token
        return None if seconds is None else tokens * seconds / DAY_S

    def cost(self, tokens: float, prices: Mapping[str, float]) -> float | None:
        """What such a run costs, in the currency of `prices`."""
        price = self.price_per_token(prices)
        return None if price is None else tokens * price


@dataclasses.dataclass(frozen=True, slots=True)
class SweepChoice:
    """What stands out among the rows of a sweep, as numbers of rows."""

    best: int | None
    """The cheapest for each token if all rows have prices, else the fastest; None if nothing was planned."""
    smallest: int | None
    """The one of fewest chips that fits, of equals the faster."""
    frontier: tuple[int, ...]
    """Rows that no other beats in both speed and cost (without prices: in chips), the fastest first."""


def choose_rows(rows: Sequence[SweepRow], prices: Mapping[str, float]) -> SweepChoice:
    """What stands out; rows without tokens are compared by step time."""
    planned = [n for n, row in enumerate(rows) if not row.failed and row.step_time_s is not None]
    if not planned:
        return SweepChoice(None, None, ())

    def seconds(n: int) -> float:
        found = rows[n].seconds_per_token
        return (rows[n].step_time_s or 0.0) if found is None else found

    priced = all(rows[n].price_per_token(prices) is not None for n in planned)

    def cost(n: int) -> float:
        return (rows[n].price_per_token(prices) or 0.0) if priced else float(rows[n].chips or 0)

    smallest = min(planned, key=lambda n: (rows[n].chips or 0, seconds(n), n))
    best = min(planned, key=lambda n: ((cost(n), seconds(n)) if priced else (seconds(n), cost(n)), n))
    frontier: list[int] = []
    for n in sorted(planned, key=lambda n: (seconds(n), cost(n), n)):
        if not frontier or cost(n) < cost(frontier[-1]):
            frontier.append(n)
    return SweepChoice(best, smallest, tuple(frontier))
