"""Which values of later steps to pin, so that they stay as planned: what modules give, its gradients, and ops inside.

A plan may hand a value to one op in another spec than the one it is made in. Where neither is what a module gives, XLA
is free to move the op's result instead, which can be much larger. So operands and results of such an op are pinned.
Every pin costs time in every step: what follows from others is left to propagation.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from autoshard.exec.torch_xla_hook.pins.captured_specs import Following, Planned, is_split_alike
from autoshard.exec.torch_xla_hook.values.call_sites import LazyOp, Place
from autoshard.mlir import Flow, Value
from autoshard.planning import Plan, Spec


Pinned = Mapping[tuple[Place, tuple[int, ...]], tuple[Spec, ...]]
"""Place and shape of a value -> the specs that it is pinned to, one after the other."""


@dataclasses.dataclass(frozen=True)
class Pins:
    """Where recorded values are made: in the user's script, and in the captured graph."""

    values: Sequence[tuple[Place, tuple[int, ...], Value | None]]
    """Place of each value in the script, its shape, and its place in the graph; None if that does not make it."""
    flow: Flow

    def of(self, plan: Plan) -> Pinned:
        """The specs that the plan pins each of them to; what it leaves to propagation is left out.

        A value has two where it is made in one spec and used in another: the op that makes it sees the first. One op
        of a script is several of the graph (a convolution and its bias); where the plan changes a spec between these,
        the op's result is pinned to both. Views are not told of: what a view splits anew is pinned where it is made,
        and where it is taken.
        """
        return _Choice(self, plan).pins()


class _Choice:
    """Which of the recorded values one plan has pinned."""

    def __init__(self, pins: Pins, plan: Plan) -> None:
        self.flow = pins.flow
        self.planned = Planned(plan)
        self.made = self.planned.made
        self.every = [(call, shape, place) for call, shape, place in pins.values if place is not None]
        self.given = [place for call, _, place in self.every if call.op is None]
        """What modules give, and its gradients."""
        self.made |= self._following()
        self.inside = self._inside()
        self.mixing = self._mixing()
        self.taken = self._taken()
        self.resplit = self._resplit()
        self.moved = {call.op for call, _, place in self.every if call.what == "result" and self._is_moved(place)}

    def pins(self) -> Pinned:
        viewed = self._viewed()
        whole = {
            call.op
            for call, _, place in self.every
            if call in self.taken or (call.what == "result" and place in viewed)
        }
        turning = self._turning()
        whole |= {op for op in turning if op in self.moved or self.inside[op] & self.flow.lookups}
        turning |= {call.op for call, _, place in self.every if call.what == "operand" and place in self.resplit}
        loose = self._loose(turning - whole)
        found: dict[tuple[Place, tuple[int, ...]], tuple[Spec, ...]] = {}
        there: set[Value] = set()
        begun = {place: self._begun(call.op, place) for call, _, place in self.every if call.what == "result"}
        held = self._views_of(place for place in self.given if place in self.made)
        for call, shape, place in self.every:
            if place not in self.made or call in self.taken:
                continue
            is_result = call.what != "operand"
            if (
                call.op is None
                or call.op in whole
                or (is_result and self._is_moved(place))
                or (not is_result and (call.op, place) in loose)
            ):
                # What has its last spec already, since an op or an inner module gave it so, keeps that.
                first = is_result and place not in there
                found[call, shape] = (*begun.get(place, ()), *self.made[place]) if first else self._last(place)
                if is_result:
                    there.add(place)
                held.add(place)
        return self._once(found | self._handed_on(held))

    def _handed_on(self, held: Collection[Value]) -> dict[tuple[Place, tuple[int, ...]], tuple[Spec, ...]]:
        """Pins on what ops take in another spec than its own.

        Where this has further axes, they would come back to the value and to all else that takes it: if something
        holds it in its own spec (`held`), a pin says that first. So where a view has split it anew.
        """
        found = {}
        for call, shape, place in self.every:
            if call in self.taken:
                specs = self.taken[call]
                is_further = place in held and self.planned.axes(place) < set(specs[-1].axes)
                own = self._last(place) if is_further or place in self.resplit else ()
                found[call, shape] = (*own, *specs)
        return found

    def _last(self, value: Value) -> tuple[Spec, ...]:
        return self.made.get(value, ())[-1:]

    def _is_moved(self, value: Value) -> bool:
        """Whether the plan has a value in one spec after the other: XLA may not find this way by itself."""
        return len(self.made.get(value, ())) > 1

    def _following(self) -> dict[Value, tuple[Spec, ...]]:
        """The specs of what modules give and the plan leaves to propagation: of what it is made from, by element."""
        found: dict[Value, tuple[Spec, ...]] = {}
        for value in self.given:
            queue, seen = [value], {value}
            for each in queue:  # grows as it is walked
                if each in self.made:
                    found[value] = self._last(each)
                    break
                for other in self.flow.alike[each[0]] if each[0] >= 0 else ():
                    if other is not None and other not in seen:
                        seen.add(other)
                        queue.append(other)
        return {value: specs for value, specs in found.items() if value not in self.made}

    def _taken(self) -> dict[Place, tuple[Spec, ...]]:
        """What ops take in another spec than its own, with that.

        What is added or multiplied element by element, such as a bias, follows what it meets if that only slices it.
        """
        return {
            call: specs
            for call, shape, place in self.every
            if call.what == "operand" and len(paths := self._handed(place, shape, self.inside.get(call.op, ()))) == 1
            for specs in paths
            if place[0] >= 0 or call.op in self.mixing or not self.planned.axes(place) <= set(specs[-1].axes)
        }

    def _handed(self, value: Value, shape: tuple[int, ...], ops: Collection[int]) -> set[tuple[Spec, ...]]:
        """The specs that some ops want a value in, other than its own.

        They are stated, or as what it is spread to is split, or, of data, as what it becomes in other dims first.
        """
        held = self.planned.held(value)[-1:]
        spread, viewed = set(), set()
        for op in self.flow.users.get(value, ()):
            if op not in ops or (op, 0) not in self.made:
                continue
            dims = self.made[op, 0][0].dims
            if op in self.flow.spread:
                spread.add((Spec(tuple(dims[dim] for dim in self.flow.spread[op])),))
            elif op in self.flow.views and value[0] < 0 and held:
                if not is_split_alike(self.flow, op, held[0], self.made[op, 0][0]):
                    found = zip(self.flow.views[op], shape, strict=True)
                    viewed.add((Spec(tuple(() if to is None or size == 1 else dims[to] for to, size in found)),))
        return self.planned.handed_to(value, ops) or (spread | viewed) - {held}

    def _loose(self, turning: Collection[LazyOp | None]) -> set[tuple[LazyOp | None, Value]]:
        """What ops take whose spec does not follow from what modules give, or may get axes from what the op makes."""
        following = Following(self.planned, self.flow, {place for place in self.given if place in self.made})
        taken: dict[LazyOp | None, set[Value]] = collections.defaultdict(set)
        around: dict[LazyOp | None, set[str]] = collections.defaultdict(set)
        for call, _, place in self.every:
            if call.op in turning and call.what == "operand":
                taken[call.op].add(place)
            elif call.op in turning:
                around[call.op] |= following.around(place)
        return {
            (op, value)
            for op, values in taken.items()
            for value in values
            if not (around[op] <= set().union(*map(self.planned.axes, values)) and following.reaches(value))
        }

    def _turning(self) -> set[LazyOp | None]:
        """Of the mixing ops those that leave their result over other axes than they are given.

        XLA gives such an op a spec by what is around it: an axis that it is to do without comes in from there. What a
        product makes follows from what it takes; what a lookup makes does not. Nor is what is handed to another op in
        more axes than its own sure to come here without these.
        """
        axes: dict[tuple[LazyOp | None, bool], set[str]] = collections.defaultdict(set)
        for call, _, place in self.every:
            if call.op in self.mixing:
                is_result = call.what == "result"
                axes[call.op, is_result] |= self.planned.axes(place, None if is_result else self.inside[call.op])
        beside = {
            call.op
            for call, _, place in self.every
            if call.what == "operand" and self.planned.handed_axes(place) - self.planned.axes(place)
        }
        return {op for op in self.mixing if op in self.moved or op in beside or axes[op, True] != axes[op, False]}

    def _mixing(self) -> set[LazyOp | None]:
        """Ops of the script that contract dims or look up in them."""
        known = self.flow.products | self.flow.lookups
        return {op for op, numbers in self.inside.items() if op is not None and numbers & known}

    def _inside(self) -> dict[LazyOp | None, set[int]]:
        """Numbers of the graph's ops that an op of the script is made of."""
        known = {place for _, _, place in self.every}
        operands = {(call.op, place) for call, _, place in self.every if call.what == "operand"}
        inside: dict[LazyOp | None, set[int]] = {}
        for call, _, place in self.every:
            if call.what == "result":
                copied = (call.op, place) in operands  # by an op that is none in the graph
                inside.setdefault(call.op, set()).update(() if copied else self.flow.between(known, place))
        return inside

    def _viewed(self) -> set[Value]:
        """Values that an op which is told of no one gives on in other axes."""
        told = self._told()
        return {
            value
            for op, operands in enumerate(self.flow.operands)
            for value in operands
            if value is not None and op not in told and self._splits_anew(op, value)
        }

    def _views_of(self, values: Iterable[Value]) -> set[Value]:
        """What these values become by being put into other dims; none of it is pinned by itself."""
        queue, found = list(values), set[Value]()
        for value in queue:  # grows as it is walked
            for op in self.flow.users.get(value, ()):
                if op in self.flow.views and (op, 0) not in found:
                    found.add((op, 0))
                    queue.append((op, 0))
        return found

    def _resplit(self) -> set[Value]:
        """What views make of values that are split over other axes, and what becomes of that before an op is told."""
        anew = {(op, 0) for op in self.flow.views for value in self.flow.operands[op] if self._splits_anew(op, value)}
        told = self._told()
        queue = list(anew)
        for value in queue:  # grows as it is walked
            for op in self.flow.users.get(value, ()):
                if op not in told and len(self.flow.operands[op]) == 1 and (op, 0) not in anew:
                    anew.add((op, 0))
                    queue.append((op, 0))
        return anew

    def _told(self) -> set[int]:
        """Numbers of the graph's ops of which someone is told."""
        return set().union(*self.inside.values())

    def _splits_anew(self, op: int, value: Value | None) -> bool:
        """Whether what an op makes is split over other axes than the value that it takes."""
        if value is None or value not in self.made or (op, 0) not in self.made:
            return False
        return not is_split_alike(self.flow, op, self.made[value][-1], self.made[op, 0][0])

    def _begun(self, op: LazyOp | None, result: Value) -> tuple[Spec, ...]:
        """The spec in which an op begins to make its result, where it ends in another."""
        if result not in self.made:
            return ()
        first = {self.made[value][0] for value in self.flow.unchanged(self.inside[op], result) if value in self.made}
        first.discard(self.made[result][0])
        return tuple(first) if len(first) == 1 else ()

    def _once(self, found: Pinned) -> Pinned:
        """Without pins on ops that repeat the one on what their module gives, or on the gradient that it is given."""
        given = {(*call[:2], place): found.get((call, shape)) for call, shape, place in self.every if call.op is None}
        again = {
            (call, shape)
            for call, shape, place in self.every
            if call.op is not None and len(specs := found.get((call, shape), ())) == 1
            if given.get((*call[:2], place)) == specs
        }
        return {key: specs for key, specs in found.items() if key not in again}
