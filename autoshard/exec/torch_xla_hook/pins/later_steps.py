"""What stays after the planned first step: marks on state, on new batches, and on activations."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from autoshard.cost import Compute, Topology
from autoshard.exec.torch_xla_hook.capture.compiled_modules import train_lazily
from autoshard.exec.torch_xla_hook.capture.first_step import Watch, optimizer_state
from autoshard.exec.torch_xla_hook.capture.lazy_graph import Capture
from autoshard.exec.torch_xla_hook.pins.pin_hooks import ModulePins, Now
from autoshard.exec.torch_xla_hook.pins.pinned_values import Pins
from autoshard.exec.torch_xla_hook.planning.capture_planning import Decision
from autoshard.exec.torch_xla_hook.values.lazy_tensors import on_xla, pending
from autoshard.exec.torch_xla_hook.values.live_marks import LiveMesh, held_spec, is_split, mark
from autoshard.exec.torch_xla_hook.values.module_hooks import CallHook, Guard
from autoshard.planning import Plan, Spec
from autoshard.program import Role


class Applied:
    """Marks that later steps need. Shardings are kept ready-made, since these run in every step."""

    def __init__(self, guard: Guard) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self.state: Any = WeakIdKeyDictionary()
        """Parameter, buffer or state of an optimizer -> its sharding."""
        self.specs: Any = WeakIdKeyDictionary()
        self.trained: Any = WeakIdKeyDictionary()
        """Those of them that a plan of a training step has split: such a split stays."""
        self.batches: dict[tuple[Any, ...], tuple[Spec, LiveMesh]] = {}
        """Shape and dtype of an input -> how it is split."""
        self.kinds: set[str] = set()
        """Of the ops that are pinned."""
        self._held: list[tuple[weakref.ref[Any], Any]] | None = None
        """What `state` has, as it is gone through in every step; None where it is to be made anew."""
        self._optimizers: Any = WeakIdKeyDictionary()
        """Optimizer -> what told its state apart from any other when all of it was known; None before."""
        self._pinned: Any = WeakIdKeyDictionary()
        """Module -> the pins on what it gives."""
        self.now = Now()
        self.pins: list[frozenset[tuple[str, tuple[int, ...]]]] = []
        """By plan, the sharding strings and shapes of what is pinned."""
        self._guard = guard

    def decided(self, taken: Capture, modules: Iterable[Any]) -> dict[int, Spec]:
        """Specs by argument that an earlier plan gave to the same tensors; these are held that way already.

        What an earlier plan of one of these modules has left whole stays so, too: its steps know no other data.
        """
        again = any(CallHook.on(module) for module in modules)
        found = {}
        for number, tensor in enumerate(taken.tensors):
            if tensor is not None and tensor in self.specs:
                found[number] = self.specs[tensor]
        for number, (value, argument) in enumerate(zip(taken.inputs, taken.program.arguments, strict=True)):
            key = (tuple(value.shape), value.dtype)
            if argument.role is Role.BATCH and key in self.batches and (again or number in taken.split):
                found[number] = self.batches[key][0]
        return found

    def moves(self, taken: Capture, decision: Decision) -> bool:
        """Whether a decision splits anything that an earlier plan knows in another way."""
        return any(
            tensor is not None and spec is not None and self.specs.get(tensor, spec) != spec
            for tensor, spec in zip(taken.tensors, decision.specs, strict=True)
        )

    def take(self, taken: Capture, decision: Decision, mesh: LiveMesh, pins: Pins, watch: Watch) -> None:
        """Remember how a script's tensors are split, and pin the modules' outputs from the next call on.

        A small input of which the script has read something in the middle of the step is sent whole from the next step
        on: what computes that is compiled already, and needs no collective. The step itself slices it.
        """
        plan = decision.plan
        whole = {
            (tuple(value.shape), value.dtype)
            for value, handle in zip(taken.inputs, taken.handles, strict=True)
            if handle in watch.read_whole and _is_small(value, plan)
        }
        inputs = zip(taken.inputs, taken.tensors, taken.program.arguments, decision.specs, strict=True)
        for value, tensor, argument, spec in inputs:
            if spec is None:
                continue
            if argument.role is Role.BATCH:
                if (tuple(value.shape), value.dtype) not in whole:
                    self.batches[tuple(value.shape), value.dtype] = (spec, mesh)
            elif tensor is not None:
                self.keep(tensor, spec, mesh, taken.program.training)
        results = {id(root): plan.results[r.name] for root, r in zip(taken.roots, taken.program.results, strict=True)}
        for optimizer in watch.optimizers:
            self._optimizers[optimizer] = None
            for _, _, tensor in optimizer_state(optimizer):
                if id(tensor) in results and results[id(tensor)].dims:
                    self.keep(tensor, results[id(tensor)], mesh, taken.program.training)
        pinned = pins.of(plan)
        for (place, shape), specs in pinned.items():
            module = watch.modules[place.module]
            if place.op is not None:
                self.kinds.add(place.op.kind)
            if module not in self._pinned:
                self._pinned[module] = ModulePins(module, self.now, self._guard)
            self._pinned[module].add(module, len(self.pins), place, shape, [mesh.sharding(spec) for spec in specs])
        written = {(mesh.write(spec), shape) for (_, shape), specs in pinned.items() for spec in specs}
        self.pins.append(frozenset(written))

    def pins_by_module(self) -> dict[int, ModulePins]:
        """The pins of each module that has any, by its `id`."""
        return {id(module): pins for module, pins in self._pinned.items()}

    def waiting_pins(self) -> frozenset[tuple[str, tuple[int, ...]]]:
        """Sharding strings and shapes of the pins that are in what is pending."""
        return frozenset().union(*(self.pins[plan] for plan in self.now.pinned))

    def keep(self, tensor: Any, spec: Spec, mesh: LiveMesh, trains: bool) -> None:
        """Remember how a plan of a step, which `trains` or not, splits a tensor."""
        self.specs[tensor] = spec
        if trains:
            self.trained[tensor] = None
        self._hold(tensor, mesh.sharding(spec))

    def hook_calls(
        self, modules: Iterable[Any], on_call: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
    ) -> None:
        """Have `on_call` told before each call of these modules."""

        for module in modules:
            if not CallHook.on(module):
                module.register_forward_pre_hook(CallHook(on_call, self._guard), prepend=True, with_kwargs=True)
                train_lazily(module)

    def mark_batch(self, named: Iterable[tuple[str, Any]]) -> None:
        """Split the inputs among these tensors as planned."""
        for _, tensor in named:
            self.mark_input(tensor)

    def batch_spec(self, tensor: Any) -> tuple[Spec, LiveMesh] | None:
        """How an input of this shape and dtype is split, None if it is not, or the plan does not know it."""
        found = self.batches.get((tuple(tensor.shape), tensor.dtype))
        return found if found is not None and found[0].axes else None

    def mark_input(self, tensor: Any) -> None:
        found = self.batch_spec(tensor)
        if found is not None and on_xla(tensor) and not tensor.requires_grad and not is_split(held_spec(tensor)):
            spec, mesh = found
            mark(tensor, mesh.sharding(spec))

    def mark_state(self) -> None:
        """Keep the specs of updated state: what a graph computes is else split as propagation has it."""
        for optimizer, before in list(self._optimizers.items()):
            held = _held(optimizer)
            if held == before:
                continue
            self._optimizers[optimizer] = held
            for parameter, _, tensor in optimizer_state(optimizer):
                if tensor not in self.state and parameter in self.state and tensor.shape == parameter.shape:
                    self.specs[tensor] = self.specs[parameter]
                    self._hold(tensor, self.state[parameter])
        if self._held is None:
            self._held = [(weakref.ref(tensor), sharding) for tensor, sharding in self.state.items()]
        there = [(ref(), sharding) for ref, sharding in self._held]
        known = [each for each in there if each[0] is not None]
        if len(known) < len(there):
            self._held = None
        for (tensor, sharding), waits in zip(known, pending([tensor for tensor, _ in known]), strict=True):
            if waits:
                mark(tensor, sharding)

    def _hold(self, tensor: Any, sharding: Any) -> None:
        self.state[tensor] = sharding
        self.forget_list()

    def forget_list(self) -> None:
        """Drop the list of `state` that `mark_state` iterates over, which the next step makes again."""
        self._held = None


def _held(optimizer: Any) -> int:
    """What tells the tensors of an optimizer's state apart from those of another step. Asked in every step."""
    return hash(tuple(id(value) for state in optimizer.state.values() for value in state.values()))


_SMALL = 0.01
"""Sending an input whole may take so much of a step."""


def _is_small(value: Any, plan: Plan) -> bool:
    """Whether all devices can be sent the whole of an input in no time."""
    seconds = Compute(Topology.parse(plan.topology)).host_seconds(value.numel() * value.element_size())
    return float(seconds) <= _SMALL * plan.prediction.step_time_s
