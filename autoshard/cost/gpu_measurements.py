"""Measured figures of GPUs: collectives, matmuls by shape, and the share of memory that JAX allocates."""

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.cost.chip import Chip, load_chip
from autoshard.cost.topology import Topology


_FILE = pathlib.Path(__file__).with_name("measured") / "gpu.json"

FIRST_POWER = 8
"""Curves have a point at every power of two of bytes, from 2 ** 8 ..."""
POINTS = 33
"""... up to 2 ** 40."""
TILE = 64.0
"""Least rows, columns and contracted elements that fill tensor cores: those of one wgmma instruction."""
POWERS = np.arange(FIRST_POWER, FIRST_POWER + POINTS, dtype=np.float64)


@dataclasses.dataclass(frozen=True, slots=True)
class NetworkConstants:
    """Launch and chunk figures of a collective between islands; the rate of a network card is in the chip file."""

    launch_s: float
    """Seconds before anything moves."""
    chunk_bytes: int
    """Bytes that are handed to a network card at a time."""
    chunk_s: float
    """Seconds to hand over one chunk."""


@functools.cache
def _chips() -> dict[str, Any]:
    """Load the shipped measured figures by chip."""
    return json.loads(_FILE.read_text())["chips"]


def is_measured(chip: str) -> bool:
    """Return True if collectives of a chip were measured."""
    return chip in _chips()


def network_constants(chip: str) -> NetworkConstants:
    """Return the constants of a measured chip's network; raise `KeyError` for a chip that was not measured."""
    return NetworkConstants(**_chips()[chip]["network"])


@dataclasses.dataclass(frozen=True, slots=True)
class IslandNetwork:
    """Figures that price a collective between islands."""

    constants: NetworkConstants
    """Launch and chunk figures."""
    card_bytes_per_s: float
    """Bytes per second of one device's network card."""
    round_trip_s: float
    """Seconds of one step from island to island."""


@functools.lru_cache(maxsize=256)
def island_curve(chip: str, kind: str, devices: int) -> NDArray[np.float64]:
    """Return the seconds of a collective of `devices` inside one island at `2 ** POWERS` bytes, [points].

    Logarithms are interpolated between measured sizes of groups, and between measured bytes. Fewer or more devices than
    were measured count as the nearest measured number. Below the least measured bytes a collective takes as long as
    those. Beyond the most, time is proportional to bytes.
    """
    groups = {int(n): entry["points"] for n, entry in _chips()[chip]["collectives"][kind].items()}
    known = sorted(groups)
    devices_at = min(max(devices, known[0]), known[-1])
    high = next(n for n in known if n >= devices_at)
    low = next(n for n in reversed(known) if n <= devices_at)
    share = 0.0 if high == low else math.log(devices_at / low) / math.log(high / low)
    return np.exp2((1.0 - share) * _logs(groups[low]) + share * _logs(groups[high]))


def _logs(points: list[list[float]]) -> NDArray[np.float64]:
    """Return the base-2 logarithms of seconds at `POWERS`, [points], from ascending pairs (bytes, seconds)."""
    sizes, seconds = (np.log2([point[place] for point in points]) for place in (0, 1))
    inside = np.interp(POWERS, sizes, seconds)
    return inside + np.maximum(0.0, POWERS - sizes[-1])


def at_sizes(curves: NDArray[np.float64], size_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds at sizes, on straight lines between powers of two and beyond the last.

    `curves` is [points], or [..., points] with sizes of the same leading dims. Sizes below `2 ** FIRST_POWER` bytes
    take as long as that size.
    """
    size = np.maximum(size_bytes, 2.0**FIRST_POWER)
    below = np.minimum(np.frexp(size)[1] - 1 - FIRST_POWER, POINTS - 2).astype(np.int64)
    share = np.ldexp(size, -(below + FIRST_POWER)) - 1.0
    if curves.ndim == 1:
        first, second = curves[below], curves[below + 1]
    else:
        first = np.take_along_axis(curves, below[..., None], -1)[..., 0]
        second = np.take_along_axis(curves, below[..., None] + 1, -1)[..., 0]
    return np.asarray(first + (second - first) * share)


def between_seconds(
    kind: str, islands: int, inside: int, size_bytes: ArrayLike, network: IslandNetwork
) -> NDArray[np.float64]:
    """Return the seconds of a collective of `islands` x `inside` devices on its network cards, one for each device.

    A ring passes through every island once for each device in it, so each card carries `1 / inside` of the bytes that
    cross a border. They are sent in parts of one device's shard: `(n - 1) / inside` parts, twice for an all-reduce.
    Small all-reduces go up and down a tree of islands instead. In an all-to-all each device sends through its own card,
    and a permute sends its whole size through it.

    - `kind`: kind of collective; a gather and a reduce-scatter cost alike.
    - `islands`, `inside`: number of islands, and devices in each.
    - `size_bytes`: size of the collective, as `Collectives` defines it.
    - `network`: figures of the network.
    """
    size, n = np.asarray(size_bytes, dtype=np.float64), islands * inside
    constants, rate, trip = network.constants, network.card_bytes_per_s, network.round_trip_s

    def chunks(part: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds to hand over a part to the card, one chunk at least."""
        return np.maximum(1.0, part / constants.chunk_bytes) * constants.chunk_s

    if kind == "collective-permute":
        return constants.launch_s + trip + chunks(size) + size / rate
    if kind == "all-to-all":
        away = size * (n - inside) / n
        return constants.launch_s + trip + chunks(away) + away / rate
    part = size / n
    step = trip + chunks(part) + part / rate
    rounds = 2.0 if kind == "all-reduce" else 1.0
    ring = rounds * step * (n - 1) / inside
    if kind == "all-reduce":
        share = size / inside
        levels = math.ceil(math.log2(islands))
        tree = 2.0 * (levels * (trip + constants.chunk_s) + chunks(share) + share / rate)
        ring = np.minimum(ring, tree)
    return constants.launch_s + ring


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulRates:
    """Measured FLOP/s of bf16 matmuls, by logarithms of batch, rows, columns and contracted size."""

    batches: NDArray[np.float64]
    """Measured batches, ascending."""
    sizes: NDArray[np.float64]
    """Measured rows, columns and contracted sizes, ascending."""
    logs: NDArray[np.float64]
    """Base-2 logarithms of the FLOP/s, [batches, rows, columns, contracted sizes]."""
    share: float
    """Peak FLOP/s of this chip over that of the measured chip."""

    def shares_of_best(self, m: ArrayLike, n: ArrayLike, k: ArrayLike, batch: ArrayLike) -> NDArray[np.float64]:
        """Return the rate of `batch` matmuls `[m, k] x [k, n]` as a share of the best measured rate.

        The rate includes launch and traffic. Between measured sizes logarithms of rates are interpolated. The number of
        tiles fills the processors: rates of one k differ little between shapes with equal rows times columns times
        batch. A size beyond the table therefore increases the other sizes. This holds for k as well, since libraries
        sum its parts in tiles of their own (split-K).

        Below the table the rate stays constant, but rows, columns or contracted elements below `TILE` scale it by their
        share of `TILE`. On a chip with another
        peak, a matmul runs like one that takes as long on the measured chip (assumed). Each size counts as larger by
        the cubic root of the ratio of peaks.
        """
        longer = self.share ** (-1.0 / 3.0)
        sizes = [np.maximum(np.asarray(x, dtype=np.float64), 1.0) for x in (batch, m, n, k)]
        sizes = [sizes[0], *(x * longer for x in sizes[1:])]
        filled = math.prod((np.minimum(x / TILE, 1.0) for x in sizes[1:]), start=np.float64(1.0))
        places = [np.clip(np.log2(x), grid[0], grid[-1]) for x, grid in zip(sizes, self._grids(), strict=True)]
        beyond = sum(np.maximum(np.log2(x) - grid[-1], 0.0) for x, grid in zip(sizes, self._grids(), strict=True))
        rooms = [grid[-1] - place for place, grid in zip(places[:3], self._grids(), strict=False)]
        share = np.minimum(beyond / np.maximum(sum(rooms), 1e-9), 1.0)
        places[:3] = [place + share * room for place, room in zip(places[:3], rooms, strict=True)]
        return np.asarray(filled * np.exp2(self._interpolated(places) - self.logs.max()))

    def _grids(self) -> list[NDArray[np.float64]]:
        """Return the base-2 logarithms of the measured batches, rows, columns and contracted sizes."""
        return [np.log2(self.batches), *[np.log2(self.sizes)] * 3]

    def _interpolated(self, places: list[NDArray[np.float64]]) -> NDArray[np.float64]:
        """Return the logarithms of the rate at `places`, interpolated linearly between the 16 corners of a cell."""
        lows, shares = [], []
        for grid, place in zip(self._grids(), np.broadcast_arrays(*places), strict=True):
            low = np.clip(np.searchsorted(grid, place, side="right") - 1, 0, len(grid) - 2)
            lows.append(low)
            shares.append((place - grid[low]) / (grid[low + 1] - grid[low]))
        log_rates = np.zeros(lows[0].shape)
        for corner in range(16):
            bits = [corner >> d & 1 for d in range(4)]
            weight = math.prod((s if b else 1.0 - s for b, s in zip(bits, shares, strict=True)), start=np.float64(1.0))
            log_rates = log_rates + weight * self.logs[tuple(low + b for b, low in zip(bits, lows, strict=True))]
        return log_rates


@functools.cache
def matmul_rates(chip: Chip) -> MatmulRates | None:
    """Return the rates of a measured chip, its own or those of the chip that its entry names; None for all others."""
    entry = _chips().get(chip.name)
    if entry is None:
        return None
    of = entry.get("matmuls_as", chip.name)
    table = _chips()[of]["matmuls"]
    return MatmulRates(
        np.array(table["batches"], dtype=np.float64),
        np.array(table["sizes"], dtype=np.float64),
        np.log2(np.array(table["tflops"]) * 1e12),
        chip.peak_flops("bf16") / load_chip(of).peak_flops("bf16"),
    )


JAX_SHARE = 0.75
"""Share of a GPU's memory that JAX allocates unless `FRACTION` sets another (jax.dev, "GPU memory allocation")."""
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Environment variable that sets the share of a GPU's memory that JAX allocates."""


def fraction_for(topology: Topology, peak_bytes: float) -> float | None:
    """Return the share of a GPU's memory, in hundredths, that JAX must allocate for a step with this peak.

    The share is rounded up, and is above 1 for a peak beyond the memory. None if JAX's default is enough, and for
    backends whose memory JAX allocates whole.
    """
    if topology.traits.name != "gpu":
        return None
    share = peak_bytes / (topology.chip.hbm_bytes / topology.chip.devices_per_chip)
    return math.ceil(100 * share) / 100 if share > JAX_SHARE else None
