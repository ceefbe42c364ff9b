"""The choice of values to pin in later steps: module outputs, their gradients, and operands and results of ops inside.

A plan may pass a value to one op in another spec than the spec that the value is computed in. If neither spec is that
of a module output, XLA may reshard the op's result instead, which can be much larger. So the operands and results of
such an op are pinned. Every pin costs time in every step, so specs that propagation derives from other pins are not
pinned.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from autoshard.exec.torch_xla_hook.pins.captured_specs import Following, PlannedSpecs, is_split_alike
from autoshard.exec.torch_xla_hook.values.call_sites import LazyOp, Place
from autoshard.mlir import Flow, Value
from autoshard.planning import Plan, Spec


Pinned = Mapping[tuple[Place, tuple[int, ...]], tuple[Spec, ...]]
"""The specs in order that each value is pinned to, by its place and shape."""


@dataclasses.dataclass(frozen=True)
class Pins:
    """Places of recorded values in the user's script and in the captured graph."""

    values: Sequence[tuple[Place, tuple[int, ...], Value | None]]
    """Each value's place in the script, its shape, and its place in the graph; None if the graph does not compute
    it.
    """
    flow: Flow
    """Flow of values between the graph's ops."""

    def of(self, plan: Plan) -> Pinned:
        """Return the specs that a plan pins the values to; values that are left to propagation are omitted.

        A value that is computed in one spec and used in another has two specs: its producer sees the first. One op of a
        script can be several ops of the graph (a convolution and its bias). If the plan changes a spec between these
        ops, the script op's result is pinned to both specs. Views are not observed: if a view changes the split, its
        operand is pinned where it is computed, and its result where it is used.
        """
        return _Choice(self, plan).pins()


class _Choice:
    """Choice of the recorded values that are pinned under one plan."""

    def __init__(self, pins: Pins, plan: Plan) -> None:
        self.flow = pins.flow
        self.planned = PlannedSpecs(plan)
        self.made = self.planned.made
        self.every = [(call, shape, place) for call, shape, place in pins.values if place is not None]
        """Recorded values that the graph computes: place in the script, shape, and place in the graph."""
        self.given = [place for call, _, place in self.every if call.op is None]
        """Places in the graph of module outputs and their gradients."""
        self.made |= self._following()
        self.inside = self._inside()
        self.mixing = self._mixing()
        self.taken = self._taken()
        self.resplit = self._resplit()
        self.moved = {call.op for call, _, place in self.every if call.what == "result" and self._is_moved(place)}

    def pins(self) -> Pinned:
        """Return the specs of all pinned values, by place and shape.

        Module outputs and gradients are pinned in their planned spec. So are values that change their spec, and
        operands that an op reads in another spec. The values of ops whose split propagation would not find are pinned
        too.
        """
        viewed = self._viewed()
        fully_pinned = {
            call.op
            for call, _, place in self.every
            if call in self.taken or (call.what == "result" and place in viewed)
        }
        turning = self._changing_axes()
        fully_pinned |= {op for op in turning if op in self.moved or self.inside[op] & self.flow.lookups}
        turning |= {call.op for call, _, place in self.every if call.what == "operand" and place in self.resplit}
        loose = self._loose(turning - fully_pinned)
        chosen: dict[tuple[Place, tuple[int, ...]], tuple[Spec, ...]] = {}
        pinned_results: set[Value] = set()
        begun = {place: self._begun(call.op, place) for call, _, place in self.every if call.what == "result"}
        pinned_values = self._views_of(place for place in self.given if place in self.made)
        for call, shape, place in self.every:
            if place not in self.made or call in self.taken:
                continue
            is_result = call.what != "operand"
            if (
                call.op is None
                or call.op in fully_pinned
                or (is_result and self._is_moved(place))
                or (not is_result and (call.op, place) in loose)
            ):
                # A value that an op or an inner module has pinned already only needs its last spec.
                first = is_result and place not in pinned_results
                chosen[call, shape] = (*begun.get(place, ()), *self.made[place]) if first else self._last(place)
                if is_result:
                    pinned_results.add(place)
                pinned_values.add(place)
        return self._once(chosen | self._handed_on(pinned_values))

    def _handed_on(self, held: Collection[Value]) -> dict[tuple[Place, tuple[int, ...]], tuple[Spec, ...]]:
        """Return the pins on operands that an op reads in another spec than the value's own.

        Further axes of such a pin would propagate back to the value and to its other users. If the value is pinned in
        its own spec (`held`), a pin states that spec first. The same is done for a value whose split a view has
        changed. It is also done for a value without a pin that gives up axes. Its op would give them up too, and gather
        its operands.
        """
        pins = {}
        for call, shape, place in self.every:
            if call in self.taken:
                specs = self.taken[call]
                own_axes, axes = self.planned.axes(place), set(specs[-1].axes)
                is_further = place in held and own_axes < axes
                gives_up = place not in held and place[0] >= 0 and not own_axes <= axes
                own = self._last(place) if is_further or gives_up or place in self.resplit else ()
                pins[call, shape] = (*own, *specs)
        return pins

    def _last(self, value: Value) -> tuple[Spec, ...]:
        """Return the last spec that a value is pinned to, as a tuple of one; empty without a pin."""
        return self.made.get(value, ())[-1:]

    def _is_moved(self, value: Value) -> bool:
        """Return True if the plan gives the value several specs in turn: XLA may not find this path alone."""
        return len(self.made.get(value, ())) > 1

    def _following(self) -> dict[Value, tuple[Spec, ...]]:
        """Return the specs of module outputs without a planned spec, and of such gradients.

        They are those of the nearest planned values that the outputs are elementwise functions of; outputs without such
        are left out.
        """
        inherited: dict[Value, tuple[Spec, ...]] = {}
        for value in self.given:
            queue, seen = [value], {value}
            for each in queue:  # grows as it is walked
                if each in self.made:
                    inherited[value] = self._last(each)
                    break
                for other in self.flow.elementwise_operands[each[0]] if each[0] >= 0 else ():
                    if other is not None and other not in seen:
                        seen.add(other)
                        queue.append(other)
        return {value: specs for value, specs in inherited.items() if value not in self.made}

    def _taken(self) -> dict[Place, tuple[Spec, ...]]:
        """Return the specs of operands that an op reads in another spec than the value's own, by place.

        The operand of an elementwise op, such as a bias, adopts the spec of the other operand. If this only slices the
        operand, no pin is needed.
        """
        return {
            call: specs
            for call, shape, place in self.every
            if call.what == "operand" and len(paths := self._handed(place, shape, self.inside.get(call.op, ()))) == 1
            for specs in paths
            if place[0] >= 0 or call.op in self.mixing or not self.planned.axes(place) <= set(specs[-1].axes)
        }

    def _handed(self, value: Value, shape: tuple[int, ...], ops: Collection[int]) -> set[tuple[Spec, ...]]:
        """Return the specs, each as a path, that some ops require of a value, other than its own spec.

        - `shape`: shape of the value.
        - `ops`: numbers of the graph's ops to consider.

        The plan states such a spec, or it follows from the result of a broadcast of the value. For arguments it can
        also follow from the result of a view of them. Stated specs take priority.
        """
        own = self.planned.specs_of(value)[-1:]
        spread, viewed = set(), set()
        for op in self.flow.users.get(value, ()):
            if op not in ops or (op, 0) not in self.made:
                continue
            dims = self.made[op, 0][0].dims
            if op in self.flow.broadcast_dims:
                spread.add((Spec(tuple(dims[dim] for dim in self.flow.broadcast_dims[op])),))
            elif op in self.flow.views and value[0] < 0 and own:
                if not is_split_alike(self.flow, op, own[0], self.made[op, 0][0]):
                    sized = zip(self.flow.views[op], shape, strict=True)
                    viewed.add((Spec(tuple(() if to is None or size == 1 else dims[to] for to, size in sized)),))
        return self.planned.handed_to(value, ops) or (spread | viewed) - {own}

    def _loose(self, turning: Collection[LazyOp | None]) -> set[tuple[LazyOp | None, Value]]:
        """Return operands, by op, that need a pin of their own, among the ops `turning`.

        Their spec does not follow from pinned module outputs, or propagation may bring axes from the op's result to
        them.
        """
        following = Following(self.planned, self.flow, {place for place in self.given if place in self.made})
        operands: dict[LazyOp | None, set[Value]] = collections.defaultdict(set)
        around: dict[LazyOp | None, set[str]] = collections.defaultdict(set)
        for call, _, place in self.every:
            if call.op in turning and call.what == "operand":
                operands[call.op].add(place)
            elif call.op in turning:
                around[call.op] |= following.around(place)
        return {
            (op, value)
            for op, values in operands.items()
            for value in values
            if not (around[op] <= set().union(*map(self.planned.axes, values)) and following.reaches(value))
        }

    def _changing_axes(self) -> set[LazyOp | None]:
        """Return the mixing ops whose result is split over other axes than their operands.

        XLA derives such an op's spec from its neighbours, and they may bring in an axis that the op must not have. The
        spec of a product follows from its operands; that of a lookup does not. A value that another op reads in more
        axes may also bring these axes here.
        """
        axes: dict[tuple[LazyOp | None, bool], set[str]] = collections.defaultdict(set)
        for call, _, place in self.every:
            if call.op in self.mixing:
                is_result = call.what == "result"
                axes[call.op, is_result] |= self.planned.axes(place, None if is_result else self.inside[call.op])
        widened = {
            call.op
            for call, _, place in self.every
            if call.what == "operand" and self.planned.handed_axes(place) - self.planned.axes(place)
        }
        return {op for op in self.mixing if op in self.moved or op in widened or axes[op, True] != axes[op, False]}

    def _mixing(self) -> set[LazyOp | None]:
        """Return the ops of the script that contract dims or look up in them."""
        known = self.flow.products | self.flow.lookups
        return {op for op, numbers in self.inside.items() if op is not None and numbers & known}

    def _inside(self) -> dict[LazyOp | None, set[int]]:
        """Return the numbers of the graph's ops that each op of the script lowers to, by op.

        An op whose result is one of its operands lowers to none.
        """
        known = {place for _, _, place in self.every}
        operands = {(call.op, place) for call, _, place in self.every if call.what == "operand"}
        inside: dict[LazyOp | None, set[int]] = {}
        for call, _, place in self.every:
            if call.what == "result":
                copied = (call.op, place) in operands  # the script's op has no op in the graph
                inside.setdefault(call.op, set()).update(() if copied else self.flow.between(known, place))
        return inside

    def _viewed(self) -> set[Value]:
        """Return values that an unobserved op, such as a view, passes on in other axes."""
        observed = self._observed_ops()
        return {
            value
            for op, operands in enumerate(self.flow.operands)
            for value in operands
            if value is not None and op not in observed and self._splits_anew(op, value)
        }

    def _views_of(self, values: Iterable[Value]) -> set[Value]:
        """Return the results of views on these values, and of views on those; the values themselves are left out."""
        queue, views = list(values), set[Value]()
        for value in queue:  # grows as it is walked
            for op in self.flow.users.get(value, ()):
                if op in self.flow.views and (op, 0) not in views:
                    views.add((op, 0))
                    queue.append((op, 0))
        return views

    def _resplit(self) -> set[Value]:
        """Return the results of views that change the split, and the unobserved single-operand ops on them."""
        views = {(op, 0) for op in self.flow.views for value in self.flow.operands[op] if self._splits_anew(op, value)}
        observed = self._observed_ops()
        queue = list(views)
        for value in queue:  # grows as it is walked
            for op in self.flow.users.get(value, ()):
                if op not in observed and len(self.flow.operands[op]) == 1 and (op, 0) not in views:
                    views.add((op, 0))
                    queue.append((op, 0))
        return views

    def _observed_ops(self) -> set[int]:
        """Return the numbers of all graph ops that an observed op of the script lowers to."""
        return set().union(*self.inside.values())

    def _splits_anew(self, op: int, value: Value | None) -> bool:
        """Return True if an op's result is split over other axes than its operand; False if either has no pinned
        spec.
        """
        if value is None or value not in self.made or (op, 0) not in self.made:
            return False
        return not is_split_alike(self.flow, op, self.made[value][-1], self.made[op, 0][0])

    def _begun(self, op: LazyOp | None, result: Value) -> tuple[Spec, ...]:
        """Return the first spec of a result that an op computes in one spec and delivers in another, as a tuple of one;
        else empty.
        """
        if result not in self.made:
            return ()
        first = {self.made[value][0] for value in self.flow.unchanged(self.inside[op], result) if value in self.made}
        first.discard(self.made[result][0])
        return tuple(first) if len(first) == 1 else ()

    def _once(self, found: Pinned) -> Pinned:
        """Return the pins without those on ops that repeat the pin on their module's output, or on the gradient of that
        output.
        """
        given = {(*call[:2], place): found.get((call, shape)) for call, shape, place in self.every if call.op is None}
        again = {
            (call, shape)
            for call, shape, place in self.every
            if call.op is not None and len(specs := found.get((call, shape), ())) == 1
            if given.get((*call[:2], place)) == specs
        }
        return {key: specs for key, specs in found.items() if key not in again}
