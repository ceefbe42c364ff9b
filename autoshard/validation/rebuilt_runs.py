"""Step times of published runs, predicted for the stated model on the stated machine with the stated sharding."""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Calibration, Compute, load_calibration, make_mesh, with_flags
from autoshard.errors import UserError
from autoshard.planning.explain.write_plan import Writer
from autoshard.planning.mesh.portfolio import Contender
from autoshard.planning.price.analysed_program import AnalysedProgram, analyse_program, build_model
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.solve.mesh_solve import Solved, Terms, solve_within
from autoshard.planning.solve.time_weights import even_weights, normalise
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.derived_axes import STAGE
from autoshard.planning.space.dim_groups import Groups, find_groups
from autoshard.planning.space.named_layouts import Uses, stated, with_stages_held, without_axis
from autoshard.program import EightBits, Program, decoder_program
from autoshard.validation.published_runs import IncompleteError, MatmulRun, Run, parse_run, read_rows, source_group
from autoshard.validation.serving_rows import ServingRun


LEFT_OUT = pathlib.Path(__file__).with_name("left_out.json")
"""Figures fitted without each source in turn, as a JSON file: source, chip, figure."""

SOLVE_S = 20.0
"""Time limit in seconds for completing one stated sharding; a scanned decoder takes a small part of a second."""


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedRow:
    """One published run with predicted (`ours`) and measured (`theirs`) seconds of a step."""

    id: str
    model: str
    chip: str
    """Chip as the row names it; empty if it names none."""
    source: str
    """Document of the run, such as `owner/name@commit:path`."""
    theirs: float | None = None
    """Measured seconds of a step; None if the row is skipped."""
    ours: float | None = None
    """Predicted seconds of a step; None if the row is skipped."""
    compute_s: float = 0.0
    """Predicted seconds of compute of a step."""
    exposed_s: float = 0.0
    """Predicted seconds of a step that no compute hides."""
    their_mfu: float | None = None
    our_mfu: float | None = None
    """MFU of the measured and of the predicted step, as fractions, with causal attention counted half."""
    unseen: float | None = None
    """Predicted seconds with figures that were fitted without the row's source."""
    by_mfu: float | None = None
    """Seconds at the median MFU of complete runs of other sources on the same chip, the simplest prediction.

    The median is over all chips if there are no such runs.
    """
    by_other_rows: float | None = None
    """Seconds at the median MFU of all other runs on the same chip, including those of the row's own source."""
    flags: tuple[str, ...] = ()
    """Compiler flags with which the step was priced."""
    assumed: tuple[str, ...] = ()
    """Choices of the rebuilt run that its source leaves open."""
    complete: bool = True
    """False if values that the author does not state were assumed; such a row is shown, but not counted."""
    skipped: str = ""
    """Reason why there is no prediction; empty otherwise."""

    @property
    def delta_percent(self) -> float | None:
        """Difference of the predicted from the measured step time, in percent of the measured one."""
        return self.percent(self.ours)

    def percent(self, predicted: float | None) -> float | None:
        """Return the difference of a predicted step time from the measured one, in percent of the measured one."""
        return None if predicted is None or self.theirs is None else 100.0 * (predicted - self.theirs) / self.theirs

    @property
    def group(self) -> str:
        """Document of the row: its repository, and the folder of the chip's generation."""
        return source_group(self.source)


def validate_published(
    path: str | pathlib.Path | None = None,
    progress: Callable[[str], None] | None = None,
    bad: list[str] | None = None,
) -> tuple[PublishedRow, ...]:
    """Rebuild every complete row of a file (default: the shipped file) and predict its step time.

    Rows of unknown form are left out if there is a list `bad`, to which their errors are added. Raises: UserError for a
    file that cannot be read, and without `bad` for a row of unknown form.
    """
    rows = read_rows(path, bad)
    known = {row["id"]: row for row in (*read_rows(), *rows)}
    return tuple(_rebuilt(rows, _reached(known.values()), progress or (lambda line: None)))


@dataclasses.dataclass(frozen=True, slots=True)
class _Reached:
    """MFU that one complete run reached."""

    id: str
    chip: str
    source: str
    """The result of `source_group`."""
    mfu: float
    """MFU as a fraction."""


def _reached(rows: Iterable[dict[str, Any]]) -> list[_Reached]:
    """Return the MFU of each complete training run; rows with assumptions (`assume`), and matmuls, are left out."""
    reached = []
    for row in rows:
        try:
            run = parse_run(row)
        except IncompleteError:
            continue
        if isinstance(run, Run) and "assume" not in row:
            source = source_group(row["source"])
            reached.append(_Reached(row["id"], run.topology.chip.name, source, run.peak_s / run.step_s))
    return reached


def _rebuilt(
    rows: list[dict[str, Any]], reached: list[_Reached], progress: Callable[[str], None]
) -> Iterator[PublishedRow]:
    """Yield each row with its prediction, or with the reason why there is none."""
    for number, row in enumerate(rows):
        chip = str(row.get("tpu") or row.get("gpu") or "").split(" ")[0]
        bare = PublishedRow(row["id"], row["model"], chip, row["source"], complete="assume" not in row)
        try:
            run = parse_run(row)
            progress(f"{number + 1}/{len(rows)} {row['id']}")
            yield _matmul(bare, run) if isinstance(run, MatmulRun) else _by_mfu(_step(bare, run), run, reached)
        except (IncompleteError, UserError) as error:
            yield dataclasses.replace(bare, skipped=str(error))


def _by_mfu(row: PublishedRow, run: Run, reached: list[_Reached]) -> PublishedRow:
    """Return the row with the simplest predictions added: its seconds at medians of the MFU of other runs.

    A prediction without other runs is None.
    """
    chip = run.topology.chip.name
    others = [each for each in reached if each.source != row.group]
    others = [each for each in others if each.chip == chip] or others
    rows = [each for each in reached if each.chip == chip and each.id != row.id]
    medians = [statistics.median(each.mfu for each in runs) if runs else None for runs in (others, rows)]
    by_mfu, by_other_rows = (run.peak_s / mfu if mfu else None for mfu in medians)
    return dataclasses.replace(row, by_mfu=by_mfu, by_other_rows=by_other_rows)


def _matmul(bare: PublishedRow, run: MatmulRun) -> PublishedRow:
    """Return the row with the estimated seconds and MFU of a matmul."""
    n = run.size
    figures = load_calibration(run.topology.chip), without_source(run.topology.chip.name, bare.group)
    ours, unseen = (float(Compute(run.topology, each).dot_seconds(n, n, n)) for each in figures)
    busy = 2.0 * n**3 / run.topology.peak_flops("bf16")
    return dataclasses.replace(
        bare,
        theirs=run.step_s,
        ours=ours,
        unseen=unseen,
        compute_s=ours,
        their_mfu=busy / run.step_s,
        our_mfu=busy / ours,
    )


def _step(bare: PublishedRow, run: Run) -> PublishedRow:
    """Return the row with the estimated step time and MFU of a rebuilt training run.

    Raises `IncompleteError` as `rebuild` does.
    """
    model, choices = rebuild(run)
    outcome = evaluate(model, choices)
    ours = outcome.step_time_s
    return dataclasses.replace(
        bare,
        theirs=run.step_s,
        ours=ours,
        unseen=unseen_seconds(model, choices, run, bare.group),
        compute_s=outcome.compute_s,
        exposed_s=ours - outcome.compute_s,
        their_mfu=run.peak_s / run.step_s,
        our_mfu=run.peak_s / ours,
        flags=run.flags,
        assumed=run.assumed,
    )


def unseen_seconds(model: Model, choices: NDArray[np.int64], run: Run | ServingRun, source: str) -> float:
    """Return the seconds of one step, priced with figures that were fitted without the runs of one source.

    - `model`, `choices`: the rebuilt run, which is priced again with the same choices.
    - `run`: its chip, memory and compiler flags.
    - `source`: result of `source_group`.
    """
    figures = with_flags(without_source(run.topology.chip.name, source), run.flags).calibration
    # Nothing was fitted to the source.
    if figures == model.collectives.calibration:
        return evaluate(model, choices).step_time_s
    reading = AnalysedProgram(
        model.graph, model.structure, model.liveness, find_groups(model.program, model.graph, model.structure)
    )
    staged = isinstance(run, Run) and run.pipeline is not None
    repriced = build_model(model.program, reading, model.mesh, run.topology.usable_bytes, figures, staged=staged)
    return evaluate(repriced, choices).step_time_s


def without_source(chip: str, source: str) -> Calibration:
    """Return the figures of a chip, fitted without the published runs of one source.

    The figures are the shipped ones if nothing was fitted to the source. `experiments/fidelity/validate_sources.py`
    writes the other figures.
    """
    document = json.loads(LEFT_OUT.read_text())
    return dataclasses.replace(load_calibration(chip), **document["sources"].get(source, {}).get(chip, {}))


def mesh_sizes(run: Run) -> dict[str, int]:
    """Return the sizes of a run's mesh axes, major first, axes of size 1 included.

    The axes are copies, stages, FSDP, experts, sequences (context parallelism) and tensor parallelism.
    """
    return {
        "data": run.copies,
        STAGE: 1 if run.pipeline is None else run.pipeline.stages,
        "fsdp": run.spread,
        "expert": run.experts,
        "context": run.context,
        "model": run.tensor,
    }


def rebuild(run: Run) -> tuple[Model, NDArray[np.int64]]:
    """Return the model of a run's program, and its stated sharding as choices.

    The solver makes the choices that the stated sharding leaves open. Raises `IncompleteError` if the model's sizes do
    not allow the sharding.
    """
    _, model, _, solved = _stated(run, "flash" if run.flash else "plain")
    return model, solved.choices


def stated_plan(run: Run) -> tuple[Program, Plan]:
    """Return a run's program for compilation on TPUs, and its stated sharding as a plan.

    Attention is jax's splash kernel. The plan names the run's compiler flags, and is compiled with them. Raises
    `IncompleteError` as `rebuild` does.
    """
    program, model, groups, solved = _stated(run, "splash" if run.flash else "plain")
    outcome = evaluate(model, solved.choices)
    chosen = Contender(
        "stated", "as its source says", solved.choices, outcome, tight_s=0.0, model=lambda: model,
        solution=solved.solution, bound_s=0.0, weightings=0,
    )  # fmt: skip
    plan = Writer(program, groups, run.topology.usable_bytes, 0, [], {}).write(chosen)
    if run.pipeline is not None:
        plan = dataclasses.replace(plan, provenance=plan.provenance | {"stage_axis": STAGE})
    if run.flags:
        flags = with_flags(load_calibration(run.topology.chip), run.flags).record(run.flags)
        plan = dataclasses.replace(plan, provenance=plan.provenance | {"xla_flags": flags})
    return program, plan


def _stated(run: Run, attention: str) -> tuple[Program, Model, Groups, Solved]:
    """Build a run's program with the attention kernel `attention`, and solve for the stated sharding.

    Returns the program, its model, its dim groups and the solution.
    """
    from jax.sharding import AbstractMesh, AxisType

    sizes = {name: size for name, size in mesh_sizes(run).items() if size > 1} or {"data": 1}
    mesh = make_mesh(run.topology, sizes, dict(run.network) or None)
    abstract = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    kernels = None if attention == "splash" else run.kernels  # the compiled program has experts with slots
    # MaxText's default gives each slice scales of its own in gradients of weights (`quantization_local_shard_count`).
    eight_bits = None if run.quantize is None else EightBits(run.quantize, run.topology.slices)
    program = decoder_program(
        run.decoder, batch=run.batch, seq=run.seq, remat=run.remat, saves=run.saves, attention=attention,
        exchange=run.exchange, balanced=run.balanced,
        blocks=run.blocks, optimizer=run.optimizer, compute_dtype=run.compute, weights=run.weights, moments=run.state,
        gradients=run.gradients, accumulation=run.accumulation, offloads=run.offloads,
        routing="kernels" if kernels else "capacity", expert_kernels=kernels, capacity_factor=run.capacity,
        stack_axis=run.stack_axis, scanned=run.scanned, gradient_groups=run.copies if run.sums_late else 1,
        gathered_on=abstract if run.keeps_gathered else None, whole_on=abstract if run.sums_late else None,
        pipeline=run.pipeline, quantize=eight_bits,
    )  # fmt: skip
    reading = analyse_program(program, mesh.topology)
    figures = with_flags(load_calibration(run.topology.chip), run.flags).calibration
    staged = run.pipeline is not None
    model = build_model(program, reading, mesh, run.topology.usable_bytes, figures, staged=staged)
    axes = {name: [k] for k, name in enumerate(sizes)}
    uses = Uses(
        *(axes.get(use, []) for use in ("data", "fsdp", "model", "expert", "context")),
        exchange=run.exchange,
        expert_count=run.decoder.experts,
        spreads_state=run.spreads_state,
        on_width=run.stream_on_width,
        holds_head=run.head_on_width or run.spread == 1,
    )
    stage = list(sizes).index(STAGE) if staged else None
    wanted = stated(model if stage is None else without_axis(model, stage), reading.groups, "stated", uses)
    if wanted is not None and stage is not None:
        wanted = with_stages_held(model, wanted, stage, run.stack_axis)
    if wanted is None:
        listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise IncompleteError(f"the model's sizes do not allow the stated sharding ({listed})")
    solved = solve_within(model, normalise(even_weights(model)), Terms(None, SOLVE_S, 0, allowed=wanted.allowed))
    return program, model, reading.groups, solved
