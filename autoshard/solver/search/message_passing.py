"""Lower bound by message passing combined with memory prices (Lagrange multipliers); choices are decoded on the way."""

import numpy as np

from autoshard.base.numba_jit import njit
from autoshard.solver.flat_graph import Flat, Floats
from autoshard.solver.residual_graph import Ints
from autoshard.solver.search.message_kernels import price_memory, sweep
from autoshard.solver.search.search_kernels import profile


@njit(cache=True, nogil=True)
def _ascend(f, messages, prices, unary, load, used, chosen, best_prices, best_messages, best_chosen, state, rounds):
    """Run `rounds` rounds, each of two sweeps and one step of the prices; all arrays are changed in place.

    `prices` and `messages` are the present ones, `best_prices` and `best_messages` those of the best bound, all rounds
    counted. `best_chosen` receives the best decoded choices.

    The eight entries of `state` are, in order:

    - best bound;
    - step size of the prices;
    - rounds since the bound rose;
    - target cost;
    - weight of one excess byte in the comparison of decoded choices;
    - cost of the best decoded choices;
    - excess of the best decoded choices;
    - number of rounds so far.
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
            # Stalled: return to the best point, with smaller steps.
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
            # Polyak's step: (target - bound) / squared norm of the subgradient, damped.
            stride = 0.05 * state[1] * aim / square
            for time in range(len(prices)):
                prices[time] = max(prices[time] + stride * (load[time] - f.capacity[time]), 0.0)


class Dual:
    """Lower bound of one flat graph, and the messages and prices that prove it."""

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
        """Messages at the best bound: for each directed edge one value per alternative of its target node."""
        self.prices = np.zeros(times)
        """Cost of one byte above the limit at each time, at the best bound, [times]."""
        self.decoded = self._chosen.copy()
        """Best choices of the last `ascend`, [nodes]."""

    @property
    def bound(self) -> float:
        """Lower bound on the cost of the flat graph's choices, less 1e-12 of it and 1e-6 for rounding.

        It is the best of all rounds so far; minus infinity before the first.
        """
        value = float(self._state[0])
        return value - 1e-12 * abs(value) - 1e-6

    @property
    def pace(self) -> float:
        """Relative step size of the prices, at most 1."""
        return float(self._state[1])

    def ascend(self, rounds: int, target: float, weight: float) -> Ints:
        """Continue for some rounds and return the best choices decoded in them, which may exceed memory.

        `target` is the cost to aim at, infinite if unknown; it sets the size of the prices' steps. `weight` is the cost
        of one excess byte at one time in the comparison of decoded choices.
        """
        self._state[3], self._state[4], self._state[5], self._state[6] = target, weight, np.inf, 0.0
        _ascend(
            self.flat, self._messages, self._now, self._unary, self._load, self._used, self._chosen,
            self.prices, self.best_messages, self.decoded, self._state, rounds,
        )  # fmt: skip
        return self.decoded.copy()

    def messages(self) -> list[Floats]:
        """Return the messages at the best bound, one array for each directed edge."""
        at = self.flat.message_at.tolist()
        return [self.best_messages[low:high] for low, high in zip(at, at[1:], strict=False)]

    def begin(self, messages: Floats, other: "Dual | None" = None) -> None:
        """Start from these concatenated messages, and from the memory prices and step size of `other`, if given.

        The bound is not set; `ascend` computes it.
        """
        self._messages[:] = messages
        self.best_messages[:] = self._messages
        if other is not None:
            self._now[:] = self.prices[:] = other.prices
            self._state[1] = other.pace

    def slack(self) -> np.ndarray:
        """Return for each alternative a lower bound on its cost above the bound, [alternatives]; the better of two
        sweeps.
        """
        messages, unary = self.best_messages.copy(), np.zeros(len(self.flat.cost))
        paid = price_memory(self.flat, self.prices, unary)
        result = np.zeros(len(self.flat.cost))
        chosen, slack = self._chosen.copy(), np.zeros(len(result))
        for forward in (True, False):
            bound = sweep(self.flat, messages, unary, forward, False, chosen, True, slack) - paid
            result = np.maximum(result, bound + slack - self.bound)
        return result
