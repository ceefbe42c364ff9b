"""Which values of later steps to pin, so that they stay as planned: what modules give, its gradients, and ops inside.

A plan may hand a value to one op in another spec than the one it is made in. Where neither is what a module gives, XLA
is free to move the op's result instead, which can be much larger. So operands and results of such an op are pinned.
Every pin costs time in every step: what follows from others is left to propagation.
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from autoshard.exec.torch_xla_hook._places import LazyOp, Place
from autoshard.exec.torch_xla_hook._specs import Following, Planned, splits
from autoshard.mlir import Flow, Value
from autoshard.plan import Plan, Spec


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
        the op's result is pinned to both. Views are not told of: what a view splits anew is pinned where it is made.
        """
        planned = Planned(plan)
        made = planned.made
        every = [(call, shape, place) for call, shape, place in self.values if place is not None]
        inside = self._inside(every)
        mixing = self._mixing(inside)
        # What is added or multiplied element by element, such as a bias, follows what it meets.
        taken = {
            call: specs.pop()
            for call, _, place in every
            if call.what == "operand" and (place[0] >= 0 or call.op in mixing)
            if len(specs := planned.handed_to(place, inside.get(call.op, ()))) == 1
        }
        viewed = self._viewed(made, set().union(*inside.values()))
        whole = {call.op for call, _, place in every if call in taken or (call.what == "result" and place in viewed)}
        moved = {call.op for call, _, place in every if call.what == "result" and len(made.get(place, ())) > 1}
        turning = self._turning(planned, every, inside, mixing, moved)  # these have what they take pinned
        whole |= {op for op in turning if op in moved or inside[op] & self.flow.lookups}
        resplit = self._resplit(made)
        turning |= mixing & {call.op for call, _, place in every if call.what == "operand" and place in resplit}
        loose = self._loose(planned, every, turning - whole)
        begun = {
            place: first
            for call, _, place in every
            if call.what == "result" and place in made and (first := self._begun(made, inside[call.op], place))
        }
        views = self._views_of({place for call, _, place in every if call.op is None and place in made})
        found: dict[tuple[Place, tuple[int, ...]], tuple[Spec, ...]] = {}
        there: set[Value] = set()
        for call, shape, place in every:
            if call in taken:
                # The further axes in which a view is handed on here would be its for all that takes it.
                is_sliced = place in views and planned.axes(place) < set(taken[call].axes)
                own = made.get(place, ())[-1:] if is_sliced else ()
                found[call, shape] = (*own, taken[call])
            elif place in made and (
                call.op is None or call.op in whole or (call.what == "operand" and (call.op, place) in loose)
            ):
                # What has its last spec already, since an op or an inner module gave it so, keeps that.
                first = call.what != "operand" and place not in there
                found[call, shape] = (*begun.get(place, ()), *made[place]) if first else made[place][-1:]
                if call.what != "operand":
                    there.add(place)
        return _once(every, found)

    def _loose(
        self, planned: Planned, every: Sequence[tuple[Place, Any, Value]], turning: Collection[LazyOp | None]
    ) -> set[tuple[LazyOp | None, Value]]:
        """What ops take whose spec does not follow from what modules give, or may get axes from what the op makes."""
        given = {place for call, _, place in every if call.op is None and place in planned.made}
        following = Following(planned, self.flow, given)
        taken: dict[LazyOp | None, set[Value]] = collections.defaultdict(set)
        around: dict[LazyOp | None, set[str]] = collections.defaultdict(set)
        for call, _, place in every:
            if call.op in turning and call.what == "operand":
                taken[call.op].add(place)
            elif call.op in turning:
                around[call.op] |= following.around(place)
        return {
            (op, value)
            for op, values in taken.items()
            for value in values
            if not (around[op] <= set().union(*map(planned.axes, values)) and following.reaches(value))
        }

    def _turning(
        self,
        planned: Planned,
        every: Sequence[tuple[Place, Any, Value]],
        inside: Mapping[LazyOp | None, set[int]],
        mixing: Collection[LazyOp | None],
        moved: Collection[LazyOp | None],
    ) -> set[LazyOp | None]:
        """Of the `mixing` ops those that leave their result over other axes than they are given.

        XLA gives such an op a spec by what is around it: an axis that it is to do without comes in from there. What a
        product makes follows from what it takes; what a lookup makes does not. Nor is what is handed to another op in
        more axes than its own sure to come here without these.
        """
        axes: dict[tuple[LazyOp | None, bool], set[str]] = collections.defaultdict(set)
        for call, _, place in every:
            if call.op in mixing:
                is_result = call.what == "result"
                axes[call.op, is_result] |= planned.axes(place, None if is_result else inside[call.op])
        beside = {
            call.op
            for call, _, place in every
            if call.op in mixing and call.what == "operand" and planned.handed_axes(place) - planned.axes(place)
        }
        return {op for op in mixing if op in moved or op in beside or axes[op, True] != axes[op, False]}

    def _mixing(self, inside: Mapping[LazyOp | None, set[int]]) -> set[LazyOp | None]:
        """Ops of the script that contract dims or look up in them."""
        known = self.flow.products | self.flow.lookups
        return {op for op, numbers in inside.items() if op is not None and numbers & known}

    def _inside(self, every: Sequence[tuple[Place, Any, Value]]) -> dict[LazyOp | None, set[int]]:
        """Numbers of the graph's ops that an op of the script is made of."""
        known = {place for _, _, place in every}
        operands = {(call.op, place) for call, _, place in every if call.what == "operand"}
        inside: dict[LazyOp | None, set[int]] = {}
        for call, _, place in every:
            if call.what == "result":
                copied = (call.op, place) in operands  # by an op that is none in the graph
                inside.setdefault(call.op, set()).update(() if copied else self.flow.between(known, place))
        return inside

    def _viewed(self, made: Mapping[Value, tuple[Spec, ...]], told: set[int]) -> set[Value]:
        """Values that an op which is told of no one gives on in other axes."""
        return {
            value
            for op, operands in enumerate(self.flow.operands)
            for value in operands
            if value is not None and op not in told and value in made and (op, 0) in made
            if splits(made[value][-1], self.flow.kept.get(op)) != splits(made[op, 0][0])
        }

    def _views_of(self, values: Collection[Value]) -> set[Value]:
        """What these values become by being put into other dims; none of it is pinned by itself."""
        queue, found = list(values), set[Value]()
        for value in queue:  # grows as it is walked
            for op in self.flow.users.get(value, ()):
                if op in self.flow.views and (op, 0) not in found:
                    found.add((op, 0))
                    queue.append((op, 0))
        return found

    def _resplit(self, made: Mapping[Value, tuple[Spec, ...]]) -> set[Value]:
        """What views make of values that are split over other axes."""
        return {
            (op, 0)
            for op in self.flow.views
            for value in self.flow.operands[op]
            if value is not None and value in made and (op, 0) in made
            if splits(made[value][-1]) != splits(made[op, 0][-1])
        }

    def _begun(self, made: Mapping[Value, tuple[Spec, ...]], inside: set[int], result: Value) -> tuple[Spec, ...]:
        """The spec in which an op begins to make its result, where it ends in another."""
        first = {made[value][0] for value in self.flow.unchanged(inside, result) if value in made}
        first.discard(made[result][0])
        return tuple(first) if len(first) == 1 else ()


def _once(every: Sequence[tuple[Place, Any, Value]], found: Pinned) -> Pinned:
    """Without the pins on ops that repeat the one on what their module gives, or on the gradient that it is given."""
    given = {(*call[:2], place): found.get((call, shape)) for call, shape, place in every if call.op is None}
    again = {
        (call, shape)
        for call, shape, place in every
        if call.op is not None and len(specs := found.get((call, shape), ())) == 1
        if given.get((*call[:2], place)) == specs
    }
    return {key: specs for key, specs in found.items() if key not in again}
