"""A program analysed for planning, its decisions on a mesh, and a plan's choices priced again."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.base.workers import Crew
from autoshard.cost import BACKENDS, Bill, Calibration, Mesh, Topology, make_mesh, said_calibration
from autoshard.errors import UserError
from autoshard.graph import (
    Liveness,
    OpGraph,
    Structure,
    analyse,
    build_structure,
    find_softmaxes,
    is_sum,
    kept_graph,
    made_late,
    read_graph,
    replace_names,
    rounded,
)
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.price.prediction import bill_of
from autoshard.planning.price.pricing import price
from autoshard.planning.price.reshard_paths import PathTables
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.derived_axes import axis_parts_of, stage_axis
from autoshard.planning.space.dim_groups import Groups, find_groups, tensor_groups
from autoshard.planning.space.user_constraints import Asked, Required, require
from autoshard.program import WEIGHTS, Lifted, Program, lift_constraints, lowered_for


LATE_IN_STAGES = frozenset({"v6e"})
"""Chips whose compiler was seen to make the gradient of the head after the backward pass of a pipeline every time: all
three that were compiled (`experiments/fidelity/pipeline_fidelity.py`, libtpu 0.0.51). That for v5p did so in two of
five."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What a program is, whatever the mesh."""

    graph: OpGraph
    structure: Structure
    liveness: Liveness
    groups: Groups


def read_program(program: Program, backend: str, kept: bool = False) -> Reading:
    """Its ops, decisions, lifetimes (what reaches memory depends on the backend's compiler) and dim groups.

    With `kept` the ops come from the cache on disk where they are there.
    """
    read, traits = kept_graph if kept else read_graph, BACKENDS[backend]
    program = lowered_for(program, traits.platform)
    graph = replace_names(read(program.module), [a.name for a in program.arguments])
    if traits.rounds_operands:
        graph = rounded(graph)
    parameters = [t for t, a in zip(graph.arguments, program.arguments, strict=True) if a.role in WEIGHTS]
    ties = [
        (graph.results[a.result], t)
        for t, a in zip(graph.arguments, program.arguments, strict=True)
        if a.result is not None
    ]
    structure = build_structure(graph, parameters, ties, _words(program, graph))
    named = list(zip(graph.arguments, program.arguments, strict=True))
    undonated = [t for t, a in named if not a.donated]
    updates = {t: graph.results[a.result] for t, a in named if a.donated and a.result is not None}
    fused = traits.fuses_into_matmuls
    softmaxes = find_softmaxes(graph, structure) if fused else ()
    liveness = analyse(
        graph,
        undonated,
        updates,
        fused,
        softmaxes,
        narrows_stacks=traits.narrows_stacks,
        gpu_kernels=traits.gpu_kernels,
    )
    if traits.late_gradients:
        liveness = made_late(graph, liveness)
    return Reading(graph, structure, liveness, find_groups(program, graph, structure))


def as_planned(program: Program, plan: Plan) -> Program:
    """Return the program that a plan is for: lowered for its devices, without constraints that were lifted."""
    lifted = plan.origin.lifted == Lifted.ALL
    return lowered_for(lift_constraints(program) if lifted else program, Topology.parse(plan.topology).traits.platform)


def _words(program: Program, graph: OpGraph) -> list[tuple[int, int]]:
    """(tensor, dim) of the words that typed PRNG keys are made of: dims of the module that the program does not see."""
    sides = [*zip(program.arguments, graph.arguments, strict=True), *zip(program.results, graph.results, strict=True)]
    return [(t, dim) for value, t in sides for dim in range(len(value.shape), len(graph.tensors[t].shape))]


def batch_dims(program: Program) -> tuple[int, list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Examples in the batch, and which dims of every argument and of every result count them.

    No examples (0) where the program has no batch, or merges it with something else in an argument or a result.
    """
    reading = read_program(program, "cpu")
    groups, graph = reading.groups, reading.graph

    def dims(tensor: int) -> tuple[int, ...]:
        found = tensor_groups(reading.structure, groups.of_factor, tensor)
        return tuple(dim for dim, group in enumerate(found) if group == groups.batch)

    sides = [[dims(tensor) for tensor in tensors] for tensors in (graph.arguments, graph.results)]
    tensors = zip((*graph.arguments, *graph.results), (*sides[0], *sides[1]), strict=True)
    sizes = {graph.tensors[tensor].shape[dim] for tensor, own in tensors for dim in own}
    if groups.batch is None or len(sizes) != 1:
        return 0, [() for _ in graph.arguments], [() for _ in graph.results]
    return sizes.pop(), sides[0], sides[1]


def build_model(
    program: Program,
    reading: Reading,
    mesh: Mesh,
    memory_limit: int,
    calibration: Calibration | None = None,
    tables: PathTables | None = None,
    staged: bool = False,
) -> Model:
    """Every decision of a program on a mesh, priced; axes that are parts of another go apart where they may.

    `calibration`: by default that of the mesh's chip, with nothing learned. `tables`: those of other programs. With
    `staged` an axis `stage` stands for the stages of a pipeline alone.
    """
    where = (stage_axis(reading, mesh) if staged else None) or axis_parts_of(reading.groups, mesh) or mesh
    graph, structure, liveness = reading.graph, reading.structure, reading.liveness
    if program.pipeline is not None and mesh.topology.chip.name in LATE_IN_STAGES:
        liveness = made_late(graph, liveness)
    program = lowered_for(program, mesh.topology.traits.platform)
    return price(program, graph, structure, liveness, where, memory_limit, calibration, tables)


def price_again(plan: Plan, program: Program, reading: Reading) -> tuple[Model, NDArray[np.int64]]:
    """The plan's model and choices, with the figures that it was made with.

    Raises `UserError` for a plan that does not hold its choices (made before they were kept, or by another version),
    and for one that they do not price as it says.
    """
    mesh = make_mesh(Topology.parse(plan.topology), plan.mesh)
    figures = said_calibration(
        mesh.topology.chip.name, plan.provenance.get("learned"), plan.provenance.get("xla_flags")
    )
    model = build_model(program, reading, mesh, plan.memory_limit_bytes, figures, staged=plan.origin.staged)
    said = [int(word) if word.isdecimal() and len(word) < 10 else -1 for word in plan.choices.split()]
    choices = np.array(said, dtype=np.int64)
    again = "plan it again with this version of autoshard."
    if len(said) != len(model.nodes) or not all(0 <= c < len(n.states) for c, n in zip(said, model.nodes, strict=True)):
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


def plan_bills(program: Program, plans: Sequence[Plan]) -> list[Bill]:
    """What a step of each plan of one program does. Raises as `price_again` does."""
    if not plans:
        return []
    reading = read_program(program, Topology.parse(plans[0].topology).backend)
    return [bill_of(*price_again(plan, program, reading)) for plan in plans]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """The same for every mesh."""

    program: Program
    reading: Reading
    asked: Asked
    memory_limit: int
    """Bytes of one device that no plan may pass."""
    seed: int
    calibration: Calibration
    tables: PathTables | None = None
    """Tables of the paths of other programs, priced with the same figures."""
    stages: int = 0
    """How many stages a pipeline has whose meshes have an axis `stage` of as many devices, for stages alone."""

    def priced(self, mesh: Mesh) -> Model:
        """Its decisions on a mesh, with their prices."""
        limit, staged = self.memory_limit, bool(self.stages)
        return build_model(self.program, self.reading, mesh, limit, self.calibration, self.tables, staged)

    def required(self, model: Model) -> Required:
        """What is asked for on a mesh. Raises `UserError` if it cannot hold there."""
        return require(model, self.reading.groups, self.asked)


def share(crew: Crew, program: Program, reading: Reading) -> None:
    """With a crew, what all prices refer to. What runs the program cannot be sent, and is not needed to plan it."""
    sent = dataclasses.replace(program, fn=_stays_here, args=(), make_args=None, source=None, lowerings=None)
    crew.share("program", program, sent)
    for name in ("graph", "structure", "liveness"):
        crew.share(name, getattr(reading, name))
    crew.share("reading", reading)


def _stays_here(*args: object) -> None:
    raise RuntimeError("a helper cannot run the program")


def least_seconds(graph: OpGraph, topology: Topology, calibration: Calibration) -> float:
    """Seconds of one step below which no plan on the topology is priced.

    Every matmul, convolution and kernel is divided among all devices and runs at the calibrated share of their peak.
    What stands in regions that the program splits by hand is left out.
    """
    seconds = 0.0
    for op in graph.ops:
        if not op.flops or op.rule is None or op.manual:
            continue
        if op.kind == "dot_general" and is_sum(op.rule):
            continue
        dtype = (op.opaque.dtype if op.opaque else "") or graph.tensors[op.operands[0]].dtype
        seconds += op.flops * graph.trips(op.loop) / topology.peak_flops(dtype)
    return seconds / (calibration.matmul_efficiency * topology.num_devices)
