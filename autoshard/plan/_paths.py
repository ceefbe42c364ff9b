"""What it takes to bring a value along a path, for all pairs of states at its ends, and how long that is."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives
from autoshard.plan._model import EXPOSED, Path
from autoshard.plan._overlap import Overlap, hidden_share
from autoshard.plan._states import PARTIAL, WHOLE, Seconds, Step, Wave, members, split, waves


_CHUNK = 65_536
"""Pairs of states priced at a time: the arrays between stay small."""


def path_seconds(
    path: Path, collectives: Collectives, link_of: Mapping[str, str], overlap: Overlap
) -> dict[str, Seconds]:
    """Tables [rows, columns] of a path's time: exposed, hidden by link (mesh axis -> link), and compute."""
    shape = (len(path.source), len(path.target))
    names = collectives.mesh.names
    every = [tuple(name for a, name in enumerate(names) if bits >> a & 1) for bits in range(1 << len(names))]
    # link -> its mesh axes as bits; -1 for what is exposed
    links = {link: sum(1 << names.index(a) for a in link_of if link_of[a] == link) for link in link_of.values()}
    links[EXPOSED[1]] = -1
    found: dict[str, Seconds] = {}
    height = max(1, _CHUNK // max(1, shape[1]))
    for start in range(0, shape[0], height):
        part = slice(start, start + height)
        rows = dataclasses.replace(
            path, held=path.held[part], kept=path.kept[part], source=path.source[part], target=path.target
        )
        before, after = path_waves(rows, collectives)
        for wave in (*map(_of_rows, before), *after):
            groups, used = wave.groups, np.nonzero(wave.groups)
            seconds = collectives.time_of_groups(wave.kind, groups[used], wave.size[used])
            shares = np.array([hidden_share(collectives, overlap, wave.kind, axes) for axes in every])
            hidden = seconds * shares[groups[used]]
            for what, bits in links.items():
                mine = seconds - hidden if bits < 0 else np.where(groups[used] & bits, hidden, 0.0)
                if not mine.any():
                    continue
                table = found.setdefault(what, np.zeros(shape))[part]
                if groups.shape[1] == shape[1]:
                    table[used] += mine
                else:  # a gather that comes first is that of a row, whatever the column
                    table[used[0]] += mine[:, None]
    again = relayouts(path, collectives)
    if again.any():
        found["compute"] = again.astype(np.float64) * collectives.calibration.op_overhead_s
    return found


def relayouts(path: Path, collectives: Collectives) -> NDArray[np.int64]:
    """[rows, columns] how many of a path's collectives leave a value that is laid out anew, by an op of its own.

    TPU compilers gather and scatter the outermost dim in memory: shards of the last dim, or of several dims at once,
    are put in place by a fusion of its own (ViT-L and T5-large on v5e:4x4: 0.6 and 1.4 more ops for each such weight
    in each pass over its layer than where one outer dim is split).
    """
    last = len(path.factors) - 1
    if collectives.mesh.topology.backend != "tpu" or last < 1:
        return np.zeros((len(path.source), len(path.target)), dtype=np.int64)
    source, target = path.source[:, None, :], path.target[None, :, :]
    gathered = np.where((source >= 0) & (target == WHOLE), source, WHOLE)
    scattered = np.where((source <= PARTIAL) & (target >= 0), target, WHOLE)
    found = np.zeros(gathered.shape[:2], dtype=np.int64)
    for dims in (gathered, scattered):
        first = dims.max(axis=2)
        several = ((dims >= 0) & (dims != first[..., None])).any(axis=2)
        found += several | (first == last)
    return found


def _of_rows(wave: Wave) -> Wave:
    """[rows, 1] of collectives that belong to pairs of equal index."""
    return dataclasses.replace(wave, groups=np.diagonal(wave.groups)[:, None], size=np.diagonal(wave.size)[:, None])


def path_waves(path: Path, collectives: Collectives) -> tuple[list[Wave], list[Wave]]:
    """Collectives of a path: gathers that come first (pairs of equal index), then those of every pair."""
    sizes = (path.itemsize, path.reduce_itemsize)
    gathers: list[Wave] = []
    if (path.held != path.kept).any():
        gathers = waves(path.held, path.kept, path.shape, *sizes, collectives)
    steps = waves(path.source, path.target, path.factors, *sizes, collectives)
    if path.collected:
        steps = [_collected(wave, collectives) for wave in steps]
    return gathers, steps


def path_steps(path: Path, collectives: Collectives) -> tuple[list[Step], list[Step]]:
    """The same, one entry for every kind and group."""
    gathers, steps = path_waves(path, collectives)
    return [s for wave in gathers for s in split(wave)], [s for wave in steps for s in split(wave)]


def _collected(wave: Wave, collectives: Collectives) -> Wave:
    """A sum as the gather of its parts, which every device then combines."""
    if wave.kind not in ("all-reduce", "reduce-scatter"):
        return wave
    sizes = collectives.mesh.sizes
    parts = np.array([math.prod(sizes[a] for a in members(bits)) for bits in range(1 << len(sizes))])
    return dataclasses.replace(wave, kind="all-gather", size=wave.size * parts[wave.groups])
