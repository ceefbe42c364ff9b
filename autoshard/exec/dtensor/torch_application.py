"""A plan on PyTorch modules: PyTorch/XLA marks, and DTensor placements on any device mesh."""

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from autoshard.errors import UserError
from autoshard.exec.devices.torch_names import mesh_sizes, own_name
from autoshard.exec.dtensor.dtensor_placements import placements_of
from autoshard.planning import Plan, Spec, is_stacked, layer_spec, module_pattern


if TYPE_CHECKING:
    from autoshard.exec.torch_xla_hook.values.live_marks import LiveMesh


@dataclasses.dataclass(frozen=True)
class TorchPlan:
    """Implementation of `Plan.mark`, `Plan.placements` and the other methods of `Plan` for torch."""

    plan: Plan

    def specs(self, model: Any) -> dict[str, Spec]:
        """Return the spec of every parameter of a module, by its name there.

        A parameter that the plan stacks over layers has the spec of one layer, without a split over the layers. Raises:
        UserError for a parameter that the plan does not have, or has in another shape.
        """
        known = {
            name: re.compile(module_pattern(self.plan, name))
            for name in self.plan.arguments
            if self.plan.is_weight(name)
        }
        specs: dict[str, Spec] = {}
        for name, parameter in model.named_parameters():
            plain = own_name(name)
            named = next((key for key, pattern in known.items() if pattern.match(plain)), None)
            if named is None:
                raise UserError(
                    f"the plan for {self.plan.program_name} has no parameter `{plain}`: plan this module, or mark the "
                    "one that was planned."
                )
            shape, spec = self.plan.shapes[named][is_stacked(named) :], layer_spec(self.plan, named)
            if tuple(parameter.shape) != shape:
                raise UserError(
                    f"parameter `{plain}` is of shape {list(parameter.shape)}, but the plan for "
                    f"{self.plan.program_name} has {list(shape)}: plan it again."
                )
            specs[name] = spec
        return specs

    def mark(self, model: Any) -> Any:
        """Move a module's parameters to the XLA devices, marked as planned, and return the module; see `Plan.mark`.

        Scalars are not marked. Raises `UserError` if SPMD mode is off, and as `specs` does.
        """
        import torch_xla.runtime as xr

        if not xr.is_spmd():
            raise UserError("plan.mark: SPMD mode is off; call torch_xla.runtime.use_spmd() first.")
        from autoshard.exec.torch_xla_hook.lifecycle.offline_marks import move_marked

        specs, mesh = self.specs(model), self._live_mesh()
        move_marked(model, {name: mesh.sharding(spec) for name, spec in specs.items() if spec.dims})
        return model

    def xla_mesh(self) -> Any:
        """Return the plan's `torch_xla.distributed.spmd.Mesh` with named axes, over the devices that are here. Raises
        as `xla_devices` does if they are not those of the plan's topology.
        """
        return self._live_mesh().mesh

    def _live_mesh(self) -> "LiveMesh":
        """Return the plan's mesh, in its own order of devices, over the devices that are here. Raises as `xla_devices`
        does if they are not those of the plan's topology.
        """
        from autoshard.exec.torch_xla_hook.planning.runtime_topology import xla_devices
        from autoshard.exec.torch_xla_hook.values.live_marks import LiveMesh

        return LiveMesh(self.plan.mesh, xla_devices(self.plan.topology, self.plan.device_order))

    def input_sharding(self) -> Any:
        """Return a value for `MpDeviceLoader(input_sharding=...)`; see `Plan.input_sharding`.

        It is one `ShardingSpec` if all inputs have one spec, else a dict of them by input. If a name is no identifier,
        it is an object that picks by shape. Raises `UserError` for a plan without a batch.
        """
        import torch_xla.distributed.spmd as xs

        from autoshard.exec.torch_xla_hook.pins.input_placement import inputs_by_shape
        from autoshard.exec.torch_xla_hook.values.live_marks import partition

        plan, mesh = self.plan, self._live_mesh()
        batch = {
            name.removeprefix("batch."): (plan.shapes[name], spec)
            for name, spec in plan.arguments.items()
            if plan.roles[name] == "batch"
        }
        if not batch:
            raise UserError(f"the plan for {plan.program_name} has no batch, so that there is nothing to load.")
        shardings = {name: xs.ShardingSpec(mesh.mesh, partition(spec)) for name, (_, spec) in batch.items()}
        if len({spec for _, spec in batch.values()}) == 1:
            return next(iter(shardings.values()))
        if all(name.isidentifier() for name in batch):
            return shardings
        return inputs_by_shape(batch, mesh)

    def placements(self, model: Any, mesh: Any) -> dict[str, tuple[Any, ...]]:
        """Return DTensor placements of every parameter of a module on a `DeviceMesh`, by name; see `Plan.placements`.

        Raises `UserError` if names or sizes of the mesh's axes are not the plan's, and for a parameter that does not
        fit (`specs`). Raises it also for a spec that DTensor cannot represent.
        """
        sizes = mesh_sizes(mesh)
        if sizes != self.plan.mesh:
            raise UserError(
                f"the device mesh is {sizes}, but the plan for {self.plan.program_name} is for {self.plan.mesh}: make "
                "the mesh with init_device_mesh(device, tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))."
            )
        return {name: placements_of(spec, sizes, name) for name, spec in self.specs(model).items()}

    def distribute(self, model: Any, mesh: Any, gather_outputs: bool = False) -> Any:
        """Distribute a module over a `DeviceMesh` as planned, in place, and return it; see `Plan.distribute`.

        `gather_outputs` makes outputs whole plain tensors. Raises `UserError` as `placements` does, for missing
        parameters, and for a module that has DTensors already.
        """
        places = self.placements(model, mesh)
        self._check_all_there(model)
        from autoshard.exec.dtensor.distributed_module import distribute

        return distribute(self.plan, model, mesh, places, gather_outputs)

    def _check_all_there(self, model: Any) -> None:
        """Raise `UserError` unless a module has each of the plan's weights exactly once, a stacked one once for each
        layer.
        """
        present = [own_name(name) for name, _ in model.named_parameters()]
        for name in self.plan.arguments:
            if self.plan.is_weight(name):
                count = sum(bool(re.match(module_pattern(self.plan, name), each)) for each in present)
                wanted = self.plan.shapes[name][0] if is_stacked(name) else 1
                if count != wanted:
                    raise UserError(
                        f"the module has {count} of the {wanted} `{name}` in the plan for {self.plan.program_name}: "
                        "distribute the module that was planned."
                    )


def distribution_notes(model: Any) -> tuple[str, ...]:
    """Return a sentence for each torch function that every device of a distributed module has run whole so far.

    Raises: UserError for a module that `Plan.distribute` was not called with.
    """
    from autoshard.exec.dtensor.distributed_module import notes_on

    return notes_on(model)
