"""What keeps values of later steps as planned: pins on what modules give, on its gradients, and on some ops inside.

A plan may hand a value to one op in another spec than the one it is made in. Where neither is what a module gives, XLA
is free to move the op's result instead, which can be much larger. So operands and results of such an op are pinned.
"""

import collections
import dataclasses
import itertools as it
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from autoshard.exec.torch_xla_hook._marks import annotated, constrain
from autoshard.exec.torch_xla_hook._ops import WITH_BIAS, Ops
from autoshard.exec.torch_xla_hook._places import Op, Place, nodes_between
from autoshard.exec.torch_xla_hook._tensors import leaves, on_xla
from autoshard.mlir import Flow, Value
from autoshard.plan import Plan, Spec


Pinned = Mapping[tuple[Place, tuple[int, ...]], tuple[Spec, ...]]
"""Place and shape of a value -> the specs that it is pinned to, one after the other."""


class _Planned:
    """The specs of a plan by the values of the captured graph."""

    def __init__(self, plan: Plan) -> None:
        self.made: dict[Value, tuple[Spec, ...]] = {}
        """Pinned where it is made, to one spec after the other."""
        self._handed: dict[Value, dict[int, Spec]] = {}
        self._arguments = tuple(plan.arguments.values())
        for pin in plan.pins:
            value = pin.op, pin.index
            if pin.operand is None:
                self.made[value] = (*self.made.get(value, ()), pin.spec)
            else:
                self._handed.setdefault(value, {})[pin.operand[0]] = pin.spec

    def handed_to(self, value: Value, ops: Collection[int]) -> set[Spec]:
        """The specs in which it is pinned for some of these ops alone."""
        return {spec for op, spec in self._handed.get(value, {}).items() if op in ops}

    def axes(self, value: Value, ops: Collection[int] | None = None) -> set[str]:
        """The axes over which it is split in all of its specs; with `ops`, as one of these takes it."""
        specs = self.made.get(value, self._arguments[value[1] : value[1] + 1] if value[0] < 0 else ())
        seen = specs if ops is None else self.handed_to(value, ops) or specs[-1:]
        return {axis for spec in seen for axis in spec.axes}


@dataclasses.dataclass(frozen=True)
class Pins:
    """Where recorded values are made: in the user's script, and in the captured graph."""

    calls: Sequence[Place]
    shapes: Sequence[tuple[int, ...]]
    places: Sequence[Value | None]
    flow: Flow

    def of(self, plan: Plan) -> Pinned:
        """The specs that the plan pins each of them to; what it leaves to propagation is left out.

        A value has two where it is made in one spec and used in another: the op that makes it sees the first. One op
        of a script is several of the graph (a convolution and its bias); where the plan changes a spec between these,
        the op's result is pinned to both. Views are not told of: what a view splits anew is pinned where it is made.
        """
        planned = _Planned(plan)
        made = planned.made
        zipped = zip(self.calls, self.shapes, self.places, strict=True)
        every = [(call, shape, place) for call, shape, place in zipped if place is not None]
        inside = self._inside(every)
        taken = {
            call: specs.pop()
            for call, _, place in every
            if call.what == "operand" and len(specs := planned.handed_to(place, inside.get(call.op, ()))) == 1
        }
        viewed = self._viewed(made, set().union(*inside.values()))
        whole = {call.op for call, _, place in every if call in taken or (call.what == "result" and place in viewed)}
        moved = {call.op for call, _, place in every if call.what == "result" and len(made.get(place, ())) > 1}
        turning = self._turning(planned, every, inside, moved)  # these have what they take pinned
        whole |= {op for op in turning if op in moved or inside[op] & self.flow.lookups}
        begun = {
            place: first
            for call, _, place in every
            if call.what == "result" and place in made and (first := self._begun(made, inside[call.op], place))
        }
        found: dict[tuple[Place, tuple[int, ...]], tuple[Spec, ...]] = {}
        there: set[Value] = set()
        for call, shape, place in every:
            if call in taken:
                found[call, shape] = (taken[call],)
            elif place in made and (
                call.op is None or call.op in whole or (call.what == "operand" and call.op in turning)
            ):
                # What has its last spec already, since an op or an inner module gave it so, keeps that.
                first = call.what != "operand" and place not in there
                found[call, shape] = (*begun.get(place, ()), *made[place]) if first else made[place][-1:]
                if call.what != "operand":
                    there.add(place)
        return found

    def _turning(
        self,
        planned: "_Planned",
        every: Sequence[tuple[Place, Any, Value]],
        inside: Mapping[Op | None, set[int]],
        moved: Collection[Op | None],
    ) -> set[Op | None]:
        """Ops that contract dims or look up in them, and leave their result over other axes than they are given.

        XLA gives such an op a spec by what is around it: an axis that it is to do without comes in from there. What a
        product makes follows from what it takes; what a lookup makes does not.
        """
        known = self.flow.products | self.flow.lookups
        axes: dict[tuple[Op | None, bool], set[str]] = collections.defaultdict(set)
        mixing = {op for op, numbers in inside.items() if op is not None and numbers & known}
        for call, _, place in every:
            if call.op in mixing:
                is_result = call.what == "result"
                axes[call.op, is_result] |= planned.axes(place, None if is_result else inside[call.op])
        return {op for op in mixing if op in moved or axes[op, True] != axes[op, False]}

    def _inside(self, every: Sequence[tuple[Place, Any, Value]]) -> dict[Op | None, set[int]]:
        """Numbers of the graph's ops that an op of the script is made of."""
        known = {place for _, _, place in every}
        operands = {(call.op, place) for call, _, place in every if call.what == "operand"}
        inside: dict[Op | None, set[int]] = {}
        for call, _, place in every:
            if call.what == "result":
                copied = (call.op, place) in operands  # by an op that is none in the graph
                inside.setdefault(call.op, set()).update(() if copied else self.flow.between(known, place))
        return inside

    def _viewed(self, made: Mapping[Value, tuple[Spec, ...]], told: set[int]) -> set[Value]:
        """Values that an op which is told of no one gives on in other axes."""

        def split(value: Value, which: int) -> list[tuple[str, ...]]:
            return [axes for axes in made[value][which].dims if axes]

        return {
            value
            for op, operands in enumerate(self.flow.operands)
            for value in operands
            if value is not None and op not in told and value in made and (op, 0) in made
            if split(value, -1) != split((op, 0), 0)
        }

    def _begun(self, made: Mapping[Value, tuple[Spec, ...]], inside: set[int], result: Value) -> tuple[Spec, ...]:
        """The spec in which an op begins to make its result, where it ends in another."""
        first = {made[value][0] for value in self.flow.unchanged(inside, result) if value in made}
        first.discard(made[result][0])
        return tuple(first) if len(first) == 1 else ()


class OpPins:
    """Shardings, ready-made, of what some ops take and make."""

    def __init__(self) -> None:
        self._pins: dict[tuple[str, int, str], list[tuple[int, tuple[int, ...], Sequence[Any]]]] = {}
        self.kinds: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._pins)

    def add(self, op: Op, place: Place, shape: tuple[int, ...], shardings: Sequence[Any]) -> None:
        self.kinds.add(op.kind.removesuffix(WITH_BIAS))
        self._pins.setdefault((op.kind, op.turn, place.what), []).append((place.number, shape, shardings))

    def of(self, kind: str, turn: int, what: str, values: Sequence[Any]) -> Iterator[tuple[int, Any, Sequence[Any]]]:
        """Number, value and shardings of those values that are pinned; one of another shape is another value."""
        for number, shape, shardings in self._pins.get((kind, turn, what), ()):
            if number < len(values) and getattr(values[number], "shape", None) == shape:
                yield number, values[number], shardings


class PinnedOps(Ops):
    """Pins what ops take, for them alone, and what they make."""

    def __init__(self, pins: OpPins) -> None:
        super().__init__(pins.kinds)
        self._pins = pins

    def before(self, kind: str, turn: int, operands: Sequence[Any]) -> Sequence[Any]:
        given = list(operands)
        for number, value, shardings in self._pins.of(kind, turn, "operand", operands):
            given[number] = annotated(value, shardings)
        return given

    def after(self, kind: str, turn: int, results: Sequence[Any]) -> None:
        for _, value, shardings in self._pins.of(kind, turn, "result", results):
            constrain(value, shardings)


class CallPins:
    """Shardings, ready-made, of the values of one call of a module."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, int, tuple[int, ...]], Sequence[Any]] = {}
        self._nodes: dict[int, OpPins] = {}
        self.ops = OpPins()

    def add(self, place: Place, shape: tuple[int, ...], shardings: Sequence[Any]) -> None:
        if place.op is None:
            self._given[place.what, place.number, shape] = shardings
        else:
            ops = self.ops if place.op.node < 0 else self._nodes.setdefault(place.op.node, OpPins())
            ops.add(place.op, place, shape, shardings)

    def apply(self, inputs: Any, output: Any) -> None:
        """Pin what a call has given, and what its backward pass will take and make."""
        for number, (_, tensor) in enumerate(leaves(output, "")):
            if not on_xla(tensor):
                continue
            shape = tuple(tensor.shape)
            here = self._given.get(("output", number, shape))
            gradient = self._given.get(("gradient", number, shape))
            if here is not None:
                constrain(tensor, here)
            if gradient is not None and tensor.requires_grad:
                tensor.register_hook(lambda value, shardings=gradient: constrain(value, shardings))
        if self._nodes:
            until = max(self._nodes) + 1
            for number, node in enumerate(it.islice(nodes_between(inputs, output), until)):
                if number in self._nodes:
                    PinnedOps(self._nodes[number]).around(node)


class ModulePins:
    """Hooks that pin the values of the calls of one module, in turn. Where dynamo traces it they do nothing."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._calls: list[CallPins] = []
        self._number = 0
        self._running: list[PinnedOps | None] = []
        self._watches_ops = False
        module.register_forward_hook(self._after, with_kwargs=True)

    def add(self, place: Place, shape: tuple[int, ...], shardings: Sequence[Any]) -> None:
        while len(self._calls) <= place.call:
            self._calls.append(CallPins())
        self._calls[place.call].add(place, shape, shardings)
        if self._calls[place.call].ops and not self._watches_ops:
            self._watches_ops = True
            self._module.register_forward_pre_hook(self._enter, prepend=True)
            self._module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: Any, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        ops = self._calls[self._number % len(self._calls)].ops
        running = PinnedOps(ops) if ops else None
        if running is not None:
            running.__enter__()
        self._running.append(running)

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        running = self._running.pop()
        if running is not None:
            running.__exit__(None, None, None)

    def _after(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        pins = self._calls[self._number % len(self._calls)]
        self._number += 1
        pins.apply((args, kwargs), output)
