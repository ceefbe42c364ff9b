"""Judges, which time plans by a source independent of the prices that chose them, and their judgements."""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

from autoshard.cost import Judge, Topology
from autoshard.errors import UserError
from autoshard.exec.ahead.compile_plans import Verdict, compile_plans
from autoshard.exec.devices.local_devices import ensure_devices
from autoshard.exec.run.measurement import verify_program
from autoshard.exec.run.planned_steps import PlannedStep, failure, first_arguments, quartiles, run_in_turn
from autoshard.planning import Plan
from autoshard.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """Judgement of one plan; `failed` has the reason if there is none."""

    seconds: float | None = None
    """Seconds of one step; None if the plan does not fit, its schedule cannot be timed, or the judge failed."""
    error: float = 0.0
    """Relative uncertainty of the time. For a compiled schedule it was measured on published runs; for measured steps
    it is half the distance of the quartiles over the median.
    """
    verdict: str = ""
    """Verdict of the compiler (`Verdict`), or `ran` for a measured plan; empty for a failure."""
    peak_bytes: int | None = None
    """Peak bytes of one device, if the judge reports them."""
    hidden_share: float | None = None
    """Share, from 0 to 1, of the communication time that the compiler's schedule hides behind compute; None without
    any.
    """
    hidden: dict[str, float] | None = None
    """Hidden share of each class of communication (`cost.traffic_class`); None without any."""
    failed: str = ""
    """Reason why the judge gave no judgement; else empty."""

    @property
    def fits(self) -> bool:
        """True if the plan ran, or compiled, within a device's memory; False for a failure."""
        return not self.failed and self.verdict != Verdict.DOES_NOT_FIT.value

    def to_json(self) -> dict[str, Any]:
        """Return the fields that the database stores: all but `failed` and those that are None."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None and key != "failed"}


class Judging(Protocol):
    """Judge of several plans of one program, which it times.

    `judge` yields each plan's name and judgement as soon as it is known, in any order; `progress` receives lines of
    progress.
    """

    @property
    def name(self) -> Judge: ...

    def judge(
        self, program: Program, plans: Mapping[str, Plan], progress: Callable[[str], None]
    ) -> Iterator[tuple[str, Seen]]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class CompileJudge:
    """Judge that compiles for TPUs or GPUs without devices: it reports memory and overlap, and prices the schedule."""

    time_limit: float = 600.0
    """Most seconds of compiling one plan."""
    name: Judge = "compile"
    executor: concurrent.futures.Executor | None = None
    """Executor of the compilations; None compiles here, one plan after the other."""

    def judge(
        self, program: Program, plans: Mapping[str, Plan], progress: Callable[[str], None]
    ) -> Iterator[tuple[str, Seen]]:
        """Yield the name and judgement of each plan as its compilation ends; a `UserError` becomes a failed
        judgement.
        """
        compiled = compile_plans(program, plans, self.time_limit, quick=True, executor=self.executor, progress=progress)
        for name, report in compiled:
            if isinstance(report, UserError):
                yield name, Seen(failed=str(report))
                continue
            timed = report.estimate
            if timed is None:
                yield name, Seen(verdict=report.verdict.value, peak_bytes=report.peak_compiled)
                continue
            sent = timed.hidden_comm_s + timed.exposed_comm_s
            yield (
                name,
                Seen(
                    seconds=timed.step_time_s,
                    error=timed.error,
                    verdict=report.verdict.value,
                    peak_bytes=report.peak_compiled,
                    hidden_share=timed.hidden_comm_s / sent if sent > 0 else None,
                    hidden=timed.hidden or None,
                ),
            )


@dataclasses.dataclass(frozen=True, slots=True)
class MeasureJudge:
    """Judge that runs plans on the devices present, one step of each in turn, under the same machine conditions."""

    steps: int = 10
    """Timed steps of each plan."""
    warmup: int = 2
    """Untimed steps of each plan before them, in addition to one after compilation."""
    seed: int = 0
    """Seed of the example arguments."""
    name: Judge = "measure"

    def judge(
        self, program: Program, plans: Mapping[str, Plan], progress: Callable[[str], None]
    ) -> Iterator[tuple[str, Seen]]:
        """Yield failures while plans compile, then the name and judgement of each plan after all steps.

        The seconds are the median of the steps. If the runtime fails during the timed steps, all remaining plans are
        failures. Raises `UserError` if there are too few devices.
        """
        import jax

        if not plans:
            return
        ensure_devices(max(len(plan.device_order) for plan in plans.values()))
        first_args = first_arguments(program, self.seed)
        ready: dict[str, PlannedStep] = {}
        for name, plan in plans.items():
            progress(f"Compiling {name} for the devices here")
            try:
                ready[name] = PlannedStep(verify_program(program, plan), plan, first_args)
                ready[name].run()
            except jax.errors.JaxRuntimeError as error:
                ready.pop(name, None)
                yield name, Seen(failed=str(failure(plan, error)))
            except UserError as error:
                yield name, Seen(failed=str(error))
        if not ready:
            return
        progress(f"Running {self.steps} steps of each of {', '.join(ready)} in turn")
        try:
            times = run_in_turn(ready, rounds=self.steps, warmup=self.warmup)
        except jax.errors.JaxRuntimeError as error:
            for name in ready:
                yield name, Seen(failed=str(failure(plans[name], error)))
            return
        for name, seconds in times.items():
            low, middle, high = quartiles(seconds)
            yield name, Seen(middle, (high - low) / 2 / middle, "ran")


def judge_of(
    name: Judge | None,
    topology: Topology,
    steps: int,
    time_limit: float,
    executor: concurrent.futures.Executor | None = None,
) -> Judging:
    """Return the judge of that name; None is `measure` for CPU topologies, and `compile` for others.

    - `steps`: timed steps of each plan, for `measure`.
    - `time_limit`: most seconds of compiling one plan, for `compile`.
    - `executor`: executor of the compilations; None compiles here.

    Raises `UserError` for an unknown name, and for a topology that cannot be compiled for without devices. Raises it
    also for `measure` with an executor or with fewer than 1 step.
    """
    name = name or cast(Judge, topology.traits.judge)
    if name == "measure":
        if steps < 1:
            raise UserError(f"refine: {steps} steps are to be timed; at least 1 is needed.")
        if executor is not None:
            raise UserError("refine: the judge measure runs plans on the devices that are here, not by an executor.")
        return MeasureJudge(steps)
    if name != "compile":
        raise UserError(f"{name!r} is no judge; there are compile and measure.")
    if not topology.traits.compiles_without_devices:
        raise UserError(
            f"the judge compile is for TPU and GPU topologies, and {topology.name} is neither: use measure, where the "
            "devices are."
        )
    return CompileJudge(time_limit, executor=executor)
