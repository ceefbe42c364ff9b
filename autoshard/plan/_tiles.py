"""GSPMD's own way to write a sharding: a grid of devices per dim, without names; here the mesh axes it means."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Mesh
from autoshard.errors import UserError


_DEVICES = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))?")


def tiled_axes(text: str, rank: int, mesh: Mesh, where: str) -> tuple[tuple[int, ...], ...]:
    """Mesh axes (by number) that split each dim, from `{devices=[4,1,2]<=[8] last_tile_dim_replicate}` or the like.

    The forms are those of XLA's `HloSharding::ToString` (openxla/xla, `xla/hlo/ir/hlo_sharding.cc`). Raises `UserError`
    for one that is for one device or a region by hand, and for a grid that no choice of mesh axes gives.
    """
    match = _DEVICES.search(text)
    if match is None or "manual" in text:
        if "replicated" in text and match is None:
            return ((),) * rank
        raise UserError(f"{where} asks for {text}, which no plan over {_axes(mesh)} can hold: take it out.")
    tiles = _numbers(match[1])
    devices = _grid(match, math.prod(tiles))
    for choice in _choices(tiles[:rank], mesh):
        if devices.size == mesh.num_devices and _same(devices, _laid(choice, tiles[:rank], mesh)):
            return choice
    raise UserError(
        f"{where} asks for {text}, a grid of devices that no axes of the mesh {_axes(mesh)} give: plan with a --mesh "
        f"that has axes of {' and '.join(str(n) for n in tiles if n > 1)} devices."
    )


def _axes(mesh: Mesh) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.axes.items())


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in text.split(",")] if text else []


def _grid(match: re.Match[str], count: int) -> NDArray[np.int64]:
    """Devices of every tile: [tiles, devices that share it]."""
    tiles, listed, order = _numbers(match[1]), _numbers(match[4]), _numbers(match[3])
    if listed:
        return np.array(listed, dtype=np.int64).reshape(tiles)
    devices = np.arange(count).reshape(_numbers(match[2]) or [count])
    return (devices.transpose(order) if order else devices).reshape(tiles)


def _choices(tiles: Sequence[int], mesh: Mesh) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to give each dim axes whose sizes multiply to its tiles, no axis twice."""
    real = [a for a, size in enumerate(mesh.sizes) if size > 1]
    groups = [g for n in range(len(real) + 1) for g in itertools.combinations(real, n)]
    fitting = [[g for g in groups if math.prod(mesh.sizes[a] for a in g) == tile] for tile in tiles]
    for choice in itertools.product(*fitting):
        used = [a for group in choice for a in group]
        if len(used) == len(set(used)):
            yield choice


def _laid(choice: Sequence[Sequence[int]], tiles: Sequence[int], mesh: Mesh) -> NDArray[np.int64]:
    used = [a for group in choice for a in group]
    rest = [a for a in range(len(mesh.sizes)) if a not in used]
    devices = np.arange(mesh.num_devices).reshape(mesh.sizes).transpose([*used, *rest])
    return devices.reshape([*tiles, -1])


def _same(grid: NDArray[np.int64], laid: NDArray[np.int64]) -> bool:
    """Equal but for the order of devices that hold the same tile."""
    flat = grid.reshape(laid.shape)
    return bool((np.sort(flat, axis=-1) == np.sort(laid, axis=-1)).all())
