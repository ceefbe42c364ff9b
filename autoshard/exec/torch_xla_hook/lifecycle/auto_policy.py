"""Auto-sharding through PyTorch's own interface: `distribute_module(module, device_mesh, autoshard.auto_policy)`."""

import os
from typing import Any

from autoshard.cost import MESH_VARIABLE
from autoshard.errors import UserError
from autoshard.exec.devices.torch_names import mesh_sizes
from autoshard.exec.torch_xla_hook.lifecycle.enable import install, session
from autoshard.exec.torch_xla_hook.planning.runtime_topology import mesh_here


def plan_first_step(name: str, module: Any, device_mesh: Any) -> None:
    """Turn auto-sharding on for a module, as a `partition_fn` of `torch.distributed.tensor.distribute_module`.

    - `name`: name of the submodule; nothing is done unless it is empty, for the whole module.
    - `device_mesh`: `DeviceMesh` of XLA devices.

    The module is moved to the XLA device. Its first step is planned for a mesh with the axes and sizes of
    `device_mesh`, laid out on the topology.

    Raises `UserError` if the device mesh is not of XLA devices, or if the module is on the XLA device already. Also
    raises it if `XLA_AUTO_SPMD_MESH` names another mesh.

    PyTorch/XLA recognises its own policy, which sees no mesh, by its name. So this function has another name.
    """
    if name:
        return  # called for every submodule; the first call is for the whole
    if device_mesh.device_type != "xla":
        raise UserError(
            f"autoshard.auto_policy plans the first step of PyTorch/XLA, but the device mesh is of "
            f"{device_mesh.device_type}: plan first, and use autoshard.plan(...).distribute(model, device_mesh)."
        )
    early = [key for key, parameter in module.named_parameters() if parameter.device.type == "xla"]
    if early:
        raise UserError(
            f"`{early[0]}` is on the XLA device already: give distribute_module the module on the host, which is moved "
            "once SPMD mode is on."
        )
    import torch_xla.runtime as xr

    sizes = mesh_sizes(device_mesh)
    if os.environ.get(MESH_VARIABLE, "").strip() and mesh_here() != sizes:
        raise UserError(
            f"{MESH_VARIABLE}={os.environ[MESH_VARIABLE]} says another mesh than the device mesh given to "
            f"distribute_module, {sizes}: unset the variable, or give the same mesh."
        )
    install()
    xr.use_spmd(auto=True)
    made = session()
    assert made is not None
    made.mesh = sizes
    module.to("xla")
