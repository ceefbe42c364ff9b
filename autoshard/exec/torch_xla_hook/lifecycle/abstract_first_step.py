"""Planning of modules that are too large to be uploaded whole, from an abstract first step while they are on the host.

PyTorch/XLA uploads a tensor at its first use, whole to every device, unless it is marked before. So the step is traced
once on stand-ins of one element. Its plan says how to split each parameter for the upload.
"""

import copy
import functools
import gc
import itertools as it
import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.capture.lazy_graph import Capture, Known, capture
from autoshard.exec.torch_xla_hook.capture.op_events import hidden_from_observers
from autoshard.exec.torch_xla_hook.lifecycle.offline_marks import move_marked
from autoshard.exec.torch_xla_hook.pins.input_placement import answer_here
from autoshard.exec.torch_xla_hook.pins.later_steps import LaterMarks
from autoshard.exec.torch_xla_hook.planning.decision_cache import kept_decision
from autoshard.exec.torch_xla_hook.planning.runtime_topology import live_mesh, memory_limit_here
from autoshard.exec.torch_xla_hook.planning.step_files import given_mesh, given_plan, is_of_training
from autoshard.exec.torch_xla_hook.values.lazy_tensors import handles, leaves, live_data, on_xla, pending, plain
from autoshard.exec.torch_xla_hook.values.live_marks import (
    LiveMesh,
    UserMarks,
    annotated,
    is_split,
    mark,
    sharding_text,
)
from autoshard.exec.torch_xla_hook.values.module_hooks import error_text, is_strict
from autoshard.planning import Spec
from autoshard.program import Role


log = logging.getLogger("autoshard.torch_xla")

AHEAD_VARIABLE = "XLA_AUTO_PLAN_AHEAD"
"""Environment variable: 1 to plan before anything is uploaded, 0 to plan the first step as it runs."""


class UploadPlanner:
    """Modules that were moved to the device, but whose tensors no op has used there yet.

    `marks` are the script's own marks, and `applied` remembers the specs for later steps.
    """

    def __init__(self, marks: UserMarks, applied: LaterMarks) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self.waiting: Any = WeakIdKeyDictionary()
        """Parameters and buffers that are still to be uploaded."""
        self._meta: weakref.WeakSet[Any] = weakref.WeakSet()
        """Modules on the meta device that are to be materialised on the XLA device."""
        self._marks = marks
        self._applied = applied

    def moved(self, module: Any) -> None:
        """Record the tensors of a module that has moved from the host to the XLA device."""
        for tensor in it.chain(module.parameters(), module.buffers()):
            if on_xla(tensor):
                self.waiting[plain(tensor)] = None

    def promised(self, module: Any) -> None:
        """Record a module on the meta device that was moved; its first call materialises it."""
        self._meta.add(module)

    def needs(self, module: Any, topology: str) -> bool:
        """Return True if this module must be planned before its first call.

        A module with meta parameters needs it if it was moved (`promised`), and one without waiting parameters does
        not. Otherwise `XLA_AUTO_PLAN_AHEAD` decides. By default the module needs it if the tensors in `waiting` would
        fill more than half of a device's memory. The plan's first run may need the whole tensors in addition to the
        step's own memory.
        """
        if any(parameter.is_meta for parameter in module.parameters()):
            return any(inner is module for each in self._meta for inner in each.modules())
        if not any(plain(each) in self.waiting for each in module.parameters()):
            return False
        asked = answer_here(AHEAD_VARIABLE, "to plan before anything is uploaded", "to plan the first step as it runs")
        if asked is not None:
            return asked
        limit = memory_limit_here() or Topology.parse(topology).usable_bytes
        # The first run may need the whole tensors and the step at once, so they may fill half of the memory.
        return 2 * sum(each.numel() * each.element_size() for each in self.waiting) > limit

    def split(
        self,
        module: Any,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        topology: str,
        find_mesh: Callable[[Callable[[LiveMesh], Capture]], LiveMesh],
    ) -> None:
        """Send a module's parameters and buffers to the devices, each split as in a plan of an abstract step.

        - `call`: positional and keyword arguments of the module's first call.
        - `topology`: name of the devices' topology.
        - `find_mesh`: returns the mesh to plan for, from a function that captures the step.

        A plan that the environment names is used without a trace. If the step cannot be planned, every tensor is split
        evenly over all devices, with a warning. If `AUTOSHARD_STRICT` is set the error is raised.
        """
        given, given_on = given_plan(), given_mesh()
        if given is not None and given_on is not None:
            # The captured step is compared with the plan later, and refused if a shape differs.
            shapes = {name: tuple(tensor.shape) for name, tensor in _tensors_of(module)}
            chosen = {name: spec for name, spec in given.arguments.items() if shapes.get(name) == given.shapes[name]}
            self._send(module, given_on, chosen, is_of_training(given))
            return
        specs: dict[str, Spec] = {}
        trains: bool | None = None
        mesh = live_mesh(topology, {"data": Topology.parse(topology).num_devices})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                step = hidden_from_observers(AbstractStep)(module, *call)
                read = functools.partial(step.capture, marks=self._marks)
                mesh = find_mesh(read)
                captured = read(mesh)
                decision = kept_decision(captured, topology, mesh, step.fixed(captured, mesh), free=True)
            arguments = zip(captured.program.arguments, decision.specs, strict=True)
            specs = {a.name: spec for a, spec in arguments if spec is not None and a.name in step.tensors}
            trains = step.trains
        except Exception as error:
            if is_strict():
                raise
            warnings.warn(
                f"autoshard: {type(module).__name__} is split evenly before its first step, which could not be "
                f"planned with nothing on the devices: {error_text(error)}",
                stacklevel=6,
            )
        step = read = captured = None
        gc.collect()  # pending tensors of the copy would count as results of the script's step
        self._send(module, mesh, specs, trains)

    def _send(self, module: Any, mesh: LiveMesh, specs: Mapping[str, Spec], trains: bool | None) -> None:
        """Upload a module's tensors by these specs, and remember the specs.

        - `mesh`: mesh of the specs.
        - `specs`: the planned specs, by name.
        - `trains`: True if the planned step trains; None if nothing was planned, then every tensor is split evenly.

        Meta tensors are materialised on the devices. Tensors that the script has marked keep their marks.
        """
        named = dict(_tensors_of(module))
        if trains is None:
            specs = {name: _evenly(tensor, mesh) for name, tensor in named.items()}
        if any(tensor.is_meta for tensor in named.values()):
            _make(module, {name: mesh.sharding(spec) for name, spec in specs.items() if spec.dims})
            named = dict(_tensors_of(module))
        for name, tensor in named.items():
            if plain(tensor) in self.waiting and not self._marks.holds(tensor) and name in specs:
                mark(tensor, mesh.sharding(specs[name]))
            self.waiting.pop(plain(tensor), None)
            if trains is not None and name in specs:
                self._applied.keep(tensor, specs[name], mesh, trains)

    def live_data(self) -> list[tuple[int, Any]]:
        """Return `live_data` without tensors that are not uploaded yet, which stay on the host."""
        return live_data(self.waiting)


class AbstractStep:
    """One step of a copy of a module whose parameters are stand-ins of one element; nothing is computed.

    A training step differentiates the output's loss, or the mean of the output's squares. It trains if gradients are
    enabled and some parameter requires one. Its optimizer is the one that the script has made for these parameters,
    else AdamW.
    """

    def __init__(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Run the step lazily on stand-ins; random states of the script do not change.

        `args` and `kwargs` are those of the module's first call. Errors of the module pass through.
        """
        import torch
        import torch_xla.core.xla_model as xm

        self.tensors = dict(_tensors_of(module))
        """The module's own tensors by name."""
        self._title = type(module).__name__
        self._stand_ins: dict[str, tuple[Any, Any]] = {}
        """The stand-in of each tensor, by name, and the device data that it is broadcast from."""
        memo: dict[int, Any] = {}
        for name, tensor in self.tensors.items():
            memo[id(tensor)] = self._stand_in(name, tensor)
        given = list(leaves((args, kwargs), "batch"))
        self._batch = [(name, tensor) for name, tensor in given if on_xla(tensor) and tensor.dim()]
        seed = xm.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            model = copy.deepcopy(module, memo)
            output = model(*args, **kwargs)
            parameters = [each for each in model.parameters() if each.requires_grad]
            self.trains = torch.is_grad_enabled() and bool(parameters)
            roots = [tensor for _, tensor in leaves(output, "")]
            if self.trains:
                loss = _loss(output)
                loss.backward()
                updater = _updater(module, {id(own): memo[id(own)] for own in self.tensors.values()}, parameters)
                updater.step()
                states = [value for state in updater.state.values() for value in state.values()]
                roots = [loss, *parameters, *(each.grad for each in parameters), *states]
        xm.set_rng_state(seed)
        tensors = [plain(each) for each in roots if isinstance(each, torch.Tensor) and on_xla(each)]
        self._roots = [each for each, waits in zip(tensors, pending(tensors), strict=True) if waits]

    def _stand_in(self, name: str, tensor: Any) -> Any:
        """Make the stand-in of a tensor and store it: one element on the device, broadcast to the tensor's shape."""
        import torch

        data = torch.zeros([1] * tensor.dim(), dtype=tensor.dtype, device="cpu").to("xla")
        made = data
        if tensor.dim():
            # XLA's builder would fold a plain broadcast into each of its uses.
            made = annotated(data.expand(tensor.shape), [_whole(tensor.dim())])
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        self._stand_ins[name] = made, data
        return made

    def capture(self, mesh: LiveMesh, marks: UserMarks) -> Capture:
        """Read the step as a program whose arguments are named as the module's parameters and buffers.

        Batch arrays are named by their place in the call. `marks` are the script's own marks.
        """
        import torch

        spread = {name: pair for name, pair in self._stand_ins.items() if self.tensors[name].dim()}
        known: dict[int, Known] = {}
        of_data = handles([data for _, data in spread.values()])
        for handle, (name, (made, _)) in zip(of_data, spread.items(), strict=True):
            role = Role.PARAMETER if isinstance(made, torch.nn.Parameter) else Role.OTHER
            known[handle] = Known(name, role, made, tuple(self.tensors[name].shape))
        ready = [
            each for each, waits in zip(self._batch, pending([t for _, t in self._batch]), strict=True) if not waits
        ]
        for handle, (name, tensor) in zip(handles([tensor for _, tensor in ready]), ready, strict=True):
            known.setdefault(handle, Known(name, Role.BATCH, tensor))
        ranks = {len(each.whole) for each in known.values() if each.whole is not None}
        # Stand-ins are constrained to be replicated, and PyTorch/XLA constrains their updates likewise.
        own = frozenset((mesh.write(Spec(((),) * rank)), rank) for rank in ranks)
        return capture(self._roots, [], known, self.trains, self._title, mesh, marks, own)

    def fixed(self, capture: Capture, mesh: LiveMesh) -> dict[int, Spec]:
        """Return the specs, by argument number, of parameters and buffers that the script has marked, if the mesh can
        express them.
        """
        specs = {}
        for number, argument in enumerate(capture.program.arguments):
            own = self.tensors.get(argument.name)
            text = sharding_text(plain(own)) if own is not None and on_xla(own) else ""
            spec = mesh.read(text, len(argument.shape)) if is_split(text) else None
            if spec is not None:
                specs[number] = spec
        return specs


def _tensors_of(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield parameters and buffers with their names; a tensor that a module has twice is yielded once."""
    from autoshard.exec.devices.torch_names import own_name

    for name, tensor in it.chain(module.named_parameters(), module.named_buffers()):
        yield own_name(name), tensor


def _whole(rank: int) -> Any:
    """Return the `_XLAC.OpSharding` of a tensor that is replicated on every device."""
    import numpy as np
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    mesh = xs.Mesh(np.arange(xr.global_runtime_device_count()), (xr.global_runtime_device_count(),), ("all",))
    return mesh.get_op_sharding((None,) * rank)


def _loss(output: Any) -> Any:
    """Return the output's loss as its mean, or the mean of the squares of its first differentiable tensor.

    Raises `UserError` if it has none.
    """
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is not None:
        return loss.float().mean()
    tensors = [tensor for _, tensor in leaves(output, "") if tensor.is_floating_point() and tensor.requires_grad]
    if not tensors:
        raise UserError("its output has no loss and no tensor that can be differentiated.")
    return tensors[0].float().square().mean()


def _updater(module: Any, copies: Mapping[int, Any], parameters: Sequence[Any]) -> Any:
    """Make an optimizer of the copies like the script's own; AdamW if none is found or none can be made.

    - `module`: module whose parameters the script's optimizer updates.
    - `copies`: copy of each of the module's tensors by the `id` of the original.
    - `parameters`: copies that AdamW would update.
    """
    import torch

    own = {id(parameter) for parameter in module.parameters()}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.optim.Optimizer):
            continue
        groups = [
            group | {"params": [copies[id(each)] for each in group["params"] if id(each) in own]}
            for group in thing.param_groups
        ]
        if any(group["params"] for group in groups):
            try:
                return type(thing)([group for group in groups if group["params"]])
            except Exception as error:  # its constructor needs other arguments
                log.warning("the first step is planned as one of AdamW: %s: %s", type(thing).__name__, error)
                break
    return torch.optim.AdamW(parameters)


def _evenly(tensor: Any, mesh: LiveMesh) -> Spec:
    """Return a spec that splits the largest divisible dim, the first of equal ones, over all axes; a whole spec if none
    divides.
    """
    axes = tuple(axis for axis, size in mesh.sizes.items() if size > 1)
    parts = math.prod(mesh.sizes[axis] for axis in axes)
    fit = [(size, -dim) for dim, size in enumerate(tensor.shape) if size % parts == 0]
    chosen = -max(fit)[1] if fit else None
    return Spec(tuple(axes if dim == chosen else () for dim in range(tensor.dim())))


def _make(module: Any, shardings: Mapping[str, Any]) -> None:
    """Materialise a module's meta tensors on the XLA devices; its parameters stay the same objects for an optimizer.

    `shardings` are `_XLAC.OpSharding`s by name; other tensors are replicated.
    """
    import torch

    before = {
        (inner, key): parameter
        for inner in module.modules()
        for key, parameter in inner.named_parameters(recurse=False)
    }
    move_marked(module, shardings)
    swapped: set[int] = set()
    for (inner, key), old in before.items():
        new = inner._parameters[key]
        if new is not old and id(old) not in swapped:
            torch.utils.swap_tensors(old, new)
            swapped.add(id(old))
        inner._parameters[key] = old
