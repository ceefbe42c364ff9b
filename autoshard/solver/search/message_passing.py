"""Raising the lower bound: message passing and prices on memory together, with choices decoded on the way."""

import numpy as np

from autoshard.base.numba_jit import njit
from autoshard.solver.flat_graph import Flat, Floats
from autoshard.solver.residual_graph import Ints
from autoshard.solver.search.message_kernels import price_memory, sweep
from autoshard.solver.search.search_kernels import profile


@njit(cache=True, nogil=True)
def _ascend(f, messages, prices, unary, load, used, chosen, best_prices, best_messages, best_chosen, state, rounds):
    """`rounds` of two sweeps and one step of the prices.

    `state`: best bound, pace of the prices, rounds since the bound rose, cost to aim at, weight of bytes past the limit
    when decoded choices are compared, cost and excess of the best decoded choices, rounds so far.
    """
    slack = np.zeros(0)
    for _ in range(rounds):
        paid = price_memory(f, prices, unary)
        sweep(f, messages, unary, True, False, chosen, False, slack)
        bound = sweep(f, messages, unary, False, True, chosen, False, slack) - paid
        if bound > state[0]:
            if bound > state[0] + 1e-6 * abs(bound):
                state[2] = 0
                state[1] = min(state[1] * 1.03, 1.0)
            state[0] = bound
            best_prices[:] = prices
            best_messages[:] = messages
        else:
            state[2] += 1
        cost, excess = profile(f, chosen, used)
        if cost + state[4] * excess < state[5] + state[4] * state[6]:
            state[5] = cost
            state[6] = excess
            best_chosen[:] = chosen
        fresh = 1.0 if state[7] == 0 else 0.1
        state[7] += 1
        if state[2] >= 15:
            # Stalled: back to the best place, with smaller steps.
            state[2] = 0
            state[1] *= 0.6
            prices[:] = best_prices
            messages[:] = best_messages
        square, aim = 0.0, max(min(state[3] - bound, 0.3 * abs(bound)), 1e-4 * abs(bound))
        for time in range(len(prices)):
            load[time] += fresh * (used[time] - load[time])
            over = load[time] - f.capacity[time]
            if over > 0 or prices[time] > 0:
                square += over * over
        if square > 0:
            stride = 0.05 * state[1] * aim / square
            for time in range(len(prices)):
                prices[time] = max(prices[time] + stride * (load[time] - f.capacity[time]), 0.0)


class Dual:
    """The lower bound of one flat graph, and what proves it."""

    def __init__(self, flat: Flat):
        self.flat = flat
        times, alternatives = len(flat.capacity), len(flat.cost)
        self._messages = np.zeros(int(flat.message_at[-1]))
        self._now = np.zeros(times)
        self._unary = np.zeros(alternatives)
        self._load = np.zeros(times)
        self._used = np.zeros(times, dtype=np.int64)
        self._chosen = np.zeros(len(flat.node_at) - 1, dtype=np.int64)
        self._state = np.array([-np.inf, 1.0, 0.0, 0.0, 0.0, np.inf, 0.0, 0.0])
        self.best_messages = self._messages.copy()
        """Where the bound is best, per directed edge a message over the alternatives of the node it leads to."""
        self.prices = np.zeros(times)
        """Bytes past the limit at a time cost this much each, where the bound is best."""
        self.decoded = self._chosen.copy()

    @property
    def bound(self) -> float:
        """No choices of the flat graph cost less; a millionth of a millionth is taken off for rounding."""
        value = float(self._state[0])
        return value - 1e-12 * abs(value) - 1e-6

    @property
    def pace(self) -> float:
        return float(self._state[1])

    def ascend(self, rounds: int, target: float, weight: float) -> Ints:
        """Goes on for some rounds; returns the best choices decoded in them (they may exceed memory).

        `target` is the cost to aim at, `weight` what one byte past the limit counts in the comparison.
        """
        self._state[3], self._state[4], self._state[5], self._state[6] = target, weight, np.inf, 0.0
        _ascend(
            self.flat, self._messages, self._now, self._unary, self._load, self._used, self._chosen,
            self.prices, self.best_messages, self.decoded, self._state, rounds,
        )  # fmt: skip
        return self.decoded.copy()

    def messages(self) -> list[Floats]:
        """Those where the bound is best, one by one."""
        at = self.flat.message_at.tolist()
        return [self.best_messages[low:high] for low, high in zip(at, at[1:], strict=False)]

    def begin(self, messages: Floats, other: "Dual | None" = None) -> None:
        """Goes on from these messages, and with the prices on memory that `other` has come to."""
        self._messages[:] = messages
        self.best_messages[:] = self._messages
        if other is not None:
            self._now[:] = self.prices[:] = other.prices
            self._state[1] = other.pace

    def slack(self) -> np.ndarray:
        """[alternatives] what choosing one costs above the bound, at the least; the better of both sweeps."""
        messages, unary = self.best_messages.copy(), np.zeros(len(self.flat.cost))
        paid = price_memory(self.flat, self.prices, unary)
        result = np.zeros(len(self.flat.cost))
        chosen, slack = self._chosen.copy(), np.zeros(len(result))
        for forward in (True, False):
            bound = sweep(self.flat, messages, unary, forward, False, chosen, True, slack) - paid
            result = np.maximum(result, bound + slack - self.bound)
        return result
