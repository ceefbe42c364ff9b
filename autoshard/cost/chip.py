"""Chips as data: one strict JSON file for each chip, with units in the keys."""

import dataclasses
import difflib
import functools
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.base.files import read_json
from autoshard.cost.backend import BACKENDS, Backend
from autoshard.errors import UserError


_FOLDER = pathlib.Path(__file__).with_name("chips")

_DTYPES = {
    "bf16": ("bf16", "bfloat16", "f16", "float16", "half"),
    "f32": ("f32", "float32", "float", "tf32", "f64", "float64", "double"),
    "int8": ("int8", "s8", "si8", "i8", "ui8", "u8", "uint8", "int4", "s4", "i4", "uint4", "u4"),
    "fp8": ("fp8", "float8"),
}
_DTYPE_CLASS = {name: cls for cls, names in _DTYPES.items() for name in names}


def dtype_class(dtype: str) -> str:
    """Return the row of a chip's peak table for a dtype name: `bf16`, `f32`, `int8` or `fp8`.

    JAX, torch and MLIR spellings are understood (`bfloat16`, `torch.float32`, `f8E4M3FN`). `float16` counts as `bf16`,
    and 4-bit integers as `int8`. Any other name is `f32`, also an unknown one: no matrix unit computes with wide
    integers and booleans.
    """
    name = dtype.removeprefix("torch.").lower()
    if name.startswith(("f8", "float8")):
        return "fp8"
    return _DTYPE_CLASS.get(name, "f32")


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """Peak figures of one kind of chip; measured efficiencies live in `Calibration`."""

    name: str
    """Lower-case name, such as `v5e`; the name of the chip's file."""
    aliases: tuple[str, ...]
    """Other names that `load_chip` accepts for the chip."""
    device_kinds: tuple[str, ...]
    """Names that the runtime gives to a device of the chip, such as `TPU v5 lite`."""
    backend: str
    """Name of its `Backend`: `tpu`, `gpu` or `cpu`."""
    devices_per_chip: int
    """Devices that JAX counts on one chip."""
    peak_flops_per_s: Mapping[str, float]
    """Peak FLOP/s of one chip by the class of its operands' dtype (`dtype_class`)."""
    hbm_bytes: int
    """Bytes of main memory of one chip."""
    usable_bytes_per_device: int
    """Bytes that a program may allocate on a device; 0 for a share of the machine's memory."""
    memory_bytes_per_s: float
    """Peak main-memory bandwidth of one chip in bytes per second."""
    link_oneway_bytes_per_s: float
    """Bytes per second in one direction of one ICI link (TPU), or of all NVLinks of one GPU together."""
    die_link_oneway_bytes_per_s: float
    """Bytes per second in one direction between two devices of one chip; 0 with one device."""
    network_bytes_per_s_per_chip: float
    """Bytes per second of one chip's share of the network between slices or islands."""
    pcie_bytes_per_s_per_chip: float
    """Bytes per second of one chip to or from its host's memory."""
    torus_dims: int
    """Dims of a slice's torus: 2 or 3 on a TPU, not used elsewhere."""
    wrap_rule: str
    """Rule that closes torus axes to rings: `cubes of 4` in shapes of whole cubes, `length 16` for axes of 16 chips."""
    small_shapes: tuple[tuple[int, ...], ...]
    """Shapes smaller than one cube; on a 2-D torus all shapes of a slice."""
    cube_edge: int
    """Edge of the cubes that larger shapes are built of: 4 for whole 4x4x4 cubes, 0 for none."""
    max_chips: int
    """Most chips in one slice, island or machine."""
    host_shape: tuple[int, ...]
    """Shape of the chips that one host serves."""
    cores_per_chip: int
    """Units of one chip that each own a part of `vmem_bytes`; one device may contain two of them."""
    vmem_bytes: int
    """Bytes of on-chip memory (VMEM) of all cores of one chip."""
    vmem_over_hbm_bandwidth: float
    """Bandwidth of on-chip memory as a multiple of main memory's bandwidth; 0 without on-chip memory."""
    mxu_edge: int
    """Rows and columns of a matrix unit's tile; on a CPU the size of a matmul dim that runs at half the peak rate."""
    sublanes: int
    """Rows that stream through the matrix unit as one group."""
    clock_hz: float
    """Clock of the compute units in Hz."""
    sparse_core_collectives: str
    """Condition on which the compiler runs collectives on SparseCores: `none`, `by flag` or `by default`."""
    fused_gathers: str
    """Condition on which the compiler fuses gathers with compute: `none`, `by flag` or `by default`."""
    compiler_config: str
    """Chip configuration that libtpu is asked for; empty for libtpu's default."""
    sources: Mapping[str, str]
    """Source of each group of figures in `SOURCES`."""

    @property
    def loops_weight_gathers(self) -> bool:
        """True if the compiler walks gathers of weights at wide matmuls in loops of permutes.

        libtpu 0.0.51 does so where SparseCores run collectives by default, and on no other TPU.
        """
        return self.sparse_core_collectives == BY_DEFAULT

    @property
    def traits(self) -> Backend:
        """The traits of the chip's backend."""
        return BACKENDS[self.backend]

    def __hash__(self) -> int:
        """Hash the name and the main rates, since mappings such as `sources` have no hash."""
        return hash(
            (self.name, self.memory_bytes_per_s, self.link_oneway_bytes_per_s, tuple(self.peak_flops_per_s.items()))
        )

    def peak_flops(self, dtype: str) -> float:
        """Return the peak FLOP/s of one chip for operands of `dtype`; a multiply-add is two FLOPs."""
        return self.peak_flops_per_s[dtype_class(dtype)]


def chip_from_dict(data: Mapping[str, Any], origin: str) -> Chip:
    """Build a chip from the content of a chip file; `origin` names the file in messages.

    Raises: UserError for a missing or extra key, a value of the wrong kind, and a figure that no chip has.
    """
    fields = [field.name for field in dataclasses.fields(Chip)]
    missing = [name for name in fields if name not in data]
    extra = sorted(data.keys() - set(fields))
    if missing or extra:
        parts = [f"misses {', '.join(missing)}"] if missing else []
        parts += [f"has the unknown key {', '.join(extra)}"] if extra else []
        raise UserError(
            f"chip file {origin} {' and '.join(parts)}; a chip file has exactly the keys {', '.join(fields)}"
        )
    check_chip(data, {field.name: field.type for field in dataclasses.fields(Chip)}, tuple(_DTYPES), origin)
    values = dict(data)
    for name in ("aliases", "device_kinds", "host_shape"):
        values[name] = tuple(values[name])
    values["small_shapes"] = tuple(tuple(shape) for shape in values["small_shapes"])
    return Chip(**values)


def load_chip_file(path: str | pathlib.Path) -> Chip:
    """Read one chip file. Raises: UserError if it cannot be read or is not exactly a chip."""
    try:
        data = read_json(path)
    except OSError as error:
        raise UserError(f"chip file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"chip file {path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"chip file {path} holds a {type(data).__name__}, expected an object of chip keys")
    return chip_from_dict(data, str(path))


@functools.cache
def _chips() -> dict[str, Chip]:
    """Load the chip files of the package by the chip's name, sorted by file name.

    Raises: UserError for an invalid file, for a file without its chip's name, and if two chips share a name, alias or
    device kind.
    """
    chips: dict[str, Chip] = {}
    words: dict[str, str] = {}
    for path in sorted(_FOLDER.glob("*.json")):
        chip = load_chip_file(path)
        if chip.name != path.stem:
            raise UserError(f"chip file {path}: name is {chip.name!r}, expected {path.stem!r}, as the file is called")
        for field in ("name", "aliases", "device_kinds"):
            given = getattr(chip, field)
            for word in (given,) if isinstance(given, str) else given:
                key = f"{field == 'device_kinds'} {_plain(word)}"
                if words.setdefault(key, chip.name) != chip.name:
                    raise UserError(f"chip file {path}: {field} has {word!r}, which {words[key]} is called already")
        chips[chip.name] = chip
    return chips


def _plain(word: str) -> str:
    """Normalise a name: lower case, without spaces."""
    return "".join(word.lower().split())


def chip_names() -> tuple[str, ...]:
    """Return the names of the known chips, without aliases."""
    return tuple(_chips())


def load_chip(name: str) -> Chip:
    """Return the chip with that name or alias, in upper or lower case.

    Raises: UserError with near matches for an unknown one.
    """
    wanted = name.lower()
    for chip in _chips().values():
        if wanted == chip.name or wanted in chip.aliases:
            return chip
    known = [alias for chip in _chips().values() for alias in (chip.name, *chip.aliases)]
    near = difflib.get_close_matches(wanted, known, n=8, cutoff=0.5)
    near = sorted(near, key=lambda each: -len(os.path.commonprefix([each, wanted])))[:3]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known chips are {', '.join(_chips())}"
    raise UserError(f"unknown chip {name!r}; {hint}")


def chip_of_kind(kind: str) -> Chip | None:
    """Return the chip whose devices the runtime calls `kind`, such as `TPU v5 lite`; None if no chip is known by it.

    Upper case and spaces do not count.
    """
    return next((chip for chip in _chips().values() if _plain(kind) in map(_plain, chip.device_kinds)), None)


BY_FLAG, BY_DEFAULT, NONE = "by flag", "by default", "none"
"""Conditions on which a compiler applies an optimisation on a chip."""

# Groups of figures for which every chip file must cite a source.
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
"""Figure -> its least and most value.

The ranges are wide enough for any chip, and too narrow for GB where bytes are meant.
"""

_PEAKS = (1e9, 1e18)
"""Least and most FLOP/s of a peak."""

_BINARY = 2**30 / 1e9
"""Factor by which memory may exceed its nominal size: 16 GB are often 16 GiB."""


def check_chip(data: Mapping[str, Any], kinds: Mapping[str, Any], dtypes: Sequence[str], origin: str) -> None:
    """Refuse a chip file's content with wrong types, with missing sources, or with figures that no chip can have.

    `kinds` has the type of every field, all of which are in `data`; `dtypes` are the rows of the table of peaks.
    `sources` must have one text for each of `SOURCES`. Raises: UserError with one sentence that names the file
    (`origin`), the field, its value and the expected value.
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
    """Raise a UserError that names file, field, value and expectation, unless `holds`."""
    if not holds:
        raise UserError(f"chip file {origin}: {name} is {found!r}, expected {expected}")


def _check_kinds(data: Mapping[str, Any], kinds: Mapping[str, Any], origin: str) -> None:
    """Refuse values without the types of their fields, a name that is no lower-case word, and aliases or device kinds
    that are blank. Aliases with upper-case letters are refused too.

    Elements of other lists are not checked.
    """
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
    aliases = data["aliases"]
    # `load_chip` looks names up in lower case.
    _expect(all(word == word.lower() for word in aliases), origin, "aliases", aliases, "lower-case texts")


def _whole(value: object) -> bool:
    """Return True for an int of at least 0 that is no boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: object) -> bool:
    """Return True for an int or a float that is no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_range(data: Mapping[str, Any], name: str, least: float, most: float, origin: str) -> None:
    """Refuse, by a UserError, a figure outside its range; 0 passes where a chip may lack the thing (`_may_lack`)."""
    value = data[name]
    may_lack = value == 0 and _may_lack(data, name)
    expected = f"{least:g} to {most:g}" + (", or 0 for none" if _may_lack(data, name) else "")
    _expect(may_lack or least <= value <= most, origin, name, value, expected)


def _may_lack(data: Mapping[str, Any], name: str) -> bool:
    """Return True if a chip may lack the thing that a figure measures.

    A chip of one device lacks links between devices of a chip, and a backend without tiles lacks on-chip memory. A CPU
    may lack all figures in bytes but `memory_bytes_per_s`.
    """
    if name == "die_link_oneway_bytes_per_s":
        return data["devices_per_chip"] == 1
    if name.startswith("vmem"):
        return not BACKENDS[data["backend"]].tiled
    return BACKENDS[data["backend"]].shares_machine and ("bytes" in name) and name != "memory_bytes_per_s"


def _check_peaks(peaks: Mapping[str, Any], dtypes: Sequence[str], origin: str) -> None:
    """Refuse a table of peaks with other dtypes than `dtypes`, or with a peak outside its range."""
    if set(peaks) != set(dtypes):
        present = ", ".join(peaks) or "nothing"
        raise UserError(f"chip file {origin}: peak_flops_per_s has {present}, expected {', '.join(dtypes)}")
    least, most = _PEAKS
    for dtype, peak in peaks.items():
        within = _number(peak) and least <= peak <= most
        _expect(within, origin, f"peak_flops_per_s of {dtype}", peak, f"{least:g} to {most:g}")


def _check_shapes(data: Mapping[str, Any], origin: str) -> None:
    """Refuse shapes, hosts, cubes and wrap rules that do not fit the backend, `max_chips` or one another.

    A TPU without device kinds is refused too.
    """
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
    _expect(bool(data["device_kinds"]), origin, "device_kinds", [], "JAX's device_kind of a TPU")
    edge, rule = data["cube_edge"], data["wrap_rule"]
    _expect(not edge or dims == 3, origin, "cube_edge", edge, "0 on a torus of 2 dims")
    cubes = f"cubes of {edge}" if edge else "length N, for axes of N chips"
    right = rule == cubes if edge else re.fullmatch(r"length [1-9][0-9]*", rule) is not None
    _expect(right, origin, "wrap_rule", rule, f"{cubes!r} with a cube_edge of {edge}")


def in_order(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a TPU's shape in its usual order: sizes ascending, but in 3 dims with sizes of 1 last (`2x2x1`)."""
    if len(shape) < 3:
        return tuple(sorted(shape))
    return tuple(sorted(size for size in shape if size > 1)) + (1,) * list(shape).count(1)


def _is_shape(shape: object, dims: int) -> bool:
    """Return True for a list of `dims` whole numbers of at least 1."""
    return isinstance(shape, list) and len(shape) == dims and all(_whole(size) and size >= 1 for size in shape)
