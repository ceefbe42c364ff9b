"""Layouts of images on TPUs: the inputs, results and gradients of convolutions, and elementwise values between them.

The compiler (libtpu 0.0.52) puts the features and the batch of an image into tiles, and spatial dims outside, however
the program orders its dims. If a batch does not fill a tile's rows, the last spatial dim of images is cut into parts,
which join the batch (XLA's `SpaceToBatchConverter`). Convolutions repeat the edges between the parts.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autoshard.cost import TILE_ROWS, tile_padding
from autoshard.graph import Op, OpClass, OpGraph
from autoshard.mlir import WindowedDim
from autoshard.planning.xla.axis_assignments import WHOLE, Seconds, States, local_sizes, relabel


PARTS = 8
"""Parts into which the last spatial dim of an image is cut if its batch is smaller than the rows of a tile.

Compiled for v5e, with 64 to 256 elements along that dim. Images of 1, 2, 4 and 6 examples on a device were cut. All
images of 8 and more were whole.
"""
_GAP = 1
"""Elements by which every part of a cut dim is longer: parts of 8, 16 and 32 elements were stored as 9, 17 and 33."""
_PASSES = 4
"""Passes over an image for each row of windows along the cut dim, before the gradient of a kernel.

The image is read and written once for each place of the kernel, shifted by it, and the shifted images are joined.
"""
_KEEPS = frozenset({"concatenate", "pad", "slice", "reverse", "reduce_window", "select_and_scatter"})
"""Ops besides elementwise ones whose results have the layout of their operands."""


class Image(NamedTuple):
    """Dims of an image."""

    batch: int
    features: int
    rank: int

    @property
    def outside(self) -> tuple[int, ...]:
        """Spatial dims, which are outside tiles."""
        return tuple(dim for dim in range(self.rank) if dim not in (self.batch, self.features))

    def cut(self, local: Seconds) -> Seconds:
        """Return the local sizes of the dims, [states, rank], after small batches have got parts of the last spatial
        dim.
        """
        last = max(self.outside)
        small = (local[:, self.batch] < TILE_ROWS) & (local[:, last] >= PARTS)
        made = local.copy()
        made[:, self.batch] = np.where(small, PARTS * local[:, self.batch], local[:, self.batch])
        made[:, last] = np.where(small, np.ceil(local[:, last] / PARTS) + _GAP, local[:, last])
        return made

    def padding(self, local: Seconds, itemsize: int) -> Seconds:
        """Return the stored bytes for each byte of the elements, [states].

        - `local`: local sizes of the dims, [states, rank].
        - `itemsize`: bytes of an element.
        """
        cut = self.cut(local)
        more = cut.prod(axis=1) / np.maximum(local, 1.0).prod(axis=1)
        return more * tile_padding(cut, itemsize, self.outside)


def find_images(graph: OpGraph) -> Mapping[int, Image]:
    """Return the images among a program's values; arguments have layouts of their own, and are left out."""
    images: dict[int, Image] = {}
    for op in graph.ops:
        images |= convolved(graph, op)
    arguments = set(graph.arguments)
    waiting = list(images)
    while waiting:
        tensor = waiting.pop()
        maker = graph.maker(tensor)
        for op in (*graph.users[tensor], *(() if maker is None else (maker,))):
            if op.op_class is not OpClass.POINTWISE and op.kind not in _KEEPS:
                continue
            for other in (*op.operands, *op.results):
                if other not in images and len(graph.tensors[other].shape) == images[tensor].rank:
                    images[other] = images[tensor]
                    waiting.append(other)
    return {tensor: image for tensor, image in images.items() if tensor not in arguments}


def convolved(graph: OpGraph, op: Op) -> dict[int, Image]:
    """Return the images that a convolution reads and writes; none for other ops, and without two dims apart from the
    spatial ones.
    """
    if op.kind != "convolution" or op.rule is None or not op.halos:
        return {}
    gradient = sums_windows(op)
    second = op.operands[1] if gradient else op.results[0]
    left, right = op.rule.operands[0], op.rule.operands[1] if gradient else op.rule.results[0]
    # The gradient of a kernel sums over the batch; a kernel has no batch.
    batch = {f for dim in left for f in dim} & {f for dim in right for f in dim} - {halo.factor for halo in op.halos}
    batch -= {f for dim in (op.rule.results[0] if gradient else op.rule.operands[1]) for f in dim}
    made = {}
    for tensor, dims, number in (
        (op.operands[0], left, "source"),
        (second, right, "partner" if gradient else "result"),
    ):
        spatial = {getattr(halo.dim, number) for halo in op.halos}
        first = [dim for dim, factors in enumerate(dims) if batch.intersection(factors)]
        others = [dim for dim in range(len(dims)) if dim not in spatial and dim not in first]
        if len(first) == len(others) == 1 and len(graph.tensors[tensor].shape) > 2:
            made[tensor] = Image(first[0], others[0], len(dims))
    return made


def sums_windows(op: Op) -> bool:
    """Return True for a convolution that sums over spatial dims: the gradient of a kernel."""
    return any(halo.dim.summed for halo in op.halos)


def shifted_images(
    graph: OpGraph, op: Op, images: Mapping[int, Image], states: States, axes: Sequence[int]
) -> tuple[Seconds, Seconds]:
    """Return the bytes of the shifted images that the gradient of a kernel reads, and of all passes over them.

    There is one image for each place of the kernel along the dim that is cut. Both figures, [states], are 0 for other
    ops and for large batches.

    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    """
    none = np.zeros(len(states))
    image = images.get(op.operands[0]) if op.kind == "convolution" and sums_windows(op) else None
    if image is None or op.rule is None:
        return none, none
    last = max(image.outside)
    places = max((_places(halo.dim) for halo in op.halos if halo.dim.source == last), default=1)
    if places < 2:
        return none, none
    record = graph.tensors[op.operands[0]]
    of_dim = {factor: dim for dim, factors in enumerate(op.rule.operands[0]) for factor in factors}
    local = local_sizes(relabel(states, [of_dim.get(f, WHOLE) for f in range(len(op.rule.sizes))]), record.shape, axes)
    cut = (image.cut(local) != local).any(axis=1)
    size = np.where(cut, local.prod(axis=1) * record.itemsize * image.padding(local, record.itemsize), 0.0)
    return places * size, _PASSES * places * size


def shifted_span(graph: OpGraph, op: Op) -> tuple[int, int]:
    """Return the half-open range of ops during which the shifted images of a kernel's gradient live.

    They are written next to the image, so that the image need not be stored as well.
    """
    return max(graph.tensors[op.operands[0]].producer, 0), op.id + 1


def _places(dim: WindowedDim) -> int:
    """Return the size of a kernel along a dim, from the window of its gradient."""
    window = dim.window
    reach = (window.size - 1) * window.spread + 1
    return ((dim.length - 1) * window.base + 1 + window.low + window.high - reach) // window.stride + 1
