"""The specs that a plan gives to the values of a captured graph, and which of them follow from others."""

from collections.abc import Collection, Iterator

from autoshard.mlir import Flow, Value
from autoshard.planning import Plan, Spec


class Planned:
    """The specs of a plan by the values of the captured graph."""

    def __init__(self, plan: Plan) -> None:
        self.made: dict[Value, tuple[Spec, ...]] = {}
        """Pinned where it is made, to one spec after the other."""
        self._handed: dict[Value, dict[int, tuple[Spec, ...]]] = {}
        self._arguments = tuple(plan.arguments.values())
        for pin in plan.pins:
            value = pin.op, pin.index
            if pin.operand is None:
                self.made[value] = (*self.made.get(value, ()), pin.spec)
            else:
                path = self._handed.setdefault(value, {})
                path[pin.operand[0]] = (*path.get(pin.operand[0], ()), pin.spec)

    def held(self, value: Value) -> tuple[Spec, ...]:
        """One spec after the other; none if the plan leaves it to propagation."""
        return self.made.get(value, self._arguments[value[1] : value[1] + 1] if value[0] < 0 else ())

    def handed_to(self, value: Value, ops: Collection[int]) -> set[tuple[Spec, ...]]:
        """The specs that it is pinned to for some of these ops alone, one after the other."""
        return {specs for op, specs in self._handed.get(value, {}).items() if op in ops}

    def axes(self, value: Value, ops: Collection[int] | None = None) -> set[str]:
        """The axes over which it is split in all of its specs; with `ops`, as one of these takes it."""
        specs = self.held(value)
        seen = specs if ops is None else [path[-1] for path in self.handed_to(value, ops)] or specs[-1:]
        return {axis for spec in seen for axis in spec.axes}

    def handed_axes(self, value: Value) -> set[str]:
        """The axes over which it is split as it is handed to any op."""
        return {axis for specs in self._handed.get(value, {}).values() for axis in specs[-1].axes}


class Following:
    """What XLA's propagation makes of a plan where only `fixed` values and the arguments are pinned.

    GSPMD splits a value over every axis that reaches it from what makes it or takes it. So a spec follows from others
    if it reaches the value from these and no other axis does.
    """

    def __init__(self, planned: Planned, flow: Flow, fixed: Collection[Value]) -> None:
        self._planned = planned
        self._flow = flow
        self._fixed = fixed

    def reaches(self, value: Value) -> bool:
        """Whether its planned spec comes to it from what is held, through views and element by element.

        Not if something on the way is handed to an op in more axes: these would come back from there.
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
        return bool(self._planned.held(value))

    def around(self, value: Value) -> set[str]:
        """Axes of what a value meets up to where it is held again: these may come into what it is made from."""
        met = {value}
        for each in self._onward(value):
            met.add(each)
            for op in () if each in self._fixed else self._flow.users.get(each, ()):
                met |= {(op, 0), *(other for other in self._flow.operands[op] if other is not None)}
        return {axis for each in met for axis in self._planned.axes(each) | self._planned.handed_axes(each)}

    def _onward(self, value: Value) -> Iterator[Value]:
        """A value, and what it becomes through views and element by element up to where that is held."""
        queue, seen = [value], {value}
        for each in queue:  # grows as it is walked
            yield each
            for op in () if each in self._fixed else self._flow.users.get(each, ()):
                if (op in self._flow.views or self._flow.alike[op]) and (op, 0) not in seen:
                    seen.add((op, 0))
                    queue.append((op, 0))

    def _before(self, value: Value) -> tuple[Value | None, ...]:
        op = value[0]
        return self._flow.operands[op] if op in self._flow.views else self._flow.alike[op]

    def _same(self, value: Value, before: Value) -> bool:
        """Whether a value is split as the one that it is made from."""
        specs = [self._planned.held(each)[-1:] for each in (value, before)]
        if not all(specs):
            return False
        (ours,), (theirs,) = specs
        return is_split_alike(self._flow, value[0], theirs, ours) if value[0] in self._flow.views else ours == theirs


def is_split_alike(flow: Flow, op: int, before: Spec, after: Spec) -> bool:
    """Whether an op leaves what it makes over the same axes as what it takes, in the dims where that is found again."""
    if op not in flow.views:
        return splits(before, flow.kept.get(op)) == splits(after)
    found = {place: axes for axes, place in zip(before.dims, flow.views[op], strict=True) if axes}
    return found == {dim: axes for dim, axes in enumerate(after.dims) if axes}


def splits(spec: Spec, dims: Collection[int] | None = None) -> list[tuple[str, ...]]:
    """The axes of the dims (of these, if given) that are split, in order."""
    return [axes for dim, axes in enumerate(spec.dims) if axes and (dims is None or dim in dims)]
