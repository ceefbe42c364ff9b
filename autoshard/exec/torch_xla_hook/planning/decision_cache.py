"""Cache of planning decisions on disk: a process that traces an already planned step reads its plan and plans nothing.

A cache key covers the captured program, the splits in it, the topology, the mesh and the specs of an earlier plan. It
also covers the memory limit, the prices, and the sources and versions of the packages that plan.
"""

import json
from collections.abc import Mapping
from typing import Any

from autoshard.base.call_rules import registrations
from autoshard.base.disk_cache import key_of, read_entry, write_entry
from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.capture.lazy_graph import Capture
from autoshard.exec.torch_xla_hook.planning.capture_planning import Decision, best_mesh, decide
from autoshard.exec.torch_xla_hook.planning.runtime_topology import memory_limit_here
from autoshard.exec.torch_xla_hook.values.live_marks import LiveMesh
from autoshard.planning import Options, Spec, plan_from_json, plan_to_json, priced_with


_PACKAGES = ("jax", "jaxlib", "torch_xla", "numpy", "scipy", "numba", "ortools", "highspy")
"""Packages whose versions are part of the key."""
_ROOMS = ("base", "cost", "exec/torch_xla_hook", "graph", "mlir", "planning", "program", "solver")
_SOURCES = ("*.py", *(f"{room}/**/*.{kind}" for room in _ROOMS for kind in ("py", "json")))
"""Globs of autoshard's own files whose contents are part of the key."""


def kept_decision(
    capture: Capture, topology: str, mesh: LiveMesh, fixed: Mapping[int, Spec], free: bool = False
) -> Decision:
    """Return what `decide` returns, from the disk cache if it has a valid entry; else call `decide` and write its
    decision to the cache.

    - `topology`: name of the topology, such as `v5e:4x4`.
    - `mesh`: the mesh to plan for; its sizes and device numbers are part of the key.
    - `fixed`: specs by argument number that an earlier plan or step gave.
    - `free`: if True, arguments that are split for another reason may change their spec.

    An entry that cannot be parsed is overwritten. Errors of `decide` pass through and nothing is cached.
    """
    here = {
        "mesh": list(mesh.sizes.items()),
        "devices": mesh.devices,
        "fixed": [[number, spec.dims] for number, spec in sorted(fixed.items())],
        "split": sorted(capture.split.items()),
        "users": sorted(capture.users),
        "free": free,
    }
    key = _key(capture, topology, here)
    entry = _read(key)
    if entry is not None:
        try:
            plan, notes = plan_from_json(entry["plan"]), tuple(entry["notes"])
            return Decision.of(capture, plan, notes)
        except (KeyError, TypeError, UserError):
            pass  # the entry is not one that this module wrote
    made = decide(capture, topology, mesh, fixed, free)
    _write(key, {"plan": plan_to_json(made.plan), "notes": made.notes})
    return made


def cached_mesh(capture: Capture, topology: str) -> dict[str, int]:
    """Return what `best_mesh` returns (sizes by axis), from the disk cache if it has an entry.

    Otherwise call `best_mesh` and write its mesh to the cache.
    """
    key = _key(capture, topology, "best mesh")
    entry = _read(key)
    if isinstance(entry, dict):
        return entry
    made = best_mesh(capture, topology)
    _write(key, made)
    return made


_KIND = "torch-xla"
"""Kind of these entries in the disk cache: the ending of their files."""


def _key(capture: Capture, topology: str, here: Any) -> str | None:
    """Hash all inputs of a decision into a cache key; None if a user registered call rules, which no file of ours
    contains.

    `here` is the JSON value that tells decisions of one program and topology apart. None disables both `_read` and
    `_write`.
    """
    if registrations():
        return None
    program = capture.program
    inputs = [
        program.fingerprint,
        [program.name, program.training, [repr(each) for each in (*program.arguments, *program.results)]],
        topology,
        memory_limit_here(),
        repr(priced_with(Options(topology=topology), Topology.parse(topology))),
        here,
    ]
    return key_of(inputs, _PACKAGES, _SOURCES)


def _read(key: str | None) -> Any:
    """Return the JSON value of a cache entry; None if `key` is None, or if the entry is absent or no JSON."""
    body = None if key is None else read_entry(_KIND, key)
    try:
        return None if body is None else json.loads(body)
    except ValueError:
        return None


def _write(key: str | None, made: Any) -> None:
    """Write a JSON value to the disk cache; do nothing if `key` is None."""
    if key is not None:
        write_entry(_KIND, key, json.dumps(made).encode())
