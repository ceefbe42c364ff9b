"""Measurement of a planned program on the devices present: time, compiled communication, and agreement of results."""

import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from autoshard.errors import UserError
from autoshard.exec.apply.jax_application import Application, compile_lowered
from autoshard.exec.apply.plan_agreement import check_arguments, other_program
from autoshard.exec.devices.local_devices import ensure_devices, retained_memory
from autoshard.exec.devices.profiles import profiled
from autoshard.exec.hlo.compiled_collectives import (
    CompiledCollective,
    count_by_kind,
    plan_mesh,
    read_collectives,
    wire_by_axis,
)
from autoshard.exec.hlo.hlo_text import module_name
from autoshard.exec.run.check_inputs import (
    UNDEFINED,
    distance,
    drops_nan,
    edge_arguments,
    narrow_rounding,
    noise_floor,
    rounding_floor,
)
from autoshard.exec.run.eager_check import EagerCheck, check_eager, eager_figures
from autoshard.exec.run.exact_step import ExactSteps, replicated
from autoshard.exec.run.planned_steps import PlannedStep, StagedRun, failure, first_arguments, host_copy, place_copy
from autoshard.exec.run.profiled_collectives import CollectiveTimes, time_collectives
from autoshard.exec.run.result_check import AMPLIFIED, FACTOR, UNIT, Check, compare
from autoshard.planning import Plan, as_planned
from autoshard.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """Measured planned step, with the predictions for it."""

    step_time_s: float
    """Median seconds of the timed steps."""
    step_times_s: tuple[float, ...]
    """Seconds of each timed step, in order."""
    compile_s: float
    """Seconds of lowering and compilation."""
    device: str
    """Kind and number of the devices that ran the step."""
    wire_predicted: dict[str, int]
    """Bytes that one device sends in one step by the plan's prediction, by mesh axis."""
    wire_compiled: dict[str, int]
    """Such bytes in the compiled program, by mesh axis (`other`: groups that match no mesh axis)."""
    counts_predicted: dict[str, int]
    """Number of predicted collectives in one step, by kind."""
    counts_compiled: dict[str, int]
    """Number of compiled collectives in one step, by kind; a combined collective counts once for each array."""
    collectives: tuple[CompiledCollective, ...]
    """Collectives of the compiled program, in the order of execution."""
    memory: dict[str, int]
    """Bytes of one device as the compiler counts them: arguments, results, temporaries, donated; empty if it gives
    none.
    """
    check: Check | None
    """Comparison of the first step with the unplanned one; None if it was not requested or was skipped."""
    check_skipped: str = ""
    """Reason why a requested check was not made; else empty."""
    collective_times: CollectiveTimes | None = None
    """Times of collectives from the profiler, if requested."""
    eager: EagerCheck | None = None
    """Comparison of the traced step with eager torch; None without a check, or if the program has no eager form."""
    edges: Mapping[str, Check | None] = dataclasses.field(default_factory=dict)
    """Checks of steps from other arguments (`edge_arguments`), by name; None for one that was skipped. Empty without a
    check.
    """

    @property
    def failed(self) -> bool:
        """True if a comparison shows a difference, or if the requested one with the unplanned step is missing."""
        differs = any(check is not None and not check.passed for check in (self.check, *self.edges.values()))
        return bool(self.check_skipped) or differs or (self.eager is not None and not self.eager.agrees)

    @property
    def spread(self) -> float:
        """Distance of the quartiles of the step times over the median; 0 for a single step."""
        if len(self.step_times_s) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.step_times_s, n=4)
        return (high - low) / self.step_time_s


def measure(
    program: Program,
    plan: Plan,
    *,
    steps: int = 10,
    warmup: int = 2,
    check: bool = False,
    seed: int = 0,
    tolerance: float | None = None,
    profile: pathlib.Path | None = None,
    timed_collectives: int = 0,
    eager: bool = True,
) -> Measurement:
    """Run the program under the plan and time its steps.

    - `steps`, `warmup`: numbers of timed steps, and of untimed ones before them. Each step consumes the state of the
      last.
    - `check`: compare the results of the first step with one step of the unplanned program (see `Check`).
    - `seed`: seed of the example arguments.
    - `tolerance`: largest relative difference in checks. If None, larger differences are compared with `noise_floor`.
    - `profile`: file for a gzipped Chrome trace of one more step, from JAX's profiler.
    - `timed_collectives`: number of further steps that are profiled to time every collective.
    - `eager`: the check of a torch module begins with a comparison with eager torch (`check_eager`).

    The unplanned step runs on one device before the planned one, from the same arguments. If it runs out of memory,
    `check_skipped` says so and the planned step is still timed. A check ends with steps from edge-case arguments
    (`edge_arguments`).

    A JAX step with a program for each stage is timed and checked from ordinary arguments; its collectives and memory
    are not read. `program` is then that of the whole batch.

    Raises `UserError` for too few devices, a program other than the planned one, exhausted memory, or a failing
    runtime.
    """
    if steps < 1 or warmup < 0:
        raise UserError(f"measure: {steps} steps after {warmup} for warm-up; at least 1 step and 0 are needed.")
    ensure_devices(len(plan.device_order))
    import jax

    if plan.by_stage and plan.origin.form:
        plan.check_one_step()
    program = program if plan.by_stage else verify_program(program, plan)
    eager_check = check_eager(program, seed) if check and eager and program.eager is not None else None
    first_args = first_arguments(program, seed)
    verdict: Check | None = None
    edges: dict[str, Check | None] = {}
    times: list[float] = []
    try:
        one_device, unplanned, skipped = _try_unplanned(program, plan, first_args) if check else (None, [], "")
        planned = (StagedRun if plan.by_stage else PlannedStep)(program, plan, first_args)
        exact_steps = ExactSteps(program, plan)
        text = "" if plan.by_stage else planned.compiled.as_text()
        collectives = read_collectives(text, plan_mesh(plan)) if text else []
        times_of = None
        with retained_memory():
            for step in range(warmup + steps):
                elapsed, results = planned.run()
                if step == 0 and one_device is not None:
                    ours = [host_copy(value) for value in results]
                    verdict = _verdict(program, one_device, exact_steps, ours, unplanned, tolerance, first_args)
                if step >= warmup:
                    times.append(elapsed)
            if profile is not None:
                with profiled(profile):
                    planned.run()
            if timed_collectives and text:
                times_of = time_collectives(planned.run, timed_collectives, module_name(text), collectives)
            if one_device is not None and text:
                edges = _check_edges(program, planned, one_device, exact_steps, first_args, seed, tolerance)
    except jax.errors.JaxRuntimeError as error:
        raise failure(plan, error) from error

    counts: dict[str, int] = {}
    for predicted in plan.prediction.collectives:
        counts[predicted.kind] = counts.get(predicted.kind, 0) + predicted.count
    mesh = planned.application.mesh
    return Measurement(
        step_time_s=statistics.median(times),
        step_times_s=tuple(times),
        compile_s=planned.compile_s,
        device=f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        wire_predicted=dict(plan.prediction.wire_bytes) if text else {},
        wire_compiled=wire_by_axis(collectives),
        counts_predicted=counts if text else {},
        counts_compiled=count_by_kind(collectives),
        collectives=tuple(collectives),
        memory=_memory(planned.compiled) if text else {},
        check=verdict,
        check_skipped=skipped,
        collective_times=times_of,
        eager=eager_check,
        edges=edges,
    )


_Step = Callable[[tuple[Any, ...]], list[Any]]
"""Unplanned step: maps its arguments to host arrays of its flat results."""


_CALLBACK = "python_cpu_callback"
"""Part of the name of the custom call with which JAX runs a Python function on the host."""


def _check_edges(
    program: Program,
    planned: PlannedStep,
    one_device: _Step,
    exact_steps: ExactSteps,
    made: Any,
    seed: int,
    tolerance: float | None,
) -> dict[str, Check | None]:
    """Compare the planned step with the unplanned one from edge-case arguments; return the checks by name of the case.

    - `one_device`: unplanned step.
    - `exact_steps`: both steps in float64.
    - `made`: arguments of the ordinary step, from which the cases derive.
    - `seed`, `tolerance`: as in `measure`.

    NaN is skipped (None) where collectives drop it. Steps that call Python on the host skip it too, since an error on
    one device would leave the others waiting.
    """
    import jax

    leaves, tree = jax.tree.flatten(made)
    checks: dict[str, Check | None] = {}
    for name, arguments in edge_arguments(program, leaves, seed).items():
        text = planned.compiled.as_text() if name == UNDEFINED else ""
        if text and (_CALLBACK in text or drops_nan(text, planned.platform)):
            checks[name] = None
            continue
        edge_args = tree.unflatten(arguments)
        results = [host_copy(value) for value in planned.run_once(arguments)]
        unplanned = one_device(edge_args)
        checks[name] = _verdict(program, one_device, exact_steps, results, unplanned, tolerance, edge_args)
    return checks


def _verdict(
    program: Program,
    one_device: _Step,
    exact_steps: ExactSteps,
    planned: list[Any],
    unplanned: list[Any],
    tolerance: float | None,
    made: Any,
) -> Check:
    """Compare results; if the default tolerance is exceeded, compare again with the noise of the unplanned step.

    If that is exceeded too, both steps are compared in float64.

    - `one_device`: unplanned step, which measures the noise.
    - `exact_steps`: both steps in float64.
    - `planned`, `unplanned`: flat results as host arrays.
    - `tolerance`: largest relative difference; None for the default. A given tolerance is final.
    - `made`: arguments of both steps.
    """
    import jax

    leaves, tree = jax.tree.flatten(made)
    plain = compare(program, planned, unplanned, tolerance, leaves)
    if plain.passed or tolerance is not None:
        return plain

    def judged(noise: list[float], why: str = "") -> Check:
        """Compare with a noise of each result, and with the reason if it is unknown."""
        return compare(program, planned, unplanned, tolerance, leaves, (noise, why))

    def run(other: list[Any]) -> list[Any]:
        """Run the unplanned step from flat arguments."""
        return one_device(tree.unflatten(other))

    def enough(noise: list[float]) -> bool:
        """Return True if the comparison passes with this noise."""
        return judged(noise).passed

    noise, why = noise_floor(program, run, leaves, unplanned, enough)
    if not enough(noise):
        noise = rounding_floor(program, run, leaves, unplanned, noise, enough)
    check = judged(noise, why)
    if check.passed:
        return check
    found = exact_steps.compare(leaves)
    if isinstance(found, str):
        if why:
            # Examples that the step does not treat alike, as with random numbers, show no rounding in another order.
            noise = rounding_floor(program, run, leaves, unplanned, noise, enough, max(UNIT, narrow_rounding(program)))
            check = judged(noise) if enough(noise) else check
        return dataclasses.replace(check, exact_note="" if check.passed else found)
    exact, unrounded = found
    # A fault of the run alone is absent in float64, so rounding must also explain the size of the difference.
    measured = [max(n, distance(a, b)) for n, a, b in zip(noise, unplanned, unrounded, strict=True)]
    measured = rounding_floor(program, run, leaves, unplanned, measured, unit=UNIT)
    amplified = exact.passed and judged([n * AMPLIFIED / FACTOR for n in measured]).passed
    figure = 0.0 if exact.worst is None else exact.worst.rel_diff
    check = dataclasses.replace(check, exact=figure, amplified=amplified)
    if exact.passed and not check.passed:
        # A result that is mostly noise differs by more than `GROSS`; it must be within the measured rounding itself.
        return dataclasses.replace(judged(measured), exact=figure)
    return check


def verify_program(program: Program, plan: Plan) -> Program:
    """Return the program of the plan: the given one, with its constraints lifted if the plan ignores them.

    Raises `UserError` if the plan was made for another program, by names, shapes, dtypes and roles of arguments or by
    its fingerprint. The message names the first argument that differs.
    """
    import jax

    program = as_planned(program, plan)
    leaves = jax.tree_util.tree_flatten_with_path(program.args)[0]
    for argument in program.arguments:
        if argument.name not in plan.arguments:
            raise UserError(
                f"the plan is for {plan.program_name}, not for this program: argument `{argument.name}` is not in "
                "the plan; plan it again."
            )
    for name in plan.arguments:
        if name not in {argument.name for argument in program.arguments}:
            raise UserError(
                f"the plan is for {plan.program_name}, not for this program: the plan's argument `{name}` is "
                "missing; plan it again."
            )
    check_arguments(plan, [(path, argument) for (path, _), argument in zip(leaves, program.arguments, strict=True)])
    for argument in program.arguments:
        if argument.role.value != plan.roles[argument.name]:
            raise UserError(
                f"the plan is for another program: argument `{argument.name}` is {plan.roles[argument.name]} in the "
                f"plan but {argument.role.value} here; plan it again."
            )
    if program.fingerprint != plan.program_fingerprint:
        raise UserError(other_program(plan, program.module))
    return program


def _try_unplanned(program: Program, plan: Plan, args: tuple[Any, ...]) -> tuple[_Step | None, list[Any], str]:
    """Return the unplanned step, its results for `args`, and an empty text.

    If a device lacks the memory for it, return None, no results, and a sentence with the reason. Other errors pass
    through.
    """
    import jax

    try:
        step = _unplanned_step(program, plan)
        return step, step(args), ""
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = " ".join(str(error).split())[:200]
        return None, [], f"the unplanned step ran out of memory on one device, so that nothing was compared: {first}"


def _unplanned_step(program: Program, plan: Plan) -> _Step:
    """Return the unplanned step for one device; for all, with everything replicated, if the program names a mesh.

    It never consumes its arguments. Only the step for all devices is compiled here; the other is compiled at its first
    call.
    """
    import jax

    if plan.origin.names_devices:
        application = Application(replicated(plan))
        shardings = application.in_shardings()
        lowered = application.lower(program.fn, program.args, program.donate_argnums, program.module)
        compiled = compile_lowered(lowered)

        def step(args: tuple[Any, ...]) -> Any:
            leaves, tree = jax.tree.flatten(args)
            return compiled(*tree.unflatten(place_copy(leaf, s) for leaf, s in zip(leaves, shardings, strict=True)))
    else:
        jitted, one = jax.jit(lambda *a: program.fn(*a)), jax.local_devices()[0]

        def step(args: tuple[Any, ...]) -> Any:
            """Run the step on copies of the arguments, and return its results as device arrays."""
            return jitted(*jax.device_put(args, one))

    return lambda args: [host_copy(leaf) for leaf in jax.tree.leaves(step(args))]


def _memory(compiled: Any) -> dict[str, int]:
    """Return the compiler's memory figures in bytes; empty if it gives none."""
    stats = compiled.memory_analysis()
    if stats is None:
        return {}
    return {
        "arguments": int(stats.argument_size_in_bytes),
        "results": int(stats.output_size_in_bytes),
        "temporaries": int(stats.temp_size_in_bytes),
        "donated": int(stats.alias_size_in_bytes),
    }


def measurement_figures(measurement: Measurement) -> dict[str, Any]:
    """Return the JSON object of `autoshard measure --json`; figures of the check are left out if there is none."""
    axes = sorted({*measurement.wire_predicted, *measurement.wire_compiled})
    kinds = sorted({*measurement.counts_predicted, *measurement.counts_compiled})
    figures: dict[str, Any] = {
        "step_time_s": measurement.step_time_s,
        "step_times_s": list(measurement.step_times_s),
        "spread": measurement.spread,
        "compile_s": measurement.compile_s,
        "device": measurement.device,
        "check_skipped": measurement.check_skipped,
        "memory": measurement.memory,
        "collectives": {
            "wire_bytes": {
                axis: {
                    "predicted": measurement.wire_predicted.get(axis, 0),
                    "compiled": measurement.wire_compiled.get(axis, 0),
                }
                for axis in axes
            },
            "counts": {
                kind: {
                    "predicted": measurement.counts_predicted.get(kind, 0),
                    "compiled": measurement.counts_compiled.get(kind, 0),
                }
                for kind in kinds
            },
        },
    }
    if measurement.collective_times is not None:
        figures["collectives"]["times"] = [dataclasses.asdict(time) for time in measurement.collective_times.times]
        figures["profiler"] = measurement.collective_times.note
    figures["eager"] = None if measurement.eager is None else eager_figures(measurement.eager)
    if measurement.check is not None:
        worst = measurement.check.worst
        figures["max_rel_diff"] = measurement.check.max_rel_diff
        figures["tolerance"] = measurement.check.tolerance
        figures["passed"] = measurement.check.passed
        figures["floor"] = max((d.floor for d in measurement.check.differences), default=0.0)
        figures["floor_note"] = measurement.check.floor_note
        figures["float64"] = measurement.check.exact
        figures["float64_note"] = measurement.check.exact_note
        figures["rounding"] = measurement.check.is_rounding
        figures["worst"] = worst.name if worst is not None else ""
        figures["worst_rel_diff"] = worst.rel_diff if worst is not None else 0.0
        figures["worst_allowed"] = figures["tolerance"] if worst is None else worst.allowed(figures["tolerance"])
        figures["noise"] = [d.name for d in measurement.check.differences if d.is_noise and d is not worst]
        figures["differences"] = [
            {"name": d.name, "rel_diff": d.rel_diff, "compared": d.compared, "floor": d.floor}
            for d in measurement.check.differences
        ]
        figures["edges"] = {name: _edge_figures(check) for name, check in measurement.edges.items()}
    return figures


def _edge_figures(check: Check | None) -> dict[str, Any] | None:
    """Return the JSON object of one edge case; None if it was skipped."""
    if check is None:
        return None
    worst = check.worst
    return {
        "passed": check.passed,
        "max_rel_diff": check.max_rel_diff,
        "worst": worst.name if worst is not None else "",
        "worst_rel_diff": worst.rel_diff if worst is not None else 0.0,
        "worst_allowed": check.tolerance if worst is None else worst.allowed(check.tolerance),
    }
