"""Construction of an `OpGraph` from an inlined StableHLO module.

The module works on the objects that the room `mlir` returns, and never imports MLIR itself.
"""

import dataclasses
import math
from typing import Any

from autoshard import mlir
from autoshard.graph.extraction.graph_builder import GraphBuilder
from autoshard.graph.extraction.loops import BRANCHING, read_branches, read_while
from autoshard.graph.extraction.opaque_rules import COLLECTIVES, read_opaque, same_rule
from autoshard.graph.extraction.program_constraints import CONSTRAINTS, called, read_constraint, read_manual
from autoshard.graph.extraction.rolls import strided_dims
from autoshard.graph.extraction.shardy_rules import gathering_rule, sharding_rule, updating_rule
from autoshard.graph.extraction.windowed_rules import offsets, windowed_rule
from autoshard.graph.flops import known_call, op_flops
from autoshard.graph.memory.host_transfers import placement_kind
from autoshard.graph.memory.operand_rounding import ROUNDING
from autoshard.graph.op_classes import classify
from autoshard.graph.records import Constraint, Halo, Op, Opaque, OpClass, OpGraph


_GENERATED = frozenset({"constant", "iota", "partition_id"})
"""Kinds of ops that generate a value without operands."""
_OTHER_NAMES = {"dot": "dot_general"}
"""Kind of the general op by kind of its special case; HLO files have matrix products of two dims as a separate op."""
_ALIASES = frozenset({"optimization_barrier", "propagation_barrier"})
"""Kinds of ops whose results are their operands."""
_CUTS = {
    "slice": ("start_indices", "limit_indices", "strides"),
    "pad": ("edge_padding_low", "edge_padding_high", "interior_padding"),
    "concatenate": ("dimension",),
}
"""Attributes that define the elements of a slice, pad or concatenation."""


def read_graph(module: bytes) -> OpGraph:
    """Build the graph of a lowered module (StableHLO bytecode or text).

    Calls are inlined and sharding rules populated here, in a parsed copy. Raises `UserError` for modules that the graph
    cannot represent.
    """
    with mlir.new_context() as context:
        parsed = mlir.parse_module(module, context)
        mlir.inline_calls(parsed)
        reader = _ModuleReader()
        reader.hash = mlir.structure_hash(parsed)
        mlir.populate_rules(parsed)
        reader.meshes = mlir.meshes_of(parsed)
        reader.read_main(mlir.main_block(parsed), mlir.argument_shardings(parsed))
        return reader.graph()


def argument_origin(position: int) -> str:
    """Return the origin of a constraint that is the sharding of an argument of the main function."""
    return f"the sharding of argument {position}"


class _ModuleReader(GraphBuilder):
    """Graph builder that walks the blocks of a module in program order."""

    def read_main(self, block: Any, shardings: dict[int, Any]) -> None:
        """Read the main function, with the shardings of its arguments by position.

        A sharding that constrains nothing is left out.
        """
        for position, value in enumerate(block.arguments):
            self.arguments.append(self.new_tensor(value, -1, -1, (-1, position)))
            if position in shardings and not mlir.is_idle(shardings[position], self.meshes):
                sharding = mlir.stated_sharding(shardings[position], self.meshes)
                if not sharding.is_free:
                    self.constraints.append(Constraint(self.arguments[-1], sharding, argument_origin(position)))
        self.results = self.read_block(block, -1)

    def read_block(self, block: Any, loop: int) -> list[int]:
        """Read the ops of a block in a loop (-1 for none), and return the tensors that its terminator returns; empty
        without one.
        """
        for handle in block.operations:
            op = handle.operation
            self.number += 1
            kind = op.name.rpartition(".")[2]
            if kind == "return":
                return [self.ids[value] for value in op.operands]
            if mlir.is_idle_call(op):
                continue  # a kernel inside recomputation whose saved results make it unused
            if kind == "while":
                read_while(self, op, loop, self.read_block)
            elif kind in BRANCHING:
                read_branches(self, op, kind, loop, self.read_block)
            elif kind == "manual_computation":
                read_manual(self, op, loop, self.read_block)
            elif kind in _ALIASES or called(op, kind) == "LayoutConstraint":
                self.alias(op)
            elif kind in CONSTRAINTS or called(op, kind) == "Sharding":
                read_constraint(self, op, loop)
            else:
                self.read_op(op, kind, loop)
        return []

    def read_op(self, op: Any, kind: str, loop: int) -> None:
        """Append one op that is no loop, region, alias or constraint, with its rule, class, FLOPs and halos.

        An op with a rule whose operands are all generated is generated too (`FREE`).
        """
        number = self.number
        name = mlir.location_name(op.location)
        op_id = len(self.ops)
        kind = _OTHER_NAMES.get(kind, kind)
        operands = tuple(self.ids[value] for value in op.operands)
        results = tuple(
            self.new_tensor(value, op_id, loop, (number, index), name) for index, value in enumerate(op.results)
        )
        takes, gives = [self.tensors[t] for t in operands], [self.tensors[t] for t in results]
        opaque = read_opaque(op, takes, gives, name) if kind == "custom_call" else None
        attributes = op.attributes
        rule = sharding_rule(op, self.rules)
        if rule is not None and kind == "dynamic_update_slice":
            rule = updating_rule(rule)
        if rule is not None and kind == "reduce" and not mlir.is_combined_by_collectives(op):
            rule = gathering_rule(rule)
        groups: tuple[tuple[int, ...], ...] = ()
        if kind in COLLECTIVES:
            rule = same_rule([self.tensors[t].shape for t in operands], [self.tensors[t].shape for t in results])
            groups = mlir.device_groups(op)
        if opaque is not None:
            rule = opaque.rule
            placed = placement_kind(op)
            if placed is not None:
                kind, opaque = placed, None
        halos: tuple[Halo, ...] = ()
        if rule is not None and kind in mlir.WINDOWED:
            shapes = [[self.tensors[t] for t in side] for side in (operands, results)]
            # Halos need a manual region, which cannot be nested in one of the program's own. Padding values at the
            # edges must be known, as for a maximum or minimum.
            split = not self.manual and (kind != "select_and_scatter" or mlir.selects_extreme(op))
            rule, halos = windowed_rule(kind, rule, attributes, *shapes, split=split)
        passes = mlir.precision_passes(attributes) if kind in ROUNDING else 1
        grouped = kind == "convolution" and mlir.has_groups(attributes)
        figures = mlir.call_figures(op) if opaque is not None else None
        known = known_call(opaque.target, figures, takes, gives) if opaque and figures is not None else None
        if known is not None:
            kind, rule = known.kind, known.rule
            opaque = Opaque(opaque.target, rule, known.flops, known.traffic) if known.traffic and opaque else None
        if kind in _GENERATED or (operands and all(t in self.free for t in operands) and rule is not None):
            self.free.update(results)
            op_class = OpClass.FREE
            if kind == "constant" and self.tensors[results[0]].shape == ():
                self.note_constant(op, results[0])
        else:
            op_class = OpClass.HEAVY if opaque and opaque.on_shards else classify(kind, rule, takes, gives)
            op_class = OpClass.HEAVY if kind in COLLECTIVES else op_class
            if rule is None and any(self.tensors[t].elements > 1 for t in (*operands, *results)):
                self.without_rule.append(op_id)
        if kind in _CUTS and all(name in attributes for name in _CUTS[kind]):
            self.cuts[op_id] = tuple(tuple(mlir.numbers_of(attributes[name])) for name in _CUTS[kind])
        moved = offsets(kind, rule, self.cuts[op_id], halos) if op_id in self.cuts else ()
        dilation = 1
        if kind == "convolution" and "lhs_dilation" in attributes:
            dilation = math.prod(mlir.numbers_of(attributes["lhs_dilation"]))
        flops = opaque.flops if opaque else op_flops(kind, rule, takes, gives, dilation)
        numbers = tuple(range(len(operands)))
        steps = opaque.steps if opaque else 0
        flops, steps = (known.flops, known.steps) if known is not None else (flops, steps)
        self.ops.append(
            Op(
                op_id, number, kind, op_class, operands, results, rule, loop, flops, name, numbers, groups,
                self.manual, opaque=opaque, halos=halos, grouped=grouped, offsets=moved, passes=passes,
                line="" if op_class is OpClass.FREE else mlir.code_line(op),
                strided=strided_dims(kind, self.cuts.get(op_id, ())), steps=steps,
                triangular=known.triangular if known is not None else opaque.triangular if opaque is not None else (),
                barriers=tuple((k, self.barrier_of[v]) for k, v in enumerate(op.operands) if v in self.barrier_of),
                kept_share=self.note_known(op, kind, operands, results),
            )
        )  # fmt: skip


def replace_names(graph: OpGraph, names: list[str]) -> OpGraph:
    """Return the graph with argument tensors named as the program names them, in the order of the arguments."""
    tensors = list(graph.tensors)
    for tensor, name in zip(graph.arguments, names, strict=True):
        tensors[tensor] = dataclasses.replace(tensors[tensor], name=name)
    return dataclasses.replace(graph, tensors=tuple(tensors))
