"""The figures of a compiled program, stored with its plan."""

import dataclasses

from autoshard.exec.ahead.compile_plans import CompileReport, Verdict, compile_notes
from autoshard.exec.hlo.schedule_estimate import decided
from autoshard.planning import CompiledStep, Plan
from autoshard.planning.explain.prediction_errors import ASK_COMPILER


def compiled_plan(plan: Plan, result: CompileReport) -> Plan:
    """Return the plan with the figures of its compiled program, and without the advice to compile it."""
    timed = result.estimate
    error = timed.error if timed else None
    figures = CompiledStep(
        verdict=result.verdict.value,
        fits=result.verdict is not Verdict.DOES_NOT_FIT,
        peak_bytes=result.peak_compiled,
        reserved_bytes=result.reserved_compiled,
        step_time_s=timed.step_time_s if timed else None,
        error=error,
        undecided=timed is not None and not decided(timed.step_time_s, result.step_time_predicted_s, timed.error),
        followed=result.followed,
        wire_bytes=result.wire_compiled,
        notes=tuple(compile_notes(result)),
    )
    warnings = tuple(line.replace(ASK_COMPILER, "") for line in plan.warnings)
    return dataclasses.replace(plan, compiled=figures, warnings=warnings)
