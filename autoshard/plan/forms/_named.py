"""Mappings from names of dims to mesh axes, of which each holds for every tensor that has the name."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from autoshard.plan.record._spec import Spec


Names = Mapping[str, tuple[str, ...]]
"""Tensor -> the names of its dims."""
Axes = dict[str, tuple[str, ...]]
"""Name of a dim -> the mesh axes that split it, major first."""


def named_axes(
    specs: Mapping[str, Spec], shapes: Mapping[str, tuple[int, ...]], names: Names, mesh: Mapping[str, int]
) -> Axes:
    """The mapping that most elements of these tensors agree with, and that none of them forbids.

    It says which axes split the dims of each name; names of dims that stay whole are left out.
    """
    votes: dict[str, dict[tuple[str, ...], int]] = defaultdict(lambda: defaultdict(int))
    for tensor, spec in specs.items():
        for name, axes in zip(names[tensor], spec.dims, strict=True):
            votes[name][axes] += math.prod(shapes[tensor])
    wanted = {name: max(said, key=lambda axes: (said[axes], len(axes))) for name, said in votes.items()}
    weights = {name: sum(said.values()) for name, said in votes.items()}
    order = sorted((name for name in wanted if wanted[name]), key=lambda name: -weights[name])
    return agreed(order, wanted, {}, together(names[tensor] for tensor in specs), sizes_of(specs, shapes, names), mesh)


def agreed(
    order: Iterable[str],
    wanted: Mapping[str, tuple[str, ...]],
    settled: Mapping[str, tuple[str, ...]],
    beside: Mapping[str, set[str]],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
) -> Axes:
    """What is settled, and in this order what is wanted for further names, as far as both can stand together.

    An axis splits one dim of a tensor at most, so two names that stand `beside` one another have none in common; and
    the axes of a name divide its size.
    """
    found: Axes = dict(settled)
    for name in order:
        taken = {axis for other in beside.get(name, ()) for axis in found.get(other, ())}
        axes = tuple(axis for axis in wanted[name] if axis not in taken)
        while axes and sizes[name] % Spec((axes,)).shards(mesh):
            axes = axes[:-1]
        if axes and name not in found:
            found[name] = axes
    return found


def together(rows: Iterable[Sequence[str]]) -> dict[str, set[str]]:
    """For every name the others that stand in one row with it."""
    beside: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        for name in row:
            beside[name] |= {*row} - {name}
    return beside


def sizes_of(tensors: Iterable[str], shapes: Mapping[str, tuple[int, ...]], names: Names) -> dict[str, int]:
    """What divides the size of a name wherever it stands."""
    sizes: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        for name, size in zip(names[tensor], shapes[tensor], strict=True):
            sizes[name] = math.gcd(sizes[name], size)
    return sizes


def by_names(axes: Mapping[str, tuple[str, ...]], names: Sequence[str]) -> Spec:
    """The spec of a tensor with these names of dims."""
    return Spec(tuple(axes.get(name, ()) for name in names))
