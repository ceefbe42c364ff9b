"""What a chip file may say: figures of the right kind and of a size that chips have, and shapes that exist."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.cost._backend import BACKENDS
from autoshard.errors import UserError


BY_FLAG, BY_DEFAULT, NONE = "by flag", "by default", "none"
"""How a compiler comes to do something on a chip."""

SOURCES = ("peak_flops_per_s", "memory", "usable_bytes_per_device", "links", "network", "vmem", "compiler")

_RATE = (1e9, 1e15)
_RANGES: dict[str, tuple[float, float]] = {
    "devices_per_chip": (1, 16),
    "hbm_bytes": (1e9, 1e13),
    "usable_bytes_per_device": (1e9, 1e13),
    "memory_bytes_per_s": _RATE,
    "link_oneway_bytes_per_s": _RATE,
    "die_link_oneway_bytes_per_s": _RATE,
    "network_bytes_per_s_per_chip": (1e7, 1e13),
    "pcie_bytes_per_s_per_chip": (1e8, 1e13),
    "torus_dims": (0, 3),
    "cube_edge": (0, 64),
    "max_chips": (1, 1e6),
    "cores_per_chip": (1, 1024),
    "vmem_bytes": (1e5, 1e11),
    "vmem_over_hbm_bandwidth": (1, 1000),
    "mxu_edge": (1, 4096),
    "sublanes": (1, 1024),
    "clock_hz": (1e8, 1e11),
}
"""Figure -> its least and most, wide enough for any chip, and too narrow for GB where bytes are meant."""

_PEAKS = (1e9, 1e18)

_BINARY = 2**30 / 1e9
"""By how much memory may exceed its name: 16 GB are often 16 GiB."""


def check_chip(data: Mapping[str, Any], kinds: Mapping[str, Any], dtypes: Sequence[str], origin: str) -> None:
    """Refuse a chip file's content that is not of the kinds of the fields, or that no chip can have.

    `kinds` has the type of every field, all of which are there; `dtypes` are the rows of the table of peaks.
    Raises: UserError with one sentence that names the file (`origin`), the field, what it is and what was expected.
    """
    _check_kinds(data, kinds, origin)
    _expect(data["backend"] in BACKENDS, origin, "backend", data["backend"], " or ".join(BACKENDS))
    for name, (least, most) in _RANGES.items():
        _check_range(data, name, least, most, origin)
    _check_peaks(data["peak_flops_per_s"], dtypes, origin)
    share = data["hbm_bytes"] / data["devices_per_chip"] * _BINARY
    usable = data["usable_bytes_per_device"]
    _expect(
        usable <= share, origin, "usable_bytes_per_device", usable, f"at most {share:.4g}, a device's part of hbm_bytes"
    )
    for name in ("sparse_core_collectives", "fused_gathers"):
        _expect(
            data[name] in (NONE, BY_FLAG, BY_DEFAULT), origin, name, data[name], f"{NONE}, {BY_FLAG} or {BY_DEFAULT}"
        )
    missing = [name for name in SOURCES if not isinstance(data["sources"].get(name), str) or not data["sources"][name]]
    extra = sorted(set(data["sources"]) - set(SOURCES))
    _expect(not missing and not extra, origin, "sources", sorted(data["sources"]), f"one text for each of {SOURCES}")
    _check_shapes(data, origin)


def _expect(holds: bool, origin: str, name: str, found: object, expected: str) -> None:
    if not holds:
        raise UserError(f"chip file {origin}: {name} is {found!r}, expected {expected}")


def _check_kinds(data: Mapping[str, Any], kinds: Mapping[str, Any], origin: str) -> None:
    for name, kind in kinds.items():
        value = data[name]
        if kind is int:
            _expect(_whole(value), origin, name, value, "a whole number >= 0")
        elif kind is float:
            _expect(_number(value), origin, name, value, "a number")
        elif kind is str:
            _expect(isinstance(value, str), origin, name, value, "text")
        elif name in ("peak_flops_per_s", "sources"):
            _expect(isinstance(value, dict), origin, name, value, "an object")
        else:
            _expect(isinstance(value, list), origin, name, value, "a list")
    _expect(
        re.fullmatch(r"[a-z0-9][a-z0-9._-]*", data["name"]) is not None,
        origin,
        "name",
        data["name"],
        "a lower-case word",
    )
    for name in ("aliases", "device_kinds"):
        words = data[name]
        _expect(all(isinstance(word, str) and word.strip() for word in words), origin, name, words, "a list of texts")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_range(data: Mapping[str, Any], name: str, least: float, most: float, origin: str) -> None:
    value = data[name]
    may_lack = value == 0 and _may_lack(data, name)
    expected = f"{least:g} to {most:g}" + (", or 0 for none" if _may_lack(data, name) else "")
    _expect(may_lack or least <= value <= most, origin, name, value, expected)


def _may_lack(data: Mapping[str, Any], name: str) -> bool:
    """Whether a chip may have nothing of what a figure measures: devices that are threads of one machine do."""
    if name == "die_link_oneway_bytes_per_s":
        return data["devices_per_chip"] == 1
    if name.startswith("vmem"):
        return not BACKENDS[data["backend"]].tiled
    return BACKENDS[data["backend"]].shares_machine and ("bytes" in name) and name != "memory_bytes_per_s"


def _check_peaks(peaks: Mapping[str, Any], dtypes: Sequence[str], origin: str) -> None:
    if set(peaks) != set(dtypes):
        found = ", ".join(peaks) or "nothing"
        raise UserError(f"chip file {origin}: peak_flops_per_s has {found}, expected {', '.join(dtypes)}")
    least, most = _PEAKS
    for dtype, peak in peaks.items():
        within = _number(peak) and least <= peak <= most
        _expect(within, origin, f"peak_flops_per_s of {dtype}", peak, f"{least:g} to {most:g}")


def _check_shapes(data: Mapping[str, Any], origin: str) -> None:
    tpu, shapes = BACKENDS[data["backend"]].torus, data["small_shapes"]
    dims = data["torus_dims"] if tpu else 1
    of_dims = f"{dims} whole numbers >= 1"
    for shape in shapes:
        _expect(_is_shape(shape, dims), origin, "a shape of small_shapes", shape, of_dims)
    host = data["host_shape"]
    _expect(_is_shape(host, dims) or (host == [] and not tpu), origin, "host_shape", host, of_dims)
    _expect(math.prod(host) <= 128, origin, "host_shape", host, "at most 128 chips, those of one machine")
    if not tpu:
        return
    _expect(dims in (2, 3), origin, "torus_dims", dims, "2 or 3 on a TPU")
    _expect(bool(shapes), origin, "small_shapes", shapes, "one shape at least on a TPU")
    for shape in shapes:
        name, most = "a shape of small_shapes", data["max_chips"]
        _expect(math.prod(shape) <= most, origin, name, shape, f"at most {most} chips, the max_chips")
        _expect(tuple(shape) == in_order(shape), origin, name, shape, f"{list(in_order(shape))}, as it is looked up")
    _expect(bool(data["device_kinds"]), origin, "device_kinds", [], "what JAX's device_kind says of a TPU")
    edge, rule = data["cube_edge"], data["wrap_rule"]
    _expect(not edge or dims == 3, origin, "cube_edge", edge, "0 on a torus of 2 dims")
    cubes = f"cubes of {edge}" if edge else "length N, for axes of N chips"
    right = rule == cubes if edge else re.fullmatch(r"length [1-9][0-9]*", rule) is not None
    _expect(right, origin, "wrap_rule", rule, f"{cubes!r} with a cube_edge of {edge}")


def in_order(shape: Sequence[int]) -> tuple[int, ...]:
    """A TPU's shape as its sizes are written: ascending, but in 3 dims with those of 1 last (`2x2x1`)."""
    if len(shape) < 3:
        return tuple(sorted(shape))
    return tuple(sorted(size for size in shape if size > 1)) + (1,) * list(shape).count(1)


def _is_shape(shape: object, dims: int) -> bool:
    return isinstance(shape, list) and len(shape) == dims and all(_whole(size) and size >= 1 for size in shape)
