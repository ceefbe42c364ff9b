"""Seconds of matmuls and memory-bound ops on one device, and bytes of arrays."""

import math
import statistics
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.cost.backend import Sorting
from autoshard.cost.calibration import Calibration, load_calibration
from autoshard.cost.chip import dtype_class
from autoshard.cost.gpu_measurements import matmul_rates
from autoshard.cost.topology import Topology


_BLOCK = 1024
"""Edge of a matmul's blocks in on-chip memory: three of them in bf16 fit in 8 MB."""
_OPERAND_BYTES = {"int8": 1.0, "fp8": 1.0, "bf16": 2.0}
"""Bytes of an operand's element by class of dtype; others have four."""
SHARPNESS = 3.0
"""Exponent p of imperfect overlap: engines that work at once take `(a**p + b**p + ...) ** (1/p)`.

The result is the longest time where one is much longer, and a quarter more for two that are equal. An infinite p would
be perfect overlap. The same exponent is used for the units of a core and for the compute and the links of a block.
"""


class Compute:
    """Rooflines of one device of a topology; methods accept and return arrays (local shapes, seconds).

    The default calibration is `load_calibration` of the chip. Times are those of one execution.
    """

    def __init__(self, topology: Topology, calibration: Calibration | None = None) -> None:
        self.topology = topology
        self.calibration = calibration or load_calibration(topology.chip)
        self.rates = matmul_rates(topology.chip) if self.calibration.measured else None
        """Rates of matmuls by shape, where they were measured."""
        self.slowest = slowest_share(topology.slices if topology.traits.torus else 1, self.calibration.slice_spread)
        """Compute time of the slowest slice over that of a mean one, since every step waits for all slices."""

    def _peak(self, dtype: str) -> float:
        """Return the peak matrix FLOP/s of one device, slowed down to the slowest slice."""
        return self.topology.peak_flops(dtype) / self.slowest

    def matmul_efficiency(self, m: ArrayLike, n: ArrayLike, k: ArrayLike, batch: ArrayLike = 1) -> NDArray[np.float64]:
        """Return the share of peak that `batch` matmuls `[m, k] x [k, n]` reach: the large-matmul figure less padding.

        The matrix unit holds a tile of `mxu_edge` x `mxu_edge`, while rows stream through it in groups of `sublanes`.
        One of the three sizes streams, whichever wastes least; the other two are padded up to whole tiles. Fewer rows
        than `mxu_edge` cannot hide the load of the next tile and count as that many.

        A CPU core packs operands and loops around a block of registers: every size costs as much as `size + mxu_edge`
        would at the full rate. A size of `mxu_edge` therefore runs at half the rate.

        For rates that were measured by shape (in bf16), the figure is multiplied by the shape's share of the best
        measured rate.
        """
        if self.rates is not None:
            return self.calibration.matmul_efficiency * self.rates.shares_of_best(m, n, k, batch)
        sizes = [np.maximum(np.asarray(x, dtype=np.float64), 1.0) for x in (m, n, k)]
        edge, rows = self.topology.chip.mxu_edge, self.topology.chip.sublanes
        if self.topology.traits.packs_blocks:
            used = math.prod((x / (x + edge) for x in sizes), start=np.float64(1.0))
            return self.calibration.matmul_efficiency * np.asarray(used)
        m_tiles, n_tiles, k_tiles = (_filled(x, edge) for x in sizes)
        m_rows, n_rows, k_rows = (np.minimum(_filled(x, rows), x / edge) for x in sizes)
        used = np.maximum(m_rows * n_tiles * k_tiles, m_tiles * np.maximum(n_rows * k_tiles, n_tiles * k_rows))
        return self.calibration.matmul_efficiency * used

    def matmul_seconds(
        self, m: ArrayLike, n: ArrayLike, k: ArrayLike, batch: ArrayLike = 1, dtype: str = "bf16"
    ) -> NDArray[np.float64]:
        """Return the matrix-unit time of `batch` local matmuls `[m, k] x [k, n]`, without memory traffic and overhead.

        Rates that were measured by shape include both.
        """
        m, n, k, batch = (np.asarray(x, dtype=np.float64) for x in (m, n, k, batch))
        flops = 2.0 * m * n * k * batch
        return flops / (self._peak(dtype) * self.matmul_efficiency(m, n, k, batch))

    def stage_seconds(
        self, rows: ArrayLike, length: ArrayLike, products: ArrayLike, size_bytes: ArrayLike
    ) -> NDArray[np.float64]:
        """Return the time of one stage of an fft, without overhead: matmuls by a square matrix against memory traffic.

        - `rows`: rows of `length` elements that the matrix multiplies.
        - `products`: bfloat16 products of each real and imaginary part.
        - `size_bytes`: bytes that the stage reads and writes.
        """
        busy = self.matmul_seconds(rows, length, length) * np.asarray(products, dtype=np.float64)
        return np.maximum(busy, self.memory_seconds(size_bytes))

    def dot_seconds(
        self,
        m: ArrayLike,
        n: ArrayLike,
        k: ArrayLike,
        batch: ArrayLike = 1,
        dtype: str = "bf16",
        size_bytes: ArrayLike | None = None,
        fused_bytes: ArrayLike = 0.0,
    ) -> NDArray[np.float64]:
        """Return the time of `batch` local matmuls: matrix unit against memory traffic, plus the exposed rest.

        A matmul runs in blocks of about `_BLOCK` in each dim. An operand is read once for every block of the dim that
        it lacks (the usual lower bound of blocked multiplication). The next block loads while one block is multiplied,
        so only one block's share of the shorter time stays exposed. The overhead of one op is added.

        Devices with caches (`Backend.caches`) take the longer of both times, plus the overhead. Rates that were
        measured by shape include the overhead: such a matmul takes the longest of rate, traffic and overhead.

        - `m`, `n`, `k`, `batch`: local sizes of the matmuls.
        - `dtype`: dtype of the operands.
        - `size_bytes`: traffic with every operand read once (default: two bytes an element of operands and result).
        - `fused_bytes`: bytes that the rest of the matmul's fusion reads and writes, once.
        """
        m, n, k, batch = (np.asarray(x, dtype=np.float64) for x in (m, n, k, batch))
        busy = self.matmul_seconds(m, n, k, batch, dtype)
        m_blocks, n_blocks, k_blocks = (np.ceil(x / _BLOCK) for x in (m, n, k))
        elements = m * k + k * n + m * n
        if self.rates is not None:
            size = 2.0 * batch * elements if size_bytes is None else np.asarray(size_bytes, dtype=np.float64)
            moved = self.memory_seconds(size + np.asarray(fused_bytes))
            return np.maximum(np.maximum(busy, moved), self.calibration.op_overhead_s)
        size = 2.0 * batch * elements if size_bytes is None else np.asarray(size_bytes, dtype=np.float64)
        if self.topology.traits.caches:
            moved = self.memory_seconds(size + np.asarray(fused_bytes))
            return np.maximum(busy, moved) + self.calibration.op_overhead_s
        again = m * k * (n_blocks - 1) + k * n * (m_blocks - 1)
        # A result that is wider than the operands is written once.
        width = np.minimum(size / (batch * elements), _OPERAND_BYTES.get(dtype_class(dtype), 4.0))
        moved = self.memory_seconds(size + batch * again * width + np.asarray(fused_bytes))
        overlapped = smooth_max(busy, moved) + np.minimum(busy, moved) / (batch * m_blocks * n_blocks * k_blocks)
        return overlapped + self.calibration.op_overhead_s

    def attention_seconds(
        self, scores: ArrayLike, head: int, value_head: int, matmuls: int, dtype: str, size_bytes: ArrayLike
    ) -> NDArray[np.float64]:
        """Return the time of an attention kernel whose scores stay on chip.

        Each of `matmuls` passes over the scores multiplies with a head dim, which the matrix unit pads to its edge. It
        also costs `Calibration.attention_ops` operations of the vector unit for each score (softmax, masks, casts). The
        two units overlap as `smooth_max` prices it, and memory traffic overlaps in full. One overhead is added.

        - `scores`: number of scores that the kernel computes.
        - `head`, `value_head`: head dims of queries and keys, and of values.
        - `matmuls`: matmuls over the scores.
        - `dtype`: dtype of the operands of the matmuls.
        - `size_bytes`: bytes that the kernel reads and writes.
        """
        edge = self.topology.chip.mxu_edge
        scores = np.asarray(scores, dtype=np.float64)
        padded = sum(float(-(-size // edge) * edge) for size in (head, value_head)) / 2.0
        rate = self._peak(dtype) * self.calibration.matmul_efficiency
        busy = 2.0 * scores * padded * matmuls / rate
        vector = self.vector_seconds(scores * (matmuls * self.calibration.attention_ops))
        return np.maximum(smooth_max(busy, vector), self.memory_seconds(size_bytes)) + self.calibration.op_overhead_s

    def step_seconds(self, steps: ArrayLike) -> NDArray[np.float64]:
        """Return the overhead of `steps` grid steps of a kernel: scalar code, waits for blocks, sums in memory."""
        return np.asarray(steps, dtype=np.float64) * self.calibration.grid_step_s

    def row_passes(self, itemsize: int) -> float:
        """Return the time of a copy row by row over that of streaming its bytes once (`Calibration.row_copy_s`).

        - `itemsize`: bytes of an element.
        """
        return self.calibration.row_copy_s / float(self.memory_seconds(LANES * itemsize))

    @property
    def burst_bytes(self) -> int:
        """Least bytes that one access to main memory moves."""
        return self.topology.traits.burst_bytes

    def sort_seconds(self, elements: ArrayLike, length: int, arrays: int, size_bytes: ArrayLike) -> NDArray[np.float64]:
        """Return the time to sort `elements` elements in runs of `length`.

        TPUs run a bitonic network: L (L + 1) / 2 steps for 2^L elements. In each step an element is compared and each
        array selected from. Steps whose partners lie farther apart than on-chip memory reaches pass through main
        memory. GPUs sort by eight bits of the key at a time, four passes for 32 bits (CUB's radix sort). CPUs compare L
        times. Traffic overlaps with compute, and the overhead of one op is added, of four on GPUs.

        - `arrays`: number of arrays that are sorted by one key.
        - `size_bytes`: bytes of one pass over the arrays.
        """
        elements, size = np.asarray(elements, dtype=np.float64), np.asarray(size_bytes, dtype=np.float64)
        depth = math.ceil(math.log2(max(2, length)))
        if self.topology.traits.sorting is Sorting.RADIX:
            return self.memory_seconds(4.0 * size) + 4.0 * self.calibration.op_overhead_s
        if self.topology.traits.sorting is Sorting.COMPARISON:
            busy = self.vector_seconds(elements * depth * (1 + arrays))
            return np.maximum(busy, self.memory_seconds(size)) + self.calibration.op_overhead_s
        busy = self.vector_seconds(elements * (depth * (depth + 1) / 2 * (1 + arrays)))
        # Half of the on-chip memory holds the data of one run, the other half prefetches the next.
        each = size / 2.0 / np.maximum(elements, 1.0)
        near = np.floor(np.log2(np.maximum(2.0, self.topology.chip.vmem_bytes / 2.0 / np.maximum(each, 1e-9))))
        far = np.maximum(0.0, depth - near)
        passes = 1.0 + far * (far + 1.0) / 2.0
        return np.maximum(busy, self.memory_seconds(size * passes)) + self.calibration.op_overhead_s

    def memory_seconds(self, size_bytes: ArrayLike, on_chip: bool = False) -> NDArray[np.float64]:
        """Return the time to stream bytes from and to main memory, or on-chip memory (VMEM) if the chip has one.

        The rate is `Calibration.memory_efficiency` of the peak; no overhead is added.
        """
        rate = self.topology.memory_bytes_per_s * self.calibration.memory_efficiency / self.slowest
        if on_chip and self.topology.chip.vmem_over_hbm_bandwidth:
            rate *= self.topology.chip.vmem_over_hbm_bandwidth
        return np.asarray(size_bytes, dtype=np.float64) / rate

    def relayout_seconds(self, size_bytes: ArrayLike) -> NDArray[np.float64]:
        """Return the time to write that many bytes in another order of dims; 0 if the calibration has no such traffic.

        See `Calibration.relayout_traffic`.
        """
        return self.memory_seconds(np.asarray(size_bytes, dtype=np.float64) * self.calibration.relayout_traffic)

    def host_seconds(self, size_bytes: ArrayLike) -> NDArray[np.float64]:
        """Return the time to move that many bytes of one device to or from its host's memory (all devices at once).

        A chip without PCIe, such as a CPU, moves them at a device's share of its peak main-memory rate.
        """
        chip = self.topology.chip
        rate = chip.pcie_bytes_per_s_per_chip / chip.devices_per_chip or self.topology.memory_bytes_per_s
        return np.asarray(size_bytes, dtype=np.float64) / rate

    def critical_batch(
        self,
        k: int,
        n: int,
        dtype: str = "bf16",
        weight_itemsize: float = 2,
        activation_itemsize: float = 2,
        on_chip: bool = False,
    ) -> float:
        """Return the rows b above which `[b, k] x [k, n]` is compute bound with streamed weights and activations.

        The result is inf if it never is. Overheads do not count.

        - `weight_itemsize`, `activation_itemsize`: bytes of an element.
        - `on_chip`: both lie in on-chip memory.
        """
        one_row = float(self.op_seconds(2.0 * k * n, 0, dtype)) - self.calibration.op_overhead_s
        weights = float(self.memory_seconds(k * n * weight_itemsize, on_chip))
        activations = float(self.memory_seconds((k + n) * activation_itemsize, on_chip))
        return weights / (one_row - activations) if one_row > activations else math.inf

    def vector_seconds(self, flops: ArrayLike) -> NDArray[np.float64]:
        """Return the time of elementwise FLOPs in the vector units; devices of a `cpu:N` share the machine's cores."""
        rate = self.calibration.vector_flops_per_s / self.slowest
        if self.topology.traits.shares_machine:
            rate *= self.topology.host_cores / self.topology.num_devices
        return np.asarray(flops, dtype=np.float64) / rate

    def extra_pass_seconds(
        self, flops: ArrayLike, dtype: str, efficiency: ArrayLike | None = None
    ) -> NDArray[np.float64]:
        """Return the time of further passes of the matrix unit over operands that it has loaded (higher precisions).

        - `flops`: FLOPs of those passes.
        - `efficiency`: share of the peak (default: that of a large matmul). No overhead is added.
        """
        share = self.calibration.matmul_efficiency if efficiency is None else np.asarray(efficiency, dtype=np.float64)
        return np.asarray(flops, dtype=np.float64) / (self._peak(dtype) * share)

    def op_seconds(
        self, flops: ArrayLike, size_bytes: ArrayLike, dtype: str = "bf16", efficiency: ArrayLike | None = None
    ) -> NDArray[np.float64]:
        """Return the roofline time of one fusion: max(compute, memory) plus its fixed overhead.

        `flops` are matrix-unit FLOPs at `efficiency` (default: that of a large matmul). `size_bytes` is all main-memory
        traffic of the fusion. An op without FLOPs and bytes takes no time.
        """
        flops = np.asarray(flops, dtype=np.float64)
        size = np.asarray(size_bytes, dtype=np.float64)
        share = self.calibration.matmul_efficiency if efficiency is None else np.asarray(efficiency, dtype=np.float64)
        busy = np.maximum(flops / (self._peak(dtype) * share), self.memory_seconds(size))
        return np.where((flops > 0) | (size > 0), busy + self.calibration.op_overhead_s, 0.0)


def slowest_share(slices: int, spread: float) -> float:
    """Return the expected time of the slowest of some slices over the mean time of a slice.

    Times are normally distributed with the standard deviation `spread`, as a share of the mean. Blom's formula has the
    expected largest of n values.
    """
    if slices == 1:
        return 1.0
    return 1.0 + spread * statistics.NormalDist().inv_cdf((slices - 0.375) / (slices + 0.25))


def smooth_max(*engines: ArrayLike) -> NDArray[np.float64]:
    """Return the seconds of engines that work at once, from the seconds of each; see `SHARPNESS`."""
    times = np.array(np.broadcast_arrays(*engines), dtype=np.float64)
    longest = times.max(axis=0)
    shares = np.divide(times, longest, out=np.zeros_like(times), where=longest > 0)
    return longest * (shares**SHARPNESS).sum(axis=0) ** (1.0 / SHARPNESS)


def _filled(size: NDArray[np.float64], tile: int) -> NDArray[np.float64]:
    """Return the share of whole tiles that a size of at least 1 fills, from 0 to 1."""
    return size / (np.ceil(size / tile) * tile)


LANES = 128
"""Elements in a row of a TPU's registers, along an array's minor dim."""
TILE_ROWS = 8
"""Rows of a tile of 4-byte elements in a TPU's registers."""


def shard_bytes(shape: Sequence[int], itemsize: float, splits: Sequence[int] | None = None, tiled: bool = False) -> int:
    """Return the bytes of one shard of an array whose dims are split into `splits` parts (None: not split).

    Uneven dims are padded up, and a fraction of a byte counts as one. A scalar is one element.

    With `tiled` the two minor dims are padded to the tiles of TPU layouts: 128 lanes in the minor dim, 8 rows in the
    one before it. An array of fewer rows rounds them up to a power of two. A vector is padded to 128 elements.
    """
    parts = [1] * len(shape) if splits is None else splits
    local = [-(-size // part) for size, part in zip(shape, parts, strict=True)]
    if tiled and local:
        local[-1] = -(-local[-1] // LANES) * LANES
        if len(local) > 1:
            rows = min(8, 1 << max(0, math.ceil(math.log2(max(1, local[-2])))))
            local[-2] = -(-local[-2] // rows) * rows
    return math.ceil(math.prod(local) * itemsize)


def tile_padding(
    local: NDArray[np.float64], itemsize: int, outer: Collection[int] = (), in_order: bool = False
) -> NDArray[np.float64]:
    """Return the bytes of tiles in a TPU layout per byte of elements, for arrays with the dims of each row of `local`.

    One dim is padded to 128 lanes and another one to 8 rows, the pair that pads least. Fewer rows are rounded to a
    power of two that fills words of 4 bytes.

    - `local`: dims of the arrays, [arrays, rank], of rank 2 or more.
    - `itemsize`: bytes of an element.
    - `outer`: dims that are not tiled. If fewer than two dims are left, the last dim other than the lanes holds the
      rows.
    - `in_order`: the last dim holds the lanes, and the dim before it the rows.
    """
    sizes = np.maximum(local, 1.0)
    rank = sizes.shape[1]
    if in_order:
        outer = range(rank - 2)
    lanes = [dim for dim in range(rank) if dim not in outer] or [rank - 1]
    rows = lanes if len(lanes) > 1 else [*lanes, max(dim for dim in range(rank) if dim != lanes[0])]
    tall = np.clip(2.0 ** np.ceil(np.log2(sizes)), max(1, 4 // max(1, itemsize)), TILE_ROWS)
    across, down = (np.ceil(sizes / tile) * tile / sizes for tile in (LANES, tall))
    pairs = [across[:, lane] * down[:, row] for lane in lanes for row in rows if row != lane]
    if in_order:
        pairs = [across[:, -1] * down[:, -2]]
    return np.minimum.reduce(pairs)
