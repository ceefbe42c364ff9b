"""What a program is, whatever the mesh; and its decisions on one."""

import dataclasses

from autoshard.cost import BACKENDS, Calibration, Mesh, Topology
from autoshard.graph import (
    Liveness,
    OpGraph,
    Structure,
    analyse,
    build_structure,
    find_softmaxes,
    kept_graph,
    made_late,
    read_graph,
    replace_names,
    rounded,
)
from autoshard.plan.model._axis_parts import axis_parts_of
from autoshard.plan.model._groups import Groups, find_groups, tensor_groups
from autoshard.plan.model._model import Model
from autoshard.plan.model._stage_axis import stage_axis
from autoshard.plan.price._path_tables import PathTables
from autoshard.plan.price._price import price
from autoshard.plan.record._plan import Plan
from autoshard.program import WEIGHTS, Lifted, Program, lift_constraints, lowered_for


LATE_IN_STAGES = frozenset({"v6e"})
"""Chips whose compiler was seen to make the gradient of the head after the backward pass of a pipeline every time: all
three that were compiled (`experiments/pipeline_fidelity.py`, libtpu 0.0.51). That for v5p did so in two of five."""


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
    lifted = plan.provenance.get("lifted_constraints") == Lifted.ALL
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
