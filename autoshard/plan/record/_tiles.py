"""GSPMD's own way to write a sharding: a grid of devices per dim, without names; here the mesh axes it means."""

from autoshard.cost import Mesh
from autoshard.errors import UserError
from autoshard.plan.record._notation import parse_hlo_sharding, tile_devices


def tiled_axes(text: str, rank: int, mesh: Mesh, where: str) -> tuple[tuple[int, ...], ...]:
    """Mesh axes (by number) that split each dim, from `{devices=[4,1,2]<=[8] last_tile_dim_replicate}` or the like.

    The forms are those of XLA's `HloSharding::ToString` (openxla/xla, `xla/hlo/ir/hlo_sharding.cc`). Raises `UserError`
    for one that is for one device or a region by hand, and for a grid that no choice of mesh axes gives.
    """
    axes = ",".join(f"{name}={size}" for name, size in mesh.axes.items())
    replicated = text.strip() in ("{replicated}", "replicated")
    try:
        tiles = [] if replicated else tile_devices(text)[0]
    except UserError as error:
        raise UserError(f"{where} asks for {text}, which no plan over {axes} can hold: take it out.") from error
    try:
        spec = parse_hlo_sharding(text, rank, mesh.axes)
    except UserError as error:
        raise UserError(
            f"{where} asks for {text}, a grid of devices that no axes of the mesh {axes} give: plan with a --mesh "
            f"that has axes of {' and '.join(str(n) for n in tiles if n > 1)} devices."
        ) from error
    names = list(mesh.axes)
    return tuple(tuple(names.index(name) for name in dim) for dim in spec.dims)
