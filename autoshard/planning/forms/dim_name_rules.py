"""Specs by names of dims: mappings from names to mesh axes, and the choices that agree with them."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard import mlir
from autoshard.cost import Topology
from autoshard.planning.forms.export_forms import Rest
from autoshard.planning.forms.propagated_specs import Propagation
from autoshard.planning.price.analysed_program import analyse_program, as_planned, reprice
from autoshard.planning.price.evaluate import tensor_spec
from autoshard.planning.price.replicated_work import shares_of
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import Spec
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups, tensor_groups
from autoshard.program import Program, Role


Names = Mapping[str, tuple[str, ...]]
"""Names of the dims of each tensor."""
Axes = dict[str, tuple[str, ...]]
"""Mesh axes that split each name of a dim, major first."""


def named_axes(
    specs: Mapping[str, Spec], shapes: Mapping[str, tuple[int, ...]], names: Names, mesh: Mapping[str, int]
) -> Axes:
    """Return the mapping from dim names to axes that agrees with the most elements of these tensors, and is valid for
    all of them.

    - `specs`, `shapes`, `names`: specs, shapes and dim names by tensor.
    - `mesh`: sizes of the axes by name.

    Each dim votes for its axes with the elements of its tensor, and more axes win a tie. Names with more votes choose
    first. The mapping gives the axes of each name; names of whole dims are left out.
    """
    votes: dict[str, dict[tuple[str, ...], int]] = defaultdict(lambda: defaultdict(int))
    for tensor, spec in specs.items():
        for name, axes in zip(names[tensor], spec.dims, strict=True):
            votes[name][axes] += math.prod(shapes[tensor])
    wanted = {name: max(tally, key=lambda axes: (tally[axes], len(axes))) for name, tally in votes.items()}
    weights = {name: sum(tally.values()) for name, tally in votes.items()}
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
    """Return the settled mapping, extended by wanted axes of further names as far as they are compatible.

    An axis splits at most one dim of a tensor, so names that occur in one tensor have no axis in common. Axes that a
    neighbour has are dropped; then minor axes are dropped until the rest divides. A name without axes left, or already
    settled, is not added.

    - `order`: names to add, in this order.
    - `wanted`: axes wanted for each name, major first.
    - `settled`: mapping that stays.
    - `beside`: for each name the others that occur in one tensor with it.
    - `sizes`: number that the axes of each name must divide.
    - `mesh`: sizes of the axes by name.
    """
    mapping: Axes = dict(settled)
    for name in order:
        used = {axis for other in beside.get(name, ()) for axis in mapping.get(other, ())}
        axes = tuple(axis for axis in wanted[name] if axis not in used)
        while axes and sizes[name] % Spec((axes,)).shards(mesh):
            axes = axes[:-1]
        if axes and name not in mapping:
            mapping[name] = axes
    return mapping


def together(rows: Iterable[Sequence[str]]) -> dict[str, set[str]]:
    """Return for every name the other names that occur in at least one row with it."""
    neighbours: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        for name in row:
            neighbours[name] |= {*row} - {name}
    return neighbours


def sizes_of(tensors: Iterable[str], shapes: Mapping[str, tuple[int, ...]], names: Names) -> dict[str, int]:
    """Return for each name the greatest common divisor of its dims' sizes in all tensors."""
    sizes: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        for name, size in zip(names[tensor], shapes[tensor], strict=True):
            sizes[name] = math.gcd(sizes[name], size)
    return sizes


def by_names(axes: Mapping[str, tuple[str, ...]], names: Sequence[str]) -> Spec:
    """Return the spec of a tensor with these names of dims; names without an entry in `axes` are whole."""
    return Spec(tuple(axes.get(name, ()) for name in names))


@dataclasses.dataclass(frozen=True, slots=True)
class Mappings:
    """Mappings from names of dims to the mesh axes that split them, major first."""

    held: Axes
    """Mapping of parameters and of the optimizer state with the same names."""
    computed: Axes
    """Mapping of inputs and of all computed values."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry of a plan's provenance that `recorded_mappings` reads, with lists in place of tuples."""
        return {"held": _lists(self.held), "computed": _lists(self.computed)}

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for equal mappings."""
        return tuple(sorted(self.held.items())), tuple(sorted(self.computed.items()))


def recorded_mappings(plan: Plan) -> Mappings | None:
    """Return the mappings within which a plan was made, from its provenance; None if it was not planned within
    mappings.
    """
    recorded = plan.provenance.get("haliax")
    if recorded is None:
        return None
    mappings = ({name: tuple(axes) for name, axes in recorded[key].items()} for key in ("held", "computed"))
    return Mappings(*mappings)


def _lists(axes: Axes) -> dict[str, list[str]]:
    """Return a mapping with lists in place of tuples."""
    return {name: list(own) for name, own in axes.items()}


class NamedDims:
    """Names of a model's dims, by dim group: conversions between choices, mappings of names, and specs."""

    def __init__(self, model: Model, groups: Groups) -> None:
        """Collect names, sizes and neighbours of dims from the arguments, and extend them to computed values by dim
        group. A name weighs the bytes of computed values that have it.
        """
        program, structure = model.program, model.structure
        self.model, self.groups, self.names = model, groups, program.dims
        self.shapes = {argument.name: argument.shape for argument in program.arguments}
        self.of_role: dict[str, list[str]] = defaultdict(list)
        self.tensors: dict[str, int] = {}
        self.of_group: dict[int, list[str]] = defaultdict(list)
        stored = {structure.cluster_of[result] for result, _ in structure.ties}
        self.inputs: set[int] = set()
        """Dim groups of inputs. Values with one of these groups depend on the examples; values without are weights."""
        for argument, tensor in zip(program.arguments, model.graph.arguments, strict=True):
            own = tensor_groups(structure, groups.of_factor, tensor)
            if argument.role is Role.BATCH:
                self.inputs |= {group for group in own if group is not None}
            else:
                stored.add(structure.cluster_of[tensor])
            if argument.name in self.names and structure.cluster_of[tensor] >= 0:
                self.of_role[argument.role].append(argument.name)
                self.tensors[argument.name] = tensor
                for name, group in zip(self.names[argument.name], own, strict=True):
                    if group is not None and name not in self.of_group[group]:
                        self.of_group[group].append(name)
        self.values = [t for t in sorted(model.liveness.materialised) if structure.cluster_of[t] not in stored]
        self.weights: dict[str, int] = defaultdict(int)
        rows = []
        for tensor in self.values:
            rows.append([name for each in self._names(tensor) for name in each])
            for name in rows[-1]:
                self.weights[name] += model.graph.tensors[tensor].bytes
        inputs = self.of_role[Role.BATCH]
        self.cooccurring_names = (
            ("held", together(self.names[name] for name in self.tensors if name not in inputs)),
            ("computed", together([*rows, *self.names.values()])),
        )
        self.sizes = sizes_of(self.tensors, self.shapes, self.names)
        self.propagation = Propagation(model, Rest.NAMES)

    def _names(self, tensor: int) -> list[list[str]]:
        """Return for each dim of a tensor the names of its dim group; empty for a dim without a group or names."""
        own = tensor_groups(self.model.structure, self.groups.of_factor, tensor)
        return [[] if group is None else self.of_group.get(group, []) for group in own]

    def mappings(self, choices: NDArray[np.int64]) -> Mappings:
        """Return the mappings that agree with most of a choice: one of parameters, and one of inputs and computed
        values.

        The mapping of computed values extends that of inputs by axes that split more than half of the bytes of a dim
        group.
        """
        mesh, model = self.model.mesh.axes, self.model
        specs = {name: tensor_spec(model, choices, tensor) for name, tensor in self.tensors.items()}
        parameters, inputs = (
            named_axes({name: specs[name] for name in self.of_role[role]}, self.shapes, self.names, mesh)
            for role in (Role.PARAMETER, Role.BATCH)
        )
        split = shares_of(model, self.groups, choices, self.values)
        wanted: dict[str, tuple[str, ...]] = {}
        for group, names in self.of_group.items():
            # More than half of the bytes: the majority decides for all values with the name.
            axes = tuple(axis for axis in model.axis_names if split.get((group, axis), 0.0) > 0.5)
            wanted |= {name: axes for name in names if len(axes) > len(wanted.get(name, ()))}
        order = sorted(wanted, key=lambda name: (-self.weights[name], name))
        return Mappings(parameters, agreed(order, wanted, inputs, self.cooccurring_names[1][1], self.sizes, mesh))

    def specs(self, mappings: Mappings) -> dict[str, Spec]:
        """Return the specs of named arguments under mappings: inputs by `computed`, all others by `held`."""
        inputs = self.of_role[Role.BATCH]
        return {
            name: by_names(mappings.computed if name in inputs else mappings.held, self.names[name])
            for name in self.tensors
        }

    def choices(self, mappings: Mappings) -> NDArray[np.int64]:
        """Return the alternative of every node under mappings: values by their names, ops by the least cost between
        them.
        """
        return self.propagation.choices(self.specs(mappings), self._values(mappings))

    def _values(self, mappings: Mappings) -> Iterator[tuple[int, mlir.Dims]]:
        """Yield the computed values with named dims, and the axes of their dims under mappings.

        Values that share a dim group with an input go by `computed`, others by `held`. A dim with several names has the
        axes of the first one that is mapped. Values with one axis on two dims are skipped.
        """
        for tensor in self.values:
            own = tensor_groups(self.model.structure, self.groups.of_factor, tensor)
            names = self._names(tensor)
            axes = mappings.computed if self.inputs & {*own} else mappings.held
            dims = tuple(next((axes[name] for name in each if name in axes), ()) for each in names)
            split = [axis for each in dims for axis in each]
            if any(names) and len(set(split)) == len(split):
                yield tensor, dims

    def changes(self, mappings: Mappings) -> Iterator[Mappings]:
        """Yield valid mappings that differ in the axes of one name in one of the two mappings, names of most bytes
        first.

        Each name gets every ordered set of mesh axes, none included. Axes that a neighbour has, or that do not divide,
        exclude a change.
        """
        mesh = self.model.mesh.axes
        axis_tuples = [each for count in range(len(mesh) + 1) for each in itertools.permutations(mesh, count)]
        for name in sorted(self.sizes, key=lambda name: (-self.weights[name], name)):
            for axes, (which, neighbours) in itertools.product(axis_tuples, self.cooccurring_names):
                old: Axes = getattr(mappings, which)
                rest = {other: own for other, own in old.items() if other != name}
                changed = agreed([name], {name: axes}, rest, neighbours, self.sizes, mesh)
                if changed != old and (not axes or changed.get(name) == axes):
                    yield dataclasses.replace(mappings, **{which: changed})


def by_name(plan: Plan, program: Program) -> tuple[Mappings, dict[str, Spec]]:
    """Return a plan as mappings of dim names, and the specs of named arguments under these mappings.

    The mappings are those within which the plan was made, else those closest to its choices. Raises `UserError` for a
    plan that cannot be priced again on the program.
    """
    program = as_planned(program, plan)
    reading = analyse_program(program, Topology.parse(plan.topology))
    model, choices = reprice(plan, program, reading)
    named = NamedDims(model, reading.groups)
    mappings = recorded_mappings(plan) or named.mappings(choices)
    return mappings, named.specs(mappings)
