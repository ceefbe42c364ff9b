"""The report of a plan on one screen."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoshard.base.units import format_bytes, format_count, format_seconds
from autoshard.planning import (
    FORMS,
    USUAL,
    CompiledStep,
    Plan,
    Prediction,
    Spec,
    eager_peak,
    mesh_words,
    spec_text,
)
from autoshard.report import figures
from autoshard.report.display import clean, fold
from autoshard.report.schedule_picture import schedule_report
from autoshard.report.terminal.explanation_report import step_limits
from autoshard.report.terminal.plan_tables import (
    baseline_table,
    collective_table,
    mesh_table,
    plain_table,
    recipe_table,
    shown_name,
)


BAR = 46
"""Characters in a full bar, which with its label stays within 80 columns."""

PARAMETERS = 8


def terminal_report(plan: Plan, wall_s: Mapping[str, float] | None = None) -> RenderableType:
    """Return the plan as a rich renderable for 80 columns or more: the verdict first, then details by weight.

    - `wall_s`: seconds of each planning phase, to be shown at the end; None or an empty mapping omits that line.

    The memory of a compiled plan is the verdict. Sections without content are omitted.
    """
    return _Report(plan, wall_s)


@dataclasses.dataclass(frozen=True, slots=True)
class _Report:
    """Renderable of a plan's report."""

    plan: Plan
    wall_s: Mapping[str, float] | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the sections of the report in order; `options` has the terminal's width."""
        plan = self.plan
        predicted = ", as predicted" if plan.compiled is not None else ""
        yield _verdict(plan)
        yield from _section("Plan", Text("\n").join(Text(f"  {clean(line)}") for line in plan.words))
        yield from _section("Fixed beforehand", _bullets(figures.fixed_lines(plan)))
        yield from _section("Priced for compiler flags", _bullets(_flag_lines(plan)))
        weights = [name for name in plan.arguments if plan.is_weight(name)]
        inputs = [name for name, role in plan.roles.items() if role == "batch"]
        yield from _section("Largest parameters", _split_table(plan, "parameter", weights, options.max_width))
        yield from _section("Inputs", _split_table(plan, "input", inputs, options.max_width))
        yield from _section(f"Step time{predicted}", _time(plan.prediction))
        yield from _section("Pipeline", schedule_report(plan))
        yield from _section("Memory of one device at the peak", _memory(plan))
        yield from _section(f"Baselines{predicted}", baseline_table(plan))
        yield from _section("Other recipes", recipe_table(plan))
        yield from _section("Other meshes", mesh_table(plan))
        yield from _section("Collectives that cost most", collective_table(plan, options.max_width))
        yield from _section("What limits the step", _bullets(step_limits(plan)))
        yield from _section("Warnings", _bullets(plan.warnings, "yellow"))
        if plan.compiled is not None:
            yield from _section("Compiled program", _bullets(plan.compiled.notes, "yellow"))
        if self.wall_s:
            phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.wall_s.items())
            yield from (Text(), Text(f"Planned in: {phases}", style="dim"))


def _flag_lines(plan: Plan) -> list[str]:
    """Return the price changes that the plan's origin records for compiler flags, one a line.

    Flags without a recorded change give one line that says so; without flags and changes the list is empty.
    """
    prices = list(plan.origin.flag_prices)
    return prices or ([f"{', '.join(plan.flags)}: no price changes."] if plan.flags else [])


def _verdict(plan: Plan) -> RenderableType:
    """Return the head of the report: program, mesh, fit, step time, best baseline, recipe, and learned prices.

    Tokens per second and MFU appear if the plan has them, the memory's percentage if the limit is not 0. The fit is
    that of the compiled program if there is one, with a line on its schedule. Predictions that miss it by more than
    `USUAL` follow the compiled figures.
    """
    prediction, compiled = plan.prediction, plan.compiled
    mesh = mesh_words(plan.mesh)
    devices = math.prod(plan.mesh.values())
    noun = "device" if devices == 1 else "devices"
    title = Text(f"{clean(plan.program_name, 60)} on {plan.topology} ({devices} {noun}), mesh {mesh}", style="bold")
    fits, used = prediction.fits, prediction.peak_bytes
    if compiled is not None:
        fits = compiled.fits
        used = compiled.reserved_bytes or compiled.peak_bytes or used
    verdict = Text("FITS", style="bold green") if fits else Text("DOES NOT FIT", style="bold red")
    of = f": {format_bytes(used)} of {format_bytes(plan.memory_limit_bytes)} a device"
    verdict.append(of, style="not bold default")
    if plan.memory_limit_bytes:
        verdict.append(f" ({used / plan.memory_limit_bytes:.0%})", style="not bold default")
    form = FORMS.get(plan.origin.form or "")
    if form is not None and form.gathers and (eager := eager_peak(plan, prediction)):
        verdict.append(f", {format_bytes(eager)} in eager torch", style="not bold default")
    if compiled is None and plan.memory_within is not None:
        verdict.append(f", within a factor {plan.memory_within:.1f}", style="not bold default")
    if compiled is not None and (factor := _missed(prediction.peak_bytes, used)):
        words = f", where {format_bytes(prediction.peak_bytes)} was predicted, off by a factor {factor:.1f}"
        verdict.append(words, style="not bold default")
    recipe = Text("RECIPE", style="bold").append(f": {clean(figures.recipe_line(plan))}", style="not bold")
    step = Text("STEP", style="bold").append(f": {_step_words(plan)}", style="not bold")
    learned = figures.learned_line(plan)
    prices = [Text("PRICES", style="bold").append(f": {learned}", style="not bold")] if learned else []
    last = [] if compiled is None else [_compiled(plan, compiled)]
    return Group(title, Text(), verdict, step, recipe, *prices, *last)


def _step_words(plan: Plan) -> str:
    """Return the words of the headline on the step: its time, tokens a second, MFU and the best baseline.

    A compiled time that the prediction misses beyond the estimate's error stands first. Its tokens a second are of that
    time, and it is compared with no baseline, as those are not compiled. A time in eager torch stands before both, and
    tokens a second and MFU are of it.
    """
    prediction, compiled = plan.prediction, plan.compiled
    predicted_s, step_s, eager_s = prediction.step_time_s, prediction.step_time_s, prediction.eager_step_time_s
    words = f"{format_seconds(predicted_s)} ({plan.time_error_words})"
    form = FORMS.get(plan.origin.form or "")
    if form is not None and form.gathers and plan.origin.tokens and not eager_s:
        words += ", with compiled ops: eager torch is not priced"
    if eager_s:
        words = f"{format_seconds(eager_s)} in eager torch, {format_seconds(predicted_s)} with compiled ops"
    source = ""
    if compiled is not None and compiled.step_time_s and (factor := _missed(predicted_s, compiled.step_time_s)):
        estimated = f"{format_seconds(compiled.step_time_s)} +- {compiled.error or 0:.0%} as compiled"
        source = " as predicted" if compiled.undecided else " as compiled"
        if not compiled.undecided:
            step_s = compiled.step_time_s
            words = f"{estimated}, where {format_seconds(predicted_s)} was predicted, off by a factor {factor:.1f}"
        else:
            words = f"{words} as predicted, {estimated}: undecided, they differ by less than the estimate's error"
    if plan.origin.tokens and step_s > 0:
        rate = plan.origin.tokens / (eager_s or step_s)
        share = format_count(rate / math.prod(plan.mesh.values()))
        words += f", {format_count(rate)} tokens/s ({share} a device){source}"
    if step_s != predicted_s:
        return f"{words}; not compared with baselines"
    if prediction.mfu is not None:
        narrow = figures.quantized(plan)
        mfu = prediction.mfu * predicted_s / (eager_s or predicted_s)
        words += f", MFU {mfu:.1%}" + (f" of the peak in {narrow}" if narrow else "")
    return f"{words}; {_against_best(plan)}"


def _missed(predicted: float, compiled: float) -> float:
    """Return the factor between a prediction and the compiled program's figure if it is above `USUAL`, else 0.

    Figures of 0 are unknown, and miss nothing.
    """
    if predicted <= 0 or compiled <= 0:
        return 0.0
    factor = max(predicted / compiled, compiled / predicted)
    return factor if factor > USUAL else 0.0


def _compiled(plan: Plan, compiled: CompiledStep) -> Text:
    """Return a line on the memory of the compiled program, and one on its schedule if it has one."""
    peak = "not said" if compiled.peak_bytes is None else format_bytes(compiled.peak_bytes)
    words = f": memory predicted {format_bytes(plan.prediction.peak_bytes)}, peak {peak}"
    if compiled.reserved_bytes is not None:
        words += f", reserved {format_bytes(compiled.reserved_bytes)}"
    if compiled.fits and compiled.verdict != "fits":
        words += f"\n  {compiled.verdict}"
    if compiled.step_time_s is not None:
        step = f"{format_seconds(compiled.step_time_s)} +- {compiled.error or 0:.0%}"
        words += f"\n  step {step} by the compiler's schedule"
    return Text("COMPILED", style="bold").append(words, style="not bold")


def _against_best(plan: Plan) -> str:
    """Return words that compare the plan with the best baseline that fits.

    The ratio is the baseline's step time over the plan's, above 1 if the plan is faster. Both count as equal within
    0.05 %, and within the error of ratios of measured runs. Without a fitting baseline, or with a step time of 0, words
    replace the ratio. Both times are of eager torch if the plan's is known.
    """
    best, eager = figures.best_baseline(plan), plan.prediction.eager_step_time_s is not None
    if best is None:
        held = f" that the {plan.origin.form} form can hold" if eager else ""
        return f"no baseline{held} fits" if plan.baselines else "no baseline to compare with"
    name, baseline = best
    if plan.prediction.step_time_s <= 0:
        return f"the best baseline that fits is {name}"
    ratio = baseline.compared_s / plan.prediction.compared_s
    run = " in eager torch" if eager else ""
    if abs(ratio - 1) < 5e-4:
        return f"as fast as the best baseline that fits{run}, {name}"
    if not eager and plan.time_error is not None and 1.0 - min(ratio, 1.0 / ratio) <= plan.time_error.ratio:
        error = f"{plan.time_error.ratio:.0%}"
        return f"as fast as the best baseline that fits, {name} ({ratio:.2f}x, where ratios may be {error} wrong)"
    not_held = not eager and name in plan.origin.not_held
    lost = f", with splits that the {plan.origin.form} form cannot state" if not_held else ""
    return f"{ratio:.2f}x the speed of the best baseline that fits{run}, {name}{lost}"


def _section(title: str, body: RenderableType | None) -> list[RenderableType]:
    """Return a blank line, the title and the body of a section; an empty list if the body is None."""
    return [] if body is None else [Text(), Text(title, style="bold"), body]


def _bullets(lines: Sequence[str], style: str = "") -> RenderableType | None:
    """Return lines as a list with bullets, in a rich style, without control characters; None without lines."""
    if not lines:
        return None
    table = Table.grid(padding=(0, 1, 0, 1))
    for line in lines:
        table.add_row(Text("-"), Text(clean(line), style=style))
    return table


def _split_table(plan: Plan, title: str, names: Sequence[str], width: int) -> RenderableType | None:
    """Return the table of the largest of some arguments, with their splits; None without arguments.

    Arguments of several layers with the same shape, spec and dtype share a row, and their bytes are summed. Rows are
    ordered by total bytes, the largest first, at most `PARAMETERS`. `width` is that of the terminal in characters.
    """
    groups = fold(names, key=lambda name: (plan.shapes[name], plan.arguments[name], plan.dtypes[name]))
    if not groups:
        return None
    rows = []
    for shown, members in groups:
        size = len(members) * figures.tensor_bytes(plan.shapes[members[0]], plan.dtypes[members[0]])
        rows.append((size, shown, members))
    rows.sort(key=lambda row: -row[0])
    table = plain_table(title, "split shape", "a device holds", left=2)
    cells = []
    for size, shown, members in rows[:PARAMETERS]:
        spec, shape = plan.arguments[members[0]], plan.shapes[members[0]]
        shards = spec.shards(plan.mesh)
        times = f"{len(members)} tensors of " if len(members) > 1 else ""
        held = f"{format_bytes(size / shards)}, {'all' if shards == 1 else f'1/{shards}'}"
        cells.append((shown, Text(times).append_text(_split_shape(shape, spec)), held))
    # Names have what the other columns leave: those of large models differ in their middle only.
    taken = sum(max(len(row[column]) for row in cells) for column in (1, 2))
    for shown, split, held in cells:
        table.add_row(shown_name(shown, max(width - taken - 6, 26)), split, held)
    body: list[RenderableType] = [Padding(table, (0, 0, 0, 2))]
    if len(rows) > PARAMETERS:
        body.append(Text(f"  and {len(rows) - PARAMETERS} more", style="dim"))
    return Group(*body)


def _split_shape(shape: tuple[int, ...], spec: Spec) -> Text:
    """Return a shape with its axes in colour: `32 x 14336/model x 4096/data`."""
    text = Text(spec_text(spec, shape))
    text.highlight_regex(r"(?<=\d)/.*?(?= x |$)", "cyan")
    return text


def _bar(parts: list[tuple[float, str, str]], whole: float) -> Text:
    """Return a bar of parts (value, character, style), drawn to scale; a part too thin to draw is left out.

    `whole` is the value of a full bar of `BAR` characters, in the unit of the parts; 0 or less draws none of them.
    """
    bar = Text("  ")
    drawn = position = 0.0
    for value, character, style in parts:
        position += value / whole * BAR if whole > 0 else 0
        cells = round(position) - round(drawn)
        bar.append(character * cells, style=style)
        drawn = position
    return bar


def _time(prediction: Prediction) -> RenderableType:
    """Return a full bar of compute and exposed communication, with their seconds below.

    Hidden communication of at least a nanosecond has a further line.
    """
    total = prediction.compute_s + prediction.exposed_comm_s
    bar = _bar([(prediction.compute_s, "█", "green"), (prediction.exposed_comm_s, "▒", "red")], total)
    legend = Text("  ")
    legend.append("█ ", style="green").append(f"compute {format_seconds(prediction.compute_s)}   ")
    legend.append("▒ ", style="red").append(f"exposed communication {format_seconds(prediction.exposed_comm_s)}")
    if prediction.hidden_comm_s < 1e-9:
        return Group(bar, legend)
    hidden = Text(f"  and {format_seconds(prediction.hidden_comm_s)} of communication hidden behind the compute")
    return Group(bar, legend, hidden)


_MEMORY_STYLES = ("blue", "cyan", "magenta", "green", "yellow", "red", "bright_blue", "bright_magenta")
_SHADES = "█▓▒░"
"""Colours and characters of the kinds of memory in turn, the largest kind first."""


def _memory(plan: Plan) -> RenderableType:
    """Return the bar of a device's memory by kind at the peak, the largest kind first, with a legend in two columns.

    The limit is the full bar, so a plan that does not fit has a longer one. Kinds of 0 bytes are omitted.
    """
    prediction = plan.prediction
    kinds = sorted(((size, kind) for kind, size in prediction.memory.items() if size > 0), reverse=True)
    marks = [
        (size, _SHADES[i % len(_SHADES)], _MEMORY_STYLES[i % len(_MEMORY_STYLES)]) for i, (size, _) in enumerate(kinds)
    ]
    bar = _bar([(float(size), mark, style) for size, mark, style in marks], max(plan.memory_limit_bytes, 1))
    free = max(BAR + 2 - len(bar), 0)
    bar.append("·" * free, style="dim").append(f" {format_bytes(plan.memory_limit_bytes)}", style="dim")
    grid = Table.grid(padding=(0, 3, 0, 0))
    cells = []
    for (size, mark, style), (_, kind) in zip(marks, kinds, strict=True):
        cells.append(
            Text("  ").append(f"{mark} ", style=style).append(f"{kind.replace('_', ' ')} {format_bytes(size)}")
        )
    for start in range(0, len(cells), 2):
        grid.add_row(*cells[start : start + 2])
    return Group(bar, grid)
