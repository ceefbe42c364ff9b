"""Chips as data: one strict JSON file each, with units in the keys."""

import dataclasses
import difflib
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from autoshard.base.reading import read_json
from autoshard.cost._backend import BACKENDS, Backend
from autoshard.cost._chip_check import check_chip
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
    """The row of a chip's peak table for a dtype name: `bf16`, `f32`, `int8` or `fp8`.

    JAX, torch and MLIR spellings are understood (`bfloat16`, `torch.float32`, `f8E4M3FN`); wide integers and
    booleans are priced as `f32`, since no matrix unit takes them.
    """
    name = dtype.removeprefix("torch.").lower()
    if name.startswith(("f8", "float8")):
        return "fp8"
    return _DTYPE_CLASS.get(name, "f32")


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """What one kind of chip can do at best; measured efficiencies live in `Calibration`.

    Rates are per chip. `link_oneway_bytes_per_s` is one direction of one ICI link (TPU) or all NVLinks of one GPU
    together. `cores_per_chip` counts units that share `vmem_bytes`, each of which has its part of it to itself; two of
    them may be one device. `usable_bytes_per_device` is what a program may allocate (0: a share of the machine's
    memory).
    `small_shapes` are the shapes below one cube (or all shapes, for a 2-D torus); `cube_edge` 4 means that larger
    shapes are built of whole 4x4x4 cubes, and `wrap_rule` then says `cubes of 4`; `length 16` closes axes of 16 only.
    `device_kinds` is what the runtime calls a device of it. `sparse_core_collectives` and `fused_gathers` say whether
    its compiler runs collectives on SparseCores and fuses gathers with compute: `none`, `by flag` or `by default`.
    `compiler_config` is the chip configuration that libtpu has to be asked for, empty for its own.
    """

    name: str
    aliases: tuple[str, ...]
    device_kinds: tuple[str, ...]
    backend: str
    devices_per_chip: int
    peak_flops_per_s: Mapping[str, float]
    hbm_bytes: int
    usable_bytes_per_device: int
    memory_bytes_per_s: float
    link_oneway_bytes_per_s: float
    die_link_oneway_bytes_per_s: float
    network_bytes_per_s_per_chip: float
    pcie_bytes_per_s_per_chip: float
    torus_dims: int
    wrap_rule: str
    small_shapes: tuple[tuple[int, ...], ...]
    cube_edge: int
    max_chips: int
    host_shape: tuple[int, ...]
    cores_per_chip: int
    vmem_bytes: int
    vmem_over_hbm_bandwidth: float
    mxu_edge: int
    sublanes: int
    clock_hz: float
    sparse_core_collectives: str
    fused_gathers: str
    compiler_config: str
    sources: Mapping[str, str]

    @property
    def traits(self) -> Backend:
        """What sets the chip's backend apart."""
        return BACKENDS[self.backend]

    def __hash__(self) -> int:
        return hash(
            (self.name, self.memory_bytes_per_s, self.link_oneway_bytes_per_s, tuple(self.peak_flops_per_s.items()))
        )

    def peak_flops(self, dtype: str) -> float:
        """Peak multiply-add rate of one chip in FLOP/s (two per multiply-add) for operands of `dtype`."""
        return self.peak_flops_per_s[dtype_class(dtype)]


def chip_from_dict(data: Mapping[str, Any], origin: str) -> Chip:
    """Builds a chip from the content of a chip file; `origin` names the file in messages.

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
    """Reads one chip file. Raises: UserError if it cannot be read or is not exactly a chip."""
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
    return "".join(word.lower().split())


def chip_names() -> tuple[str, ...]:
    """Names of the chips that are known, without aliases."""
    return tuple(_chips())


def load_chip(name: str) -> Chip:
    """The chip of that name or alias. Raises: UserError with near matches for an unknown one."""
    wanted = name.lower()
    for chip in _chips().values():
        if wanted == chip.name or wanted in chip.aliases:
            return chip
    known = [alias for chip in _chips().values() for alias in (chip.name, *chip.aliases)]
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known chips are {', '.join(_chips())}"
    raise UserError(f"unknown chip {name!r}; {hint}")


def chip_of_kind(kind: str) -> Chip | None:
    """The chip whose devices the runtime calls `kind`, such as `TPU v5 lite`; None if none is known."""
    return next((chip for chip in _chips().values() if _plain(kind) in map(_plain, chip.device_kinds)), None)
