"""Specs by names of dims: mappings to mesh axes, and the choices that agree with them."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard import mlir
from autoshard.planning.forms.export_forms import Rest
from autoshard.planning.forms.propagated_specs import Propagation
from autoshard.planning.price.evaluate import tensor_spec
from autoshard.planning.price.replicated_work import shares_of
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import Spec
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups, tensor_groups
from autoshard.program import Role


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


@dataclasses.dataclass(frozen=True, slots=True)
class Mappings:
    """Name of a dim -> the mesh axes that split it, major first."""

    held: Axes
    """The mapping of parameters and of the state that goes with them."""
    computed: Axes
    """The mapping of inputs and of all that is computed."""

    def to_json(self) -> dict[str, Any]:
        """What a plan's provenance keeps of them; `said_mappings` reads it."""
        return {"held": _lists(self.held), "computed": _lists(self.computed)}

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal mappings."""
        return tuple(sorted(self.held.items())), tuple(sorted(self.computed.items()))


def said_mappings(plan: Plan) -> Mappings | None:
    """Those that a plan was made with; None for one that was not planned within them."""
    said = plan.provenance.get("haliax")
    if said is None:
        return None
    both = ({name: tuple(axes) for name, axes in said[key].items()} for key in ("held", "computed"))
    return Mappings(*both)


def _lists(axes: Axes) -> dict[str, list[str]]:
    return {name: list(own) for name, own in axes.items()}


class NamedDims:
    """The names that a model's dims have, by dim group."""

    def __init__(self, model: Model, groups: Groups) -> None:
        program, structure = model.program, model.structure
        self.model, self.groups, self.names = model, groups, program.dims
        self.shapes = {argument.name: argument.shape for argument in program.arguments}
        self.of_role: dict[str, list[str]] = defaultdict(list)
        self.tensors: dict[str, int] = {}
        self.of_group: dict[int, list[str]] = defaultdict(list)
        stored = {structure.cluster_of[result] for result, _ in structure.ties}
        self.inputs: set[int] = set()
        """Groups of dims of inputs: what has one of these is computed for the examples, what has none are weights."""
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
        self.met = (
            ("held", together(self.names[name] for name in self.tensors if name not in inputs)),
            ("computed", together([*rows, *self.names.values()])),
        )
        self.sizes = sizes_of(self.tensors, self.shapes, self.names)
        self.propagation = Propagation(model, Rest.NAMES)

    def _names(self, tensor: int) -> list[list[str]]:
        """The names of every dim of a tensor."""
        own = tensor_groups(self.model.structure, self.groups.of_factor, tensor)
        return [[] if group is None else self.of_group.get(group, []) for group in own]

    def mappings(self, choices: NDArray[np.int64]) -> Mappings:
        """What most of a choice agrees with: of parameters, of inputs, and of what is computed."""
        mesh, model = self.model.mesh.axes, self.model
        specs = {name: tensor_spec(model, choices, tensor) for name, tensor in self.tensors.items()}
        held, inputs = (
            named_axes({name: specs[name] for name in self.of_role[role]}, self.shapes, self.names, mesh)
            for role in (Role.PARAMETER, Role.BATCH)
        )
        split = shares_of(model, self.groups, choices, self.values)
        wanted: dict[str, tuple[str, ...]] = {}
        for group, names in self.of_group.items():
            axes = tuple(axis for axis in model.axis_names if split.get((group, axis), 0.0) > 0.5)
            wanted |= {name: axes for name in names if len(axes) > len(wanted.get(name, ()))}
        order = sorted(wanted, key=lambda name: (-self.weights[name], name))
        return Mappings(held, agreed(order, wanted, inputs, self.met[1][1], self.sizes, mesh))

    def specs(self, mappings: Mappings) -> dict[str, Spec]:
        """The specs of arguments under mappings."""
        inputs = self.of_role[Role.BATCH]
        return {
            name: by_names(mappings.computed if name in inputs else mappings.held, self.names[name])
            for name in self.tensors
        }

    def choices(self, mappings: Mappings) -> NDArray[np.int64]:
        """The alternative of every node under mappings: values by their names, ops as costs least between them."""
        return self.propagation.choices(self.specs(mappings), self._values(mappings))

    def _values(self, mappings: Mappings) -> Iterator[tuple[int, mlir.Dims]]:
        for tensor in self.values:
            own = tensor_groups(self.model.structure, self.groups.of_factor, tensor)
            names = self._names(tensor)
            axes = mappings.computed if self.inputs & {*own} else mappings.held
            dims = tuple(next((axes[name] for name in each if name in axes), ()) for each in names)
            split = [axis for each in dims for axis in each]
            if any(names) and len(set(split)) == len(split):
                yield tensor, dims

    def changes(self, mappings: Mappings) -> Iterator[Mappings]:
        """Mappings that differ in one name of one of the two."""
        mesh = self.model.mesh.axes
        some = [each for count in range(len(mesh) + 1) for each in itertools.permutations(mesh, count)]
        for name in sorted(self.sizes, key=lambda name: (-self.weights[name], name)):
            for axes, (which, beside) in itertools.product(some, self.met):
                old: Axes = getattr(mappings, which)
                rest = {other: own for other, own in old.items() if other != name}
                made = agreed([name], {name: axes}, rest, beside, self.sizes, mesh)
                if made != old and (not axes or made.get(name) == axes):
                    yield dataclasses.replace(mappings, **{which: made})
