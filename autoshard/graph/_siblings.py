"""Kernels with several results: light work of one size that takes the same values is done in one pass over them.

A TPU compiler joins what reads one value, as the two halves of a step of an associative scan do, and what an update
makes of a parameter, its moments and one gradient (AdamW, scans and recurrences, v4 to v6e, libtpu 0.0.51).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from autoshard.graph._records import Fusion, Op, OpClass, OpGraph


_MOVES = frozenset({"slice", "dynamic_update_slice"})
_MOST = 8
"""Results of one kernel, at most."""


@dataclasses.dataclass(slots=True)
class _Kernel:
    first: int
    """The op that ends its first fusion: what it takes is there before."""
    elements: int
    seen: set[int]
    """What it reads and writes."""
    results: int = 1


def joined(graph: OpGraph, fusions: Sequence[Fusion]) -> list[Fusion]:
    """The same fusions; those that another's kernel does beside its own work do not read again what it reads or makes,
    and are `beside`."""
    found = list(fusions)
    kernels: dict[int, list[_Kernel]] = defaultdict(list)
    """By value the kernels that read or write it."""
    for number, fusion in enumerate(fusions):
        root = graph.ops[fusion.root]
        if not fusion.moved or not _is_light(root):
            continue
        size = sum(graph.tensors[t].elements for t in fusion.moved)
        host = next((k for t in fusion.reads for k in kernels[t] if _may_join(graph, k, fusion, root, size)), None)
        if host is None:
            host = _Kernel(root.id, size, set())
        else:
            host.results += 1
            found[number] = dataclasses.replace(
                fusion, reads=tuple(t for t in fusion.reads if t not in host.seen), beside=True
            )
        for tensor in {*fusion.reads, *fusion.writes} - host.seen:
            host.seen.add(tensor)
            kernels[tensor].append(host)
    return found


def _is_light(op: Op) -> bool:
    return op.op_class is OpClass.POINTWISE or op.kind in _MOVES


def _may_join(graph: OpGraph, kernel: _Kernel, fusion: Fusion, root: Op, size: int) -> bool:
    if kernel.results >= _MOST or kernel.elements != size or graph.ops[kernel.first].loop != root.loop:
        return False
    return all(t in kernel.seen or graph.tensors[t].producer < kernel.first for t in fusion.reads)
