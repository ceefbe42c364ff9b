"""Graphs cached on disk by the hash of their module, as JSON of the records' fields."""

import hashlib

import msgspec

from autoshard.base.call_rules import registrations
from autoshard.base.disk_cache import key_of, read_entry, write_entry
from autoshard.graph.read_module import read_graph
from autoshard.graph.records import OpGraph


_KIND = "graph"
_PACKAGES = ("jax", "jaxlib")
_SOURCES = ("graph/**/*.py", "mlir/*.py", "base/call_rules.py", "base/disk_cache.py")
"""Globs of autoshard's own files whose contents are part of the key."""


def cached_graph(module: bytes) -> OpGraph:
    """Return `read_graph(module)`, from the disk cache if it is there; otherwise read it and write it to the cache.

    If the user registered call rules, the cache is bypassed, since the module does not contain these rules.
    """
    if registrations():
        return read_graph(module)
    key = key_of(hashlib.sha256(module).hexdigest(), _PACKAGES, _SOURCES)
    body = read_entry(_KIND, key)
    if body is not None:
        try:
            return msgspec.json.decode(body, type=OpGraph)
        except msgspec.DecodeError:
            pass  # the hash matches, but the text is no graph
    graph = read_graph(module)
    write_entry(_KIND, key, msgspec.json.encode(graph))
    return graph
