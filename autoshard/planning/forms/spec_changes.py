"""Changes of a search over specs of arguments: one dim group, or the arguments of a similar name, at a time."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from autoshard.planning.forms.export_forms import Form, parameter_of
from autoshard.planning.price.evaluate import tensor_spec
from autoshard.planning.record.spec import Spec
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups, tensor_groups
from autoshard.planning.space.user_constraints import Required
from autoshard.program import Role


class SpecChanges:
    """Arguments of a program that have specs, and the changes of these that a form allows."""

    def __init__(self, form: Form, model: Model, groups: Groups, required: Required) -> None:
        """Store names, shapes and roles of the arguments, and specs that constraints fix."""
        self.model, self.groups, self.required = model, groups, required
        program = model.program
        self.roles = {a.name: str(a.role) for a in program.arguments}
        self.shapes = {a.name: tuple(a.shape) for a in program.arguments}
        self.tensors = {
            a.name: t
            for a, t in zip(program.arguments, model.graph.arguments, strict=True)
            if model.structure.cluster_of[t] >= 0
        }
        asked = [n for n, t in self.tensors.items() if self.node(t) in required.allowed]
        self.pinned = {n: specs[0] for n in asked if len(specs := self.alternatives(n)) == 1}
        self.own = [n for n in self.tensors if form.state or self.roles[n] != Role.OPTIMIZER_STATE]

    def by_group(self) -> Iterator[Callable[[dict[str, Spec]], dict[str, Spec] | None]]:
        """Yield changes that put an axis over one dim group, or over none, in all arguments with the group's dims.

        Each change is a function from specs by name to new specs by name. A spec stays if its dim does not divide.
        """
        dims = {
            name: tensor_groups(self.model.structure, self.groups.of_factor, self.tensors[name]) for name in self.own
        }
        present = sorted({g for own in dims.values() for g in own if g is not None})
        for axis, group in itertools.product(self.model.axis_names, [None, *present]):

            def change(specs: dict[str, Spec], axis: str = axis, group: int | None = group) -> dict[str, Spec] | None:
                """Return specs with the axis over the dim group only, or over nothing if the group is None."""
                changed = dict(specs)
                for name, own in dims.items():
                    if group is None or group in own:
                        at = None if group is None else own.index(group)
                        changed[name] = self.moved(specs[name], name, axis, at)
                return changed

            yield change

    def moved(self, spec: Spec, name: str, axis: str, at: int | None) -> Spec:
        """Return a spec with an axis over dim `at` only, or over none for None. Axes of one dim are in mesh order; the
        spec itself returns if they do not divide the dim.
        """
        order = self.model.axis_names
        dims = [tuple(a for a in axes if a != axis) for axes in spec.dims]
        if at is not None:
            dims[at] = tuple(sorted((*dims[at], axis), key=order.index))
            if self.shapes[name][at] % Spec((dims[at],)).shards(self.model.mesh.axes):
                return spec
        return Spec(tuple(dims))

    def argument_changes(self) -> Iterator[Callable[[dict[str, Spec]], dict[str, Spec] | None]]:
        """Yield changes to each allowed spec of an argument and of those with a similar name, the most bytes first.

        Names are similar if they differ in digits only and their shapes are equal. All state of similar parameters
        changes at once.
        """
        slots: dict[tuple[str, bool, tuple[int, ...]], list[str]] = {}
        for name in self.own:
            state = self.roles[name] == Role.OPTIMIZER_STATE
            owner = parameter_of(name, self.shapes, self.roles) if state else None
            slots.setdefault((re.sub(r"\d+", "*", owner or name), state, self.shapes[name]), []).append(name)
        for names in sorted(slots.values(), key=lambda names: -self.size(names)):
            for spec in self.alternatives(names[0]):
                yield lambda specs, names=names, spec=spec: {**specs, **dict.fromkeys(names, spec)}

    def size(self, names: Iterable[str]) -> int:
        """Return the bytes of some arguments, before they are split."""
        return sum(self.model.graph.tensors[self.tensors[name]].bytes for name in names)

    def node(self, tensor: int) -> int:
        """Return the node of the model that decides the spec of a tensor with a cluster."""
        return self.model.cluster_node[self.model.structure.cluster_of[tensor]]

    def alternatives(self, name: str) -> list[Spec]:
        """Return the distinct specs of an argument that the constraints allow, in the order of its states."""
        model, tensor = self.model, self.tensors[name]
        node = self.node(tensor)
        trial = np.zeros(len(model.nodes), dtype=np.int64)
        allowed = self.required.allowed.get(node, np.ones(len(model.nodes[node].states), dtype=bool))
        specs = {}
        for row in np.flatnonzero(allowed):
            trial[node] = row
            specs[tensor_spec(model, trial, tensor)] = None
        return list(specs)
