"""Tables of the names that a user can give: bundled models, chips and topologies."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from autoshard.base.units import format_bytes, format_count
from autoshard.cost import chip_names, find_topologies, load_chip, slice_shapes
from autoshard.program import bundled, read_config
from autoshard.serving import config_decoder


_PATTERN = "*:*"
"""Pattern that matches every topology."""


def model_rows() -> list[dict[str, Any]]:
    """List the bundled configurations; `parameters` and `layers` are None unless the configuration alone gives them."""
    rows = []
    for name in bundled():
        decoder = config_decoder(f"hf:{name}")
        rows.append(
            {
                "name": f"hf:{name}",
                "type": read_config(name)[1]["model_type"],
                "parameters": None if decoder is None else decoder.params,
                "layers": None if decoder is None else decoder.layers,
            }
        )
    return rows


def chip_rows() -> list[dict[str, Any]]:
    """List the chips: name, aliases, and for one chip bf16 peak, usable bytes and bandwidth of memory, and devices.

    `memory_bytes` is what programs may allocate on a chip, as in `topology_rows` and in plans. It is None for a CPU,
    which shares the machine's memory.
    """
    chips = [load_chip(name) for name in chip_names()]
    return [
        {
            "name": chip.name,
            "also": list(chip.aliases),
            "peak_flops_per_s": chip.peak_flops_per_s["bf16"],
            "memory_bytes": chip.usable_bytes_per_device * chip.devices_per_chip or None,
            "memory_bytes_per_s": chip.memory_bytes_per_s,
            "devices": chip.devices_per_chip,
        }
        for chip in chips
    ]


def topology_rows(pattern: str | None = None) -> list[dict[str, Any]]:
    """List the topologies that match a pattern, or all of one slice, with chips, devices and the slice's cloud name.

    A chip's name stands for its topologies of one slice. `memory_bytes` is the usable memory of all devices. `slice` is
    None for several slices and for a slice without name.

    Raises `UserError` for a pattern that matches none.
    """
    chips = {alias for chip in map(load_chip, chip_names()) for alias in (chip.name, *chip.aliases)}
    name = pattern.strip().lower() if pattern else _PATTERN
    if name in chips or not set(":*-") & set(name):
        pattern = f"{load_chip(name).name}:*"
    topologies = find_topologies(pattern or _PATTERN)
    topologies = topologies if pattern else tuple(sorted(topologies, key=lambda each: (each.chip.name, each.num_chips)))
    names = {(chip, shape): name for chip in chip_names() for name, shape in slice_shapes(load_chip(chip)).items()}
    return [
        {
            "name": each.name,
            "chips": each.num_chips,
            "devices": each.num_devices,
            "memory_bytes": each.usable_bytes * each.num_devices,
            "slice": names.get((each.chip.name, each.shape)) if each.slices == 1 else None,
        }
        for each in topologies
    ]


_SHOWN = {
    "name": ("name", str),
    "type": ("type", str),
    "also": ("also", ", ".join),
    "parameters": ("parameters", format_count),
    "layers": ("layers", str),
    "chips": ("chips", str),
    "devices": ("devices", str),
    "peak_flops_per_s": ("bf16", lambda value: format_count(value, "FLOP/s")),
    "memory_bytes": ("memory", format_bytes),
    "memory_bytes_per_s": ("bandwidth", lambda value: format_count(value, "B/s")),
    "slice": ("slice", str),
}
"""Key of a row -> the title of its column, and the function that formats its values."""


def listing_report(rows: Sequence[dict[str, Any]]) -> RenderableType:
    """Return a terminal table with one line for each row, at least one; their keys name the columns, None is blank."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    keys = list(rows[0])
    for key in keys:
        justify = "left" if key in ("name", "type", "also", "slice") else "right"
        table.add_column(_SHOWN[key][0], justify=justify, no_wrap=key == "name")
    for row in rows:
        table.add_row(*("" if row[key] is None else _SHOWN[key][1](row[key]) for key in keys))
    return table
