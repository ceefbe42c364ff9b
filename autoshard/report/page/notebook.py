"""A plan in a notebook: a table, pictures, and the HTML of a cell."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from autoshard.base.units import format_bytes, format_seconds
from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.planning import Plan, Prediction, spec_text
from autoshard.report.display import clean
from autoshard.report.figures import tensor_bytes


_HINT = "pip install 'autoshard[notebook]'"
_TIME_COLORS = {"compute": "#4f7cac", "exposed": "#d1495b", "hidden": "#9dbcdc"}


@dataclasses.dataclass(frozen=True)
class NotebookView:
    """Provider of `Plan.to_frame`, `Plan.plot_*` and `Plan._repr_html_`."""

    plan: Plan

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each argument, indexed by name, in the plan's order.

        `bytes` are those of the whole tensor, `device_bytes` of one device. `comm_s` has the seconds of the collectives
        in one step that the argument causes.

        Raises `UserError` without pandas.
        """
        pandas = import_or_hint("pandas")
        plan = self.plan
        seconds: dict[str, float] = {}
        for collective in plan.prediction.collectives:
            seconds[collective.cause] = seconds.get(collective.cause, 0.0) + collective.seconds
        rows = []
        for name, spec in plan.arguments.items():
            shape, dtype = plan.shapes[name], plan.dtypes[name]
            rows.append(
                {
                    "role": plan.roles[name],
                    "shape": shape,
                    "dtype": dtype,
                    "spec": spec_text(spec, shape),
                    "shards": spec.shards(plan.mesh),
                    "bytes": tensor_bytes(shape, dtype),
                    "device_bytes": tensor_bytes(spec.local_shape(shape, plan.mesh), dtype),
                    "comm_s": seconds.get(name, 0.0),
                }
            )
        return pandas.DataFrame(rows, index=pandas.Index(plan.arguments, name="argument"))

    def html(self) -> str:
        """Return a short piece of HTML for a cell: the verdict, the plan in words, and the baselines."""
        return _fragment().render(plan=self.plan, devices=math.prod(self.plan.mesh.values()))

    def plot_time(self) -> Any:
        """Plot the step times of the plan and of every baseline, split into their parts, as a `matplotlib` figure.

        Baselines that fit come first, then the fastest; those that do not fit are faint. Raises `UserError` without
        matplotlib.
        """
        rows = [("this plan", self.plan.prediction), *sorted(self.plan.baselines.items(), key=_by_time)]
        figure, axes = _figure(height=0.8 + 0.42 * len(rows))
        axes.set_title(f"Step time of {clean(self.plan.program_name, 60)} on {self.plan.topology}", loc="left")
        for place, (_, row) in enumerate(rows):
            faint = 1.0 if row.fits else 0.4
            axes.barh(place, row.compute_s, color=_TIME_COLORS["compute"], alpha=faint)
            axes.barh(place, row.exposed_comm_s, left=row.compute_s, color=_TIME_COLORS["exposed"], alpha=faint)
            hidden = min(row.hidden_comm_s, row.compute_s)
            axes.barh(place + 0.28, hidden, height=0.22, color=_TIME_COLORS["hidden"], alpha=faint)
            text = format_seconds(row.step_time_s) + ("" if row.fits else ", does not fit")
            axes.annotate(text, (row.step_time_s, place), xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(rows)), [clean(name, 30) for name, _ in rows])
        axes.invert_yaxis()
        axes.margins(x=0.18)
        axes.set_xlabel("seconds")
        _legend(axes)
        return figure

    def plot_memory(self) -> Any:
        """Plot the memory of one device at the peak in GiB, by kind, largest first, as a `matplotlib` figure.

        The limit is drawn unless it exceeds three times the peak. Raises `UserError` without matplotlib.
        """
        plan = self.plan
        kinds = sorted(((size, kind) for kind, size in plan.prediction.memory.items() if size > 0), reverse=True)
        figure, axes = _figure(height=1.2 + 0.36 * len(kinds))
        axes.set_title(f"Memory of one device at the peak, {format_bytes(plan.prediction.peak_bytes)}", loc="left")
        left = 0
        for place, (size, kind) in enumerate(kinds):
            axes.barh(place, size / 2**30, left=left / 2**30, color=f"C{place % 10}")
            text = f"{kind.replace('_', ' ')} {format_bytes(size)}"
            axes.annotate(text, ((left + size) / 2**30, place), xytext=(4, 0), textcoords="offset points", va="center")
            left += size
        # A limit far above the peak would shrink the bars to the left edge.
        if plan.memory_limit_bytes <= 3 * left:
            axes.axvline(plan.memory_limit_bytes / 2**30, color="#b3261e")
            axes.annotate("limit", (plan.memory_limit_bytes / 2**30, -0.4), color="#b3261e", ha="right")
        axes.set_yticks([])
        axes.invert_yaxis()
        axes.margins(x=0.35)
        axes.set_xlabel("GiB")
        return figure

    def plot_sharding(self, name: str) -> Any:
        """Plot the devices of the topology, coloured by their part of the argument `name`, as a `matplotlib` figure.

        Each panel has the last two physical axes of more than one chip. Up to ten parts have distinct colours, more
        have a gradient.

        Raises `UserError` for a name that is no argument of the plan, and without matplotlib.
        """
        plan = self.plan
        if name not in plan.arguments:
            raise UserError(f"the plan has no argument {name!r}; {_near(name, list(plan.arguments))}")
        import numpy as np

        spec = plan.arguments[name]
        part = np.empty(len(plan.device_order), int)
        sizes = tuple(plan.mesh.values())
        for position, device in enumerate(plan.device_order):
            at = dict(zip(plan.mesh, np.unravel_index(position, sizes), strict=True))
            index = 0
            for axis in spec.axes:
                index = index * plan.mesh[axis] + int(at[axis])
            part[device] = index
        physical = [axis for axis in Topology.parse(plan.topology).physical_axes if axis.size > 1]
        grid = part.reshape([axis.size for axis in physical] or [1])
        while grid.ndim < 3:
            grid = grid[None]
        panels = grid.reshape(-1, *grid.shape[-2:])
        columns = min(len(panels), 4)
        rows = -(-len(panels) // columns)
        pyplot = import_or_hint("matplotlib.pyplot")
        figure, cells = pyplot.subplots(rows, columns, squeeze=False, figsize=(2.2 * columns, 2.2 * rows + 0.6))
        count = spec.shards(plan.mesh)
        for index, cell in enumerate(cells.flat):
            cell.set_xticks([])
            cell.set_yticks([])
            if index >= len(panels):
                cell.set_visible(False)
                continue
            # Few parts get distinct colours. Many parts get a gradient, which shows their order.
            few = count <= 10
            cell.imshow(panels[index], cmap="tab10" if few else "turbo", vmin=0, vmax=9 if few else count - 1)
            if len(panels) > 1:
                outer = np.unravel_index(index, grid.shape[:-2])
                labels = [f"{a.name} {i}" for a, i in zip(physical, outer, strict=False)]
                cell.set_title(", ".join(labels), fontsize=8)
        parts = "every device holds all of it" if count == 1 else f"{count} parts on {len(part)} devices"
        figure.suptitle(f"{clean(name, 60)} {spec_text(spec, plan.shapes[name])}: {parts}", fontsize=10)
        pyplot.close(figure)
        return figure


def _by_time(item: tuple[str, Prediction]) -> tuple[bool, float]:
    """Return a sort key of (name, prediction): plans that fit first, then by step time."""
    return (not item[1].fits, item[1].step_time_s)


def _near(name: str, names: Sequence[str]) -> str:
    """Return a clause with up to three names close to a wrong one, or with the place of all names."""
    import difflib

    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(near)}?" if near else "see `plan.arguments`."


def import_or_hint(module: str) -> Any:
    """Import and return a module of the optional packages.

    Raises `UserError` with the install command if it is missing.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{module.split('.')[0]} is not installed: {_HINT}.") from error


def _figure(height: float) -> tuple[Any, Any]:
    """Return a figure 8 inches wide with one panel of this height in inches, and the panel's axes."""
    pyplot = import_or_hint("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8, height), layout="constrained")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    pyplot.close(figure)  # a notebook would show it twice otherwise
    return figure, axes


def _legend(axes: Any) -> None:
    """Add the legend of the parts of a step's time below a panel."""
    labels = {"compute": "compute", "hidden": "communication hidden behind it", "exposed": "exposed communication"}
    patches = import_or_hint("matplotlib.patches")
    handles = [patches.Patch(color=_TIME_COLORS[key], label=label) for key, label in labels.items()]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3, frameon=False, fontsize=8)


@functools.cache
def _fragment() -> Any:
    """Return the template of a cell's HTML."""
    from autoshard.report.page.html_report import environment

    return environment().get_template("fragment.html")
