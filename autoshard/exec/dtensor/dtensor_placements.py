"""Specs as DTensor placements, and the reverse."""

from collections.abc import Mapping
from typing import Any

from autoshard.errors import UserError
from autoshard.planning import Spec, dims_by_axis, spec_text


def placements_of(spec: Spec, mesh: Mapping[str, int], name: str) -> tuple[Any, ...]:
    """Return `Shard` or `Replicate` for each mesh axis, in the mesh's order.

    - `mesh`: sizes of the axes by name.
    - `name`: tensor's name in the message.

    Raises `UserError` if axes split a dim in another order than the mesh's, which DTensor cannot represent.
    """
    from torch.distributed.tensor import Replicate, Shard

    dims = dims_by_axis(spec, mesh)
    if dims is None:
        raise UserError(
            f"`{name}` is split as {spec_text(spec)}, one dim by axes in another order than the mesh "
            f"({', '.join(mesh)}); DTensor cannot hold that: plan with a mesh whose axes are in the other order."
        )
    return tuple(Replicate() if dim is None else Shard(dim) for dim in dims)


def spec_of_placements(placements: Any, rank: int, mesh: Mapping[str, int]) -> Spec:
    """Return the spec of DTensor placements of a tensor with `rank` dims, the reverse of `placements_of`.

    Axes of one dim are in the mesh's order. Raises `UserError` for a partial or strided placement.
    """
    from torch.distributed.tensor import Replicate, Shard

    dims: list[tuple[str, ...]] = [()] * rank
    for axis, placement in zip(mesh, placements, strict=True):
        if type(placement) is Shard:
            dims[placement.dim % rank] += (axis,)
        elif type(placement) is not Replicate:
            raise UserError(f"a tensor placed as {placement} over {axis} is not split in a way that a spec can say.")
    return Spec(tuple(dims))
