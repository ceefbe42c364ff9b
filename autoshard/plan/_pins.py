"""Which intermediate values to pin, so that the partitioner does what was planned."""

from collections.abc import Sequence

from autoshard.graph import OpClass
from autoshard.plan._model import Model
from autoshard.plan._plan import Pin
from autoshard.plan._predict import spec_of, tensor_spec
from autoshard.plan._price import factor_states
from autoshard.plan._spec import Spec


def make_pins(model: Model, choices: Sequence[int]) -> tuple[Pin, ...]:
    """Pins at every place where a spec is decided rather than passed on.

    These are results of heavy ops and of ops between clusters, carried values of loops, and operands of heavy ops
    that are wanted in another spec than they are held in.
    """
    values: dict[int, Spec] = {}
    graph, structure = model.graph, model.structure

    def pin(tensor: int) -> None:
        if structure.cluster_of[tensor] >= 0:
            values[tensor] = tensor_spec(model, choices, tensor)

    for edge in structure.edges:
        if edge.op < 0:
            pin(edge.tensor)
        elif graph.ops[edge.op].op_class is not OpClass.HEAVY:
            pin(graph.ops[edge.op].results[edge.result])
        elif edge.operand < 0:
            pin(edge.tensor)
    for loop in graph.loops:
        for carry in loop.carries:
            pin(carry.body)
            pin(carry.update)
    pins = [
        Pin(*graph.tensors[t].value, spec=spec, name=graph.tensors[t].name)
        for t, spec in values.items()
        if graph.tensors[t].value[0] >= 0
    ]
    pins.extend(_operand_pins(model, choices))
    return tuple(sorted(pins, key=lambda p: (p.op, p.index, p.operand or (-1, -1))))


def _operand_pins(model: Model, choices: Sequence[int]) -> list[Pin]:
    pins = []
    for op_id, number in model.op_node.items():
        op = model.graph.ops[op_id]
        if op.rule is None:
            continue
        states = model.nodes[number].states
        for k, tensor in enumerate(op.operands):
            if model.structure.cluster_of[tensor] < 0:
                continue
            rank = len(model.graph.tensors[tensor].shape)
            wanted = spec_of(model, factor_states(states, op.rule.operands[k]), int(choices[number]), rank)
            if wanted != tensor_spec(model, choices, tensor):
                where = (op.number, op.operand_numbers[k])
                pins.append(Pin(*model.graph.tensors[tensor].value, wanted, where, model.graph.tensors[tensor].name))
    return pins

