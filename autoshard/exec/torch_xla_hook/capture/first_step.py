"""Observation of the first step: the modules that run, their arguments, and the values between them."""

import contextlib
import functools
import itertools as it
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.weak import TensorWeakRef

from autoshard.exec.devices.torch_names import own_name
from autoshard.exec.torch_xla_hook.capture.compiled_modules import lazily
from autoshard.exec.torch_xla_hook.capture.lazy_graph import Known
from autoshard.exec.torch_xla_hook.capture.op_events import OpObserver, without_observers
from autoshard.exec.torch_xla_hook.values.call_sites import LazyOp, Place, is_value, nodes_between
from autoshard.exec.torch_xla_hook.values.lazy_tensors import (
    handles,
    is_traced,
    leaves,
    live_data,
    on_xla,
    pending,
    plain,
    xlac,
)
from autoshard.exec.torch_xla_hook.values.module_hooks import Guard, ModuleHook
from autoshard.program import Role


class Watch:
    """Hooks on every module while a step is captured; tensors are named before the step changes them.

    - `on_forward`: called with each module call of the script; True if a step of inference begins with it.
    - `guard`: context that catches the hook's own errors.
    - `live`: lists the handle and tensor of all device data.
    """

    def __init__(
        self,
        on_forward: Callable[[Any, tuple[Any, ...], dict[str, Any]], bool],
        guard: Guard,
        live: Callable[[], list[tuple[int, Any]]] = live_data,
    ) -> None:
        self.known: dict[int, Known] = {}
        """The named tensor that owned the data, by device data handle."""
        self.recorded: dict[Place, Any] = {}
        """A copy of each pending value, by its place in the script."""
        self.held: dict[Place, tuple[tuple[int, ...], int]] = {}
        """Shape and handle of device data that an op reads directly, such as a parameter, by place."""
        self.outermost: list[Any] = []
        """Modules that the user's code calls, in order."""
        self.modules: dict[str, Any] = {}
        """Every module by name, as in `named_modules`; further outermost modules have a prefix (`model1.`)."""
        self.optimizers: list[Any] = []
        """Optimizers that have begun a step."""
        self.training = False
        """True if the script could ask for gradients."""
        self.went_back = False
        """True if the script has asked for gradients or updated parameters."""
        self.infers = False
        """True if the same call was repeated without a backward pass, which marks inference."""
        self.read_whole: set[int] = set()
        """Handles of the device data from which the script has read a value in the middle of the step."""
        self._on_forward = on_forward
        self._find_live = live
        self.guard = guard
        self.is_on = False
        """True between `start` and `stop`."""
        self._live: dict[int, TensorWeakRef] = {}
        """A tensor that owned the data, by handle, for all tensors at the start of the step."""
        self._names: dict[int, str] = {}
        """Name of a module by its `id`."""
        self._calls: dict[str, int] = {}
        """Number of ended calls by module name."""
        self._nodes: set[Any] = set()
        """Autograd nodes that are already assigned to a module."""
        self._running: list[_RecordedOps] = []
        """Recorders of the running calls, the innermost last."""
        self._depth = 0
        """Number of nested calls that run now."""
        self._hooks = contextlib.ExitStack()

    def start(self) -> None:
        """Replace `Module.__call__` until `stop`: global module hooks do not receive keyword arguments."""
        import torch

        call = torch.nn.Module.__call__

        @functools.wraps(call)
        def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
            # Objects that copy the method during the step, such as a compiled module, retain this function forever.
            """Call a module; record its inputs if the script calls it, its ops, and its output."""
            if torch.compiler.is_compiling() or not self.is_on or is_traced():
                return call(module, *args, **kwargs)
            ops = None
            with self.guard:
                if not self._depth:
                    self._enter(module, args, kwargs)
                ops = self._ops_of(module)
            self._depth += 1
            try:
                output = lazily(module, call)(*args, **kwargs)
            finally:
                self._depth -= 1
                if ops is not None:
                    with self.guard:
                        ops.__exit__(None, None, None)
                        if ops in self._running:
                            self._running.remove(ops)
            if self.is_on:
                with self.guard:
                    self._after(module, (args, kwargs), output)
            return output

        self.is_on = True
        torch.nn.Module.__call__ = watched
        self._hooks.callback(setattr, torch.nn.Module, "__call__", call)

    def stop(self) -> None:
        """Stop observing, restore `Module.__call__`, and forget the step and its optimizers."""
        self.is_on = False
        self._hooks.close()
        self.restart()
        self.optimizers.clear()

    def join(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Watch a call that has begun already, as its pre-hooks are running, until it ends."""
        self._enter(module, args, kwargs)
        self._depth += 1

        def leave(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            """End the watched call: record its outputs, and remove this hook."""
            handle.remove()
            self._depth = max(self._depth - 1, 0)
            if self.is_on:
                self._after(module, (args, kwargs), output)

        handle = module.register_forward_hook(ModuleHook(leave, self.guard), with_kwargs=True, always_call=True)

    def restart(self) -> None:
        """Forget the step so far, except its optimizers, and continue observing."""
        self.forget()
        self.known.clear()
        self.outermost.clear()
        self.modules.clear()
        self._names.clear()
        self._calls.clear()
        self._nodes.clear()
        self._live.clear()
        self.read_whole.clear()
        self.training = self.went_back = self.infers = False

    @property
    def seen(self) -> bool:
        """True if a module has run since the start."""
        return bool(self.outermost)

    @property
    def is_calling(self) -> bool:
        """True if a module is in the middle of a call."""
        return self._depth > 0

    def note_read(self, tensor: Any) -> None:
        """Record the data behind a value that is read in the middle of the step, and so computed with nothing split.

        A value that is computed already needs no record.
        """
        if all(pending([tensor])):
            self.read_whole.update(handles(xlac()._get_tensors_xla_device_data_node([tensor])[1]))

    def learn(self, named: Iterator[tuple[str, Any]], role: Callable[[Any], Role]) -> None:
        """Remember the device data of these tensors, under the first name that each receives.

        `role` returns the role of a tensor. Pending tensors have no data, and scalars may be constants: both are
        skipped.
        """
        tensors = [(name, plain(tensor)) for name, tensor in named if on_xla(tensor) and tensor.dim() > 0]
        waiting = pending([tensor for _, tensor in tensors])
        computed = [each for each, waits in zip(tensors, waiting, strict=True) if not waits]
        for handle, (name, tensor) in zip(handles([tensor for _, tensor in computed]), computed, strict=True):
            self.known.setdefault(handle, Known(name, role(tensor), tensor))

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call of a module that the script makes: its parameters, buffers and batch; start the step if it is
        the first.

        Calls on the host are ignored. A part of a known module that runs alone is not recorded: it is checkpointed. If
        the call begins inference, the step so far is forgotten.
        """
        import torch

        tensors = (module.parameters(), module.buffers(), (tensor for _, tensor in leaves((args, kwargs), "")))
        if not any(on_xla(tensor) for tensor in it.chain(*tensors)):
            return  # a call on the host
        if self._on_forward(module, args, kwargs):
            self.restart()
            self.infers = True
        if not self.outermost:
            self._live = {handle: TensorWeakRef(tensor) for handle, tensor in self._find_live()}
        again = any(each is module for each in self.outermost)
        if not again and id(module) in self._names:
            return  # a part run alone: a checkpointed one in the backward pass
        if not again:
            prefix = f"model{len(self.outermost) or ''}." if self.outermost else ""
            self.outermost.append(module)
            for name, inner in module.named_modules():
                self._names.setdefault(id(inner), f"{prefix}{name}")
                self.modules.setdefault(f"{prefix}{name}", inner)
            parameters = [(prefix + own_name(name), each) for name, each in module.named_parameters()]
            buffers = [(prefix + own_name(name), each) for name, each in module.named_buffers()]
            self.learn(iter(parameters), lambda _: Role.PARAMETER)
            self.learn(iter(buffers), lambda _: Role.OTHER)
        self.training |= torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        self.learn(leaves((args, kwargs), "batch"), lambda _: Role.BATCH)

    def _ops_of(self, module: Any) -> "_RecordedOps | None":
        """Record the ops that a module runs, until the recorder is left; return the recorder, None for an unknown
        module.

        Children record their own ops, but both count them.
        """
        name = self._names.get(id(module))
        if name is None:
            return None
        call = self._calls.get(name, 0)
        ops = _RecordedOps(functools.partial(LazyOp, name, call, -1), self, lambda: self._running[-1:] == [ops])
        ops.__enter__()
        self._running.append(ops)
        return ops

    def _after(self, module: Any, inputs: Any, output: Any) -> None:
        """Record the outputs of a module's call, and the ops of its backward pass; do nothing for an unknown module.

        - `inputs`: positional and keyword arguments of the call.
        """
        name = self._names.get(id(module))
        if name is None:
            return
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        for number, node in enumerate(nodes_between(inputs, output)):
            if node not in self._nodes:
                self._nodes.add(node)
                _RecordedOps(functools.partial(LazyOp, name, call, number), self).around(node)
        for number, (_, tensor) in enumerate(leaves(output, "")):
            if is_value(tensor):
                self._record_output(functools.partial(Place, name, call, number=number), tensor)

    def _record_output(self, where: Callable[..., Place], tensor: Any) -> None:
        """Record an output of a module, and later its gradient; `where` makes a place from the kind of value."""
        import torch

        self.record(where(what="output"), tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(functools.partial(self._record_gradient, where(what="gradient")))

    def _record_gradient(self, where: Place, tensor: Any) -> None:
        """Record a gradient, and that the script went back, unless observation has stopped."""
        if self.is_on:
            with self.guard:
                self.went_back = True
                self.record(where, tensor)

    def record(self, where: Place, tensor: Any) -> None:
        """Save a copy of the tensor's current value by its place, since in-place ops may follow."""
        import torch

        with torch.no_grad(), without_observers():
            self.recorded[where] = tensor.detach().clone()

    def hold(self, where: Place, tensor: Any) -> None:
        """Save shape and handle of the data that an op reads. A copy would constrain the tensor's next value."""
        (handle,) = handles([plain(tensor)])
        self.held[where] = tuple(tensor.shape), handle

    def forget(self) -> None:
        """Release the recorded values and handles."""
        self.recorded.clear()
        self.held.clear()

    def forget_live(self, tensors: Sequence[Any]) -> None:
        """Drop the weak references to these tensors."""
        self._live = {handle: ref for handle, ref in self._live.items() if all(ref() is not each for each in tensors)}

    def persistent(self) -> list[Any]:
        """Return tensors that outlive a step, in an order that is the same in every run."""
        states = [tensor for optimizer in self.optimizers for _, _, tensor in optimizer_state(optimizer)]
        return [*(each.tensor for each in self.known.values()), *states]

    def explain(self, roots: Sequence[Any]) -> None:
        """Name tensors that no module or optimizer owns: state that the step has updated, and other parameters.

        - `roots`: live pending tensors, those that the step updates.

        Updated state is optimizer state if the step trains and it is floating, else other. All remaining tensors are
        batch data.
        """
        import torch

        updated = {id(root) for root in roots}
        for handle, ref in self._live.items():
            tensor = ref()
            if tensor is None or handle in self.known:
                continue
            if id(tensor) in updated:
                role = Role.OPTIMIZER_STATE if self.training and tensor.is_floating_point() else Role.OTHER
                self.known[handle] = Known(f"state.{len(self.known)}", role, tensor)
            elif isinstance(tensor, torch.nn.Parameter):
                self.known[handle] = Known(f"parameter.{len(self.known)}", Role.PARAMETER, tensor)

    def changed(self, roots: Sequence[Any]) -> bool:
        """Return True if these pending tensors include an updated parameter of a module."""
        parameters = {id(each.tensor) for each in self.known.values() if each.role is Role.PARAMETER}
        return any(id(root) in parameters for root in roots)

    def title(self) -> str:
        """Return a name for the captured program: the classes of its outermost modules joined by `+`; `graph` without
        any.
        """
        names = [type(module).__name__ for module in self.outermost]
        return "+".join(dict.fromkeys(names)) or "graph"

    def learn_state(self, optimizer: Any) -> None:
        """Remember the optimizer that begins its step and its state, named after parameters; the step then counts as
        gone back.
        """
        self.went_back = True
        if not any(each is optimizer for each in self.optimizers):
            self.optimizers.append(optimizer)
        names = {id(each.tensor): each.name for each in self.known.values()}
        named = (
            (f"optimizer.{key}.{names.get(id(parameter), 'parameter')}", tensor)
            for parameter, key, tensor in optimizer_state(optimizer)
        )
        self.learn(named, lambda _: Role.OPTIMIZER_STATE)


class _RecordedOps(OpObserver):
    """Observer that records operands and results of ops in a `Watch`.

    - `name`: returns the place of an op from its kind and turn.
    - `mine`: False while ops belong to another recorder, which then records them.
    """

    def __init__(
        self, name: Callable[[str, int], LazyOp], watch: Watch, mine: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__()
        self._name = name
        self._watch = watch
        self._mine = mine

    def before(self, kind: str, turn: int, operands: Sequence[Any]) -> Sequence[Any]:
        """Record an op's operands, and return them unchanged."""
        with self._watch.guard:
            self._keep("operand", kind, turn, operands)
        return operands

    def after(self, kind: str, turn: int, results: Sequence[Any]) -> None:
        """Record an op's results."""
        with self._watch.guard:
            self._keep("result", kind, turn, results)

    def _keep(self, what: str, kind: str, turn: int, values: Sequence[Any]) -> None:
        """Record the pending values among an op's operands or results; note the data of the computed operands.

        - `what`: `operand` or `result`.
        - `kind`, `turn`: kind of the op, and number of earlier ops of that kind.
        - `values`: operands or results.
        """
        if not self._mine() or not self._watch.is_on:
            return
        op = self._name(kind, turn)
        for number, value in enumerate(values):
            if not is_value(value):
                continue
            where = Place(op.module, op.call, what, number, op)
            if all(pending([value])):
                self._watch.record(where, value)
            elif what == "operand" and not any(pending([plain(value)])):
                self._watch.hold(where, value)


def optimizer_state(optimizer: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield parameter, key and tensor of all state that an optimizer stores on the XLA device, in the order of its
    groups.
    """
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and on_xla(value):
                    yield parameter, key, plain(value)
