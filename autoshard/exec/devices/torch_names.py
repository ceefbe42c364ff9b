"""Names of a torch module's parameters without those of wrappers, and axes of its device meshes."""

import re
from collections.abc import Iterator
from typing import Any


def own_name(name: str) -> str:
    """Remove every part that wrappers (FSDP, checkpointing, torch.compile) insert into a parameter's dotted name."""
    return re.sub(
        r"(_orig_module|_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|_forward_module)\.", "", name
    )


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Map the axes to the sizes of a `torch.distributed.device_mesh.DeviceMesh`; a mesh without names gets our default
    names.
    """
    from autoshard.cost import default_axis_names

    sizes = tuple(int(size) for size in mesh.mesh.shape)
    return dict(zip(mesh.mesh_dim_names or default_axis_names(len(sizes)), sizes, strict=True))


def owned_parameters(model: Any) -> Iterator[tuple[Any, str, str, Any]]:
    """Yield owning module, key there, dotted name and parameter; a shared parameter appears once for each owner, under
    its first name.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in list(model.modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            yield module, key, names[id(parameter)], parameter
