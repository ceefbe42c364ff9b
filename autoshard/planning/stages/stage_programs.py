"""Plans of torch modules as a program for each stage: cut between modules, for runtimes that run stages separately."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from autoshard.base.units import format_bytes
from autoshard.cost import ZERO_BUBBLE, Schedule, Topology, make_schedule, parse_mesh
from autoshard.errors import InfeasibleError, UserError
from autoshard.planning.price.analysed_program import analyse_program, reprice
from autoshard.planning.price.step_ledger import itemise
from autoshard.planning.record.plan_parts import Timeline
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.planned_stages import FORM_BY_STAGE
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.plan_options import Options
from autoshard.planning.stages.segment_prices import SegmentPrices, segment_prices
from autoshard.planning.stages.stage_cut import Cut, NoCutError, SegmentCosts, best_cut
from autoshard.planning.stages.stage_plans import AXIS, planned_stages, stages_notes, stages_prediction
from autoshard.program import NotDividedError, Program, Segments, in_segments


COUNTS = (1, 2, 4, 8)
"""Microbatches per stage that the planner tries if their number is open."""
SCHEDULES = ("1f1b", "gpipe", "interleaved:2", "interleaved:3")
"""Schedules that the planner tries if the schedule is open."""
AUTO = "auto"
"""Value of an option that leaves the choice to the planner."""


def is_by_stage(options: Mapping[str, Any], form: str | None) -> bool:
    """Return True if the options ask for a program for each stage.

    They do so by the form of such an export, or by a schedule that only separate programs have.
    """
    name = str(options.get("schedule") or "").partition(":")[0]
    return form == FORM_BY_STAGE or name in ("1f1b", "interleaved", ZERO_BUBBLE)


@dataclasses.dataclass(frozen=True, slots=True)
class StagesAsked:
    """The user's options on the stages of a plan with a program for each."""

    stages: int | None
    """Number of stages; None leaves it to the planner."""
    microbatches: int | None
    """Number of microbatches; None leaves it to the planner."""
    schedule: str | None
    """Schedule as `make_schedule` reads it; None leaves it to the planner."""


def read_stages(options: Mapping[str, Any], topology: str) -> StagesAsked:
    """Return the user's options on stages; without a schedule it is `1f1b`, without a number of microbatches None.

    Raises `UserError`, one sentence, without stages, for stages that do not divide the devices, and for impossible
    schedules. Raises it also for other options that are `auto`, and for options of one program alone.
    """
    stages, count, schedule = (options.get(name) for name in ("stages", "microbatches", "schedule"))
    if stages is None:
        raise UserError(f"a program for each stage needs stages: add --stages 2 or more, or --stages {AUTO}.")
    devices = Topology.parse(topology).num_devices
    numbers = [n for n in range(2, devices + 1) if devices % n == 0]
    if not numbers:
        raise UserError(f"stages need devices of their own, and {topology} has one; use a larger topology.")
    if stages != AUTO and stages not in numbers:
        listed = ", ".join(map(str, numbers[:8]))
        raise UserError(f"{stages} stages do not divide the {devices} devices of {topology}; use {listed}.")
    for name in ("remat", "batch", "experts", "exchange", "host", "pad", "quantize"):
        if options.get(name) == AUTO:
            raise UserError(f"--{name} {AUTO} is not chosen together with a program for each stage; say which.")
    if options.get("host") not in (None, "none"):
        raise UserError(f"--host {options['host']} is for one program; leave it out with a program for each stage.")
    if options.get("gradient_groups") not in (None, 1):
        raise UserError("--gradient-groups is for one program: a program for each stage sums gradients once as it is.")
    text = None if schedule == AUTO else str(schedule or "1f1b")
    if text is not None and text.partition(":")[0] == "circular":
        raise UserError(
            f"schedule `{text}` is that of one program; a program for each stage has gpipe, 1f1b or interleaved:2."
        )
    if text is not None:
        make_schedule(text, 2, 2)
    return StagesAsked(
        None if stages == AUTO else int(stages), None if count in (None, AUTO) else int(count), text
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """A cut with the plan and the prices under which it was found."""

    cut: Cut
    schedule: Schedule
    """Schedule for which the cut is the best."""
    plan: Plan
    """Plan of one microbatch on the devices of one stage."""
    model: Model
    """Priced step of that plan."""
    prices: SegmentPrices
    """Prices of the segments under that plan."""
    segments: Segments
    """Segments of the traced module."""


# End of the message for a schedule without any cut, at any memory limit.
_NOT_HANDED_ON = (
    "sends each value to the next stage alone, with a gradient. Skip connections must stay within two stages; masks, "
    "values of inputs alone and shared parameters within one. Use fewer stages or chunks."
)


def _may_be_cut(costs: SegmentCosts, schedule: Schedule) -> bool:
    """Return True if any cut exists without a memory limit, by a search that stops at the first."""
    try:
        best_cut(costs, schedule, leaves=1)
    except NoCutError:
        return False
    return True


class _TooManyStagesError(UserError):
    """More stages, or chunks of layers, than places where one may begin."""


class StageSearch:
    """Search over all open numbers of stages, microbatches and schedules, with the best cut of each.

    Every number of microbatches is planned as a step of one microbatch on the devices of one stage. `best_cut` finds
    the cut under the prices of that plan.
    """

    def __init__(
        self,
        make: Callable[..., Program],
        sharded: Callable[[Program, Options], Plan],
        user_options: Mapping[str, Any],
        options: Options,
        progress: Callable[[str], None],
    ) -> None:
        """Create a search.

        - `make`: `make(**more)` opens the program with the options in `user_options`, except those of stages, and with
          `more`.
        - `sharded`: `sharded(program, options)` plans one program.
        - `user_options`: the user's options of the source.
        - `options`: options of planning.
        - `progress`: receives lines of progress.

        Raises `UserError` for impossible stages, and for several candidates.
        """
        self.asked, topology = read_stages(user_options, options.topology), Topology.parse(options.topology)
        if options.candidates > 1:
            raise UserError(
                f"{options.candidates} candidates are asked for, but a program for each stage has one plan."
            )
        self.make, self.sharded, self.user_options, self.options = make, sharded, user_options, options
        self.topology, self.progress = topology, progress
        self.limit = topology.usable_bytes if options.memory_limit is None else options.memory_limit
        self.best: _Found | None = None
        self.tried: list[dict[str, Any]] = []
        self.refused: list[str] = []
        self.meshes: dict[int, dict[str, int]] = {}

    def run(self) -> Plan:
        """Return the fastest plan over all open numbers and schedules.

        Open stages are divisors of the devices from 2 to 64. Open microbatches are `COUNTS` for each stage; numbers
        that do not divide the batch are skipped.

        Raises `UserError` for a program that is no torch module or cannot be cut this way. Raises `InfeasibleError` if
        no cut fits the memory limit.
        """
        devices = self.topology.num_devices
        divisors = [n for n in range(2, min(devices, 64) + 1) if devices % n == 0]
        for stages in [self.asked.stages] if self.asked.stages is not None else divisors:
            counts = [self.asked.microbatches] if self.asked.microbatches else [stages * n for n in COUNTS]
            try:
                self._planned_with(stages, counts)
            except _TooManyStagesError:
                if self.best is None:
                    raise
                break  # further numbers are larger
        if self.best is None:
            if self.refused:
                reason = self.refused[-1]
                raise UserError(reason) if reason.endswith(_NOT_HANDED_ON) else InfeasibleError(reason)
            raise UserError(
                "no number of microbatches that is 1, 2, 4 or 8 for each stage divides the batch; say --microbatches, "
                "or use another batch."
            )
        return self._plan(self.best)

    def _schedules(self, stages: int, count: int, of_jax: bool) -> Iterator[Schedule]:
        """Yield the schedules that suit the numbers of stages and microbatches: the user's, or those of `SCHEDULES`.

        JAX steps (`of_jax`) have the zero-bubble schedule too. Raises `UserError` if the user asked for it with a torch
        module, or gave an unsuitable schedule and the number of microbatches.
        """
        if self.asked.schedule == ZERO_BUBBLE and not of_jax:
            raise UserError(
                f"schedule `{ZERO_BUBBLE}` is for JAX steps; a torch module has gpipe, 1f1b or interleaved:2."
            )
        every = (*SCHEDULES, ZERO_BUBBLE) if of_jax else SCHEDULES
        for text in [self.asked.schedule] if self.asked.schedule else every:
            try:
                yield make_schedule(text, stages, count)
            except UserError:
                if self.asked.schedule and self.asked.microbatches:
                    raise

    def _planned_with(self, stages: int, counts: Iterable[int]) -> None:
        """Apply `_planned` to each number of microbatches; open numbers that do not divide the batch are skipped."""
        for count in counts:
            try:
                self._planned(stages, count)
            except NotDividedError:
                if self.asked.microbatches:
                    raise

    def _planned(self, stages: int, count: int) -> None:
        """Find the best cut of one number of stages and microbatches, for each schedule; record it by `_keep`.

        Schedules without a cut are recorded by `_refuse`. Raises `UserError` for a program that is no torch module.
        Raises `_TooManyStagesError` for more stages (or chunks of the user's schedule) than places to begin one. Raises
        `NotDividedError` if the microbatches do not divide the batch.

        The step is planned with the memory of all stages on each device first. Schedules without a cut that fits are
        tried again with half of that memory, down to that of one device.
        """
        self.progress(f"Tracing one of {count} microbatches")
        with in_segments(count) as segments:
            program = self._opened(count)
        if not segments.names:
            raise UserError(
                f"{program.name} has neither the modules of a torch module nor marks by autoshard.segment, between "
                "which stages could be cut: mark its layers, or cut stacked layers by --schedule gpipe or circular."
            )
        if segments.module is None and self.options.form is not None:
            raise UserError(f"--for {self.options.form} takes torch modules; leave it out for {program.name}.")
        schedules = list(self._schedules(stages, count, segments.module is None))
        places = sum(segments.may_cut)
        for rounds in {schedule.rounds for schedule in schedules}:
            if stages * rounds > places and (self.asked.schedule or rounds == 1):
                raise _TooManyStagesError(
                    f"{stages * rounds} {'chunks of layers' if rounds > 1 else 'stages'} are more than the {places} "
                    f"modules or segments of {program.name} that one may begin with; use fewer stages, and a name of "
                    "its own for each segment."
                )
        share = stages
        reading = analyse_program(program, self.topology)
        while schedules:
            try:
                plan = self._sharded(program, stages, share)
            except InfeasibleError:  # if all stages together do not fit, no cut does
                break
            model, choices = reprice(plan, program, reading)
            anywhere = segments.module is None
            prices = segment_prices(itemise(model, choices), segments.may_cut, AXIS, count, anywhere)
            refused = []
            for schedule in schedules:
                self.progress(f"cutting into {schedule.words()}")
                try:
                    cut = best_cut(prices.costs, schedule, self.limit)
                except NoCutError:
                    if _may_be_cut(prices.costs, schedule):
                        refused.append(schedule)
                    else:
                        self._refuse(schedule, _NOT_HANDED_ON)
                    continue
                self._keep(_Found(cut, schedule, plan, model, prices, segments))
            schedules = refused
            if share <= 1:
                break
            share = max(1, share // 2)
        for schedule in schedules:
            self._refuse(
                schedule,
                f"keeps within {format_bytes(self.limit)} of a device; use more stages, --remat full or more "
                "microbatches.",
            )

    def _refuse(self, schedule: Schedule, why: str) -> None:
        """Record that a schedule has no cut; `why` ends the sentence `no cut into ...`."""
        parts = f"{schedule.stages} stages with {schedule.microbatches} microbatches by {schedule}"
        self.refused.append(f"no cut into {parts} {why}")
        self.tried.append(self._row(schedule, None))

    def _opened(self, count: int) -> Program:
        """Return the program with one of `count` microbatches; raise `NotDividedError` if they do not divide the batch.

        Without a batch among the user's options, the program itself divides its inputs.
        """
        batch = self.user_options.get("batch")
        if not isinstance(batch, int):
            return self.make()
        if batch % count:
            raise NotDividedError(f"{count} microbatches do not divide the batch of {batch}; use a divisor of it.")
        return self.make(batch=batch // count)

    def _sharded(self, program: Program, stages: int, share: int) -> Plan:
        """Return a plan of one microbatch on the devices of one stage, with `share` times the memory of a device.

        The first call for a number of stages plans every candidate mesh and stores the fastest plan's mesh. Later calls
        use that mesh. No tensor is split over the stages.
        """
        asked = dataclasses.replace(self.options.asked, axis_only=(*self.options.asked.axis_only, (AXIS, ())))
        plans: list[Plan] = []
        for mesh in [self.meshes[stages]] if stages in self.meshes else self._meshes(stages):
            inner = dataclasses.replace(
                self.options, mesh=mesh, asked=asked, form=None, memory_limit=share * self.limit, refine_axes=False
            )
            plans.append(self.sharded(program, inner))
        best = min(plans, key=lambda plan: plan.prediction.step_time_s)
        self.meshes[stages] = dict(best.mesh)
        return best

    def _meshes(self, stages: int) -> list[dict[str, int]]:
        """Return the candidate meshes: the axis of stages, and the axes of one stage's devices.

        The axes of one stage are the user's, or else `data` alone, and `data` with `model` as near to a square as
        possible. Raises `UserError` for a given mesh of other sizes.
        """
        own, given = self.topology.num_devices // stages, self.options.mesh
        if given is not None and given != AUTO:
            axes = dict(parse_mesh(given)) if isinstance(given, str) else dict(given)
            inner = {name: size for name, size in axes.items() if name != AXIS}
            if axes.get(AXIS, stages) != stages or math.prod(inner.values()) != own:
                raise UserError(
                    f"the mesh {given if isinstance(given, str) else axes} is not that of {stages} stages on "
                    f"{self.topology.num_devices} devices; leave it out, or write {AXIS}={stages} and "
                    f"the axes of one stage, such as data={own}."
                )
            return [{AXIS: stages, **inner}]
        if own == 1:
            return [{AXIS: stages}]
        small = max(n for n in range(1, math.isqrt(own) + 1) if own % n == 0)
        square = [{AXIS: stages, "data": own // small, "model": small}] if small > 1 else []
        return [{AXIS: stages, "data": own}, *square]

    def _keep(self, found: _Found) -> None:
        """Record a cut in `tried`; store it as `best` if it is faster than the best so far."""
        self.tried.append(self._row(found.schedule, found.cut))
        # Equal times, up to rounding, leave the earlier cut.
        if self.best is None or found.cut.step_time_s < self.best.cut.step_time_s * (1 - 1e-9):
            self.best = found

    def _row(self, schedule: Schedule, cut: Cut | None) -> dict[str, Any]:
        """Return the figures of a cut for the plan file; None for each if there is no cut."""
        return {
            "stages": schedule.stages,
            "schedule": str(schedule),
            "microbatches": schedule.microbatches,
            "step_time_s": None if cut is None else cut.step_time_s,
            "bound_s": None if cut is None else cut.bound_s,
            "peak_bytes": None if cut is None else round(max(cut.memory_bytes)),
        }

    def _plan(self, found: _Found) -> Plan:
        """Return the plan of one microbatch rewritten as the plan of the whole step.

        Prediction, bound, pipeline and notes are those of the cut. Pins, calls, regions, baselines and the timeline's
        spans are dropped. The provenance lists all cuts tried, the fastest first.
        """
        plan, pipeline = found.plan, planned_stages(found.cut, found.schedule, found.prices, found.segments.names)
        prediction = stages_prediction(found.model, found.cut, found.schedule, found.prices, pipeline)
        step_s = prediction.step_time_s
        origin = {key: value for key, value in plan.provenance.items() if key not in ("asked", "pinned", "flag_sets")}
        if self.options.asked:
            origin["asked"] = self.options.asked.lines
        if "tokens" in origin:
            origin["tokens"] *= found.schedule.microbatches
        source = origin.get("source")
        if source is not None:
            stages, count = found.schedule.stages, found.schedule.microbatches
            parts = {"stages": stages, "microbatches": count, "schedule": str(found.schedule)}
            batch = {"batch": self.user_options["batch"]} if isinstance(self.user_options.get("batch"), int) else {}
            origin["source"] = source | {"options": {**source["options"], **batch, **parts}}
        others = sorted(self.tried, key=lambda row: (row["step_time_s"] is None, row["step_time_s"] or 0.0))
        words = [line for line in plan.words if AXIS not in line]
        warnings = [line for line in plan.warnings if f"along {AXIS}" not in line and not line.startswith("memory is")]
        training = found.model.program.training
        notes = stages_notes(training, found.schedule, found.prices, found.segments)
        module = found.segments.module
        return dataclasses.replace(
            plan,
            memory_limit_bytes=self.limit,
            pins=(),
            regions=(),
            calls=(),
            prediction=prediction,
            baselines={},
            objective=round(step_s * 1e12),
            lower_bound=round(found.cut.bound_s * 1e12),
            solver_gap=0.0,
            plan_gap=max(0.0, 1 - found.cut.bound_s / step_s),
            words=(f"modules in {found.schedule.stages} stages over {AXIS}", *words),
            warnings=(*warnings, *notes),
            provenance=origin | ({} if module is None else {"for": FORM_BY_STAGE}) | {"stages": others},
            timeline=Timeline(step_s, (), (), {}),
            unruled=(),
            choices="",
            meshes=(),
            pipeline=pipeline,
        )
