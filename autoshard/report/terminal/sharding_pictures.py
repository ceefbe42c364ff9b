"""Pictures of shardings in the terminal: the devices that store each part of a tensor."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import UserError
from autoshard.planning import Spec, tile_devices


Placed = dict[tuple[tuple[int, int], ...], tuple[int, ...]]
"""Devices that store each part of a tensor, where a part is the (start, end) of every dim."""

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta", "bright_green")


def visualize_sharding(sharding: str, shape: Sequence[int] | None = None, **options: Any) -> Any:
    """Draw an HLO sharding string such as `{devices=[2,2]<=[4]}` of a tensor with at most two split dims.

    `shape` is that of the tensor; without it every tile counts as one element. The options are `console` (a
    `rich.console.Console`; None draws nothing, and the default is standard output) and `width` in columns. Returns the
    `rich` table.

    Raises `UserError` for a string that cannot be read, one of another number of dims, or one that splits more than
    two.
    """
    return _draw(parts_of_string(sharding, shape), **options)


def visualize_spec(
    spec: Spec, shape: Sequence[int], mesh: dict[str, int], device_order: Sequence[int] | None = None, **options: Any
) -> Any:
    """Draw how a spec splits a tensor of this shape over a mesh, and return the table; see `visualize_sharding`.

    - `mesh`: sizes of the axes by name.
    - `device_order`: number of the device at each place of the mesh, row by row; None for ascending numbers.
    """
    from autoshard.planning import hlo_sharding

    return visualize_sharding(hlo_sharding(spec, mesh, device_order), shape, **options)


def visualize_tensor_sharding(tensor: Any, **options: Any) -> Any:
    """Draw how a JAX array or a PyTorch/XLA tensor is split, and return the table; see `visualize_sharding`.

    A tensor without a sharding counts as replicated.

    Raises `UserError` for any other object, and for a tensor that this process stores only in part.
    """
    shape = tuple(int(size) for size in tensor.shape)
    if hasattr(tensor, "sharding") and hasattr(tensor.sharding, "devices_indices_map"):
        placed: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for device, index in tensor.sharding.devices_indices_map(shape).items():
            part = tuple(
                (s.start or 0, size if s.stop is None else s.stop) for s, size in zip(index, shape, strict=True)
            )
            placed.setdefault(part, []).append(device.id)
        return _draw({part: tuple(sorted(devices)) for part, devices in placed.items()}, **options)
    tensor = getattr(tensor, "global_tensor", tensor)
    if getattr(getattr(tensor, "device", None), "type", None) != "xla":
        raise UserError(
            f"visualize_tensor_sharding draws JAX arrays and tensors on the XLA device, not a {type(tensor).__name__}."
        )
    from autoshard.exec.torch_xla_hook import sharding_text

    text = sharding_text(tensor)
    return _draw(parts_of_string(text or "{replicated}", shape, _devices_here()), **options)


def _devices_here() -> int:
    """Return the number of devices of all PyTorch/XLA processes."""
    import torch_xla.runtime as xr

    return xr.global_runtime_device_count()


def parts_of_string(text: str, shape: Sequence[int] | None = None, devices: int | None = None) -> Placed:
    """Return the parts that an HLO sharding string makes, with the devices of each.

    A replicated tensor is one part on all `devices`, or on none if their number is not given. The last parts of a dim
    that does not divide evenly are shorter or empty. Without a shape every tile is one element.

    Raises `UserError` if the string cannot be read, or if the shape has another number of dims.
    """
    if text.strip() in ("{replicated}", "replicated"):
        whole_part = tuple((0, int(size)) for size in (shape or (1,)))
        return {whole_part: tuple(range(devices or 0))}
    tiles, assigned = tile_devices(text)
    sizes = tuple(tiles) if shape is None else tuple(int(size) for size in shape)
    if len(sizes) != len(tiles):
        raise UserError(f"{text!r} splits a tensor of {len(tiles)} dims, but this one has {len(sizes)}.")
    grid: NDArray[np.int64] = assigned.reshape(*tiles, -1)
    placed: Placed = {}
    for place in np.ndindex(*tiles):
        spans = []
        for index, tile, size in zip(place, tiles, sizes, strict=True):
            step = -(-size // tile)
            spans.append((min(index * step, size), min((index + 1) * step, size)))
        # Several tiles are empty if a dim has fewer elements than tiles: they are one part.
        part = tuple(spans)
        placed[part] = tuple(sorted([*placed.get(part, ()), *map(int, grid[place])]))
    return placed


def _draw(placed: Placed, console: Any = ..., width: int = 48) -> Any:
    """Draw parts as a table, print it on the console and return it.

    Rows are parts of the first drawn dim, columns of the second. Parts on the same devices have one colour. Without
    split dims the first two are drawn.

    - `console`: None prints nothing; without it the table goes to standard output.
    - `width`: columns of the whole table; a cell has at least 4.

    Raises `UserError` for more than two split dims.
    """
    from rich.align import Align
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    split = [dim for dim in range(len(next(iter(placed)))) if len({part[dim] for part in placed}) > 1]
    if len(split) > 2:
        raise UserError(f"a tensor that is split over {len(split)} dims cannot be drawn; two is the most.")
    shown = split if len(split) == 2 else [*split, *(d for d in range(len(next(iter(placed)))) if d not in split)][:2]
    shown = sorted(shown)
    rows = sorted({part[shown[0]] for part in placed}) if shown else [(0, 1)]
    columns = sorted({part[shown[1]] for part in placed}) if len(shown) > 1 else [(0, 1)]
    devices_of = {tuple(part[dim] for dim in shown): devices for part, devices in placed.items()}
    table = Table(show_header=False, show_lines=True, padding=0, pad_edge=False)
    for _ in columns:
        table.add_column(justify="center")
    cell = max(width // len(columns), 4)
    colours: dict[tuple[int, ...], str] = {}
    for row in rows:
        cells = []
        for column in columns:
            key = (row, column)[: len(shown)]
            devices = devices_of[key]
            colour = colours.setdefault(devices, _COLOURS[len(colours) % len(_COLOURS)])
            text = ",".join(map(str, devices)) if devices else "every device"
            cells.append(Padding(Align(text, "center", width=max(cell, len(text))), (1, 0), style=f"black on {colour}"))
        table.add_row(*cells)
    if console is ...:
        console = Console()
    if console is not None:
        console.print(table)
    return table
