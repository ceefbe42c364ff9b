"""The mesh on which baselines are compared: the chosen one, or a simpler one where that has none."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Mesh, default_axis_names, make_mesh
from autoshard.errors import UserError
from autoshard.planning.mesh.mesh_attempt import MeshBest
from autoshard.planning.mesh.mesh_searcher import MeshOutcome, Searcher
from autoshard.planning.solve.weight_search import SearchResult, Start
from autoshard.planning.space.baselines import baselines
from autoshard.planning.space.dim_groups import Groups
from autoshard.program import Program


_BESIDE = 2
"""Most meshes without a solved plan that are priced for baselines."""


def with_baselines(
    search_on: Searcher, original: MeshOutcome, others: Sequence[MeshBest], time_limit: float
) -> MeshOutcome:
    """Return a result with baselines: the original one, else that on the first mesh of `_simple_meshes` that has some.

    The original one is also returned if none of these has any.
    """
    if not isinstance(original.found, SearchResult) or original.found.baselines:
        return original
    for mesh, choices in _simple_meshes(search_on, original.model.mesh, others):
        model = search_on.price(mesh)
        try:
            required = search_on.task.required(model)
        except UserError:  # the user's constraints suit another mesh
            continue
        if baselines(model, search_on.task.reading.groups):
            elsewhere = search_on.priced(model, required, Start(choices), time_limit / 4)
            if isinstance(elsewhere.found, SearchResult) and elsewhere.found.baselines:
                return elsewhere
    return original


def _simple_meshes(
    search_on: Searcher, chosen: Mesh, others: Sequence[MeshBest]
) -> Iterator[tuple[Mesh, NDArray[np.int64] | None]]:
    """Yield meshes of at most two axes for baselines, each with known choices if there are any.

    First comes the fastest other mesh, then those whose first axis divides the batch, the longest first. Users
    compare with plans that they would write, and these have one or two axes.
    """
    simple = [each for each in others if len(_wide(each.mesh)) <= 2]
    fastest = min(simple, key=lambda each: each.outcome.step_time_s + each.tight_s, default=None)
    if fastest is not None:
        yield fastest.mesh, fastest.choices
    topology, batch = search_on.topology, _batch_size(search_on.task.program, search_on.task.reading.groups)
    done = [chosen, *([] if fastest is None else [fastest.mesh])]
    for data in [n for n in range(batch, 0, -1) if batch % n == 0 and topology.num_devices % n == 0][:_BESIDE]:
        sizes = [size for size in (data, topology.num_devices // data) if size > 1]
        try:
            mesh = make_mesh(topology, dict(zip(default_axis_names(len(sizes)), sizes, strict=True)))
        except UserError:  # the physical axes have no such parts
            continue
        if mesh not in done:
            yield mesh, None


def _batch_size(program: Program, groups: Groups) -> int:
    """Return the largest number that divides the examples of all batch arguments; 0 without any."""
    return math.gcd(*(program.arguments[position].shape[dim] for position, dim in groups.examples.items()))


def _wide(mesh: Mesh) -> list[int]:
    """Return the sizes of a mesh's axes that are above 1, in order."""
    return [size for size in mesh.axes.values() if size > 1]
