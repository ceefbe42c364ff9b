"""The logical mesh: named axes over a topology with a device order, and all candidate meshes of a topology."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from autoshard.cost.axis_layout import Segment, choose_layout, least_cuts
from autoshard.cost.topology import Topology
from autoshard.cost.torus import ring
from autoshard.errors import UserError


MESH_VARIABLE = "XLA_AUTO_SPMD_MESH"
"""Environment variable that names a mesh."""
AUTO = "auto"
"""Text in place of a mesh that asks for a search."""
MOST_NAMED = 16
"""Most axes of a mesh that a user names, most of them of size 1. Tables have a row for each set of axes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes, major first, each made of physical axes of one topology.

    `device_order` has one entry for each place of the mesh (row-major): the number of its device in the topology.
    """

    topology: Topology
    names: tuple[str, ...]
    """Names of the axes, major first."""
    sizes: tuple[int, ...]
    """Number of devices along each axis."""
    layout: tuple[tuple[Segment, ...], ...]
    """Physical segments of each axis, major first."""
    device_order: tuple[int, ...]

    @property
    def axes(self) -> dict[str, int]:
        """Name and size of every axis, major first."""
        return dict(zip(self.names, self.sizes, strict=True))

    @property
    def num_devices(self) -> int:
        """The number of devices, the product of all sizes."""
        return len(self.device_order)

    def segments(self, axis: str) -> tuple[Segment, ...]:
        """Return the physical segments that make one axis, major first; none for an axis of size 1.

        Raises: UserError for an axis that the mesh does not have.
        """
        if axis not in self.names:
            raise UserError(f"mesh axis {axis!r} does not exist; the mesh has {', '.join(self.names)}")
        return self.layout[self.names.index(axis)]

    def kinds(self, axes: Iterable[str]) -> frozenset[str]:
        """Return the kinds of links that a group over these axes uses (see `PhysicalAxis`)."""
        return frozenset(segment.kind for axis in axes for segment in self.segments(axis))

    def describe(self) -> str:
        """Describe each axis with its physical axes, as `data=32 on x(16, ring) + y(2 by 8, ring)`, in one line."""
        parts = []
        for name, size, segments in zip(self.names, self.sizes, self.layout, strict=True):
            pieces = " + ".join(
                f"{s.axis}({s.size}{'' if s.stride == 1 else f' by {s.stride}'}{self._closed(s)})" for s in segments
            )
            parts.append(f"{name}={size}" + (f" on {pieces}" if pieces else ""))
        return "; ".join(parts)

    def _closed(self, segment: Segment) -> str:
        """Return the suffix of a segment: `, ring` if it is a ring, `, twisted` on a short axis of a twisted torus.

        It is empty for a line.
        """
        shape = self.topology.shape
        twisted = self.topology.twisted and shape["xyz".index(segment.axis)] == min(shape) if segment.wrap else False
        return ", twisted" if twisted else ", ring" if segment.wrap else ""


def make_mesh(topology: Topology, sizes: Mapping[str, int], network: Mapping[str, int] | None = None) -> Mesh:
    """Lay named axes (major first) on a topology.

    `network` fixes the number of slices or islands that each axis spans (the outer shape of a hybrid mesh), such as
    `{"data": 2}`. By default the first axes span them.

    Raises: UserError for an empty mesh, more than `MOST_NAMED` axes, or a size that is no whole number of at least 1. A
    product that is not the number of devices is refused, and a `network` that does not fit the sizes and slices.
    """
    for name, size in sizes.items():
        if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, (int, np.integer)):
            raise UserError(f"mesh axis {name}={size!r} is not a name with a whole number, such as data=8")
    frozen = None if network is None else tuple(network.items())
    return _make_mesh(topology, tuple((name, int(size)) for name, size in sizes.items()), frozen)


def hybrid_mesh(topology: Topology, ici: Mapping[str, int], dcn: Mapping[str, int]) -> Mesh:
    """Make a mesh of two shapes over the same axes.

    Each axis has a size within a slice or island (`ici`) and a number of slices (`dcn`, 1 if absent). Its full size is
    their product, slices major. PyTorch/XLA's `HybridMesh` and JAX's `create_hybrid_device_mesh` do the same.

    Raises: UserError for shapes that the topology does not have.
    """
    unknown = sorted(dcn.keys() - ici.keys())
    within = math.prod(ici.values())
    spanned = math.prod(dcn.values())
    if unknown or within * topology.slices != topology.num_devices or spanned != topology.slices:
        mistake = f"has ici {_equation(ici)} = {within} and dcn {_equation(dcn)} = {spanned}"
        mistake = f"names {unknown[0]} in dcn alone" if unknown else mistake
        each = topology.num_devices // topology.slices
        raise UserError(
            f"the hybrid mesh {mistake}, but {topology.name} has {each} devices in each of {topology.slices} slices; "
            "ici must name every axis and multiply to the first, dcn to the second"
        )
    return make_mesh(topology, {name: size * dcn.get(name, 1) for name, size in ici.items()}, dcn)


def _equation(sizes: Mapping[str, int]) -> str:
    """Format sizes as a product, such as `data=2 x model=4`."""
    return " x ".join(f"{name}={size}" for name, size in sizes.items())


@functools.lru_cache(maxsize=256)
def _make_mesh(
    topology: Topology, items: tuple[tuple[str, int], ...], network: tuple[tuple[str, int], ...] | None
) -> Mesh:
    """Check the sizes and lay the axes; cached by topology and sizes. Raises: UserError as `make_mesh` does."""
    sizes = dict(items)
    if not sizes:
        raise UserError(f"the mesh has no axes; write for example data={topology.num_devices}")
    if len(sizes) > MOST_NAMED:
        raise UserError(f"the mesh has {len(sizes)} axes; at most {MOST_NAMED} are supported")
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"mesh axis {name}={size} must be at least 1")
    product = math.prod(sizes.values())
    if product != topology.num_devices:
        raise UserError(
            f"mesh {_equation(sizes)} = {product}, but {topology.name} has {topology.num_devices} devices; "
            "they must be equal"
        )
    layout = choose_layout(sizes, topology.physical_axes, None if network is None else dict(network))
    segments = tuple(layout.values())
    return Mesh(topology, tuple(sizes), tuple(sizes.values()), segments, _device_order(topology, segments))


def _device_order(topology: Topology, layout: Sequence[Sequence[Segment]]) -> tuple[int, ...]:
    """Return the device number of every place of the mesh, row-major over its axes."""
    strides = {}
    stride = 1
    for axis in reversed(topology.physical_axes):
        strides[axis.name] = stride
        stride *= axis.size
    order = np.zeros(1, dtype=np.int64)
    for segments in layout:
        order = (order[:, None] + _axis_offsets(segments, strides)[None, :]).ravel()
    return tuple(order.tolist())


def _axis_offsets(segments: Sequence[Segment], strides: Mapping[str, int]) -> np.ndarray:
    """Return the offsets of device numbers along one mesh axis.

    The torus segments form one ring walk, and the other segments stand row-major around it.
    """
    offsets = np.zeros(1, dtype=np.int64)
    torus = [s for s in segments if s.kind == "torus"]
    walked = False
    for segment in segments:
        if segment.kind != "torus":
            steps = np.arange(segment.size) * segment.stride * strides[segment.axis]
        elif walked:
            continue
        else:
            walked = True
            points = np.array(ring([s.size for s in torus], [s.wrap for s in torus]), dtype=np.int64)
            steps = points @ np.array([s.stride * strides[s.axis] for s in torus], dtype=np.int64)
        offsets = (offsets[:, None] + steps[None, :]).ravel()
    return offsets


def default_axis_names(count: int) -> tuple[str, ...]:
    """Return the names of unnamed axes: `data`, `model`, then `axis2`, `axis3`, ..."""
    return tuple(("data", "model")[i] if i < 2 else f"axis{i}" for i in range(count))


def parse_mesh(text: str) -> dict[str, int]:
    """Read `data=32,model=8` or `32,8` (named data, model, axis2, ...), major first.

    Raises: UserError for any other text, a repeated name or a size below 1. The number of devices is not checked.
    """
    entries = [entry.strip() for entry in text.split(",")]
    named = ["=" in entry for entry in entries]
    if any(named) != all(named):
        raise UserError(
            f"mesh {text!r} names some axes and not others; write all names (data=32,model=8) or none (32,8)"
        )
    names = default_axis_names(len(entries))
    sizes: dict[str, int] = {}
    for name, entry in zip(names, entries, strict=True):
        if all(named):
            name, _, entry = (part.strip() for part in entry.partition("="))
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or not re.fullmatch(r"[0-9]{1,9}", entry) or int(entry) < 1:
            shown = (f"{name}={entry}" if all(named) else entry)[:60]
            raise UserError(
                f"mesh {text[:200]!r}: {shown!r} is not an axis; "
                "write data=32,model=8 or 32,8 with whole sizes of at least 1"
            )
        if name in sizes:
            raise UserError(f"mesh {text!r} names the axis {name} twice; every axis needs its own name")
        sizes[name] = int(entry)
    return sizes


MOST_AXES = 4
"""Most axes of a mesh in a search, by default."""


@functools.lru_cache(maxsize=16)
def candidate_meshes(topology: Topology, most_axes: int = MOST_AXES) -> tuple[Mesh, ...]:
    """Return the meshes of 1 to `most_axes` axes over all devices, with names of `default_axis_names`.

    Meshes with fewer axes stand first. Among equally many axes, meshes on whole physical axes stand first.

    - Every way to write the number of devices as a product of sizes from 2 up is laid on the physical axes.
    - Orders of the sizes that cut physical axes the least remain. Slices, chips of two devices and the rings of an
      unequal torus thus become axes of their own where the sizes allow.
    - Among orders with the same sizes and kinds of links, the one with the largest axes first remains.
    - A mesh is omitted if it cuts physical axes more than once, and more often than its number of axes requires.
    """
    if topology.num_devices == 1:
        return (make_mesh(topology, {default_axis_names(1)[0]: 1}),)
    meshes = []
    for count in range(1, most_axes + 1):
        laid = [pair for sizes in _factorisations(topology.num_devices, count, 2) for pair in _laid(topology, sizes)]
        meshes.extend(mesh for _, mesh in sorted(laid, key=lambda pair: pair[0]))
    return tuple(meshes)


def _factorisations(number: int, count: int, least: int) -> Iterator[tuple[int, ...]]:
    """Yield ascending tuples of `count` numbers from `least` up whose product is `number`."""
    if count == 1:
        if number >= least:
            yield (number,)
        return
    for first in range(least, math.isqrt(number) + 1):
        if number % first == 0 and first**count <= number:
            for rest in _factorisations(number // first, count - 1, first):
                yield (first, *rest)


def _laid(topology: Topology, sizes: tuple[int, ...]) -> list[tuple[int, Mesh]]:
    """Return the meshes of these sizes that cut physical axes least, each with its number of cuts.

    The list is empty if they need more than one cut, and more cuts than axes beyond the number of physical ones.
    """
    physical = topology.physical_axes
    fewest = least_cuts(sizes, physical, max(1, len(sizes) - sum(axis.size > 1 for axis in physical)))
    if fewest is None:
        return []
    names = default_axis_names(len(sizes))
    distinct: dict[tuple[object, ...], Mesh] = {}
    for order in sorted(set(itertools.permutations(sizes)), reverse=True):
        mesh = make_mesh(topology, dict(zip(names, order, strict=True)))
        if _cuts(mesh.layout) == fewest:
            distinct.setdefault(tuple(sorted(map(_kinds, mesh.layout))), mesh)
    return [(fewest, mesh) for mesh in distinct.values()]


def _cuts(layout: Sequence[Sequence[Segment]]) -> int:
    """Count the cuts of physical axes between axes of the mesh: segments beyond the first of each physical axis."""
    pieces = [segment.axis for segments in layout for segment in segments]
    return len(pieces) - len(set(pieces))


def _kinds(segments: Sequence[Segment]) -> tuple[tuple[str, int], ...]:
    """Return pairs (kind of link, number of devices along it) of one mesh axis, sorted."""
    products: dict[str, int] = {}
    for segment in segments:
        products[segment.kind] = products.get(segment.kind, 1) * segment.size
    return tuple(sorted(products.items()))
