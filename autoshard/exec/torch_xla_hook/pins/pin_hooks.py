"""Pins on the values of later steps: hooks on module outputs, on their gradients, and on some ops inside."""

import dataclasses
import functools
import itertools as it
from collections.abc import Iterator, Sequence
from typing import Any

from autoshard.exec.torch_xla_hook.capture.op_events import WITH_BIAS, OpObserver, whole_kind
from autoshard.exec.torch_xla_hook.values.call_sites import LazyOp, Place, nodes_between
from autoshard.exec.torch_xla_hook.values.lazy_tensors import is_wrapped, leaves, on_xla, pending
from autoshard.exec.torch_xla_hook.values.live_marks import annotated, constrain
from autoshard.exec.torch_xla_hook.values.module_hooks import CallHook, Guard, ModuleHook


@dataclasses.dataclass(frozen=True)
class ReadyPin:
    """Ready-made shardings of a value, to be applied in order."""

    shardings: Sequence[Any]
    parts: tuple[int, ...]
    """Number of parts of each dim, a multiple of what every sharding cuts it into."""
    shape: tuple[int, ...]
    """Shape of the value in the planned step."""

    def fits(self, shape: Sequence[int] | None) -> bool:
        """Return True for the planned shape, and for one of the same rank whose dims the axes divide.

        A step of other lengths or rows runs under the same pins. None, of a value that is no tensor, does not fit.
        """
        if shape is None or len(shape) != len(self.parts):
            return False
        return self.shape == shape or not any(size % parts for size, parts in zip(shape, self.parts, strict=True))


class OpPins:
    """Ready-made shardings of the operands and results of some ops."""

    def __init__(self) -> None:
        self._pins: dict[tuple[str, int, str], list[tuple[int, ReadyPin]]] = {}
        """(Kind, turn, `operand` or `result`) -> number and pin of each pinned value."""
        self.kinds: set[str] = set()
        """Kinds of whole ops that have pins."""

    def __bool__(self) -> bool:
        """Return True if there are pins."""
        return bool(self._pins)

    def add(self, op: LazyOp, place: Place, pin: ReadyPin) -> None:
        """Add the pin of an operand or a result of an op; `place` has its number."""
        self.kinds.add(whole_kind(op.kind))
        self._pins.setdefault((op.kind, op.turn, place.what), []).append((place.number, pin))

    def of(self, kind: str, turn: int, what: str, values: Sequence[Any]) -> Iterator[tuple[int, Any, Sequence[Any]]]:
        """Yield number, value and shardings of the pinned values among an op's operands or results.

        - `kind`, `turn`: kind of the op, and number of earlier ops of that kind.
        - `what`: `operand` or `result`.
        - `values`: operands or results; a value that a pin does not fit is not the pinned one.
        """
        for number, pin in self._pins.get((kind, turn, what), ()):
            if number < len(values) and pin.fits(getattr(values[number], "shape", None)):
                yield number, values[number], pin.shardings


class PinnedOps(OpObserver):
    """Observer of ops that pins their operands, for these ops alone, and their results."""

    def __init__(self, pins: OpPins, guard: Guard) -> None:
        super().__init__(pins.kinds)
        self._pins = pins
        self._guard = guard
        self._given: dict[tuple[int, ...], tuple[Any, Any]] = {}
        """Annotated copies of operands, by the identities of the value and its shardings."""

    def __exit__(self, *error: object) -> None:
        """Stop observing, and drop the annotated copies."""
        super().__exit__(*error)
        self._given.clear()

    def before(self, kind: str, turn: int, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the operands, with annotated copies in place of the pinned ones."""
        given = list(operands)
        with self._guard:
            for number, value, shardings in self._pins.of(kind, turn, "operand", operands):
                if kind.endswith(WITH_BIAS) and number:
                    # A clone of a bias is the same node as the bias, so that with a checkpoint PyTorch/XLA would trace
                    # the next step differently. Multiplication by one makes a new node, and XLA removes it.
                    given[number] = annotated(value * 1, shardings)
                else:
                    given[number] = self._annotated(value, shardings)
        return given

    def _annotated(self, value: Any, shardings: Sequence[Any]) -> Any:
        """Return one annotated copy for all ops that read a value in the same shardings: XLA would reshard once per
        copy.

        Tensors below functionalisation do not change, so the copy stays valid. Without functionalisation every call
        makes a new copy.
        """
        if not is_wrapped():
            return annotated(value, shardings)
        key = id(value), *map(id, shardings)
        if key not in self._given:
            self._given[key] = value, annotated(value, shardings)
        return self._given[key][1]

    def after(self, kind: str, turn: int, results: Sequence[Any]) -> None:
        """Apply the shardings of the pinned results, in place."""
        with self._guard:
            for _, value, shardings in self._pins.of(kind, turn, "result", results):
                constrain(value, shardings)


class CallPins:
    """Ready-made shardings of the values of one call of a module."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._given: dict[tuple[str, int], ReadyPin] = {}
        """(`output` or `gradient`, number) -> pin of a module's output."""
        self._nodes: dict[int, OpPins] = {}
        """Number of a node of the backward pass -> the pins on its ops."""
        self.ops = OpPins()
        """Pins on the ops of the forward call."""

    def add(self, place: Place, pin: ReadyPin) -> None:
        """Add the pin of a module output, of its gradient, or of an op's operand or result."""
        if place.op is None:
            self._given[place.what, place.number] = pin
        else:
            ops = self.ops if place.op.node < 0 else self._nodes.setdefault(place.op.node, OpPins())
            ops.add(place.op, place, pin)

    def apply(self, inputs: Any, output: Any) -> None:
        """Pin the outputs of a call, their gradients, and the operands and results of its backward pass.

        - `inputs`: positional and keyword arguments of the call.
        - `output`: its output, constrained in place if the pin fits.

        Values that are computed already, as by a compiled module, are not moved.
        """
        given = self._given
        for number, (_, tensor) in enumerate(leaves(output, "") if given else ()):
            here, gradient = given.get(("output", number)), given.get(("gradient", number))
            if here is not None and here.fits(tensor.shape) and on_xla(tensor) and all(pending([tensor])):
                constrain(tensor, here.shardings)
            if gradient is not None and gradient.fits(tensor.shape) and tensor.requires_grad and on_xla(tensor):
                tensor.register_hook(functools.partial(self._constrain, shardings=gradient.shardings))
        if self._nodes:
            until = max(self._nodes) + 1
            for number, node in enumerate(it.islice(nodes_between(inputs, output), until)):
                if number in self._nodes:
                    PinnedOps(self._nodes[number], self._guard).around(node)

    def _constrain(self, gradient: Any, shardings: Sequence[Any]) -> None:
        """Apply shardings to a gradient in place, as a hook."""
        with self._guard:
            constrain(gradient, shardings)


class CurrentPlan:
    """Numbers of the current plan, whose pins are active, and of the current step."""

    def __init__(self) -> None:
        self.plan: int | None = None
        """Number of the plan; None while a step is watched, or if the step could not be planned."""
        self.step = 0
        """Number of the step, from 0."""
        self.pinned: set[int] = set()
        """Plans whose pins are in the pending graph."""


class ModulePins:
    """Hooks that pin the values of one module's calls in turn, for each plan that includes the module."""

    def __init__(self, module: Any, now: CurrentPlan, guard: Guard) -> None:
        """Register the hook that pins outputs on the module; `now` is the current plan of all modules."""
        self._now = now
        self._guard = guard
        self._plans: dict[int, list[CallPins]] = {}
        """Number of a plan -> the pins of the module's calls in a step, in order."""
        self._counted: tuple[int | None, int] = (None, 0)
        """Plan and step whose calls `_number` counts."""
        self._number = 0
        """Number of calls that have ended in the current step."""
        self._running: list[PinnedOps | None] = []
        """Observers of the running calls, the innermost last; None for calls without pins on ops."""
        self._watches_ops = False
        module.register_forward_hook(ModuleHook(self._give, guard), with_kwargs=True)

    def add(self, module: Any, plan: int, place: Place, pin: ReadyPin) -> None:
        """Add the pin of a value under a plan; the first pin on an op starts the observation of the module's ops.

        - `module`: the module whose call has the value.
        - `plan`: number of the plan.
        - `place`: place of the value.
        """
        calls = self._plans.setdefault(plan, [])
        while len(calls) <= place.call:
            calls.append(CallPins(self._guard))
        calls[place.call].add(place, pin)
        if calls[place.call].ops and not self._watches_ops:
            self._watches_ops = True
            module.register_forward_pre_hook(ModuleHook(self._enter, self._guard), prepend=True)
            module.register_forward_hook(ModuleHook(self._leave, self._guard), always_call=True)
            CallHook.to_front(module)

    def _pins(self) -> CallPins | None:
        """Return the pins of the call that runs now; None if no plan is active or it has none for this module.

        Calls after the last one that has pins begin again with the first. A new plan or step restarts the count of
        calls.
        """
        now = self._now
        calls = None if now.plan is None else self._plans.get(now.plan)
        if not calls:
            return None
        if self._counted != (now.plan, now.step):
            self._counted = now.plan, now.step
            self._number = 0
        return calls[self._number % len(calls)]

    def enter(self) -> None:
        """Begin a call: observe and pin its ops."""
        pins = self._pins()
        running = PinnedOps(pins.ops, self._guard) if pins is not None and pins.ops else None
        if running is not None:
            running.__enter__()
        self._running.append(running)

    def leave(self) -> None:
        """End a call, also one that failed."""
        running = self._running.pop() if self._running else None
        if running is not None:
            running.__exit__(None, None, None)

    def give(self, inputs: Any, output: Any) -> None:
        """Pin the values of a call that has ended, count the call, and add the current plan to `CurrentPlan.pinned`.

        Values are its outputs, their gradients, and operands and results of its backward pass.
        """
        pins = self._pins()
        self._number += 1
        if pins is not None and self._now.plan is not None:
            self._now.pinned.add(self._now.plan)
            pins.apply(inputs, output)

    def _enter(self, module: Any, args: Any) -> None:
        """Call `enter`, as a forward pre-hook."""
        self.enter()

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        """Call `leave`, as a forward hook."""
        self.leave()

    def _give(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Call `give`, as a forward hook."""
        self.give((args, kwargs), output)
