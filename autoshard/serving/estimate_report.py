"""First estimates of a step as a table: one topology with its memory by kind, or a line for each of several."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.base.units import format_bytes, format_count, format_seconds
from autoshard.cost import Topology
from autoshard.serving.config_estimates import ModelEstimate


Fewest = Mapping[str, Topology | None]
"""For each chip on which no estimate fits, the smallest topology on which one does."""


def estimate_figures(
    found: Sequence[ModelEstimate], failed: Sequence[str] = (), fewest: Fewest | None = None
) -> dict[str, Any]:
    """Return the object that `autoshard estimate --json` prints; sizes in bytes of one device, times in seconds.

    `failed` are sentences about topologies without an estimate; `fewest` None counts as empty. An estimate that does
    not fit has None for times and MFU. `remat` is None outside of training, `least` True for a lower bound.
    """
    return {
        "failed": list(failed),
        "fewest": [
            {"chip": chip, "topology": place.name if place else None, "devices": place.num_devices if place else None}
            for chip, place in (fewest or {}).items()
        ],
        "rows": [
            {
                "model": each.name,
                "topology": each.topology.name,
                "parameters": each.parameters,
                "remat": each.estimate.asked.remat if each.counted and each.estimate.asked.training else None,
                "batch": each.estimate.asked.batch or None,
                "seq": each.estimate.asked.seq or None,
                "layout": dict(each.estimate.layout),
                "step_time_s": each.estimate.step_time_s if each.estimate.fits else None,
                "exposed_comm_s": each.estimate.exposed_s if each.estimate.fits else None,
                "mfu": each.estimate.mfu if each.estimate.fits else None,
                "bytes": dict(each.estimate.bytes),
                "peak_bytes": each.estimate.peak_bytes,
                "memory_limit_bytes": each.estimate.limit_bytes,
                "fits": each.estimate.fits,
                "least": not each.counted,
            }
            for each in found
        ],
    }


def estimates_report(
    program: str, found: Sequence[ModelEstimate], failed: Sequence[str] = (), fewest: Fewest | None = None
) -> RenderableType:
    """Return a table with a column for each policy on one topology, or with a line for each of several topologies.

    A topology's line has its fastest estimate that fits, else the one with least memory. A title and a note precede
    the table; sentences on `failed` and `fewest`, those of `estimate_figures`, follow. `found` is not empty.
    """
    first = found[0]
    places = list(dict.fromkeys(each.topology.name for each in found))
    title = f"{program}, {format_count(first.parameters)} parameters"
    asked = first.estimate.asked
    if first.counted:
        step = {"train": "a training step", "infer": "a forward pass"}.get(asked.kind, f"a step of {asked.kind}")
        over = "tokens in a cache" if asked.kind == "decode" else "tokens"
        title += f": {step} of {asked.batch} x {asked.seq} {over}" if len(places) == 1 else f": {step}"
        note = (
            "From the model's dims by closed form, for the usual layouts of a step that XLA compiles: a first guess, "
        )
        note += "no plan."
        if asked.kind == "train" and any(each.topology.traits.gpu_kernels for each in found):
            note += " `autoshard degrees` has times of eager torch."
    else:
        note = "The least that any plan needs: arguments split over all devices, arithmetic alone. No plan."
    table = _by_kind(found) if len(places) == 1 else _by_topology(found)
    sentences = [*failed, *(_fit_sentence(chip, place, first.counted) for chip, place in (fewest or {}).items())]
    notes = [Text(f"- {sentence}", style="yellow") for sentence in sentences]
    return Group(Text(title, style="bold"), Text(note, style="dim"), Text(), table, *notes)


def _table() -> Table:
    """Return a table without columns and rows, with the look of all tables of estimates."""
    return Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")


def _by_kind(found: Sequence[ModelEstimate]) -> Table:
    """Return a table of one topology, with a column for each estimate, named by its remat policy in training.

    Times and MFU have rows if any estimate fits, layout and communication if the model's dims are known. Each kind of
    memory has a row.
    """
    table = _table()
    training = found[0].counted and found[0].estimate.asked.training
    table.add_column(found[0].topology.name, no_wrap=True)
    for each in found:
        name = f"remat {each.estimate.asked.remat}" if training else "step"
        table.add_column(name, justify="right", no_wrap=True)
    rows = [each.estimate for each in found]
    if found[0].counted:
        table.add_row("layout", *(_layout(row.layout) for row in rows))
    if any(row.fits for row in rows):  # a step that does not fit takes no time
        table.add_row("step", *(format_seconds(row.step_time_s) if row.fits else "" for row in rows))
        if found[0].counted:
            table.add_row("exposed communication", *(format_seconds(row.exposed_s) if row.fits else "" for row in rows))
            rates = (format_count(row.asked.tokens / row.step_time_s) if row.fits else "" for row in rows)
            table.add_row("tokens/s", *rates)
        table.add_row("MFU", *(f"{row.mfu:.1%}" if row.fits else "" for row in rows))
    for kind in dict.fromkeys(kind for row in rows for kind in row.bytes):
        table.add_row(kind, *(format_bytes(row.bytes.get(kind, 0)) for row in rows))
    table.add_row("memory of a device", *(format_bytes(row.peak_bytes) for row in rows))
    limit = format_bytes(rows[0].limit_bytes)
    table.add_row(f"fits {limit}", *(_fits(row.fits) for row in rows))
    return table


def _by_topology(found: Sequence[ModelEstimate]) -> Table:
    """Return a table with a row for each topology: the fastest estimate that fits, else the one with least memory.

    Rows that do not fit have blank times.
    """
    table = _table()
    table.add_column("topology", no_wrap=True)
    for name in ("chips", "layout", "remat", "step", "tokens/s", "MFU", "memory", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in dict.fromkeys(each.topology.name for each in found):
        estimates = [each for each in found if each.topology.name == name]
        best = min(estimates, key=lambda each: (not each.estimate.fits, _order(each)))
        row = best.estimate
        cells = [name, str(best.topology.num_chips), _layout(row.layout)]
        cells.append(row.asked.remat if best.counted and row.asked.training else "")
        if row.fits:
            rate = format_count(row.asked.tokens / row.step_time_s) if best.counted and row.step_time_s else ""
            cells += [format_seconds(row.step_time_s), rate, f"{row.mfu:.1%}"]
        else:
            cells += [""] * 3
        table.add_row(*cells, format_bytes(row.peak_bytes), _fits(row.fits))
    return table


def _fit_sentence(chip: str, place: Topology | None, counted: bool) -> str:
    """Return a sentence on the fewest devices of a chip on which the model fits.

    `place` is that topology, None if it fits on none that was tried. With `counted` False the sentence says that the
    number is a lower bound.
    """
    if place is None:
        return f"It fits on no number of {chip} devices that was tried; give a smaller batch, or another chip."
    least = (
        "the fewest devices of that chip on which it does are" if counted else "it needs at least so many of that chip:"
    )
    return f"It does not fit on {chip} as asked; {least} {place.num_devices}, {place.name}."


def _order(each: ModelEstimate) -> float:
    """Return the seconds of a step that fits, else the bytes of its peak; compare only estimates that agree in this."""
    return each.estimate.step_time_s if each.estimate.fits else each.estimate.peak_bytes


def _layout(layout: Any) -> str:
    """Return the sizes of the axes as text, `4x2` for `data` 4 and `model` 2."""
    return "x".join(str(size) for size in layout.values())


def _fits(fits: bool) -> Text:
    """Return a green `yes` or a yellow `no`."""
    return Text("yes", style="green") if fits else Text("no", style="yellow")
