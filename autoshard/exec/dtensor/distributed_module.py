"""A torch module that runs under a plan on DTensors, with hooks that split its inputs and place its layers' values."""

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autoshard.errors import UserError
from autoshard.exec.devices.torch_names import own_name, owned_parameters
from autoshard.exec.dtensor.dtensor_placements import placements_of
from autoshard.exec.dtensor.split_functions import ExpertHooks, is_experts
from autoshard.exec.dtensor.split_ops import SplitOps, gathered
from autoshard.exec.dtensor.split_trial import PlacedGradient, map_outputs, moved, settle
from autoshard.exec.dtensor.uncompiled import UncompiledForward
from autoshard.planning import Plan, dims_by_axis, module_pattern
from autoshard.program import map_inputs


def distribute(plan: Plan, model: Any, mesh: Any, places: Mapping[str, Sequence[Any]], gather_outputs: bool) -> Any:
    """Split a module's parameters over a `DeviceMesh`, in place, hook its modules and return it; see `Plan.distribute`.

    - `places`: placements of each parameter by its name in the module, one for each mesh axis.
    - `gather_outputs`: True makes the outputs whole plain tensors, False leaves them DTensors.

    A parameter that several modules share stays shared. Raises `UserError` for a module that has DTensors already.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UserError("plan.distribute: the module has DTensors already; give a module that is not distributed yet.")
    distributed: dict[int, Any] = {}
    uses = _PlannedUses(plan)
    pinned: dict[Any, dict[str, list[_PlacedUse]]] = {}
    for module, key, name, parameter in owned_parameters(model):
        if id(parameter) not in distributed:
            value = distribute_tensor(parameter.detach(), mesh, list(places[name]))
            distributed[id(parameter)] = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
        module.register_parameter(key, distributed[id(parameter)])
        if placed_uses := uses.of(own_name(name)):
            pinned.setdefault(module, {})[key] = placed_uses
    running = _RunHooks(plan, mesh, gather_outputs)
    running.place_gradients(model)
    for module in list(model.modules()):
        if is_experts(module):
            expert_places = {key: placed_uses[0].weight for key, placed_uses in pinned.get(module, {}).items()}
            block = ExpertHooks(mesh, expert_places)
            module.register_forward_pre_hook(block.before)
            module.register_forward_hook(block.after, always_call=True)
        elif module in pinned:
            layer = _UseHooks(pinned[module], running.ops)
            module.register_forward_pre_hook(layer.before)
            module.register_forward_hook(layer.after, always_call=True)
        module.register_forward_pre_hook(running.enter_root if module is model else running.enter, prepend=True,
                                         with_kwargs=True)  # fmt: skip
        module.register_forward_hook(running.leave_root if module is model else running.leave, always_call=True)
        module.forward = UncompiledForward(module)
    return model


def notes_on(model: Any) -> tuple[str, ...]:
    """Return the sentences of `autoshard.exec.distribution_notes`. Raises `UserError` for a module that is not
    distributed.
    """
    for hook in model._forward_pre_hooks.values():
        if isinstance(getattr(hook, "__self__", None), _RunHooks):
            return hook.__self__.notes()
    raise UserError("distribution_notes: the module is not distributed; call plan.distribute(model, mesh) first.")


@dataclasses.dataclass(frozen=True)
class _PlacedUse:
    """Placements for one use of a parameter, one for each mesh axis, and the global shapes that identify that use."""

    input_shape: tuple[int, ...]
    """Global shape of the op's input."""
    output_shape: tuple[int, ...]
    """Global shape of its output."""
    weight: list[Any]
    """Placements of the parameter during the use."""
    input: list[Any]
    """Placements of the input."""
    output: list[Any]
    """Placements of the output."""

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Return True if the use has an input of this shape; a program's ids of a lookup may have one more dim, of size
        1.
        """
        return self.input_shape in (shape, (*shape, 1))


class _PlannedUses:
    """The plan's uses of parameters, as far as DTensor can represent their specs."""

    def __init__(self, plan: Plan) -> None:
        self._found: dict[str, tuple[re.Pattern[str], list[_PlacedUse]]] = {}
        for use in plan.uses:
            pattern = re.compile(module_pattern(plan, use.parameter))
            _, into = self._found.setdefault(use.parameter, (pattern, []))
            if all(dims_by_axis(spec, plan.mesh) is not None for spec in (use.weight, use.input, use.output)):
                weight, inputs, outputs = (
                    list(placements_of(s, plan.mesh, "")) for s in (use.weight, use.input, use.output)
                )
                into.append(_PlacedUse(use.input_shape, use.output_shape, weight, inputs, outputs))

    def of(self, name: str) -> list[_PlacedUse]:
        """Return the uses of the parameter with that name, in the plan's order; empty if it has none that DTensor can
        represent.
        """
        return [use for pattern, uses in self._found.values() if pattern.match(name) for use in uses]


def _pins(plan: Plan) -> dict[tuple[str, tuple[int, ...]], list[Any]]:
    """Return the planned placements of functions' results, by function's name and global shape, as far as DTensor can
    represent them.
    """
    return {
        (each.function, each.shape): list(placements_of(each.spec, plan.mesh, ""))
        for each in plan.activations
        if dims_by_axis(each.spec, plan.mesh) is not None
    }


class _UseHooks:
    """Hooks of a module that owns parameters: they place its parameters, its input and its output as planned.

    `uses` has the planned uses of each parameter by its key in the module. Nested calls are matched by a stack.
    """

    def __init__(self, uses: Mapping[str, list[_PlacedUse]], ops: SplitOps) -> None:
        self._uses = uses
        self._ops = ops
        self._calls: list[list[tuple[str, _PlacedUse]]] = []

    @torch.compiler.disable
    def before(self, module: Any, args: tuple[Any, ...]) -> Any:
        """Place the parameters and the first input for the first planned use with the input's shape; return the new
        arguments.

        Returns None, which leaves the arguments alone, if no use has that shape or the input is no DTensor. An input
        with too few dims for its placements stays too.
        """
        first = args[0] if args and isinstance(args[0], DTensor) else None
        shape = None if first is None else tuple(first.shape)
        matching = [
            (key, next(iter(fitting)))
            for key, uses in self._uses.items()
            if shape is not None and (fitting := [use for use in uses if use.takes(shape)])
        ]
        self._calls.append(matching)
        self._ops.inside += bool(matching)
        for key, use in matching:
            parameter = module._parameters[key]
            if list(parameter.placements) != use.weight:
                # The placed copy hides the parameter during the call only, so that no optimizer or checkpoint sees it.
                placed = parameter.redistribute(placements=use.weight)
                module.__dict__[key] = self._ops.memory.placed(parameter, placed)
        if not matching or shape is None:
            return None
        places = matching[0][1].input
        if any(place.is_shard() and place.dim >= len(shape) for place in places):
            return None
        return (self._ops.memory.placed(first, moved(first, places)), *args[1:])

    @torch.compiler.disable
    def after(self, module: Any, args: Any, output: Any) -> Any:
        """Restore the parameters, also after a failed call, and return the output as planned.

        Returns None, which leaves the output alone, unless a use matched and the output is a DTensor of its shape.
        """
        matching = self._calls.pop() if self._calls else []
        self._ops.inside -= bool(matching)
        for key, _ in matching:
            module.__dict__.pop(key, None)
        if matching and isinstance(output, DTensor) and tuple(output.shape) == matching[0][1].output_shape:
            return self._ops.memory.placed(output, moved(output, matching[0][1].output))
        return None


class _RunHooks:
    """Hooks of all modules that split torch functions within them; the outermost module places inputs and outputs."""

    def __init__(self, plan: Plan, mesh: Any, gather_outputs: bool) -> None:
        self._mesh = mesh
        self._gathers = gather_outputs
        self.ops = SplitOps(mesh, _pins(plan))
        self._open: list[contextlib.ExitStack] = []
        self._gradients = False
        """True if the gradients of this module's parameters are placed."""
        self._inputs = {
            name.removeprefix("batch."): (plan.shapes[name], placements_of(spec, plan.mesh, name))
            for name, spec in plan.arguments.items()
            if plan.roles[name] == "batch"
        }

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, in which gradients are not placed: parameters lose their hooks
        there.
        """
        return self.__dict__ | {"_gradients": False}  # parameters are copied and pickled without their hooks

    def place_gradients(self, module: Any) -> None:
        """Register hooks that place gradients as parameters are; otherwise an optimizer would sum them again at each
        use.
        """
        for parameter in module.parameters():
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                parameter.register_hook(PlacedGradient(parameter.placements))
        self._gradients = True

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each function that every device ran whole, with its failure on DTensors; empty if there
        is none.
        """
        return tuple(f"{name} runs whole on every device: {said}." for name, said in self.ops.whole.items())

    @torch.compiler.disable
    def enter(self, module: Any, args: Any, kwargs: Any) -> None:
        """Start splitting torch functions when the outermost running module is called; the arguments stay as they
        are.
        """
        stack = contextlib.ExitStack()
        if not self._open:
            stack.enter_context(self.ops)
        self._open.append(stack)

    @torch.compiler.disable
    def leave(self, module: Any, args: Any, output: Any) -> None:
        """Stop splitting torch functions when the outermost running module returns; the output stays as it is."""
        if self._open:
            self._open.pop().close()

    @torch.compiler.disable
    def enter_root(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Start splitting, and return the positional and keyword arguments of the distributed module as placed
        DTensors.

        Gradients are hooked again after a copy of the module. If an input cannot be placed, splitting stops and the
        error is raised.
        """
        self.enter(module, args, kwargs)
        if not self._gradients:
            self.place_gradients(module)
        try:
            return map_inputs(module, args, kwargs, self._placed)
        except BaseException:
            self.leave(module, args, None)
            raise

    @torch.compiler.disable
    def leave_root(self, module: Any, args: Any, output: Any) -> Any:
        """Stop splitting and return the outputs: whole plain tensors if asked to gather, else DTensors without open
        sums.

        Other values in the output's pytree stay as they are.
        """
        self.leave(module, args, output)
        final = gathered if self._gathers else settle
        return map_outputs(final, output)

    def _placed(self, name: str, value: Any) -> Any:
        """Return an input as a DTensor placed as planned; a value that is no tensor is returned unchanged.

        - `name`: name of the input in the plan, without `batch.`.
        - `value`: plain tensor, equal on every process, or DTensor.

        Only the number of dims must be the planned one. The input is replicated if it differs, if the plan has no such
        input, or if a part would be uneven.
        """
        if not isinstance(value, torch.Tensor):
            return value
        shape, places = self._inputs.get(name, ((), None))
        whole = [Replicate()] * self._mesh.ndim
        if places is None or len(shape) != value.ndim:
            places = whole
        sizes = list(value.shape)
        for axis, place in enumerate(places):
            if place.is_shard():
                if sizes[place.dim] % self._mesh.size(axis):
                    places = whole
                    break
                sizes[place.dim] //= self._mesh.size(axis)
        if isinstance(value, DTensor):
            return moved(value, places)
        return DTensor.from_local(value, self._mesh, whole, run_check=False).redistribute(placements=places)
