"""Graphs kept on disk by the module they were read from, so that a second plan begins at the pricing.

This serves every source: whatever a Python file imports, its program is the module that it lowers to.
"""

import hashlib

from autoshard.base.kept import key_of, read_entry, write_entry
from autoshard.graph._read import read_graph
from autoshard.graph._records import OpGraph
from autoshard.graph._rows import from_json, to_json
from autoshard.rules import registrations


_KIND = "graph"
_PACKAGES = ("jax", "jaxlib")
_SOURCES = ("graph/*.py", "mlir/*.py", "rules.py", "base/kept.py")


def kept_graph(module: bytes) -> OpGraph:
    """`read_graph`, from disk where it is there; rules that were registered are in no module: with any, read anew."""
    if registrations():
        return read_graph(module)
    key = key_of(hashlib.sha256(module).hexdigest(), _PACKAGES, _SOURCES)
    body = read_entry(_KIND, key)
    if body is not None:
        try:
            return from_json(OpGraph, body)
        except (ValueError, TypeError):
            pass  # not what was written here, whatever its hash says
    graph = read_graph(module)
    write_entry(_KIND, key, to_json(graph).encode())
    return graph
