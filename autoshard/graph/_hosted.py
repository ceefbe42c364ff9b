"""Which values the program keeps in its host's memory: what it sends there, and the stacks it is put into.

JAX's offloading remat policies, `jax.device_put` to a host's memory space and torch_xla's placement calls all become
`annotate_device_placement` calls: ops of kind `to_host` and `to_device` here.
"""

import re
from collections.abc import Mapping

from autoshard.graph._records import OpClass, OpGraph


TO_HOST, TO_DEVICE = "to_host", "to_device"
_TARGET = "annotate_device_placement"
INTO_STACKS = frozenset({"dynamic_update_slice", "broadcast_in_dim", "reshape"})
"""Ops that put a value into a stack as a slice of it."""
_PASSING = INTO_STACKS | {"transpose", "copy", "sharding_constraint"}


def placement_kind(target: str, attributes: Mapping[str, str]) -> str | None:
    """The kind of a placement call as an op, from the text of its attributes; None for any other call."""
    if target != _TARGET:
        return None
    texts = [text for name, text in attributes.items() if "frontend_attributes" in name]
    found = re.search(r'_xla_buffer_placement\s*=\s*"(\w+)"', " ".join(texts))
    return TO_HOST if found and found[1].endswith("host") else TO_DEVICE


def hosted(graph: OpGraph) -> frozenset[int]:
    """Tensors that lie in the host's memory: results of `to_host`, what slices, stacks and loops make of them."""
    found = {t for op in graph.ops if op.kind == TO_HOST for t in op.results}
    before = -1
    while found and len(found) != before:
        before = len(found)
        for op in graph.ops:
            passing = op.kind in _PASSING or (op.op_class is OpClass.LAYER and op.kind == "dynamic_slice")
            if passing and not found.isdisjoint(op.operands[:2]):
                found.update(op.results)
        for loop in graph.loops:
            for carry in loop.carries:
                parts = (carry.init, carry.body, carry.update, carry.result)
                if not found.isdisjoint(parts):
                    found.update(parts)
    return frozenset(found)
