"""Published runs rebuilt: the stated model on the stated machine, sharded as stated, and how long a step takes."""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Calibration, Compute, chip_names, load_calibration, load_chip, make_mesh
from autoshard.plan._baselines import stated
from autoshard.plan._groups import Groups
from autoshard.plan._model import Model
from autoshard.plan._plan import Plan
from autoshard.plan._predict import evaluate
from autoshard.plan._published import IncompleteError, MatmulRun, Run, parse_run, read_rows
from autoshard.plan._reading import build_model, read_program
from autoshard.plan._solve import Solved, Terms, solve_within
from autoshard.plan._weights import even_weights, normalise
from autoshard.plan._write import plan_of_choices
from autoshard.program import Program, decoder_program


SOLVE_S = 20.0
"""Limit for completing one stated sharding; a scanned decoder takes a small part of a second."""


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedRow:
    """One published run: our step time beside theirs, in seconds. `skipped` says why there is none of ours."""

    id: str
    model: str
    chip: str
    source: str
    theirs: float | None = None
    ours: float | None = None
    compute_s: float = 0.0
    exposed_s: float = 0.0
    their_mfu: float | None = None
    our_mfu: float | None = None
    assumed: tuple[str, ...] = ()
    complete: bool = True
    """False if what its author left open had to be assumed: shown, but not counted."""
    skipped: str = ""

    @property
    def delta_percent(self) -> float | None:
        """How far ours is from theirs, in percent of theirs."""
        return None if self.ours is None or self.theirs is None else 100.0 * (self.ours - self.theirs) / self.theirs

    @property
    def group(self) -> str:
        """The document that the row comes from: its repository and the folder of the chip's generation."""
        return source_group(self.source)


def source_group(source: str) -> str:
    """`owner/name: folder` of a source such as `owner/name@commit:folder/.../README.md`; rows of one table share it."""
    repository, _, path = source.partition(":")
    if not path or "/" not in repository:
        return source
    generations = {alias for name in chip_names() for alias in (name, *load_chip(name).aliases)}
    parts = re.split(r" \+ | ", path)[0].split("/")
    last = next((k for k, part in enumerate(parts) if part in generations), len(parts) - 2)
    return f"{repository.partition('@')[0]}: {'/'.join(parts[: last + 1])}"


def validate_published(
    path: str | pathlib.Path | None = None, progress: Callable[[str], None] | None = None
) -> tuple[PublishedRow, ...]:
    """Every row of a file (default: the shipped one), rebuilt where it is complete.

    Raises: UserError for a file that cannot be read or a row of unknown form.
    """
    return tuple(_rebuilt(read_rows(path), progress or (lambda line: None)))


def _rebuilt(rows: list[dict[str, Any]], progress: Callable[[str], None]) -> Iterator[PublishedRow]:
    for number, row in enumerate(rows):
        chip = str(row.get("tpu") or row.get("gpu") or "").split(" ")[0]
        bare = PublishedRow(row["id"], row["model"], chip, row["source"], complete="assume" not in row)
        try:
            run = parse_run(row)
            progress(f"{number + 1}/{len(rows)} {row['id']}")
            yield _matmul(bare, run) if isinstance(run, MatmulRun) else _step(bare, run)
        except IncompleteError as error:
            yield dataclasses.replace(bare, skipped=str(error))


def _matmul(bare: PublishedRow, run: MatmulRun) -> PublishedRow:
    compute, n = Compute(run.topology), run.size
    ours = float(compute.dot_seconds(n, n, n))
    busy = 2.0 * n**3 / run.topology.peak_flops("bf16")
    return dataclasses.replace(
        bare, theirs=run.step_s, ours=ours, compute_s=ours, their_mfu=busy / run.step_s, our_mfu=busy / ours
    )


def _step(bare: PublishedRow, run: Run) -> PublishedRow:
    outcome = evaluate(*rebuild(run))
    ours = outcome.step_time_s
    busy = run.flops(causal=True) / (run.topology.peak_flops("bf16") * run.topology.num_devices)
    return dataclasses.replace(
        bare,
        theirs=run.step_s,
        ours=ours,
        compute_s=outcome.compute_s,
        exposed_s=ours - outcome.compute_s,
        their_mfu=busy / run.step_s,
        our_mfu=busy / ours,
        assumed=run.assumed,
    )


def mesh_sizes(run: Run) -> dict[str, int]:
    """Mesh axes of a run, major first: copies (`data`), FSDP (`fsdp`) and tensor parallelism (`model`)."""
    return {"data": run.copies, "fsdp": run.spread, "model": run.tensor}


def as_run(calibration: Calibration) -> Calibration:
    """The calibration for a published run: gathers are asynchronous on every TPU generation.

    Such runs set flags to that end (`xla_tpu_enable_async_collective_fusion_fuse_all_gather`: pull request 368 of
    AI-Hypercomputer/maxtext for v5p, and the recipes for v6e), which today's compiler refuses but on v5e.
    """
    if load_chip(calibration.chip).backend != "tpu":
        return calibration
    share = max(calibration.gather_overlap, load_calibration("v5e").gather_overlap)
    return dataclasses.replace(calibration, gather_overlap=share)


def rebuild(run: Run) -> tuple[Model, NDArray[np.int64]]:
    """A run's priced program, and its stated sharding as choices; what that leaves open is chosen by the solver.

    Raises `IncompleteError` if the model's sizes do not allow the sharding.
    """
    _, model, _, solved = _stated(run, "flash" if run.flash else "plain")
    return model, solved.choices


def stated_plan(run: Run) -> tuple[Program, Plan]:
    """A run as a program that compiles for TPUs, attention by jax's splash kernel, and its stated sharding as a plan.

    Raises `IncompleteError` as `rebuild` does.
    """
    program, model, groups, solved = _stated(run, "splash" if run.flash else "plain")
    outcome = evaluate(model, solved.choices)
    limit = run.topology.usable_bytes
    return program, plan_of_choices(program, model, groups, solved.choices, outcome, solved.solution, limit)


def _stated(run: Run, attention: str) -> tuple[Program, Model, Groups, Solved]:
    sizes = {name: size for name, size in mesh_sizes(run).items() if size > 1} or {"data": 1}
    mesh = make_mesh(run.topology, sizes)
    program = decoder_program(
        run.decoder, batch=run.batch, seq=run.seq, remat=run.remat, saves=run.saves, attention=attention,
        blocks=run.blocks,
    )  # fmt: skip
    reading = read_program(program, mesh.topology.backend)
    model = build_model(program, reading, mesh, 1 << 62, as_run(load_calibration(run.topology.chip)))
    axes = {name: [k] for k, name in enumerate(sizes)}
    wanted = stated(
        model,
        reading.groups,
        "stated",
        copies=axes.get("data", []),
        spread=axes.get("fsdp", []),
        tensor=axes.get("model", []),
    )
    if wanted is None:
        listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise IncompleteError(f"the model's sizes do not allow the stated sharding ({listed})")
    solved = solve_within(model, normalise(even_weights(model)), Terms(None, SOLVE_S, 0, allowed=wanted.allowed))
    return program, model, reading.groups, solved
