"""The specs that a plan gives to the values of a captured graph, and the specs that follow from them by propagation."""

from collections.abc import Collection, Iterator

from autoshard.mlir import Flow, Value
from autoshard.planning import Plan, Spec


class PlannedSpecs:
    """The specs of a plan, by the values of the captured graph."""

    def __init__(self, plan: Plan) -> None:
        self.made: dict[Value, tuple[Spec, ...]] = {}
        """The specs that each value is pinned to where an op computes it, in order."""
        self._handed: dict[Value, dict[int, tuple[Spec, ...]]] = {}
        """Specs, in order, that each value is pinned to as an operand, by the number of the op that reads it."""
        self._arguments = tuple(plan.arguments.values())
        for pin in plan.pins:
            value = pin.op, pin.index
            if pin.operand is None:
                self.made[value] = (*self.made.get(value, ()), pin.spec)
            else:
                path = self._handed.setdefault(value, {})
                path[pin.operand[0]] = (*path.get(pin.operand[0], ()), pin.spec)

    def specs_of(self, value: Value) -> tuple[Spec, ...]:
        """Return the specs of a value in order: its pins, or else the spec of an argument; empty if propagation
        decides.

        A value with op -1 is the argument whose number is its index.
        """
        return self.made.get(value, self._arguments[value[1] : value[1] + 1] if value[0] < 0 else ())

    def handed_to(self, value: Value, ops: Collection[int]) -> set[tuple[Spec, ...]]:
        """Return the specs, each in order, that the value is pinned to as an operand of some of these ops alone; empty
        without pins.
        """
        return {specs for op, specs in self._handed.get(value, {}).items() if op in ops}

    def axes(self, value: Value, ops: Collection[int] | None = None) -> set[str]:
        """Return the axes that split the value in any of its specs.

        With `ops`, return the axes as these ops read it: the last spec of their own pins, else the value's last spec.
        """
        specs = self.specs_of(value)
        seen = specs if ops is None else [path[-1] for path in self.handed_to(value, ops)] or specs[-1:]
        return {axis for spec in seen for axis in spec.axes}

    def handed_axes(self, value: Value) -> set[str]:
        """Return the axes that split the value as an operand of the ops that have pins of their own on it, by their
        last specs.
        """
        return {axis for specs in self._handed.get(value, {}).values() for axis in specs[-1].axes}


class Following:
    """Model of XLA's propagation where only the `fixed` values and the arguments are pinned.

    `flow` has the values that each op reads. GSPMD splits a value over every axis that reaches the value from its
    producer or its users. A spec follows from others if it reaches the value and no other axis does.
    """

    def __init__(self, planned: PlannedSpecs, flow: Flow, fixed: Collection[Value]) -> None:
        self._planned = planned
        self._flow = flow
        self._fixed = fixed

    def reaches(self, value: Value) -> bool:
        """Return True if the planned spec reaches the value from fixed values, through views and elementwise ops.

        It does not if an op on the way reads it in more axes: propagation would bring these axes back. It does not
        either if the value has no planned spec, or if a value on the way has another split.
        """
        own = self._planned.axes(value)
        queue, seen = [value], {value}
        for each in queue:  # grows as it is walked
            if each in self._fixed or each[0] < 0:
                continue
            before = self._before(each)
            if not before or any(self._planned.handed_axes(other) - own for other in self._onward(each)):
                return False
            for other in before:
                if other is None or not self._same(each, other):
                    return False
                if other not in seen:
                    seen.add(other)
                    queue.append(other)
        return bool(self._planned.specs_of(value))

    def around(self, value: Value) -> set[str]:
        """Collect the axes of all values near this one, up to the next fixed values.

        Propagation may bring these axes into the operands that the value is computed from.
        """
        neighbours = {value}
        for each in self._onward(value):
            neighbours.add(each)
            for op in () if each in self._fixed else self._flow.users.get(each, ()):
                neighbours |= {(op, 0), *(other for other in self._flow.operands[op] if other is not None)}
        return {axis for each in neighbours for axis in self._planned.axes(each) | self._planned.handed_axes(each)}

    def _onward(self, value: Value) -> Iterator[Value]:
        """Yield a value, then the results of views and elementwise ops on it, breadth first, up to fixed values."""
        queue, seen = [value], {value}
        for each in queue:  # grows as it is walked
            yield each
            for op in () if each in self._fixed else self._flow.users.get(each, ()):
                if (op in self._flow.views or self._flow.elementwise_operands[op]) and (op, 0) not in seen:
                    seen.add((op, 0))
                    queue.append((op, 0))

    def _before(self, value: Value) -> tuple[Value | None, ...]:
        """Return the operands that give a value its spec: those of a view, or the elementwise ones; None for
        constants.
        """
        op = value[0]
        return self._flow.operands[op] if op in self._flow.views else self._flow.elementwise_operands[op]

    def _same(self, value: Value, before: Value) -> bool:
        """Return True if a value has the split of the value `before` that it is computed from; False if either has no
        planned spec.
        """
        specs = [self._planned.specs_of(each)[-1:] for each in (value, before)]
        if not all(specs):
            return False
        (ours,), (theirs,) = specs
        return is_split_alike(self._flow, value[0], theirs, ours) if value[0] in self._flow.views else ours == theirs


def is_split_alike(flow: Flow, op: int, before: Spec, after: Spec) -> bool:
    """Return True if an op splits its result over the same axes as its operand, in all dims that the result retains.

    - `flow`: flow of values of the module.
    - `op`: number of the op.
    - `before`, `after`: specs of the operand and of the result.

    The dims of a view are matched by place, those of any other op by order.
    """
    if op not in flow.views:
        return splits(before, flow.unreduced_dims.get(op)) == splits(after)
    expected = {place: axes for axes, place in zip(before.dims, flow.views[op], strict=True) if axes}
    return expected == {dim: axes for dim, axes in enumerate(after.dims) if axes}


def splits(spec: Spec, dims: Collection[int] | None = None) -> list[tuple[str, ...]]:
    """Return the axes of the split dims in order; with `dims`, of these dims only."""
    return [axes for dim, axes in enumerate(spec.dims) if axes and (dims is None or dim in dims)]
