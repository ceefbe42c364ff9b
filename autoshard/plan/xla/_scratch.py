"""Memory that compilers take beside the operands and results of sorts and cumulative ops.

Sorts and top-k of 32 Mi numbers compiled for v5e and h100, cumulative sums and products for v5e (libtpu 0.0.52, jaxlib
0.10.2): a sort works on a copy of what it orders, on TPUs always with indices beside it; a cumulative op on TPUs goes
through two copies along the last dim, and through one along others.
"""

from autoshard.cost import BACKENDS, LANES
from autoshard.graph import FactorKind, Op, OpGraph


SORTS = frozenset({"sort", "top_k"})
"""Both order a whole dim: compilers make a top-k of a sort or of as many steps of it."""
_INDEX = 4
"""Bytes of an index."""


def scratch_itemsize(graph: OpGraph, op: Op, backend: str) -> int:
    """Return the bytes that an op takes beside its operands and results for each element of the first operand."""
    tiled = BACKENDS[backend].tiled
    if op.kind in SORTS and (tiled or BACKENDS[backend].gpu_kernels):
        indexed = op.kind == "top_k" or (tiled and len(op.operands) == 1)
        return sum(graph.tensors[t].itemsize for t in op.operands) + (_INDEX if indexed else 0)
    passes = cumulative_copies(graph, op, backend)
    return passes * graph.tensors[op.operands[0]].itemsize if passes else 0


def cumulative_copies(graph: OpGraph, op: Op, backend: str) -> int:
    """Return how many copies a cumulative op on a TPU goes through; 0 for other ops."""
    if op.kind != "reduce_window" or op.rule is None or not BACKENDS[backend].tiled:
        return 0
    first, made = graph.tensors[op.operands[0]], graph.tensors[op.results[0]]
    halos = {halo.factor for halo in op.halos}
    along = [
        dim
        for dim, factors in enumerate(op.rule.operands[0])
        for factor in factors
        if op.rule.kinds[factor] is FactorKind.PERMUTATION and factor not in halos
    ]
    if first.shape != made.shape or len(along) != 1 or first.shape[along[0]] <= LANES:
        return 0
    return 2 if along[0] == len(first.shape) - 1 else 1
