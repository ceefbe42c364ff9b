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
    """Seconds of one step; None if the plan does not fit or the judge failed."""
    error: float = 0.0
    """Relative uncertainty of the time. For a compiled schedule it was measured on published runs; for measured steps
    it is half the distance of the quartiles over the median.
    """
    verdict: str = ""
    peak_bytes: int | None = None
    """Peak bytes of one device, if the judge reports them."""
    hidden_share: float | None = None
    """Share of the communication time that the compiler's schedule hides behind compute."""
    hidden: dict[str, float] | None = None
    """Hidden share of each class of communication (`cost.traffic_class`)."""
    failed: str = ""

    @property
    def fits(self) -> bool:
        """True if the plan ran, or compiled, within a device's memory."""
        return not self.failed and self.verdict != Verdict.DOES_NOT_FIT.value

    def to_json(self) -> dict[str, Any]:
        """Return the fields that the database stores."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None and key != "failed"}


class Judging(Protocol):
    """Judge of several plans of one program; it yields each name and judgement as soon as it is known."""

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
        """Yield the name and judgement of each plan as its compilation ends."""
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
    warmup: int = 2
    seed: int = 0
    name: Judge = "measure"

    def judge(
        self, program: Program, plans: Mapping[str, Plan], progress: Callable[[str], None]
    ) -> Iterator[tuple[str, Seen]]:
        """Yield failures while plans compile, then the name and judgement of each plan after all steps."""
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
    """Return the judge of that name; by default `measure` for CPU topologies, and `compile` for others.

    - `steps`: timed steps of each plan, for `measure`.
    - `time_limit`: most seconds of compiling one plan.
    - `executor`: executor of the compilations.

    Raises `UserError` for an unknown name, for a topology that cannot be compiled for without devices, and for an
    executor with `measure`.
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
