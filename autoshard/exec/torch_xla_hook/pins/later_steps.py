"""Marks that persist after the planned first step: on state, on new batches, and on activations."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils.weak import TensorWeakRef

from autoshard.cost import Compute, Topology
from autoshard.exec.torch_xla_hook.capture.compiled_modules import train_lazily
from autoshard.exec.torch_xla_hook.capture.first_step import Watch, optimizer_state
from autoshard.exec.torch_xla_hook.capture.lazy_graph import Capture
from autoshard.exec.torch_xla_hook.pins.pin_hooks import CurrentPlan, ModulePins, ReadyPin
from autoshard.exec.torch_xla_hook.pins.pinned_values import Pins
from autoshard.exec.torch_xla_hook.planning.capture_planning import Decision
from autoshard.exec.torch_xla_hook.values.lazy_tensors import is_whole, on_xla, pending
from autoshard.exec.torch_xla_hook.values.live_marks import LiveMesh, is_split, mark, sharding_text
from autoshard.exec.torch_xla_hook.values.module_hooks import CallHook, Guard
from autoshard.planning import Plan, Spec
from autoshard.program import Role


Shaped = tuple[tuple[int, ...], Any]
"""Shape and dtype of an input."""


def shaped(tensor: Any) -> Shaped:
    """Return the shape and dtype of a tensor."""
    return tuple(tensor.shape), tensor.dtype


class LaterMarks:
    """Shardings that later steps apply. They are stored as ready-made objects, since every step applies them."""

    def __init__(self, guard: Guard) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self.state: Any = WeakIdKeyDictionary()
        """The sharding of each parameter, buffer and tensor of optimizer state."""
        self.specs: Any = WeakIdKeyDictionary()
        """The spec of each such tensor."""
        self.trained: Any = WeakIdKeyDictionary()
        """Tensors among them that a plan of a training step has split; this split is final."""
        self.batches: dict[Shaped, tuple[Spec, LiveMesh]] = {}
        """The spec of an input, by shape and dtype, and the mesh that the spec is of."""
        self.kinds: set[str] = set()
        """Kinds of the ops whose operands or results are pinned."""
        self._held: list[tuple[TensorWeakRef, Any]] | None = None
        """The items of `state` as a list for the loop in every step; None if the list is stale."""
        self._optimizers: Any = WeakIdKeyDictionary()
        """A hash of each optimizer's state tensors when all of them were known; None before."""
        self._pinned: Any = WeakIdKeyDictionary()
        """The pins on the outputs of each module."""
        self.now = CurrentPlan()
        """Current plan and step, which all pins share."""
        self.pins: list[frozenset[tuple[str, int]]] = []
        """Sharding strings and ranks of the pinned values, by plan number."""
        self._guard = guard

    def decided(self, capture: Capture, modules: Iterable[Any]) -> dict[int, Spec]:
        """Return the specs, by argument number, that an earlier plan gave to the same tensors; they are split so
        already.

        A batch array also keeps its earlier spec if it is split already, or if one of these modules was planned before.
        The steps of that plan expect data of no other spec.
        """
        again = any(CallHook.on(module) for module in modules)
        specs = {}
        for number, tensor in enumerate(capture.tensors):
            if tensor is not None and tensor in self.specs:
                specs[number] = self.specs[tensor]
        for number, (value, argument) in enumerate(zip(capture.inputs, capture.program.arguments, strict=True)):
            key = shaped(value)
            if argument.role is Role.BATCH and key in self.batches and (again or number in capture.split):
                specs[number] = self.batches[key][0]
        return specs

    def moves(self, capture: Capture, decision: Decision) -> bool:
        """Return True if a decision gives any tensor another spec than an earlier plan; tensors without one do not
        count.
        """
        return any(
            tensor is not None and spec is not None and self.specs.get(tensor, spec) != spec
            for tensor, spec in zip(capture.tensors, decision.specs, strict=True)
        )

    def apply_decision(self, capture: Capture, decision: Decision, mesh: LiveMesh, pins: Pins, watch: Watch) -> None:
        """Remember the specs of a script's tensors, and pin the modules' outputs from the next call on.

        - `capture`: the captured graph and its tensors.
        - `decision`: the plan of the graph, with specs by argument.
        - `mesh`: mesh of the plan.
        - `pins`: places in the script and in the graph of the recorded values.
        - `watch`: the watcher of the step, with its modules and optimizers.

        A script can read some elements of an input in the middle of the step. If the input is small, every device
        receives all of it from the next step on. The program that computes such elements is compiled already and then
        needs no collective. The step slices the input.
        """
        plan = decision.plan
        unsplit = {
            shaped(value)
            for value, handle in zip(capture.inputs, capture.handles, strict=True)
            if handle in watch.read_whole and _is_small(value, plan)
        }
        inputs = zip(capture.inputs, capture.tensors, capture.program.arguments, decision.specs, strict=True)
        for value, tensor, argument, spec in inputs:
            if spec is None:
                continue
            if argument.role is Role.BATCH:
                if shaped(value) not in unsplit:
                    self.batches[shaped(value)] = (spec, mesh)
            elif tensor is not None:
                self.keep(tensor, spec, mesh, capture.program.training)
        results = {
            id(root): plan.results[r.name] for root, r in zip(capture.roots, capture.program.results, strict=True)
        }
        for optimizer in watch.optimizers:
            self._optimizers[optimizer] = None
            for _, _, tensor in optimizer_state(optimizer):
                if id(tensor) in results and results[id(tensor)].dims:
                    self.keep(tensor, results[id(tensor)], mesh, capture.program.training)
        for root, result in zip(capture.roots, capture.program.results, strict=True):
            # A tensor that the step has made, such as a table of metrics, may be written in place later.
            if result.argument is None and result.shape and root not in self.specs and is_whole(root):
                self.keep(root, plan.results[result.name], mesh, False)
        pinned = pins.of(plan)
        for (place, shape), specs in pinned.items():
            module = watch.modules[place.module]
            if place.op is not None:
                self.kinds.add(place.op.kind)
            if module not in self._pinned:
                self._pinned[module] = ModulePins(module, self.now, self._guard)
            parts = tuple(
                math.lcm(*(math.prod(mesh.sizes[axis] for axis in spec.dims[dim]) for spec in specs))
                for dim in range(len(shape))
            )
            pin = ReadyPin([mesh.sharding(spec) for spec in specs], parts, shape)
            self._pinned[module].add(module, len(self.pins), place, pin)
        written = {(mesh.write(spec), len(shape)) for (_, shape), specs in pinned.items() for spec in specs}
        self.pins.append(frozenset(written))

    def pins_by_module(self) -> dict[int, ModulePins]:
        """Return the pins of each module that has pins, by the module's `id`."""
        return {id(module): pins for module, pins in self._pinned.items()}

    def waiting_pins(self) -> frozenset[tuple[str, int]]:
        """Return sharding strings and ranks of the pins in the pending graph, of all plans that pinned values in this
        step.
        """
        return frozenset().union(*(self.pins[plan] for plan in self.now.pinned))

    def keep(self, tensor: Any, spec: Spec, mesh: LiveMesh, trains: bool) -> None:
        """Remember the spec that a plan gives to a tensor; `trains` is True for the plan of a training step."""
        self.specs[tensor] = spec
        if trains:
            self.trained[tensor] = None
        self._hold(tensor, mesh.sharding(spec))

    def hook_calls(
        self, modules: Iterable[Any], on_call: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
    ) -> None:
        """Call `on_call` before each call of these modules, once for each module, and make compiled ones train
        lazily.
        """

        for module in modules:
            if not CallHook.on(module):
                module.register_forward_pre_hook(CallHook(on_call, self._guard), prepend=True, with_kwargs=True)
                train_lazily(module)

    def mark_batch(self, tensors: Sequence[Any], planned: Sequence[Shaped] | None = None) -> None:
        """Split the planned inputs among a call's tensors (`mark_input`).

        `planned` are the shapes and dtypes of the call whose plan is used, in the same order; None for their own.
        """
        for tensor, key in zip(tensors, planned or map(shaped, tensors), strict=True):
            self.mark_input(tensor, key)

    def divides(self, shapes: Sequence[Shaped], planned: Sequence[Shaped]) -> bool:
        """Return True if the planned splits of some inputs divide these shapes of the same inputs."""
        for (shape, _), key in zip(shapes, planned, strict=True):
            spec, mesh = self.batches.get(key, (None, None))
            if spec is not None and mesh is not None and not mesh.divides(spec, shape):
                return False
        return True

    def batch_spec(self, tensor: Any) -> tuple[Spec, LiveMesh] | None:
        """Return the spec of an input of this shape and dtype; None if it is not split or the plan does not know it."""
        return self._split_of(shaped(tensor))

    def _split_of(self, key: Shaped) -> tuple[Spec, LiveMesh] | None:
        """Return the spec and mesh of an input of this shape and dtype, if it is split."""
        planned = self.batches.get(key)
        return planned if planned is not None and planned[0].axes else None

    def mark_input(self, tensor: Any, key: Shaped | None = None) -> None:
        """Mark an input on the XLA device with its planned spec, unless it is split already or needs a gradient.

        `key` is the shape and dtype whose spec the input has; None for its own.
        """
        planned = self._split_of(key or shaped(tensor))
        if planned is not None and on_xla(tensor) and not tensor.requires_grad and not is_split(sharding_text(tensor)):
            spec, mesh = planned
            mark(tensor, mesh.sharding(spec))

    def mark_state(self) -> None:
        """Mark updated state with its planned spec: propagation alone may split a graph's results in another way.

        Only pending tensors are marked. New optimizer state of a parameter's shape adopts that parameter's spec.
        """
        for optimizer, before in list(self._optimizers.items()):
            identity = _held(optimizer)
            if identity == before:
                continue
            self._optimizers[optimizer] = identity
            for parameter, _, tensor in optimizer_state(optimizer):
                if tensor not in self.state and parameter in self.state and tensor.shape == parameter.shape:
                    self.specs[tensor] = self.specs[parameter]
                    self._hold(tensor, self.state[parameter])
        if self._held is None:
            self._held = [(TensorWeakRef(tensor), sharding) for tensor, sharding in self.state.items()]
        tensors = [(ref(), sharding) for ref, sharding in self._held]
        known = [each for each in tensors if each[0] is not None]
        if len(known) < len(tensors):
            self._held = None
        for (tensor, sharding), waits in zip(known, pending([tensor for tensor, _ in known]), strict=True):
            if waits:
                mark(tensor, sharding)

    def _hold(self, tensor: Any, sharding: Any) -> None:
        """Remember the ready-made sharding of a state tensor."""
        self.state[tensor] = sharding
        self.forget_list()

    def forget_list(self) -> None:
        """Drop the list of `state` that `mark_state` iterates over; the next step builds a new list."""
        self._held = None


def _held(optimizer: Any) -> int:
    """Return a hash of the identities of an optimizer's state tensors; every step calls this to notice new tensors."""
    return hash(tuple(id(value) for state in optimizer.state.values() for value in state.values()))


_SMALL = 0.01
"""Share of a step's time that an input may cost if every device receives all of it."""


def _is_small(value: Any, plan: Plan) -> bool:
    """Return True if sending the whole input from the host to all devices costs at most `_SMALL` of the plan's step."""
    seconds = Compute(Topology.parse(plan.topology)).host_seconds(value.numel() * value.element_size())
    return float(seconds) <= _SMALL * plan.prediction.step_time_s
