"""Names of a torch module's parameters without those of wrappers, and axes of its device meshes."""

import re
from collections.abc import Iterator
from typing import Any


def own_name(name: str) -> str:
    """A parameter's name without what wrappers (FSDP, checkpointing, torch.compile) put into it."""
    return re.sub(
        r"(_orig_module|_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|_forward_module)\.", "", name
    )


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Axes and sizes of a `torch.distributed.device_mesh.DeviceMesh`; unnamed axes are named as ours are."""
    from autoshard.cost import default_axis_names

    sizes = tuple(int(size) for size in mesh.mesh.shape)
    return dict(zip(mesh.mesh_dim_names or default_axis_names(len(sizes)), sizes, strict=True))


def owned_parameters(model: Any) -> Iterator[tuple[Any, str, str, Any]]:
    """Owner, key, name and parameter; a shared parameter comes once for each owner, under its first name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in list(model.modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            yield module, key, names[id(parameter)], parameter
