"""Helpers of the tests of liveness."""

from typing import Any

from autoshard.graph import FusionRules, Liveness, OpGraph


TPU = FusionRules(fused_matmuls=True)


def lifetimes(liveness: Liveness) -> dict[int, tuple[int, int]]:
    """Return the start and stop of each buffer, without the narrow copies of stacks, which have their stack's name."""
    return {b[0]: b[1:] for b in reversed(liveness.buffers)}


def peak(graph: OpGraph, liveness: Liveness) -> int:
    size = {t.id: t.bytes for t in graph.tensors}
    return max(
        sum(size[t] for t, start, stop in liveness.buffers if start <= moment < stop)
        for moment in range(len(graph.ops) + 1)
    )


def carry_of(graph: OpGraph, shape: tuple[int, ...], loop: int = 0) -> Any:
    (found,) = (c for c in graph.loops[loop].carries if graph.tensors[c.body].shape == shape)
    return found
