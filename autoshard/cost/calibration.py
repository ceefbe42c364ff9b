"""Calibration of a chip: efficiencies, latencies and overheads below its peak, with their sources, in one data file."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from autoshard.base.files import parse_json, read_bytes, write_whole
from autoshard.cost.chip import Chip, load_chip
from autoshard.errors import UserError


_FILE = pathlib.Path(__file__).with_name("calibration.json")
_SCHEMA = 1

OWN_FILE = "AUTOSHARD_CALIBRATION"
"""Environment variable that names a user's own calibration file."""
_RANGES = {
    "efficiency": (1e-3, 20.0),
    "overlap": (0.0, 1.0),
    "vector_flops_per_s": (1e6, 1e18),
    "_s": (0.0, 1.0),
    "": (0.0, 2.0**40),
}
"""End of a figure's name -> its least and most value.

The ranges are wide, since peaks in a chip file may be nominal and a fit may move a figure far. They exclude values that
no price can use, and milliseconds where seconds are meant.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    """Figures of one chip. Efficiencies are shares of the peak rates in the chip file; names in `_s` are seconds."""

    chip: str
    """Name of the chip, as in its file."""
    matmul_efficiency: float
    """Share of peak that a large, well-shaped matmul reaches."""
    memory_efficiency: float
    """Share of peak main-memory bandwidth that a streaming op reaches."""
    vector_flops_per_s: float
    """Elementwise FLOP/s of the vector units of one device; on a CPU, of one core."""
    op_overhead_s: float
    """Fixed seconds of one fusion or matmul inside a program."""
    link_efficiency: float
    """Share of peak bandwidth of ICI or NVLink that a large collective reaches."""
    hop_s: float
    """Least seconds of one step between neighbours on ICI or NVLink."""
    collective_launch_s: float
    """Fixed seconds of one phase of a collective."""
    network_efficiency: float
    """Share of peak network bandwidth that transfers between slices or islands reach."""
    network_contention: float
    """Slowdown of a transfer between slices for every further slice, from shared switches."""
    slice_spread: float
    """Standard deviation of the compute time of one slice in one step, as a share; a step waits for the slowest."""
    network_latency_s: float
    """Least seconds of one step between slices or islands."""
    shared_memory_traffic: float
    """Bytes through main memory for each byte of a collective between devices of one process."""
    relayout_traffic: float
    """Bytes through main memory for each byte that a gather writes in another order of dims; 0 if one op does both."""
    gather_max_group: int
    """Largest group of all devices of a torus whose gathers never become sums (see `summed_gathers`)."""
    gather_overlap: float
    """Share of a parameter's gather within a slice or island that overlaps with compute."""
    network_overlap: float
    """Share of the transfers of parameters and gradients between slices or islands that overlaps with compute."""
    reduction_overlap: float
    """Share of a gradient's sum that overlaps with compute."""
    pipelined_overlap: float
    """Share of a collective that is pipelined into the matmul next to it, for groups up to `pipelined_max_group`."""
    pipelined_max_group: int
    """Largest group whose collectives are pipelined into matmuls."""
    pipelined_columns: float
    """Least multiply-adds of a device for each element of the collected tensor with which a collective is pipelined."""
    attention_ops: float
    """Vector-unit operations for each score and each matmul over the scores in an attention kernel."""
    grid_step_s: float
    """Overhead in seconds of one step of a Pallas kernel's grid, in addition to its work."""
    row_copy_s: float
    """Seconds to copy one row of a register's lanes if the rows of a tile go to different places; 0 without tiles."""
    measured: bool = True
    """True if measured tables of the chip are used, where there are any (`cost/measured`)."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    """Source and date of each figure, as text."""

    def __hash__(self) -> int:
        """Hash the chip and the figures, as `hash` does."""
        return int(self.hash(), 16)

    def values(self) -> dict[str, float]:
        """Return the figures by name, without `chip`, `measured` and `sources`."""
        return {name: getattr(self, name) for name in figure_names()}

    def hash(self) -> str:
        """Return twelve hex digits of the chip and the figures; `measured` and `sources` do not change them."""
        text = json.dumps({"chip": self.chip, **self.values()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @classmethod
    def ideal(cls, chip: str | Chip) -> "Calibration":
        """Return a calibration without losses or overheads and with 1 us a hop, as textbook estimates assume.

        Measured tables are not used. Overlaps and all other figures are those of `load_calibration`.
        """
        name = chip if isinstance(chip, str) else chip.name
        return dataclasses.replace(
            load_calibration(name),
            matmul_efficiency=1.0,
            memory_efficiency=1.0,
            op_overhead_s=0.0,
            link_efficiency=1.0,
            hop_s=1e-6,
            collective_launch_s=0.0,
            network_efficiency=1.0,
            network_contention=0.0,
            slice_spread=0.0,
            network_latency_s=0.0,
            grid_step_s=0.0,
            row_copy_s=0.0,
            measured=False,
            sources={"all": "peaks of the chip file"},
        )


def figure_names() -> tuple[str, ...]:
    """Return the names of the figures in a calibration: all fields but `chip`, `measured` and `sources`."""
    return tuple(f.name for f in dataclasses.fields(Calibration) if f.name not in ("chip", "measured", "sources"))


def load_calibration(chip: str | Chip, path: str | pathlib.Path | None = None) -> Calibration:
    """Load the figures of a chip; those in a user's own file replace the shipped ones, figure by figure.

    The user's file is `path`, else the one that the environment variable `AUTOSHARD_CALIBRATION` names, if it is set.

    Raises: UserError for an unreadable file, an unknown chip or figure, a figure that is in neither file, or a value
    that no chip has.
    """
    name = (chip if isinstance(chip, Chip) else load_chip(chip)).name
    figures = _read(_FILE).get(name, {}) | _own(name, path)
    missing = [figure for figure in figure_names() if figure not in figures]
    if missing:
        raise UserError(f"calibration file {_FILE} misses {', '.join(missing)} of {name}, a chip of cost/chips")
    values: dict[str, Any] = {key: figure["value"] for key, figure in figures.items()}
    for key in ("gather_max_group", "pipelined_max_group"):
        values[key] = int(values[key])
    return Calibration(name, **values, sources={key: f"{f['source']} ({f['date']})" for key, f in figures.items()})


def own_figures(chip: str | Chip) -> frozenset[str]:
    """Return the names of the figures for a chip in the file of `AUTOSHARD_CALIBRATION`; none if no file is named.

    Raises: UserError like `load_calibration`.
    """
    return frozenset(_own((chip if isinstance(chip, Chip) else load_chip(chip)).name))


def _own(name: str, path: str | pathlib.Path | None = None) -> dict[str, dict[str, Any]]:
    """Read the user's own figures of a chip, name -> its entry (`value`, `source`, `date`); none if no file is named.

    Raises: UserError like `load_calibration`.
    """
    own = os.environ.get(OWN_FILE) if path is None else path
    return _read(pathlib.Path(own)).get(name, {}) if own else {}


def save_calibration(path: str | pathlib.Path, chip: str, figures: Mapping[str, float], source: str, date: str) -> None:
    """Write measured figures of one chip into a user's own file, and preserve the other figures in it.

    - `path`: the file, created if it does not exist.
    - `figures`: values by name of the figure.
    - `source`, `date`: provenance of all of them; the date is `YYYY-MM-DD`.

    Raises: UserError, before anything is written, for an unknown chip or figure, a value that no chip has, or a damaged
    file. Raises: OSError if the file cannot be written.
    """
    path = pathlib.Path(path)
    chips = _read(path) if path.exists() else {}
    entries = chips.setdefault(load_chip(chip).name, {})
    for key, value in figures.items():
        entries[key] = {"value": value, "source": source, "date": date}
    document = {"schema": _SCHEMA, "chips": chips}
    _check(document, str(path))
    write_whole(path, (json.dumps(document, indent=1) + "\n").encode())


def _read(path: pathlib.Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Read and check a calibration file; return chip -> figure -> its entry. Raises: UserError for a wrong file."""
    try:
        text = parse_json(_text(path, path.stat().st_mtime_ns))
    except OSError as error:
        raise UserError(f"calibration file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"calibration file {path} is not JSON: {error}") from error
    return _check(text, str(path))


@functools.lru_cache(maxsize=8)
def _text(path: pathlib.Path, stamp: int) -> bytes:
    """Read a file's bytes; `stamp`, its time of modification, only keys the cache."""
    return read_bytes(path)


def _check(document: Any, origin: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Check a calibration document and return its figures by chip. Raises: UserError with the first mistake."""
    if not isinstance(document, dict) or set(document) != {"schema", "chips"}:
        raise UserError(f"calibration file {origin} must be an object with exactly the keys schema and chips")
    if document["schema"] is not _SCHEMA and (document["schema"] != _SCHEMA or isinstance(document["schema"], bool)):
        raise UserError(f"calibration file {origin} has schema {document['schema']}, this version reads {_SCHEMA}")
    known = figure_names()
    if not isinstance(document["chips"], dict):
        raise UserError(f"calibration file {origin}: chips must be an object with the figures of each chip")
    for chip, figures in document["chips"].items():
        try:
            load_chip(chip)
        except UserError as error:
            raise UserError(f"calibration file {origin}: {error}") from None
        if not isinstance(figures, dict):
            raise UserError(f"calibration file {origin}: {chip} must be an object of figures")
        for key, figure in figures.items():
            if key not in known:
                raise UserError(
                    f"calibration file {origin}: {chip} has the unknown figure {key}; known are {', '.join(known)}"
                )
            if not isinstance(figure, dict) or set(figure) != {"value", "source", "date"}:
                raise UserError(
                    f"calibration file {origin}: {chip}.{key} must have exactly the keys value, source and date"
                )
            value = figure["value"]
            least, most = next(limits for end, limits in _RANGES.items() if key.endswith(end))
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                expected = f"a number from {least:g} to {most:g}"
                raise UserError(f"calibration file {origin}: {chip}.{key} is {value!r}, expected {expected}")
    return document["chips"]
