"""The physical machine: chips on a torus, slices or islands, and the numbers of their devices."""

import dataclasses
import difflib
import functools
import json
import math
import os
import pathlib
import re

from autoshard.cost.backend import Backend
from autoshard.cost.chip import Chip, in_order, load_chip
from autoshard.errors import UserError


MOST_DEVICES = 1 << 18
"""Most devices of a topology, more than any machine has (assumed). Device orders and layouts are tables this long."""
_MOST_DIGITS = 9
"""Most digits of a number in a topology's name."""
_MOST_CORES = 4096
"""Most cores that devices of a CPU may share."""
_AXIS_NAMES = ("x", "y", "z")


@dataclasses.dataclass(frozen=True, slots=True)
class PhysicalAxis:
    """One axis of the hardware, major first in a topology's `physical_axes`.

    `kind` names its links: `torus` (ICI), `die` (devices of one chip), `switch` (NVLink), `network` (DCN between slices
    or islands), `memory` (devices of one process). `wrap` is True if the axis closes to a ring.
    """

    name: str
    size: int
    kind: str
    wrap: bool


@functools.cache
def _slice_table() -> dict[str, str]:
    """Load the table of slice name -> topology, such as `v5e-16` -> `v5e:4x4`."""
    return json.loads(pathlib.Path(__file__).with_name("slices.json").read_text())["slices"]


def slice_names() -> tuple[str, ...]:
    """Return every slice name that `Topology.parse` reads."""
    return tuple(_slice_table())


def slice_shapes(chip: Chip) -> dict[str, tuple[int, ...]]:
    """Return slice name -> shape for one chip, empty if its slices have no names."""
    entries = {name: text.partition(":") for name, text in _slice_table().items()}
    return {
        name: tuple(int(size) for size in shape.split("x"))
        for name, (owner, _, shape) in entries.items()
        if owner == chip.name
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """Chips of one kind in slices (or islands) of one shape.

    Devices are numbered row-major over `physical_axes`: slices outermost, then x, y, z, then the devices of a chip.
    """

    name: str
    """Canonical text that `parse` reads."""
    chip: Chip
    shape: tuple[int, ...]
    """Chips of one slice along each dim of the torus; the number of devices of an island or of a CPU."""
    slices: int
    """Number of slices or islands; 1 for a CPU."""
    wrap: tuple[bool, ...]
    """True for each dim of the shape that closes to a ring."""
    twisted: bool = False
    """True if the links that close the short axes lead half-way along the long axes (see `_may_twist`)."""
    host_memory_bytes: int = 0
    """Bytes of the machine's main memory for CPU devices; 0 for other chips, as `host_cores`."""
    host_cores: int = 0
    """Cores that the devices of a CPU share."""

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Read `v5e:4x4`, `v5p:4x4x8`, `v4:4x4x8_twisted`, `v6e:16x16*2`, `v5litepod-16`, `h100:8*4` or `cpu:8`.

        `cpu:8@4` is eight devices on four cores. Without `@` they share the cores of the machine.

        Raises: UserError for an unknown chip, slice or shape; the message lists near or existing ones.
        """
        if not isinstance(text, str):
            raise UserError(f"the topology is a {type(text).__name__}, expected text such as 'v5e:4x4' or 'cpu:8'")
        match = re.fullmatch(
            r"([^:*@]+)(?::([0-9x]+)(_twisted|_untwisted)?)?(?:\*([0-9]+))?(?:@([0-9]+))?", text.strip()
        )
        if match is None or (match[2] is None and "-" not in match[1]):
            raise UserError(
                f"topology {text!r} is not of the form CHIP:SHAPE, CHIP:SHAPE*SLICES or a slice name; "
                "examples: v5e:4x4, v6e:16x16*2, v5p-128, h100:8*4, cpu:8"
            )
        if any(len(number) > _MOST_DIGITS for number in re.findall("[0-9]+", text)):
            raise UserError(f"topology {text[:60]!r} has a number of more than {_MOST_DIGITS} digits")
        slices = int(match[4] or 1)
        if slices < 1:
            raise UserError(f"topology {text!r} has {slices} slices, expected at least 1")
        if match[2] is None:
            chip, shape = _parse_slice_name(match[1])
        else:
            chip = load_chip(match[1])
            if not re.fullmatch(r"[0-9]+(x[0-9]+)*", match[2]):
                raise UserError(f"topology {text!r}: {match[2]!r} is not a shape such as 4x4 or 2x2x4")
            shape = tuple(int(size) for size in match[2].split("x"))
        return cls.make(chip, shape, slices, match[3] == "_twisted", None if match[5] is None else int(match[5]))

    @classmethod
    def make(
        cls, chip: Chip, shape: tuple[int, ...], slices: int = 1, twisted: bool = False, cores: int | None = None
    ) -> "Topology":
        """Make a topology from its parts; the sizes of a TPU's shape are put in ascending order (`4x8x4` is `4x4x8`).

        - `chip`: kind of the chips.
        - `shape`: chips of one slice by dim; for GPUs and CPUs one number of devices.
        - `slices`: number of slices or islands.
        - `twisted`: use the twisted torus of that shape.
        - `cores`: number of cores that CPU devices share; None for the machine's.

        Raises: UserError for a shape that the chip does not come in or that has no twisted form, and for more than
        `MOST_DEVICES` devices. Several slices of a CPU, and `cores` of another chip, are refused too.
        """
        if chip.traits.torus:
            shape = _check_tpu_shape(chip, shape)
            wrap = tuple(_wraps(chip, shape, size) for size in shape)
        else:
            if len(shape) != 1 or not 1 <= shape[0] <= chip.max_chips:
                text = "x".join(map(str, shape))
                many = f"1..{chip.max_chips} {chip.traits.noun}"
                beyond = _more_islands(chip, shape)
                raise UserError(f"{chip.name} has no shape {text}; write {chip.name}:N with N = {many}{beyond}")
            if chip.traits.shares_machine and slices > 1:
                raise UserError(
                    f"cpu:{shape[0]}*{slices} asks for {slices} machines; cpu topologies are one machine: cpu:N"
                )
            wrap = (False,)
        text = "x".join(map(str, shape))
        if twisted and not (chip.cube_edge and all(wrap) and _may_twist(shape)):
            have = "KxKx2K and Kx2Kx2K made of whole cubes are, such as 4x4x8 and 4x8x8"
            raise UserError(
                f"{chip.name}:{text} has no twisted form: " + (have if chip.cube_edge else "only 3-D tori have")
            )
        devices = math.prod(shape) * slices * chip.devices_per_chip
        if devices > MOST_DEVICES:
            raise UserError(
                f"{chip.name}:{text}*{slices} has {devices} devices; plans are made for up to {MOST_DEVICES}"
            )
        suffix = "" if cores is None else f"@{cores}"
        if cores is not None and not (chip.traits.shares_machine and 1 <= cores <= _MOST_CORES):
            raise UserError(
                f"{chip.name}:{text}{suffix}: only devices of a CPU share cores, "
                f"1 to {_MOST_CORES} of them, as in cpu:8@4"
            )
        name = f"{chip.name}:{text}{'_twisted' if twisted else ''}" + (f"*{slices}" if slices > 1 else "")
        there, memory = _machine() if chip.traits.shares_machine else (0, 0)
        return cls(name + suffix, chip, shape, slices, wrap, twisted, memory, cores or there)

    @property
    def backend(self) -> str:
        """Name of the backend that compiles for these devices: `tpu`, `gpu` or `cpu`."""
        return self.chip.backend

    @property
    def traits(self) -> Backend:
        """The traits of the topology's backend."""
        return self.chip.traits

    @property
    def devices_per_chip(self) -> int:
        """Devices that JAX counts on a chip: 2 where each core is one (v2, v3, tpu7x)."""
        return self.chip.devices_per_chip

    @property
    def num_chips(self) -> int:
        """Number of chips of all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def num_devices(self) -> int:
        """Number of devices of all slices, as JAX counts them."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def num_hosts(self) -> int:
        """Number of hosts of all slices, if every host has the chip's usual `host_shape`; one for a CPU."""
        per_host = math.prod(self.chip.host_shape) if self.chip.host_shape else self.num_chips
        return self.slices * -(-math.prod(self.shape) // per_host)

    @property
    def usable_bytes(self) -> int:
        """Bytes that a program may allocate on one device; an equal share of the machine's memory for CPU devices."""
        if self.traits.shares_machine:
            return self.host_memory_bytes // self.num_devices
        return self.chip.usable_bytes_per_device

    def peak_flops(self, dtype: str) -> float:
        """Return the peak FLOP/s of one device for a dtype; devices of a `cpu:N` share the machine's cores."""
        peak = self.chip.peak_flops(dtype)
        if self.traits.shares_machine:
            return peak * self.host_cores / self.num_devices
        return peak / self.chip.devices_per_chip

    @property
    def memory_bytes_per_s(self) -> float:
        """Peak main-memory bandwidth of one device; devices of a `cpu:N` share the machine's."""
        shared = self.num_devices if self.traits.shares_machine else self.chip.devices_per_chip
        return self.chip.memory_bytes_per_s / shared

    @property
    def physical_axes(self) -> tuple[PhysicalAxis, ...]:
        """All axes of the hardware, major first; their sizes multiply to `num_devices`."""
        if self.traits.torus:
            inner = [
                PhysicalAxis(name, size, "torus", wrap)
                for name, size, wrap in zip(_AXIS_NAMES, self.shape, self.wrap, strict=False)
            ]
            inner.append(PhysicalAxis("core", self.devices_per_chip, "die", False))
            outer = PhysicalAxis("slice", self.slices, "network", False)
        elif not self.traits.shares_machine:
            inner = [PhysicalAxis("gpu", self.shape[0], "switch", False)]
            outer = PhysicalAxis("island", self.slices, "network", False)
        else:
            return (PhysicalAxis("cpu", self.shape[0], "memory", False),)
        return (outer, *inner)

    def coords(self, device: int) -> tuple[int, tuple[int, int, int], int]:
        """Return `(slice, (x, y, z), core)` of a device number, as JAX's `slice_index`, `coords` and `core_on_chip`.

        Raises: UserError for a number that no device has.
        """
        if not 0 <= device < self.num_devices:
            raise UserError(f"device {device} is not in {self.name}, which has devices 0..{self.num_devices - 1}")
        rest, core = divmod(device, self.devices_per_chip)
        xyz: list[int] = []
        for size in reversed(self.shape):
            rest, coordinate = divmod(rest, size)
            xyz.insert(0, coordinate)
        xyz += [0] * (3 - len(xyz))
        return rest, (xyz[0], xyz[1], xyz[2]), core

    def device_at(self, slice_index: int, coords: tuple[int, ...], core: int = 0) -> int:
        """Return the device number of these coordinates, the inverse of `coords`; they are not checked."""
        number = slice_index
        for size, coordinate in zip(self.shape, coords, strict=False):
            number = number * size + coordinate
        return number * self.devices_per_chip + core


def _more_islands(chip: Chip, shape: tuple[int, ...]) -> str:
    """Return a clause that suggests islands if more GPUs were requested than one island has; "" for other mistakes."""
    count = math.prod(shape)
    if chip.traits.shares_machine or count <= chip.max_chips:
        return ""
    islands, rest = divmod(count, chip.max_chips)
    if not rest:
        return f"; {count} are {islands} islands: {chip.name}:{chip.max_chips}*{islands}"
    size = next(n for n in range(chip.max_chips, 0, -1) if count % n == 0)
    near = f"{chip.name}:{chip.max_chips}*{islands} or *{islands + 1}"
    whole = f"; {count} are no whole islands of {chip.max_chips}, the nearest are {near}"
    return whole + (f"; {count} in equal parts are {chip.name}:{size}*{count // size}" if size > 1 else "")


def _machine() -> tuple[int, int]:
    """Return the cores and the bytes of main memory of the machine, even if this process may use fewer."""
    return os.cpu_count() or 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _parse_slice_name(name: str) -> tuple[Chip, tuple[int, ...]]:
    """Parse a slice name: `v5litepod-16` -> (v5e, (4, 4)). Raises: UserError for an unknown name, with near ones."""
    generation, _, count = name.lower().rpartition("-")
    chip = load_chip(generation)
    key = f"{chip.name}-{count}"
    table = _slice_table()
    if key in table:
        return chip, tuple(int(size) for size in table[key].partition(":")[2].split("x"))
    known = [slice_name for slice_name in table if slice_name.startswith(chip.name + "-")]
    if not known:
        raise UserError(f"{chip.name} has no slice names (found {name!r}); write a shape such as {chip.name}:8")
    if count.isdigit():
        near = sorted(known, key=lambda slice_name: abs(int(slice_name.rpartition("-")[2]) - int(count)))[:3]
        near.sort(key=lambda slice_name: int(slice_name.rpartition("-")[2]))
    else:
        near = difflib.get_close_matches(key, known, n=3, cutoff=0.0)
    raise UserError(f"unknown slice {name!r}; the nearest that exist are {', '.join(near)}")


def _check_tpu_shape(chip: Chip, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in the order of `in_order`, without sizes of 1 beyond the torus's dims.

    Raises: UserError with the existing shapes if the chip lacks it.
    """
    asked = "x".join(map(str, shape))
    ordered = shape
    while len(ordered) > chip.torus_dims and 1 in ordered:
        position = len(ordered) - 1 - ordered[::-1].index(1)
        ordered = ordered[:position] + ordered[position + 1 :]
    ordered = in_order(ordered)
    if ordered in chip.small_shapes:
        return ordered
    edge = chip.cube_edge
    if edge and len(ordered) == 3 and all(size and size % edge == 0 for size in ordered):
        if math.prod(ordered) <= chip.max_chips:
            return ordered
        raise UserError(
            f"{chip.name} has no shape {asked}: {math.prod(ordered)} chips, at most {chip.max_chips} exist in a slice"
        )
    shapes = ", ".join("x".join(map(str, small)) for small in chip.small_shapes)
    larger = f", and shapes of whole {edge}x{edge}x{edge} cubes up to {chip.max_chips} chips" if edge else ""
    beyond = f"; beyond one slice write {chip.name}:SHAPE*SLICES" if math.prod(shape) > chip.max_chips else ""
    name = next((name for name in slice_shapes(chip) if asked.isdigit() and name == f"{chip.name}-{asked}"), "")
    named = f"; the slice {name} is {_slice_table()[name]}" if name else ""
    raise UserError(f"{chip.name} has no shape {asked}; it has {shapes}{larger}{beyond}{named}")


def _may_twist(shape: tuple[int, ...]) -> bool:
    """Return True if a shape is `k x k x 2k` or `k x 2k x 2k`, the shapes of twisted tori (Cloud TPU, v4 and v5p)."""
    return len(shape) == 3 and set(shape) == {min(shape), 2 * min(shape)}


def _wraps(chip: Chip, shape: tuple[int, ...], size: int) -> bool:
    """Return True if a torus axis closes to a ring.

    A 2-D axis closes only at the pod's length (`length N`), and a 3-D axis only in shapes of whole cubes.

    - `size`: size of the axis, one of `shape`.
    """
    rule, _, length = chip.wrap_rule.partition(" ")
    if rule == "length":
        return size == int(length)
    return all(length % chip.cube_edge == 0 for length in shape)
