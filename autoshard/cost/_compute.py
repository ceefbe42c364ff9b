"""How long matmuls and memory-bound ops take on one device."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.cost._calibration import Calibration, load_calibration
from autoshard.cost._topology import Topology


class Compute:
    """Rooflines of one device of a topology; all methods take and give arrays (local shapes, seconds)."""

    def __init__(self, topology: Topology, calibration: Calibration | None = None) -> None:
        self.topology = topology
        self.calibration = calibration or load_calibration(topology.chip)

    def matmul_efficiency(self, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> NDArray[np.float64]:
        """Share of peak of an `[m, k] x [k, n]` matmul: the large-matmul figure times what padding leaves.

        The matrix unit holds a tile of `mxu_edge` x `mxu_edge` while rows stream through it in groups of `sublanes`:
        one of the three sizes streams, whichever wastes least, the other two are padded up to whole tiles. Fewer rows
        than `mxu_edge` cannot hide the loading of the next tile and count as that many.
        """
        sizes = [np.maximum(np.asarray(x, dtype=np.float64), 1.0) for x in (m, n, k)]
        edge, rows = self.topology.chip.mxu_edge, self.topology.chip.sublanes
        m_tiles, n_tiles, k_tiles = (_filled(x, edge) for x in sizes)
        m_rows, n_rows, k_rows = (np.minimum(_filled(x, rows), x / edge) for x in sizes)
        used = np.maximum(m_rows * n_tiles * k_tiles, m_tiles * np.maximum(n_rows * k_tiles, n_tiles * k_rows))
        return self.calibration.matmul_efficiency * used

    def matmul_seconds(
        self, m: ArrayLike, n: ArrayLike, k: ArrayLike, batch: ArrayLike = 1, dtype: str = "bf16"
    ) -> NDArray[np.float64]:
        """Matrix-unit time of `batch` local matmuls `[m, k] x [k, n]`; memory traffic and overhead come on top."""
        m, n, k, batch = (np.asarray(x, dtype=np.float64) for x in (m, n, k, batch))
        flops = 2.0 * m * n * k * batch
        return flops / (self.topology.peak_flops(dtype) * self.matmul_efficiency(m, n, k))

    def memory_seconds(self, size_bytes: ArrayLike, on_chip: bool = False) -> NDArray[np.float64]:
        """Time to stream that many bytes from and to main memory, or on-chip memory (VMEM) where the chip has one."""
        rate = self.topology.memory_bytes_per_s * self.calibration.memory_efficiency
        if on_chip and self.topology.chip.vmem_over_hbm_bandwidth:
            rate *= self.topology.chip.vmem_over_hbm_bandwidth
        return np.asarray(size_bytes, dtype=np.float64) / rate

    def host_seconds(self, size_bytes: ArrayLike) -> NDArray[np.float64]:
        """Time to move that many bytes of one device to or from its host's memory (all devices at once)."""
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
        """Rows b above which `[b, k] x [k, n]` is compute bound, its weights and activations streamed; inf if never."""
        one_row = float(self.op_seconds(2.0 * k * n, 0, dtype)) - self.calibration.op_overhead_s
        weights = float(self.memory_seconds(k * n * weight_itemsize, on_chip))
        activations = float(self.memory_seconds((k + n) * activation_itemsize, on_chip))
        return weights / (one_row - activations) if one_row > activations else math.inf

    def vector_seconds(self, flops: ArrayLike) -> NDArray[np.float64]:
        """Time of elementwise work in the vector units; devices of a `cpu:N` share the machine's cores."""
        rate = self.calibration.vector_flops_per_s
        if self.topology.backend == "cpu":
            rate *= self.topology.host_cores / self.topology.num_devices
        return np.asarray(flops, dtype=np.float64) / rate

    def op_seconds(
        self, flops: ArrayLike, size_bytes: ArrayLike, dtype: str = "bf16", efficiency: ArrayLike | None = None
    ) -> NDArray[np.float64]:
        """Roofline of one fusion: max(compute, memory) plus its fixed overhead.

        `flops` are matrix-unit FLOPs at `efficiency` (default: that of a large matmul), `size_bytes` all main-memory
        traffic of the fusion. An op that does nothing (no flops, no bytes) takes no time.
        """
        flops = np.asarray(flops, dtype=np.float64)
        size = np.asarray(size_bytes, dtype=np.float64)
        share = self.calibration.matmul_efficiency if efficiency is None else np.asarray(efficiency, dtype=np.float64)
        busy = np.maximum(flops / (self.topology.peak_flops(dtype) * share), self.memory_seconds(size))
        return np.where((flops > 0) | (size > 0), busy + self.calibration.op_overhead_s, 0.0)


def _filled(size: NDArray[np.float64], tile: int) -> NDArray[np.float64]:
    """Share of whole tiles that a size fills."""
    return size / (np.ceil(size / tile) * tile)
