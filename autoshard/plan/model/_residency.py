"""Which values stay in on-chip memory from the kernel that writes them to those that read them."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.cost import Chip
from autoshard.graph import Liveness, OpClass, OpGraph


RESERVED = 16 << 20
"""Bytes of on-chip memory that a running kernel takes for its blocks: libtpu's default, and all that v2 to v4 have."""


LASTING = 32
"""A value during whose life more than this many times its own bytes are written is not kept: gradients of layers take
what their forward passes saved from main memory, however few the layers are."""


class Residency:
    """What of a program's values an accelerator keeps in on-chip memory, by how finely they are split.

    TPU compilers leave a value on the chip until its last use if what is written meanwhile fits there too. Of what
    fusions write in ResNet-50 and in loops of decoders, T5 and ViT (v5e with 128 MiB, libtpu 0.0.51) nearly all was
    there where less than 128 MB followed, and little where more than 256 MB did, whatever its size; what a loop carries
    or saves was not. What follows a value is held to be split as finely as the value is, which makes a share of it
    (local bytes over all) a bound that is known before any spec is. Values that look alike are treated alike, so that
    layers that repeat have the same prices.
    """

    def __init__(self, graph: OpGraph, liveness: Liveness, chip: Chip) -> None:
        self.graph = graph
        self.taken_over_own = liveness.computed
        self.stored_over_own = {
            source: graph.tensors[tensor].bytes / graph.tensors[source].bytes
            for source, tensor in liveness.stores.items()
        }
        self.ratio = chip.vmem_over_hbm_bandwidth
        self.share = np.zeros(len(graph.tensors))
        """Of every value the largest share of it that stays on the chip; 0: always in main memory."""
        room = chip.vmem_bytes // chip.cores_per_chip - RESERVED
        if room <= 0 or not self.ratio:
            return
        found = list(_candidates(graph, liveness))
        written = np.zeros(len(graph.ops) + 3)
        for size, _, start, _ in found:
            written[start + 1] += size
        written = written.cumsum()
        alike: dict[object, list[tuple[int, float]]] = defaultdict(list)
        users = _users(graph)
        for size, tensor, start, stop in found:
            # Values without elements have no bytes.
            meanwhile = max(written[stop] - written[start], 1.0)
            record = graph.tensors[tensor]
            what = (graph.ops[record.producer].kind, record.shape, record.dtype, record.loop, users[tensor], size)
            alike[what].append((tensor, room / meanwhile if meanwhile <= LASTING * size else 0.0))
        for members in alike.values():
            least = min(share for _, share in members)
            for tensor, _ in members:
                self.share[tensor] = least
        self._fused(liveness)

    def _fused(self, liveness: Liveness) -> None:
        """A value that is never written is read as those that it follows from are; what is generated is not read."""
        for source, tensor in liveness.stores.items():
            self.share[source] = self.share[tensor]
        generated = {t for op in self.graph.ops if op.op_class is OpClass.FREE for t in op.results}
        for op in self.graph.ops:
            if op.op_class in (OpClass.HEAVY, OpClass.LAYER):
                continue
            read = [self.share[t] for t in op.operands if t not in generated]
            for tensor in op.results:
                if read and tensor not in liveness.materialised:
                    self.share[tensor] = min(read)

    def streamed(self, tensor: int, local_bytes: ArrayLike) -> NDArray[np.float64]:
        """Bytes from main memory that take as long as that many bytes of a value, from where it is."""
        local = np.asarray(local_bytes, dtype=np.float64)
        if not self.share[tensor]:
            return local
        return np.where(local <= self.share[tensor] * self.graph.tensors[tensor].bytes, local / self.ratio, local)

    def taken_besides(self, tensor: int, local_bytes: ArrayLike) -> NDArray[np.float64]:
        """What a matmul reads to compute a value that it takes, beyond as many bytes as the value has."""
        return self.streamed(tensor, local_bytes) * (self.taken_over_own.get(tensor, 1.0) - 1.0)

    def left(self, tensor: int, local_bytes: ArrayLike) -> NDArray[np.float64]:
        """`streamed` for what a matmul makes: of a value that its kernel goes on with, what it stores instead."""
        return self.streamed(tensor, local_bytes) * self.stored_over_own.get(tensor, 1.0)


def _users(graph: OpGraph) -> list[tuple[str, ...]]:
    """For every value the kinds of the ops that take it."""
    kinds: list[set[str]] = [set() for _ in graph.tensors]
    for op in graph.ops:
        for tensor in op.operands:
            kinds[tensor].add(op.kind)
    return [tuple(sorted(each)) for each in kinds]


def _candidates(graph: OpGraph, liveness: Liveness) -> Iterator[tuple[int, int, int, int]]:
    """(bytes, tensor, start, stop) of everything that neither comes in, goes out nor is carried by a loop."""
    held = {*graph.arguments, *graph.results, *liveness.hosted}
    held.update(t for loop in graph.loops for c in loop.carries for t in (c.init, c.body, c.update, c.result))
    for tensor, start, stop in liveness.buffers:
        record = graph.tensors[tensor]
        if tensor not in held and record.producer >= 0:
            yield record.elements * liveness.itemsize(graph, (tensor, start, stop)), tensor, start, stop
    for softmax in liveness.softmaxes:
        for tensor, start, stop, width in softmax.whole.buffers:
            if tensor not in held:
                yield graph.tensors[tensor].elements * width, tensor, start, stop
