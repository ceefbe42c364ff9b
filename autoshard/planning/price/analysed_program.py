"""Analysis of a program for planning, its priced decisions on a mesh, and the repricing of a stored plan."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.base.shared_results import shared
from autoshard.base.workers import WorkerCrew
from autoshard.cost import (
    BACKENDS,
    Bill,
    Calibration,
    Mesh,
    Topology,
    load_calibration,
    make_mesh,
    recorded_calibration,
)
from autoshard.errors import UserError
from autoshard.graph import (
    FusionRules,
    OpGraph,
    analyse,
    build_structure,
    cached_graph,
    defer_filter_gradients,
    defer_weight_gradients,
    find_softmaxes,
    is_sum,
    read_graph,
    replace_names,
    round_operands,
    store_rounded,
)
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.price.prediction import bill_of
from autoshard.planning.price.pricing import price
from autoshard.planning.price.reshard_paths import PathTables
from autoshard.planning.price.step_ledger import itemise
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.derived_axes import axis_parts_of, stage_axis
from autoshard.planning.space.dim_groups import find_groups, tensor_groups
from autoshard.planning.space.program_analysis import AnalysedProgram
from autoshard.planning.space.user_constraints import Asked, Required, require
from autoshard.program import WEIGHTS, Lifted, Program, Role, lift_constraints, lowered_for


LATE_IN_STAGES = frozenset({"v6e"})
"""Chips whose compiler schedules the gradient of the head after the backward pass of a pipeline.

Evidence: docs/compiler_behaviour.md, "Late head gradients in pipelines".
"""


def analyse_program(program: Program, where: Topology | str, kept: bool = False) -> AnalysedProgram:
    """Read the ops, decisions, lifetimes and dim groups of a program, lowered for the backend of its devices.

    Lifetimes depend on the backend, since its compiler decides which tensors reach memory. With `kept`, the op graph is
    read from the cache on disk if it is there, and stored there otherwise. Plans that share results
    (`sharing_results`) analyse a program once.

    - `where`: the devices; the name of a backend (`BACKENDS`) stands for several devices of it.
    """
    backend, alone = (where, False) if isinstance(where, str) else (where.backend, where.num_devices == 1)
    program = lowered_for(program, BACKENDS[backend].platform)
    # The program is part of the result, since its id is unique only as long as it exists.
    key = id(program), backend, alone
    return shared("analysis", key, lambda: (program, _analysed(program, backend, alone, kept)), _ANALYSES)[1]


STORES_ROUNDED = {"v5p": False, "v6e": True}
"""Chips whose compiler stores probabilities that the program rounds, for the matmuls of the forward and backward pass.

The value is True if only those of narrow scores count (`Softmax.narrow`). Ten attention steps in bfloat16 had them for
v5p, and none for v4, v5e and tpu7x. Steps for v6e whose scores are narrow had them, seven of seven. With wide scores
11 of 21 had them, by no rule that was found; they count as without.
"""

_ANALYSES = 2
"""Most analyses that are stored: that of the recipe in question, and that of the policy it is composed from."""


def _analysed(program: Program, backend: str, alone: bool, kept: bool) -> AnalysedProgram:
    """Analyse a program for `analyse_program`; it is lowered for the backend. `alone` is True for one device."""
    read, traits = cached_graph if kept else read_graph, BACKENDS[backend]
    graph = replace_names(read(program.module), [a.name for a in program.arguments])
    if traits.rounds_operands:
        graph = round_operands(graph)
    parameters = [t for t, a in zip(graph.arguments, program.arguments, strict=True) if a.role in WEIGHTS]
    ties = [
        (graph.results[a.result], t)
        for t, a in zip(graph.arguments, program.arguments, strict=True)
        if a.result is not None
    ]
    named = list(zip(graph.arguments, program.arguments, strict=True))
    batch = [t for t, a in named if a.role is Role.BATCH]
    structure = build_structure(graph, parameters, ties, _words(program, graph), batch)
    undonated = [t for t, a in named if not a.donated]
    updates = {t: graph.results[a.result] for t, a in named if a.donated and a.result is not None}
    rules = FusionRules(traits.fuses_into_matmuls, traits.narrows_stacks, traits.gpu_kernels, alone)
    softmaxes = find_softmaxes(graph, structure) if rules.fused_matmuls else ()
    liveness = analyse(graph, undonated, updates, rules, softmaxes)
    if traits.late_gradients:
        liveness = defer_weight_gradients(graph, liveness)
    return AnalysedProgram(graph, structure, liveness, find_groups(program, graph, structure))


def as_planned(program: Program, plan: Plan) -> Program:
    """Return the program that a plan is for: lowered for the plan's devices, and without its constraints if the plan
    lifted all of them.
    """
    lifted = plan.origin.lifted == Lifted.ALL
    return lowered_for(lift_constraints(program) if lifted else program, Topology.parse(plan.topology).traits.platform)


def _words(program: Program, graph: OpGraph) -> list[tuple[int, int]]:
    """Return (tensor, dim) of the word dims of typed PRNG keys.

    The module has these dims in addition to those that the program declares.
    """
    sides = [*zip(program.arguments, graph.arguments, strict=True), *zip(program.results, graph.results, strict=True)]
    return [(t, dim) for value, t in sides for dim in range(len(value.shape), len(graph.tensors[t].shape))]


def batch_dims(program: Program) -> tuple[int, list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the number of examples in the batch, and the batch dims of every argument and of every result.

    The number is 0, and all dims are empty, if the program has no batch. The same holds if batch dims have different
    sizes, as where an argument or a result merges the batch with another dim.
    """
    reading = analyse_program(program, "cpu")
    groups, graph = reading.groups, reading.graph

    def dims(tensor: int) -> tuple[int, ...]:
        """Return the dims of a tensor that belong to the batch's dim group."""
        dim_groups = tensor_groups(reading.structure, groups.of_factor, tensor)
        return tuple(dim for dim, group in enumerate(dim_groups) if group == groups.batch)

    sides = [[dims(tensor) for tensor in tensors] for tensors in (graph.arguments, graph.results)]
    tensors = zip((*graph.arguments, *graph.results), (*sides[0], *sides[1]), strict=True)
    sizes = {graph.tensors[tensor].shape[dim] for tensor, own in tensors for dim in own}
    if groups.batch is None or len(sizes) != 1:
        return 0, [() for _ in graph.arguments], [() for _ in graph.results]
    return sizes.pop(), sides[0], sides[1]


def build_model(
    program: Program,
    reading: AnalysedProgram,
    mesh: Mesh,
    memory_limit: int,
    calibration: Calibration | None = None,
    tables: PathTables | None = None,
    staged: bool = False,
) -> Model:
    """Build the model of a program on a mesh: every decision with its prices.

    A mesh axis is cut into parts where a dim group divides by a part of the axis only.

    - `reading`: analysis of the program for the backend of the mesh.
    - `mesh`: uncut mesh, or one with an axis already cut.
    - `memory_limit`: bytes of one device.
    - `calibration`: default: the calibration of the mesh's chip, with nothing learned.
    - `tables`: path tables to share with other programs that are priced with the same calibration.
    - `staged`: if True, a mesh axis `stage` is reserved for the stages of a pipeline, and is never cut.
    """
    where = (stage_axis(reading, mesh) if staged else None) or axis_parts_of(reading.groups, mesh) or mesh
    graph, liveness = reading.graph, reading.liveness
    if _defers_gradients(program, mesh, calibration):
        liveness = defer_weight_gradients(graph, liveness)
    if (chip := mesh.topology.chip.name) in STORES_ROUNDED:
        softmaxes = store_rounded(liveness.softmaxes, STORES_ROUNDED[chip])
        liveness = dataclasses.replace(liveness, softmaxes=softmaxes)
    if mesh.topology.traits.gpu_kernels and mesh.num_devices > 1:
        liveness = defer_filter_gradients(graph, liveness)
    program = lowered_for(program, mesh.topology.traits.platform)
    own = dataclasses.replace(reading, liveness=liveness)
    return price(program, own, where, memory_limit, calibration, tables)


def _defers_gradients(program: Program, mesh: Mesh, calibration: Calibration | None) -> bool:
    """Return True if the chip's compiler defers weight gradients outside of loops until after the backward pass.

    It does for tpu7x with any flags, for v5p with synchronous sums of gradients, and for pipelines on v6e. Evidence:
    docs/compiler_behaviour.md, "Deferred gradient of the head".
    """
    chip = mesh.topology.chip.name
    if mesh.num_devices == 1 or chip not in ("v5p", "tpu7x"):
        return program.pipeline is not None and chip in LATE_IN_STAGES
    return chip == "tpu7x" or (calibration or load_calibration(mesh.topology.chip)).reduction_overlap == 0.0


def reprice(plan: Plan, program: Program, reading: AnalysedProgram) -> tuple[Model, NDArray[np.int64]]:
    """Return the model and the choices (one number for each node) of a stored plan.

    Prices use the calibration that the plan was made with. Raises `UserError` if the plan does not store choices that
    suit the model (an older or another version made it). Raises it also if the choices are not priced at the step time
    that the plan predicts, within a millionth.
    """
    model = model_of(plan, program, dataclasses.replace(reading, eager=plan.origin.eager))
    mesh = model.mesh
    stored = [int(word) if word.isdecimal() and len(word) < 10 else -1 for word in plan.choices.split()]
    choices = np.array(stored, dtype=np.int64)
    again = "plan it again with this version of autoshard."
    if len(stored) != len(model.nodes) or not all(
        0 <= c < len(n.states) for c, n in zip(stored, model.nodes, strict=True)
    ):
        raise UserError(f"the plan of {plan.program_name} does not hold the choices that explain it; {again}")
    step = evaluate(model, choices).step_time_s
    if mesh.topology.traits.shares_machine and "@" not in plan.topology:
        cores = mesh.topology.host_cores
        again = (
            f"it may have been made where there are not {cores} cores, as here; plan for {plan.topology}@{cores}, say."
        )
    if abs(step - plan.prediction.step_time_s) > 1e-6 * step:
        raise UserError(
            f"the plan of {plan.program_name} predicts {plan.prediction.step_time_s:.6g} s a step, but its choices are "
            f"priced at {step:.6g} s now; {again}"
        )
    return model, choices


def model_of(plan: Plan, program: Program, reading: AnalysedProgram) -> Model:
    """Return the model of a program on the mesh of a plan, with the calibration that the plan was made with."""
    mesh = make_mesh(Topology.parse(plan.topology), plan.mesh)
    figures = recorded_calibration(
        mesh.topology.chip.name, plan.provenance.get("learned"), plan.provenance.get("xla_flags")
    )
    return build_model(program, reading, mesh, plan.memory_limit_bytes, figures, staged=plan.origin.staged)


def plan_bills(program: Program, plans: Sequence[Plan]) -> list[Bill]:
    """Return the bill of one step of each plan of a program, in order; all plans must be for the backend of the first.
    Raises `UserError` as `reprice` does.
    """
    if not plans:
        return []
    reading = analyse_program(program, Topology.parse(plans[0].topology))
    return [bill_of(itemise(*reprice(plan, program, reading))) for plan in plans]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Inputs of a planning run that are the same for every mesh."""

    program: Program
    reading: AnalysedProgram
    asked: Asked
    """Constraints of the user, before they are applied to a mesh."""
    memory_limit: int
    """Bytes of one device that no plan may exceed."""
    seed: int
    """Seed of the solver on every mesh."""
    calibration: Calibration
    """Calibration from which all prices are computed."""
    tables: PathTables | None = None
    """Path tables shared with other programs that are priced with the same calibration."""
    stages: int = 0
    """Number of pipeline stages, 0 for none; each mesh then has an axis `stage` of this size, for the stages alone."""

    def priced(self, mesh: Mesh) -> Model:
        """Build the priced model of the program on a mesh, with an axis of stages if there are stages."""
        limit, staged = self.memory_limit, bool(self.stages)
        return build_model(self.program, self.reading, mesh, limit, self.calibration, self.tables, staged)

    def required(self, model: Model) -> Required:
        """Return the user's constraints, applied to a model. Raises `UserError` if its mesh cannot satisfy them."""
        return require(model, self.reading.groups, self.asked)


def planned_part(program: Program) -> Program:
    """Return the program without the callables, arguments and source that run it, most of which cannot be pickled;
    calling it raises `RuntimeError`.
    """
    return dataclasses.replace(
        program, fn=_stays_here, args=(), make_args=None, source=None, lowerings=None, eager=None, reduction=None
    )


def share(crew: WorkerCrew, program: Program, reading: AnalysedProgram) -> None:
    """Share with a crew of worker processes the objects that all prices refer to: the program's planned part and its
    analysis.
    """
    crew.share("program", program, planned_part(program))
    for name in ("graph", "structure", "liveness"):
        crew.share(name, getattr(reading, name))
    crew.share("reading", reading)


def _stays_here(*args: object) -> None:
    """Raise `RuntimeError`: this stands for the program's function in helpers."""
    raise RuntimeError("a helper cannot run the program")


def least_seconds(graph: OpGraph, topology: Topology, calibration: Calibration) -> float:
    """Return a lower bound on the predicted seconds of one step of any plan on the topology.

    Every matmul, convolution and kernel is divided among all devices and runs at the calibrated share of their peak.
    Ops in regions that the program splits by hand, ops without a sharding rule, and dots that only sum are left out.
    """
    seconds = 0.0
    for op in graph.ops:
        if not op.flops or op.rule is None or op.manual:
            continue
        if op.kind == "dot_general" and is_sum(op.rule):
            continue
        seconds += op.flops * graph.trips(op.loop) / topology.peak_flops(graph.multiplied_dtype(op))
    return seconds / (calibration.matmul_efficiency * topology.num_devices)
