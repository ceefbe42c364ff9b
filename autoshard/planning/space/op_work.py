"""One execution of a heavy op on the shards of a strategy, and the default price of an op."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives, Compute
from autoshard.graph import Op, OpGraph
from autoshard.planning.space.decision_model import Residency
from autoshard.planning.xla.array_layouts import Padding
from autoshard.planning.xla.axis_assignments import Seconds, States, local_elements
from autoshard.planning.xla.spatial_splits import Inner, extended_elements


@dataclasses.dataclass(frozen=True, slots=True)
class OpWork:
    """One execution of a heavy op in some states, and the models of the hardware that price it."""

    graph: OpGraph
    op: Op
    """Heavy op that is executed."""
    states: States
    """Factor that each mesh axis splits, [states, axes]."""
    axes: Sequence[int]
    """Sizes of the mesh axes."""
    compute: Compute
    """Prices of work on a device."""
    residency: Residency
    """Tensors that stay in on-chip memory."""
    padding: Padding
    """Padding that tiles add to tensors."""

    @property
    def backend(self) -> str:
        """Backend of the devices."""
        return self.compute.topology.backend

    @property
    def zeros(self) -> Seconds:
        """Array of zeros, [states]."""
        return np.zeros(len(self.states))

    @property
    def dtype(self) -> str:
        """Dtype in which most of the op's FLOPs multiply."""
        return self.graph.multiplied_dtype(self.op)

    @property
    def further_passes(self) -> int:
        """Passes beyond the first that a matrix unit which multiplies in bfloat16 needs for a higher precision.

        It is 0 on other devices.
        """
        return self.op.passes - 1 if self.compute.topology.traits.rounds_operands else 0

    def share(self) -> Seconds:
        """Return the share of the op's work on one device if work is even, [states]."""
        assert self.op.rule is not None
        factors = [max(1, n) for n in self.op.rule.sizes]  # a call may have empty results
        return local_elements(self.states, factors, self.axes) / math.prod(factors)

    def sloped_share(self) -> Seconds:
        """Return the share of the op's work on the busiest device, where work rises along some factors, [states]."""
        share = self.share()
        for factor, blocks in self.op.triangular:
            share = share * _most_of_slope(self.states, factor, self.axes, blocks)
        return share


def _most_of_slope(states: States, factor: int, axes: Sequence[int], blocks: int) -> Seconds:
    """Return the work of the busiest shard over the mean, where block k of n along the factor has work k, [states]."""
    parts = np.where(states == factor, np.array(axes), 1).prod(axis=1)
    # The last of p shards has n/p blocks of mean work n - (n/p - 1)/2; the mean over all blocks is (n + 1)/2.
    return (2.0 - 1.0 / parts + 1.0 / blocks) / (1.0 + 1.0 / blocks)


Side = Sequence[tuple[int, tuple[tuple[int, ...], ...]]]
"""Tensors, each with the factors of its dims; the factors are empty for an op without a rule."""


def sides(op: Op) -> tuple[Side, Side]:
    """Return the operands, which are read, and the results, which are written, with the factors of their dims."""
    operands = [(t, op.rule.operands[k] if op.rule else ()) for k, t in enumerate(op.operands)]
    results = [(t, op.rule.results[k] if op.rule else ()) for k, t in enumerate(op.results)]
    return operands, results


def _moved(work: OpWork, size: Seconds) -> Seconds:
    """Return `size`, the bytes of operands and results, plus the traffic of the copies that have halos, [states]."""
    if not work.op.halos or work.op.rule is None:
        return size
    # A shard is copied into a buffer with its halos: one read and one write.
    first = work.graph.tensors[work.op.operands[0]]
    return size + 2 * extended_elements(work.graph, work.op, work.states, work.axes) * first.itemsize


def streamed_seconds(work: OpWork, size: Seconds) -> Seconds:
    """Return the seconds of an op that is bound by memory traffic of `size` bytes, [states]."""
    return work.compute.op_seconds(work.zeros, size)


def _busy_seconds(work: OpWork, size: Seconds, fused: Seconds) -> Seconds:
    """Return the seconds of an op on the matrix unit of the busiest device, [states].

    - `size`: bytes of memory traffic.
    - `fused`: further bytes that fused operands read.
    """
    return matrix_seconds(work, size + fused, work.sloped_share(), work.op.steps * work.share())


def matrix_seconds(
    work: OpWork, size: Seconds, share: Seconds, steps: Seconds, efficiency: Seconds | None = None
) -> Seconds:
    """Return the seconds of a share of the op's FLOPs against memory traffic, plus those of its grid steps, [states].

    - `size`: bytes of memory traffic.
    - `share`: share of the op's FLOPs on one device, 0 to 1.
    - `steps`: grid steps of the kernel on one device.
    - `efficiency`: share of the matrix unit's peak; None for the chip's own figure.

    Passes for a higher precision are added.
    """
    op, compute, further = work.op, work.compute, work.further_passes
    busy = compute.op_seconds(op.flops * share, size, work.dtype, efficiency)
    if further:
        busy = busy + compute.extra_pass_seconds(op.flops * share * further, work.dtype, efficiency)
    return busy + compute.step_seconds(steps) if op.steps else busy


def no_memory(work: OpWork) -> NDArray[np.int64]:
    """Return 0 bytes in every state, [states]."""
    return np.zeros(len(work.states), dtype=np.int64)


def _no_copies(work: OpWork) -> list[tuple[int, int, Seconds]]:
    """Return no copies."""
    return []


def _no_collectives(work: OpWork, busy: Seconds, collectives: Collectives) -> list[Inner]:
    """Return no collectives."""
    return []


@dataclasses.dataclass(frozen=True, slots=True)
class OpModel:
    """Prices of one kind of heavy op."""

    sides: Callable[[Op], tuple[Side, Side]] = sides
    """Tensors that the op reads from memory, and those that it writes."""
    traffic: Callable[[OpWork, Seconds], Seconds] = _moved
    """Bytes of all memory traffic, given those of `sides`."""
    streamed: Callable[[OpWork, Seconds], Seconds] = streamed_seconds
    """Seconds of an op without FLOPs or without a rule, given its traffic."""
    busy: Callable[[OpWork, Seconds, Seconds], Seconds] = _busy_seconds
    """Seconds of an op with FLOPs, given its traffic and the further bytes that its fused operands read."""
    memory: Callable[[OpWork], NDArray[np.int64]] = no_memory
    """Bytes that the op occupies in addition to its operands and results."""
    copies: Callable[[OpWork], list[tuple[int, int, Seconds]]] = _no_copies
    """Bytes of copies in other layouts, each with the half-open range of ops during which it lives."""
    collectives: Callable[[OpWork, Seconds, Collectives], list[Inner]] = _no_collectives
    """Collectives inside of the op's own code, given its seconds; the partitioner's are not among them."""
    apart: bool = False
    """True if a device may own any places of a later factor of a dim, however the factors before it are split."""
