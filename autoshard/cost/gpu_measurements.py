"""Measured figures of GPUs: collectives, matmuls by shape, and the share of memory that JAX takes."""

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
"""Curves are held at powers of two from 2 ** 8 bytes on ..."""
POINTS = 33
"""... up to 2 ** 40."""
TILE = 64.0
"""Least rows, columns and contracted elements that tensor cores are busy with: those of one wgmma instruction."""
POWERS = np.arange(FIRST_POWER, FIRST_POWER + POINTS, dtype=np.float64)


@dataclasses.dataclass(frozen=True, slots=True)
class NetworkConstants:
    """How a collective between islands starts and steps; the rate of a network card is the chip's."""

    launch_s: float
    """Seconds before anything moves."""
    chunk_bytes: int
    """Bytes that are handed to a network card at a time."""
    chunk_s: float
    """What handing over one takes."""


@functools.cache
def _chips() -> dict[str, Any]:
    return json.loads(_FILE.read_text())["chips"]


def is_measured(chip: str) -> bool:
    """Whether collectives of a chip were measured."""
    return chip in _chips()


def network_constants(chip: str) -> NetworkConstants:
    """The constants of a measured chip's network."""
    return NetworkConstants(**_chips()[chip]["network"])


@dataclasses.dataclass(frozen=True, slots=True)
class IslandNetwork:
    """What a collective between islands is priced with."""

    constants: NetworkConstants
    card_bytes_per_s: float
    """What one device's network card carries."""
    round_trip_s: float
    """Seconds of one step from island to island."""


@functools.lru_cache(maxsize=256)
def island_curve(chip: str, kind: str, devices: int) -> NDArray[np.float64]:
    """[points] seconds of a collective of `devices` inside one island, at `2 ** POWERS` bytes.

    Between the sizes of groups that were measured logarithms are interpolated, and where a table has not every power of
    two. Below the
    least size measured a collective takes as long as that, beyond the largest it grows with its bytes.
    """
    groups = {int(n): entry["points"] for n, entry in _chips()[chip]["collectives"][kind].items()}
    known = sorted(groups)
    devices_at = min(max(devices, known[0]), known[-1])
    high = next(n for n in known if n >= devices_at)
    low = next(n for n in reversed(known) if n <= devices_at)
    share = 0.0 if high == low else math.log(devices_at / low) / math.log(high / low)
    return np.exp2((1.0 - share) * _logs(groups[low]) + share * _logs(groups[high]))


def _logs(points: list[list[float]]) -> NDArray[np.float64]:
    """Logarithms of seconds at `POWERS`."""
    sizes, seconds = (np.log2([point[place] for point in points]) for place in (0, 1))
    inside = np.interp(POWERS, sizes, seconds)
    return inside + np.maximum(0.0, POWERS - sizes[-1])


def at_sizes(curves: NDArray[np.float64], size_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds at sizes, on straight lines between powers of two and beyond the last.

    `curves` is [points], or [..., points] beside sizes of the same leading dims.
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
    """Seconds of a collective of `islands` x `inside` devices on its network cards, one for each device.

    A ring goes through every island once for each of its devices there, so that each card carries a share of
    `1 / inside` of what crosses a border, in parts of one device's shard (`(n - 1) / inside` of them, twice for an
    all-reduce); small all-reduces go up and down a tree of islands instead. Each device exchanges with all others
    through its own card.
    """
    size, n = np.asarray(size_bytes, dtype=np.float64), islands * inside
    constants, rate, trip = network.constants, network.card_bytes_per_s, network.round_trip_s

    def chunks(part: NDArray[np.float64]) -> NDArray[np.float64]:
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
    sizes: NDArray[np.float64]
    logs: NDArray[np.float64]
    """[batches, sizes, sizes, sizes] logarithms of the FLOP/s."""
    share: float
    """Peak FLOP/s of this chip for one of the chip that was measured."""

    def shares_of_best(self, m: ArrayLike, n: ArrayLike, k: ArrayLike, batch: ArrayLike) -> NDArray[np.float64]:
        """Return what `batch` matmuls `[m, k] x [k, n]` reach of the best measured rate, launch and traffic included.

        Between measured sizes logarithms of rates are interpolated. What keeps the processors busy is the number of
        tiles: rates of one k differ little between shapes of as many rows times columns times batch. So what a size has
        beyond the table counts as more of the others, of k as well, whose parts libraries sum in tiles of their own
        (split-K). Below the table the rate stays, but that a tile of `TILE` is never less than full. On a chip with
        another peak a matmul runs as one that keeps the measured chip busy as long (assumed): each size counts as the
        cubic root of the ratio of peaks more.
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
        """Return the logarithms of the measured batches, rows, columns and contracted sizes."""
        return [np.log2(self.batches), *[np.log2(self.sizes)] * 3]

    def _interpolated(self, places: list[NDArray[np.float64]]) -> NDArray[np.float64]:
        lows, shares = [], []
        for grid, place in zip(self._grids(), np.broadcast_arrays(*places), strict=True):
            low = np.clip(np.searchsorted(grid, place, side="right") - 1, 0, len(grid) - 2)
            lows.append(low)
            shares.append((place - grid[low]) / (grid[low + 1] - grid[low]))
        found = np.zeros(lows[0].shape)
        for corner in range(16):
            bits = [corner >> d & 1 for d in range(4)]
            weight = math.prod((s if b else 1.0 - s for b, s in zip(bits, shares, strict=True)), start=np.float64(1.0))
            found = found + weight * self.logs[tuple(low + b for b, low in zip(bits, lows, strict=True))]
        return found


@functools.cache
def matmul_rates(chip: Chip) -> MatmulRates | None:
    """The rates of a measured chip; None for all others."""
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
"""Share of a GPU's memory that JAX takes unless `FRACTION` says another (jax.dev, "GPU memory allocation")."""
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def fraction_for(topology: Topology, peak_bytes: float) -> float | None:
    """Return the share of a GPU's memory, in hundredths, that a step of such a peak must be given.

    None where JAX takes enough by itself, and for devices whose memory it takes whole.
    """
    if topology.traits.name != "gpu":
        return None
    share = peak_bytes / (topology.chip.hbm_bytes / topology.chip.devices_per_chip)
    return math.ceil(100 * share) / 100 if share > JAX_SHARE else None
