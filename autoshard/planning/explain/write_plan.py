"""Choices written as a plan: specs, predictions, words, warnings and provenance."""

import dataclasses
import importlib.metadata
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Mesh, fraction_for
from autoshard.graph import dtype_of
from autoshard.planning.explain.known_runs import COMPILED, KnownRun, time_error
from autoshard.planning.explain.memory_warnings import (
    REMAT_LIMIT,
    host_warning,
    memory_warning,
    relaid_lines,
    undonated_lines,
)
from autoshard.planning.explain.module_uses import activations, parameter_uses
from autoshard.planning.explain.plan_pins import make_calls, make_pins, make_regions
from autoshard.planning.explain.plan_words import axis_roles, describe
from autoshard.planning.explain.prediction_errors import find_unsure, unsure_lines
from autoshard.planning.explain.uneven_splits import find_uneven, uneven_lines
from autoshard.planning.mesh.portfolio import Contender
from autoshard.planning.price.evaluate import tensor_spec
from autoshard.planning.price.op_prices import planned_ops, price_ops
from autoshard.planning.price.prediction import predict
from autoshard.planning.price.replicated_work import (
    UnknownCall,
    call_lines,
    find_unruled,
    replicated_work_lines,
    unknown_calls,
    unruled_lines,
)
from autoshard.planning.price.step_ledger import Ledger, itemise
from autoshard.planning.price.step_timeline import make_timeline
from autoshard.planning.record.plan_parts import MeshTried, Prediction, TimeError, Unruled
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import Spec
from autoshard.planning.space.baselines import left_out
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups
from autoshard.planning.space.spec_constraints import broken_demands, mesh_text, program_constraint_lines
from autoshard.planning.stages.pipeline_ticks import pipeline_of_ticks
from autoshard.planning.xla.axis_assignments import States
from autoshard.program import Program, Role


@dataclasses.dataclass(frozen=True, slots=True)
class Writer:
    """Writer of the plans of one program."""

    program: Program
    groups: Groups
    """Dim groups of the program."""
    memory_limit: int
    """Memory limit of one device in bytes, under which the plans were chosen."""
    seed: int
    """Seed of the solver, for the provenance."""
    compared: Sequence[str]
    """Names of the baselines that the solver completed."""
    provenance: Mapping[str, Any]
    """Further entries in the provenance of every plan."""
    baselines: Mapping[str, Prediction] = dataclasses.field(default_factory=dict)
    """Predictions of the baselines, stored in every plan."""
    notes: tuple[str, ...] = ()
    """Warnings that every plan has after its own."""

    def write(self, each: Contender, meshes: tuple[MeshTried, ...] = ()) -> Plan:
        """Return a choice as a plan, with its bounds and the meshes that were tried for it.

        Prices the mesh again if the contender does not have the prices.
        """
        model, choices, step_s = each.model(), each.choices, each.outcome.step_time_s
        program, graph = self.program, model.graph
        ledger = itemise(model, choices)
        prices = price_ops(ledger)
        unruled, unsure = find_unruled(ledger, step_s), find_unsure(ledger, prices, step_s)
        arguments = {
            a.name: tensor_spec(model, choices, t).of_rank(len(a.shape))
            for a, t in zip(program.arguments, graph.arguments, strict=True)
        }
        timeline = make_timeline(ledger)
        origin = {"weightings": each.weightings, "bound_s": each.bound_s, **self.provenance}
        fraction = fraction_for(model.mesh.topology, each.outcome.peak_bytes)
        origin |= {} if fraction is None else {"memory_fraction": fraction}
        uneven, padded_flops = find_uneven(ledger, self.groups)
        padded = uneven_lines(uneven, step_s)
        origin |= {"padded": {"flops": padded_flops, "words": uneven[0].words}} if padded else {}
        return Plan(
            program_name=program.name,
            program_fingerprint=program.fingerprint,
            topology=model.mesh.topology.name,
            mesh=dict(model.mesh.axes),
            device_order=model.mesh.device_order,
            memory_limit_bytes=self.memory_limit,
            arguments=arguments,
            results=self._results(model, choices, arguments),
            pins=make_pins(model, choices),
            regions=make_regions(model, choices),
            prediction=predict(model, each.outcome, self.memory_limit),
            baselines=dict(self.baselines),
            objective=int(each.solution.cost),
            lower_bound=int(each.solution.lower_bound),
            solver_gap=float(each.solution.gap),
            plan_gap=max(0.0, 1.0 - each.bound_s / step_s) if step_s > 0 else 0.0,
            words=describe(model, self.groups, choices),
            axis_roles=axis_roles(model, self.groups, choices),
            warnings=(
                *unsure_lines(unsure, int(each.outcome.peak_bytes), self.memory_limit),
                *self._warnings(ledger, each, unruled, unknown_calls(ledger, prices), arguments),
                *padded,
                *self.notes,
            ),
            provenance=_provenance(model, self.seed, origin),
            shapes={a.name: tuple(a.shape) for a in program.arguments},
            dtypes={a.name: a.dtype for a in program.arguments},
            roles={a.name: str(a.role) for a in program.arguments},
            module_hash=graph.module_hash,
            timeline=timeline,
            pipeline=pipeline_of_ticks(program, graph, timeline),
            calls=make_calls(model, choices),
            unruled=unruled,
            unsure=unsure,
            time_error=None if unsure else self._time_error(model),
            choices=" ".join(str(int(c)) for c in choices),
            meshes=meshes,
            host=_on_host(model),
            donated=tuple(a.name for a in program.arguments if a.donated),
            ops=planned_ops(ledger, prices),
            uses=parameter_uses(model, choices),
            activations=activations(model, choices),
        )

    def _time_error(self, model: Model) -> TimeError | None:
        """Return the error of the predicted step in measured runs like it; None if none is known.

        Only training steps of decoders were measured, which count tokens.
        """
        program, place = self.program, model.mesh.topology
        if not program.training or not program.tokens:
            return None
        kind = "mixture" if "experts" in self.groups.names.values() else "dense"
        slices = place.slices if place.traits.torus else 1
        return time_error(KnownRun(place.chip.name, kind, program.tokens / place.num_devices, slices, COMPILED))

    def _results(self, model: Model, choices: NDArray[np.int64], arguments: Mapping[str, Spec]) -> dict[str, Spec]:
        """Return the specs of results by name: that of the argument that a result replaces in the next step, else its
        own.
        """
        program, specs = self.program, dict[str, Spec]()
        for r, tensor in zip(program.results, model.graph.results, strict=True):
            tied = program.arguments[r.argument] if r.argument is not None else None
            specs[r.name] = arguments[tied.name] if tied else tensor_spec(model, choices, tensor).of_rank(len(r.shape))
        return specs

    def _warnings(
        self,
        ledger: Ledger,
        each: Contender,
        unruled: tuple[Unruled, ...],
        unknown: Mapping[str, UnknownCall],
        arguments: Mapping[str, Spec],
    ) -> tuple[str, ...]:
        """Return the warnings of a plan, each once, those of the program first.

        - `ledger`: items of the plan's step.
        - `each`: the plan's choice.
        - `unruled`: ops without a sharding rule.
        - `unknown`: calls of unknown work.
        - `arguments`: planned specs of the arguments.

        The warning about state on the hosts is left out if the compiler flags already set the limit that it asks for.
        """
        model, choices, outcome = ledger.model, ledger.choices, each.outcome
        program, graph = self.program, model.graph
        lines = [*program.notes, *_batch_warning(program, model.mesh), *unruled_lines(unruled, unknown)]
        names = {a.name: t for a, t in zip(program.arguments, graph.arguments, strict=True)}
        names |= {r.name: t for r, t in zip(program.results, graph.results, strict=True) if r.name not in names}
        written = program.lowerings is not None and program.eager is None and program.reduction is None
        lines.extend(replicated_work_lines(ledger, self.groups, outcome.step_time_s, names, written))
        lines.extend(call_lines(model, unknown))
        for loop in graph.loops:
            if not loop.known:
                lines.append("a loop's number of trips cannot be read from the program: it is counted once.")
        for demand in broken_demands(graph, model.structure, model.mesh, lambda t: cluster_state(model, choices, t)):
            lines.append(
                f"{demand.why} excludes what the program asks for elsewhere of the same carried value: the compiler "
                "keeps both, but the way between them is not in the prediction."
            )
        lines.extend(left_out(model, self.groups, self.compared))
        lines.extend(memory_warning(model, outcome, self.memory_limit))
        lines.extend(undonated_lines(model, arguments, self.memory_limit))
        lines.extend(relaid_lines(model, arguments, self.memory_limit))
        if not any(REMAT_LIMIT in flag for flag in self.provenance.get("xla_flags", {}).get("flags", ())):
            lines.extend(host_warning(model, choices, outcome))
        return tuple(dict.fromkeys(lines))


class WhenAsked(Mapping[str, Plan]):
    """Plans by name, each written on first access, since most are never read."""

    def __init__(self, makers: Mapping[str, Callable[[], Plan]]) -> None:
        self._makers, self._made = makers, dict[str, Plan]()

    def __getitem__(self, name: str) -> Plan:
        """Return the plan of a name, written on first access; raise `KeyError` for an unknown name."""
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _batch_warning(program: Program, mesh: Mesh) -> list[str]:
    """Return a sentence if no mesh axis divides any dim of the batch, which is then whole on every device.

    State of a step that is no parameter counts too: serving one sequence splits its key-value cache. Return nothing for
    a program without a batch of more than one element, and for a mesh of one device.
    """
    batches = [a for a in program.arguments if a.role is Role.BATCH and max(a.shape, default=1) > 1]
    state = [a for a in program.arguments if a.role is Role.OTHER and a.result is not None]
    axes = [count for count in mesh.axes.values() if count > 1]
    sizes = [size for a in (*batches, *state) for size in a.shape if size > 1]
    if not batches or not axes or any(size % count == 0 for size in sizes for count in axes):
        return []
    return [
        f"no mesh axis ({mesh_text(mesh)}) divides a dim of the batch argument {batches[0].name} of shape "
        f"{list(batches[0].shape)}: it is whole on every device. A batch that is a multiple of {axes[0]} can be split."
    ]


def _on_host(model: Model) -> tuple[str, ...]:
    """Return the names of arguments and results in the hosts' memory, arguments first, each once."""
    program, graph, away = model.program, model.graph, model.liveness.hosted
    ends = zip((*program.arguments, *program.results), (*graph.arguments, *graph.results), strict=True)
    return tuple(dict.fromkeys(each.name for each, tensor in ends if tensor in away))


def cluster_state(model: Model, choices: NDArray[np.int64], tensor: int) -> States:
    """Return the chosen state of a tensor's cluster (shape [1, axes]); the tensor must have a cluster."""
    node = model.cluster_node[model.structure.cluster_of[tensor]]
    return model.nodes[node].states[int(choices[node])][None, :]


def _provenance(model: Model, seed: int, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance of a plan: source, versions, topology, seed, calibration, sizes of the model and `more`.

    Entries of `more` replace those before them. Source, lifted constraints, tokens, the dtype of products, state on
    the hosts and the program's own constraints have entries only if there are any.
    """
    versions = {}
    for package in ("autoshard", "jax", "jaxlib", "ortools", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "unknown"
    demands = program_constraint_lines(model.graph, model.program.arguments)
    return (
        ({"source": source} if (source := model.program.source) else {})
        | {
            "versions": versions,
            "topology": model.mesh.topology.name,
            "layout": model.mesh.describe(),
            "seed": seed,
            "calibration": model.compute.calibration.hash(),
            "nodes": len(model.nodes),
            "alternatives": int(np.sum([len(n.states) for n in model.nodes])),
            "edges": len(model.reshards),
        }
        | dict(more)
        | ({"lifted_constraints": str(lifted)} if (lifted := model.program.lifted) else {})
        | ({"tokens": tokens} if (tokens := model.program.tokens or _counted_tokens(model.program)) else {})
        | _compute_dtypes(model)
        | ({"on_host": on_host} if (on_host := model.program.on_host) != "none" else {})
        | ({"said_by_program": demands} if demands else {})
    )


def _compute_dtypes(model: Model) -> dict[str, str]:
    """Return the program's dtype of the operands of most matrix FLOPs, and the one that the compiler rounds them to.

    The latter is left out where nothing is rounded, and both for a step without products.
    """
    graph, flops = model.graph, defaultdict[tuple[str, str], float](float)
    for op in graph.ops:
        if op.flops and op.operands:
            operand = graph.tensors[op.operands[0]].dtype
            own = dtype_of(graph, op.operands[0])
            flops[own, operand] += op.flops * graph.trips(op.loop)
    if not flops:
        return {}
    own, operand = max(flops, key=lambda dtypes: flops[dtypes])
    return {"computes_in": own} | ({"multiplies_in": operand} if operand != own else {})


def _counted_tokens(program: Program) -> int | None:
    """Return the tokens of a program that does not state them: the elements of its largest batch argument.

    Only batches of integers in rows are tokens; images and the columns of a table are none.
    """
    batch = [each for each in program.arguments if each.role is Role.BATCH and len(each.shape) > 1]
    if not batch or not all(each.dtype.startswith(("int", "uint", "bool")) for each in batch):
        return None
    return max(math.prod(each.shape) for each in batch)
