"""Judges: who says how long plans take by more than the prices that chose them, and what they saw."""

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
    """What a judge says of one plan; `failed` says why it says nothing."""

    seconds: float | None = None
    """Step time; None where the plan does not fit or the judge failed."""
    error: float = 0.0
    """Share by which the time may be wrong: of a schedule as measured on published runs, of a measurement half the
    distance of its quartiles."""
    verdict: str = ""
    peak_bytes: int | None = None
    """Peak memory of one device, where the judge says it."""
    hidden_share: float | None = None
    """Share of the communication that the compiler's schedule hides behind compute."""
    hidden: dict[str, float] | None = None
    """The hidden share of each class of communication (`cost.traffic_class`)."""
    failed: str = ""

    @property
    def fits(self) -> bool:
        """Whether it ran, or compiled, within a device's memory."""
        return not self.failed and self.verdict != Verdict.DOES_NOT_FIT.value

    def to_json(self) -> dict[str, Any]:
        """What the database keeps of it."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None and key != "failed"}


class Judging(Protocol):
    """Says what it sees of plans of one program, by name, each as soon as it is known."""

    @property
    def name(self) -> Judge: ...

    def judge(
        self, program: Program, plans: Mapping[str, Plan], progress: Callable[[str], None]
    ) -> Iterator[tuple[str, Seen]]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class CompileJudge:
    """The compiler of TPUs or of GPUs with none present: whether a plan fits, and what runs beside what. Times are our
    prices of its schedule."""

    time_limit: float = 600.0
    """Seconds that the compiler may take for each plan."""
    name: Judge = "compile"
    executor: concurrent.futures.Executor | None = None
    """Whose tasks the compilations are; None if they are made here, one after the other."""

    def judge(
        self, program: Program, plans: Mapping[str, Plan], progress: Callable[[str], None]
    ) -> Iterator[tuple[str, Seen]]:
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
    """The devices that are here. Plans run in turn, a step of each, so that all meet the same machine."""

    steps: int = 10
    warmup: int = 2
    seed: int = 0
    name: Judge = "measure"

    def judge(
        self, program: Program, plans: Mapping[str, Plan], progress: Callable[[str], None]
    ) -> Iterator[tuple[str, Seen]]:
        import jax

        if not plans:
            return
        ensure_devices(max(len(plan.device_order) for plan in plans.values()))
        made = first_arguments(program, self.seed)
        ready: dict[str, PlannedStep] = {}
        for name, plan in plans.items():
            progress(f"Compiling {name} for the devices here")
            try:
                ready[name] = PlannedStep(verify_program(program, plan), plan, made)
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
    """The judge of that name; by default devices for CPU topologies, which are here, and else the compiler.

    Raises `UserError` for an unknown name, for a compiler that makes no programs for the topology, and for an executor
    that is to measure.
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
