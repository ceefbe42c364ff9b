"""Specs in XLA's notation of HLO shardings, and as GSPMD's grids of devices."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Mesh
from autoshard.errors import UserError
from autoshard.planning.record.spec import Spec


def hlo_sharding(spec: Spec, mesh: Mapping[str, int], device_order: Sequence[int] | None = None) -> str:
    """Return a spec in XLA's notation, such as `{devices=[1,2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}`.

    A spec that splits nothing is `{replicated}`; axes of size 1 are ignored. The numbers count positions of the mesh,
    row-major. With `device_order` (device of each position) they are devices, listed unless the order is 0, 1, ....
    Source: `HloSharding::ToString` (openxla/xla, xla/hlo/ir/hlo_sharding.cc) and its iota tile assignments.
    """
    split = [axis for axis in spec.axes if mesh[axis] > 1]
    if not split:
        return "{replicated}"
    axes = [axis for axis, size in mesh.items() if size > 1]
    rest = [axis for axis in axes if axis not in split]
    tiles = [math.prod(mesh[axis] for axis in dim) for dim in spec.dims]
    copies = math.prod(mesh[axis] for axis in rest)
    order = [axes.index(axis) for axis in (*split, *rest)]
    shape = ",".join(map(str, [*tiles, *([copies] if copies > 1 else [])]))
    sizes = [mesh[axis] for axis in axes]
    if device_order is not None and list(device_order) != list(range(len(device_order))):
        source = "]" + ",".join(map(str, _assignment(spec, mesh, device_order).tolist()))
    elif order == sorted(order):
        source = f"]<=[{math.prod(sizes)}]"
    else:
        source = f"]<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))})"
    return f"{{devices=[{shape}{source}{' last_tile_dim_replicate' if copies > 1 else ''}}}"


_TILED = re.compile(
    r"\{devices=\[(?P<tiles>[\d,]+)\](?:<=\[(?P<sizes>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<listed>[\d,]+))"
    r"(?P<partial> last_tile_dim_replicate)?\}"
)
"""Form of a tiled sharding: tiles, devices as an iota or listed, and the mark of a last entry for copies."""


def parse_hlo_sharding(
    text: str, rank: int, mesh: Mapping[str, int], device_order: Sequence[int] | None = None
) -> Spec:
    """Parse an HLO sharding string of a tensor with `rank` dims into a spec, the inverse of `hlo_sharding`.

    Accepted are replicated, tiled and partly replicated forms, with devices listed or as an iota. `device_order` has
    the device of each mesh position; None stands for 0, 1, .... Axes of size 1 are not used, and the first spec in the
    order of the mesh's axes wins.

    Raises `UserError` for other forms, another rank, and a tiling that the mesh's axes cannot express.
    """
    if text.strip() in ("{replicated}", "replicated"):
        return Spec.replicated(rank)
    dims, devices = tile_devices(text)
    if len(dims) != rank:
        raise UserError(f"{text!r} splits a tensor of {len(dims)} dims, but this one has {rank}.")
    for spec in _tilings(dims, mesh):
        ours = _assignment(spec, mesh, device_order)
        if ours.size == devices.size and _same(ours, devices, math.prod(dims)):
            return spec
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    raise UserError(f"{text!r} splits a tensor in a way that the axes of the mesh ({axes}) cannot express.")


def tile_devices(text: str) -> tuple[list[int], NDArray[np.int64]]:
    """Return the tiles of each dim in a tiled string, and the devices of every tile (tiles row-major, copies together).

    The tiles exclude the entry of copies. Raises `UserError` for a string of another form, `{replicated}` included, or
    one that does not name every device once.
    """
    match = _TILED.fullmatch(text.strip())
    if match is None:
        raise UserError(
            f"{text!r} is not a sharding that can be read: write {{replicated}} or "
            "{devices=[2,4]<=[8]}, with last_tile_dim_replicate or not."
        )
    tiles = _integers(match["tiles"])
    devices = _devices(match)
    if devices.size != math.prod(tiles) or sorted(devices.tolist()) != list(range(devices.size)):
        raise UserError(f"{text!r} lists {devices.size} devices for {math.prod(tiles)} tiles; each must occur once.")
    return (tiles[:-1] if match["partial"] else tiles), devices


def mesh_split(rank: int, dims_mapping: Sequence[int], mesh: Mapping[str, int]) -> Spec:
    """Return the spec of GSPMD's `mesh_split(tensor, mesh, dims_mapping)`.

    `dims_mapping` has for each dim the number of its mesh axis, or -1 for none. Source of the form: GSPMD (Xu et al.
    2021, arXiv 2105.04663), section 3.2. Raises `UserError` for a mapping of another length, an axis that the mesh does
    not have, or an axis that is used twice.
    """
    axes = list(mesh)
    if len(dims_mapping) != rank:
        raise UserError(
            f"dims_mapping {list(dims_mapping)} has {len(dims_mapping)} entries for a tensor of {rank} dims."
        )
    used = [axis for axis in dims_mapping if axis != -1]
    for axis in used:
        if not 0 <= axis < len(axes):
            raise UserError(f"dims_mapping {list(dims_mapping)} names axis {axis}, but the mesh has {len(axes)} axes.")
    if len(set(used)) != len(used):
        raise UserError(f"dims_mapping {list(dims_mapping)} uses an axis twice; each can split one dim.")
    return Spec(tuple(() if axis == -1 else (axes[axis],) for axis in dims_mapping))


def _integers(text: str) -> list[int]:
    """Return the integers of a list in text."""
    return [int(number) for number in text.split(",")]


def _devices(match: re.Match[str]) -> NDArray[np.int64]:
    """Return the devices of a matched string in its order, listed or as an iota."""
    if match["listed"]:
        return np.array(_integers(match["listed"]))
    sizes = _integers(match["sizes"])
    order = _integers(match["order"]) if match["order"] else list(range(len(sizes)))
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).ravel()


def _tilings(dims: Sequence[int], mesh: Mapping[str, int]) -> Iterator[Spec]:
    """Yield every spec with these numbers of tiles for each dim, in the order of the mesh's axes; axes of size 1 are
    not used.
    """

    def extend(done: tuple[tuple[str, ...], ...], free: tuple[str, ...]) -> Iterator[Spec]:
        """Yield the specs that begin with `done` and split further dims by the `free` axes."""
        if len(done) == len(dims):
            yield Spec(done)
            return
        for count in range(len(free) + 1):
            for axes in itertools.permutations(free, count):
                if math.prod(mesh[axis] for axis in axes) == dims[len(done)]:
                    yield from extend((*done, axes), tuple(axis for axis in free if axis not in axes))

    yield from extend((), tuple(axis for axis, size in mesh.items() if size > 1))


def _assignment(spec: Spec, mesh: Mapping[str, int], device_order: Sequence[int] | None) -> NDArray[np.int64]:
    """Return the devices of every tile, tiles row-major, the copies of one tile together.

    `device_order` has the device of each mesh position; None stands for 0, 1, .... Axes of size 1 are ignored.
    """
    axes = [axis for axis, size in mesh.items() if size > 1]
    split = [axis for axis in spec.axes if mesh[axis] > 1]
    order = [axes.index(axis) for axis in (*split, *(axis for axis in axes if axis not in split))]
    sizes = [mesh[axis] for axis in axes]
    devices = np.arange(math.prod(sizes)) if device_order is None else np.asarray(device_order)
    return devices.reshape(sizes).transpose(order).ravel()


def _same(one: NDArray[np.int64], other: NDArray[np.int64], tiles: int) -> bool:
    """Return True if two assignments of equal size give each of `tiles` tiles to the same devices, in any order of
    copies.
    """
    return bool((np.sort(one.reshape(tiles, -1)) == np.sort(other.reshape(tiles, -1))).all())


def tiled_axes(text: str, rank: int, mesh: Mesh, where: str) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the mesh axes that split each dim, from `{devices=[4,1,2]<=[8] last_tile_dim_replicate}` or
    similar.

    `where` names the place of the sharding in errors. The forms are those of XLA's `HloSharding::ToString`
    (openxla/xla, `xla/hlo/ir/hlo_sharding.cc`). Raises `UserError` for a sharding to one device or in a manual region,
    and for a grid that no choice of mesh axes gives.
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
